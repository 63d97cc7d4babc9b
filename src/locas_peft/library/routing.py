"""Which memory of a library a question is about."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..checks import import_extra
from ..memories.folder import SAMPLE
from ..selfstudy.exchanges import EXCHANGES, Exchange, load_exchanges

__all__ = ["LEAST_GAIN", "join_exchanges", "list_passages", "make_sample", "score_by_words"]

# Chosen by benchmarks/library.py.
LEAST_SCORE = 0.18  # the BM25 score a unit of idf below which a question is about no memory
LEAST_GAIN = 1.4  # in nats a token (`measure_gain`) below which the base answers in place of a studied memory
BACKGROUND = 300  # documents that stand for other texts: with one memory alone, no word of it would be rare
SAMPLE_LINES, SAMPLE_CHARACTERS = 200, 200
_WORD = re.compile(r"\b\w\w+\b")


def make_sample(text: str, earlier: str | Path | None = None) -> str:
    """Return evenly spread pieces of a text, a line each, after those in the folder of an `earlier` memory, if any."""
    pieces = [text[first : first + SAMPLE_CHARACTERS] for first in range(0, len(text), SAMPLE_CHARACTERS)]
    step = math.ceil(len(pieces) / SAMPLE_LINES)
    sample = "".join(" ".join(piece.split()) + "\n" for piece in pieces[:: max(step, 1)])
    former = None if earlier is None else Path(earlier) / SAMPLE
    before = former.read_text(encoding="utf-8") if former is not None and former.is_file() else ""
    return before if before.endswith(sample) else before + sample  # it may have been added before a kill


def list_passages(memory: Path) -> list[str]:
    """Return what a memory is found by: what it has studied, else the lines of its sample."""
    with suppress(FileNotFoundError):  # it has no sample, or another process forgets it meanwhile
        if (memory / EXCHANGES).is_file():
            return list(join_exchanges(load_exchanges(memory / EXCHANGES)).values())
        return (memory / SAMPLE).read_text(encoding="utf-8").splitlines()
    return []


def join_exchanges(exchanges: Iterable[Exchange]) -> dict[str, str]:
    """Return each answer of some exchanges with its subject and its questions, by the answer."""
    found: dict[str, str] = {}
    for each in exchanges:
        found[each.answer] = f"{found.get(each.answer, f'{each.subject} {each.answer}')} {each.question}"
    return found


def score_by_words(passages: Sequence[Sequence[str]], questions: Sequence[str]) -> np.ndarray:
    """Score M memories for Q questions by BM25 (Robertson and Zaragoza, 2009) of their best passages; float64 [Q, M].

    A memory answers where its score is at least 1. A score is divided by the sum of the idf of the question's words,
    so that one threshold serves libraries of any size. It is multiplied by the share of the question's names
    (the capitalised words after the first) that the memory has: people who share a first name are told apart. A
    missing package bm25s is a `ValueError`.
    """
    bm25s = import_extra("bm25s", "library", "a library")
    options = {"stopwords": "en_plus", "return_ids": False, "show_progress": False}
    scores = np.zeros((len(questions), len(passages)))
    owners = np.repeat(np.arange(len(passages)), [len(each) for each in passages])
    if not len(owners):
        return scores
    documents = bm25s.tokenize([text for each in passages for text in each], **options)
    having = Counter(word for document in documents for word in set(document))
    mean_length = max(round(sum(map(len, documents)) / len(documents)), 1)
    index, all_documents = bm25s.BM25(), len(documents) + BACKGROUND
    index.index([*documents, *[["\0"] * mean_length] * BACKGROUND], show_progress=False)
    own = [set(_WORD.findall(" ".join(each).lower())) for each in passages]
    for row, question, words in zip(scores, questions, bm25s.tokenize(list(questions), **options), strict=True):
        if not words:
            continue
        idf = sum(math.log(1 + (all_documents - having[word] + 0.5) / (having[word] + 0.5)) for word in words)
        np.maximum.at(row, owners, index.get_scores(words)[: len(owners)] / (LEAST_SCORE * idf))
        if names := [word.lower() for word in _WORD.findall(question)[1:] if word[0].isupper()]:
            row *= [sum(name in each for name in names) / len(names) for each in own]
    return scores
