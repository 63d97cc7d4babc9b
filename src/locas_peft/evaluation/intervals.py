"""Means and perplexity rises with percentile bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

__all__ = ["Mean", "mean_interval", "rise_interval"]

_TAIL = (1 - 0.95) / 2
_MANY = 5_000
"""From more values than this, fewer resamples are drawn: the interval is narrow, and each resample costs more."""


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
    """Compute a mean (nan without values) with its 95% interval; the values are resampled, drawn from the seed."""
    array = np.asarray(values, dtype=np.float64)
    n = len(array)
    if not n:
        return Mean(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(array) / n
    if n > 1 and (array == array[0]).all():
        return Mean(mean, mean, mean, n)
    resamples, batch = (999, 50) if n > _MANY else (9_999, 1_000)
    return Mean(mean, *_bootstrap(lambda rows: array[rows].mean(axis=-1), n, resamples, batch, seed), n)


def rise_interval(
    before_nats: Sequence[float], after_nats: Sequence[float], tokens: Sequence[int], seed: int = 0
) -> Mean:
    """Compute the rise of a text's perplexity with its paired 95% interval; nan if there are no chunks.

    The chunks are resampled, each with its summed nll before and after and the number of `tokens` of each sum, so that
    the difficulty of a chunk cancels.
    """
    before, after, counts = (np.asarray(values, dtype=np.float64) for values in (before_nats, after_nats, tokens))
    n = len(counts)
    if not n:
        return Mean(math.nan, math.nan, math.nan, 0)

    def rise(rows: np.ndarray) -> np.ndarray:
        total = counts[rows].sum(axis=-1)
        return np.exp(after[rows].sum(axis=-1) / total) - np.exp(before[rows].sum(axis=-1) / total)

    mean = float(rise(np.arange(n)))
    if n > 1 and (before == after).all():
        return Mean(mean, mean, mean, n)
    return Mean(mean, *_bootstrap(rise, n, 9_999, 500, seed), n)


def _bootstrap(
    statistic: Callable[[np.ndarray], np.ndarray], n: int, resamples: int, batch: int, seed: int
) -> tuple[float, float]:
    """Compute the ends of a statistic's 95% interval; nan for fewer than two units.

    `statistic` computes one number a row from the indices of the drawn units [rows, n]. `batch` rows at once limit the
    memory used.
    """
    if n < 2:
        return math.nan, math.nan
    random = np.random.default_rng(seed)
    sizes = [min(batch, resamples - start) for start in range(0, resamples, batch)]
    values = np.sort(np.concatenate([statistic(random.integers(0, n, size=(size, n))) for size in sizes]))
    return _quantile(values, _TAIL), _quantile(values, 1 - _TAIL)


def _quantile(ascending: np.ndarray, share: float) -> float:
    """Interpolate a quantile linearly (type 7 of Hyndman and Fan), to the last bit as scipy 1.17 does."""
    below, part = divmod(share * len(ascending) + (1 - share), 1)
    return float((1 - part) * ascending[int(below) - 1] + part * ascending[int(below)])
