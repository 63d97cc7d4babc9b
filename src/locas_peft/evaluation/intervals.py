"""Means and perplexity rises with percentile bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

__all__ = ["Mean", "mean_interval", "rise_interval"]

_TAIL = (1 - 0.95) / 2
_MANY = 5_000
"""From this many values on, fewer resamples are drawn: the interval is narrow, and each resample costs more."""


@dataclass(frozen=True)
class Mean:
    """A mean of `n` values and its 95% bootstrap interval, which is nan for fewer than two values."""

    mean: float
    low: float
    high: float
    n: int

    def to_json(self) -> dict[str, float | int]:
        return asdict(self)


def mean_interval(values: Sequence[float], seed: int = 0) -> Mean:
    """Compute a mean with its 95% percentile bootstrap interval.

    Args:
        values: one number a unit (a question, a span, a pair); the units are resampled.
        seed: of the resampling: the same values and seed give the same interval.

    Returns:
        The mean; nan if there are no values.
    """
    array = np.asarray(values, dtype=np.float64)
    if not len(array):
        return Mean(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(array) / len(array)
    if (array == array[0]).all() and len(array) > 1:
        return Mean(mean, mean, mean, len(array))
    many = len(array) > _MANY
    low, high = _bootstrap(
        lambda rows: array[rows].mean(axis=-1),
        len(array),
        resamples=999 if many else 9_999,
        batch=50 if many else 1_000,
        seed=seed,
    )
    return Mean(mean, low, high, len(array))


def rise_interval(
    before_nats: Sequence[float], after_nats: Sequence[float], tokens: Sequence[int], seed: int = 0
) -> Mean:
    """Compute the rise of a text's perplexity with its paired 95% percentile bootstrap interval.

    The chunks are resampled, each with its nll before and after, so that the difficulty of a chunk cancels.

    Args:
        before_nats: each chunk's summed nll before.
        after_nats: each chunk's summed nll after.
        tokens: the number of tokens of each sum.
        seed: of the resampling.

    Returns:
        The rise as `mean`, with the number of chunks as `n`; nan if there are no chunks.
    """
    before, after, counts = (np.asarray(values, dtype=np.float64) for values in (before_nats, after_nats, tokens))
    if not len(counts):
        return Mean(math.nan, math.nan, math.nan, 0)

    def rise(rows: np.ndarray) -> np.ndarray:
        total = counts[rows].sum(axis=-1)
        return np.exp(after[rows].sum(axis=-1) / total) - np.exp(before[rows].sum(axis=-1) / total)

    mean = float(rise(np.arange(len(counts))))
    if (before == after).all() and len(counts) > 1:
        return Mean(mean, mean, mean, len(counts))
    return Mean(mean, *_bootstrap(rise, len(counts), resamples=9_999, batch=500, seed=seed), len(counts))


def _bootstrap(
    statistic: Callable[[np.ndarray], np.ndarray], count: int, *, resamples: int, batch: int, seed: int
) -> tuple[float, float]:
    """Compute the ends of a statistic's 95% interval; nan for fewer than two units.

    Args:
        statistic: computes one number a row from the indices of the drawn units [rows, count].
        count: the number of units.
        resamples: the number of rows in all.
        batch: the number of rows at once, which limits the memory used.
        seed: of the drawn indices.
    """
    if count < 2:
        return math.nan, math.nan
    random = np.random.default_rng(seed)
    sizes = [min(batch, resamples - start) for start in range(0, resamples, batch)]
    values = np.concatenate([statistic(random.integers(0, count, size=(size, count))) for size in sizes])
    values.sort()
    return _quantile(values, _TAIL), _quantile(values, 1 - _TAIL)


def _quantile(ascending: np.ndarray, share: float) -> float:
    """Interpolate a quantile linearly (type 7 of Hyndman and Fan), to the last bit as scipy 1.17 does."""
    position = share * len(ascending) + (1 - share)  # of the first value: 1
    below = math.floor(position)
    part = position - below
    return float((1 - part) * ascending[below - 1] + part * ascending[below])
