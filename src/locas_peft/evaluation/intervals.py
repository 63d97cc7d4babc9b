"""Means with a bootstrap interval: no figure is reported without one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

_MANY = 5_000


@dataclass(frozen=True)
class Mean:
    """A mean of `n` values and its 95% bootstrap interval, which is nan where there are fewer than two."""

    mean: float
    low: float
    high: float
    n: int

    def to_json(self) -> dict[str, float | int]:
        return asdict(self)


def mean_interval(values: Sequence[float], seed: int = 0, confidence: float = 0.95) -> Mean:
    """Gives a mean with its percentile bootstrap interval (scipy).

    Args:
        values: one number a unit (a question, a span, a pair); the units are resampled.
        seed: of the resampling: the same values and seed give the same interval.
        confidence: the interval's level.

    Returns:
        The mean; nan where there are no values.
    """
    from scipy.stats import bootstrap

    array = np.asarray(values, dtype=np.float64)
    if not len(array):
        return Mean(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(array) / len(array)
    if len(array) < 2:
        return Mean(mean, math.nan, math.nan, 1)
    if (array == array[0]).all():  # scipy warns of degenerate data
        return Mean(mean, mean, mean, len(array))
    many = len(array) > _MANY
    found = bootstrap(
        (array,),
        np.mean,
        n_resamples=999 if many else 9_999,
        batch=50 if many else 1_000,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Mean(mean, float(found.low), float(found.high), len(array))


def rise_interval(
    before_nats: Sequence[float],
    after_nats: Sequence[float],
    tokens: Sequence[int],
    seed: int = 0,
    confidence: float = 0.95,
) -> Mean:
    """Gives the rise of a text's perplexity with its paired percentile bootstrap interval (scipy).

    Chunks are what is resampled, each with its nll before and after: what makes a chunk hard on both counts cancels.

    Args:
        before_nats: each chunk's summed nll before.
        after_nats: and after.
        tokens: how many tokens each was summed over.
        seed: of the resampling.
        confidence: the interval's level.

    Returns:
        The rise as `mean`, with the number of chunks as `n`; nan where there are no chunks.
    """
    from scipy.stats import bootstrap

    before, after, counts = (np.asarray(values, dtype=np.float64) for values in (before_nats, after_nats, tokens))
    if not len(counts):
        return Mean(math.nan, math.nan, math.nan, 0)

    def rise(before: np.ndarray, after: np.ndarray, counts: np.ndarray, axis: int = -1) -> np.ndarray:
        total = counts.sum(axis)
        return np.exp(after.sum(axis) / total) - np.exp(before.sum(axis) / total)

    found = float(rise(before, after, counts))
    if len(counts) < 2:
        return Mean(found, math.nan, math.nan, 1)
    if (before == after).all():  # scipy warns of degenerate data
        return Mean(found, found, found, len(counts))
    interval = bootstrap(
        (before, after, counts),
        rise,
        paired=True,
        vectorized=True,
        n_resamples=9_999,
        batch=500,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Mean(found, float(interval.low), float(interval.high), len(counts))
