"""Token F1 of answers as LoCoMo scores them, by category. Pure functions of two texts."""

from __future__ import annotations

import string
from collections import Counter
from functools import cache

from .locomo import ADVERSARIAL, CATEGORIES

_DROPPED = frozenset({"a", "an", "the", "and"})
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ABSTENTIONS = ("no information available", "not mentioned")


def tokens_of(text: str) -> list[str]:
    """Gives a text's tokens: no commas or other punctuation, lower case, no articles, no "and", Porter-stemmed."""
    words = text.lower().translate(_NO_PUNCTUATION).split()
    return [_stem(word) for word in words if word not in _DROPPED]


@cache
def _stemmer():
    from nltk.stem import PorterStemmer

    return PorterStemmer()


@cache
def _stem(word: str) -> str:
    return _stemmer().stem(word)


def token_f1(prediction: str, reference: str) -> float:
    """Gives the harmonic mean of precision and recall over the tokens that two texts share, counted with repetition.

    0 where they share none, so also where either is empty.
    """
    predicted, expected = Counter(tokens_of(prediction)), Counter(tokens_of(reference))
    shared = (predicted & expected).total()
    # 2PR / (P + R) with P = shared / predicted and R = shared / expected
    return 2 * shared / (predicted.total() + expected.total()) if shared else 0.0


def answer_f1(prediction: str, reference: str, category: int) -> float:
    """Gives an answer's F1 by the rules of its category.

    Args:
        prediction: the model's answer.
        reference: the gold answer; for category 5 the trap.
        category: 1: the reference is a comma-separated list; the mean over its items of the best F1 of any item of
            the prediction. 3: only what stands before the reference's first ";" counts. 5: F1 with the trap, negative.

    Returns:
        0 to 1; for category 5 -1 to 0.

    Raises:
        ValueError: there is no such category.
    """
    if category not in CATEGORIES:
        raise ValueError(f"category must be 1 to 5, got {category!r}: see the release's categories")
    if category == 1:
        items = prediction.split(",")
        expected = reference.split(",")
        return sum(max(token_f1(item, one) for item in items) for one in expected) / len(expected)
    if category == 3:
        return token_f1(prediction, reference.split(";")[0])
    f1 = token_f1(prediction, reference)
    return -f1 if category == ADVERSARIAL else f1


def abstains(prediction: str) -> bool:
    """Says whether an answer declines, in the words that the official accuracy of category 5 looks for."""
    return any(phrase in prediction.lower() for phrase in _ABSTENTIONS)
