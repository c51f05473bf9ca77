"""Checkpoints that bring a gate of their own: parity with what computed them, and refusals where there is no equal."""

import itertools
import re
from pathlib import Path

import paper_release
import pytest
import torch
from checkpoints import IDS, LOUD, NO_TOKENIZER, ROUNDING, apart, imported_note, load, logits_of, write_checkpoint
from safetensors.torch import load_file
from transformers import AutoConfig

from gated_llama.convert import convert_checkpoint, imports
from gated_llama.convert.checkpoint import ADAPTERS
from gated_llama.convert.layout_check import layout_losses
from gated_llama.convert.layouts import LAYOUTS, HeadGeometry
from gated_llama_cli import main


GOLDEN = Path(__file__).parent / "data" / "golden"


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_golden_checkpoints_compute_what_the_release_computed(name, tmp_path):
    expected = load_file(GOLDEN / name / "expected.safetensors")
    report = convert_checkpoint(GOLDEN / name, tmp_path / "out")
    model = load(tmp_path / "out")
    with torch.no_grad():
        output = model(expected["input_ids"], output_hidden_states=True, output_attentions=True)
    torch.testing.assert_close(output.logits, expected["logits"], **ROUNDING)
    torch.testing.assert_close(torch.stack(output.hidden_states), expected["hidden_states"], **ROUNDING)
    first_token = torch.stack(output.attentions)[..., 0]
    torch.testing.assert_close(first_token, expected["first_token_attention"], **ROUNDING)
    prompt = expected["greedy_ids"][:, :5]
    assert torch.equal(model.generate(prompt, max_new_tokens=12, do_sample=False), expected["greedy_ids"])
    folded = ADAPTERS.format(folded="o_proj.weight x 2")
    assert report.notes == [folded if "baseline" in name else imported_note(model.config), NO_TOKENIZER]


HEADS = {"GQA": (4, 2), "MHA": (4, 4), "MQA": (4, 1), "three groups of two": (6, 3), "two groups of three": (6, 2)}
FLAGS = {"none": (), "headwise": ("headwise",), "elementwise": ("elementwise",)}
SWITCHES = {
    "as released": {},
    "biases, untied": {"qkv_bias": True, "tie_word_embeddings": False},
    "biases, no QK-norm": {"qkv_bias": True, "use_qk_norm": False},
}


def paper_checkpoint(folder: Path, heads: str, flags: str, switches: str, **more) -> tuple[dict, dict]:
    config = paper_release.CONFIG | SWITCHES[switches]
    config |= dict(zip(("num_attention_heads", "num_key_value_heads"), HEADS[heads], strict=True))
    config |= {f"{flag}_attn_output_gate": True for flag in FLAGS[flags]} | more
    weights = paper_release.random_weights(config)
    write_checkpoint(folder, config, weights)
    return config, weights


@pytest.mark.parametrize(
    ("heads", "flags", "switches"),
    [
        (heads, flags, switches)
        for heads, flags, switches in itertools.product(HEADS, FLAGS, SWITCHES)
        if flags != "none" or heads == "GQA"
    ],
)
def test_every_setting_of_the_release_is_read(heads, flags, switches, tmp_path):
    config, weights = paper_checkpoint(tmp_path / "source", heads, flags, switches)
    convert_checkpoint(tmp_path / "source", tmp_path / "out", position=None if flags == "none" else "sdpa_output")
    model = load(tmp_path / "out")
    torch.testing.assert_close(logits_of(model), paper_release.logits(config, weights, IDS), **ROUNDING)

    made = model.config
    assert (made.gate_position, made.qk_norm) == (None if flags == "none" else "sdpa_output", config["use_qk_norm"])
    assert (made.qkv_bias, made.o_bias) == (config["qkv_bias"],) * 2
    if flags == "none":
        return
    assert (made.gate_granularity, made.gate_bias) == (flags, config["qkv_bias"])
    assert (made.gate_operation, made.gate_activation, made.gate_layers) == ("multiply", "sigmoid", None)
    assert made.gate_retrofit["policy"] == "imported"
    # What was split goes back to the source's bits.
    stored = load_file(tmp_path / "out" / "model.safetensors")
    geometry = HeadGeometry(*HEADS[heads], config["head_dim"], made.gate_shape[1])
    for name in [name for name in weights if "q_proj" in name]:
        parts = {part: stored[name.replace("q_proj", f"{part}_proj")] for part in "qg"}
        assert torch.equal(LAYOUTS["per_kv_group"].join(parts, geometry), weights[name])


