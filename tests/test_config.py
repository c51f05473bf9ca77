"""The configuration: strict fields, round trips, and what loading a folder accepts, restores and refuses."""

import copy
import json
import pickle

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gated_llama import (
    GatedLlamaConfig,
    GatedLlamaForCausalLM,
    GatedLlamaForQuestionAnswering,
    GatedLlamaForSequenceClassification,
    GatedLlamaForTokenClassification,
    GatedLlamaModel,
)
from gated_llama.checkpoint_gated import StrictCheckpoints


IDS = torch.tensor([[5, 17, 33, 2, 60, 41]])

# A value other than the default for every field, in two configs that are valid.
FIELDS = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "hidden_act": "gelu",
    "max_position_embeddings": 77,
    "initializer_range": 0.05,
    "rms_norm_eps": 1e-4,
    "use_cache": False,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 777.0, "factor": 3.0},
    "attention_dropout": 0.25,
    "pad_token_id": 3,
    "bos_token_id": 4,
    "eos_token_id": [5, 6],
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "qk_norm": True,
    "norms_in_fp32": True,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "gate_position": "value",
    "gate_granularity": "headwise",
    "gate_head_shared": True,
    "gate_operation": "add",
    "gate_activation": "ns_sigmoid",
    "gate_input": "hidden_states",
    "gate_bias": True,
    "gate_layers": [0, 2],
    "gate_init": "zeros",
    "gate_in_fp32": True,
    "sdpa_output_norm": True,
    "gate_format_version": 1,
    "gate_retrofit": {"policy": "identity", "fold": {"factor": 2.0}},
}


def test_every_field_survives_json(tmp_path):
    """Of this class's own fields, none is left out of FIELDS, and each comes back as it went in."""
    own = set(GatedLlamaConfig.__annotations__) - {"model_type"}
    assert own == set(FIELDS)
    GatedLlamaConfig(**copy.deepcopy(FIELDS)).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    loaded = AutoConfig.from_pretrained(tmp_path)
    for name, value in FIELDS.items():
        assert written[name] == value, name
        assert getattr(loaded, name) == value, name


def test_default_gate_fields_are_written(tmp_path):
    """What a reader must know is in the file, not in the reader's defaults."""
    GatedLlamaConfig().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    absent = [name for name in FIELDS if name not in written]
    assert absent == []
    assert written["gate_position"] is None
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_copies_are_equal_and_independent(clone):
    config = GatedLlamaConfig(**copy.deepcopy(FIELDS), note="kept")
    twin = clone(config)
    assert twin.to_dict() == config.to_dict()
    assert twin.note == "kept"
    twin.gate_activation = "silu"
    assert config.gate_activation == "ns_sigmoid"


@pytest.mark.parametrize("activation", ["sigmoid", "silu", "identity", "ns_sigmoid"])
def test_models_can_be_pickled(activation, tiny_model):
    """As torch.save of a whole model and processes that are spawned do."""
    model = tiny_model(gate_activation=activation)
    assert torch.equal(pickle.loads(pickle.dumps(model))(IDS).logits, model(IDS).logits)


