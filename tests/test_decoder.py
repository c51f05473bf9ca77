"""The ungated decoder is the library's, bit for bit; rotary types, windows, masks, packing, backends and buffers."""

import copy

import pytest
import reference
import torch
from torch import nn
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gated_llama import GatedLlamaConfig, GatedLlamaForCausalLM, GatedLlamaModel


SIZES = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
}
IDS = torch.randint(3, 96, (2, 20), generator=torch.Generator().manual_seed(1))

# Every rotary type of the library; lengths are such that 20 tokens with 8 generated pass the original length.
ROPE = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 16},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i / 4 for i in range(8)],
        "original_max_position_embeddings": 16,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "proportional": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}

BIASES = {"qkv_bias": True, "o_bias": True}
ALTERNATING = ["full_attention", "sliding_attention", "full_attention"]

# name: (library class, its config, its fields, ours). Sizes are shared.
ZOO = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}, {}),
    "llama MHA": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}, {"num_key_value_heads": 4}),
    "llama MQA": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}, {"num_key_value_heads": 1}),
    "llama biases": (
        LlamaForCausalLM,
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True},
        {**BIASES, "mlp_bias": True},
    ),
    "llama tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}, {"qk_norm": True}),
    "qwen3 biases": (Qwen3ForCausalLM, Qwen3Config, {"attention_bias": True}, {"qk_norm": True, **BIASES}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}, {"qkv_bias": True}),
    "qwen2 sliding": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ALTERNATING},
        {"qkv_bias": True, "sliding_window": 5, "layer_types": ALTERNATING},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}, {}),
    "mistral sliding": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}, {"sliding_window": 8}),
    "glm4 partial rotary": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        {"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 3, "partial_rotary_factor": 0.5},
        {"qk_norm": True, "qkv_bias": True, "partial_rotary_factor": 0.5},
    ),
    **{
        f"llama {rope_type} rope": (
            LlamaForCausalLM,
            LlamaConfig,
            {"rope_parameters": rope},
            {"rope_parameters": rope},
        )
        for rope_type, rope in ROPE.items()
    },
}


