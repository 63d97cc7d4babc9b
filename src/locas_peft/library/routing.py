"""Which memory of a library a question is about, by its words.

BM25 (Robertson and Zaragoza, 2009) over each memory's name, what it has studied, and pieces of its
text. Below `LEAST_SCORE` a question is about no memory.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..checks import import_extra
from ..memories.folder import SAMPLE
from ..selfstudy.exchanges import EXCHANGES, join_exchanges, load_exchanges

__all__ = ["LEAST_SCORE", "list_passages", "make_sample", "route", "score_by_words"]

LEAST_SCORE = 1.0
"""The least score of `score_by_words` with which a memory answers."""
UNIT_SCORE = 0.18
"""BM25 a unit of idf that counts as a score of 1."""
BACKGROUND_DOCUMENTS = 300
"""Documents that stand for other texts: with one memory alone, no word of it would be rare."""
SAMPLE_LINES = 200
SAMPLE_CHARACTERS = 200


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
        # argmax takes the first of equal scores.
        best = int(question_scores.argmax()) if names else None
        is_found = best is not None and question_scores[best] >= LEAST_SCORE
        routed.append(names[best] if is_found else None)
    return routed


def score_by_words(memories: Sequence[Sequence[str]], questions: Sequence[str]) -> np.ndarray:
    """Score M memories for Q questions by BM25 of their best passage; return float64 [Q, M].

    A score is divided by the sum of the idf of the question's words, so that one threshold serves
    any number of passages.

    Raises:
        ValueError: the package bm25s is missing.
    """
    bm25s = import_extra("bm25s", "library", "what is found by words")
    options = {"stopwords": "en_plus", "return_ids": False, "show_progress": False}
    scores = np.zeros((len(questions), len(memories)))
    passages = [passage for memory in memories for passage in memory]
    owners = np.repeat(np.arange(len(memories)), [len(memory) for memory in memories])
    if not passages:
        return scores
    documents = bm25s.tokenize(passages, **options)
    total_length = sum(map(len, documents))
    mean_length = max(round(total_length / len(documents)), 1)
    background = [["\0"] * mean_length] * BACKGROUND_DOCUMENTS
    index = bm25s.BM25()
    index.index([*documents, *background], show_progress=False)
    idf = _measure_idf(documents)
    tokenized = bm25s.tokenize(list(questions), **options)
    for question_scores, tokens in zip(scores, tokenized, strict=True):
        if not tokens:
            continue
        most = UNIT_SCORE * sum(idf(token) for token in tokens)
        passage_scores = index.get_scores(tokens)[: len(passages)]
        np.maximum.at(question_scores, owners, passage_scores / most)
    return scores


def _measure_idf(documents: Sequence[Sequence[str]]):
    """Return a function from a word to its idf among some documents and the background."""
    frequencies = Counter(word for document in documents for word in set(document))
    count = len(documents) + BACKGROUND_DOCUMENTS

    def idf(word: str) -> float:
        having = frequencies[word]
        return math.log(1 + (count - having + 0.5) / (having + 0.5))

    return idf


def make_sample(text: str, earlier: str | Path | None = None) -> str:
    """Return evenly spread pieces of a text, a line each, after those of an `earlier` memory."""
    starts = range(0, len(text), SAMPLE_CHARACTERS)
    pieces = [text[start : start + SAMPLE_CHARACTERS] for start in starts]
    step = max(math.ceil(len(pieces) / SAMPLE_LINES), 1)
    sample = "".join(" ".join(piece.split()) + "\n" for piece in pieces[::step])
    if earlier is None or not (Path(earlier) / SAMPLE).is_file():
        return sample
    before = (Path(earlier) / SAMPLE).read_text(encoding="utf-8")
    # The sample may have been added before a kill.
    return before if before.endswith(sample) else before + sample


def list_passages(memory: Path) -> list[str]:
    """Return what a memory is found by: its name, its studied passages, its sample's lines."""
    passages = [memory.name.replace("_", " ")]
    for read in (_read_exchanges, _read_sample):
        # A memory need not have the file, and another process may forget the memory meanwhile.
        with suppress(FileNotFoundError):
            passages += read(memory)
    return passages


def _read_exchanges(memory: Path) -> Iterator[str]:
    """Yield each studied answer of a memory with its subject and its questions."""
    if (memory / EXCHANGES).is_file():
        yield from join_exchanges(load_exchanges(memory / EXCHANGES)).values()


def _read_sample(memory: Path) -> list[str]:
    return (memory / SAMPLE).read_text(encoding="utf-8").splitlines()
