"""Massive activations: where in the residual stream they are born, live and die, and the MLP units that write them."""

import functools
import math
from dataclasses import asdict, dataclass

import torch
from torch import nn

from .probes import Probe, attention_modules, decoder_layers


TOKEN_CLASSES = ("first", "delimiter", "other")
# The last linear map of an MLP, by the names that decoders in Transformers give it.
MLP_OUTPUTS = ("down_proj", "fc2", "dense_4h_to_h", "fc_out", "wo", "w2")
DELIMITERS = (".", ",", ";", ":", "!", "?", "\n", "\n\n", " .", " ,", "。", "，", "；", "、")
UNITS = 256  # whose columns are in memory at a time
MEDIAN_SAMPLE = 2**20  # values per forward pass and layer that a median is taken over


def delimiter_token_ids(tokenizer) -> list[int]:
    """Ids of the punctuation marks and line breaks that are one token of `tokenizer`; for the class "delimiter"."""
    encoded = (tokenizer.encode(text, add_special_tokens=False) for text in DELIMITERS)
    return sorted({ids[0] for ids in encoded if len(ids) == 1})


@dataclass(frozen=True)
class SpikeWriter:
    """
    A hidden unit of an MLP that writes one large value for the first token and is quiet elsewhere.

    first_token_activation: the unit's value there (signed, at the largest magnitude over documents). elsewhere_max and
    elsewhere_mean: of its magnitude on all other real tokens. contribution: what it adds to residual dimension
    `dimension`, the one where |contribution| is largest.
    """

    layer: int
    unit: int
    first_token_activation: float
    elsewhere_max: float
    elsewhere_mean: float
    contribution: float
    dimension: int


@dataclass(frozen=True)
class ActivationsResult:
    """
    Statistics of the layer outputs (the residual stream after each layer) over the real tokens.

    m_act: mean over layers of max |h| (the paper's M-Act). max, max_layer, dimension: the largest |h|, the layer and
    the residual dimension where it is. max_by_class: per layer, for the first token of each document, delimiters, and
    all others. massive_layers: |h| > 100 and > 1000 x median |h| (Sun et al., arXiv 2402.17762). step_up: the first
    layer whose maximum reaches half of `max`; step_down: the first layer after that whose maximum is below half; None
    if there is none. kurtosis: E[(h - mean)^4] / var^2 over features, averaged over tokens. attention_kurtosis and
    attention_infinity_norm: the same and max |.|, of the attention's output (Bondarenko et al., arXiv 2306.12929).
    unit_layers: the layers whose MLP units were seen; spike writers are known for those only.
    """

    tokens: int
    documents: int
    skipped_forwards: int
    layers: list[int]
    m_act: float
    max: float
    max_layer: int
    dimension: int
    per_layer: list[float]
    dimension_per_layer: list[int]
    median_per_layer: list[float]
    max_by_class: dict[str, list[float | None]]
    massive_layers: list[int]
    step_up: int | None
    step_down: int | None
    kurtosis: list[float]
    attention_layers: list[int]
    attention_kurtosis: list[float]
    attention_infinity_norm: list[float]
    unit_layers: list[int]
    spike_writers: list[SpikeWriter]
    spike_rule: dict[str, float]

    def to_dict(self) -> dict:
        return asdict(self)


