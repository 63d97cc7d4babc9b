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
