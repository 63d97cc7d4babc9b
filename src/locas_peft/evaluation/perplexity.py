"""The perplexity protocol: each method reads each document with a fresh memory.

Each token is scored, then learned. The paper's PG-19 protocol. Over documents the mean is weighted
by tokens.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..tables import Sheet, format_figure, to_number
from ..ttt.chunks import perplexity
from .intervals import mean_interval
from .runs import Run, describe_text
from .units import Unit

__all__ = ["NAME", "run_perplexity", "tabulate"]

NAME = "perplexity"


def run_perplexity(run: Run, documents: dict[str, Tensor]) -> dict[str, Any]:
    """Read each document with each method.

    Args:
        run: its folder gets `perplexity/METHOD/DOCUMENT.json`, one a reading, and the figures in
            `perplexity.json`.
        documents: LongTensor [T] by name.

    Returns:
        The figures.

    Raises:
        ValueError: the folder has another run, or a method does not fit the base.
    """
    units: dict[str, dict[str, Unit]] = {}
    for method, settings in run.methods.items():
        units[method] = {}
        for name, ids in documents.items():
            path = run.out / NAME / method / f"{name}.json"
            label = f"{method}: {name}"
            units[method][name] = run.learning(ids, settings, path, label, keep_memory=False)
    every_unit = [unit for by_name in units.values() for unit in by_name.values()]
    described = {name: describe_text(ids) for name, ids in documents.items()}
    head = run.make(NAME, every_unit, documents=described)
    readings = {}
    means = {}
    for method, by_name in units.items():
        readings[method] = {name: unit.load() for name, unit in by_name.items()}
        means[method] = _average(list(readings[method].values()))
    figures = {**head, "readings": readings, "means": means}
    run.save(NAME, figures)
    return figures


def _average(readings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of several readings together; NaN where one of them diverged."""
    nats = [to_number(reading["nll_nats"]) for reading in readings]
    counts = [reading["scored_tokens"] for reading in readings]
    tokens = sum(counts)
    per_token = [summed / count for summed, count in zip(nats, counts, strict=True)]
    return {
        "perplexity": perplexity(sum(nats), tokens),
        "scored_tokens": tokens,
        "documents": len(readings),
        "nll_per_token": mean_interval(per_token),
    }


def tabulate(figures: dict[str, Any]) -> list[Sheet]:
    """Return the tables: the perplexity of each document, so far at marks, and between them."""
    documents = list(figures["documents"])
    rows = []
    for method, readings in figures["readings"].items():
        values = [readings[name]["perplexity"] for name in documents]
        values.append(figures["means"][method]["perplexity"])
        rows.append([method, *map(format_figure, values)])
    title = "Perplexity, each token scored before it was learned"
    sheets = [Sheet(title, ["", *documents, "all tokens"], rows)]
    for name in documents:
        for key, title in (("perplexity_at", "so far, at"), ("perplexity_between", "between")):
            sheet = _tabulate_marks(figures["readings"], name, key, title)
            if sheet is not None:
                sheets.append(sheet)
    return sheets


def _tabulate_marks(
    readings: dict[str, dict[str, Any]], document: str, key: str, title: str
) -> Sheet | None:
    """Return the table of a document's perplexities at marks; None where it has no marks."""
    values = {method: by_name[document][key] for method, by_name in readings.items()}
    marks = list(dict.fromkeys(mark for by_mark in values.values() for mark in by_mark))
    if not marks:
        return None
    rows = []
    for method, by_mark in values.items():
        rows.append([method, *(format_figure(by_mark.get(mark)) for mark in marks)])
    return Sheet(f"{document}: perplexity {title}", ["", *marks], rows)
