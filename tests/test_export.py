"""Exports compute what their source computes, in the library's own classes; what cannot be exported is refused."""

import itertools
import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from gated_llama import GatedLlamaConfig, GatedLlamaForCausalLM
from gated_llama.convert import export as export_module
from gated_llama.convert import layouts, rewriting, target_configs
from gated_llama.convert.checkpoint import convert_checkpoint
from gated_llama.convert.export import export_checkpoint
from gated_llama.convert.parity import load_step3p5
from gated_llama.convert.rewriting import NEUTRAL_SCALE, gain_factors, neutral_gain, storable_eps


TINY = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,  # attention matters
    "gate_position": "sdpa_output",
    "gate_granularity": "headwise",
}
MODELS = {"qwen3": {"qk_norm": True}, "llama": {}, "qwen2": {"qkv_bias": True}}
ROTARY = {
    "default": {"rope_type": "default", "rope_theta": 50000.0},
    "linear": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 50000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
QWEN = ("qwen3_5_text", "qwen3_next")
GATED_TARGETS = (*QWEN, "afmoe", "step3p5", "paper")

# Rounding of float32 through two layers; measured 8e-6 at worst over this file.
FLOAT32 = 2e-5


def build(folder, *, zero_gates=False, dtype=torch.float32, **fields):
    """A saved model with random norms, biases and gates, in eval mode."""
    torch.manual_seed(0)
    fields.setdefault("rope_parameters", dict(ROTARY["default"]))
    model = GatedLlamaForCausalLM(GatedLlamaConfig(**{**TINY, **fields})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif ".g_proj." in name:
                parameter.normal_(std=0.5)
            if ".g_proj." in name and zero_gates:
                parameter.zero_()
    model.to(dtype).save_pretrained(folder)
    return model


def targets_for(model, granularity):
    """The targets that are exact for these models."""
    headwise = () if granularity == "elementwise" else ("step3p5",)
    return (*QWEN, *(() if model == "qwen2" else ("afmoe",)), *headwise)


def load(folder, target):
    return load_step3p5(folder, torch.float32) if target == "step3p5" else AutoModelForCausalLM.from_pretrained(folder)


@torch.no_grad()
def difference(a, b, ids):
    return (a(input_ids=ids).logits - b(input_ids=ids).logits).abs().max().item()


IDS = torch.randint(TINY["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(1))

GRID = list(itertools.product(MODELS, ("elementwise", "headwise"), (False, True), ROTARY))


@pytest.mark.parametrize(("model", "granularity", "tied", "rotary"), GRID)
def test_export_is_exact(model, granularity, tied, rotary, tmp_path):
    source = build(
        tmp_path / "source",
        gate_granularity=granularity,
        tie_word_embeddings=tied,
        rope_parameters=dict(ROTARY[rotary]),
        **MODELS[model],
    )
    for target in targets_for(model, granularity):
        export_checkpoint(tmp_path / "source", tmp_path / target, target=target, verify=False)
        exported = load(tmp_path / target, target).eval()
        assert difference(source, exported, IDS) <= FLOAT32, target
        shutil.rmtree(tmp_path / target)


@pytest.mark.parametrize("target", ["qwen3_5_text", "qwen3_next", "afmoe"])
def test_cached_decoding_is_equal(target, tmp_path):
    source = build(tmp_path / "source", gate_granularity="elementwise")
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target=target)
    assert report.parity.max_abs_difference <= FLOAT32
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    arguments = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(source.generate(IDS, **arguments), exported.generate(IDS, **arguments))


FEATURES = {
    "layers without a gate": ({"gate_layers": [1]}, GATED_TARGETS),
    "gate bias": ({"gate_bias": True}, (*QWEN, "paper")),
    "gate bias among others": ({"gate_bias": True, "qkv_bias": True, "gate_granularity": "elementwise"}, QWEN),
    "partial rotary": ({"rope_parameters": {**ROTARY["default"], "partial_rotary_factor": 0.5}}, QWEN),
    "windows": ({"sliding_window": 20}, ("afmoe", "step3p5")),
    "windows in some layers": (
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
        ("step3p5",),
    ),
    "windows and scaled rotary": ({"sliding_window": 20, "rope_parameters": dict(ROTARY["yarn"])}, ("afmoe",)),
    "one key/value head": ({"num_key_value_heads": 1}, GATED_TARGETS),
    "as many key/value heads": ({"num_key_value_heads": 4}, GATED_TARGETS),
    "all biases": ({"gate_bias": True, "qkv_bias": True, "o_bias": True}, ("paper",)),
    "only the bias of o_proj": ({"o_bias": True}, ("paper",)),
    "gate in float32": ({"gate_in_fp32": True}, GATED_TARGETS),
}


@pytest.mark.parametrize(
    ("feature", "target"), [(feature, target) for feature, (_, targets) in FEATURES.items() for target in targets]
)
def test_features_are_exact(feature, target, tmp_path):
    build(tmp_path / "source", **FEATURES[feature][0])
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target=target)
    assert report.parity.max_abs_difference <= FLOAT32


REFUSALS = {
    "value gate": ({"gate_position": "value"}, "qwen3_5_text", "gate_position='value'"),
    "additive gate": ({"gate_operation": "add"}, "qwen3_5_text", "gate_operation='add'"),
    "other score": ({"gate_activation": "ns_sigmoid"}, "afmoe", "gate_activation='ns_sigmoid'"),
    "constant gate": ({"gate_input": "constant"}, "paper", "gate_input='constant'"),
    "shared score": ({"gate_head_shared": True}, "step3p5", "gate_head_shared=True"),
    "normed output": ({"sdpa_output_norm": True}, "qwen3_next", "sdpa_output_norm=True"),
    "no gate": ({"gate_position": None}, "qwen3_5_text", "no gate"),
    "bias of o_proj": ({"o_bias": True}, "qwen3_5_text", "o_proj bias"),
    "bias of the MLP": ({"mlp_bias": True}, "paper", "MLP bias"),
    "bias and afmoe": ({"qkv_bias": True}, "afmoe", "q/k/v bias"),
    "gate bias and step3p5": ({"gate_bias": True}, "step3p5", "gate bias"),
    "elementwise and step3p5": ({"gate_granularity": "elementwise"}, "step3p5", "one score per head"),
    "windows and qwen3_5_text": ({"sliding_window": 20}, "qwen3_5_text", "sliding windows"),
    "scaled windows and step3p5": (
        {"sliding_window": 20, "rope_parameters": dict(ROTARY["linear"])},
        "step3p5",
        "disagree",
    ),
    "mixed windows and afmoe": (
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
        "afmoe",
        "sliding windows in some layers",
    ),
    "dynamic rotary": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 50000.0, "factor": 2.0}},
        "qwen3_5_text",
        "rotary of another type",
    ),
    "another activation": ({"hidden_act": "gelu"}, "afmoe", "SiLU"),
    "partial rotary and afmoe": (
        {"rope_parameters": {**ROTARY["default"], "partial_rotary_factor": 0.5}},
        "afmoe",
        "partial rotary",
    ),
    "gates that are not zero": ({}, "llama", "model.layers.0.self_attn.g_proj.weight is not zero"),
    "QK-norm and llama": ({"qk_norm": True}, "llama", "use target qwen3"),
    "no QK-norm and qwen3": ({}, "qwen3", "use target llama"),
    "tiny eps": ({"rms_norm_eps": 1e-12}, "qwen3_5_text", "rms_norm_eps=1e-12"),
    "unknown target": ({}, "gpt2", "target='gpt2' is unknown; choose one of qwen3_5_text"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_a_target_lacks_is_refused(case, tmp_path):
    fields, target, message = REFUSALS[case]
    build(tmp_path / "source", **fields)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target=target)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("target", [*QWEN, "afmoe", "step3p5"])
