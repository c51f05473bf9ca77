"""Activations, gate scores, first-token states, sparsity and interventions, against direct computation."""

import contextlib
import functools
import json
import math
import sys

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from gated_llama.diagnostics import (
    Activations,
    FirstTokenStates,
    GateScores,
    OutputSparsity,
    attention_maps,
    delimiter_token_ids,
    evicted_keys,
    gate_interventions,
    mean_nll,
    measure_interventions,
    quantisation_interventions,
    quantised,
    scaled_gates,
    streaming_interventions,
)
from gated_llama.diagnostics.activations import _steps
from gated_llama.diagnostics.gates import _GateSums
from gated_llama.diagnostics.interventions import rounded
from gated_llama.diagnostics.states import _SparsitySums
from gated_llama.diagnostics.visibility import sequence_layout


# Sums of a few thousand float32 values in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
DELIMITER = 7


def texts(length: int = 24, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids without the delimiter but at (0, 5), and a mask that pads row 1 left by 4."""
    ids = torch.randint(8, 96, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    ids[0, 5] = DELIMITER
    return ids, mask


@torch.no_grad()
def observe(probe, model, *args, **kwargs):
    with probe:
        model(*args, **kwargs)
    result = probe.result()
    json.dumps(result.to_dict(), allow_nan=False)
    return result


def wide(tiny_model, **overrides):
    """A tiny model whose activations are far from each other."""
    return tiny_model(initializer_range=0.3, **overrides)


def test_layer_maxima_by_token_class(tiny_model):
    model, (ids, mask) = wide(tiny_model), texts()
    result = observe(Activations(model, delimiter_ids=[DELIMITER]), model, ids, attention_mask=mask)
    outputs = []
    handles = [layer.register_forward_hook(lambda m, a, out: outputs.append(out)) for layer in model.model.layers]
    with torch.no_grad():
        model(ids, attention_mask=mask)
    for handle in handles:
        handle.remove()
    first = torch.zeros_like(mask, dtype=torch.bool)
    first[0, 0] = first[1, 4] = True
    delimiter = ids == DELIMITER
    other = mask.bool() & ~first & ~delimiter
    for layer, hidden in enumerate(outputs):
        for name, chosen in (("first", first), ("delimiter", delimiter), ("other", other)):
            assert result.max_by_class[name][layer] == pytest.approx(hidden[chosen].abs().max().item())
        real = hidden[mask.bool()]
        assert result.per_layer[layer] == pytest.approx(real.abs().max().item())
        assert result.dimension_per_layer[layer] == int(real.abs().amax(dim=0).argmax())
        assert result.median_per_layer[layer] == pytest.approx(real.abs().median().item())
        centred = real - real.mean(-1, keepdim=True)
        kurtosis = (centred**4).mean(-1) / (centred**2).mean(-1) ** 2
        assert result.kurtosis[layer] == pytest.approx(kurtosis.mean().item(), rel=1e-5)
    assert result.m_act == pytest.approx(sum(result.per_layer) / 3)
    assert (result.tokens, result.documents) == (44, 2)
    assert result.massive_layers == []


def test_maxima_stream_over_batches(tiny_model):
    model, (ids, _) = wide(tiny_model), texts()
    whole = observe(Activations(model), model, ids)
    with Activations(model) as probe, torch.no_grad():
        model(ids[:1])
        model(ids[1:])
    parts = probe.result()
    assert parts.per_layer == pytest.approx(whole.per_layer, rel=1e-6)
    assert parts.kurtosis == pytest.approx(whole.kurtosis, rel=1e-5)


@torch.no_grad()
def plant_spike(model, token: int, layer: int, unit: int, dimension: int, weight: float) -> None:
    """Gives `token` an embedding of its own that one hidden unit answers to, and lets it write one dimension."""
    for parameter in model.model.layers.parameters():
        if parameter.ndim == 2:
            parameter.mul_(0.1)  # what other parts write must not reach the planted direction
    embedding, mlp = model.model.embed_tokens.weight, model.model.layers[layer].mlp
    direction = nn.functional.normalize(torch.randn(embedding.shape[1]), dim=0)
    embedding -= (embedding @ direction)[:, None] * direction
    embedding[token] = 3 * direction
    mlp.gate_proj.weight[unit] = mlp.up_proj.weight[unit] = 5 * direction
    mlp.down_proj.weight[:, unit] = 0
    mlp.down_proj.weight[dimension, unit] = weight


def test_a_planted_spike_writer_is_found_and_nothing_else(tiny_model):
    model, (ids, _) = tiny_model(), texts()
    ids[:, 0] = 1
    plant_spike(model, token=1, layer=1, unit=30, dimension=17, weight=2.0)
    result = observe(Activations(model), model, ids)
    assert [(w.layer, w.unit, w.dimension) for w in result.spike_writers] == [(1, 30, 17)]
    writer = result.spike_writers[0]
    assert writer.contribution == pytest.approx(2.0 * writer.first_token_activation, rel=1e-6)
    assert writer.contribution > 100 > 10 * writer.elsewhere_max
    assert (result.step_up, result.step_down, result.dimension) == (1, None, 17)
    assert result.massive_layers == [1, 2]
    json.dumps(result.to_dict()["spike_writers"][0])

    # Each condition counts; one spike of the same kind elsewhere does not.
    for condition in ("spike_contribution", "spike_over_median", "spike_over_elsewhere"):
        assert observe(Activations(model, **{condition: 1e9}), model, ids).spike_writers == []
    again = ids.clone()
    again[0, 9] = 1
    (writer,) = observe(Activations(model), model, again).spike_writers
    assert writer.unit == 30
    assert writer.elsewhere_max == pytest.approx(abs(writer.first_token_activation), rel=0.5)

    # Without that token there is no writer; with it all over the text the unit is not quiet elsewhere.
    assert observe(Activations(model), model, ids[:, 1:]).spike_writers == []
    ids[:, ::2] = 1
    assert observe(Activations(model), model, ids).spike_writers == []


class Packed(nn.Linear):
    """As quantisers hold a matrix: in another shape and dtype, beside scales of its own."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        scale = linear.weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
        codes = (linear.weight / scale).round().to(torch.int8)
        self.weight = nn.Parameter(codes.view(torch.uint8).reshape(-1, 1), requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("scale", scale)

    def forward(self, x):
        matrix = self.weight.view(torch.int8).view(self.out_features, -1) * self.scale
        return nn.functional.linear(x, matrix, self.bias)


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_spike_writers_of_quantised_maps_are_found(bias, tiny_model):
    """Their columns are what the map makes of its units, whatever it stores."""
    model, (ids, _) = tiny_model(mlp_bias=bias), texts()
    ids[:, 0] = 1
    plant_spike(model, token=1, layer=1, unit=30, dimension=17, weight=2.0)
    if bias:
        nn.init.normal_(model.model.layers[1].mlp.down_proj.bias, std=3.0)
    plain = observe(Activations(model), model, ids).spike_writers
    for layer in model.model.layers:
        layer.mlp.down_proj = Packed(layer.mlp.down_proj)
    (found,) = observe(Activations(model), model, ids).spike_writers
    assert (found.layer, found.unit, found.dimension) == (1, 30, 17)
    assert found.contribution == pytest.approx(plain[0].contribution, rel=1e-5)
    assert found.contribution == pytest.approx(2.0 * found.first_token_activation, rel=1e-5)  # without the bias
    with pytest.raises(ValueError, match="quantised already"):
        quantisation_interventions(model)


def test_step_down_is_the_layer_that_erases():
    assert _steps([1.0, 2.0, 800.0, 900.0, 890.0, 3.0, 4.0]) == (2, 5)
    assert _steps([5.0, 4.0, 3.0]) == (0, None)
    assert _steps([1.0, 4.0, 8.0, 4.0, 3.0]) == (1, 4)  # half of the maximum is reached, and not yet below


def test_massive_is_beyond_100_and_1000_medians(tiny_model):
    probe = Activations(tiny_model())
    probe.tokens = 2
    first = torch.tensor([[True, False]])
    for layer, (largest, median) in enumerate([(150.0, 0.2), (150.0, 0.1), (90.0, 0.01)]):
        hidden = torch.full((1, 2, 40), median)
        hidden[0, 0, 3] = largest
        probe._outputs[layer].add(hidden, [first, ~first & False, ~first])
    assert probe.result().massive_layers == [1]


class Letters:
    """A tokenizer of single characters, of which some are two tokens."""

    def encode(self, text, add_special_tokens):
        assert add_special_tokens is False
        return [ord(c) % 50 for c in text]


def test_delimiters_that_are_one_token():
    ids = delimiter_token_ids(Letters())
    assert ord(".") % 50 in ids
    assert all(isinstance(i, int) for i in ids)
    assert ids == sorted(set(ids))


GATES = {
    "elementwise": {},
    "headwise": {"gate_granularity": "headwise"},
    "shared": {"gate_head_shared": True},
    "constant": {"gate_input": "constant"},
    "value": {"gate_position": "value"},
    "additive": {"gate_operation": "add", "gate_activation": "silu"},
}


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("random", [False, True])
def test_gate_scores_of_own_models(kind, random, tiny_model, randomize_gates):
    model, (ids, mask) = tiny_model(gate_init="zeros", **GATES[kind]), texts()
    if random:
        randomize_gates(model, std=3.0)
    result = observe(GateScores(model), model, ids, attention_mask=mask)
    with torch.no_grad():
        scores = model.model(ids, attention_mask=mask, output_gate_scores=True).gate_scores
    for layer, score in enumerate(scores):
        score = score.expand(2, 24, *score.shape[-2:])
        real = score[mask.bool()]
        torch.testing.assert_close(torch.tensor(result.per_head[layer]), real.mean(dim=(0, 2)), **CLOSE)
        torch.testing.assert_close(torch.tensor(result.below[layer]), (real < 0.1).float().mean(dim=(0, 2)), **CLOSE)
        torch.testing.assert_close(
            torch.tensor(result.std_per_head[layer]),
            real.transpose(0, 1).flatten(1).std(1, correction=0),
            rtol=1e-4,
            atol=1e-6,
        )
        bin_width = (result.high - result.low) / len(result.histogram[0])
        for level, quantile in zip(result.quantile_levels, result.quantiles[layer], strict=True):
            clamped = real.clamp(result.low, result.high)
            assert (clamped < quantile - bin_width).float().mean() <= level + 1e-6
            assert (clamped <= quantile + bin_width).float().mean() >= level - 1e-6
        assert sum(result.histogram[layer]) == real.numel()
        assert result.by_class["first"][layer] == pytest.approx(
            torch.stack([score[0, 0], score[1, 4]]).mean().item(), rel=1e-5, abs=1e-7
        )
        others = torch.cat([score[0, 1:], score[1, 5:]])
        assert result.by_class["other"][layer] == pytest.approx(others.mean().item(), rel=1e-5, abs=1e-7)
    neutral = 0.0 if kind == "additive" else 0.5
    if not random:
        assert result.mean == pytest.approx(neutral)
        assert result.dead_heads == (
            [[layer, head] for layer in range(3) for head in range(4)] if neutral == 0 else []
        )


def test_dead_and_saturated_heads_are_named(tiny_model):
    model, (ids, _) = tiny_model(gate_granularity="headwise", gate_bias=True, gate_layers=[0, 2]), texts()
    with torch.no_grad():
        model.model.layers[2].self_attn.g_proj.bias.copy_(torch.tensor([-9.0, 0, 9, 0]))
    result = observe(GateScores(model), model, ids)
    assert result.layers == [0, 2]
    assert (result.dead_heads, result.saturated_heads) == ([[2, 0]], [[2, 2]])
    assert result.below[1] == pytest.approx([1, 0, 0, 0])


def test_dead_and_saturated_mean_99_percent(tiny_model):
    probe = GateScores(tiny_model(gate_granularity="headwise"))
    scores = torch.tensor([0.11, 0.11, 0.89, 0.89]).view(1, 1, 4, 1).repeat(1, 1000, 1, 1)  # neither low nor high
    for head, (count, score) in enumerate([(989, 0.05), (990, 0.05), (989, 0.95), (990, 0.95)]):
        scores[:, :count, head] = score
    probe._sums = {2: _GateSums(4, 1, 0.0, 1.0, 400)}
    probe._sums[2].add(scores, sequence_layout(1, 1000, "cpu"))
    probe.tokens = 1000
    result = probe.result()
    assert result.below == [pytest.approx([0.989, 0.99, 0, 0])]
    assert result.above == [pytest.approx([0, 0, 0.989, 0.99])]
    assert (result.dead_heads, result.saturated_heads) == ([[2, 1]], [[2, 3]])


FOREIGN = {
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "num_experts": 0,
        "mlp_only_layers": [0, 1],
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    },
    "afmoe": {"num_dense_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "step3p5": {"layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense"] * 2, "sliding_window": 8},
}


def foreign(model_type: str) -> nn.Module:
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes, **FOREIGN[model_type])
    build = Step3p7TextModel._from_config if model_type == "step3p5" else AutoModelForCausalLM.from_config
    return build(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("model_type", FOREIGN)
def test_gates_that_are_fused_into_a_forward_are_read(model_type, monkeypatch):
    """The scores read must be those that the forward multiplies by: attention of ones shows them to o_proj."""
    model, (ids, _) = foreign(model_type), texts()

    def ones(module, query, key, value, *args, **kwargs):
        return torch.ones_like(query).transpose(1, 2).contiguous(), None

    module = next(m for m in model.modules() if type(m).__name__.endswith("Attention") and hasattr(m, "o_proj"))
    monkeypatch.setattr(sys.modules[type(module).__module__], "eager_attention_forward", ones)
    seen = {}
    probe = GateScores(model)
    handles = [
        attention.o_proj.register_forward_pre_hook(lambda m, args, layer=layer: seen.update({layer: args[0]}))
        for layer, attention in probe.modules.items()
    ]
    result = observe(probe, model, ids)
    for handle in handles:
        handle.remove()
    assert result.layers == sorted(seen)
    for layer, gated in seen.items():
        scores = gated.view(2, 24, 4, 8)
        torch.testing.assert_close(
            torch.tensor(result.per_head[result.layers.index(layer)]), scores.mean(dim=(0, 1, 3)), **CLOSE
        )
        assert scores.std() > 0.05
    assert result.granularity == ("headwise" if model_type == "step3p5" else "elementwise")


def test_a_model_without_gates_is_refused(tiny_model):
    with pytest.raises(ValueError, match="No attention gate is known in a model of type 'gated_llama'"):
        GateScores(tiny_model(gate_position=None))
    with pytest.raises(ValueError, match="bins is 2"):
        GateScores(tiny_model(), bins=2)


@pytest.mark.parametrize(
    "overrides",
    [
        {"gate_granularity": "elementwise"},
        {"gate_granularity": "headwise"},
        {"gate_granularity": "headwise", "sdpa_output_norm": True},
        {"gate_granularity": "headwise", "gate_layers": [0, 2]},
    ],
    ids=["elementwise", "headwise", "normed", "some layers"],
)
def test_sparsity_of_raw_gated_and_scaled_outputs(overrides, tiny_model, randomize_gates):
    model, (ids, mask) = randomize_gates(tiny_model(**overrides), std=3.0), texts()
    thresholds = (2e-2, 2e-3)
    result = observe(OutputSparsity(model, thresholds=thresholds), model, ids, attention_mask=mask)
    raw, gated, scores = [], [], []

    def keep(module, args, output):
        raw.append(args[0][mask.bool()])
        gated.append(output[0][mask.bool()])
        scores.append(output[1][mask.bool()])

    layers = overrides.get("gate_layers", [0, 1, 2])
    for layer in layers:
        model.model.layers[layer].self_attn.attn_gate.register_forward_hook(keep)
    with torch.no_grad():
        model(ids, attention_mask=mask)
    assert (result.layers, result.gated_layers) == ([0, 1, 2], layers)
    for layer, place in enumerate(layers):
        mean = scores[layer].mean()
        matched = (gated[layer].square().mean() / raw[layer].square().mean()).sqrt()
        assert result.mean_score[layer] == pytest.approx(mean.item(), rel=1e-5)
        for index, tau in enumerate(thresholds):
            share = functools.partial(lambda states, tau: (states.abs() < tau).float().mean().item(), tau=tau)
            assert result.raw[place][index] == pytest.approx(share(raw[layer]))
            assert result.gated[layer][index] == pytest.approx(share(gated[layer]))
            # inside a bin of 1/16 octave the histogram is taken as flat
            assert result.mean_scaled[layer][index] == pytest.approx(share(raw[layer] * mean), abs=2e-2)
            assert result.norm_matched[layer][index] == pytest.approx(share(raw[layer] * matched), abs=2e-2)


@pytest.mark.parametrize("model_type", FOREIGN)
def test_sparsity_of_outputs_whose_gate_is_fused(model_type):
    model, (ids, _) = foreign(model_type), texts()
    probe = OutputSparsity(model, thresholds=(2e-2,))
    gated = {}
    handles = [
        attention.o_proj.register_forward_pre_hook(lambda m, args, layer=layer: gated.update({layer: args[0]}))
        for layer, attention in probe.modules.items()
    ]
    scores = observe(GateScores(model), model, ids)
    result = observe(probe, model, ids)
    for handle in handles:
        handle.remove()
    assert result.mean_score == pytest.approx(scores.per_layer, rel=1e-5)
    for index, states in enumerate(gated.values()):
        assert result.gated[index][0] == pytest.approx((states.abs() < 2e-2).float().mean().item())
        assert result.raw[index][0] < result.gated[index][0]


def test_scaling_shifts_the_threshold():
    """S_tau(c y) = S_(tau/c)(y), checked on a million values against the histogram."""
    states = torch.randn(1, 1000, 1000) * 0.01
    layout = sequence_layout(1, 1000, "cpu")
    sums = _SparsitySums((1e-2, 1e-3))
    sums.add_raw(states, layout)
    for factor in (1.0, 0.3, 1e-3, 5.0):
        shares = [((states * factor).abs() < tau).float().mean().item() for tau in (1e-2, 1e-3)]
        assert sums.scaled_shares(factor) == pytest.approx(shares, abs=1e-3)
    assert sums.scaled_shares(0.0) == [1.0, 1.0]


def test_sparsity_without_a_multiplying_gate_is_raw_only(tiny_model):
    for overrides in ({"gate_position": None}, {"gate_position": "value"}, {"gate_operation": "add"}):
        model = tiny_model(**overrides)
        result = observe(OutputSparsity(model), model, texts()[0])
        assert result.gated is None
        assert not result.gated_layers
        assert len(result.raw) == 3
    with pytest.raises(ValueError, match="thresholds"):
        OutputSparsity(model, thresholds=(0.0,))


def test_value_norms_and_constancy_of_the_first_token(tiny_model):
    model, (ids, mask) = wide(tiny_model), texts()
    result = observe(FirstTokenStates(model), model, ids, attention_mask=mask)
    values = []
    handles = [
        layer.self_attn.v_proj.register_forward_hook(lambda m, a, out: values.append(out.view(2, 24, 2, 16)))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids, attention_mask=mask)
    for handle in handles:
        handle.remove()
    for layer, value in enumerate(values):
        ratios = [
            value[row, first].norm(dim=-1) / value[row, first + 1 :].norm(dim=-1).median(dim=0).values
            for row, first in ((0, 0), (1, 4))
        ]
        torch.testing.assert_close(
            torch.tensor(result.value_norm_ratio[layer]), torch.stack(ratios).mean(dim=0), **CLOSE
        )
        pair = torch.stack([value[0, 0], value[1, 4]]).double()
        cosine = nn.functional.cosine_similarity(pair[0], pair[1], dim=-1)
        torch.testing.assert_close(torch.tensor(result.value_cosine[layer]).double(), cosine, **CLOSE)
        spread = (pair - pair.mean(0)).square().sum(-1).mean(0).sqrt() / pair.mean(0).norm(dim=-1)
        torch.testing.assert_close(torch.tensor(result.value_deviation[layer]).double(), spread, **CLOSE)


def test_first_token_states_stream_over_batches(tiny_model):
    """Documents of two tokens, the shortest that count."""
    model, (ids, _) = wide(tiny_model), texts(batch=4)
    ids = ids[:, :2]
    whole = observe(FirstTokenStates(model), model, ids)
    with FirstTokenStates(model) as probe, torch.no_grad():
        for part in ids.split([1, 2, 1]):
            model(part)
    parts = probe.result()
    assert None not in whole.value_norm_ratio[0]
    for name in ("value_norm_ratio", "key_cosine", "value_cosine", "key_deviation", "value_deviation"):
        torch.testing.assert_close(torch.tensor(getattr(parts, name)), torch.tensor(getattr(whole, name)), **CLOSE)


def test_a_fixed_first_token_is_a_constant_and_one_document_says_nothing(tiny_model):
    model, (ids, _) = wide(tiny_model), texts()
    ids[:, 0] = 1
    result = observe(FirstTokenStates(model), model, ids)
    assert torch.tensor(result.key_cosine).min() > 1 - 1e-6
    assert torch.tensor(result.value_deviation).max() < 1e-6
    alone = observe(FirstTokenStates(model), model, ids[:1])
    assert alone.value_cosine == [[None, None]] * 3
    assert observe(FirstTokenStates(model), model, ids[:, :1]).value_norm_ratio == [[None, None]] * 3


def test_mean_nll_is_the_models_own_loss(tiny_model):
    model, (ids, mask) = wide(tiny_model), texts(600)
    with torch.no_grad():
        loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.item()
    # labels of padding are ignored by the model; the pair (padding, first token) is left out by us only
    nll, count = mean_nll(model, [{"input_ids": ids, "attention_mask": mask}])
    assert count == 599 + 595
    assert nll == pytest.approx(loss, rel=2e-3)
    with torch.no_grad():
        assert mean_nll(model, [ids])[0] == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)
    for batches, message in (([], "no text"), ([ids[:, :1]], "1 tokens"), ([ids[0]], "token ids")):
        with pytest.raises(ValueError, match=message):
            mean_nll(model, batches)


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("random", [False, True])
def test_a_model_in_training_is_measured_without_dropout_and_goes_on_training(random, tiny_model, randomize_gates):
    model = tiny_model(attention_dropout=0.5)
    model = randomize_gates(model) if random else model
    ids = texts()[0]
    measures = {
        "nll": lambda: mean_nll(model, [ids])[0],
        "maps": lambda: attention_maps(model, ids[0], [2])[2].tolist(),
        "interventions": lambda: measure_interventions(model, [ids], {"same": contextlib.nullcontext}),
    }
    expected = {name: measure() for name, measure in measures.items()}
    model.train().model.layers[1].eval()  # a layer that is kept from dropout stays so
    before = modes(model)
    assert {name: measure() for name, measure in measures.items()} == expected
    assert modes(model) == before
    with pytest.raises(ValueError, match="no text to measure"):
        mean_nll(model, [])
    assert modes(model) == before


def test_interventions_are_measured_on_the_same_tokens(tiny_model, randomize_gates):
    model, (ids, mask) = randomize_gates(wide(tiny_model)), texts()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batches = [{"input_ids": ids, "attention_mask": mask}, ids[:1]]
    same = {"nothing": lambda: scaled_gates(model, 1.0)}
    outcomes = measure_interventions(model, batches, {**same, **quantisation_interventions(model)})
    assert [outcome.name for outcome in outcomes] == ["unchanged", "nothing", "W8A8", "A4 per token"]
    assert outcomes[0].nll == pytest.approx(mean_nll(model, batches)[0])
    assert outcomes[1].kl == outcomes[1].nll_change == 0.0
    assert outcomes[3].kl > outcomes[2].kl > 0
    for outcome in outcomes:
        assert outcome.perplexity == pytest.approx(math.exp(outcome.nll))
        assert outcome.perplexity_ratio == pytest.approx(math.exp(outcome.nll - outcomes[0].nll))
        json.dumps(outcome.to_dict(), allow_nan=False)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="no text"):
        measure_interventions(model, [], same)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_evicted_keys_are_not_seen(implementation, tiny_model):
    model, (ids, _) = wide(tiny_model, num_hidden_layers=1), texts()
    model.set_attn_implementation(implementation)
    window, kept = 6, 2
    with evicted_keys(model, window, kept), torch.no_grad():
        evicted = model(ids).logits
        changed = ids.clone()
        changed[:, kept : 24 - window] = 9  # neither kept nor in the last query's window
        assert torch.equal(model(changed).logits[:, -1], evicted[:, -1])
        changed[:, 0] = 9
        assert not torch.equal(model(changed).logits[:, -1], evicted[:, -1])
    with torch.no_grad():
        plain = model(ids).logits
    torch.testing.assert_close(evicted[:, : window + kept], plain[:, : window + kept], **CLOSE)
    assert not torch.allclose(evicted[:, -1], plain[:, -1], atol=1e-3)


