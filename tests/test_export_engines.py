"""What engines read of an export's config.json: the values that the proof in Transformers cannot vouch for."""

import json
from math import isclose, log, sqrt

import pytest
import torch
from export_models import IDS, ROTARY, TINY, build
from test_export_gguf import build_with_tokenizer
from transformers import AutoModelForCausalLM

from gated_llama import GatedLlamaConfig
from gated_llama.convert.checkpoint import convert_checkpoint
from gated_llama.convert.engines import READERS
from gated_llama.convert.export import export_checkpoint
from gated_llama.convert.gguf_source import GgufFile
from gated_llama.convert.rotary import frequencies, has_own_amplitude, written_rotary
from gated_llama.convert.targets import EVERY_TARGET, FEATURES, TARGETS, features


YARN = {**ROTARY["yarn"], "factor": 4}

# What is added to YaRN at factor 4 -> the factor on cosine and sine in Transformers, whose default is 1.1386.
DEFAULT = 0.1 * log(4) + 1
AMPLITUDES = {
    "default": ({}, DEFAULT),
    "none": ({"attention_factor": 1.0}, 1.0),
    "larger": ({"attention_factor": 1.4, "beta_fast": 16, "beta_slow": 2}, 1.4),
    "smaller": ({"attention_factor": 0.8}, 0.8),
    "the default, named": ({"attention_factor": DEFAULT}, DEFAULT),
    "as DeepSeek": ({"mscale": 0.7, "mscale_all_dim": 1.3}, (0.07 * log(4) + 1) / (0.13 * log(4) + 1)),
    "mscale equal to mscale_all_dim": ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    "mscale alone, which the library ignores": ({"mscale": 0.5}, DEFAULT),
    "factor from the lengths": ({"factor": None}, DEFAULT),
}


def mscale(factor, coefficient=1.0):
    return 0.1 * coefficient * log(factor) + 1 if factor > 1 else 1.0


# The amplitude by the code that `engines.READERS` names.
def vllm(rope):
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(rope["factor"], rope["mscale"]) / mscale(rope["factor"], rope["mscale_all_dim"])
    return mscale(rope["factor"])


def sglang(rope):
    own = mscale(rope["factor"])
    if rope.get("mscale") is not None and rope.get("mscale_all_dim") is not None:
        own = mscale(rope["factor"], rope["mscale"]) / mscale(rope["factor"], rope["mscale_all_dim"])
    return own * rope.get("attn_factor", 1)


def mlx(rope):
    return mscale(rope["factor"], rope.get("mscale", 1)) / mscale(rope["factor"], rope.get("mscale_all_dim", 0))


def converter(rope):
    return mscale(rope["factor"]) * rope.get("attention_factor", rope.get("attn_factor", 1.0))


ENGINES = {"vLLM": vllm, "SGLang": sglang, "MLX-LM": mlx, "convert_hf_to_gguf": converter}


@pytest.mark.parametrize("case", AMPLITUDES)
@pytest.mark.parametrize("engine", ENGINES)
def test_amplitude_of_yarn_in_every_engine(engine, case):
    added, expected = AMPLITUDES[case]
    config = GatedLlamaConfig(**TINY, rope_parameters={**YARN, **added})
    assert isclose(frequencies(config)[1], expected, rel_tol=1e-12)
    found = ENGINES[engine](written_rotary(config))
    served = not READERS[engine].lacks.keys() & set(features(config))
    assert isclose(found, expected, rel_tol=1e-6) == served
    assert served == (engine != "convert_hf_to_gguf" or expected == DEFAULT)


@pytest.mark.parametrize("case", AMPLITUDES)
def test_what_is_written_is_the_same_to_transformers(case):
    config = GatedLlamaConfig(**TINY, rope_parameters={**YARN, **AMPLITUDES[case][0]})
    again = GatedLlamaConfig(**TINY, rope_parameters=written_rotary(config))
    (before, amplitude), (after, written) = frequencies(config), frequencies(again)
    assert torch.equal(before, after)
    assert isclose(amplitude, written, rel_tol=1e-12)
    assert written_rotary(again) == written_rotary(config)


ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10000, "factor": 4},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000, "factor": 2},
    "llama3": {**ROTARY["llama3"], "factor": 8},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 50000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "factor": 4,
        "attention_factor": 1.3,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"rope_type": "proportional", "rope_theta": 50000.0, "factor": 2},
    "default": {"rope_type": "default", "rope_theta": 50000},
    "exact borders": {**YARN, "truncate": False},
    "null for exact borders": {**YARN, "truncate": None},
}