def test_float16_and_neutral_norms(target, tmp_path):
    build(tmp_path / "source")
    with pytest.raises(ValueError, match=r"2\^-30, which float16 cannot hold: use dtype='bfloat16'"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target=target, dtype="float16")
    build(tmp_path / "normed", qk_norm=True)
    if target != "afmoe":
        report = export_checkpoint(tmp_path / "normed", tmp_path / "out", target=target, dtype="float16")
        assert report.never_quantise == []


def test_zero_biases_are_left_out(tmp_path):
    model = build(tmp_path / "source", qkv_bias=True, o_bias=True, gate_bias=True, mlp_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    model.save_pretrained(tmp_path / "source")
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target="afmoe")
    assert report.parity.max_abs_difference <= FLOAT32
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if name.endswith("bias")]


# bfloat16: parity is measured in float32 between models of the same rounded weights.


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("model", "target"), list(itertools.product(MODELS, GATED_TARGETS)))
def test_bfloat16(model, target, tied, tmp_path):
    if (model, target) == ("qwen2", "afmoe"):
        pytest.skip("refused: afmoe has no biases")
    build(tmp_path / "source", tie_word_embeddings=tied, dtype=torch.bfloat16, **MODELS[model])
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target=target)
    assert report.dtype == "bfloat16"
    # Gains are stored exactly but for q_norm and k_norm, which no other weight can take over, and the norm before a
    # tied head: there w - 1 is rounded at 2^-9.
    exact = target in ("afmoe", "paper") or (model != "qwen3" and (target == "step3p5" or not tied))
    limit = FLOAT32 if exact else 1e-2
    assert report.parity.max_abs_difference <= limit
    assert report.parity.kl <= 1e-5


