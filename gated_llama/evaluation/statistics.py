"""Paired differences between two models on the same documents."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import binomtest


RESAMPLES = 10_000
LEVEL = 0.95
BLOCK = 2**22  # documents that are drawn at a time


@dataclass(frozen=True)
class Scale:
    """
    How the harness's values of documents become a metric: score(sum of values / sum of weights).

    read: the value of one document -> (value, weight), or None where the metric does not apply to it.
    score: from that mean to the metric as the harness reports it. unit: of differences between means.
    """

    read: Callable[[Any], tuple[float, float] | None]
    score: Callable[[float], float]
    unit: str


def _mean(value: Any) -> tuple[float, float]:
    return float(value), 1.0


def _of_its_length(value: Any) -> tuple[float, float] | None:
    return None if value == -1 else _mean(value)  # RULER marks with -1 the lengths that a document does not have


def _nll(value: Any) -> tuple[float, float]:
    return -float(value), 1.0


def _nll_of_length(value: Any) -> tuple[float, float]:
    log_likelihood, length = value
    return -float(log_likelihood), float(length)


# By the name of the harness's aggregation.
SCALES = {
    "mean": Scale(_mean, lambda mean: mean, ""),
    "aggregate_metrics": Scale(_of_its_length, lambda mean: mean, ""),
    "perplexity": Scale(_nll, math.exp, "nats per target"),
    "weighted_perplexity": Scale(_nll_of_length, math.exp, "nats"),
}


@dataclass(frozen=True)
class Paired:
    """
    A metric of two models on the same documents.

    difference: model minus base, in the scale's unit. low, high: its 95 % bootstrap interval over documents. p_value:
    exact McNemar test, for metrics that are 0 or 1. changed: documents whose values differ.
    """

    documents: int
    base: float
    model: float
    difference: float
    low: float
    high: float
    p_value: float | None
    changed: int


def paired(pairs: Sequence[tuple[Any, Any]], scale: Scale, shares: Sequence[float] | None = None) -> Paired | None:
    """
    Compares (base, model) values of documents; None when the metric applies to none of them.

    shares: what each document counts, where not every one counts alike (a group's mean of task means).
    """
    rows = [
        (*base, *model, share)
        for (base, model), share in zip(
            ((scale.read(base), scale.read(model)) for base, model in pairs), shares or [1.0] * len(pairs), strict=True
        )
        if base is not None and model is not None
    ]
    if not rows:
        return None
    base, weights, model, model_weights, share = np.array(rows).T
    assert (weights == model_weights).all(), "a document weighs the same for both models"
    weights = weights * share
    means = [float((values * share).sum() / weights.sum()) for values in (base, model)]
    low, high = interval((model - base) * share, weights)
    return Paired(
        documents=len(rows),
        base=scale.score(means[0]),
        model=scale.score(means[1]),
        difference=means[1] - means[0],
        low=low,
        high=high,
        p_value=mcnemar(base, model) if scale is SCALES["mean"] else None,
        changed=int((base != model).sum()),
    )


def interval(differences: np.ndarray, weights: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap, over documents, of sum(differences) / sum(weights)."""
    generator = np.random.default_rng(seed)
    count = len(differences)
    step = max(1, BLOCK // count)
    estimates = []
    for start in range(0, RESAMPLES, step):
        drawn = generator.integers(count, size=(min(step, RESAMPLES - start), count))
        estimates.append(differences[drawn].sum(axis=1) / weights[drawn].sum(axis=1))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.concatenate(estimates), (tail, 1 - tail))
    return float(low), float(high)


def mcnemar(base: np.ndarray, model: np.ndarray) -> float | None:
    """
    Exact two-sided p-value of McNemar's test: documents on which two models disagree favour neither.

    None unless all values are 0 or 1.
    """
    if not np.isin(np.concatenate([base, model]), (0.0, 1.0)).all():
        return None
    won, lost = int((model > base).sum()), int((model < base).sum())
    return float(binomtest(won, won + lost).pvalue) if won + lost else 1.0
