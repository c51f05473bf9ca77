"""First-token attention without maps: closed forms, equality with maps, padding and packing, nothing left behind."""

import json
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama import modeling_llama

from gated_llama import GatedLlamaConfig, GatedLlamaForCausalLM
from gated_llama.diagnostics import Activations, FirstTokenAttention, FirstTokenStates, GateScores, attention_maps
from gated_llama.diagnostics import attention as attention_module
from gated_llama.diagnostics.visibility import Visibility, sequence_layout


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,  # scores of a few units, so that weights are far from uniform
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Softmax weights are at most 1 and the sums run in another order: a few hundred roundings of 6e-8.
FP32 = {"rtol": 0, "atol": 1e-5}
LIBRARY_INTERFACE = AttentionInterface.get_interface


def build(model_type: str = "llama", implementation: str = "sdpa", **overrides) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SMALL, **overrides})
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def tokens(batch: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def measure(model, *args, probe_options=None, **kwargs):
    with FirstTokenAttention(model, **(probe_options or {})) as probe:
        model(*args, **kwargs)
    return probe.result()


@torch.no_grad()
def maps_of(model, *args, **kwargs) -> list[torch.Tensor]:
    """Eager attention maps [batch, heads, query, key] of each layer, from the same weights."""
    eager = type(model)._from_config(model.config, attn_implementation="eager", dtype=model.dtype).eval()
    eager.load_state_dict(model.state_dict())
    return list(eager(*args, output_attentions=True, **kwargs).attentions)


def expected(maps: list[torch.Tensor], documents: list[tuple[int, int, int]], late: int = 1) -> torch.Tensor:
    """[layers, heads]: plain loops over (row, first, length) and the queries from `late` on."""
    rows = []
    for attention in maps:
        weights = [
            attention[row, :, first + query, first].float()
            for row, first, length in documents
            for query in range(late, length)
        ]
        rows.append(torch.stack(weights).mean(dim=0))
    return torch.stack(rows)


def assert_equal_to_maps(result, maps, documents, tolerance=FP32):
    torch.testing.assert_close(torch.tensor(result.per_head), expected(maps, documents), **tolerance)
    torch.testing.assert_close(torch.tensor(result.per_head_late), expected(maps, documents, late=4), **tolerance)
    assert result.mean == pytest.approx(expected(maps, documents).mean().item(), abs=1e-5)
    assert result.queries == sum(length - 1 for _, _, length in documents)


def constant_sink(strength: float, heads: int = 2) -> GatedLlamaForCausalLM:
    """
    One layer in which token 1, wherever it stands, gets the score `strength` from each query, and other tokens get 0.

    Rotary theta is so large that the second coordinate pair of a head does not turn; queries are a bias there, and
    only the embedding of token 1 has a component that k_proj reads.
    """
    config = GatedLlamaConfig(
        vocab_size=8,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=4,
        qkv_bias=True,
        rms_norm_eps=1e-12,
        rope_parameters={"rope_type": "default", "rope_theta": 1e30},
    )
    model = GatedLlamaForCausalLM(config).eval()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.tensor([0.0, 1, 0, 0]).expand(8, 4))
        model.model.embed_tokens.weight[1] = torch.tensor([1.0, 0, 0, 0])  # normed to 2 in the first coordinate
        attention.q_proj.bias.view(heads, 4)[:, 1] = strength
        attention.k_proj.weight[1, 0] = 1.0  # k = 2, and the kernel divides by sqrt(4)
    return model


@pytest.mark.parametrize("strength", [-2.0, 0.0, 3.0])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_known_sink_is_found_in_closed_form(strength, implementation):
    model = constant_sink(strength)
    model.set_attn_implementation(implementation)
    length = 40
    result = measure(model, torch.tensor([[1] + [3] * (length - 1)]))
    weights = [math.exp(strength) / (math.exp(strength) + query) for query in range(length)]
    assert result.mean == pytest.approx(sum(weights[1:]) / (length - 1), abs=1e-6)
    assert result.mean_late == pytest.approx(sum(weights[4:]) / (length - 4), abs=1e-6)
    assert result.per_head == [[pytest.approx(result.mean)] * 2]
    assert result.first_tokens == [{"id": 1, "count": 1}]
    assert result.sink_rate(1) == (1.0 if strength > 0 else 0.0)