def test_eviction_equals_a_cache_that_forgets(tiny_model):
    """Token by token with only the last keys in the cache: the same logits, since each key came from a window too."""
    model, (ids, _) = wide(tiny_model), texts(16, batch=2)
    window = 5
    cache = DynamicCache()
    steps = []
    with torch.no_grad():
        for position in range(16):
            out = model(
                ids[:, position : position + 1],
                position_ids=torch.tensor([[position]]),
                cache=cache,
                use_cache=True,
            )
            steps.append(out.logits[:, 0])
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, -(window - 1) :], layer.values[:, :, -(window - 1) :]
        with evicted_keys(model, window, 0):
            at_once = model(ids).logits
    torch.testing.assert_close(torch.stack(steps, dim=1), at_once, rtol=1e-4, atol=1e-4)


def test_eviction_respects_padding(tiny_model):
    model, (ids, mask) = wide(tiny_model), texts()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with evicted_keys(model, 6, 1), torch.no_grad():
        padded = model(ids, attention_mask=mask, position_ids=positions).logits[1, 4:]
        alone = model(ids[1:, 4:]).logits[0]
    torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-4)


def test_eviction_refuses_what_it_cannot_do(tiny_model):
    model, (ids, _) = tiny_model(), texts()
    with pytest.raises(ValueError, match="24 tokens and the window 24"), evicted_keys(model, 24, 0):
        model(ids)
    with pytest.raises(ValueError, match="window is 0"), evicted_keys(model, 0, 1):
        pass
    sliding = tiny_model(sliding_window=8, layer_types=["sliding_attention"] * 3)
    with pytest.raises(ValueError, match="full attention only"), evicted_keys(sliding, 4, 1):
        pass
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="'flex_attention' does not take"), evicted_keys(model, 4, 1):
        pass
    assert sorted(streaming_interventions(model, 4)) == [f"window 4, {kept} first kept" for kept in (0, 1, 4)]


