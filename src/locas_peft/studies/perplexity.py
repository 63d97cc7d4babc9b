"""Online perplexity of a set of documents: a fresh memory for each, each token scored before it is learned.

The paper's PG-19 protocol. Over documents the mean is weighted by tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..evaluation.intervals import mean_interval
from ..evaluation.perplexity import at_marks, choose_marks, per_segment, perplexity
from ..files import write_json
from ..methods import Settings, read_with
from ..ttt import Chunk
from .progress import Start, follow, silent
from .run import ALONE, Task, describe_text, do_tasks, open_run, reading_cost
from .sharing import Processes

STUDY = "perplexity"


def run_perplexity(
    base: PreTrainedModel,
    documents: dict[str, torch.Tensor],
    methods: dict[str, Settings],
    out: Path,
    *,
    common: dict[str, Any] | None = None,
    overwrite: bool = False,
    start: Start = silent,
    processes: Processes = ALONE,
) -> dict[str, Any]:
    """Reads each document with each method, or goes on with it: documents that are done are not read again.

    Args:
        base: a causal LM without adapters; mutated while it runs, and left as it was.
        documents: LongTensor [T] each, by name.
        methods: the settings of each method by the name that it shall have.
        out: the folder: `perplexity/METHOD/DOCUMENT.json`, one a reading, and `perplexity.json`.
        common: more to record of the run, as JSON values.
        overwrite: removes what an earlier run left.
        start: shows progress, in tokens.
        processes: which share the readings; the figures are the same for any number of them. Each must call this.

    Returns:
        The figures, as `perplexity.json` has them.

    Raises:
        ValueError: the folder holds another run, or a method does not fit the base.
        OSError: the disk is full, the folder cannot be written, or another process has ended before.
    """
    shared = {**(common or {}), "documents": {name: describe_text(ids) for name, ids in documents.items()}}
    paths = {(method, name): out / STUDY / method / f"{name}.json" for method in methods for name in documents}

    def make_task(method: str, name: str) -> Task:
        path, ids, settings = paths[method, name], documents[name], methods[method]
        return Task(
            path.exists,
            lambda: _read(base, ids, settings, path, start, f"{method}: {name}"),
            reading_cost(len(ids), settings),
        )

    tasks = [make_task(*key) for key in paths]
    do_tasks(tasks, lambda: open_run(out, STUDY, shared, methods, overwrite), processes, start)
    readings = {
        method: {name: json.loads(paths[method, name].read_text(encoding="utf-8")) for name in documents}
        for method in methods
    }
    figures = {
        "study": STUDY,
        **shared,
        "methods": {name: dataclasses.asdict(settings) for name, settings in methods.items()},
        "readings": readings,
        "means": {method: _average(list(rows.values())) for method, rows in readings.items()},
    }
    if processes.is_main:
        write_json(out / f"{STUDY}.json", figures)
    return figures


def _average(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    nll_nats, tokens = (sum(row[name] for row in rows) for name in ("nll_nats", "scored_tokens"))
    return {
        "perplexity": perplexity(nll_nats, tokens),
        "scored_tokens": tokens,
        "documents": len(rows),
        "nll_per_token": mean_interval([row["nll_nats"] / row["scored_tokens"] for row in rows]).to_json(),
    }


def _read(base: PreTrainedModel, ids: torch.Tensor, settings: Settings, path: Path, start: Start, title: str) -> None:
    """Reads a document and writes what came out; a reading that was broken off goes on from its checkpoint."""
    chunks = []
    tell = follow(start(title, len(ids)))

    def keep(chunk: Chunk) -> None:
        chunks.append(chunk)
        tell(chunk)

    path.parent.mkdir(parents=True, exist_ok=True)
    reading = read_with(
        base, ids, settings, on_chunk=keep, checkpoint_dir=path.with_suffix(".checkpoint"), resume=True
    )
    marks = choose_marks(len(ids))
    found = {
        **reading.to_json(),
        "perplexity_at": at_marks(chunks, marks),
        "perplexity_between": per_segment(chunks, marks),
    }
    write_json(path, found)