def test_a_baseline_of_the_release_takes_a_new_gate(tmp_path):
    config, weights = paper_checkpoint(tmp_path / "source", "GQA", "none", "biases, no QK-norm")
    convert_checkpoint(tmp_path / "source", tmp_path / "out", granularity="elementwise")
    model = load(tmp_path / "out")
    assert model.config.gate_retrofit["policy"] == "identity"
    torch.testing.assert_close(logits_of(model), paper_release.logits(config, weights, IDS), **ROUNDING)


@pytest.mark.parametrize("flags", ["headwise", "elementwise"])
@pytest.mark.parametrize("layout", ["per_head", "halves"])
def test_another_layout_is_read_when_asked_for_and_wrong_otherwise(flags, layout, tmp_path):
    """A derivative of the release that stores its rows in another order: the shapes are the same."""
    config, weights = paper_checkpoint(tmp_path / "release", "GQA", flags, "as released")
    geometry = HeadGeometry(4, 2, 16, paper_release.gate_width(config))
    other = {
        name: LAYOUTS[layout].join(LAYOUTS["per_kv_group"].split(tensor, geometry), geometry)
        if "q_proj" in name
        else tensor
        for name, tensor in weights.items()
    }
    write_checkpoint(tmp_path / "source", config, other)
    expected = paper_release.logits(config, weights, IDS)

    report = convert_checkpoint(tmp_path / "source", tmp_path / "out", layout=layout.replace("_", "-"))
    torch.testing.assert_close(logits_of(load(tmp_path / "out")), expected, **ROUNDING)
    assert report.config.gate_retrofit["layout"] == layout
    convert_checkpoint(tmp_path / "source", tmp_path / "declared")
    assert apart(logits_of(load(tmp_path / "declared")), expected) > LOUD


@pytest.mark.parametrize("name", ["official_headwise", "official_elementwise"])
def test_the_right_layout_makes_a_likely_text_of_what_the_model_said(name, tmp_path):
    convert_checkpoint(GOLDEN / name, tmp_path / "out")
    start = torch.full((8, 1), 5)
    said = load(tmp_path / "out").generate(
        start, attention_mask=torch.ones_like(start), do_sample=True, min_new_tokens=50, max_new_tokens=50
    )
    losses = layout_losses(GOLDEN / name, said)
    assert losses["per_kv_group"] < min(losses["per_head"], losses["halves"]) - 0.3
    with pytest.raises(ValueError, match="at least 2"):
        layout_losses(GOLDEN / name, said[:, :1])
    with pytest.raises(ValueError, match="has no gate"):
        layout_losses(GOLDEN / "official_baseline", said)


@pytest.mark.parametrize("flags", ["headwise", "elementwise"])
def test_rows_that_contradict_the_declared_layout_are_reported(flags, tmp_path):
    config, weights = paper_checkpoint(tmp_path / "release", "GQA", flags, "as released")
    geometry = HeadGeometry(4, 2, 16, paper_release.gate_width(config))
    for name in [name for name in weights if "q_proj" in name]:
        parts = LAYOUTS["per_kv_group"].split(weights[name], geometry)
        weights[name] = LAYOUTS["per_head"].join(parts | {"g": parts["g"] * 1.3}, geometry)
    write_checkpoint(tmp_path / "source", config, weights)
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out")
    assert "look as if they were laid out as 'per_head' instead of the declared 'per_kv_group'" in report.notes[1]
    report = convert_checkpoint(tmp_path / "source", tmp_path / "right", layout="per_head")
    asked = "The format stores its gate as 'per_kv_group'; it was read as 'per_head', as you asked."
    assert report.notes == [imported_note(report.config), asked, NO_TOKENIZER]


# Refusals


