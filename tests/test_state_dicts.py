"""State dicts of Megatron, OLMo-core and others beside a plain config.json: the same model, bit for bit."""

import json
import re

import pytest
import torch
from checkpoints import ROUNDING, load, logits_of, write_checkpoint
from safetensors.torch import load_file
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from gated_llama.convert import convert_checkpoint
from gated_llama_cli import main


SIZES = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
CONFIGS = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {"qkv_bias": True}),
    "qwen3": (Qwen3Config, {"qk_norm": True}),
}


def gated_model(tiny_model, architecture, **fields):
    """A gated model with nothing left at its initial value, and the config.json of its ungated architecture."""
    config_class, switches = CONFIGS[architecture]
    model = tiny_model(rope_parameters=dict(SIZES["rope_parameters"]), **switches, **fields)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model, json.loads(config_class(**SIZES).to_json_string(use_diff=False))


def heads_of(tensor, index, width):
    return tensor[index * width : (index + 1) * width]


def megatron_rows(tensors, prefix, kind, gate_rows):
    """linear_qkv of two groups of two heads of 16, written by hand: q q [g g] k v of the one, then of the other."""
    q, g, k, v = (tensors.get(f"{prefix}self_attn.{part}_proj.{kind}") for part in "qgkv")
    rows = []
    for group in (0, 1):
        rows += [heads_of(q, 2 * group, 16), heads_of(q, 2 * group + 1, 16)]
        if gate_rows == "repeated":  # a headwise gate in Megatron's elementwise layout
            rows += [heads_of(g, 2 * group + head, 1).repeat_interleave(16, 0) for head in (0, 1)]
        elif gate_rows == "in the group":
            rows += [heads_of(g, 2 * group, 16), heads_of(g, 2 * group + 1, 16)]
        rows += [heads_of(k, group, 16), heads_of(v, group, 16)]
    return torch.cat([*rows, g] if gate_rows == "at the tail" else rows)


def megatron_state_dict(tensors, gate_rows, *, fused_norms):
    """The names of Megatron Core, with Transformer Engine or without."""
    renamed = {
        "embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
        "output_layer.weight": tensors["lm_head.weight"],
    }
    first, second = (
        ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
        if fused_norms
        else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    )
    for layer in range(3):
        ours, theirs = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for kind in ("weight", "bias"):
            if f"{ours}self_attn.q_proj.{kind}" in tensors:
                rows = megatron_rows(tensors, ours, kind, gate_rows)
                renamed[f"{theirs}self_attention.linear_qkv.{kind}"] = rows
        renamed[theirs + first] = tensors[ours + "input_layernorm.weight"]
        renamed[theirs + second] = tensors[ours + "post_attention_layernorm.weight"]
        renamed[f"{theirs}self_attention.linear_proj.weight"] = tensors[f"{ours}self_attn.o_proj.weight"]
        gate_up = [tensors[f"{ours}mlp.{part}_proj.weight"] for part in ("gate", "up")]
        renamed[f"{theirs}mlp.linear_fc1.weight"] = torch.cat(gate_up)
        renamed[f"{theirs}mlp.linear_fc2.weight"] = tensors[f"{ours}mlp.down_proj.weight"]
        for part in "qk":
            if f"{ours}self_attn.{part}_norm.weight" in tensors:
                norm = tensors[f"{ours}self_attn.{part}_norm.weight"]
                renamed[f"{theirs}self_attention.{part}_layernorm.weight"] = norm
    return renamed


OLMO_CORE = {
    r"model\.embed_tokens": "embeddings",
    r"model\.norm": "lm_head.norm",
    r"^lm_head\.weight": "lm_head.w_out.weight",
    r"model\.layers": "blocks",
    r"input_layernorm": "attention_norm",
    r"post_attention_layernorm": "feed_forward_norm",
    r"self_attn\.([qkvg])_proj": r"attention.w_\1",
    r"self_attn\.o_proj": "attention.w_out",
    r"self_attn\.([qk])_norm": r"attention.\1_norm",
    r"mlp\.gate_proj": "feed_forward.w1",
    r"mlp\.up_proj": "feed_forward.w3",
    r"mlp\.down_proj": "feed_forward.w2",
}


def olmo_core_name(name):
    for pattern, replacement in OLMO_CORE.items():
        name = re.sub(pattern, replacement, name)
    return name