def test_a_sink_at_the_third_key_is_told_from_the_first():
    result = measure(constant_sink(5.0), torch.tensor([[3, 3, 1] + [3] * 61]))
    weights = [math.exp(5) / (math.exp(5) + query) for query in range(2, 64)]
    assert result.key_attention[0][0][2] == pytest.approx(sum(weights) / 62, abs=1e-6)
    assert [result.sink_rate(k) for k in (1, 2, 3, 4, None)] == [0.0, 0.0, 1.0, 0.0, 1.0]
    assert result.mean < 0.05


def test_a_sink_among_the_late_keys_is_not_any_key():
    """Few queries are behind them, so that their means say little: any-k looks at the first half of the window."""
    late, half = ([3] * before + [1] + [3] * (63 - before) for before in (49, 31))
    result = measure(constant_sink(5.0), torch.tensor([late]))
    assert [result.sink_rate(k) for k in (50, None)] == [1.0, 0.0]
    assert measure(constant_sink(5.0), torch.tensor([half])).sink_rate(None) == 1.0


@pytest.mark.filterwarnings("ignore:Positions restart")
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("apart", [True, False])
def test_a_first_tokens_own_row_counts_for_no_key(apart, implementation):
    """Also where it sees the document before its own, and its weight on itself is no longer 1."""
    model, ids = build(implementation=implementation), tokens(1, 24)
    documents = [(0, 9), (9, 15)]
    kwargs = {"position_ids": torch.cat([torch.arange(length) for _, length in documents])[None]}
    kwargs["use_cache"] = not apart
    result = measure(model, ids, probe_options={"sink_window": 8}, **kwargs)
    for layer, attention in enumerate(maps_of(model, ids, **kwargs)):
        for key in range(8):
            rows = [attention[0, :, first + max(key, 1) : first + 8, first + key] for first, _ in documents]
            measured = torch.tensor([head[key] for head in result.key_attention[layer]])
            torch.testing.assert_close(measured, torch.cat(rows, dim=-1).mean(dim=-1), **FP32)


def test_the_most_attended_key_follows_a_sink_that_moves():
    """One document has its sink on the third key, the other on the first; the last is too short to count."""
    texts = [[3, 3, 1] + [3] * 97, [1] + [3] * 63, [1] + [3] * 62]
    model = constant_sink(5.0)
    with FirstTokenAttention(model) as probe, torch.no_grad():
        for text in texts:
            model(torch.tensor([text]))
    share = sum(math.exp(5) / (math.exp(5) + query) for query in range(32, 64)) / 32
    assert probe.result().most_attended == pytest.approx(share, abs=1e-6)
    assert probe.result().most_attended_keys == [{"key": 3, "count": 1}, {"key": 1, "count": 1}]
    short = measure(model, torch.tensor(texts[2:]))
    assert (short.most_attended, short.most_attended_keys) == (None, [])


