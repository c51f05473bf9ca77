"""Gated models that the library itself computes: Qwen3-Next, Qwen3.5 text and Step-3.5, saved by it and imported."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import (
    IDS,
    LOUD,
    NO_TOKENIZER,
    ROUNDING,
    apart,
    change_config,
    imported_note,
    load,
    logits_of,
    write_checkpoint,
)
from safetensors.torch import load_file
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from gated_llama.convert import convert_checkpoint
from gated_llama.convert.layouts import LAYOUTS, HeadGeometry, norm_to_zero_centred


QWEN = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "layer_types": ["full_attention"] * 3,
    "attn_implementation": "eager",
}
QWEN_CLASSES = {
    "qwen3_next": (lambda **fields: Qwen3NextConfig(num_experts=0, **fields), Qwen3NextForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
}
QWEN_SWITCHES = {
    "quarter rotary": {},
    "whole rotary": {"partial_rotary_factor": 1.0, "rope_theta": 50000.0},
    "half rotary in rope_parameters": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    },
    "yarn": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "partial_rotary_factor": 0.5}
        | {"original_max_position_embeddings": 16}
    },
    "biases, tied": {"attention_bias": True, "tie_word_embeddings": True},
    "one key/value head": {"num_key_value_heads": 1},
    "as many key/value heads": {"num_key_value_heads": 4},
}


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    """Sizes at which attention, gates, zero-centred norms and biases all matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 0:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            assert parameter.isfinite().all(), name
    return model.eval()


def qwen_model(model_type: str, **fields):
    config_class, model_class = QWEN_CLASSES[model_type]
    return randomize(model_class(config_class(**QWEN | fields)))


@pytest.mark.parametrize("model_type", QWEN_CLASSES)
@pytest.mark.parametrize("switches", QWEN_SWITCHES)
def test_qwen_models_saved_by_the_library_are_read(model_type, switches, tmp_path):
    source = qwen_model(model_type, **QWEN_SWITCHES[switches])
    source.save_pretrained(tmp_path / "source")
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out")
    model = load(tmp_path / "out")
    with torch.no_grad():
        expected, found = (m(IDS, output_hidden_states=True) for m in (source, model))
    for layer, (a, b) in enumerate(zip(expected.hidden_states, found.hidden_states, strict=True)):
        torch.testing.assert_close(a, b, **ROUNDING, msg=lambda text, layer=layer: f"layer {layer}: {text}")
    torch.testing.assert_close(expected.logits, found.logits, **ROUNDING)
    greedy = [m.generate(IDS[:1, :6], max_new_tokens=10, do_sample=False) for m in (source, model)]
    assert torch.equal(*greedy)
    assert report.config.gate_granularity == "elementwise"
    assert report.config.gate_bias is source.config.attention_bias
    assert report.notes == [imported_note(report.config), NO_TOKENIZER]


@pytest.mark.parametrize("model_type", QWEN_CLASSES)
@pytest.mark.parametrize(
    ("place", "share"),
    [
        ({"partial_rotary_factor": 0.5, "rope_theta": 1e6, "rope_scaling": None}, 0.5),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5, "rope_type": "default"}}, 0.5),
        ({"rope_theta": 1e6}, 0.25),
        (
            {
                "rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.75}
                | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
            },
            0.75,
        ),
    ],
    ids=["config.json", "rope_parameters", "nowhere", "with axes"],
)
def test_partial_rotary_is_found_wherever_it_stands(model_type, place, share, tmp_path):
    source = qwen_model(model_type)
    source.save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    raw = {key: value for key, value in json.loads(path.read_text()).items() if not key.startswith("rope")}
    path.write_text(json.dumps(raw | place))
    config = convert_checkpoint(tmp_path / "source", tmp_path / "out").config
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": share}
    source = type(source).from_pretrained(tmp_path / "source", attn_implementation="eager")
    torch.testing.assert_close(logits_of(load(tmp_path / "out")), logits_of(source), **ROUNDING)


def test_contradicting_rotary_shares_are_refused(tmp_path):
    qwen_model("qwen3_next").save_pretrained(tmp_path / "source")
    change_config(tmp_path / "source", partial_rotary_factor=1.0)
    with pytest.raises(ValueError, match="partial_rotary_factor is given more than once and differently"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize("model_type", QWEN_CLASSES)
def test_short_dtypes_keep_the_gains_of_zero_centred_norms(model_type, tmp_path):
    qwen_model(model_type).bfloat16().save_pretrained(tmp_path / "source")
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "out"))
    norms = [name for name in before if name.endswith("norm.weight")]
    assert len(norms) == 3 * 4 + 1
    for name in norms:
        assert torch.equal(after[name], 1 + before[name].float())
        assert torch.equal(norm_to_zero_centred(after[name]).bfloat16(), before[name])
    for name in [name for name in before if "q_proj" in name]:
        parts = {part: after[name.replace("q_proj", f"{part}_proj")] for part in "qg"}
        assert torch.equal(LAYOUTS["per_head"].join(parts, HeadGeometry(4, 2, 16, 16)), before[name])
    assert {tensor.dtype for name, tensor in after.items() if name not in norms} == {torch.bfloat16}
    assert report.config.dtype == torch.bfloat16
    assert report.notes[0].startswith("13 norm gains are stored in float32 and loaded in it")
    loaded = load(tmp_path / "out", dtype="auto")
    loaded.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == after.keys()
    assert all(
        again[name].dtype == tensor.dtype and torch.equal(again[name], tensor) for name, tensor in after.items()
    )
    assert torch.equal(logits_of(load(tmp_path / "again", dtype="auto")), logits_of(loaded))
    assert {model_tensor.dtype for name, model_tensor in loaded.named_parameters() if name in norms} == {torch.float32}
    assert not convert_checkpoint(tmp_path / "source", tmp_path / "wide", dtype="float32").config.norms_in_fp32
    # Norms of one kind, rounded once: the same bits in bfloat16, too.
    source = QWEN_CLASSES[model_type][1].from_pretrained(tmp_path / "source", attn_implementation="eager").eval()
    assert source.dtype == torch.bfloat16
    assert torch.equal(logits_of(loaded), logits_of(source))
    source = QWEN_CLASSES[model_type][1].from_pretrained(tmp_path / "source", dtype=torch.float32)
    torch.testing.assert_close(logits_of(load(tmp_path / "out", dtype=torch.float32)), logits_of(source), **ROUNDING)


