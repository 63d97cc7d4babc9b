"""Token F1 of answers by LoCoMo's rules for each category."""

import string
from collections import Counter
from collections.abc import Callable
from functools import cache

from ..checks import import_extra

__all__ = [
    "ADVERSARIAL",
    "CATEGORIES",
    "abstains",
    "answer_f1",
    "load_stemmer",
    "token_f1",
    "tokens_of",
]

CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
"""The names of the release's category numbers."""
ADVERSARIAL = 5

_DROPPED = frozenset({"a", "an", "the", "and"})
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def answer_f1(prediction: str, reference: str, category: int) -> float:
    """Compute an answer's F1 with the gold answer by its category's rules: 0 to 1; for 5 -1 to 0.

    Category 1: the reference is a comma-separated list; the mean over its items of the best F1 of
    any item of the prediction. 3: only the reference before its first ";" counts. 5: the reference
    is the trap, its F1 negative.
    """
    if category not in CATEGORIES:
        raise ValueError(f"category must be 1 to 5, got {category!r}: see the release's categories")
    if category == 1:
        items = prediction.split(",")
        expected = reference.split(",")
        best = [max(token_f1(item, gold) for item in items) for gold in expected]
        return sum(best) / len(expected)
    if category == 3:
        reference = reference.split(";")[0]
    f1 = token_f1(prediction, reference)
    return -f1 if category == ADVERSARIAL else f1


def abstains(prediction: str) -> bool:
    """Tell whether an answer declines, by the phrases of the official accuracy of category 5."""
    text = prediction.lower()
    return "no information available" in text or "not mentioned" in text


def token_f1(prediction: str, reference: str) -> float:
    """Compute the F1 of the tokens that two texts share, with repetition; 0 if they share none."""
    predicted = Counter(tokens_of(prediction))
    expected = Counter(tokens_of(reference))
    shared = (predicted & expected).total()
    if not shared:
        return 0.0
    # 2PR / (P + R) with P = shared / predicted and R = shared / expected
    return 2 * shared / (predicted.total() + expected.total())


def tokens_of(text: str) -> list[str]:
    """Split a text into Porter-stemmed tokens: lower case, no punctuation, articles or "and"."""
    stem = load_stemmer()
    words = text.lower().translate(_NO_PUNCTUATION).split()
    return [stem(word) for word in words if word not in _DROPPED]


@cache
def load_stemmer() -> Callable[[str], str]:
    """Load nltk's Porter stemmer, with a cache of its words; a `ValueError` without nltk."""
    return cache(import_extra("nltk.stem.porter").PorterStemmer().stem)
