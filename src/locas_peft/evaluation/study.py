"""Studies: tables of units whose results are JSON files, shared by any number of processes.

A study is a function that lists units, calls `open_study` and `run_units`, and summarizes the results. A unit whose
result exists is skipped, so that an interrupted study continues. A unit that another process has locked is left to
that process, so that processes which are started on one folder, in any way and at any time, share the work.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checks import describe_difference
from ..files import load_json, write_json
from ..progress import Progress, follow, follow_study, silent
from ..reading.record import FILES, Reading, find_finished
from ..reading.settings import ReadingSettings
from ..reading.teaching import memorize
from ..text import digest_ids
from ..ttt import checkpoint

__all__ = ["Unit", "describe_text", "digest", "open_study", "reading_unit"]
__all__ += ["run_units", "summarize_reading"]

POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Unit:
    """A piece of work whose result is the JSON file `path`; `needs` is a unit whose result must exist first."""

    path: Path
    make: Callable[[], dict | list]
    label: str = ""
    needs: Unit | None = None

    @property
    def memory(self) -> Path:
        """The folder for a memory that the unit makes."""
        return self.path.with_suffix("")

    @property
    def checkpoint(self) -> Path:
        """The folder for an unfinished reading; removed when the result exists."""
        return self.path.with_suffix(".checkpoint")

    @property
    def unfinished(self) -> Path:
        """The file for other unfinished work; removed when the result exists."""
        return self.path.with_suffix(".unfinished")

    def load(self) -> Any:
        return load_json(self.path)


def run_units(units: Sequence[Unit], progress: Progress = silent) -> None:
    """Make the results that do not exist; return when all of them do.

    A process that ends, in whatever way, frees its locks, and another process makes its unit. An error in a unit ends
    this process alone. The progress line counts the results of all processes, whose `units` must be the same.
    """
    units = _with_needs(units)
    missing = [unit for unit in units if not unit.path.exists()]
    advance = progress(f"{len(missing)} results", len(missing)) if missing else None
    while missing:
        ready = (unit for unit in missing if unit.needs is None or unit.needs.path.exists())
        made = any(map(_make, ready))  # one unit; then the table is read again
        if not made:
            time.sleep(POLL_SECONDS)
        left = [unit for unit in units if not unit.path.exists()]
        advance(len(missing) - len(left), f"{len(left)} left" + ("" if made else ", in other processes"))
        missing = left
    for unit in units:
        if _lock_path(unit.path).exists():  # a process was killed between a result and its clean-up
            _make(unit)


def _with_needs(units: Sequence[Unit]) -> list[Unit]:
    return list(dict.fromkeys(one for unit in units for one in (unit.needs, unit) if one is not None))


def _make(unit: Unit) -> bool:
    """Make a unit's result, unless another process holds the unit; return whether the result exists."""
    unit.path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(unit.path, blocking=False) as held:
        if held:
            if not unit.path.exists():
                write_json(unit.path, unit.make())
            _remove_unfinished(unit)  # not earlier: until the result exists, the work can continue from there
    return held


def _lock_path(path: Path) -> Path:
    return Path(f"{path}.lock")


@contextmanager
def _lock(path: Path, blocking: bool = True) -> Iterator[bool]:
    """Hold a file's lock within the context; yield False if another process holds it."""
    lock = FileLock(_lock_path(path))
    try:
        lock.acquire(blocking=blocking)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        with suppress(OSError):  # Windows removes no open file
            os.unlink(lock.lock_file)  # while it is held: no other process can hold it then
        lock.release()


def _remove_unfinished(unit: Unit) -> None:
    checkpoint.remove(unit.checkpoint)
    for file in (unit.unfinished, unit.checkpoint / checkpoint.LOCK):
        file.unlink(missing_ok=True)
    with suppress(OSError):  # it does not exist, or holds other files
        unit.checkpoint.rmdir()


# ---------------------------------------------------------------------- the record of a run