def assert_came_back(model, folder):
    before, after = model.state_dict(), load_file(folder / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = load(folder)
    torch.testing.assert_close(logits_of(again), logits_of(model), **ROUNDING)
    assert again.config.rope_parameters["rope_theta"] == 50000.0


MEGATRON = {
    "elementwise": ("megatron", "in the group"),
    "headwise": ("megatron_tail", "at the tail"),
}


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("granularity", MEGATRON)
@pytest.mark.parametrize("fused_norms", [True, False])
@pytest.mark.parametrize("declared", ["by name", "by flag"])
def test_megatron_state_dicts(architecture, granularity, fused_norms, declared, tiny_model, tmp_path):
    layout, gate_rows = MEGATRON[granularity]
    biased = architecture == "qwen2"
    model, config = gated_model(tiny_model, architecture, gate_granularity=granularity, gate_bias=biased)
    tensors = megatron_state_dict(model.state_dict(), gate_rows, fused_norms=fused_norms)
    flag = {"megatron": "attention_output_gate", "megatron_tail": "head_wise_attn_gate"}[layout]
    named = {"layout": layout} if declared == "by name" else {}
    write_checkpoint(tmp_path / "source", config | ({} if named else {flag: True}), tensors)
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out", **named)
    assert (report.config.gate_granularity, report.config.gate_bias) == (granularity, biased)
    assert report.config.gate_retrofit["layout"] == layout
    assert_came_back(model, tmp_path / "out")


def test_a_headwise_gate_in_elementwise_rows_is_headwise_again(tiny_model, tmp_path):
    model, config = gated_model(tiny_model, "qwen3", gate_granularity="headwise")
    write_checkpoint(
        tmp_path / "source", config, megatron_state_dict(model.state_dict(), "repeated", fused_norms=True)
    )
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out", layout="megatron")
    assert report.config.gate_granularity == "headwise"
    assert_came_back(model, tmp_path / "out")


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
@pytest.mark.parametrize("gate_bias", [False, True])
def test_olmo_core_state_dicts(architecture, granularity, gate_bias, tiny_model, tmp_path):
    model, config = gated_model(tiny_model, architecture, gate_granularity=granularity, gate_bias=gate_bias)
    tensors = {olmo_core_name(name): tensor for name, tensor in model.state_dict().items()}
    assert "blocks.0.attention.w_g.weight" in tensors
    write_checkpoint(tmp_path / "source", config, tensors)
    convert_checkpoint(tmp_path / "source", tmp_path / "out", layout="separate")
    assert_came_back(model, tmp_path / "out")


@pytest.mark.parametrize("name", ["g_proj", "gate_proj", "attn_gate"])
def test_narrow_gates_are_widened_with_zeros(name, tiny_model, tmp_path):
    model, config = gated_model(tiny_model, "llama", gate_granularity="headwise")
    tensors = {}
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "g_proj" in key:
                tensor[:, 12:] = 0
                tensor = tensor[:, :12].contiguous()
            tensors[key.replace("g_proj", name)] = tensor
    write_checkpoint(tmp_path / "source", config, tensors)
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out", layout="separate")
    assert any("reads the first 12 coordinates" in note for note in report.notes)
    assert_came_back(model, tmp_path / "out")


@pytest.mark.parametrize("layout", ["per_kv_group", "per_head", "halves"])
def test_fused_rows_under_the_names_of_transformers(layout, tiny_model, tmp_path):
    from gated_llama.convert.layouts import LAYOUTS, HeadGeometry

    model, config = gated_model(tiny_model, "llama", gate_granularity="elementwise")
    tensors = model.state_dict()
    for layer in range(3):
        q, g = (f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "qg")
        tensors[q] = LAYOUTS[layout].join({"q": tensors[q], "g": tensors.pop(g)}, HeadGeometry(4, 2, 16, 16))
    write_checkpoint(tmp_path / "source", config, tensors)
    convert_checkpoint(tmp_path / "source", tmp_path / "out", layout=layout)
    assert_came_back(model, tmp_path / "out")


def test_a_scaled_sigmoid_folds_into_o_proj(tiny_model, tmp_path):
    model, config = gated_model(tiny_model, "llama", gate_granularity="headwise")
    write_checkpoint(tmp_path / "source", config, model.state_dict())
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out", layout="separate", gate_scale=2.0)
    assert report.config.gate_retrofit["fold"] == {"o_proj.weight": 2.0}
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(2)  # the same as a gate of 2 sigmoid
    assert_came_back(model, tmp_path / "out")
    for scale in (3.0, 0.0, -2.0):
        with pytest.raises(ValueError, match="not a positive power of two"):
            convert_checkpoint(tmp_path / "source", tmp_path / "no", layout="separate", gate_scale=scale)
    plain = {name: tensor for name, tensor in model.state_dict().items() if "g_proj" not in name}
    write_checkpoint(tmp_path / "plain", config, plain)
    with pytest.raises(ValueError, match=r"gate_scale=2.0 belongs to a source with a gate, and this llama has none"):
        convert_checkpoint(tmp_path / "plain", tmp_path / "no", gate_scale=2.0)
    assert not (tmp_path / "no").exists()


def without(pattern):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not re.search(pattern, name)}