@pytest.mark.parametrize("case", ROPES)
def test_nothing_is_written_that_only_engines_read(case):
    """Integers and nulls are other things to some engines."""
    config = GatedLlamaConfig(**TINY, rope_parameters=dict(ROPES[case]))
    written = written_rotary(config)
    assert None not in written.values()
    integers = {name for name, value in written.items() if type(value) is int}
    assert integers <= {"original_max_position_embeddings"}
    again = GatedLlamaConfig(**TINY, rope_parameters=dict(written))
    assert torch.equal(frequencies(config)[0], frequencies(again)[0])
    assert frequencies(config)[1] == frequencies(again)[1]


def test_a_type_that_a_newer_library_brings_is_refused(monkeypatch):
    config = GatedLlamaConfig(**TINY, rope_parameters=dict(ROTARY["default"]))
    monkeypatch.setitem(config.rope_parameters, "rope_type", "spiral")
    with pytest.raises(ValueError, match="rope_type='spiral' cannot be exported; known are default, dynamic, linear"):
        written_rotary(config)


ALL = {"Transformers", "vLLM", "SGLang", "llama.cpp", "MLX-LM"}
OWN = {**YARN, "attention_factor": 1.0}
SERVED = {
    "own amplitude": ("llama", {"rope_parameters": OWN}, ALL - {"llama.cpp"}),
    "own amplitude in Qwen3": ("qwen3", {"rope_parameters": OWN, "qk_norm": True}, ALL - {"llama.cpp"}),
    "own amplitude in afmoe": ("afmoe", {"rope_parameters": OWN}, ALL - {"llama.cpp"}),
    "own amplitude in Qwen3.5": ("qwen3_5_text", {"rope_parameters": OWN}, {"Transformers", "vLLM", "SGLang"}),
    "own amplitude in Step-3.5": ("step3p5", {"rope_parameters": OWN}, {"vLLM", "SGLang", "MLX-LM"}),
    "exact borders": ("llama", {"rope_parameters": ROPES["exact borders"]}, {"Transformers", "vLLM", "SGLang"}),
    "exact borders in afmoe": (
        "afmoe",
        {"rope_parameters": ROPES["exact borders"]},
        {"Transformers", "vLLM", "SGLang"},
    ),
    "unstretched": (
        "llama",
        {"rope_parameters": {**YARN, "factor": 1.0, "attention_factor": 1.2}},
        {"Transformers"},  # its context is longer than 64 positions, too
    ),
    "a context beyond YaRN's": (
        "llama",
        {"rope_parameters": dict(YARN), "max_position_embeddings": 257},
        ALL - {"vLLM"},
    ),
    "llama3": ("llama", {"rope_parameters": ROPES["llama3"]}, ALL),
    "llama3 in Qwen3": ("qwen3", {"rope_parameters": ROPES["llama3"], "qk_norm": True}, ALL - {"llama.cpp"}),
    "dynamic": ("llama", {"rope_parameters": ROPES["dynamic"]}, {"Transformers", "MLX-LM"}),
    "longrope": ("llama", {"rope_parameters": ROPES["longrope"]}, {"Transformers"}),
    "proportional": ("llama", {"rope_parameters": ROPES["proportional"]}, {"Transformers"}),
    "another activation": ("llama", {"hidden_act": "gelu"}, {"Transformers"}),
    "the other name of SiLU": ("llama", {"hidden_act": "swish"}, ALL),
    "bias of the MLP": ("llama", {"mlp_bias": True}, ALL - {"SGLang"}),
    "windows": ("qwen3", {"sliding_window": 20, "qk_norm": True}, {"Transformers", "vLLM"}),
    "windows in some layers": (
        "qwen3",
        {"sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"], "qk_norm": True},
        {"Transformers"},
    ),
    "windows in Step-3.5": ("step3p5", {"sliding_window": 20}, {"vLLM", "MLX-LM"}),
}


@pytest.mark.parametrize("case", SERVED)
def test_engines_that_compute_something_else_are_not_named(case, tmp_path):
    target, fields, engines = SERVED[case]
    build(tmp_path / "source", zero_gates=target in ("llama", "qwen3"), **fields)
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target=target)
    assert {service.partition(" (")[0] for service in report.served_by} == engines
    others = {service.engine for service in TARGETS[target].services} - engines
    card = (tmp_path / "out" / "README.md").read_text()
    served = card.partition("## Served by")[2].partition("## ")[0]
    for engine in others:
        assert any(note.startswith(f"{engine} does not serve this export (") for note in report.notes)
        assert f"- {engine}" not in served
    for engine in engines & ENGINES.keys():
        assert READERS[engine].version in served


def test_only_what_an_engine_lacks_is_in_a_table():
    named = {name for reader in READERS.values() for name in reader.lacks}
    assert named <= set(FEATURES)
    assert all(reader.version and reader.files for reader in READERS.values())
    readers = {service.reader or service.engine for target in EVERY_TARGET for service in target.services}
    assert readers == READERS.keys()


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_the_other_name_of_silu_is_written_as_engines_know_it(tmp_path):
    build(tmp_path / "source", hidden_act="swish")
    for target in ("qwen3_5_text", "afmoe", "step3p5"):
        export_checkpoint(tmp_path / "source", tmp_path / target, target=target)
        assert config_of(tmp_path / target)["hidden_act"] == "silu"


