"""The perplexity protocol: each method reads each document with a fresh memory, and scores each token, then learns it.

The paper's PG-19 protocol. Over documents the mean is weighted by tokens.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..files import write_json
from ..tables import Sheet, format_figure
from ..ttt.chunks import perplexity
from ..units import Unit, run_units
from .intervals import mean_interval
from .runs import Run, describe_text

__all__ = ["NAME", "run_perplexity", "tabulate"]

NAME = "perplexity"


def run_perplexity(run: Run, documents: dict[str, Tensor]) -> dict[str, Any]:
    """Read each document, LongTensor [T], with each method.

    The run's folder gets `perplexity/METHOD/DOCUMENT.json`, one a reading, and the figures, which are returned, in
    `perplexity.json`. A folder with another run, or a method that does not fit the base, is a `ValueError`.
    """
    units: dict[str, dict[str, Unit]] = {method: {} for method in run.methods}
    for method, settings in run.methods.items():
        for name, ids in documents.items():
            path = run.out / NAME / method / f"{name}.json"
            units[method][name] = run.reading(
                ids, settings, path, f"{method}: {name}", keep_memory=False
            )
    table = [unit for row in units.values() for unit in row.values()]
    head = run.open(
        NAME, table, documents={name: describe_text(ids) for name, ids in documents.items()}
    )
    run_units(table, run.progress)
    readings = {
        method: {name: unit.load() for name, unit in row.items()} for method, row in units.items()
    }
    means = {method: _average(list(row.values())) for method, row in readings.items()}
    figures = {**head, "readings": readings, "means": means}
    write_json(run.out / f"{NAME}.json", figures)
    return figures


def _average(readings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    nats, tokens = ([reading[key] for reading in readings] for key in ("nll_nats", "scored_tokens"))
    per_token = mean_interval([nll / count for nll, count in zip(nats, tokens, strict=True)])
    means = {"perplexity": perplexity(sum(nats), sum(tokens)), "scored_tokens": sum(tokens)}
    return {**means, "documents": len(readings), "nll_per_token": per_token}


def tabulate(figures: dict[str, Any]) -> list[Sheet]:
    """Return the tables: the perplexity of each document, so far at some numbers of tokens, and between them."""
    readings, documents = figures["readings"], list(figures["documents"])
    rows = []
    for method, found in readings.items():
        values = [
            *(found[name]["perplexity"] for name in documents),
            figures["means"][method]["perplexity"],
        ]
        rows.append([method, *map(format_figure, values)])
    sheets = [
        Sheet(
            "Perplexity, each token scored before it was learned",
            ["", *documents, "all tokens"],
            rows,
        )
    ]
    for name in documents:
        for key, title in (("perplexity_at", "so far, at"), ("perplexity_between", "between")):
            values = {method: found[name][key] for method, found in readings.items()}
            marks = list(dict.fromkeys(mark for row in values.values() for mark in row))
            rows = [
                [method, *(format_figure(row.get(mark)) for mark in marks)]
                for method, row in values.items()
            ]
            sheets += [Sheet(f"{name}: perplexity {title}", ["", *marks], rows)] if marks else []
    return sheets
