"""The ungated decoder is the library's, bit for bit; rotary types, windows, masks, packing, backends and buffers."""

import copy
import logging

import pytest
import reference
import torch
from torch import nn
from transformers import (
    DataCollatorWithFlattening,
    DynamicCache,
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
    Trainer,
    TrainingArguments,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gated_llama import GatedLlamaConfig, GatedLlamaForCausalLM, GatedLlamaModel
from gated_llama import modeling_gated as modeling


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


def emptied(model):
    """What `to_empty` may leave: memory that others have used."""
    return model._apply(lambda tensor: torch.full_like(tensor, float("nan")))


def materialised(model, assign):
    """Built without memory, which is then given and filled."""
    state = model.state_dict()
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty.load_state_dict(state, assign=True) if assign else empty.to_empty(device="cpu").load_state_dict(state)
    return empty


def cast_buffers(model):
    """As FSDP1 casts them, past the modules."""
    for buffer in model.buffers():
        buffer.data = buffer.data.bfloat16()
    return model


# Ways to cast or to fill a model. By most of them the library's own embedding loses its frequencies.
CASTS = {
    "to": lambda model: model.to(torch.bfloat16),
    "bfloat16": lambda model: model.bfloat16(),
    "half and back": lambda model: model.half().float(),
    "double": lambda model: model.double(),
    "emptied": emptied,
    "to_empty": lambda model: materialised(model, assign=False),
    "assigned": lambda model: materialised(model, assign=True),
    "a cast of buffers": cast_buffers,
    "from_config": lambda model: type(model)._from_config(model.config, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("rope", [*ROPE, "partial"])
def test_casts_leave_the_rotary_embedding_alone(rope, cast, used, tiny_model):
    """Cosine and sine at 3,000 positions, before and after the model was used at lengths that change frequencies."""
    parameters = dict(ROPE.get(rope, ROPE["default"])) | ({"partial_rotary_factor": 0.5} if rope == "partial" else {})
    model, states = tiny_model(rope_parameters=parameters, num_hidden_layers=1, gate_position=None), torch.zeros(1, 1)
    expected = GatedLlamaModel(copy.deepcopy(model.config)).rotary_emb
    if used:
        model(IDS)
    found = CASTS[cast](model).model.rotary_emb
    for length in (3000, 12):
        positions = torch.arange(length)[None]
        for ours, theirs in zip(found(states, positions), expected(states, positions), strict=True):
            assert torch.equal(ours, theirs)
    assert found.inv_freq.dtype == torch.float32


def test_a_cast_keeps_frequencies_that_have_grown(tiny_model):
    """Dynamic frequencies are those of the longest text so far, until one fits again."""
    rotary, states = tiny_model(rope_parameters=dict(ROPE["dynamic"])).model.rotary_emb, torch.zeros(1, 1)
    rotary(states, torch.arange(400)[None])
    grown = rotary.inv_freq.clone()
    assert not torch.equal(grown, rotary.original_inv_freq)
    assert torch.equal(rotary.bfloat16().inv_freq, grown)


def test_moves_keep_the_memory_of_the_table(tiny_model):
    """A graph that was captured reads it there."""
    rotary = tiny_model().model.rotary_emb
    place = rotary.inv_freq.data_ptr()
    assert rotary.to("cpu").inv_freq.data_ptr() == place
    assert rotary.to("meta").inv_freq.device.type == "meta"


def test_evaluation_in_bfloat16_keeps_far_positions(tiny_model, tmp_path):
    """Trainer casts the model; the frequencies of the library's own are then off by 0.4 %."""
    model = tiny_model(num_hidden_layers=1)
    expected = model.model.rotary_emb.inv_freq.clone()
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, bf16_full_eval=True)
    Trainer(model=model, args=arguments, eval_dataset=[{"input_ids": IDS[0], "labels": IDS[0]}]).evaluate()
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(model.model.rotary_emb.inv_freq, expected)


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


@pytest.fixture
def leaks(caplog, monkeypatch):
    """`leaks(model, ids, **inputs)`: whether the model said that documents see each other."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)

    def said(model, *args, **inputs):
        modeling.logger.warning_once.cache_clear()
        caplog.clear()
        with torch.no_grad():
            model(*args, **inputs)
        return "packed documents: they attend to each other" in caplog.text

    return said


RESTARTS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3]])
COUNTED = torch.arange(20)[None]
PADDED = {"attention_mask": (torch.arange(20) >= torch.tensor([[4], [0]])).long()}


@flex_warnings
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize(
    "inputs",
    [
        {"use_cache": True},
        {},  # the configuration asks for a cache
        {"cache": DynamicCache},
        {"use_cache": False, "attention_mask": torch.ones_like(IDS)},
        {"use_cache": False, **PADDED},
    ],
)
def test_documents_that_see_each_other_are_told(inputs, implementation, tiny_model, leaks, use_implementation):
    """A word where a change in the first document reaches the logits of the second, and only there."""
    model = fill(tiny_model())
    use_implementation(model, implementation)
    inputs = {name: value() if callable(value) else value for name, value in inputs.items()}
    assert leaks(model, IDS, position_ids=RESTARTS.expand(2, -1), **inputs)
    inputs.pop("cache", None)
    with torch.no_grad():
        changed = torch.cat([(IDS[:, :7] + 1) % 96, IDS[:, 7:]], dim=1)
        both = [model(ids, position_ids=RESTARTS.expand(2, -1), **inputs).logits[1, 7:] for ids in (IDS, changed)]
    assert not torch.allclose(*both, atol=1e-3)


@pytest.mark.parametrize(
    "inputs",
    [
        {"position_ids": RESTARTS, "use_cache": False},
        {"position_ids": COUNTED, "use_cache": True, **PADDED},
        {"position_ids": (PADDED["attention_mask"].cumsum(1) - 1).clamp(min=0), **PADDED},
        {
            "position_ids": (PADDED["attention_mask"].cumsum(1) - 1).masked_fill(PADDED["attention_mask"] == 0, 1),
            **PADDED,
        },
        {
            "position_ids": PADDED["attention_mask"].flip(1).cumsum(1) - 1,
            "attention_mask": PADDED["attention_mask"].flip(1),
        },
        {"position_ids": RESTARTS, "attention_mask": torch.ones(20, 20).tril().bool().expand(2, 1, 20, 20)},
        PADDED,
        {},
    ],
)
def test_other_rows_are_not_told_anything(inputs, tiny_model, leaks):
    assert not leaks(tiny_model(), IDS, **inputs)


@pytest.mark.parametrize(
    ("implementation", "mask", "expected"),
    [
        ("flash_attention_2", None, False),  # reads the positions
        ("kernels-community/flash-attn3", torch.ones_like(IDS), False),  # the library drops such a mask
        ("flash_attention_2", PADDED["attention_mask"], True),
        ("paged|sdpa", None, False),
        ("vllm", None, False),
    ],
)
def test_kernels_that_know_the_documents(implementation, mask, expected):
    assert modeling.documents_leak(implementation, mask, RESTARTS.expand(2, -1), caching=True) == expected


def test_activation_checkpointing_makes_no_cache(tiny_model, leaks):
    model = tiny_model().train()
    model.activation_checkpointing_enable()
    with torch.enable_grad():
        assert not modeling.documents_leak("sdpa", None, RESTARTS, model.model._makes_a_cache(None))
    assert leaks(model, IDS, position_ids=RESTARTS)


@pytest.mark.parametrize("overrides", [{}, WINDOWS])
def test_the_flattening_collator_is_right(overrides, tiny_model, randomize_gates, leaks):
    """The loss of a packed batch is that of its documents, each token weighing the same."""
    model = randomize_gates(fill(tiny_model(**overrides)))
    documents = [
        {"input_ids": IDS[0, :9].tolist()},
        {"input_ids": IDS[1, :14].tolist()},
        {"input_ids": IDS[1, 3:8].tolist()},
    ]
    batch = DataCollatorWithFlattening(return_tensors="pt")(documents)
    losses, counts = [], []
    for document in documents:
        ids = torch.tensor([document["input_ids"]])
        losses.append(model(ids, labels=ids).loss * (ids.shape[1] - 1))
        counts.append(ids.shape[1] - 1)
    expected = sum(losses) / sum(counts)
    # fp32 means of logits of order 10, which are summed in another order.
    torch.testing.assert_close(model(**batch, use_cache=False).loss, expected, rtol=1e-5, atol=1e-5)
    assert not leaks(model, **batch, use_cache=False)
    assert leaks(model, **batch, use_cache=True)


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