def test_moving_gains_is_what_makes_bfloat16_exact(tmp_path, monkeypatch):
    model = build(tmp_path / "source", dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(0.2)  # as in SmolLM2, where most gains are below 0.5
    model.save_pretrained(tmp_path / "source")
    moved = export_checkpoint(tmp_path / "source", tmp_path / "moved", target="qwen3_5_text").parity
    monkeypatch.setattr(rewriting, "gain_factors", torch.ones_like)
    kept = export_checkpoint(tmp_path / "source", tmp_path / "kept", target="qwen3_5_text").parity
    assert moved.max_abs_difference < FLOAT32 < 1e-3 < kept.max_abs_difference


def test_gain_factors_move_powers_of_two():
    gains = torch.tensor([0.03, -0.4, 0.5, 0.99, 1.0, -7.3, 0.0, 255.0]).bfloat16().float()
    moved = gains * gain_factors(gains)
    assert ((moved >= 0.5) & (moved < 1))[gains != 0].all()
    assert torch.equal(moved / gain_factors(gains), gains)
    assert torch.equal((moved - 1).bfloat16().float() + 1, moved)


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("eps", [1e-5, 1e-6, 3.7e-6])
def test_neutral_gains_are_stored_exactly(eps, zero_centred):
    storable = storable_eps(eps, zero_centred)
    assert math.isclose(storable, eps, rel_tol=0.008)
    gain = neutral_gain(storable)
    assert math.isclose((gain * NEUTRAL_SCALE) ** 2, storable, rel_tol=1e-12)
    shift = 1.0 if zero_centred else 0.0
    stored = torch.tensor(gain, dtype=torch.float64) - shift
    assert math.isclose(stored.bfloat16().item() + shift, gain, rel_tol=1e-12)


# What a mistake in an exporter would do: each must be caught by the comparison, and leave nothing behind.

MISTAKES = {
    "halves instead of heads": lambda patch: patch.setitem(layouts.LAYOUTS, "per_head", layouts.LAYOUTS["halves"]),
    "groups instead of heads": lambda patch: patch.setitem(
        layouts.LAYOUTS, "per_head", layouts.LAYOUTS["per_kv_group"]
    ),
    "norms not shifted": lambda patch: patch.setattr(rewriting, "norm_to_zero_centred", lambda weight: weight),
    "a quarter of rotary": lambda patch: patch.setattr(target_configs, "rotary_share", lambda config: 0.25),
    "another theta": lambda patch: patch.setattr(
        target_configs,
        "_rotary",
        lambda config, **rest: {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "gain not moved back": lambda patch: patch.setattr(rewriting, "NORM_READERS", {"input_layernorm.weight": ()}),
    "projection not scaled": lambda patch: patch.setattr(
        rewriting, "PROJECTIONS", {**rewriting.PROJECTIONS, "q": "_"}
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_fails_the_comparison(mistake, tmp_path, monkeypatch):
    build(tmp_path / "source", gate_granularity="elementwise", dtype=torch.bfloat16)
    monkeypatch.setattr(Qwen3_5ForCausalLM, "_keys_to_ignore_on_load_unexpected", [])
    MISTAKES[mistake](monkeypatch)
    with pytest.raises(ValueError, match="does not compute what its source computes"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="qwen3_5_text")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    build(tmp_path / "source")

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(export_module, "compare", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(tmp_path / "source", tmp_path / "new" / "out", target="afmoe")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# Un-gating


@pytest.mark.parametrize(
    ("target", "fields"),
    [
        ("qwen3", {"qk_norm": True}),
        ("qwen3", {"qk_norm": True, "qkv_bias": True, "o_bias": True}),
        ("qwen3", {"qk_norm": True, "sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"]}),
        ("llama", {}),
        ("llama", {"qkv_bias": True}),
        ("llama", {"o_bias": True, "mlp_bias": True}),
        ("llama", {"gate_layers": [0]}),
        ("llama", {"gate_bias": True, "gate_granularity": "elementwise"}),
        ("llama", {"gate_position": None}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 50000.0, "factor": 2.0}}),
    ],
)
def test_zero_gates_fold_away_bitwise(target, fields, tmp_path):
    source = build(tmp_path / "source", zero_gates=True, **fields)
    export_checkpoint(tmp_path / "source", tmp_path / "out", target=target)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert exported.config.model_type == target
    assert torch.equal(source(IDS).logits, exported(IDS).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_ungating_restores_the_source_of_a_conversion(dtype, granularity, tmp_path):
    build(tmp_path / "gated", zero_gates=True, dtype=dtype)
    export_checkpoint(tmp_path / "gated", tmp_path / "plain", target="llama")
    convert_checkpoint(tmp_path / "plain", tmp_path / "retrofit", granularity=granularity)
    report = export_checkpoint(tmp_path / "retrofit", tmp_path / "again", target="llama")
    assert "bit for bit" in report.notes[0]
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


# The paper release's format


@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_paper_round_trip_is_bitwise(granularity, heads, biased, tmp_path):
    fields = dict.fromkeys(("gate_bias", "qkv_bias", "o_bias"), biased)
    build(tmp_path / "a", gate_granularity=granularity, num_key_value_heads=heads, qk_norm=heads != 2, **fields)
    export_checkpoint(tmp_path / "a", tmp_path / "paper", target="paper")
    raw = json.loads((tmp_path / "paper" / "config.json").read_text())
    assert raw[f"{granularity}_attn_output_gate"] is True
    convert_checkpoint(tmp_path / "paper", tmp_path / "b")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("target", "model"), [("qwen3_5_text", "qwen3"), ("qwen3_next", "qwen3")])
def test_reimport_gives_the_same_logits(target, model, tmp_path):
    source = build(tmp_path / "a", **MODELS[model])
    export_checkpoint(tmp_path / "a", tmp_path / "out", target=target)
    convert_checkpoint(tmp_path / "out", tmp_path / "b")
    again = GatedLlamaForCausalLM.from_pretrained(tmp_path / "b").eval()
    assert difference(source, again, IDS) <= FLOAT32


# Files and bad input


def test_what_is_written(tmp_path):
    build(tmp_path / "source")
    seen = []
    report = export_checkpoint(
        tmp_path / "source",
        tmp_path / "out",
        target="qwen3_5_text",
        max_shard_size=40_000,
        progress=lambda *state: seen.append(state),
    )
    assert report.shards > 1
    assert report.tensors_written == len(seen)
    assert seen[-1][0] == seen[-1][1] == report.bytes_written
    assert report.never_quantise == ["self_attn.q_proj", "self_attn.k_proj"]
    assert report.tokenizer_class is None
    assert any("no tokenizer" in note for note in report.notes)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Never quantise `self_attn.q_proj`, `self_attn.k_proj`" in card
    assert not list((tmp_path / "out").glob("*.py"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["partial_rotary_factor"] == config["rope_parameters"]["partial_rotary_factor"] == 1
    assert config["rope_parameters"]["mrope_section"] == [3, 3, 2]
    assert config["attention_bias"] == config["qkv_bias"] == False  # noqa: E712


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        export_checkpoint(tmp_path / "nothing here", tmp_path / "out", target="llama")
    build(tmp_path / "source")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match="not empty"):
        export_checkpoint(tmp_path / "source", tmp_path / "full", target="llama")
    with pytest.raises(ValueError, match="dtype='int8' is not supported"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="afmoe", dtype="int8")
    export_checkpoint(tmp_path / "source", tmp_path / "exported", target="afmoe")
    with pytest.raises(ValueError, match="of type 'afmoe': exports start from a gated_llama checkpoint"):
        export_checkpoint(tmp_path / "exported", tmp_path / "out", target="llama")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    name = "model.layers.1.self_attn.g_proj.weight"
    save_file(tensors | {name: tensors[name] * math.nan}, tmp_path / "source" / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name}' of the source holds values that are not finite"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="afmoe")
    del tensors[name]
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name}' as None, and config.json calls for"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="afmoe")
    assert not (tmp_path / "out").exists()
