"""Gates and sinks on the tokens that a task scores: a set of the collectors of `diagnostics` for each task."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from ..diagnostics.attention import FirstTokenAttention
from ..diagnostics.gates import GateScores, gate_modules
from ..diagnostics.probes import Probe, decoder_layers
from ..diagnostics.visibility import Layout


TIMED_BATCHES = 3  # forward passes of a task that are run with and without probes, to report what measuring costs

# What goes into the results of a task; the rest (heads, histograms) would outgrow them. `diagnose` reports it all.
REPORTED = {
    "gate_scores": (
        "mean",
        "share_below",
        "share_above",
        "quantile_levels",
        "quantiles",
        "per_layer",
        "dead_heads",
        "saturated_heads",
    ),
    "first_token_attention": (
        "mean",
        "mean_late",
        "sink_rate",
        "most_attended",
        "most_attended_keys",
        "per_layer",
        "first_tokens",
    ),
    "max_activation": ("m_act", "max", "per_layer"),
}


@dataclass(frozen=True)
class MaxActivationResult:
    """m_act: mean over layers of max |h| (the paper's M-Act), h: layer outputs at real tokens. per_layer: maxima."""

    tokens: int
    m_act: float
    max: float
    per_layer: list[float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class MaxActivation(Probe):
    """M-Act alone: the part of `diagnostics.Activations` that is cheap enough to run along with every request."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.layers = decoder_layers(model)
        self.maxima = [0.0] * len(self.layers)

    def hooks(self):
        for index, layer in enumerate(self.layers):
            yield layer.register_forward_hook(functools.partial(self._observe, index))

    @torch.no_grad()
    def _observe(self, index: int, layer: nn.Module, args: tuple, output: Any) -> None:
        if self.layout is not None:
            hidden = output[0] if isinstance(output, tuple) else output
            peaks = torch.maximum(hidden.amax(dim=-1), -hidden.amin(dim=-1))  # [batch, seq]
            peak = peaks.where(self.layout.real.to(peaks.device), 0).max().item()
            self.maxima[index] = max(self.maxima[index], peak)

    def result(self) -> MaxActivationResult:
        self.require_observations()
        return MaxActivationResult(
            self.tokens, sum(self.maxima) / len(self.maxima), max(self.maxima), list(self.maxima)
        )


COLLECTORS: dict[str, tuple[Callable[[nn.Module], Probe], ...]] = {
    "gates": (GateScores,),
    "sink": (FirstTokenAttention, MaxActivation),
}


def has_gates(model: nn.Module) -> bool:
    """Whether the model has attention gates that `"gates"` can measure."""
    try:
        gate_modules(model)
    except ValueError:
        return False
    return True


@dataclass
class Measurement:
    """
    Collectors of one task, and what they cost.

    requests: how many they were attached for; answers that came from a cache are not among them. seconds: (plain,
    measured) of the timed batches, and unchanged: whether the logits of both were equal, bit for bit.
    """

    collectors: list[Probe]
    requests: int = 0
    seconds: list[tuple[float, float]] = field(default_factory=list)
    unchanged: bool = True


class TaskProbes:
    """
    Runs forward passes under the collectors named, keeping the sums of each task apart.

    The harness pads scored rows on the right and passes no mask, since a causal model never looks there. The mask that
    the collectors get is found by looking the rows up among those announced with `expect`, so the model is called
    exactly as without probes and its logits are the same, bit for bit.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]):
        self.model = model
        self.names = list(names)
        self.by_task: dict[str, Measurement] = {}
        self.current: Measurement | None = None
        self.rows: set[tuple[int, ...]] = set()
        self.new_collectors()  # a model that cannot be measured says so before anything runs

    def new_collectors(self) -> list[Probe]:
        return [collector(self.model) for name in self.names for collector in COLLECTORS[name]]

    @contextlib.contextmanager
    def on(self, task: str, requests: int) -> Iterator[None]:
        """Forward passes inside belong to `task`."""
        self.current = self.by_task.setdefault(task, Measurement(self.new_collectors()))
        self.current.requests += requests
        try:
            yield
        finally:
            self.current = None
            self.rows.clear()

    def expect(self, rows: Iterable[Iterable[int]]) -> None:
        """Announces the rows of coming batches, without their padding."""
        self.rows = {tuple(row) for row in rows}

    def forward(self, ids: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`call(ids)` under the collectors of the current task; ids [batch, seq], padded on the right."""
        assert self.current is not None
        timed = len(self.current.seconds) < TIMED_BATCHES
        plain, seconds = _timed(call, ids) if timed else (None, 0.0)
        with self.attached(self.real_tokens(ids)):
            logits, measured = _timed(call, ids)
        if timed:
            self.current.unchanged &= torch.equal(plain, logits)
            self.current.seconds.append((seconds, measured))
        return logits

    def real_tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """[batch, seq] bool: the longest announced row that each row begins with, the rest being zeros."""
        lengths = [self._length(row) for row in ids.tolist()]
        return torch.arange(ids.shape[1], device=ids.device) < torch.tensor(lengths, device=ids.device)[:, None]

    def _length(self, row: list[int]) -> int:
        shortest = next((n for n in range(len(row), 0, -1) if row[n - 1]), 0)
        return next(n for n in range(len(row), shortest - 1, -1) if tuple(row[:n]) in self.rows)

    @contextlib.contextmanager
    def attached(self, real: torch.Tensor | None = None) -> Iterator[None]:
        """Attaches the collectors; `real` [batch, seq] replaces the padding that they would read from the call."""
        with contextlib.ExitStack() as stack:
            for collector in self.current.collectors:
                stack.enter_context(collector)
                if real is not None:
                    stack.enter_context(_padding(collector, real))
            yield

    def report(self) -> dict[str, dict[str, Any]]:
        """
        {task: {collector: the `REPORTED` part of its result}}, with `tokens` and `requests` that were measured.

        overhead: measured time / plain time - 1, of the batches that were timed; logits_unchanged: on those.
        """
        return {task: self._task_report(measurement) for task, measurement in self.by_task.items()}

    def _task_report(self, measurement: Measurement) -> dict[str, Any]:
        report: dict[str, Any] = {}
        for collector in measurement.collectors:
            if collector.tokens:
                name = _snake(type(collector).__name__)
                result = collector.result().to_dict()
                report[name] = {key: result[key] for key in REPORTED[name]}
        report["tokens"] = max((collector.tokens for collector in measurement.collectors), default=0)
        plain, measured = (
            (sum(part) for part in zip(*measurement.seconds, strict=True)) if measurement.seconds else (0, 0)
        )
        report["requests"] = measurement.requests
        report["overhead"] = measured / plain - 1 if plain else None
        report["logits_unchanged"] = measurement.unchanged if plain else None
        return report


@contextlib.contextmanager
def _padding(collector: Probe, real: torch.Tensor) -> Iterator[None]:
    """Corrects what an attached collector reads from the call: rows begin at 0 and end where `real` does."""

    def correct(decoder, args, kwargs):
        if collector.layout is not None:
            collector.layout = Layout(real, torch.zeros_like(real, dtype=torch.long))
            collector.begin()

    handle = collector.decoder.register_forward_pre_hook(correct, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _timed(call: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    start = time.perf_counter()
    result = call(ids)
    if ids.device.type == "cuda":
        torch.cuda.synchronize(ids.device)
    return result, time.perf_counter() - start


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