def test_the_most_attended_key_equals_that_of_maps():
    model, ids = build(), tokens(2, 24)
    packed = torch.cat([ids[:1], ids[1:]], dim=1)
    positions = torch.arange(24).repeat(2)[None]
    maps = torch.stack(list(maps_of(model, ids)))  # [layer, batch, heads, query, key]
    received = maps[..., 8:16, :8].mean(dim=(0, 2, 3))
    expected = received.amax(dim=-1).mean().item()
    options = {"sink_window": 16}
    for result in (
        measure(model, ids, probe_options=options),
        measure(model, packed, probe_options=options, position_ids=positions, use_cache=False),
    ):
        assert result.most_attended == pytest.approx(expected, abs=1e-6)
        found = {entry["key"]: entry["count"] for entry in result.most_attended_keys}
        assert sorted(key for key, count in found.items() for _ in range(count)) == sorted(
            (received.argmax(dim=-1) + 1).tolist()
        )


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        ("qwen3", {"head_dim": 16}),
        ("mistral", {"sliding_window": 6, "head_dim": 8}),
    ],
)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_equal_to_eager_maps(model_type, overrides, implementation, padding):
    model = build(model_type, implementation, **overrides)
    ids, mask = tokens(), torch.ones(2, 24, dtype=torch.long)
    documents = [(0, 0, 24), (1, 0, 24)]
    if padding != "none":
        hidden = slice(0, 5) if padding == "left" else slice(19, 24)
        mask[1, hidden] = 0
        documents[1] = (1, 5 if padding == "left" else 0, 19)
    kwargs = {"attention_mask": None if padding == "none" else mask}
    assert_equal_to_maps(measure(model, ids, **kwargs), maps_of(model, ids, **kwargs), documents)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_packed_documents_have_a_first_token_each(implementation):
    model = build(implementation=implementation)
    ids, positions = tokens(1, 24), torch.cat([torch.arange(9), torch.arange(15)])[None]
    kwargs = {"position_ids": positions, "use_cache": False}
    result = measure(model, ids, **kwargs)
    assert_equal_to_maps(result, maps_of(model, ids, **kwargs), [(0, 0, 9), (0, 9, 15)])
    assert result.documents == 2


def test_packed_documents_that_are_not_kept_apart_give_a_warning():
    positions = torch.cat([torch.arange(9), torch.arange(15)])[None]
    with pytest.warns(UserWarning, match="attends across its documents"):
        measure(build(), tokens(1, 24), position_ids=positions, use_cache=True)


def test_bf16_scores_are_taken_in_fp32(monkeypatch):
    maps = []

    def spy(module, query, key, value, attention_mask, scaling, **kwargs):
        keys = key.float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        bias = attention_mask.float()
        maps.append((query.float() @ keys.transpose(2, 3) * scaling + bias).softmax(-1))
        return eager(module, query, key, value, attention_mask, scaling, **kwargs)

    eager = modeling_llama.eager_attention_forward
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", spy)
    model = build(implementation="eager").to(torch.bfloat16)
    result = measure(model, tokens())
    assert_equal_to_maps(result, maps, [(0, 0, 24), (1, 0, 24)])
    # The fused kernel of a bf16 model works on its own queries and keys: the same up to the model's rounding of 2^-8.
    assert measure(build().to(torch.bfloat16), tokens()).mean == pytest.approx(result.mean, abs=4e-3)


def test_autocast_does_not_reach_the_scores():
    model = build()
    reference = measure(model, tokens())
    with FirstTokenAttention(model) as probe, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(tokens())
    assert probe.result().mean == pytest.approx(reference.mean, abs=4e-3)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_and_packing_do_not_move_the_score(implementation):
    model, ids = build(implementation=implementation), tokens(1, 20)
    pad = torch.zeros(1, 3, dtype=torch.long)
    alone = measure(model, ids)
    ones, zeros = torch.ones_like(ids), torch.zeros_like(pad)
    positions = torch.arange(20)[None]
    left = measure(
        model,
        torch.cat([pad, ids], 1),
        attention_mask=torch.cat([zeros, ones], 1),
        position_ids=torch.cat([zeros, positions], 1),
    )
    right = measure(model, torch.cat([ids, pad], 1), attention_mask=torch.cat([ones, zeros], 1))
    packed = measure(
        model, torch.cat([ids, ids], 1), position_ids=torch.cat([positions, positions], 1), use_cache=False
    )
    for other in (left, right, packed):
        torch.testing.assert_close(torch.tensor(other.per_head), torch.tensor(alone.per_head), **FP32)
        for keys, reference in zip(other.key_attention[1], alone.key_attention[1], strict=True):
            torch.testing.assert_close(torch.tensor(keys[:20]), torch.tensor(reference[:20]), **FP32)
        assert other.first_tokens[0]["id"] == alone.first_tokens[0]["id"]
    assert left.tokens == right.tokens == alone.tokens == 20