def test_rounding_has_the_stated_levels():
    states = torch.tensor([[0.0, 7.0, -3.4, 100.0], [0.1, 0.2, 0.3, 0.35]])
    per_token = rounded(states, 4, dims=-1)  # steps 100/7 and 0.05
    assert per_token.tolist() == [pytest.approx([0.0, 0.0, 0.0, 100.0]), pytest.approx([0.1, 0.2, 0.3, 0.35])]
    per_tensor = rounded(states, 4, dims=None)
    assert per_tensor.unique().tolist() == pytest.approx([0.0, 100.0])
    for bits in (4, 8):
        values = torch.randn(64, 300)
        steps = 2 * values.abs().amax(-1) / (2 ** (bits - 1) - 1)
        assert ((rounded(values, bits, dims=-1) - values).abs().amax(-1) <= steps / 4 * (1 + 1e-5)).all()
        assert max(len(row.unique()) for row in rounded(values, bits, dims=-1)) <= 2**bits - 1
    assert rounded(torch.zeros(2, 3), 8, dims=-1).tolist() == torch.zeros(2, 3).tolist()


def test_rounded_weights_and_inputs_are_those_of_the_decoder_and_come_back(tiny_model):
    model, (ids, _) = wide(tiny_model), texts()
    originals = {name: parameter.clone() for name, parameter in model.named_parameters()}
    pointers = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with quantised(model, weight_bits=8, activation_bits=8):
        inside = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for name, parameter in inside.items():
        assert torch.equal(parameter, originals[name]) != name.endswith("_proj.weight"), name
        if name.endswith("_proj.weight"):
            assert torch.equal(parameter, rounded(originals[name], 8, dims=-1))
    with pytest.raises(IndexError), quantised(model, weight_bits=8, activation_bits=8):
        model(ids + 1000)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, originals[name])
        assert parameter.data_ptr() == pointers[name]
    seen = []
    o_proj = model.model.layers[1].self_attn.o_proj
    with quantised(model, activation_bits=4, per_token=True), torch.no_grad():
        handle = o_proj.register_forward_hook(lambda m, args, out: seen.append(args[0]))
        model(ids)
        handle.remove()
    assert max(len(token.unique()) for token in seen[0].flatten(0, 1)) <= 15