def wrong_interleave(model):
    for layer in model.model.layers:
        attention = layer.self_attn
        fused = LAYOUTS["per_head"].join(
            {"q": attention.q_proj.weight, "g": attention.g_proj.weight}, HeadGeometry(4, 2, 16, 16)
        )
        parts = LAYOUTS["per_kv_group"].split(fused, HeadGeometry(4, 2, 16, 16))
        attention.q_proj.weight.copy_(parts["q"])
        attention.g_proj.weight.copy_(parts["g"])


def unshifted_norms(model):
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.sub_(1)


def unshifted_final_norm(model):
    model.model.norm.weight.sub_(1)


def unshifted_query_norm(model):
    model.model.layers[1].self_attn.q_norm.weight.sub_(1)


def whole_rotary(model):
    model.config.rope_parameters["partial_rotary_factor"] = 1.0
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


@pytest.mark.parametrize("model_type", QWEN_CLASSES)
@pytest.mark.parametrize(
    "mistake", [wrong_interleave, unshifted_norms, unshifted_final_norm, unshifted_query_norm, whole_rotary]
)
def test_parity_notices_what_converters_get_wrong(model_type, mistake, tmp_path):
    source = qwen_model(model_type)
    source.save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "out")
    model = load(tmp_path / "out")
    with torch.no_grad():
        mistake(model)
    assert apart(logits_of(model), logits_of(source)) > LOUD


# Step-3.5


STEP = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "moe_layers_enum": "",
    "sliding_window": 8,  # the library's class builds this mask whether or not a layer slides
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
}
STEP_SWITCHES = {
    "full attention, whole rotary": {},
    "half rotary, given per layer": {"partial_rotary_factors": [0.5] * 3, "rope_theta": [5e5] * 3},
    "sliding layers": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
}


def step_checkpoint(folder: Path, raw: dict) -> torch.Tensor:
    """Writes a Step checkpoint with the config as given; returns its logits. The library has no class with a head."""
    decoder = randomize(Step3p7TextModel(Step3p7TextConfig(**raw, attn_implementation="eager")))
    head = torch.randn(96, 40, generator=torch.Generator().manual_seed(2)) * 0.2
    tensors = {f"model.{name}": tensor for name, tensor in decoder.state_dict().items()} | {"lm_head.weight": head}
    write_checkpoint(folder, raw | {"model_type": "step3p5", "use_head_wise_attn_gate": True}, tensors)
    with torch.no_grad():
        return decoder(IDS).last_hidden_state @ head.T


@pytest.mark.parametrize("switches", STEP_SWITCHES)
@pytest.mark.parametrize("saved_by", ["hub", "library"])
def test_step_models_are_read(switches, saved_by, tmp_path):
    raw = STEP | STEP_SWITCHES[switches]
    if saved_by == "library":
        Step3p7TextConfig(**raw).save_pretrained(tmp_path)
        raw = {k: v for k, v in json.loads((tmp_path / "config.json").read_text()).items() if k != "model_type"}
    expected = step_checkpoint(tmp_path / "source", raw)
    config = convert_checkpoint(tmp_path / "source", tmp_path / "out").config
    torch.testing.assert_close(logits_of(load(tmp_path / "out")), expected, **ROUNDING)
    assert (config.gate_granularity, config.gate_bias) == ("headwise", False)
    assert config.gate_retrofit["layout"] == "separate"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_layers_enum": "1,2", "moe_num_experts": 2}, r"layers \[1, 2\] are mixtures of experts"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate=False"),
        ({"zero_centered": False}, "zero_centered=False"),
        ({"partial_rotary_factors": [0.5, 1.0, 1.0]}, "differs between layers"),
        ({"partial_rotary_factor": 0.5}, "in another place"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "in another place"),
        ({"swiglu_limits_shared": [0.0, None, 16.0]}, "clamps the MLP"),
        ({"query_pre_attn_scalar": 8}, "query_pre_attn_scalar=8"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        (
            {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
            | {"attention_other_setting": {"num_attention_heads": 8}},
            r"layers have \[4, 8, 8\] query heads",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_step_models_beyond_this_decoder_are_refused(change, message, tmp_path):
    step_checkpoint(tmp_path / "source", STEP)
    change_config(tmp_path / "source", **change)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["linear_attention", "full_attention", "full_attention"]}, r"layers \[0\] .* hybrid"),
        ({"attn_output_gate": False}, "attn_output_gate is false"),
    ],
)
@pytest.mark.parametrize("model_type", QWEN_CLASSES)
def test_qwen_models_beyond_this_decoder_are_refused(model_type, fields, message, tmp_path):
    qwen_model(model_type).save_pretrained(tmp_path / "source")
    change_config(tmp_path / "source", **fields)
    with pytest.raises(ValueError, match=f"This {model_type} checkpoint cannot be represented: {message}"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out")


def test_experts_are_refused(tmp_path):
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [0]}
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**QWEN | fields | {"shared_expert_intermediate_size": 8}))
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=r"layers \[1, 2\] are mixtures of experts"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out")
