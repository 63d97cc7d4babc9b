"""SQuAD: one passage at a time, and many passages in one memory."""

from functools import partial

from locas_peft.evaluation import Unit

from .asked import FOUND, asked_units, tabulate_rows
from .bench import KnowledgeBench
from .documents import Document, join_documents, load_squad
from .retrieval import list_sentences
from .rows import (
    BM25,
    EMBEDDING,
    IN_CONTEXT,
    LORA_ROW,
    MEMORY_AND_BM25,
    NONE,
    PREFIXES,
    READING_ROW,
    STUDY_AFTER_ROW,
    STUDY_ROW,
    choose_rows,
    fill_rows,
)

__all__ = ["ROWS", "fill", "tabulate"]

ROWS = (
    NONE,
    IN_CONTEXT,
    READING_ROW,
    STUDY_ROW,
    STUDY_AFTER_ROW,
    LORA_ROW,
    *PREFIXES,
    BM25,
    EMBEDDING,
    MEMORY_AND_BM25,
)
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


def _list_sentences(documents: list[Document]) -> list[str]:
    return list_sentences(document.text for document in documents)


def fill(bench: KnowledgeBench) -> None:
    for documents in (_load_singles(bench), _load_joined(bench)):
        pool = _list_sentences(documents)
        fill_rows(bench, documents, partial(_list_units, bench, pool))


def _list_units(bench: KnowledgeBench, pool: list[str], document: Document) -> list[Unit]:
    units = []
    for row in choose_rows(bench, ROWS):
        units += asked_units(bench, TABLE, document, row, 1, pool)
    return units


def tabulate(bench: KnowledgeBench) -> str:
    parts = []
    singles = _load_singles(bench)
    single = tabulate_rows(bench, TABLE, singles, ROWS, _list_sentences(singles))
    if single:
        parts.append(
            f"One passage a memory, {len(singles)} passages: in %, with 95% intervals over "
            f"questions; changes are from no context. BM25 and embedding have {FOUND} sentences of "
            "all these passages. LoRA's time is without that of writing its lessons.\n\n" + single
        )
    joined = _load_joined(bench)
    pool = _list_sentences(joined)
    together = tabulate_rows(bench, TABLE, joined, ROWS, pool, by_title=True)
    if together:
        parts.append(
            f"{bench.scale.joined} passages in one memory: intervals over titles. The text in "
            "context is the question's own passage.\n\n" + together
        )
    return "\n\n".join(parts)
