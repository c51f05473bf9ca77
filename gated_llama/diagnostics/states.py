"""First-token keys and values, and the sparsity of what attention writes."""

import functools
from dataclasses import asdict, dataclass

import torch
from torch import nn

from .gates import gate_modules
from .probes import AttentionCall, Probe, attention_modules, listen_to_attention


@dataclass(frozen=True)
class FirstTokenStatesResult:
    """
    The first token's value norm against the others', and whether its key and value are constants of the model.

    value_norm_ratio[layer][kv head]: |v_0| / median over j >= 1 of |v_j|, averaged over documents; small for a sink
    that is a no-op, large for one that broadcasts content. key_cosine, value_cosine: mean cosine between first tokens
    of two documents. key_deviation, value_deviation: root mean square distance from the mean vector, divided by its
    norm; 0 when every document gives the same vector, as with a fixed BOS. All but the ratio need two documents, else
    None. Keys are as the kernel sees them, after the rotary embedding.
    """

    documents: int
    skipped_forwards: int
    layers: list[int]
    first_tokens: list[dict]
    value_norm_ratio: list[list[float]]
    key_cosine: list[list[float | None]]
    value_cosine: list[list[float | None]]
    key_deviation: list[list[float | None]]
    value_deviation: list[list[float | None]]

    def to_dict(self) -> dict:
        return asdict(self)


class FirstTokenStates(Probe):
    """
    Decides whether a sink can be replaced by a constant: value norms and the constancy of k_0 and v_0 over documents.

    Documents of one token do not count for the ratio. Raises ValueError as `FirstTokenAttention` does.
    """

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.modules = attention_modules(model)
        self._sums: dict[int, tuple[_RatioSums, _VectorSums, _VectorSums]] = {}

    def contexts(self):
        return (listen_to_attention(self.modules, self._observe),)

    def _observe(self, call: AttentionCall) -> None:
        if self.layout is None:
            return
        layout = self.layout.to(call.value.device)
        kv_heads = call.value.shape[1]
        if call.layer not in self._sums:
            widths = (call.key.shape[-1], call.value.shape[-1])
            self._sums[call.layer] = (_RatioSums(kv_heads), *(_VectorSums(kv_heads, width) for width in widths))
        ratios, keys, values = self._sums[call.layer]
        norms = call.value.float().norm(dim=-1)  # [batch, kv heads, keys]
        for row, first, length in layout.documents:
            ratios.add(norms[row, :, first : first + length])
        rows, firsts = layout.first.nonzero(as_tuple=True)
        keys.add(call.key[rows, :, firsts])
        values.add(call.value[rows, :, firsts])

    def result(self) -> FirstTokenStatesResult:
        """The measurement so far. Raises ValueError when nothing was measured."""
        self.require_observations()
        layers = sorted(self._sums)
        ratios, keys, values = zip(*(self._sums[layer] for layer in layers), strict=True)
        return FirstTokenStatesResult(
            documents=self.documents,
            skipped_forwards=self.skipped_forwards,
            layers=layers,
            first_tokens=self.first_tokens(),
            value_norm_ratio=[sums.mean() for sums in ratios],
            key_cosine=[sums.cosine() for sums in keys],
            value_cosine=[sums.cosine() for sums in values],
            key_deviation=[sums.deviation() for sums in keys],
            value_deviation=[sums.deviation() for sums in values],
        )


class _RatioSums:
    def __init__(self, heads: int):
        self.sum, self.count = torch.zeros(heads, dtype=torch.float64), 0

    def add(self, norms: torch.Tensor) -> None:
        """norms [heads, tokens] of one document."""
        if norms.shape[-1] > 1:
            self.sum += (norms[:, 0] / norms[:, 1:].median(dim=-1).values).double().cpu()
            self.count += 1

    def mean(self) -> list[float | None]:
        return (self.sum / self.count).tolist() if self.count else [None] * len(self.sum)