def with_latent(tensors):
    return tensors | {"decoder.layers.0.self_attention.linear_q_down_proj.weight": torch.zeros(8, 40)}


def renamed(tensors):
    return {name.replace("decoder.layers", "transformer.h"): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (renamed, {"layout": "megatron"}, "rename the tensors"),
        (with_latent, {"layout": "megatron"}, "linear_q_down_proj.weight' that a llama model"),
        (without("linear_fc2"), {"layout": "megatron"}, "no tensor 'decoder.layers.0.mlp.linear_fc2.weight'"),
        (dict, {"layout": "megatron_tail"}, r"has no gate there: .*linear_qkv.weight has 192 rows instead of 132"),
        (dict, {"layout": "separate"}, "Megatron Core names it, has no gate of its own"),
        (dict, {"layout": "per_head"}, "has no gate: 'decoder.layers.0.self_attn.q_proj.weight' is missing"),
        (dict, {}, "has no tensor 'model.embed_tokens.weight'"),
        (
            dict,
            {"layout": "megatron", "granularity": "elementwise"},
            "granularity='elementwise' would describe a gate",
        ),
        (dict, {"layout": "interleaved"}, "Unknown gate layout 'interleaved'"),
    ],
)
def test_state_dicts_that_do_not_fit_are_refused(change, options, message, tiny_model, tmp_path):
    model, config = gated_model(tiny_model, "llama", gate_granularity="elementwise")
    tensors = change(megatron_state_dict(model.state_dict(), "in the group", fused_norms=True))
    write_checkpoint(tmp_path / "source", config, tensors)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_flags_that_contradict_each_other_or_the_format_are_refused(tiny_model, tmp_path):
    model, config = gated_model(tiny_model, "llama", gate_granularity="headwise")
    for name, flags, message in (
        ("both", {"attention_output_gate": True, "head_wise_attn_gate": True}, "are both true"),
        ("softplus", {"gating": "softplus"}, r"declares a gate of its own \(gating='softplus'\)"),
        ("normed", {"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma=True: not known"),
    ):
        write_checkpoint(tmp_path / name, config | flags, model.state_dict())
        with pytest.raises(ValueError, match=message):
            convert_checkpoint(tmp_path / name, tmp_path / "out", layout="separate")
    assert not (tmp_path / "out").exists()


def test_two_gates_in_one_layer_are_refused(tiny_model, tmp_path):
    model, config = gated_model(tiny_model, "llama", gate_granularity="headwise")
    tensors = model.state_dict()
    tensors["model.layers.0.self_attn.attn_gate.weight"] = torch.zeros(4, 12)
    write_checkpoint(tmp_path / "source", config, tensors)
    with pytest.raises(ValueError, match=r"has self_attn.g_proj and self_attn.attn_gate; known are"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", layout="separate")


def test_command_reads_a_state_dict(tiny_model, tmp_path, capsys):
    model, config = gated_model(tiny_model, "qwen3", gate_granularity="headwise")
    tensors = megatron_state_dict(model.state_dict(), "at the tail", fused_norms=True)
    write_checkpoint(tmp_path / "source", config, tensors)
    arguments = ["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--layout", "megatron_tail"]
    assert main([*arguments, "--gate-scale", "3"]) == 2
    assert "not a positive power of two" in " ".join(capsys.readouterr().err.split())
    assert main(arguments) == 0
    assert "gated-llama inspect" in capsys.readouterr().out
    assert_came_back(model, tmp_path / "out")
