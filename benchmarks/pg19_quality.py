"""Readings of the PG-19 tables: a JSON file each, so that processes can share the work and a later one can go on.

OUT/readings/DOCUMENT/ROW-seedN-TOKENS.json
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pg19_rows import Row, Table
from transformers import PreTrainedModel

from locas_peft.checkpoint import CHECKPOINT, InUse
from locas_peft.evaluation.perplexity import at_marks, choose_marks, per_segment
from locas_peft.files import write_json
from locas_peft.methods import Settings, read_with, score
from locas_peft.studies.run import with_memory
from locas_peft.text import digest_ids


@dataclass(frozen=True)
class Job:
    """One reading: a row, a document by name, how many of its tokens (None: all), and a seed."""

    row: Row
    document: str
    tokens: int | None
    seed: int
    unread: tuple[str, ...] = ()
    unread_tokens: int = 0

    def path(self, out: Path) -> Path:
        """The file that the reading is kept in."""
        slug = re.sub(r"[^\w.@-]+", "_", self.row.name)
        name = f"{slug}-seed{self.seed}-{self.tokens or 'all'}{'-unread' if self.unread else ''}.json"
        return out / "readings" / self.document / name


def list_jobs(table: Table, seeds: int | None = None) -> list[Job]:
    """Gives the readings of a table, row by row.

    Args:
        table: see `pg19_rows`.
        seeds: at most so many of a row's seeds.
    """
    return [
        Job(row, document, table.tokens, seed, table.unread, table.unread_tokens if table.unread else 0)
        for row in table.rows
        for document in table.documents
        for seed in range(min(row.seeds, seeds or row.seeds))
    ]


def read_job(
    base: PreTrainedModel, job: Job, common: Settings, get_ids: Callable[[str], torch.Tensor], folder: Path
) -> dict[str, Any]:
    """Reads a document with a row's method, from a fresh memory or a checkpoint to the figures.

    Args:
        base: a causal LM without adapters; left as it was.
        job: what is read.
        common: see `Row.settings`.
        get_ids: gives a document's tokens, LongTensor [T].
        folder: where an unfinished reading is kept.
    """
    settings = _settings(job, common)
    ids = get_ids(job.document)[: job.tokens]
    chunks, began, processor, resumed = [], time.perf_counter(), time.process_time(), (folder / CHECKPOINT).exists()
    with tempfile.TemporaryDirectory() as finished:
        memory = Path(finished) / "memory"
        reading = read_with(
            base, ids, settings, on_chunk=chunks.append, memory_dir=memory, checkpoint_dir=folder, resume=True
        )
        seconds, processor_seconds = time.perf_counter() - began, time.process_time() - processor
        adapter = memory / "adapter_model.safetensors"
        unread = {
            name: _score_frozen(base, memory, get_ids(name)[: job.unread_tokens], settings) for name in job.unread
        }
        adapter_bytes = adapter.stat().st_size if adapter.exists() else 0
    value = reading.to_json()
    for name in ("curve", "memory_dir", "perplexity_at", "peak_bytes", "tokens_per_second"):
        value.pop(name)
    marks = choose_marks(len(ids))
    return {
        "row": job.row.name,
        "document": job.document,
        "tokens_read": len(ids),
        **value,
        "perplexity_at": at_marks(chunks, marks),
        "perplexity_between": per_segment(chunks, marks),
        # Three numbers a chunk: tokens read, of them scored in this chunk, and their nll.
        "chunks": [number for chunk in chunks for number in (chunk.stop, chunk.tokens, round(chunk.nll_nats, 4))],
        "unread": unread,
        "unread_tokens": job.unread_tokens,
        "adapter_bytes": adapter_bytes,
        # Of a reading that was broken off nobody knows them.
        "total_seconds": None if resumed else seconds,
        "processor_seconds": None if resumed else processor_seconds,
    }


def read_jobs(
    base: PreTrainedModel, jobs: list[Job], common: Settings, get_ids: Callable[[str], torch.Tensor], out: Path
) -> None:
    """Reads what is not in the folder yet, and says on stderr what is read.

    Args:
        base, common, get_ids: see `read_job`.
        jobs: see `list_jobs`.
        out: the folder of the run.

    Raises:
        ValueError: a file in the folder is of other settings, or of another text.
    """
    waiting = []
    for job in jobs:
        if job.path(out).exists():
            check_same(job, common, get_ids, out)
        else:
            waiting.append(job)
    for number, job in enumerate(waiting, 1):
        if job.path(out).exists():  # another process was faster
            continue
        began = time.perf_counter()
        job.path(out).parent.mkdir(parents=True, exist_ok=True)
        try:
            value = read_job(base, job, common, get_ids, job.path(out).with_suffix(".checkpoint"))
        except InUse:
            print(f"{job.document}: {job.row.name}: another process is reading it", file=sys.stderr, flush=True)
            continue
        write_json(job.path(out), value)
        print(
            f"{number}/{len(waiting)} {job.document}: {job.row.name}, seed {job.seed}: "
            f"{value['perplexity']:.3f}, {time.perf_counter() - began:.0f} s",
            file=sys.stderr,
            flush=True,
        )


def check_same(job: Job, common: Settings, get_ids: Callable[[str], torch.Tensor], out: Path) -> None:
    """Refuses a file in the folder that is of other settings or of another text.

    Raises:
        ValueError: in one line.
    """
    path, here = job.path(out), dataclasses.asdict(_settings(job, common))
    there = json.loads(path.read_text(encoding="utf-8"))
    field = next((field for field in here if field in there and here[field] != there[field]), None)
    if field is not None:
        raise ValueError(
            f"{field} must be {there[field]!r} as in {str(path)!r}, got {here[field]!r}: "
            "choose another --out, or delete that file"
        )
    if there["text_sha256"] != digest_ids(get_ids(job.document)[: job.tokens]):
        raise ValueError(f"{str(path)!r} is of another text named {job.document!r}: choose another --out")


def collect(jobs: list[Job], out: Path) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Gives the readings that lie in the folder, each with its job."""
    for job in jobs:
        if job.path(out).exists():
            yield job, json.loads(job.path(out).read_text(encoding="utf-8"))


def _settings(job: Job, common: Settings) -> Settings:
    return job.row.settings(dataclasses.replace(common, max_tokens=job.tokens), job.seed)


def _score_frozen(base: PreTrainedModel, memory: Path, ids: torch.Tensor, settings: Settings) -> float:
    if settings.method == "none":
        return score(base, ids, settings)
    with with_memory(base, memory) as model:
        return score(model, ids, settings)
