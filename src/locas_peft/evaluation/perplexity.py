"""The perplexity study: each method reads each document with a fresh memory, each token scored before it is learned.

The paper's PG-19 protocol. Over documents the mean is weighted by tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..files import write_json
from ..progress import Progress, silent
from ..reading.record import Reading
from ..reading.settings import ReadingSettings
from ..ttt.chunks import perplexity
from .intervals import mean_interval
from .study import describe_text, open_study, reading_unit, run_units

__all__ = ["run_perplexity"]

STUDY = "perplexity"


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
        overwrite: see `study.open_study`.
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
        folder = out / STUDY / method
        rows[method] = {
            name: reading_unit(
                base, ids, settings, folder / f"{name}.json", label=f"{method}: {name}", progress=progress
            )
            for name, ids in documents.items()
        }
    units = [unit for row in rows.values() for unit in row.values()]
    head = open_study(out, STUDY, shared, methods, overwrite, units)
    run_units(units, progress)
    readings = {method: {name: unit.load() for name, unit in row.items()} for method, row in rows.items()}
    means = {method: _average(list(map(Reading.from_json, row.values()))) for method, row in readings.items()}
    figures = {**head, "readings": readings, "means": means}
    write_json(out / f"{STUDY}.json", figures)
    return figures


def _average(readings: Sequence[Reading]) -> dict[str, Any]:
    tokens = sum(reading.scored_tokens for reading in readings)
    return {
        "perplexity": perplexity(sum(reading.nll_nats for reading in readings), tokens),
        "scored_tokens": tokens,
        "documents": len(readings),
        "nll_per_token": mean_interval([reading.nll_nats / reading.scored_tokens for reading in readings]),
    }
