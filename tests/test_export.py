"""Exports compute what their source computes, in the library's own classes; a mistake in one does not pass."""

import itertools
import json
import math
import re
import shutil

import pytest
import torch
from export_models import DATA, FLOAT32, GATED_TARGETS, IDS, MODELS, QWEN, ROTARY, build
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gated_llama import GatedLlamaForCausalLM
from gated_llama.convert import export, layouts, parity, rewriting, target_configs
from gated_llama.convert.checkpoint import convert_checkpoint
from gated_llama.convert.export import export_checkpoint
from gated_llama.convert.loading import Loadable
from gated_llama.convert.parity import load_step3p5
from gated_llama.convert.rewriting import NEUTRAL_SCALE, gain_factors, neutral_gain, storable_eps
from gated_llama.convert.tokenizer import PROBES


def targets_for(model, granularity):
    """The targets that are exact for these models."""
    headwise = () if granularity == "elementwise" else ("step3p5",)
    return (*QWEN, *(() if model == "qwen2" else ("afmoe",)), *headwise)


def load(folder, target):
    return load_step3p5(folder, torch.float32) if target == "step3p5" else AutoModelForCausalLM.from_pretrained(folder)


@torch.no_grad()
def difference(a, b, ids):
    return (a(input_ids=ids).logits - b(input_ids=ids).logits).abs().max().item()


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
    "shared gate": ({"gate_head_shared": True}, GATED_TARGETS),
    "shared elementwise gate with a bias": (
        {"gate_head_shared": True, "gate_granularity": "elementwise", "gate_bias": True},
        (*QWEN, "paper"),
    ),
}


@pytest.mark.parametrize(
    ("feature", "target"), [(feature, target) for feature, (_, targets) in FEATURES.items() for target in targets]
)
def test_features_are_exact(feature, target, tmp_path):
    build(tmp_path / "source", **FEATURES[feature][0])
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target=target)
    assert report.parity.max_abs_difference <= FLOAT32


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
    MISTAKES[mistake](monkeypatch)
    with pytest.raises(ValueError, match="does not compute what its source computes"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="qwen3_5_text")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("target", ["qwen3_5_text", "step3p5"])
