"""Results of two runs of the same job, paired document by document into the rows of a comparison."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lm_eval.api.group import Group
from lm_eval.api.task import Task

from .run import Job
from .statistics import SCALES, Paired, Scale, paired


# The harness's metrics of perplexity are per word and per byte; ours is per token. bits_per_byte says again what
# byte_perplexity does.
UNITS = {"word_perplexity": "nats per word", "byte_perplexity": "nats per byte", "token_perplexity": "nats per token"}
REDUNDANT = ("bits_per_byte",)

ENOUGH = 10  # documents, below which a bootstrap interval says nothing


@dataclass(frozen=True)
class Row:
    """
    One metric of one task or group.

    unit: of differences; empty for scores. values: base and model. noise: the base and itself, run in another way.
    """

    name: str
    metric: str
    filter: str
    unit: str
    higher_is_better: bool
    values: Paired
    noise: Paired | None

    @property
    def clear(self) -> bool:
        """
        The interval of the difference leaves zero out, the base against itself did not move as far, and there are
        enough documents for an interval to mean something.
        """
        inside = self.values.low <= 0 <= self.values.high or self.values.documents < ENOUGH
        return not inside and (self.noise is None or abs(self.values.difference) > abs(self.noise.difference))


@dataclass(frozen=True)
class Metric:
    """A metric of one task with the values of its documents, base beside model."""

    scale: Scale
    higher_is_better: bool
    pairs: list[tuple[Any, Any]]


@dataclass
class Metrics:
    """All that can be paired: {task: {(metric, filter): Metric}}, and what cannot."""

    by_task: dict[str, dict[tuple[str, str], Metric]] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)


def collect(tasks: dict[str, Task], base: dict[str, Any], model: dict[str, Any]) -> Metrics:
    """Pairs the samples of two results. ValueError when they are of different documents."""
    metrics = Metrics()
    for name, task in tasks.items():
        found = metrics.by_task[name] = {}
        for before, after in _same_documents(name, base["samples"][name], model["samples"][name]):
            for metric in [*before["metrics"], *(["token_perplexity"] if "token_perplexity" in before else [])]:
                scale = SCALES.get(_aggregation(task, metric))
                if metric in REDUNDANT:
                    continue
                if scale is None:
                    if (name, metric) not in metrics.left_out:
                        metrics.left_out.append((name, metric))
                    continue
                better = base["higher_is_better"][name].get(metric)
                entry = found.setdefault((metric, before["filter"]), Metric(scale, better is not False, []))
                entry.pairs.append((before[metric], after[metric]))
    return metrics


def _same_documents(name: str, base: list[dict], model: list[dict]) -> Iterator[tuple[dict, dict]]:
    key = lambda sample: (sample["filter"], sample["doc_id"])  # noqa: E731
    base, model = sorted(base, key=key), sorted(model, key=key)
    same = [(*key(sample), sample["doc_hash"]) for sample in base] == [(*key(s), s["doc_hash"]) for s in model]
    if not same:
        raise ValueError(
            f"The two results of {name} are of different documents: run them with the same limit and data."
        )
    return zip(base, model, strict=True)


def _aggregation(task: Task, metric: str) -> str:
    if metric == "token_perplexity":
        return "weighted_perplexity"
    function = task.aggregation().get(metric)
    return "mean" if function is None else function.__name__  # the harness's own fallback


def rows(
    job: Job, base: dict[str, Any], model: dict[str, Any], noise: dict[str, Any] | None
) -> tuple[list[Row], list]:
    """Rows of groups and tasks, and (task, metric) whose aggregation has no paired difference here."""
    tasks = job.tasks
    metrics = collect(tasks, base, model)
    against_itself = collect(tasks, base, noise) if noise else None
    found = [row for group in job.groups.values() for row in _group_rows(group, metrics, against_itself)]
    for name, by_metric in metrics.by_task.items():
        for key, metric in by_metric.items():
            other = against_itself.by_task[name][key] if against_itself else None
            found += _row(
                name, key, metric, paired(metric.pairs, metric.scale), other and paired(other.pairs, other.scale)
            )
    return found, metrics.left_out


def _row(name: str, key: tuple[str, str], metric: Metric, values: Paired | None, noise: Paired | None) -> list[Row]:
    unit = UNITS.get(key[0], metric.scale.unit)
    return [] if values is None else [Row(name, *key, unit, metric.higher_is_better, values, noise)]


def _group_rows(group: Group, metrics: Metrics, noise: Metrics | None) -> Iterator[Row]:
    """The metrics that a group aggregates: over all documents alike, or as the mean of its tasks."""
    names = [task.task_name for task in group.get_all_tasks()]
    for config in group.aggregate_metric_list or []:
        filters = sorted({f for name in names for metric, f in metrics.by_task[name] if metric == config.metric})
        for key in ((config.metric, filter_name) for filter_name in filters):
            with_metric = [name for name in names if key in metrics.by_task[name]]
            first = metrics.by_task[with_metric[0]][key]
            values, other = (
                _pooled([m.by_task[name][key] for name in with_metric], config.weight_by_size) if m else None
                for m in (metrics, noise)
            )
            yield from _row(group.name, key, first, values, other)


def _pooled(parts: list[Metric], by_size: bool) -> Paired | None:
    shares = [1.0 if by_size else 1 / (len(parts) * len(part.pairs)) for part in parts for _ in part.pairs]
    return paired([pair for part in parts for pair in part.pairs], parts[0].scale, shares)