class _VectorSums:
    """
    Sums that give the spread of vectors [documents, heads, width] without keeping them; float64 against cancellation.
    """

    def __init__(self, heads: int, width: int):
        self.count = 0
        self.origin: torch.Tensor | None = None  # the first vector; distances from it stay small
        self.sum, self.unit = torch.zeros(2, heads, width, dtype=torch.float64)
        self.squares = torch.zeros(heads, dtype=torch.float64)

    def add(self, vectors: torch.Tensor) -> None:
        vectors = vectors.double().cpu()
        if not len(vectors):
            return
        if self.origin is None:
            self.origin = vectors[0].clone()
        offsets = vectors - self.origin
        self.count += len(vectors)
        self.sum += offsets.sum(dim=0)
        self.squares += offsets.square().sum(dim=(0, 2))
        self.unit += nn.functional.normalize(vectors, dim=-1).sum(dim=0)

    def deviation(self) -> list[float | None]:
        if self.count < 2:
            return [None] * len(self.squares)
        mean = self.sum / self.count
        variance = (self.squares / self.count - mean.square().sum(dim=-1)).clamp(min=0.0)
        return (variance.sqrt() / (self.origin + mean).norm(dim=-1)).tolist()

    def cosine(self) -> list[float | None]:
        if self.count < 2:
            return [None] * len(self.squares)
        return ((self.unit.square().sum(dim=-1) - self.count) / (self.count * (self.count - 1))).tolist()


@dataclass(frozen=True)
class OutputSparsityResult:
    """
    S_tau(y), the share of |y| < tau over tokens, heads and coordinates of the attention function's output y.

    Each list is [layer][threshold]: raw, before the gate (behind `sdpa_output_norm`, if there is one); gated, what
    o_proj receives; mean_scaled, y times the layer's mean score; norm_matched, y times the factor that gives it the
    gated output's root mean square. If the gate only shrank y, the last two would reach the gated sparsity. Both use
    S_tau(c y) = S_(tau/c)(y) on a histogram of log2 |y| with 16 bins per octave.

    layers are those of `raw`; gated_layers, with a multiplying gate on the SDPA output, those of the other lists (None
    without any).
    """

    tokens: int
    skipped_forwards: int
    layers: list[int]
    gated_layers: list[int]
    thresholds: list[float]
    raw: list[list[float]]
    gated: list[list[float]] | None
    mean_scaled: list[list[float]] | None
    norm_matched: list[list[float]] | None
    mean_score: list[float] | None

    def to_dict(self) -> dict:
        return asdict(self)


class OutputSparsity(Probe):
    """Sparsity of the SDPA output before and after its gate, with two controls that only scale it."""

    def __init__(self, model: nn.Module, *, thresholds: tuple[float, ...] = (1e-2, 1e-3)):
        super().__init__(model)
        if not thresholds or min(thresholds) <= 0:
            raise ValueError(f"thresholds are {thresholds}; they must be positive.")
        self.modules = attention_modules(model)
        self.thresholds = tuple(thresholds)
        self.reader = _multiplying_reader(model)
        self._sums = {layer: _SparsitySums(self.thresholds) for layer in self.modules}

    def contexts(self):
        return (listen_to_attention(self.modules, self._see_raw),)

    def hooks(self):
        if self.reader is None:
            return
        for layer, module in self.modules.items():
            if (target := getattr(module, self.reader.module, None)) is not None:
                if self._gate_sees_raw(layer):
                    yield target.register_forward_pre_hook(functools.partial(self._see_input, self._sums[layer]))
                yield target.register_forward_hook(functools.partial(self._see_scores, self._sums[layer], module))
                yield module.o_proj.register_forward_pre_hook(functools.partial(self._see_gated, self._sums[layer]))

    def _gate_sees_raw(self, layer: int) -> bool:
        """Own gates are modules that take y, behind its norm; others are fused into the attention's forward."""
        own = self.reader is not None and self.reader.module == "attn_gate"
        return own and hasattr(self.modules[layer], "attn_gate")

    def _see_raw(self, call: AttentionCall) -> None:
        if self.layout is not None and not self._gate_sees_raw(call.layer):
            self._sums[call.layer].add_raw(call.output.flatten(2), self.layout)

    @torch.no_grad()
    def _see_input(self, sums: "_SparsitySums", module, args):
        if self.layout is not None:
            sums.add_raw(args[0].detach().flatten(2), self.layout)

    @torch.no_grad()
    def _see_scores(self, sums: "_SparsitySums", attention, module, args, output):
        if self.layout is not None:
            scores = self.reader.scores(output, attention).detach()
            sums.add_scores(scores.expand(*self.layout.real.shape, -1, -1), self.layout)

    @torch.no_grad()
    def _see_gated(self, sums: "_SparsitySums", module, args):
        if self.layout is not None:
            sums.add_gated(args[0].detach().reshape(*self.layout.real.shape, -1), self.layout)

    def result(self) -> OutputSparsityResult:
        """The measurement so far. Raises ValueError when nothing was measured."""
        self.require_observations()
        sums = {layer: s for layer, s in self._sums.items() if s.count}
        with_gate = {layer: s for layer, s in sums.items() if s.gated_count}
        gated = list(with_gate.values()) or None
        return OutputSparsityResult(
            tokens=self.tokens,
            skipped_forwards=self.skipped_forwards,
            layers=list(sums),
            gated_layers=list(with_gate),
            thresholds=list(self.thresholds),
            raw=[s.raw_shares() for s in sums.values()],
            gated=gated and [s.gated_shares() for s in gated],
            mean_scaled=gated and [s.scaled_shares(s.mean_score) for s in gated],
            norm_matched=gated and [s.scaled_shares(s.norm_ratio) for s in gated],
            mean_score=gated and [s.mean_score for s in gated],
        )