def open_study(
    out: Path,
    name: str,
    common: dict[str, Any],
    methods: dict[str, ReadingSettings],
    overwrite: bool,
    units: Sequence[Unit],
) -> dict[str, Any]:
    """Record in `out/NAME/run.json` which run its results are of, or refuse a run that differs from the recorded one.

    Later runs may add methods; the fields in `common`, JSON values, must stay the same. A record without results, of a
    run that failed at once, is replaced.

    Args:
        out: the folder; made if it does not exist. It may hold several studies.
        overwrite: remove the results of an earlier run, and no other file. If another process is at work in the
            folder, its results stay, so that processes that are all started with `overwrite` share one run.
        units: the study's table, with paths in `out / name`.

    Returns:
        The fields that the study's figures begin with: its name, those in `common`, the settings of each of the
        `methods`, and, if they agree in it, the `recipe` by which they teach a text.

    Raises:
        ValueError: the folder holds results of a different run.
    """
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    settings = {method: asdict(values) for method, values in methods.items()}
    files = [unit.path.relative_to(folder).as_posix() for unit in _with_needs(units)]
    run = {"study": name, "common": common, "methods": settings, "files": files}
    with _lock(path):
        before = load_json(path) if path.exists() else {}
        write_json(path, _join(folder, before, json.loads(json.dumps(run)), overwrite))
    fields = ("readings", "objective", "teacher_window", "token_weighting")
    recipes = [{field: values[field] for field in fields} for values in settings.values()]
    recipe = {"recipe": recipes[0]} if all(other == recipes[0] for other in recipes) else {}
    return {"study": name, **common, **recipe, "methods": settings}


def _join(folder: Path, before: dict[str, Any], run: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """Return a run's record together with the one before it; check that they agree, or remove the earlier results."""
    own = [file for file in before.get("files", ()) if not Path(file).is_absolute() and ".." not in Path(file).parts]
    files = sorted({*own, *run["files"]})
    units = [Unit(folder / file, dict) for file in files]
    if overwrite and not any(map(_is_locked, units)):
        for unit in units:
            _remove(unit, folder)
    elif any(unit.path.exists() or checkpoint.has_checkpoint(unit.checkpoint) for unit in units):
        methods = before.get("methods", {})
        pairs = [(run["common"], before.get("common", {}), "")]
        pairs += [(run["methods"][name], methods[name], f"{name}: ") for name in run["methods"] if name in methods]
        where, remedy = f"the results in {str(folder.parent)!r}", "choose another folder, or give --overwrite"
        for ours, theirs, prefix in pairs:
            difference = describe_difference(ours, theirs, where, remedy, prefix)
            if difference is not None:
                raise ValueError(difference)
        return {**run, "methods": {**methods, **run["methods"]}, "files": files}
    return run


def _is_locked(unit: Unit) -> bool:
    if not _lock_path(unit.path).exists():
        return False
    with _lock(unit.path, blocking=False) as held:
        return not held


def _remove(unit: Unit, folder: Path) -> None:
    """Remove a unit's files from the study's folder, and the folders that are empty then."""
    for file in (unit.path, _lock_path(unit.path), *(unit.memory / name for name in FILES)):
        file.unlink(missing_ok=True)
    _remove_unfinished(unit)
    for directory in (unit.memory, *unit.path.parents):
        if directory == folder:
            break
        with suppress(OSError):
            directory.rmdir()


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8")).hexdigest()


def describe_text(input_ids: torch.Tensor) -> dict[str, Any]:
    """Return the identity of a text [T] for the record of a run: its number of tokens and their SHA-256."""
    return {"tokens": len(input_ids), "sha256": digest_ids(input_ids)}


# ---------------------------------------------------------------------- readings


def reading_unit(
    base: PreTrainedModel,
    input_ids: torch.Tensor,
    settings: ReadingSettings,
    path: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    keep_memory: bool = False,
    label: str = "",
    progress: Progress = silent,
) -> Unit:
    """Return the unit of one reading, whose result is a `Reading`; if interrupted, it continues inside its text.

    Args:
        base: a causal LM without adapters; mutated while the unit is made, and restored.
        input_ids: LongTensor [T].
        settings: complete.
        tokenizer: of the base, for a self-study.
        keep_memory: save the memory too, in the unit's `memory`.
    """

    def make() -> dict[str, Any]:
        memory = unit.memory if keep_memory else None
        reading = find_finished(memory, settings, input_ids) if memory else None
        if reading is None:
            on_chunk = follow(progress(label, len(input_ids) * settings.readings))
            options = {"out": memory, "checkpoint_dir": unit.checkpoint, "resume": True, "on_chunk": on_chunk}
            if settings.study:
                options |= {"tokenizer": tokenizer, "on_study": follow_study(progress)}
            reading = memorize(base, input_ids, settings, **options)
        return reading.to_json()

    unit = Unit(path, make, label)
    return unit


def summarize_reading(record: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a `Reading` as JSON that taught a memory; `perplexity` has one value a reading."""
    reading = Reading.from_json(record)
    return {
        "parameters": reading.extra_parameters,
        "perplexity": reading.perplexities,
        "scored_tokens": reading.scored_tokens * reading.settings.readings,
        "seconds": reading.seconds,
        "skipped_chunks": reading.skipped_chunks,
        "taken_back": reading.taken_back,
        **({} if reading.studied is None else {"studied": reading.studied}),
    }
