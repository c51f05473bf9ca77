"""What attention gates do: means, quantiles, shares near 0 and 1, by layer, head and token class."""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import nn

from .probes import Probe, attention_modules
from .visibility import Layout


QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
LOW, HIGH = 0.1, 0.9


@dataclass(frozen=True)
class GateReader:
    """
    How to read the gate of one family of attention modules.

    model_types: of the decoder's config. module: name inside the attention whose output is hooked. scores: (output,
    attention module) -> scores [batch, seq, heads, width], width 1 when headwise, or None where the layer has none.
    """

    model_types: tuple[str, ...]
    module: str
    scores: Callable[[torch.Tensor, nn.Module], torch.Tensor]


def _own_scores(output, attention):
    scores = output[1]
    return scores if scores.ndim == 4 else scores[None, None]  # a constant gate has no tokens


def _interleaved(output, attention):
    """q_proj holds [query | gate] per head."""
    return output.unflatten(-1, (-1, 2 * attention.head_dim))[..., attention.head_dim :].sigmoid()


def _separate(output, attention):
    """One score per coordinate of o_proj's input, or one per head."""
    elementwise = output.shape[-1] == attention.o_proj.in_features
    return output.unflatten(-1, (-1, attention.head_dim if elementwise else 1)).sigmoid()


GATE_READERS = (
    GateReader(("gated_llama",), "attn_gate", _own_scores),
    GateReader(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "q_proj", _interleaved),
    GateReader(("afmoe",), "gate_proj", _separate),
    GateReader(("step3p5",), "g_proj", _separate),
)


def gate_modules(model: nn.Module) -> tuple[GateReader, dict[int, nn.Module]]:
    """
    The reader of the model's gates and its gated attention modules by layer.

    Raises ValueError when the model has no gate that is known here.
    """
    modules = attention_modules(model)
    model_type = next(iter(modules.values())).config.model_type
    for reader in GATE_READERS:
        gated = {
            layer: module for layer, module in modules.items() if getattr(module, reader.module, None) is not None
        }
        if model_type in reader.model_types and gated:
            return reader, gated
    known = sorted(name for reader in GATE_READERS for name in reader.model_types)
    raise ValueError(f"No attention gate is known in a model of type {model_type!r}; gates are read from {known}.")


@dataclass(frozen=True)
class GateScoresResult:
    """
    Gate scores over real tokens (and coordinates, when elementwise), per gated layer and head.

    quantiles: of all scores in a layer, at `quantile_levels`, interpolated in bins of width (high - low) / bins.
    shares: `below` 0.1 and `above` 0.9 per layer and head. dead_heads and saturated_heads: [layer, head] with at least
    99 % of the scores below 0.1, above 0.9. by_class: mean per layer for the first token of each document and for the
    others. histogram: counts per layer and bin on [low, high]; scores outside (possible for unbounded activations
    only) are in the end bins. std_per_head is over tokens and coordinates: 0 for a gate that never moves.
    """

    model_type: str
    granularity: str
    tokens: int
    documents: int
    skipped_forwards: int
    layers: list[int]
    mean: float
    per_layer: list[float]
    per_head: list[list[float]]
    std_per_head: list[list[float]]
    quantile_levels: list[float]
    quantiles: list[list[float]]
    below: list[list[float]]
    above: list[list[float]]
    share_below: float
    share_above: float
    by_class: dict[str, list[float | None]]
    dead_heads: list[list[int]]
    saturated_heads: list[list[int]]
    low: float
    high: float
    histogram: list[list[int]]

    def to_dict(self) -> dict:
        return asdict(self)