def test_an_outlier_makes_rounding_dear(tiny_model):
    """The reason for the stress test: one large coordinate takes the levels of all others."""
    model, (ids, _) = wide(tiny_model), texts()
    calm = measure_interventions(model, [ids], quantisation_interventions(model))
    for layer in model.model.layers:
        layer.input_layernorm.weight.data[3] = 100.0
        for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
            getattr(layer.self_attn, name).weight.data[:, 3] /= 100.0
    loud = measure_interventions(model, [ids], quantisation_interventions(model))
    assert loud[0].nll == pytest.approx(calm[0].nll, rel=1e-4)
    assert loud[2].kl > 2 * calm[2].kl


def test_gate_interventions_reset_scale_and_average(tiny_model, randomize_gates):
    model, (ids, _) = randomize_gates(wide(tiny_model, gate_granularity="headwise"), std=3.0), texts()
    scores = observe(GateScores(model), model, ids)
    interventions = gate_interventions(model, scores, factors=(0.0, 1.0, 2.0))
    outcomes = {o.name: o for o in measure_interventions(model, [ids], interventions)}
    assert set(outcomes) == {"unchanged", "gates reset", "gates = mean", "gates x 0", "gates x 1", "gates x 2"}
    assert outcomes["gates x 1"].kl == 0.0
    for name in ("gates reset", "gates = mean", "gates x 0", "gates x 2"):
        assert outcomes[name].kl > 1e-3
    with interventions["gates = mean"](), torch.no_grad():
        fixed = model.model(ids, output_gate_scores=True).gate_scores
    assert torch.tensor(scores.per_head[1]).allclose(fixed[1].expand(2, 24, 4, 1)[0, 3, :, 0], atol=1e-6)