def test_unknown_fields_are_kept_but_a_mistyped_gate_is_refused(tmp_path):
    config = GatedLlamaConfig(note="kept", num_labels=7)
    config.save_pretrained(tmp_path)
    assert GatedLlamaConfig.from_pretrained(tmp_path).note == "kept"
    with pytest.raises(ValueError, match=r"Unknown gate fields \['gate_postion'\].*gate_position"):
        GatedLlamaConfig(gate_postion="G1")


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"num_experts": 8}, "no experts"),
        ({"num_local_experts": 4}, "no experts"),
        ({"router_aux_loss_coef": 0.001}, "no experts"),
        ({"gating": "softplus"}, "gate_position"),
        ({"attn_output_gate": True}, "gate_position"),
        ({"headwise_attn_output_gate": True}, "gate_granularity"),
        ({"attention_bias": True}, "qkv_bias"),
        ({"use_qk_norm": True}, "qk_norm"),
        ({"full_attention_interval": 4}, "layer_types"),
        ({"no_rope_layers": [1, 0, 1]}, "rotary"),
        ({"kv_lora_rank": 512}, "latent"),
        ({"linear_num_value_heads": 32}, "linear attention"),
        ({"final_logit_softcapping": 30.0}, "caps nothing"),
        ({"attention_multiplier": 0.0078125}, "head_dim"),
        ({"embedding_multiplier": 12.0}, "scales neither"),
        ({"logit_scale": 0.0625}, "scales neither"),
        ({"hidden_activation": "gelu"}, "hidden_act"),
        ({"sliding_window": 4, "use_sliding_window": False}, "layer_types"),
        ({"sliding_window": 4, "max_window_layers": 2}, "layer_types"),
    ],
)
def test_fields_that_would_be_ignored_are_refused(fields, advice, tiny_config, tmp_path):
    """Where they are passed, read from a folder, or assigned before the model is built."""
    name = list(fields)[-1]
    with pytest.raises((ValueError, StrictDataclassError), match=rf"{name}=.*ignored.*{advice}"):
        tiny_config(**fields)
    tiny_config().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layer_types": None} | fields))
    with pytest.raises((ValueError, StrictDataclassError), match=rf"{name}=.*ignored"):
        AutoConfig.from_pretrained(tmp_path)
    config = tiny_config(sliding_window=fields.get("sliding_window"))
    setattr(config, name, fields[name])
    with pytest.raises(StrictDataclassError, match=rf"{name}=.*ignored"):
        GatedLlamaForCausalLM(config)


def test_fields_that_say_what_the_decoder_does_are_harmless(tiny_config):
    tiny_config(num_experts=0, num_local_experts=None, gating=False, attn_output_gate=False, attention_bias=False)
    tiny_config(no_rope_layers=[1, 1, 1], logit_scale=1.0, residual_multiplier=1, final_logit_softcapping=None)
    tiny_config(use_sliding_window=False, max_window_layers=28)
    tiny_config(sliding_window=4, use_sliding_window=True, max_window_layers=0)


def test_a_mistyped_gate_is_refused_when_it_is_assigned(tiny_config):
    config = tiny_config()
    config.gate_postion = "value"
    with pytest.raises(StrictDataclassError, match=r"Unknown gate fields \['gate_postion'\]"):
        GatedLlamaForCausalLM(config)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({**YARN, "beta_fats": 32}, "not read, ['beta_fats']"),
        ({"rope_type": "yarn", "fator": 4.0}, "lack ['factor']"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, "not read, ['beta_fast']"),
        ({"rope_theta": 1e4, "factor": 4.0}, "type 'default' have keys that are not read, ['factor']"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "lack ['high_freq_factor']"),
    ],
)
def test_rotary_keys_that_are_not_read_are_refused(rope, words, tiny_config, tmp_path):
    with pytest.raises(StrictDataclassError) as error:
        tiny_config(rope_parameters=rope)
    assert words in str(error.value)
    tiny_config().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": rope}))
    with pytest.raises(StrictDataclassError, match="rope_parameters of type"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_older_names_of_rotary_fields_are_read(tiny_config):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "finetuned": True}
    config = tiny_config(rope_scaling=scaling, rope_theta=5e4)
    assert (config.rope_parameters["rope_type"], config.rope_parameters["rope_theta"]) == ("yarn", 5e4)
    tiny_config(rope_parameters={**YARN, "partial_rotary_factor": 0.5, "mscale": 1.0, "truncate": False})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": "large"}, ["hidden_size", "int", "large"]),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, ["6", "4", "multiple"]),
        ({"num_attention_heads": 4, "num_key_value_heads": 8}, ["multiple"]),
        ({"num_attention_heads": 4, "num_key_value_heads": 0}, ["multiple"]),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"]}, ["num_hidden_layers", "layer_types"]),
        ({"num_hidden_layers": 1, "layer_types": ["chunked_attention"]}, ["chunked_attention", "sliding_attention"]),
        ({"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, ["sliding_window=None"]),
        ({"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": 0}, ["sliding_window=0"]),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"], "sliding_window": 4}, ["sliding_window=4"]),
        ({"rope_parameters": {"rope_type": "spiral"}}, ["spiral", "llama3"]),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            ["per layer type", "full_attention"],
        ),
    ],
)
def test_invalid_decoders_are_refused(fields, words):
    with pytest.raises(StrictDataclassError) as error:
        GatedLlamaConfig(**fields)
    assert all(word in str(error.value) for word in words), error.value


