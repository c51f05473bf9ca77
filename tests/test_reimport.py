"""Exported folders come back: as the model that was exported, bit for bit where the format loses nothing."""

import itertools
import json

import pytest
import torch
from checkpoints import change_config, load, logits_of
from export_models import FLOAT32, GATED_TARGETS, IDS, MODELS, QWEN, ROTARY, build
from safetensors.torch import load_file, save_file
from transformers import AfmoeConfig, AfmoeForCausalLM, AutoConfig, AutoModelForCausalLM

from gated_llama.convert import convert_checkpoint, export_checkpoint
from gated_llama.convert.exported import ADDED_LAYER, NEUTRAL_OUTPUTS, NEUTRAL_QK, NO_OUTPUT_BIAS, REPEATED_ROWS
from gated_llama_cli import main


QWEN_SIZES = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "layer_types": ["full_attention"] * 2,
    "num_experts": 0,
}


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def changed(folder, name, change) -> None:
    tensors = weights(folder)
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def round_trip(tmp_path, target, **fields):
    """The model, the folder of its export, what the export came back as, and the report of that."""
    build(tmp_path / "a", **fields)
    export_checkpoint(tmp_path / "a", tmp_path / "out", target=target, verify=False)
    report = convert_checkpoint(tmp_path / "out", tmp_path / "b")
    source, again = (load(tmp_path / name, dtype=torch.float32) for name in "ab")
    return source, tmp_path / "out", again, report


def fits(target, model, granularity):
    biased_afmoe = (target, model) == ("afmoe", "qwen2")
    return not biased_afmoe and not (target == "step3p5" and granularity == "elementwise")


GRID = [
    case
    for case in itertools.product(GATED_TARGETS, MODELS, ("headwise", "elementwise"), (False, True))
    if fits(*case[:3])
]


@pytest.mark.parametrize(("target", "model", "granularity", "tied"), GRID)
def test_every_export_comes_back(target, model, granularity, tied, tmp_path):
    fields = MODELS[model] | {"gate_granularity": granularity, "tie_word_embeddings": tied}
    source, _, again, report = round_trip(tmp_path, target, **fields)
    assert (logits_of(source, IDS) - logits_of(again, IDS)).abs().max() <= FLOAT32
    for field in ("num_hidden_layers", "qk_norm", "gate_granularity", "gate_layers", "sliding_window", "layer_types"):
        assert getattr(again.config, field) == getattr(source.config, field), field
    assert again.config.gate_retrofit["policy"] == "imported"
    assert (NEUTRAL_QK in report.notes) == (target != "paper" and not source.config.qk_norm)
    assert (NEUTRAL_OUTPUTS in report.notes) == (target == "afmoe")
    assert (ADDED_LAYER in report.notes) == (target in ("afmoe", "step3p5"))
    assert (REPEATED_ROWS in report.notes) == (granularity == "headwise" and target in (*QWEN, "afmoe"))
    # A second round changes nothing any more.
    export_checkpoint(tmp_path / "b", tmp_path / "again", target=target, verify=False)
    before, after = weights(tmp_path / "out"), weights(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("target", "model"), [*itertools.product(("paper", "afmoe"), ("qwen3", "llama"))])
@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formats_that_lose_nothing_give_the_same_bits(target, model, granularity, dtype, tmp_path):
    round_trip(tmp_path, target, gate_granularity=granularity, dtype=dtype, **MODELS[model])
    before, after = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("target", QWEN)
def test_zero_centred_norms_lose_what_their_float32_cannot_hold(target, tmp_path):
    round_trip(tmp_path, target, gate_granularity="elementwise", qk_norm=True)
    before, after = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if name.endswith("norm.weight"):
            # gain - 1 is rounded at 2^-25 where it lies between -1 and -1/2.
            torch.testing.assert_close(after[name], tensor, atol=2**-25, rtol=0)
        else:
            assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize("target", ["qwen3_5_text", "step3p5"])
def test_bfloat16_comes_back_through_moved_gains(target, tmp_path):
    source, out, again, _ = round_trip(tmp_path, target, dtype=torch.bfloat16)
    for module in again.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = source.config.rms_norm_eps  # exports in bfloat16 choose one that it can hold
    assert (logits_of(source, IDS) - logits_of(again, IDS)).abs().max() <= FLOAT32
    export_checkpoint(tmp_path / "b", tmp_path / "again", target=target, dtype="bfloat16", verify=False)
    before, after = weights(out), weights(tmp_path / "again")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("target", QWEN)
