"""Which memory of a library a question is about, by its words, in any language.

BM25 (Robertson and Zaragoza, 2009) over each memory's name, what it has studied, and pieces of its
text. Below `LEAST_SCORE` a question is about no memory.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import numpy as np

from ..checks import import_extra
from ..exchanges import EXCHANGES, Exchange, load_exchanges
from ..files import finish_replacement
from ..memories.folder import SAMPLE
from .terms import StopWords, Term, list_clauses, list_terms

__all__ = [
    "LEAST_SCORE",
    "join_exchanges",
    "list_passages",
    "make_sample",
    "route",
    "score_by_words",
]

LEAST_SCORE = 1.0
"""The least score of `score_by_words` with which a memory answers."""
UNIT_SCORE = 0.18
"""BM25 a unit of idf that counts as a score of 1."""
BACKGROUND_DOCUMENTS = 300
"""Documents that stand for other texts: with one memory alone, no word of it would be rare."""
LENGTH = 0.5
"""How much BM25 takes long passages back. A passage without spaces has more terms than others."""
OTHERS_HAVE_IT = 1.4
"""How much more a term of the question counts for a memory that lacks it, where others have it."""
SAMPLE_LINES = 200
SAMPLE_CHARACTERS = 200
# A piece ends before white space, but where there is none.
_PIECE = re.compile(rf".{{1,{SAMPLE_CHARACTERS}}}(?!\S)|.{{1,{SAMPLE_CHARACTERS}}}", re.DOTALL)


def route(memories: Mapping[str, Sequence[str]], questions: Sequence[str]) -> list[str | None]:
    """Return for each question the name of the memory that it is about.

    It is None where no score is `LEAST_SCORE` or more.

    Args:
        memories: the passages of each memory, by its name; of two that fit as well, the first one
            is taken.
    """
    names = list(memories)
    scores = score_by_words(list(memories.values()), questions)
    routed: list[str | None] = []
    for question_scores in scores:
        found = None
        if names:
            # argmax takes the first of equal scores.
            best = int(question_scores.argmax())
            if question_scores[best] >= LEAST_SCORE:
                found = names[best]
        routed.append(found)
    return routed


def score_by_words(memories: Sequence[Sequence[str]], questions: Sequence[str]) -> np.ndarray:
    """Score M memories for Q questions by BM25 of their best passage; return float64 [Q, M].

    A score is divided by the sum of the idf of the question's terms (see `terms.py`), so that one
    threshold serves any number of passages. A word that other memories have, and this one lacks,
    counts more there: the question is about another thing of the kind. Of a question with clauses,
    such as a greeting, the best one counts.

    Raises:
        ValueError: the package bm25s is missing.
    """
    import_extra("bm25s", "library", "what is found by words")
    scores = np.zeros((len(questions), len(memories)))
    passages = [passage for memory in memories for passage in memory]
    if not passages:
        return scores
    index = _Index(memories)
    for question_scores, question in zip(scores, questions, strict=True):
        whole, *clauses = list_clauses(question)
        for text in (whole, *clauses):
            terms = list_terms(text, index.stop_words)
            # A single term of a clause tells too little.
            is_enough = text is whole or len(set(terms)) > 1
            if terms and is_enough:
                np.maximum(question_scores, index.score(terms), out=question_scores)
    return scores


class _Index:
    """The terms of the memories' passages."""

    def __init__(self, memories: Sequence[Sequence[str]]):
        self.stop_words = StopWords(vars(import_module("bm25s.stopwords")))
        self._count = len(memories)
        self._owners = np.repeat(np.arange(self._count), [len(memory) for memory in memories])
        # The passages that have a term, and the memories that have a word.
        self._frequencies = Counter[str]()
        self._having: dict[str, set[int]] = {}
        documents = []
        for owner, memory in enumerate(memories):
            for passage in memory:
                terms = list_terms(passage, self.stop_words)
                document = [term.text for term in terms]
                # No text has the zero character.
                documents.append(document or ["\0"])
                self._frequencies.update(set(document))
                for term in terms:
                    self._having.setdefault(term.text, set()).add(owner)
                    self._having.setdefault(_name(term.word), set()).add(owner)
        mean_length = max(round(sum(map(len, documents)) / len(documents)), 1)
        background = [["\0"] * mean_length] * BACKGROUND_DOCUMENTS
        self._bm25 = import_module("bm25s").BM25(b=LENGTH)
        self._bm25.index([*documents, *background], show_progress=False)
        self._passages = len(documents)

    def score(self, terms: Sequence[Term]) -> np.ndarray:
        """Return the score of each memory for the terms of a question, float64 [M]."""
        passage_scores = np.zeros(self._passages)
        most = np.zeros(self._count)
        for weight in {term.weight for term in terms}:
            weighted = [term for term in terms if term.weight == weight]
            texts = [term.text for term in weighted]
            passage_scores += weight * self._bm25.get_scores(texts)[: self._passages]
            for term in weighted:
                most += weight * self._weigh(term)
        scores = np.zeros(self._count)
        np.maximum.at(scores, self._owners, passage_scores)
        return scores / (UNIT_SCORE * most)

    def _weigh(self, term: Term) -> np.ndarray:
        """Return the idf of a term for each memory, more where only others have it; float64 [M]."""
        having = self._frequencies[term.text]
        count = self._passages + BACKGROUND_DOCUMENTS
        idf = math.log(1 + (count - having + 0.5) / (having + 0.5))
        weights = np.full(self._count, idf)
        # Where no memory has the word, those that have its beginning have another form of it.
        owners = self._having.get(_name(term.word)) or self._having.get(term.text)
        if owners:
            weights *= OTHERS_HAVE_IT
            weights[list(owners)] = idf
        return weights


