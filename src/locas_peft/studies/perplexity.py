"""Online perplexity of a set of documents: a fresh memory for each, each token scored before it is learned.

The paper's PG-19 protocol. Over documents the mean is weighted by tokens.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..evaluation.intervals import mean_interval
from ..evaluation.perplexity import at_marks, per_segment, perplexity
from ..files import write_json
from ..methods import Settings, choose_marks, read_with
from .run import Start, digest_ids, open_run, silent

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

    Returns:
        The figures, as `perplexity.json` has them.

    Raises:
        ValueError: the folder holds another run, or a method does not fit the base.
        OSError: the disk is full, or the folder cannot be written.
    """
    texts = {name: {"tokens": len(ids), "sha256": digest_ids(ids)} for name, ids in documents.items()}
    shared = {**(common or {}), "documents": texts}
    open_run(out, STUDY, shared, methods, overwrite)
    figures: dict[str, Any] = {
        "study": STUDY,
        **shared,
        "methods": {name: dataclasses.asdict(settings) for name, settings in methods.items()},
        "readings": {},
        "means": {},
    }
    for method, settings in methods.items():
        rows = {}
        for name, ids in documents.items():
            path = out / STUDY / method / f"{name}.json"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, _read(base, ids, settings, start, f"{method}: {name}"))
            rows[name] = json.loads(path.read_text(encoding="utf-8"))
        nll_nats, tokens = (
            sum(row["nll_nats"] for row in rows.values()),
            sum(row["scored_tokens"] for row in rows.values()),
        )
        figures["readings"][method] = rows
        figures["means"][method] = {
            "perplexity": perplexity(nll_nats, tokens),
            "scored_tokens": tokens,
            "documents": len(rows),
            "nll_per_token": mean_interval(
                [row["nll_nats"] / row["scored_tokens"] for row in rows.values()]
            ).to_json(),
        }
    write_json(out / f"{STUDY}.json", figures)
    return figures


def _read(base: PreTrainedModel, ids: torch.Tensor, settings: Settings, start: Start, title: str) -> dict[str, Any]:
    chunks = []
    advance = start(title, len(ids))

    def keep(chunk) -> None:
        chunks.append(chunk)
        advance(chunk.stop - chunk.start)

    reading = read_with(base, ids, settings, on_chunk=keep)
    marks = choose_marks(len(ids))
    return {
        **reading.to_json(),
        "perplexity_at": at_marks(chunks, marks),
        "perplexity_between": per_segment(chunks, marks),
    }