def test_a_foreign_bfloat16_model_comes_back_bitwise(target, tmp_path):
    """Gains near 1 need float32, and their form of the target does not: it holds what the source held."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(target, **QWEN_SIZES)
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "gated")
    report = export_checkpoint(tmp_path / "gated", tmp_path / "again", target=target)
    assert report.parity.max_abs_difference <= FLOAT32
    before, after = weights(tmp_path / "source"), weights(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("window", [{}, {"sliding_window": 20}], ids=["whole context", "window"])
@pytest.mark.parametrize("rotary", ROTARY)
def test_afmoe_exports_keep_windows_and_rotary(window, rotary, tmp_path):
    fields = {**window, "rope_parameters": dict(ROTARY[rotary])}
    source, _, again, _ = round_trip(tmp_path, "afmoe", gate_granularity="elementwise", **fields)
    assert again.config.rope_parameters == source.config.rope_parameters
    assert again.config.layer_types == source.config.layer_types
    assert (logits_of(source, IDS) - logits_of(again, IDS)).abs().max() <= FLOAT32


@pytest.mark.parametrize("target", [*QWEN, "step3p5"])
def test_biases_of_q_k_v_come_back_without_one_of_o_proj(target, tmp_path):
    _, out, again, report = round_trip(tmp_path, target, qkv_bias=True)
    assert json.loads((out / "config.json").read_text())["attention_bias"] is True
    assert (again.config.qkv_bias, again.config.o_bias) == (True, False)
    assert NO_OUTPUT_BIAS in report.notes


@pytest.mark.parametrize("target", ["afmoe", "step3p5"])
def test_a_list_as_long_as_the_layers_is_not_cut_with_them(target, tmp_path):
    *_, again, _ = round_trip(tmp_path, target, eos_token_id=[5, 6, 7])
    assert (again.config.num_hidden_layers, again.config.eos_token_id) == (2, [5, 6, 7])


def test_a_zero_elementwise_gate_stays_elementwise(tmp_path):
    *_, again, report = round_trip(tmp_path, "qwen3_5_text", gate_granularity="elementwise", zero_gates=True)
    assert again.config.gate_granularity == "elementwise"
    assert REPEATED_ROWS not in report.notes


def test_a_gain_that_does_something_stays_a_norm(tmp_path):
    build(tmp_path / "a", gate_granularity="elementwise")
    export_checkpoint(tmp_path / "a", tmp_path / "out", target="qwen3_5_text", verify=False)
    changed(tmp_path / "out", "model.layers.1.self_attn.k_norm.weight", lambda gain: gain * 1.5)
    report = convert_checkpoint(tmp_path / "out", tmp_path / "b")
    assert report.config.qk_norm
    assert NEUTRAL_QK not in report.notes


@pytest.mark.parametrize(
    ("target", "name", "change", "message"),
    [
        ("step3p5", "model.layers.2.self_attn.o_proj.weight", lambda w: w + 1e-30, r"layers \[2\] are mixtures"),
        ("step3p5", "model.layers.2.moe.down_proj.weight", lambda w: w + 1e-30, r"layers \[2\] are mixtures"),
        ("step3p5", "model.layers.2.share_expert.down_proj.weight", lambda w: w + 1, r"layers \[2\] are mixtures"),
        (
            "afmoe",
            "model.layers.2.mlp.down_proj.weight",
            lambda w: w + 1,
            r"full-attention layers \[2\] do not rotate",
        ),
        (
            "afmoe",
            "model.layers.1.post_mlp_layernorm.weight",
            lambda w: w * 2,
            "also normalise what attention and MLP",
        ),
        ("afmoe", "model.layers.0.mlp.down_proj.weight", lambda w: w * 2.0**40, "is not scaled by 2\\^-30"),
        ("qwen3_next", "model.layers.0.self_attn.q_proj.weight", lambda w: w * 2.0**50, "is not scaled by 2\\^-30"),
    ],
)
def test_what_is_not_exactly_an_export_is_refused(target, name, change, message, tmp_path):
    build(tmp_path / "a")
    export_checkpoint(tmp_path / "a", tmp_path / "out", target=target, verify=False)
    changed(tmp_path / "out", name, change)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(tmp_path / "out", tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "out"]


AFMOE = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 56,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"its full-attention layers \[3\] do not rotate"),
        ({"mup_enabled": True}, "mup_enabled multiplies the embeddings"),
        ({"layer_types": ["sliding_attention"] * 4}, r"layers \[1, 2, 3\] are mixtures of experts"),
        ({"layer_types": ["sliding_attention"] * 4, "num_dense_layers": 4}, "also normalise what attention and MLP"),
    ],
)
def test_models_that_are_afmoe_are_refused_by_reason(fields, message, tmp_path):
    AfmoeForCausalLM(AfmoeConfig(**AFMOE | fields)).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=f"This afmoe checkpoint cannot be represented: .*{message}"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_command_takes_an_export_back(tmp_path, capsys):
    build(tmp_path / "a")
    export_checkpoint(tmp_path / "a", tmp_path / "out", target="step3p5", verify=False)
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "b")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "all zeros" in shown
    assert "gated-llama inspect" in shown
    change_config(tmp_path / "out", model_type="gpt2", use_head_wise_attn_gate=None)
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "c")]) == 2
    supported = "afmoe, llama, mistral, qwen2, qwen3, qwen3_5_text, qwen3_next, smollm3, step3p5"
    assert supported in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("target", ["qwen3_5_text", "paper"])
def test_inspect_describes_gates_in_other_formats(target, tmp_path, capsys):
    build(tmp_path / "a", gate_granularity="elementwise", qk_norm=True)
    export_checkpoint(tmp_path / "a", tmp_path / "out", target=target, verify=False)
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["gate"]["gate_granularity"], found["offers"], found["gate_tensors"]) == ("elementwise", [], {})
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "stored as the model's own format" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["step3p5", "afmoe"])
def test_inspect_says_what_to_do_with_an_added_layer(target, tmp_path, capsys):
    build(tmp_path / "a", gate_granularity="elementwise" if target == "afmoe" else "headwise", qk_norm=True)
    export_checkpoint(tmp_path / "a", tmp_path / "out", target=target, verify=False)
    assert main(["inspect", str(tmp_path / "out")]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "If it is an export of this package, whose last layer does nothing, convert it back first." in shown
