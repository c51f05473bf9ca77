"""Attention on the first token and sinks among the first keys, without attention maps.

Weights come from a_ij = exp(s_ij - LSE_i) in float32, where LSE_i is the log-sum-exp of query i's scores over the keys
that it sees: the fused CPU kernel's own, or computed over blocks of queries. Memory is one block of scores, never a
map.
"""

import warnings
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import asdict, dataclass

import torch
from torch import nn

from .probes import AttentionCall, Probe, attention_modules, in_eval_mode, listen_to_attention
from .visibility import Layout, Visibility


EARLY_QUERIES = 4  # left out of the second convention: attention near the start is high with or without a sink


@dataclass(frozen=True)
class FirstTokenAttentionResult:
    """
    Mean attention on the first real token of each document.

    mean: F-Attn, the mean over layers and heads (the paper's convention: all queries but the first token itself, whose
    weight is 1 by necessity); mean_late leaves out the first four queries. per_layer and per_head likewise; None where
    no query was counted. seen_per_layer: share of the counted queries that see the first token at all; below 1 under
    sliding windows, where the others count as 0. key_attention[layer][head][k]: mean attention on key k (0 is the
    first token) over the queries from k on, among the first `sink_window` queries of each document.

    most_attended: what the later half of the first `sink_window` queries gives to the one key of the earlier half that
    gets most of it, mean over layers and heads, then over the documents that are as long as `sink_window` (None if
    there is none; uniform attention over 64 tokens: 0.021). most_attended_keys: which keys those are, counted from 1,
    the most frequent first. A sink that has only moved off the first token is seen here, and not in `mean`.
    """

    implementation: str
    tokens: int
    documents: int
    queries: int
    skipped_forwards: int
    first_tokens: list[dict]
    layers: list[int]
    mean: float | None
    mean_late: float | None
    per_layer: list[float | None]
    per_layer_late: list[float | None]
    per_head: list[list[float | None]]
    per_head_late: list[list[float | None]]
    seen_per_layer: list[float | None]
    sink_window: int
    key_attention: list[list[list[float | None]]]
    most_attended: float | None
    most_attended_keys: list[dict]

    def sink_rate(self, key: int | None = 1, threshold: float = 0.3) -> float | None:
        """
        Sink_k^eps: share of (layer, head) whose mean attention on key k exceeds eps; k = 1 is the first token.

        `key=None` is any-k: some key in the first half of `sink_window` exceeds eps (later keys have too few queries
        for a mean). Definition and defaults (eps 0.3, 64 tokens): Gu et al., arXiv 2410.10781; here alpha_k is
        averaged over documents before the threshold.
        """
        if key is not None and not 1 <= key <= self.sink_window:
            raise ValueError(
                f"key is {key}; it counts from 1 to sink_window = {self.sink_window}, or is None for any."
            )
        keys = slice(0, max(1, self.sink_window // 2)) if key is None else slice(key - 1, key)
        heads = [
            [alpha for alpha in head[keys] if alpha is not None] for layer in self.key_attention for head in layer
        ]
        heads = [max(alphas) > threshold for alphas in heads if alphas]
        return sum(heads) / len(heads) if heads else None

    def to_dict(self) -> dict:
        """Plain numbers and lists, with `sink_rate` for k = 1..4 and any k at eps = 0.3."""
        keys = [k for k in (1, 2, 3, 4) if k <= self.sink_window]
        return asdict(self) | {"sink_rate": {str(k): self.sink_rate(k) for k in keys} | {"any": self.sink_rate(None)}}


class AttentionProbe(Probe, ABC):
    """Base of probes that look at attention calls: `observe(call, layout, visibility)` for each counted one."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.modules = attention_modules(model)
        self._visibility: dict[tuple, Visibility] = {}  # layers of one forward pass share their mask

    def contexts(self):
        return (listen_to_attention(self.modules, self._on_call),)

    @abstractmethod
    def observe(self, call: AttentionCall, layout: Layout, visibility: Visibility) -> None:
        """Called after each attention call of a counted forward pass."""

    def _begin(self, *hook):
        self._visibility.clear()
        super()._begin(*hook)

    def _end(self, *hook):
        super()._end(*hook)
        self._visibility.clear()

    def _on_call(self, call: AttentionCall) -> None:
        if self.layout is not None:
            layout = self.layout.to(call.query.device)
            self.observe(call, layout, self._visibility_of(call, layout))

    def _visibility_of(self, call: AttentionCall, layout: Layout) -> Visibility:
        if call.options.get("position_bias") is not None:
            raise ValueError(f"Attention with a position bias is not supported by {type(self).__name__}.")
        flash = str(call.module.config._attn_implementation).startswith("flash")
        window = call.options.get("sliding_window") if flash else None
        key = (id(call.mask), window, str(call.query.device))
        if key not in self._visibility:
            self._visibility[key] = Visibility(call.mask, layout, window, separate_documents=flash)
            if call.mask is None and not flash and bool((layout.start > 0).any()):
                warnings.warn(
                    "Positions restart inside a row, but the model attends across its documents: packed sequences are "
                    "kept apart only without an attention mask and with `use_cache=False`.",
                    stacklevel=2,
                )
        return self._visibility[key]


class FirstTokenAttention(AttentionProbe):
    """
    F-Attn and Sink_k of every causal self-attention layer that goes through the Transformers attention interface.

    sink_window: queries and keys per document that Sink_k looks at (T = 64 in Gu et al.). query_stride: F-Attn counts
    every n-th query of a document only, which makes long contexts cheaper where the kernel gives no log-sum-exp.
    block_bytes: memory of one block of scores.

    Raises ValueError for an encoder and for a model without the attention interface.
    """

    def __init__(self, model: nn.Module, *, sink_window: int = 64, query_stride: int = 1, block_bytes: int = 2**23):
        super().__init__(model)
        for name, value in (
            ("sink_window", sink_window),
            ("query_stride", query_stride),
            ("block_bytes", block_bytes),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        self.sink_window, self.query_stride, self.block_bytes = sink_window, query_stride, block_bytes
        self._sums: dict[int, _Sums] = {}
        self._received: list[list[torch.Tensor]] = []  # of the forward pass: by layer, of each document
        self._most: list[float] = []
        self._most_keys: Counter[int] = Counter()

    def begin(self) -> None:
        self._received = []

    def observe(self, call: AttentionCall, layout: Layout, visibility: Visibility) -> None:
        rows = self._rows(layout)
        log_sum_exp = _log_sum_exp(call, visibility, rows, self.block_bytes)  # [batch, heads, seq]
        heads = call.query.shape[1]
        sums = self._sums.setdefault(call.layer, _Sums(heads, self.sink_window))
        weights, seen = _first_weights(call, visibility, layout, log_sum_exp)
        sums.add_first(weights, seen, self._counted(visibility, layout), layout)
        received = []
        for row, first, length in layout.documents:
            stop = first + min(length, self.sink_window)
            weights, queries = _corner(call, visibility, log_sum_exp, row, first, stop)
            sums.add_keys(weights, queries)
            if length >= self.sink_window > 1:
                half = self.sink_window // 2
                received.append(weights[:, half:, :half].mean(dim=(0, 1), dtype=torch.float64).cpu())
        self._received.append(received)

    def finish(self) -> None:
        for layers in zip(*self._received, strict=True):
            share, key = torch.stack(layers).mean(dim=0).max(dim=0)
            self._most.append(share.item())
            self._most_keys[int(key) + 1] += 1

    def _rows(self, layout: Layout) -> torch.Tensor:
        wanted = (layout.position % self.query_stride == 0) | (layout.position < self.sink_window)
        return (wanted & layout.real).any(dim=0).nonzero()[:, 0]

    def _counted(self, visibility: Visibility, layout: Layout) -> torch.Tensor:
        counted = layout.real & (layout.position > 0) & ~visibility.lonely
        return counted & (layout.position % self.query_stride == 0)

    def result(self) -> FirstTokenAttentionResult:
        """The measurement so far. Raises ValueError when nothing was measured."""
        self.require_observations()
        if not self._sums:
            raise ValueError("The decoder ran, but none of its attention layers called the attention interface.")
        layers = sorted(self._sums)
        sums = [self._sums[layer] for layer in layers]
        if broken := [layer for layer, s in zip(layers, sums, strict=True) if not s.first.isfinite().all()]:
            raise ValueError(
                f"Attention weights are not finite in layers {broken}: the model computes NaN or infinity."
            )
        per_head, late = ([_means(s.first[i], s.count[i]) for s in sums] for i in (0, 1))
        per_layer, per_layer_late = ([_mean(heads) for heads in table] for table in (per_head, late))
        return FirstTokenAttentionResult(
            implementation=str(self.decoder.config._attn_implementation),
            tokens=self.tokens,
            documents=self.documents,
            queries=int(sums[0].count[0]),
            skipped_forwards=self.skipped_forwards,
            first_tokens=self.first_tokens(),
            layers=layers,
            mean=_mean(per_layer),
            mean_late=_mean(per_layer_late),
            per_layer=per_layer,
            per_layer_late=per_layer_late,
            per_head=per_head,
            per_head_late=late,
            seen_per_layer=[_means(s.seen[None], s.count[0])[0] for s in sums],
            sink_window=self.sink_window,
            key_attention=[[_means(head, s.key_count) for head in s.keys] for s in sums],
            most_attended=_mean(self._most),
            most_attended_keys=[{"key": key, "count": count} for key, count in self._most_keys.most_common()],
        )


class _Sums:
    """Streaming sums of one layer, in float64: index 0 of `first` and `count` is all queries, 1 the late ones."""

    def __init__(self, heads: int, sink_window: int):
        self.first = torch.zeros(2, heads, dtype=torch.float64)
        self.count = torch.zeros(2, dtype=torch.float64)
        self.seen = torch.zeros((), dtype=torch.float64)
        self.keys = torch.zeros(heads, sink_window, dtype=torch.float64)
        self.key_count = torch.zeros(sink_window, dtype=torch.float64)

    def add_first(self, weights: torch.Tensor, seen: torch.Tensor, counted: torch.Tensor, layout: Layout) -> None:
        """weights and seen [batch, heads, seq]; counted [batch, seq]. Weights out of sight are zero."""
        for index, chosen in enumerate((counted, counted & (layout.position >= EARLY_QUERIES))):
            self.first[index] += weights.where(seen & chosen[:, None], 0.0).sum(dim=(0, 2), dtype=torch.float64).cpu()
            self.count[index] += chosen.sum().cpu()
        self.seen += (counted & seen.any(dim=1)).sum().cpu()

    def add_keys(self, weights: torch.Tensor, queries: torch.Tensor) -> None:
        """weights [heads, queries, keys] of one document's corner, zero where not counted; queries [keys]."""
        self.keys[:, : weights.shape[-1]] += weights.sum(dim=1, dtype=torch.float64).cpu()
        self.key_count[: len(queries)] += queries.cpu()


def _grouped(states: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[batch, heads, ...] -> [batch, kv heads, group, ...], in float32."""
    return states.float().unflatten(1, (kv_heads, -1))


def _scores(call: AttentionCall, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Scores before the mask. query [..., group, n, width] and key [..., keys, width] -> [..., group, n, keys]."""
    group, rows = query.shape[-3:-1]
    scores = (query * call.scaling).flatten(-3, -2) @ key.float().transpose(-1, -2)
    return _capped(call, scores.unflatten(-2, (group, rows)))


def _capped(call: AttentionCall, scores: torch.Tensor) -> torch.Tensor:
    softcap = call.options.get("softcap")
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _log_sum_exp(call: AttentionCall, visibility: Visibility, rows: torch.Tensor, block_bytes: int) -> torch.Tensor:
    """[batch, heads, seq]: log-sum-exp of each query's scores over the keys it sees; undefined outside `rows`."""
    batch, heads, seq, _ = call.query.shape
    sinks = call.options.get("s_aux")  # a learned logit per head that takes part in the softmax and has no value
    if call.log_sum_exp is not None and call.log_sum_exp.shape == (batch, heads, seq) and sinks is None:
        return call.log_sum_exp.float()
    kv_heads = call.key.shape[1]
    query, result = _grouped(call.query, kv_heads), call.query.new_zeros(batch, heads, seq, dtype=torch.float32)
    for block in rows.split(max(1, block_bytes // (4 * batch * heads * seq))):
        scores = _visible_scores(call, visibility, query[..., block, :], block)
        result[..., block] = scores.logsumexp(dim=-1)
    if sinks is not None:
        result = torch.logaddexp(result, sinks.detach().float().view(1, -1, 1))
    return result


def _visible_scores(call: AttentionCall, visibility: Visibility, query: torch.Tensor, rows: torch.Tensor):
    """Masked scores [batch, heads, n, keys] of a block of queries, over no more keys than any of them sees."""
    seq = call.query.shape[2]
    bias = visibility.block(rows, seq)
    seen = (bias > float("-inf")).any(dim=-2).flatten(0, 1).any(dim=0).nonzero()
    keys = int(seen[-1]) + 1 if len(seen) else 1
    scores = _scores(call, query, call.key[:, :, :keys]).flatten(1, 2)
    return scores + bias[..., :keys]


def _first_weights(call: AttentionCall, visibility: Visibility, layout: Layout, log_sum_exp: torch.Tensor):
    """a_i0 of each query on its document's first token, and whether it sees that token: [batch, heads, seq] both."""
    kv_heads = call.key.shape[1]
    index = layout.start[:, None, :, None].expand(-1, kv_heads, -1, call.key.shape[-1])
    first = call.key.gather(2, index).float()[:, :, None]  # [batch, kv heads, 1, seq, width]
    scores = _capped(call, (_grouped(call.query, kv_heads) * first).sum(-1) * call.scaling).flatten(1, 2)
    bias = visibility.pairs(layout.start)
    return (scores + bias - log_sum_exp).exp(), (bias > float("-inf")).expand_as(scores)


def _corner(call: AttentionCall, visibility: Visibility, log_sum_exp: torch.Tensor, row: int, first: int, stop: int):
    """
    Weights [heads, n, n] among the first n tokens of one document and the number of counted queries per key.

    Query i counts for key k when i >= k; the first token's own row never does.
    """
    rows = torch.arange(first, stop, device=call.query.device)
    span = slice(first, stop)
    query = _grouped(call.query[row : row + 1, :, span], call.key.shape[1])
    bias = visibility.block(rows, stop)
    bias = bias[min(row, len(bias) - 1), ..., span]
    scores = _scores(call, query, call.key[row : row + 1, :, span]).flatten(1, 2)[0]
    weights = (scores + bias - log_sum_exp[row, :, span, None]).exp()
    lonely = visibility.lonely
    counted = ~lonely[min(row, len(lonely) - 1), span] & (rows > first)
    return weights.where(counted[:, None], 0.0), counted.flip(0).cumsum(0).flip(0)


def _means(sums: torch.Tensor, counts: torch.Tensor) -> list[float | None]:
    counts = counts.expand(sums.shape)
    return [s / n if n else None for s, n in zip(sums.tolist(), counts.tolist(), strict=True)]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


class _AttentionMaps(AttentionProbe):
    def __init__(self, model: nn.Module, layers: list[int] | None):
        super().__init__(model)
        layers = sorted(self.modules) if layers is None else list(layers)
        if unknown := [layer for layer in layers if layer not in self.modules]:
            raise ValueError(
                f"Layers {unknown} have no attention that can be seen; the model has {sorted(self.modules)}."
            )
        self.modules = {layer: self.modules[layer] for layer in layers}
        self.maps: dict[int, torch.Tensor] = {}

    def observe(self, call: AttentionCall, layout: Layout, visibility: Visibility) -> None:
        rows = torch.arange(call.query.shape[2], device=call.query.device)
        scores = _visible_scores(call, visibility, _grouped(call.query, call.key.shape[1]), rows)
        log_sum_exp = _log_sum_exp(call, visibility, rows, 2**30)
        self.maps[call.layer] = (scores - log_sum_exp[..., None]).exp()[0].cpu()


@in_eval_mode
@torch.no_grad()
def attention_maps(
    model: nn.Module, input_ids: torch.Tensor, layers: list[int] | None = None
) -> dict[int, torch.Tensor]:
    """
    Attention weights of one short text, for pictures: {layer: [heads, seq, seq]} in float32.

    input_ids [seq] or [1, seq], at most 1,024 tokens. Raises ValueError for longer texts and unknown layers.
    """
    input_ids = input_ids.reshape(1, -1).to(model.device)
    if not 2 <= input_ids.shape[1] <= 1024:
        raise ValueError(f"The text has {input_ids.shape[1]} tokens; attention maps need 2 to 1,024.")
    with _AttentionMaps(model, layers) as probe:
        model(input_ids, use_cache=False)
    return probe.maps