def test_the_converter_of_llama_cpp_finds_the_length_of_llama3(tmp_path):
    """It looks for it outside the rotary parameters, and takes 8192 without it."""
    source = build(tmp_path / "source", zero_gates=True, rope_parameters=dict(ROPES["llama3"]))
    export_checkpoint(tmp_path / "source", tmp_path / "out", target="llama")
    assert config_of(tmp_path / "out")["original_max_position_embeddings"] == 64
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(source(IDS).logits, exported(IDS).logits)
    convert_checkpoint(tmp_path / "out", tmp_path / "again")
    assert config_of(tmp_path / "again")["rope_parameters"] == config_of(tmp_path / "out")["rope_parameters"]


def test_step3p5_has_the_lists_of_the_released_model(tmp_path):
    build(tmp_path / "source", rope_parameters=dict(YARN))
    export_checkpoint(tmp_path / "source", tmp_path / "out", target="step3p5")
    config = config_of(tmp_path / "out")
    assert config["rope_theta"] == [50000.0] * 3
    assert config["yarn_only_types"] == ["full_attention"]
    assert config["swiglu_limits"] == config["swiglu_limits_shared"] == [0.0] * 3


# The ends of a text


@pytest.mark.parametrize("target", ["qwen3_5_text", "qwen3_next", "afmoe", "step3p5", "llama", "paper"])
@pytest.mark.parametrize("ids", [None, 7, [7, 9]])
def test_texts_end_where_the_source_ends_them(target, ids, tmp_path):
    build(tmp_path / "source", zero_gates=target == "llama", eos_token_id=ids)
    (tmp_path / "source" / "generation_config.json").unlink(missing_ok=True)
    export_checkpoint(tmp_path / "source", tmp_path / "out", target=target)
    config = config_of(tmp_path / "out")
    assert (config["eos_token_id"], config["bos_token_id"]) == (ids, None)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()).get("eos_token_id") == ids
    if target in ("llama", "afmoe", "qwen3_5_text"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == ids


ENDS = {
    "one": (0, {"eos": 0}, False),
    "another than the tokenizer's": (50, {"eos": 0, "eot": 50}, False),
    "three": ([50, 0, 61], {"eos": 0, "eot": 50, "eom": 61}, False),
    "four": ([0, 50, 61, 70], {"eos": 0, "eot": 50, "eom": 61}, True),
}


@pytest.mark.parametrize("case", ENDS)
@pytest.mark.parametrize("place", ["config.json", "generation_config.json"])
def test_ends_of_a_text_in_a_gguf_file(case, place, tmp_path):
    ids, expected, noted = ENDS[case]
    build_with_tokenizer(tmp_path / "source", eos_token_id=ids if place == "config.json" else 80)
    path = tmp_path / "source" / "generation_config.json"
    path.unlink(missing_ok=True)
    if place == "generation_config.json":
        path.write_text(json.dumps({"eos_token_id": ids}))
    report = export_checkpoint(tmp_path / "source", tmp_path / "out.gguf", target="gguf", verify=False)
    metadata = GgufFile(tmp_path / "out.gguf").metadata
    found = {kind: metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")}
    assert {kind: index for kind, index in found.items() if index is not None} == expected
    assert any("no place for [70]" in note for note in report.notes) == noted


def test_a_bias_that_transformers_reports_as_missing_is_announced(tmp_path):
    build(tmp_path / "source", qkv_bias=True)
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target="qwen3_5_text")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert info["missing_keys"] == {f"model.layers.{index}.self_attn.o_proj.bias" for index in range(2)}
    assert not any(layer.self_attn.o_proj.bias.any() for layer in model.model.layers)
    assert any("reports it as MISSING" in note for note in report.notes)
    assert "reports it as MISSING" in (tmp_path / "out" / "README.md").read_text()
    build(tmp_path / "plain")
    report = export_checkpoint(tmp_path / "plain", tmp_path / "other", target="qwen3_5_text")
    assert not any("MISSING" in note for note in report.notes)


def test_longrope_amplitude_is_not_yarns():
    assert isclose(frequencies(GatedLlamaConfig(**TINY, rope_parameters=dict(ROPES["longrope"])))[1], 1.3)
    plain = {**ROPES["longrope"], "attention_factor": None}
    config = GatedLlamaConfig(**TINY, rope_parameters=plain)
    assert isclose(frequencies(config)[1], sqrt(1 + log(4) / log(64)))
    assert not has_own_amplitude(config)