def fill(model: nn.Module) -> nn.Module:
    """Weights, biases and norms that all matter."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise / 4 if parameter.ndim == 1 and parameter.mean() == 1 else noise / 4)
    return model.eval()


def pair(name):
    """A library model and ours with the same weights."""
    library_class, config_class, theirs, ours = ZOO[name]
    # Configs write into the dict that they are given, so each gets its own.
    common = {**SIZES, "rms_norm_eps": 1e-5, "eos_token_id": 2, "pad_token_id": 0}
    source = fill(library_class(config_class(**copy.deepcopy({**common, **theirs}))))
    result = GatedLlamaForCausalLM(GatedLlamaConfig(**copy.deepcopy({**common, **ours}))).eval()
    result.load_state_dict(source.state_dict())
    return source, result


@pytest.mark.parametrize("name", ZOO)
def test_ungated_is_the_library_bitwise(name):
    """Logits, every hidden state, and eight greedy tokens with their cache, in fp32."""
    source, result = pair(name)
    theirs, ours = (model(IDS, output_hidden_states=True) for model in (source, result))
    assert torch.equal(theirs.logits, ours.logits)
    assert len(ours.hidden_states) == 4
    assert all(torch.equal(a, b) for a, b in zip(theirs.hidden_states, ours.hidden_states, strict=True))
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    greedy = [
        model.generate(IDS, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        for model in (source, result)
    ]
    assert torch.equal(*greedy)
    assert greedy[0].shape == (2, 28)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2 sliding"])
def test_ungated_gradients_are_the_librarys(name):
    source, result = pair(name)
    for model in (source, result):
        model(IDS, labels=IDS).loss.backward()
    gradients = dict(result.named_parameters())
    assert all(torch.equal(p.grad, gradients[n].grad) for n, p in source.named_parameters())


# Rotary embeddings.


@pytest.mark.parametrize("rope_type", ROPE)
@pytest.mark.parametrize("length", [12, 40])
def test_rotary_equals_the_librarys(rope_type, length):
    """Frequencies, scaling, cosine and sine, within and beyond the original length."""
    states, positions = torch.zeros(1, 1), torch.arange(length)[None]
    ours = GatedLlamaModel(GatedLlamaConfig(**SIZES, rope_parameters=dict(ROPE[rope_type]))).rotary_emb
    theirs = LlamaRotaryEmbedding(LlamaConfig(**SIZES, rope_parameters=dict(ROPE[rope_type])))
    assert torch.equal(torch.stack(ours(states, positions)), torch.stack(theirs(states, positions)))
    assert torch.equal(ours.inv_freq, theirs.inv_freq)
    assert ours.attention_scaling == theirs.attention_scaling


@pytest.mark.parametrize("overrides", [{}, {"gate_position": "query", "qk_norm": True}, {"sliding_window": 3}])
@pytest.mark.parametrize("rope", ["partial", "yarn", "yarn partial", "llama3", "proportional"])
def test_rotary_equals_the_loops(rope, overrides, tiny_model):
    """Partial rotary of every kind, inside the model: the loops rotate the coordinates that inv_freq names."""
    parameters = dict(ROPE.get(rope.split()[0], ROPE["default"]))
    if "partial" in rope:
        parameters["partial_rotary_factor"] = 0.25
    model = fill(tiny_model(rope_parameters=parameters, **overrides))
    rotary, tokens = model.model.rotary_emb, IDS[0, :6].tolist()
    assert 2 * len(rotary.inv_freq) == (4 if "partial" in rope else 16)
    logits = reference.decoder_logits(
        model.config, model.state_dict(), tokens, rotary.inv_freq, rotary.attention_scaling
    )
    # fp32 sums over 40 products with logits of order 10.
    torch.testing.assert_close(model(torch.tensor([tokens])).logits[0], logits, rtol=1e-4, atol=1e-4)


def test_rotary_pairs_survive_a_change_of_head_count():
    """head_dim is its own field: 3 heads of 16 on a hidden size of 40."""
    config = GatedLlamaConfig(**{**SIZES, "num_attention_heads": 3, "num_key_value_heads": 1}, gate_position="G1")
    model = GatedLlamaForCausalLM(config)
    assert model.model.layers[0].self_attn.g_proj.weight.shape == (48, 40)
    assert model(IDS).logits.shape == (2, 20, 96)


# Masks, padding, packing, backends.

WINDOWS = {"layer_types": ALTERNATING, "sliding_window": 6}


@pytest.fixture
def use_implementation():
    """`use_implementation(model, name)`; flex_attention runs unfused, since compiling it takes a minute on CPU."""

    def use(model, name):
        model.set_attn_implementation(name)
        torch.compiler.set_stance("force_eager" if name == "flex_attention" else "default")

    yield use
    torch.compiler.set_stance("default")


# Transformers 5.24 builds flex_attention's block mask with a flag that torch 2.13 deprecates, and torch's compiler
# imports deprecated parts of torch.
flex_warnings = pytest.mark.filterwarnings(
    "ignore:.*(_compile flag|torch.jit.script_method):DeprecationWarning",
    "ignore:flex_attention called without torch.compile:UserWarning",
)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_left_padding_of_every_length(implementation, tiny_model):
    """Rows with 0 to 40 pads: finite everywhere, forward and backward, and equal to the unpadded row."""
    model = fill(tiny_model(**WINDOWS))
    model.set_attn_implementation(implementation)
    ids = torch.randint(3, 96, (41, 44))
    mask = (torch.arange(44) >= torch.arange(41)[:, None]).long()
    padded = model(ids, attention_mask=mask).logits
    assert padded.isfinite().all()
    for pads in range(41):
        alone = model(ids[pads : pads + 1, pads:]).logits
        # The rotary angles differ by the offset, so products of order 10 differ in their last bits.
        torch.testing.assert_close(padded[pads : pads + 1, pads:], alone, rtol=1e-4, atol=1e-4)
    (padded * mask[..., None]).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_masked_rows_are_finite_in_half_precision(implementation, dtype, tiny_model):
    model = tiny_model(**WINDOWS).to(dtype)
    model.set_attn_implementation(implementation)
    mask = (torch.arange(20) >= torch.tensor([[0], [17]])).long()
    assert model(IDS, attention_mask=mask).logits.isfinite().all()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_row_that_sees_nothing_is_finite(implementation, tiny_model):
    """A four-dimensional mask with an empty row: finite forward and backward, and no trace before that row."""
    model = tiny_model()
    model.set_attn_implementation(implementation)
    visible = torch.ones(20, 20).tril().bool()
    visible[3] = False
    mask = visible if implementation == "sdpa" else torch.zeros(20, 20).masked_fill(~visible, torch.finfo().min)
    logits = model(IDS, attention_mask=mask.expand(2, 1, 20, 20)).logits
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    torch.testing.assert_close(logits[:, :3], model(IDS[:, :3]).logits)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_right_padding_does_not_reach_real_tokens(implementation, tiny_model):
    model = fill(tiny_model(**WINDOWS))
    model.set_attn_implementation(implementation)
    mask = (torch.arange(20) < torch.tensor([[20], [9]])).long()
    padded = model(IDS, attention_mask=mask).logits
    torch.testing.assert_close(padded[1:, :9], model(IDS[1:, :9]).logits, rtol=1e-4, atol=1e-4)


@flex_warnings
@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("position", ["sdpa_output", "value"])
def test_packed_documents_equal_separate_ones(
    implementation, position, tiny_model, randomize_gates, use_implementation
):
    """Positions that restart separate the documents of one row (without a cache, as in training)."""
    model = randomize_gates(fill(tiny_model(gate_position=position, **WINDOWS)))
    use_implementation(model, implementation)
    lengths = [7, 9, 4]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = model(IDS[:1], position_ids=positions, use_cache=False).logits
    separate = [model(document).logits for document in IDS[:1].split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(separate, dim=1), rtol=1e-4, atol=1e-4)


GATES = [{}, {"gate_granularity": "headwise"}, {"gate_position": "value"}, {"gate_position": "query", "qk_norm": True}]


@pytest.mark.parametrize("overrides", GATES)
def test_sdpa_equals_eager(overrides, tiny_model, randomize_gates):
    """Up to rounding, forward and in every gradient, with padding and windows."""
    model = randomize_gates(tiny_model(**WINDOWS, **overrides))
    mask = (torch.arange(20) >= torch.tensor([[0], [5]])).long()
    results = []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(IDS, attention_mask=mask).logits[mask.bool()]
        logits.pow(2).sum().backward()
        results.append([logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    for found, expected in zip(*results, strict=True):
        # Gradients of order 10 that sum some 700 terms in fp32.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@flex_warnings
@torch.no_grad()  # flex_attention has no backward on CPU
@pytest.mark.parametrize("overrides", GATES)
def test_flex_attention_equals_eager(overrides, tiny_model, randomize_gates, use_implementation):
    model = randomize_gates(tiny_model(**WINDOWS, **overrides))
    mask = (torch.arange(20) >= torch.tensor([[0], [5]])).long()
    results = []
    for implementation in ("eager", "flex_attention"):
        use_implementation(model, implementation)
        results.append(model(IDS, attention_mask=mask).logits[mask.bool()])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@flex_warnings
@torch.no_grad()
def test_fused_flex_attention_equals_eager(tiny_model, randomize_gates):
    model = randomize_gates(tiny_model(**WINDOWS))
    expected = model(IDS).logits
    model.set_attn_implementation("flex_attention")
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-6)


def test_kernels_are_told_the_window_of_each_layer(tiny_model, monkeypatch):
    """Flash kernels build their own mask, from `sliding_window`, and the others from the mask that they are given."""
    model, windows = tiny_model(**WINDOWS), []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def spy(*args, **kwargs):
        windows.append(kwargs["sliding_window"])
        return sdpa(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", spy)
    model(IDS)
    assert windows == [None, 6, None]


def test_attention_maps_of_eager(tiny_model):
    """Rows sum to one over visible keys; windows hide what is behind them."""
    model = tiny_model(**WINDOWS)
    model.set_attn_implementation("eager")
    maps = model(IDS, output_attentions=True).attentions
    assert [tuple(m.shape) for m in maps] == [(2, 4, 20, 20)] * 3
    for index, kind in enumerate(ALTERNATING):
        visible = torch.ones(20, 20).tril().bool()
        if kind == "sliding_attention":
            visible &= torch.ones(20, 20).triu(-5).bool()
        assert torch.equal(maps[index] > 0, visible.expand_as(maps[index]))
        torch.testing.assert_close(maps[index].sum(-1), torch.ones(2, 4, 20))