def test_a_repeated_beginning_token_stays_what_it_is():
    model, ids = build(), tokens(1, 20)
    twice = torch.cat([torch.full((1, 2), 1), ids], 1)
    assert measure(model, twice).first_tokens == [{"id": 1, "count": 1}]
    assert measure(model, ids).first_tokens == [{"id": int(ids[0, 0]), "count": 1}]


# Transformers passes a flag that torch deprecates, and torch's own compiler imports what torch deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without")
@pytest.mark.parametrize("padded", [False, True])
def test_flex_attention_equals_sdpa(padded):
    ids, mask = tokens(2, 24), torch.ones(2, 24, dtype=torch.long)
    mask[0, : 5 * padded] = 0
    with torch.compiler.set_stance("force_eager"):  # the unfused kernel: same arithmetic, and no compiler is needed
        flex = measure(build(implementation="flex_attention"), ids, attention_mask=mask)
    sdpa = measure(build(), ids, attention_mask=mask)
    torch.testing.assert_close(torch.tensor(flex.per_head), torch.tensor(sdpa.per_head), **FP32)
    torch.testing.assert_close(
        torch.tensor(flex.key_attention[0][0][:19]), torch.tensor(sdpa.key_attention[0][0][:19])
    )
    assert flex.implementation == "flex_attention"


@pytest.mark.parametrize("case", ["plain", "padded", "window", "packed"])
def test_what_flash_kernels_are_told_is_honoured(case, monkeypatch):
    """No flash kernel runs on a CPU: one with its interface (2-D mask, window, positions) stands in."""
    ids, mask = tokens(1 if case == "packed" else 2, 24), None
    positions = torch.cat([torch.arange(9), torch.arange(15)])[None] if case == "packed" else None
    if case == "padded":
        mask = torch.ones(2, 24, dtype=torch.long)
        mask[0, :5] = 0
    kwargs = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    family = ("mistral", {"sliding_window": 6, "head_dim": 8}) if case == "window" else ("llama", {})
    reference = measure(build(family[0], "sdpa", **family[1]), ids, **kwargs)

    seen = []

    def kernel(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **options):
        seen.append((attention_mask, sliding_window))
        sdpa = AttentionInterface._global_mapping["sdpa"]
        return sdpa(module, query, key, value, full_masks[bool(sliding_window)], scaling=scaling)

    full_masks = {False: full_mask(24, None, mask, positions), True: full_mask(24, 6, mask, positions)}
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", kernel)
    model = build(family[0], "sdpa", **family[1])
    model.config._attn_implementation = "flash_attention_2"
    result = measure(model, ids, **kwargs)
    assert seen[0][0] is None or seen[0][0].ndim == 2
    assert bool(seen[0][1]) == (case == "window")
    torch.testing.assert_close(torch.tensor(result.per_head), torch.tensor(reference.per_head), **FP32)


def full_mask(length, window, padding, positions):
    query, key = torch.arange(length)[:, None], torch.arange(length)
    visible = (key <= query)[None]
    if window:
        visible = visible & (key > query - window)
    if padding is not None:
        visible = visible & padding.bool()[:, None]
    if positions is not None:
        document = (positions == 0).cumsum(-1)
        visible = visible & (document[:, :, None] == document[:, None])
    return (visible | torch.eye(length, dtype=torch.bool))[:, None]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_prefill_with_a_cache_counts_and_decoding_does_not(cache):
    model, ids = build(), tokens(2, 16)
    plain = measure(model, ids)
    with FirstTokenAttention(model) as probe:
        kwargs = {"cache_implementation": "static"} if cache == "static" else {}
        model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0, **kwargs)
    result = probe.result()
    assert (result.skipped_forwards, result.tokens) == (3, 32)
    torch.testing.assert_close(torch.tensor(result.per_head), torch.tensor(plain.per_head), **FP32)

    empty = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=40)
    assert measure(model, ids, cache=empty).mean == pytest.approx(plain.mean, abs=1e-6)