@pytest.mark.parametrize("model_type", imports.NOT_REPRESENTABLE)
def test_other_gated_architectures_are_refused_by_name(model_type, tmp_path):
    assert model_type in AutoConfig.for_model(model_type).model_type  # a type that the library knows
    write_checkpoint(tmp_path / "source", {"model_type": model_type}, {"a": torch.zeros(1)})
    reason = imports.NOT_REPRESENTABLE[model_type]
    with pytest.raises(ValueError, match=re.escape(f"type {model_type!r} cannot be converted: {reason}.")):
        convert_checkpoint(tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"elementwise_attn_output_gate": True}, "both true"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "use_sliding_window is true"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised source"),
        ({"gate_temperature": 2.0}, "gate_temperature=2.0: not known"),
        ({"headwise_attn_output_gate": False}, r"has shape \[68, 40\], but config.json calls for \[64, 40\]"),
    ],
)
def test_paper_configs_that_say_something_else_are_refused(more, message, tmp_path):
    config, weights = paper_checkpoint(tmp_path / "release", "GQA", "headwise", "as released")
    write_checkpoint(tmp_path / "source", config | more, weights)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", position=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["release", "source"]


def test_a_gate_that_the_config_does_not_declare_is_refused(tmp_path):
    config, weights = paper_checkpoint(tmp_path / "release", "GQA", "none", "as released")
    weights |= {f"model.layers.{layer}.self_attn.g_proj.weight": torch.zeros(4, 40) for layer in range(3)}
    write_checkpoint(tmp_path / "source", config, weights)
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.g_proj.weight"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out")
    for model_type, flag in (("llama", "gating"), ("mistral", "attn_output_gate")):
        write_checkpoint(tmp_path / model_type, {"model_type": model_type, flag: True}, weights)
        with pytest.raises(ValueError, match=f"declares a gate of its own \\({flag}=True"):
            convert_checkpoint(tmp_path / model_type, tmp_path / "out")


def test_rows_of_the_other_granularity_are_refused_before_anything_is_written(tmp_path):
    config, weights = paper_checkpoint(tmp_path / "release", "GQA", "headwise", "as released")
    config |= {"headwise_attn_output_gate": False, "elementwise_attn_output_gate": True}
    write_checkpoint(tmp_path / "source", config, weights)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj.weight: The tensor has 68 rows; .* needs 128"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out")


def test_a_gate_cannot_be_asked_of_a_source_that_has_one(tmp_path):
    paper_checkpoint(tmp_path / "source", "GQA", "headwise", "as released")
    for asked in ({"position": "value"}, {"granularity": "elementwise"}, {"policy": "normal"}, {"layers": [0]}):
        with pytest.raises(ValueError, match=f"{next(iter(asked))}.* brings its own"):
            convert_checkpoint(tmp_path / "source", tmp_path / "out", **asked)
    with pytest.raises(ValueError, match="layout='separate' does not fit a qwen3 checkpoint"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", layout="separate")
    with pytest.raises(ValueError, match="Unknown gate layout 'interleaved'"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", layout="interleaved")
    paper_checkpoint(tmp_path / "plain", "GQA", "none", "as released")
    with pytest.raises(ValueError, match=r"layout='per_head' .* has no gate"):
        convert_checkpoint(tmp_path / "plain", tmp_path / "out", layout="per_head")


def test_command_imports_with_another_layout_and_says_what_it_cannot_verify(tmp_path, capsys):
    golden_folder = GOLDEN / "official_elementwise"
    assert main(["convert", str(golden_folder), str(tmp_path / "as-declared")]) == 0
    assert "gated-llama inspect" in capsys.readouterr().out
    assert main(["convert", str(golden_folder), str(tmp_path / "other"), "--layout", "per_head"]) == 0
    declared, other = (load_file(tmp_path / name / "model.safetensors") for name in ("as-declared", "other"))
    name = "model.layers.0.self_attn.g_proj.weight"
    assert declared[name].shape == other[name].shape
    assert not torch.equal(declared[name], other[name])
    capsys.readouterr()
    assert main(["verify", str(golden_folder), str(tmp_path / "as-declared")]) == 2
    assert "--target paper" in capsys.readouterr().err


def test_another_layout_than_the_formats_is_noted():
    record = imports.GATED_SOURCES["qwen3_next"]
    (note,) = (n for n in record.with_layout("halves").notes if n not in record.notes)
    assert note == "The format stores its gate as 'per_head'; it was read as 'halves', as you asked."
    assert record.with_layout("per_head") is record