def test_assignments_are_normalised_and_checked(tiny_config):
    config = tiny_config()
    config.gate_position = "G2"
    assert (config.gate_position, config.gate_shape) == ("value", (2, 16))
    with pytest.raises(StrictDataclassError, match="ns_sigmoid"):
        config.gate_activation = "tanh"
    config.gate_position, config.gate_granularity = "dense_output", "headwise"
    with pytest.raises(StrictDataclassError, match="no head axis"):
        GatedLlamaForCausalLM(config)


# Folders.


def constant_model(tiny_model, **overrides):
    """Every parameter at one recognisable value."""
    model = tiny_model(gate_bias=True, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.125)
    return model


def edited(folder, edit):
    """Applies `edit` to the tensors of a saved folder."""
    file = folder / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})
    return folder


def without(*endings):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith(endings)}


@pytest.mark.parametrize(
    "loader", [GatedLlamaForCausalLM, AutoModelForCausalLM, AutoModel, GatedLlamaForSequenceClassification]
)
def test_missing_gates_are_refused(loader, tiny_model, tmp_path):
    """By our classes, by the Auto classes, and by heads that rightly lack a weight of their own."""
    constant_model(tiny_model).save_pretrained(tmp_path)
    loader.from_pretrained(tmp_path)
    edited(tmp_path, without("1.self_attn.g_proj.bias"))
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.g_proj\.bias.*gated-llama convert"):
        loader.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("edit", "arguments", "words"),
    [
        (without("0.self_attn.g_proj.weight"), {}, "has no weights"),
        (without("2.self_attn.q_proj.weight"), {}, "has no weights"),
        (
            lambda t: {name: v[:8] if name.endswith("1.self_attn.g_proj.weight") else v for name, v in t.items()},
            {"ignore_mismatched_sizes": True},
            "has other shapes",
        ),
        (lambda tensors: tensors, {"gate_position": None}, "does not declare"),
        (lambda tensors: tensors, {"gate_bias": False}, "does not declare"),
        (lambda tensors: tensors, {"gate_layers": [0]}, "does not declare"),
        (lambda tensors: tensors, {"sdpa_output_norm": True}, "has no weights"),
    ],
)
def test_attention_weights_are_neither_invented_nor_dropped(edit, arguments, words, tiny_model, tmp_path):
    constant_model(tiny_model).save_pretrained(tmp_path)
    edited(tmp_path, edit)
    with pytest.raises(ValueError, match=words):
        GatedLlamaForCausalLM.from_pretrained(tmp_path, **arguments)


# Every tensor: what is missing, misshapen or left over, and what may be.

HEAD_CLASSES = [
    GatedLlamaForCausalLM,
    GatedLlamaModel,
    GatedLlamaForSequenceClassification,
    GatedLlamaForTokenClassification,
    GatedLlamaForQuestionAnswering,
]


def plus(name):
    return lambda tensors: tensors | {name: torch.ones(2)}


def cut(ending):
    return lambda tensors: {name: v[:8].clone() if name.endswith(ending) else v for name, v in tensors.items()}


@pytest.mark.parametrize("loader", HEAD_CLASSES)
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (without("1.mlp.up_proj.weight"), r"no weights.*layers\.1\.mlp\.up_proj"),
        (without("2.post_attention_layernorm.weight"), r"no weights.*post_attention_layernorm"),
        (without("model.norm.weight"), r"no weights.*norm\.weight"),
        (without("embed_tokens.weight"), r"no weights.*embed_tokens"),
        (plus("model.layers.0.mlp.experts.3.up_proj.weight"), r"does not declare.*experts\.3"),
        (plus("model.layers.0.mlp.gate.weight"), r"does not declare.*mlp\.gate\.weight"),
        (plus("model.layers.1.mlp.up_proj.bias"), r"does not declare.*up_proj\.bias"),
        (plus("model.layers.7.input_layernorm.weight"), r"does not declare.*layers\.7"),
        (cut("2.mlp.down_proj.weight"), r"other shapes.*down_proj"),
    ],
)
def test_the_decoder_is_complete_and_nothing_else(edit, words, loader, tiny_model, tmp_path):
    """From the folder of a language model, by every head."""
    tiny_model().save_pretrained(tmp_path)
    loader.from_pretrained(tmp_path)
    edited(tmp_path, edit)
    with pytest.raises(ValueError, match=words):
        loader.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("saved", HEAD_CLASSES)