def test_batches_stream_into_one_mean_weighted_by_queries():
    model = build()
    texts = [tokens(1, length, seed=length) for length in (5, 12, 30)]
    with FirstTokenAttention(model) as probe, torch.no_grad():
        for text in texts:
            model(text)
    parts = [measure(model, text) for text in texts]
    mean = sum(part.mean * part.queries for part in parts) / sum(part.queries for part in parts)
    assert probe.result().mean == pytest.approx(mean, abs=1e-7)
    assert probe.result().documents == 3


def test_key_means_and_sink_rates_equal_those_of_maps():
    model = build()
    ids = tokens(2, 24)
    result, maps = measure(model, ids, probe_options={"sink_window": 8}), maps_of(model, ids)
    for layer, attention in enumerate(maps):
        for key in range(8):
            mean = attention[:, :, max(key, 1) : 8, key].mean(dim=(0, 2))
            measured = torch.tensor([head[key] for head in result.key_attention[layer]])
            torch.testing.assert_close(measured, mean, **FP32)
    alphas = torch.tensor(result.key_attention)
    assert result.sink_rate(2, threshold=0.2) == pytest.approx((alphas[..., 1] > 0.2).float().mean().item())
    assert result.sink_rate(None, threshold=0.2) == pytest.approx(
        (alphas[..., :4].amax(-1) > 0.2).float().mean().item()
    )
    with pytest.raises(ValueError, match="key is 9"):
        result.sink_rate(9)


def test_strided_queries_equal_the_same_queries_of_all():
    model, ids = build(implementation="eager"), tokens(2, 24)
    strided = measure(model, ids, probe_options={"query_stride": 5, "sink_window": 3})
    weights = torch.stack([attention[:, :, 5::5, 0].mean(dim=(0, 2)) for attention in maps_of(model, ids)])
    torch.testing.assert_close(torch.tensor(strided.per_head), weights, **FP32)
    assert strided.queries == 2 * 4


@pytest.mark.parametrize("block_bytes", [1, 3000, 2**30])
def test_blocks_of_any_size_give_the_same(block_bytes):
    model, ids = build(implementation="eager"), tokens(2, 24)
    result = measure(model, ids, probe_options={"block_bytes": block_bytes})
    assert_equal_to_maps(result, maps_of(model, ids), [(0, 0, 24), (1, 0, 24)])


