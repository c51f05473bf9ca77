"""Checkpoints that bring a gate of their own: parity with what computed them, and refusals where there is no equal."""

import itertools
import json
import re
from pathlib import Path

import paper_release
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from gated_llama import GatedLlamaForCausalLM
from gated_llama.convert import convert_checkpoint, imports
from gated_llama.convert.layouts import LAYOUTS, HeadGeometry


GOLDEN = Path(__file__).parent / "data" / "golden"
IDS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))

# Two ways through the same float32 sums of a model whose logits are of size 1 to 10.
ROUNDING = {"atol": 1e-5, "rtol": 0}
LOUD = 0.05


def write_checkpoint(folder: Path, config: dict, tensors: dict) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path, **options) -> GatedLlamaForCausalLM:
    return GatedLlamaForCausalLM.from_pretrained(folder, attn_implementation="eager", **options).eval()


@torch.no_grad()
def logits_of(model, ids=IDS) -> torch.Tensor:
    return model(input_ids=ids).logits


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


# The paper release


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
    assert report.notes == [*([] if "baseline" in name else [imported_note(model.config)]), NO_TOKENIZER]


NO_TOKENIZER = "The source has no tokenizer, so neither has the result."


def imported_note(config) -> str:
    return (
        f"The source's own gate was taken over ({config.gate_granularity}, stored as "
        f"{config.gate_retrofit['layout']!r}); nothing was initialised or folded."
    )


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
    assert report.notes == [imported_note(report.config), NO_TOKENIZER]


# Qwen3-Next and Qwen3.5


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
    path = tmp_path / "source" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"partial_rotary_factor": 1.0}))
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
    assert {tensor.dtype for name, tensor in after.items() if name not in norms} == {torch.bfloat16}
    assert report.config.dtype == torch.bfloat16
    assert report.notes[0].startswith("13 norm gains are stored in float32")
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
    path = tmp_path / "source" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Refusals


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
    path = tmp_path / "source" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ValueError, match=f"This {model_type} checkpoint cannot be represented: {message}"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out")


def test_experts_are_refused(tmp_path):
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [0]}
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**QWEN | fields | {"shared_expert_intermediate_size": 8}))
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=r"layers \[1, 2\] are mixtures of experts"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out")


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