class GateScores(Probe):
    """
    Statistics of the attention gate's scores: of gated_llama models, and of models whose gate is fused into a forward.

    Qwen3-Next and Qwen3.5 keep the gate in q_proj, AFMoE in `self_attn.gate_proj`, Step in `g_proj`: there the scores
    are recomputed from that projection's output. bins: resolution of histogram and quantiles.

    Raises ValueError when the model has no gate that is known here.
    """

    def __init__(self, model: nn.Module, *, bins: int = 400):
        super().__init__(model)
        if bins < 10:
            raise ValueError(f"bins is {bins}; it must be at least 10.")
        self.reader, self.modules = gate_modules(model)
        config = next(iter(self.modules.values())).config
        bounded = getattr(config, "gate_activation", "sigmoid") in ("sigmoid", "ns_sigmoid")
        self.low, self.high = (0.0, 1.0) if bounded else (-4.0, 4.0)
        self.bins = bins
        self._sums: dict[int, _GateSums] = {}

    def hooks(self):
        for layer, module in self.modules.items():
            target = getattr(module, self.reader.module)
            yield target.register_forward_hook(functools.partial(self._observe, layer, module))

    @torch.no_grad()
    def _observe(self, layer: int, attention: nn.Module, module, args, output):
        if self.layout is None:
            return
        scores = self.reader.scores(output, attention).detach().float()
        layout = self.layout.to(scores.device)
        scores = scores.expand(*layout.real.shape, -1, -1)  # [batch, seq, heads, width]
        if layer not in self._sums:
            self._sums[layer] = _GateSums(scores.shape[2], scores.shape[3], self.low, self.high, self.bins)
        self._sums[layer].add(scores, layout)

    def result(self) -> GateScoresResult:
        """The measurement so far. Raises ValueError when nothing was measured."""
        self.require_observations()
        layers = sorted(self._sums)
        sums = [self._sums[layer] for layer in layers]
        per_layer = [s.mean.mean().item() for s in sums]
        heads = [(layer, head) for layer, s in zip(layers, sums, strict=True) for head in range(s.heads)]
        below, above = ([s.share(name).tolist() for s in sums] for name in ("below", "above"))
        flat_below, flat_above = (torch.tensor([share for row in table for share in row]) for table in (below, above))
        return GateScoresResult(
            model_type=next(iter(self.modules.values())).config.model_type,
            granularity="elementwise" if sums[0].width > 1 else "headwise",
            tokens=self.tokens,
            documents=self.documents,
            skipped_forwards=self.skipped_forwards,
            layers=layers,
            mean=sum(per_layer) / len(per_layer),
            per_layer=per_layer,
            per_head=[s.mean.tolist() for s in sums],
            std_per_head=[s.std.tolist() for s in sums],
            quantile_levels=list(QUANTILES),
            quantiles=[s.quantiles(QUANTILES) for s in sums],
            below=below,
            above=above,
            share_below=flat_below.mean().item(),
            share_above=flat_above.mean().item(),
            by_class={name: [s.class_mean(name) for s in sums] for name in ("first", "other")},
            dead_heads=[list(head) for head, share in zip(heads, flat_below.tolist(), strict=True) if share >= 0.99],
            saturated_heads=[
                list(head) for head, share in zip(heads, flat_above.tolist(), strict=True) if share >= 0.99
            ],
            low=self.low,
            high=self.high,
            histogram=[s.histogram.tolist() for s in sums],
        )


class _GateSums:
    """Streaming sums of one layer's scores: per head moments and shares, per layer a histogram and class sums."""

    def __init__(self, heads: int, width: int, low: float, high: float, bins: int):
        self.heads, self.width, self.low, self.high = heads, width, low, high
        self.sum, self.squares, self.below, self.above = torch.zeros(4, heads, dtype=torch.float64)
        self.histogram = torch.zeros(bins, dtype=torch.long)
        self.class_sums = {"first": [0.0, 0], "other": [0.0, 0]}
        self.tokens = 0

    def add(self, scores: torch.Tensor, layout: Layout) -> None:
        chosen = scores[layout.real]  # [tokens, heads, width]
        self.tokens += len(chosen)
        for total, values in (
            (self.sum, chosen),
            (self.squares, chosen.square()),
            (self.below, chosen < LOW),
            (self.above, chosen > HIGH),
        ):
            total += values.sum(dim=(0, 2), dtype=torch.float64).cpu()
        counts = torch.histc(chosen.clamp(self.low, self.high), len(self.histogram), self.low, self.high)
        self.histogram += counts.long().cpu()
        for name, mask in (("first", layout.first), ("other", layout.real & ~layout.first)):
            values = scores[mask]
            self.class_sums[name][0] += values.sum(dtype=torch.float64).item()
            self.class_sums[name][1] += values.numel()

    @property
    def count(self) -> int:
        return self.tokens * self.width

    @property
    def mean(self) -> torch.Tensor:
        """[heads]"""
        return self.sum / self.count

    @property
    def std(self) -> torch.Tensor:
        """[heads]"""
        return (self.squares / self.count - self.mean.square()).clamp(min=0.0).sqrt()

    def share(self, name: str) -> torch.Tensor:
        """[heads] share of the scores `below` 0.1 or `above` 0.9."""
        return getattr(self, name) / self.count

    def class_mean(self, name: str) -> float | None:
        total, count = self.class_sums[name]
        return total / count if count else None

    def quantiles(self, levels: tuple[float, ...]) -> list[float]:
        """Quantiles of the layer's scores, linear inside a bin."""
        counts = self.histogram.double()
        ends = counts.cumsum(0)
        width = (self.high - self.low) / len(counts)
        targets = torch.tensor(levels, dtype=torch.float64) * ends[-1]
        index = torch.searchsorted(ends, targets).clamp(max=len(counts) - 1)
        inside = (targets - (ends[index] - counts[index])) / counts[index].clamp(min=1)
        return (self.low + (index + inside) * width).tolist()
