"""Fictional pages with their questions, each studied with several seeds."""

from collections.abc import Sequence
from functools import partial
from statistics import stdev
from typing import Any

from measuring import make_table

from locas_peft.evaluation import Unit

from .asked import asked_units, load_results, tabulate_rows
from .bench import KnowledgeBench
from .documents import Document, load_pages
from .rows import IN_CONTEXT, LORA_ROW, NONE, STUDY_ROW, choose_rows, fill_rows

__all__ = ["ROWS", "fill", "tabulate"]

ROWS = (NONE, IN_CONTEXT, STUDY_ROW, LORA_ROW)
TABLE = "pages"


def fill(bench: KnowledgeBench) -> None:
    fill_rows(bench, load_pages(bench), partial(_list_units, bench))


def _list_units(bench: KnowledgeBench, document: Document) -> list[Unit]:
    units = []
    for row in choose_rows(bench, ROWS):
        units += asked_units(bench, TABLE, document, row, bench.scale.seeds, ())
    return units


def tabulate(bench: KnowledgeBench) -> str:
    """Return how many answers are right of each page, and the rows over all pages."""
    pages = load_pages(bench)
    seeds = bench.scale.seeds
    table = tabulate_rows(bench, TABLE, pages, ROWS, (), seeds)
    if not table:
        return ""
    lines = []
    for page in pages:
        cells = [f"{page.name}, of {len(page.questions)}"]
        for row in choose_rows(bench, ROWS):
            units = asked_units(bench, TABLE, page, row, seeds, ())
            cells.append(_format_right(load_results(bench, units)))
        lines.append(cells)
    head = ["right", *(row.name for row in choose_rows(bench, ROWS))]
    note = (
        "Answers that have the gold answer within; of several seeds their mean, standard deviation "
        "and number. Below: all pages, in %, with 95% intervals over questions."
    )
    return f"{note}\n\n{make_table(head, lines)}\n\n{table}"


def _format_right(results: Sequence[dict[str, Any]]) -> str:
    counts = [result["figures"]["right"] for result in results]
    if not counts:
        return "-"
    mean = sum(counts) / len(counts)
    if len(counts) < 2:
        return f"{mean:g}"
    return f"{mean:.1f}, sd {stdev(counts):.1f}, n={len(counts)}"
