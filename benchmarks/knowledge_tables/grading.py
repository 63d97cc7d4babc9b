"""Grades of answers by SQuAD's rules, and intervals of means, changes and shares."""

import re
import string
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from locas_peft.asking import is_right
from locas_peft.evaluation.intervals import Interval

__all__ = ["METRICS", "grade", "measure_f1", "normalize", "ratio_interval", "sum_groups"]

METRICS = ("within", "exact", "f1")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MANY = 1_000
"""Of more values fewer resamples are drawn: they would fill the memory."""


def grade(sentences: Sequence[str], shorts: Sequence[str], golds: Sequence[str]) -> dict[str, list]:
    """Grade the two answers to each question.

    Returns:
        `within`: whether the gold answer occurs in the sentence; `exact` and `f1`: of the short
        answer.
    """
    grades: dict[str, list] = {name: [] for name in METRICS}
    for sentence, short, gold in zip(sentences, shorts, golds, strict=True):
        grades["within"].append(int(is_right(sentence, gold)))
        grades["exact"].append(int(normalize(short) == normalize(gold)))
        grades["f1"].append(measure_f1(short, gold))
    return grades


def normalize(text: str) -> str:
    """Return a text as SQuAD compares it: lower case, without punctuation, articles, more blanks."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def measure_f1(text: str, gold: str) -> float:
    """Return the F1 of the words of an answer and of the gold answer, with repetition."""
    predicted = Counter(normalize(text).split())
    expected = Counter(normalize(gold).split())
    if not predicted or not expected:
        # SQuAD's rule where one of them has no words.
        return float(predicted == expected)
    shared = (predicted & expected).total()
    return 2 * shared / (predicted.total() + expected.total())


def sum_groups(values: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """Return the sum of the values of each group, in the order in which the groups occur."""
    sums: dict[Hashable, float] = {}
    for value, group in zip(values, groups, strict=True):
        sums[group] = sums.get(group, 0.0) + value
    return list(sums.values())


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Return sum(numerators) / sum(denominators) with a 95% bootstrap interval over the pairs.

    A share of a gap has the gains as numerators and the gaps as denominators; a mean has ones, or
    the sizes of groups. The result is nan where the denominators sum to 0 or less, for want of a gap.
    """
    pairs = np.array([numerators, denominators], dtype=np.float64)
    count = pairs.shape[1]
    interval: Interval = {"mean": np.nan, "low": np.nan, "high": np.nan, "n": count}
    above, below = pairs.sum(axis=1)
    if below <= 0:
        return interval
    interval["mean"] = float(above / below)
    if count < 2:
        return interval
    resamples = 999 if count > _MANY else 9_999
    drawn = np.random.default_rng(0).integers(0, count, size=(resamples, count))
    # [2, resamples]
    sums = pairs[:, drawn].sum(axis=-1)
    is_gap = sums[1] > 0
    ratios = sums[0, is_gap] / sums[1, is_gap]
    low, high = np.quantile(ratios, (0.025, 0.975)).tolist()
    return {**interval, "low": low, "high": high}