@pytest.mark.parametrize("operation", ["multiply", "add"])
def test_scaled_gates_scale_the_score_and_nothing_else(operation, tiny_model, randomize_gates):
    model = randomize_gates(tiny_model(gate_operation=operation, gate_activation="silu"))
    gate = model.model.layers[0].self_attn.attn_gate
    states, logits = torch.randn(1, 3, 4, 16), torch.randn(1, 3, 4, 16)
    with scaled_gates(model, 0.25):
        gated, scores = gate(states, logits)
    act = nn.functional.silu(logits) * 0.25
    torch.testing.assert_close(scores, act)
    torch.testing.assert_close(gated, states * act if operation == "multiply" else states + act, **CLOSE)
    with pytest.raises(ValueError, match="fused into a forward"), scaled_gates(foreign("afmoe"), 2.0):
        pass


def test_gates_of_other_models_cannot_be_replaced():
    model = foreign("afmoe")
    scores = observe(GateScores(model), model, texts()[0])
    with pytest.raises(ValueError, match="'afmoe' model are part of its forward"):
        gate_interventions(model, scores)


def test_the_divergence_is_from_the_unchanged_model_per_real_token(tiny_model, randomize_gates):
    """KL(unchanged || changed), by its sum, over every real token and not only those that predict one."""
    model, (ids, mask) = randomize_gates(wide(tiny_model), std=3.0), texts()
    inputs = {"input_ids": ids, "attention_mask": mask}
    _, outcome = measure_interventions(model, [inputs], {"half": functools.partial(scaled_gates, model, 0.5)})
    with torch.no_grad():
        before = model(**inputs).logits[mask.bool()].double().log_softmax(-1)
        with scaled_gates(model, 0.5):
            after = model(**inputs).logits[mask.bool()].double().log_softmax(-1)
    assert outcome.kl == pytest.approx((before.exp() * (before - after)).sum(-1).mean().item(), rel=1e-4)
