"""Means and perplexity rises with 95% intervals, as JSON.

The intervals are percentile bootstrap intervals. That of a mean of two to nine values is Student's
t interval, since a bootstrap of so few values is too narrow. Of fewer than two values the ends of
the interval are nan.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["Interval", "mean_interval", "rise_interval"]

Interval = dict[str, float | int]
_TAIL = (1 - 0.95) / 2
# The 97.5% quantiles of Student's t for 1 to 8 degrees of freedom.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)
# Of more values fewer resamples are drawn: the interval is narrow, and each resample costs more.
_MANY = 5_000


def mean_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Compute a mean, nan without values, with its interval; the resamples follow from the seed."""
    array = np.asarray(values, dtype=np.float64)
    mean = math.nan
    if len(array):
        mean = math.fsum(array) / len(array)
    all_same = (array == array[:1]).all()
    if 1 < len(array) <= len(_STUDENT) + 1 and not all_same:
        margin = _STUDENT[len(array) - 2] * array.std(ddof=1).item() / math.sqrt(len(array))
        return {"mean": mean, "low": mean - margin, "high": mean + margin, "n": len(array)}

    def average(drawn: np.ndarray) -> np.ndarray:
        return array[drawn].mean(axis=-1)

    return _interval(mean, all_same, len(array), average, seed)


def rise_interval(
    before_nats: Sequence[float], after_nats: Sequence[float], tokens: Sequence[int]
) -> Interval:
    """Compute the rise of a text's perplexity with its paired interval; nan if there are no chunks.

    The chunks are resampled, each with its summed nll before and after and its `tokens`: its
    difficulty cancels.
    """
    before = np.asarray(before_nats, dtype=np.float64)
    after = np.asarray(after_nats, dtype=np.float64)
    counts = np.asarray(tokens, dtype=np.float64)

    def rise(drawn: np.ndarray) -> np.ndarray:
        total = counts[drawn].sum(axis=-1)
        perplexity_before = np.exp(before[drawn].sum(axis=-1) / total)
        perplexity_after = np.exp(after[drawn].sum(axis=-1) / total)
        return perplexity_after - perplexity_before

    mean = math.nan
    if len(counts):
        mean = float(rise(np.arange(len(counts))))
    return _interval(mean, (before == after).all(), len(counts), rise, seed=0)


def _interval(
    mean: float, same: bool, n: int, statistic: Callable[[np.ndarray], np.ndarray], seed: int
) -> Interval:
    """Add the 95% interval's ends to a statistic: its own value where all `n` units are the same.

    `statistic` computes one number a resample, from the indices of the drawn units [k, n].
    """
    low = high = mean if same and n > 1 else math.nan
    if n > 1 and not same:
        random = np.random.default_rng(seed)
        resamples = 999 if n > _MANY else 9_999
        # How many are drawn at once limits the memory that is used.
        most = 50 if n > _MANY else 500
        values = []
        for start in range(0, resamples, most):
            drawn = random.integers(0, n, size=(min(most, resamples - start), n))
            values.append(statistic(drawn))
        low, high = np.quantile(np.concatenate(values), (_TAIL, 1 - _TAIL)).tolist()
    return {"mean": mean, "low": low, "high": high, "n": n}
