"""The perplexity protocol: each method reads each document with a fresh memory, and scores each token, then learns it.

The paper's PG-19 protocol. Over documents the mean is weighted by tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..files import write_json
from ..plots import label_axes, pick_colours, settled_points
from ..progress import Progress, silent
from ..reading.record import Reading
from ..reading.settings import ReadingSettings
from ..tables import Sheet, format_figure, to_number
from ..ttt.chunks import perplexity
from ..units import run_units
from .intervals import mean_interval
from .runs import describe_text, open_run, reading_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["NAME", "TITLE", "draw", "run_perplexity", "tabulate"]

NAME, TITLE = "perplexity", "Perplexity"


def run_perplexity(
    base: PreTrainedModel,
    documents: dict[str, torch.Tensor],
    methods: dict[str, ReadingSettings],
    out: Path,
    *,
    common: dict[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Read each document with each method, or continue such a run.

    Args:
        base: a causal LM without adapters; mutated while it runs, and restored.
        documents: LongTensor [T] each, by name.
        methods: each method's settings, by its name in tables.
        out: the folder: `perplexity/METHOD/DOCUMENT.json`, one a reading, and `perplexity.json`.
        common: more fields for the record of the run, as JSON values.
        overwrite: see `runs.open_run`.
        progress: shows progress, in tokens.

    Returns:
        The figures, as in `perplexity.json`.

    Raises:
        ValueError: the folder holds another run, or a method does not fit the base.
        OSError: the disk is full, or the folder cannot be written.
    """
    methods = {name: settings.complete(base) for name, settings in methods.items()}
    shared = {**(common or {}), "documents": {name: describe_text(ids) for name, ids in documents.items()}}
    rows = {}
    for method, settings in methods.items():
        folder = out / NAME / method
        rows[method] = {
            name: reading_unit(
                base, ids, settings, folder / f"{name}.json", label=f"{method}: {name}", progress=progress
            )
            for name, ids in documents.items()
        }
    units = [unit for row in rows.values() for unit in row.values()]
    head = open_run(out, NAME, shared, methods, overwrite, units)
    run_units(units, progress)
    readings = {method: {name: unit.load() for name, unit in row.items()} for method, row in rows.items()}
    means = {method: _average(list(map(Reading.from_json, row.values()))) for method, row in readings.items()}
    figures = {**head, "readings": readings, "means": means}
    write_json(out / f"{NAME}.json", figures)
    return figures


def _average(readings: Sequence[Reading]) -> dict[str, Any]:
    tokens = sum(reading.scored_tokens for reading in readings)
    return {
        "perplexity": perplexity(sum(reading.nll_nats for reading in readings), tokens),
        "scored_tokens": tokens,
        "documents": len(readings),
        "nll_per_token": mean_interval([reading.nll_nats / reading.scored_tokens for reading in readings]),
    }


# ---------------------------------------------------------------------- tables and plot


def tabulate(figures: dict[str, Any]) -> list[Sheet]:
    """Return the tables: the perplexity of each document, so far at some numbers of tokens, and between them."""
    readings, documents = figures["readings"], list(figures["documents"])
    rows = []
    for method, found in readings.items():
        values = [*(found[name]["perplexity"] for name in documents), figures["means"][method]["perplexity"]]
        rows.append([method, *map(format_figure, values)])
    sheets = [Sheet("Perplexity, each token scored before it was learned", ["", *documents, "all tokens"], rows)]
    for name in documents:
        for key, title in (("perplexity_at", "so far, at"), ("perplexity_between", "between")):
            values = {method: found[name][key] for method, found in readings.items()}
            marks = list(dict.fromkeys(mark for row in values.values() for mark in row))
            rows = [[method, *(format_figure(row.get(mark)) for mark in marks)] for method, row in values.items()]
            sheets += [Sheet(f"{name}: perplexity {title}", ["", *marks], rows)] if marks else []
    return sheets


def draw(figures: dict[str, Any], axes: Axes) -> bool:
    """Draw the perplexity so far against the tokens read, a line for each method and document."""
    dashes, colours = ("-", "--", ":", "-."), pick_colours(figures["readings"])
    for number, name in enumerate(figures["documents"]):
        for method, rows in figures["readings"].items():
            points = settled_points([(at, to_number(value)) for at, value in rows[name]["curve"]])
            if points:
                style = {"linestyle": dashes[number % len(dashes)], "color": colours[method]}
                axes.plot(*zip(*points, strict=True), label=f"{method}, {name}", **style)
    label_axes(axes, "tokens read", "perplexity so far")
    axes.legend(fontsize="small")
    return True