def test_memory_does_not_hold_a_map(monkeypatch):
    """No tensor that the measurement makes is larger than a block, whatever the length."""
    largest = []

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            largest.append(max((r.numel() for r in (result,) if isinstance(r, torch.Tensor)), default=0))
            return result

    inner = attention_module._log_sum_exp

    def watched(call, visibility, rows, block_bytes):
        call.log_sum_exp = None  # the way of kernels that keep it to themselves
        with Largest():
            return inner(call, visibility, rows, block_bytes)

    monkeypatch.setattr(attention_module, "_log_sum_exp", watched)
    model = build(num_hidden_layers=1)
    measure(model, tokens(1, 512), probe_options={"block_bytes": 2**16})
    assert max(largest) <= max(2**16 // 4, 512 * SMALL["hidden_size"])


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
        ("gemma2", {"head_dim": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
        (
            "gpt_oss",
            {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6},
        ),
        (
            "qwen3_next",
            {
                "head_dim": 8,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 2,
                "num_experts": 0,
                "mlp_only_layers": [0, 1],
            },
        ),
    ],
)
def test_other_models_of_the_interface(model_type, overrides):
    model = build(model_type, "eager", **overrides)
    if model_type == "gpt_oss":
        for layer in model.model.layers:
            nn.init.normal_(layer.self_attn.sinks)
    ids = tokens()
    result = measure(model, ids)
    maps = [attention for attention in maps_of(model, ids) if attention is not None]
    assert_equal_to_maps(result, maps, [(0, 0, 24), (1, 0, 24)])
    if model_type == "qwen3_next":
        assert result.layers == [1]


def test_a_window_hides_the_first_token_and_says_so():
    result = measure(build("mistral", sliding_window=6, head_dim=8), tokens(1, 24))
    assert result.seen_per_layer == pytest.approx([5 / 23] * 2)
    assert measure(build("mistral", sliding_window=1, head_dim=8), tokens(1, 24)).mean is None


def test_masks_prepared_by_the_caller_are_understood():
    positions = torch.cat([torch.arange(9), torch.arange(15)])[None]
    visible = full_mask(24, None, None, positions)
    model, ids = build(), tokens(1, 24)
    packed = measure(model, ids, position_ids=positions, use_cache=False)
    prepared = measure(model, ids, attention_mask=visible, position_ids=positions)
    torch.testing.assert_close(torch.tensor(prepared.per_head), torch.tensor(packed.per_head), **FP32)
    assert prepared.documents == 2


def test_block_masks_and_tensors_mean_the_same():
    positions = torch.cat([torch.arange(9), torch.arange(15)])[None]
    visible = full_mask(24, 4, None, positions)
    block = create_block_mask(lambda b, h, q, k: visible[b, 0, q, k], 1, None, 24, 24, device="cpu")
    layouts = [sequence_layout(1, 24, "cpu", mask) for mask in (visible, block)]
    assert torch.equal(layouts[0].start, layouts[1].start)
    assert layouts[0].documents == layouts[1].documents == [(0, 0, 9), (0, 9, 15)]
    tensor, blocks = (Visibility(mask, layout) for mask, layout in zip((visible, block), layouts, strict=True))
    rows = torch.tensor([3, 10, 23])
    assert torch.equal(tensor.block(rows, 24), blocks.block(rows, 24))
    assert torch.equal(tensor.pairs(layouts[0].start), blocks.pairs(layouts[0].start))
    assert torch.equal(tensor.lonely, blocks.lonely)


def test_maps_for_pictures():
    model, ids = build(), tokens(1, 12)
    maps = attention_maps(model, ids[0], layers=[1])
    torch.testing.assert_close(maps[1], maps_of(model, ids)[1][0], **FP32)
    with pytest.raises(ValueError, match=r"Layers \[7\]"):
        attention_maps(model, ids, layers=[7])
    with pytest.raises(ValueError, match="1 tokens"):
        attention_maps(model, ids[:, :1])


def hooks_of(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def probes_of(model) -> list:
    return [FirstTokenAttention(model), Activations(model), FirstTokenStates(model), GateScores(model)]


def test_logits_are_bitwise_the_same_and_nothing_is_left(tiny_model, randomize_gates):
    model, ids = randomize_gates(tiny_model()), tokens()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hooks, implementation = hooks_of(model), model.config._attn_implementation
    with torch.no_grad():
        before = model(ids).logits
        probes = probes_of(model)
        for probe in probes:
            probe.start()
        during = model(ids).logits
        for probe in probes:  # not the reverse order: each probe undoes its own
            probe.stop()
        after = model(ids).logits
    assert torch.equal(before, during)
    assert torch.equal(before, after)
    assert hooks_of(model) == hooks
    assert model.config._attn_implementation == implementation
    assert AttentionInterface.get_interface is LIBRARY_INTERFACE
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    for probe in probes:
        json.loads(json.dumps(probe.result().to_dict(), allow_nan=False))


def test_nothing_is_left_after_an_exception(tiny_model):
    model, ids = tiny_model(), tokens()
    hooks = hooks_of(model)
    before = model(ids).logits

    def fail(*_):
        raise RuntimeError("out of memory")

    for make in (FirstTokenAttention, Activations, FirstTokenStates, GateScores):
        failing = model.model.layers[1].mlp.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"), make(model):
            model(ids)
        failing.remove()
        assert hooks_of(model) == hooks
        assert AttentionInterface.get_interface is LIBRARY_INTERFACE
        assert torch.equal(model(ids).logits, before)


def test_a_failed_forward_does_not_count_the_next_one_twice(tiny_model):
    model, ids = tiny_model(), tokens()

    def fail(*_):
        raise RuntimeError("interrupted")

    with FirstTokenAttention(model) as probe:
        failing = model.model.layers[1].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="interrupted"):
            model(ids)
        failing.remove()
        model(ids)
    assert probe.result().documents == 2


def test_training_with_probes_changes_no_gradient(tiny_model):
    model, ids = tiny_model(), tokens()
    model.train()
    model(ids, labels=ids).loss.backward()
    expected_grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    with FirstTokenAttention(model) as attention, Activations(model) as activations:
        model(ids, labels=ids).loss.backward()
    assert all(torch.equal(parameter.grad, expected_grads[name]) for name, parameter in model.named_parameters())
    assert attention.result().queries == 2 * 23
    assert activations.result().tokens == 2 * 24


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_is_not_counted_twice(tiny_model, reentrant):
    model, ids = tiny_model(), tokens()
    with FirstTokenAttention(model) as plain:
        model(ids)
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    with FirstTokenAttention(model) as probe:
        model(ids, labels=ids, use_cache=False).loss.backward()
    assert probe.result().queries == plain.result().queries
    assert probe.result().mean == pytest.approx(plain.result().mean, abs=1e-6)


def test_compiled_graphs_are_whole_with_probes_off_and_refused_when_on(tiny_model):
    torch._dynamo.reset()
    model, ids = tiny_model(num_hidden_layers=1), tokens()
    measure(model, ids)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids).logits, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="_orig_mod"):
        FirstTokenAttention(compiled)
    model.compile(backend="aot_eager")
    with pytest.raises(ValueError, match="compiled in place"):
        FirstTokenAttention(model)