def test_an_export_that_is_wrong_far_from_position_0_only_fails(target, tmp_path, monkeypatch):
    """A base that is off by 2e-5 turns nothing within 64 tokens, and the last of 32768 by half a degree."""
    build(tmp_path / "source", max_position_embeddings=32768)
    written = target_configs.written_rotary
    monkeypatch.setattr(
        target_configs,
        "written_rotary",
        lambda c: written(c) | {"rope_theta": c.rope_parameters["rope_theta"] * 1.00002},
    )
    sample = parity.sample

    def near(config, source):
        ids, positions = sample(config, source)
        return ids, positions[:1].expand_as(positions)

    with monkeypatch.context() as patch:
        patch.setattr(parity, "sample", near)
        export_checkpoint(tmp_path / "source", tmp_path / "near", target=target)
    with pytest.raises(ValueError, match="does not compute what its source computes"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


def test_compared_positions_reach_from_the_first_to_the_last(tmp_path):
    model = build(tmp_path / "source", max_position_embeddings=5000)
    ids, positions = parity.sample(model.config, Loadable.open(tmp_path / "source"))
    assert ids.shape == positions.shape == (2, 64)
    assert positions[0].tolist() == list(range(64))
    assert (positions[1, 0], positions[1, -1]) == (0, 4999)
    steps = positions[1].diff()
    assert (steps.min(), steps.max()) == (79, 80)


def judged(errors):
    """Two rows of 100 tokens, logits up to 1, in which some tokens are off by multiples of the tolerance."""
    expected = torch.linspace(-1, 1, 8).double().repeat(2, 100, 1)
    found = expected.clone()
    for (row, token), error in errors.items():
        found[row, token, 3] += error * parity.TOLERANCES[torch.float32]
    return parity.judge(expected, found, torch.float32)


JUDGED = {
    "nothing": ({}, True),
    "a little everywhere": ({(row, token): 0.9 for row in (0, 1) for token in range(100)}, True),
    "too much everywhere": ({(row, token): 1.1 for row in (0, 1) for token in range(100)}, False),
    "outliers within bounds": ({(1, token): 90.0 for token in (3, 50, 99)}, True),
    "one wild token": ({(1, 99): 110.0}, False),
    "one wild first token": ({(0, 0): 110.0}, False),
    "few in all, many in one row": ({(1, token): 2.0 for token in range(92, 100)}, False),
    "few in both rows": ({(row, token): 2.0 for row in (0, 1) for token in range(96, 100)}, True),
    "not a number": ({(0, 7): math.nan}, False),
    "infinite": ({(0, 7): math.inf}, False),
}


@pytest.mark.parametrize("case", JUDGED)
def test_what_passes(case):
    errors, passes = JUDGED[case]
    result = judged(errors)
    assert result.passes == passes
    assert result.tokens == 200


def test_a_few_wild_tokens_fail_an_export(tmp_path, monkeypatch):
    """Three ids of 128 have another embedding: fewer than 5 % of the tokens of a row."""
    build(tmp_path / "source", gate_granularity="elementwise", tie_word_embeddings=False)
    read = export.read_rounded

    def misread(checkpoint, name, dtype):
        tensor = read(checkpoint, name, dtype)
        if name == "model.embed_tokens.weight":
            tensor = tensor.clone()
            tensor[:3] += 1
        return tensor

    rows = torch.arange(3, 128).repeat(2, 1)[:, :64]
    rows[:, -1] = torch.tensor([0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(export, "read_rounded", misread)
        patch.setattr(parity, "sample", lambda *_: (rows, torch.arange(64).repeat(2, 1)))
        with pytest.raises(ValueError, match="does not compute what its source computes") as error:
            export_checkpoint(tmp_path / "source", tmp_path / "out", target="qwen3_5_text")
    usual = float(re.search(r"logits differ by ([^ ]+) ", str(error.value))[1])
    assert usual <= FLOAT32  # the share of right tokens alone would have let it pass


@pytest.mark.parametrize("target", QWEN)
def test_neutral_norms_stay_neutral_under_large_key_biases(target, tmp_path, monkeypatch):
    """Keys of size 100 are still far below epsilon at 2^-30, and no longer at 2^-18 or 2^-22."""
    model = build(tmp_path / "source", qkv_bias=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_(std=100)
            layer.self_attn.q_proj.weight.mul_(0.02)
            layer.self_attn.q_proj.bias.mul_(0.02)
    model.save_pretrained(tmp_path / "source")
    report = export_checkpoint(tmp_path / "source", tmp_path / "out", target=target)
    assert report.parity.max_abs_difference <= FLOAT32
    for exponent in (18, 22):
        monkeypatch.setattr(rewriting, "NEUTRAL_SCALE", 2.0**-exponent)
        weaker = export_checkpoint(tmp_path / "source", tmp_path / f"{exponent}", target=target, verify=False)
        exported = AutoModelForCausalLM.from_pretrained(weaker.output).eval()
        assert difference(model, exported, IDS) > 2 * FLOAT32


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


@pytest.mark.parametrize("name", ["official_headwise", "official_elementwise", "official_elementwise_untied_bias"])
def test_golden_checkpoints_come_back(name, tmp_path):
    golden = DATA / "golden" / name
    convert_checkpoint(golden, tmp_path / "gated")
    export_checkpoint(tmp_path / "gated", tmp_path / "paper", target="paper")
    before, after = (load_file(folder / "model.safetensors") for folder in (golden, tmp_path / "paper"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (golden, tmp_path / "paper"))
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    assert set(changed) == {"max_window_layers"}  # without effect while nothing slides


@pytest.mark.parametrize(("target", "model"), [("qwen3_5_text", "qwen3"), ("qwen3_next", "qwen3")])
def test_reimport_gives_the_same_logits(target, model, tmp_path):
    source = build(tmp_path / "a", **MODELS[model])
    export_checkpoint(tmp_path / "a", tmp_path / "out", target=target)
    convert_checkpoint(tmp_path / "out", tmp_path / "b")
    again = GatedLlamaForCausalLM.from_pretrained(tmp_path / "b").eval()
    assert difference(source, again, IDS) <= FLOAT32


# Files and bad input


@pytest.mark.parametrize("target", ["qwen3_5_text", "qwen3_next", "afmoe", "step3p5"])
def test_tokenizer_and_a_trained_model(target, tmp_path):
    convert_checkpoint(DATA / "stories260K", tmp_path / "gated", policy="normal")
    report = export_checkpoint(tmp_path / "gated", tmp_path / "out", target=target)
    assert report.parity.max_abs_difference <= report.parity.tolerance
    assert report.parity.kl <= 1e-9
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (DATA / "stories260K", tmp_path / "out"))
    assert report.tokenizer_class is not None
    assert [before(text)["input_ids"] for text in PROBES] == [after(text)["input_ids"] for text in PROBES]


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