@pytest.mark.parametrize("loader", HEAD_CLASSES)
def test_heads_may_change_but_a_language_model_is_not_invented(saved, loader, tiny_config, tmp_path):
    saved(tiny_config()).save_pretrained(tmp_path)
    if loader is GatedLlamaForCausalLM and saved is not GatedLlamaForCausalLM:
        with pytest.raises(ValueError, match=r"no weights.*lm_head\.weight"):
            loader.from_pretrained(tmp_path)
    else:
        assert type(loader.from_pretrained(tmp_path)) is loader


def test_a_tied_head_needs_no_tensor(tiny_config, tmp_path):
    model = GatedLlamaModel(tiny_config(tie_word_embeddings=True)).eval()
    model.save_pretrained(tmp_path)
    loaded = GatedLlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (without("score.weight"), r"no weights.*score\.weight"),
        (plus("score.bias"), r"does not declare.*score\.bias"),
        (plus("mtp.layers.0.norm.weight"), r"does not declare.*mtp\.layers"),
    ],
)
def test_the_own_head_is_complete(edit, words, tiny_config, tmp_path):
    GatedLlamaForSequenceClassification(tiny_config()).save_pretrained(tmp_path)
    edited(tmp_path, edit)
    with pytest.raises(ValueError, match=words):
        GatedLlamaForSequenceClassification.from_pretrained(tmp_path)


def test_another_number_of_labels(tiny_config, tmp_path):
    """Fine-tuning goes on with a classifier of another size where its user says so."""
    GatedLlamaForSequenceClassification(tiny_config(num_labels=3)).save_pretrained(tmp_path)
    arguments = {"num_labels": 5, "ignore_mismatched_sizes": True}
    loaded = GatedLlamaForSequenceClassification.from_pretrained(tmp_path, **arguments)
    assert loaded.score.weight.shape == (5, 40)