def _name(word: str) -> str:
    """Return the key of a whole word; no term has a "="."""
    return f"={word}"


def make_sample(text: str, earlier: str | Path | None = None) -> str:
    """Return evenly spread pieces of a text, a line each, after those of an `earlier` memory."""
    pieces = [" ".join(piece.split()) for piece in _PIECE.findall(text)]
    step = max(math.ceil(len(pieces) / SAMPLE_LINES), 1)
    sample = "".join(f"{piece}\n" for piece in pieces[::step])
    if earlier is None or not (Path(earlier) / SAMPLE).is_file():
        return sample
    before = _load_sample(Path(earlier))
    # The sample may have been added before a kill.
    return before if before.endswith(sample) else before + sample


def list_passages(memory: Path) -> list[str]:
    """Return what a memory is found by: its name, its studied passages, its sample's lines.

    A `ValueError` where its exchanges are damaged.
    """
    passages = [memory.name.replace("_", " ")]
    for read in (_read_exchanges, _read_sample):
        try:
            passages += read(memory)
        except FileNotFoundError:
            # The memory has no such file, or another process replaces or forgets it.
            finish_replacement(memory)
            with suppress(FileNotFoundError):
                passages += read(memory)
    return passages


def join_exchanges(exchanges: Iterable[Exchange]) -> dict[str, str]:
    """Return a text for each answer: its subject, the answer itself and its questions."""
    texts: dict[str, str] = {}
    for exchange in exchanges:
        text = texts.get(exchange.answer, f"{exchange.subject} {exchange.answer}")
        texts[exchange.answer] = f"{text} {exchange.question}"
    return texts


def _read_exchanges(memory: Path) -> Iterator[str]:
    """Yield each studied answer of a memory with its subject and its questions."""
    yield from join_exchanges(load_exchanges(memory / EXCHANGES)).values()


def _read_sample(memory: Path) -> list[str]:
    return _load_sample(memory).splitlines()


def _load_sample(memory: Path) -> str:
    """Return a memory's sample; what is not UTF-8 in it finds nothing."""
    return (memory / SAMPLE).read_text(encoding="utf-8", errors="replace")