def _multiplying_reader(model: nn.Module):
    """The reader of the model's gate if that gate multiplies the SDPA output, else None."""
    try:
        reader, modules = gate_modules(model)
    except ValueError:
        return None
    config = next(iter(modules.values())).config
    on_output = getattr(config, "gate_position", "sdpa_output") == "sdpa_output"
    return reader if on_output and getattr(config, "gate_operation", "multiply") == "multiply" else None


class _SparsitySums:
    OCTAVES, BINS_PER_OCTAVE = (-40, 24), 16

    def __init__(self, thresholds: tuple[float, ...]):
        self.thresholds = thresholds
        self.histogram = torch.zeros((self.OCTAVES[1] - self.OCTAVES[0]) * self.BINS_PER_OCTAVE, dtype=torch.float64)
        self.raw, self.gated = torch.zeros(2, len(thresholds), dtype=torch.float64)
        self.raw_squares = self.gated_squares = self.score_sum = 0.0
        self.count = self.gated_count = self.score_count = 0

    def add_raw(self, output: torch.Tensor, layout) -> None:
        magnitudes = output[layout.to(output.device).real].float().abs()
        self.count += magnitudes.numel()
        self.raw += self._below(magnitudes)
        self.raw_squares += magnitudes.square().sum(dtype=torch.float64).item()
        logs = magnitudes.log2().clamp(*self.OCTAVES)
        self.histogram += torch.histc(logs, len(self.histogram), *self.OCTAVES).double().cpu()

    def add_gated(self, output: torch.Tensor, layout) -> None:
        magnitudes = output[layout.to(output.device).real].float().abs()
        self.gated_count += magnitudes.numel()
        self.gated += self._below(magnitudes)
        self.gated_squares += magnitudes.square().sum(dtype=torch.float64).item()

    def add_scores(self, scores: torch.Tensor, layout) -> None:
        chosen = scores[layout.to(scores.device).real]
        self.score_count += chosen.numel()
        self.score_sum += chosen.sum(dtype=torch.float64).item()

    def _below(self, magnitudes: torch.Tensor) -> torch.Tensor:
        return torch.tensor([(magnitudes < tau).sum().item() for tau in self.thresholds], dtype=torch.float64)

    @property
    def mean_score(self) -> float:
        return self.score_sum / self.score_count

    @property
    def norm_ratio(self) -> float:
        """Root mean square of the gated output over that of the raw output."""
        return (self.gated_squares / self.raw_squares) ** 0.5 if self.raw_squares else 1.0

    def raw_shares(self) -> list[float]:
        return (self.raw / self.count).tolist()

    def gated_shares(self) -> list[float]:
        return (self.gated / self.gated_count).tolist()

    def scaled_shares(self, factor: float) -> list[float]:
        """S_tau(c y) at each threshold, linear inside a bin of log2 |y|."""
        if factor == 0:
            return [1.0] * len(self.thresholds)
        below = torch.cat([self.histogram.new_zeros(1), self.histogram.cumsum(0)])
        taus = torch.tensor(self.thresholds, dtype=torch.float64)
        place = (torch.log2(taus / abs(factor)) - self.OCTAVES[0]) * self.BINS_PER_OCTAVE
        place = place.clamp(0, len(self.histogram))
        index = place.long().clamp(max=len(self.histogram) - 1)
        shares = torch.lerp(below[index], below[index + 1], place - index) / self.count
        return shares.tolist()
