"""Terms: what questions and passages are compared by, in any language and script."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import regex

from ..text import list_runs

__all__ = ["StopWords", "Term", "list_clauses", "list_terms"]

# The first letters of a word are compared: endings differ between a question and its answer. Five
# serve European languages best (McNamee and Mayfield, 2004). A letter of Hangul is a syllable.
_PREFIX = {"other": 5, "hangul": 2}
# Of a character, or a pair of them, in a script without spaces: a word has several.
_WEIGHT = 0.5
# Most Hiragana is endings and particles.
_WEIGHT_OF_HIRAGANA = 0.1
_DIGIT = regex.compile(r"\d")
_ENGLISH = "STOPWORDS_EN_PLUS"
_CHINESE = "STOPWORDS_CHINESE"
_CLAUSE_END = regex.compile(r"[,;:.!?…،؛؟۔।。，、；：！？\n]+|\s[-–—]+\s")


class Term(NamedTuple):
    """A term of a text.

    Attributes:
        text: what is compared.
        word: the whole word that it is the beginning of, or itself.
        weight: how much it counts in a question.
    """

    text: str
    word: str
    weight: float


class StopWords:
    """Words that most texts of a language have.

    Args:
        lists: the words of each language, as in the module `bm25s.stopwords`.
    """

    def __init__(self, lists: Mapping[str, Collection[str]]):
        self._lists: dict[str, frozenset[str]] = {}
        for name, words in lists.items():
            if name.startswith("STOPWORDS_") and name != _CHINESE:
                self._lists[name] = frozenset(words)
        self._names: dict[str, list[str]] = {}
        for name, words in self._lists.items():
            for word in words:
                self._names.setdefault(word, []).append(name)
        longest_first = sorted(lists.get(_CHINESE, ()), key=len, reverse=True)
        self._chinese = regex.compile("|".join(map(regex.escape, longest_first)) or "(?!)")

    def choose(self, words: Collection[str]) -> frozenset[str]:
        """Return the stop words of the language that most of the words are of.

        Of languages with as many, English is taken, or else all of them.
        """
        counts = Counter(name for word in words for name in self._names.get(word, ()))
        if not counts:
            return frozenset()
        most = max(counts.values())
        if counts[_ENGLISH] == most:
            return self._lists[_ENGLISH]
        chosen = [self._lists[name] for name, count in counts.items() if count == most]
        return frozenset().union(*chosen)

    def cut(self, run: str) -> list[str]:
        """Return the parts of a run of Chinese between its stop words."""
        return [part for part in self._chinese.split(run) if part]


def list_terms(text: str, stop_words: StopWords) -> list[Term]:
    """Return the terms of a text.

    They are the beginnings of words without stop words and single letters. In a script without
    spaces they are the characters and the pairs of characters.
    """
    runs = list(list_runs(text))
    chosen = stop_words.choose([run for run, script in runs if script in _PREFIX])
    # Chinese stop words are parts of Japanese words.
    is_japanese = any(script == "hiragana" for _, script in runs)
    terms: list[Term] = []
    for run, script in runs:
        if script in _PREFIX:
            if run not in chosen and not _is_letter(run, script):
                terms.append(_make_term(run, script))
            continue
        weight = _WEIGHT_OF_HIRAGANA if script == "hiragana" else _WEIGHT
        parts = [run]
        if script == "han" and not is_japanese:
            parts = stop_words.cut(run)
        for part in parts:
            terms += [Term(gram, gram, weight) for gram in _list_grams(part, script == "han")]
    return terms


def _is_letter(word: str, script: str) -> bool:
    return len(word) < 2 and script == "other" and not word.isdigit()


def _make_term(word: str, script: str) -> Term:
    # A number is another one with another end.
    has_digit = _DIGIT.search(word) is not None
    beginning = word if has_digit else word[: _PREFIX[script]]
    return Term(beginning, word, 1.0)


def _list_grams(run: str, are_words: bool) -> Iterator[str]:
    """Yield the pairs of characters of a run, and the characters where many of them are words."""
    if are_words or len(run) == 1:
        yield from run
    for first in range(len(run) - 1):
        yield run[first : first + 2]


def list_clauses(text: str) -> list[str]:
    """Return a text and its clauses, such as what follows a greeting; the text alone for one."""
    clauses = [clause for clause in _CLAUSE_END.split(text) if clause.strip()]
    return [text, *clauses] if len(clauses) > 1 else [text]