def test_old_rotary_buffers_in_a_file_are_harmless(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    edited(tmp_path, plus("model.layers.0.self_attn.rotary_emb.inv_freq"))
    GatedLlamaForCausalLM.from_pretrained(tmp_path)


def test_an_adapter_folder_loads_over_its_base(tiny_model, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tuned = get_peft_model(base, LoraConfig(target_modules=["v_proj", "g_proj"], init_lora_weights=False)).eval()
    tuned.save_pretrained(tmp_path / "adapter")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(IDS).logits, tuned(IDS).logits, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(loaded(IDS).logits, model(IDS).logits)


def test_missing_constant_gates_are_refused(tiny_model, tmp_path):
    tiny_model(gate_input="constant").save_pretrained(tmp_path)
    edited(tmp_path, without("g_param"))
    with pytest.raises(ValueError, match="g_param"):
        GatedLlamaForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("missing", ["1.self_attn.g_proj.bias", "1.self_attn.g_proj.weight", "1.mlp.up_proj.weight"])
@pytest.mark.parametrize("gate_init", ["normal", "zeros"])
def test_present_tensors_are_never_altered(missing, gate_init, tiny_model, tmp_path):
    """When a sibling is missing, what the file has is loaded as it is, bit for bit."""
    constant_model(tiny_model, gate_init=gate_init).save_pretrained(tmp_path)
    edited(tmp_path, without(missing))
    # The refusal comes after loading; what was loaded is looked at here without it.
    plain_loading = super(StrictCheckpoints, GatedLlamaForCausalLM).from_pretrained
    altered = {n for n, p in plain_loading(tmp_path).named_parameters() if not (p == 0.125).all()}
    assert altered == {f"model.layers.{missing}"}


def test_loading_info_is_still_available(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    model, info = GatedLlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(model, GatedLlamaForCausalLM)
    assert not any(info.values())


def plain_llama(folder):
    sizes = {"vocab_size": 96, "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("loader", [GatedLlamaConfig, GatedLlamaForCausalLM, GatedLlamaForSequenceClassification])
def test_a_plain_llama_is_refused_by_type(loader, tmp_path):
    with pytest.raises(ValueError, match=r"type 'llama', not 'gated_llama'.*gated-llama convert"):
        loader.from_pretrained(plain_llama(tmp_path))


@pytest.mark.parametrize("loader", [GatedLlamaForCausalLM, AutoModelForCausalLM])
@pytest.mark.parametrize("gate_input", ["hidden_states", "constant"])
def test_a_plain_llama_is_refused_with_a_config(loader, gate_input, tiny_config, tmp_path):
    with pytest.raises(ValueError, match=r"has no weights.*gated-llama convert"):
        loader.from_pretrained(plain_llama(tmp_path), config=tiny_config(gate_input=gate_input))


# Initialisation of fresh gates, on every route.

GATE_STARTS = {
    ("hidden_states", "zeros"): lambda weight: not weight.any(),
    ("hidden_states", "normal"): lambda weight: 0.015 < weight.std() < 0.025 and abs(weight.mean()) < 0.002,
    ("constant", "normal"): lambda weight: not weight.any(),
}


@pytest.mark.parametrize(("gate_input", "gate_init"), GATE_STARTS)
@pytest.mark.parametrize("route", ["class", "auto", "auto bf16", "meta", "reloaded"])
def test_fresh_gates_follow_gate_init(route, gate_input, gate_init, tiny_config, tmp_path):
    config = tiny_config(gate_input=gate_input, gate_init=gate_init, gate_bias=gate_input == "hidden_states")
    if route == "class":
        model = GatedLlamaForCausalLM(config)
    elif route == "meta":
        with torch.device("meta"):
            model = GatedLlamaForCausalLM(config)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data.fill_(7.0)
        model.apply(lambda module: setattr(module, "_is_hf_initialized", False))
        model.initialize_weights()
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if "bf16" in route else torch.float32)
    if route == "reloaded":
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    gates = {name: parameter for name, parameter in model.named_parameters() if ".self_attn.g_p" in name}
    weights = [gate for name, gate in gates.items() if not name.endswith("bias")]
    assert len(weights) == 3
    assert all(GATE_STARTS[gate_input, gate_init](weight.float()) for weight in weights)
    assert not any(gate.any() for name, gate in gates.items() if name.endswith("bias"))


# Tied embeddings, buffers, dtypes.


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_in_the_file_when_untied(tied, tiny_model, tmp_path):
    model = tiny_model(tie_word_embeddings=tied)
    model.resize_token_embeddings(101)
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not tied)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == 101
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("rope_type", ["default", "yarn", "llama3"])
def test_buffers_are_exact_after_every_load(rope_type, tiny_model, tmp_path):
    """Buffers outside the file are refilled, whatever memory held before; 20 loads in one process."""
    rope = {
        "default": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
        "llama3": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    }[rope_type]
    model = tiny_model(rope_parameters=rope)
    model.save_pretrained(tmp_path)
    expected = dict(model.named_buffers())
    if rope_type != "default":
        library = LlamaRotaryEmbedding(
            LlamaConfig(head_dim=16, max_position_embeddings=128, rope_parameters=dict(rope))
        )
        assert torch.equal(model.model.rotary_emb.inv_freq, library.inv_freq)
    for _ in range(20):
        garbage = torch.full((1 << 20,), float("nan"))
        del garbage
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        buffers = dict(loaded.named_buffers())
        assert buffers.keys() == expected.keys()
        assert all(torch.equal(buffers[name], expected[name]) for name in expected)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("gate_input", ["hidden_states", "constant"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_in_fp32_stay_fp32_in_a_half_model(dtype, gate_input, tiny_model, randomize_gates, tmp_path):
    """Two generations: weights and scores in fp32, everything else in the file's dtype."""
    model = randomize_gates(tiny_model(gate_in_fp32=True, gate_input=gate_input))
    model.save_pretrained(tmp_path / "fp32")
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=dtype)
    first.save_pretrained(tmp_path / "half")
    second = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    for loaded in (first, second):
        kept = {name for name, parameter in loaded.named_parameters() if parameter.dtype == torch.float32}
        assert kept == {name for name, _ in loaded.named_parameters() if ".self_attn.g_p" in name}
        output = loaded.model(IDS, output_gate_scores=True)
        assert {score.dtype for score in output.gate_scores} == {torch.float32}
        assert output.last_hidden_state.dtype == dtype
    for name, parameter in second.named_parameters():
        if ".self_attn.g_p" in name:
            assert torch.equal(parameter, model.get_parameter(name))


def test_gate_dtype_follows_the_model_by_default(tiny_model, tmp_path):
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert {score.dtype for score in loaded.model(IDS, output_gate_scores=True).gate_scores} == {torch.bfloat16}
