"""SQuAD: one passage at a time, and many passages in one memory."""

from functools import partial

from locas_peft.evaluation import Unit

from .asked import FOUND, article_units, asked_units, tabulate_rows
from .bench import KnowledgeBench
from .documents import Document, join_documents, load_squad
from .retrieval import list_sentences
from .rows import (
    ARTICLE_ROW,
    BM25,
    BM25_PRINTED,
    EMBEDDING,
    IN_CONTEXT,
    LORA_FREE_ROW,
    LORA_ROW,
    MEMORY_AND_BM25,
    NONE,
    PREFIXES,
    READING_ROW,
    STUDY_AFTER_ROW,
    STUDY_ROW,
    Row,
    choose_rows,
    fill_rows,
)

__all__ = ["ROWS", "fill", "tabulate"]

ROWS = (
    NONE,
    IN_CONTEXT,
    READING_ROW,
    STUDY_ROW,
    ARTICLE_ROW,
    STUDY_AFTER_ROW,
    LORA_ROW,
    LORA_FREE_ROW,
    *PREFIXES,
    BM25,
    BM25_PRINTED,
    EMBEDDING,
    MEMORY_AND_BM25,
)
ARTICLE_ROWS = (ARTICLE_ROW, STUDY_AFTER_ROW)
TABLE = "squad"


def _load_singles(bench: KnowledgeBench) -> list[Document]:
    return load_squad(bench, bench.scale.passages, bench.scale.questions)


def _load_joined(bench: KnowledgeBench) -> list[Document]:
    """Return the one document that joins passages; none where the scale has none."""
    count = bench.scale.joined
    if not count:
        return []
    passages = load_squad(bench, count, bench.scale.joined_questions)
    return [join_documents(passages, f"squad-{len(passages)}-joined")]


def _list_rows(documents: list[Document]) -> list[Row]:
    """Return the rows; those of the article only where all documents have one."""
    if all(document.article for document in documents):
        return list(ROWS)
    return [row for row in ROWS if row not in ARTICLE_ROWS]


def _list_sentences(documents: list[Document]) -> list[str]:
    return list_sentences(document.text for document in documents)


def fill(bench: KnowledgeBench) -> None:
    for documents in (_load_singles(bench), _load_joined(bench)):
        pool = _list_sentences(documents)
        fill_rows(bench, documents, partial(_list_units, bench, pool))


def _list_units(bench: KnowledgeBench, pool: list[str], document: Document) -> list[Unit]:
    units = []
    for row in choose_rows(bench, _list_rows([document])):
        units += asked_units(bench, TABLE, document, row, 1, pool)
        units += article_units(bench, document, row)
    return units


def tabulate(bench: KnowledgeBench) -> str:
    parts = []
    singles = _load_singles(bench)
    single = tabulate_rows(bench, TABLE, singles, _list_rows(singles), _list_sentences(singles))
    if single:
        parts.append(
            "One passage a memory: in %, with 95% intervals over the n questions of the passages "
            f"measured so far, of {len(singles)} drawn; changes are from no context. BM25 and "
            f"embedding have {FOUND} sentences of all drawn passages. LoRA's time is without that of "
            f"writing its lessons. The article is the first {bench.scale.article_tokens:,} tokens of "
            "the other passages of the same title; its change is from the base. Intervals of KL and "
            "of perplexities are over memories.\n\n" + single
        )
    joined = _load_joined(bench)
    pool = _list_sentences(joined)
    together = tabulate_rows(bench, TABLE, joined, _list_rows(joined), pool, by_title=True)
    if together:
        parts.append(
            f"{bench.scale.joined} passages in one memory: intervals over titles. The text in "
            "context is the question's own passage.\n\n" + together
        )
    return "\n\n".join(parts)