def test_models_are_told_apart_while_probed():
    probed, other = build(), build()
    with FirstTokenAttention(probed) as probe, torch.no_grad():
        other(tokens())
        probed(tokens(1, 10))
    assert probe.result().tokens == 10


def test_a_probe_continues_after_a_pause_and_refuses_to_attach_twice():
    model = build()
    probe = FirstTokenAttention(model)
    for _ in range(2):
        with probe, torch.no_grad():
            model(tokens())
    assert probe.result().documents == 4
    with probe, pytest.raises(ValueError, match="attached already"):
        probe.start()


def test_bad_input_gets_a_clear_error():
    with pytest.raises(ValueError, match="is an encoder: its attention is not causal"):
        FirstTokenAttention(BertModel(BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)))
    with pytest.raises(ValueError, match="encoder-decoder"):
        FirstTokenAttention(T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, num_heads=2, num_layers=1)))
    with pytest.raises(ValueError, match="does not dispatch through the Transformers attention interface"):
        FirstTokenAttention(BloomForCausalLM(BloomConfig(hidden_size=16, n_head=2, n_layer=1, vocab_size=20)))
    with pytest.raises(ValueError, match="not a Transformers language model"):
        FirstTokenAttention(nn.Linear(2, 2))
    model = build()
    for option in ("sink_window", "query_stride", "block_bytes"):
        with pytest.raises(ValueError, match=f"{option} is 0"):
            FirstTokenAttention(model, **{option: 0})
    with FirstTokenAttention(model) as probe:
        pass
    with pytest.raises(ValueError, match="saw no whole sequence"):
        probe.result()


def test_no_query_means_no_number():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = measure(build(), tokens(2, 1))
    assert (result.mean, result.queries) == (None, 0)
    json.dumps(result.to_dict(), allow_nan=False)


def test_a_model_that_computes_nan_is_not_reported():
    model = build(num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0] = float("nan")
    with pytest.raises(ValueError, match=r"not finite in layers \[0\]"):
        measure(model, tokens())


def test_models_whose_code_comes_from_the_hub(tiny_model, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    remote = get_class_from_dynamic_module("modeling_gated.GatedLlamaForCausalLM", tmp_path).from_pretrained(tmp_path)
    assert type(remote).__module__.startswith("transformers_modules")
    assert measure(remote.eval(), tokens()).per_head == measure(model, tokens()).per_head
    with GateScores(remote) as probe, torch.no_grad():
        remote(tokens())
    assert probe.result().mean == pytest.approx(0.5, abs=0.1)


def test_models_inside_an_adapter():
    peft = pytest.importorskip("peft")
    model = build()
    plain = measure(model, tokens())
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2)).eval()
    assert measure(adapted, tokens()).per_head == plain.per_head  # LoRA starts as the identity