class Activations(Probe):
    """
    Collects maxima of layer outputs by token class, kurtosis, and the activations of MLP hidden units.

    delimiter_ids: token ids of the class "delimiter" (see `delimiter_token_ids`); the class is empty without.

    Spike writers are the hidden units with, on some document's first token, |contribution| > `spike_contribution` and
    > `spike_over_median` x median |h| of that layer's output, and with |activation| > `spike_over_elsewhere` x its
    mean magnitude on all other tokens. The mean and not the maximum, since a few later tokens may carry smaller spikes
    of the same kind. MLPs without a dense output map (experts) are skipped.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        delimiter_ids=(),
        spike_contribution: float = 100.0,
        spike_over_median: float = 50.0,
        spike_over_elsewhere: float = 10.0,
    ):
        super().__init__(model)
        self.layers = decoder_layers(model)
        self.attention = attention_modules(model)
        self.delimiter_ids = torch.tensor(sorted(delimiter_ids), dtype=torch.long)
        self.spike_rule = {
            "contribution": spike_contribution,
            "over_median": spike_over_median,
            "over_elsewhere": spike_over_elsewhere,
        }
        self._outputs = {layer: _OutputSums() for layer in range(len(self.layers))}
        self._attention_outputs = {layer: _OutputSums() for layer in self.attention}
        self._maps = {
            layer: mlp for layer, module in enumerate(self.layers) if (mlp := _mlp_output(module)) is not None
        }
        self._units: dict[int, _UnitSums] = {layer: _UnitSums(mlp.in_features) for layer, mlp in self._maps.items()}
        self._classes: list[torch.Tensor] = []

    def hooks(self):
        for layer, module in enumerate(self.layers):
            yield module.register_forward_hook(functools.partial(self._see_output, self._outputs[layer]))
        for layer, module in self.attention.items():
            yield module.register_forward_hook(functools.partial(self._see_output, self._attention_outputs[layer]))
        for layer, module in self._maps.items():
            yield module.register_forward_pre_hook(functools.partial(self._see_units, self._units[layer]))

    def begin(self):
        first = self.layout.first
        delimiter = torch.zeros_like(first)
        if self.input_ids is not None and len(self.delimiter_ids):
            delimiter = torch.isin(self.input_ids, self.delimiter_ids.to(first.device)) & self.layout.real & ~first
        self._classes = [first, delimiter, self.layout.real & ~first & ~delimiter]

    @torch.no_grad()
    def _see_output(self, sums: "_OutputSums", module, args, output):
        if self.layout is not None:
            output = (output[0] if isinstance(output, tuple) else output).detach()
            sums.add(output, [chosen.to(output.device) for chosen in self._classes])

    @torch.no_grad()
    def _see_units(self, sums: "_UnitSums", module, args):
        if self.layout is not None:
            units = args[0].detach()
            layout = self.layout.to(units.device)
            sums.add(units.reshape(*layout.real.shape, -1), layout)

    def result(self) -> ActivationsResult:
        """The measurement so far. Raises ValueError when nothing was measured."""
        self.require_observations()
        layers = list(self._outputs)
        outputs = list(self._outputs.values())
        per_layer = [max(value for value, _ in sums.maxima) for sums in outputs]
        dimensions = [max(sums.maxima)[1] for sums in outputs]
        if broken := [layer for layer in layers if not math.isfinite(per_layer[layer] + outputs[layer].kurtosis)]:
            raise ValueError(f"Hidden states are not finite in layers {broken}: the model computes NaN or infinity.")
        peak = max(layers, key=per_layer.__getitem__)
        attention = {layer: sums for layer, sums in self._attention_outputs.items() if sums.tokens}
        step_up, step_down = _steps(per_layer)
        return ActivationsResult(
            tokens=self.tokens,
            documents=self.documents,
            skipped_forwards=self.skipped_forwards,
            layers=layers,
            m_act=sum(per_layer) / len(per_layer),
            max=per_layer[peak],
            max_layer=peak,
            dimension=dimensions[peak],
            per_layer=per_layer,
            dimension_per_layer=dimensions,
            median_per_layer=[sums.median for sums in outputs],
            max_by_class={
                name: [sums.maxima[i][0] if sums.counts[i] else None for sums in outputs]
                for i, name in enumerate(TOKEN_CLASSES)
            },
            massive_layers=[
                n for n, sums in self._outputs.items() if per_layer[n] > 100 and per_layer[n] > 1000 * sums.median
            ],
            step_up=step_up,
            step_down=step_down,
            kurtosis=[sums.kurtosis for sums in outputs],
            attention_layers=list(attention),
            attention_kurtosis=[sums.kurtosis for sums in attention.values()],
            attention_infinity_norm=[max(value for value, _ in sums.maxima) for sums in attention.values()],
            unit_layers=list(self._units),
            spike_writers=self._spike_writers(),
            spike_rule=dict(self.spike_rule),
        )

    @torch.no_grad()
    def _spike_writers(self) -> list[SpikeWriter]:
        rule, found = self.spike_rule, []
        for layer, sums in self._units.items():
            if not sums.elsewhere_count:
                continue
            mean = sums.elsewhere_sum / sums.elsewhere_count
            threshold = max(rule["contribution"], rule["over_median"] * self._outputs[layer].median)
            loud = (sums.first.abs() > rule["over_elsewhere"] * mean).nonzero()[:, 0]
            for units in loud.split(UNITS):
                columns = _columns(self._maps[layer], units, sums.like).double().cpu()  # [units, hidden]
                dimension = columns.abs().argmax(dim=-1)
                contribution = sums.first[units] * columns.gather(1, dimension[:, None])[:, 0]
                for index in (contribution.abs() > threshold).nonzero()[:, 0].tolist():
                    numbers = (n[units[index]].item() for n in (sums.first, sums.elsewhere_max, mean))
                    writes = contribution[index].item(), dimension[index].item()
                    found.append(SpikeWriter(layer, units[index].item(), *numbers, *writes))
        return sorted(found, key=lambda writer: -abs(writer.contribution))


class _OutputSums:
    """Streaming sums of one module's output: (max |h|, its dimension) per token class, kurtosis, median."""

    def __init__(self):
        self.maxima = [(0.0, 0)] * len(TOKEN_CLASSES)
        self.counts = [0] * len(TOKEN_CLASSES)
        self.kurtosis_sum = self.median_sum = 0.0

    def add(self, hidden: torch.Tensor, classes: list[torch.Tensor]) -> None:
        peaks, dimensions = hidden.abs().max(dim=-1)  # [batch, seq]
        for index, chosen in enumerate(classes):
            if count := int(chosen.sum()):
                value, where = peaks.masked_fill(~chosen, -1.0).flatten().max(dim=0)
                self.maxima[index] = max(self.maxima[index], (value.item(), dimensions.flatten()[where].item()))
                self.counts[index] += count
        real = classes[0] | classes[1] | classes[2]
        if count := int(real.sum()):
            states = hidden[real].float()  # [tokens, hidden]
            self.kurtosis_sum += _kurtosis(states).sum().item()
            stride = max(1, states.numel() // MEDIAN_SAMPLE)
            self.median_sum += states[::stride].abs().median().item() * count

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def kurtosis(self) -> float:
        return self.kurtosis_sum / self.tokens

    @property
    def median(self) -> float:
        """Mean over forward passes of the median |h|, weighted by tokens."""
        return self.median_sum / self.tokens


class _UnitSums:
    """Streaming statistics of one MLP's hidden units, on first tokens and on all other real tokens."""

    def __init__(self, units: int):
        self.first = torch.zeros(units, dtype=torch.float64)
        self.elsewhere_max = torch.zeros(units, dtype=torch.float64)
        self.elsewhere_sum = torch.zeros(units, dtype=torch.float64)
        self.elsewhere_count = 0
        self.like: torch.Tensor | None = None  # with the dtype and the device of the units

    def add(self, units: torch.Tensor, layout) -> None:
        """units [batch, seq, units]."""
        self.like = units.new_empty(0)
        first = units[layout.first].double().cpu()  # [documents, units]
        if len(first):
            candidates = torch.cat([self.first[None], first])
            self.first = candidates.gather(0, candidates.abs().argmax(dim=0)[None])[0]
        elsewhere = (layout.real & ~layout.first)[..., None]
        magnitudes = units.abs().masked_fill_(~elsewhere, 0.0).flatten(0, -2)
        self.elsewhere_max = torch.maximum(self.elsewhere_max, magnitudes.amax(dim=0).double().cpu())
        self.elsewhere_sum += magnitudes.sum(dim=0, dtype=torch.float32).double().cpu()
        self.elsewhere_count += int(elsewhere.sum())


def _kurtosis(states: torch.Tensor) -> torch.Tensor:
    """[tokens, features] -> [tokens]: the fourth standardised moment over features; 3 for a normal distribution."""
    centred = states - states.mean(dim=-1, keepdim=True)
    squares = centred.square_()
    variance = squares.mean(dim=-1)
    return squares.square_().mean(dim=-1) / variance.square().clamp(min=torch.finfo(states.dtype).tiny)


def _steps(maxima: list[float]) -> tuple[int | None, int | None]:
    half = max(maxima) / 2
    up = next(layer for layer, value in enumerate(maxima) if value >= half)
    down = next((layer for layer in range(up + 1, len(maxima)) if maxima[layer] < half), None)
    return up, down


def _columns(linear: nn.Linear, units: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """
    [units, hidden]: the columns of the map's matrix, each as what the map makes of its unit alone.

    A quantised or offloaded map holds no matrix that could be read.
    """
    inputs = nn.functional.one_hot(units, linear.in_features).to(like)
    if isinstance(linear.weight, torch.Tensor) and linear.weight.is_floating_point():
        inputs = inputs.to(linear.weight.dtype)  # under autocast the units are in another one
    return (linear(inputs) - (0 if linear.bias is None else linear.bias)).to(like.dtype)


def _mlp_output(layer: nn.Module) -> nn.Linear | None:
    for name, module in layer.named_modules():
        path = name.split(".")
        if isinstance(module, nn.Linear) and path[-1] in MLP_OUTPUTS and len(path) == 2:
            return module
    return None
