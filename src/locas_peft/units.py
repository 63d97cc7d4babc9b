"""Units of work whose results are JSON files: made once, by any number of processes, of which any may be killed.

A unit whose result exists is skipped. A unit that another process has locked is left to that process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import load_json, write_json
from .memories import checkpoint
from .progress import Progress, silent

__all__ = ["Unit", "add_needed", "is_locked", "locked", "remove_unit", "run_units"]

POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Unit:
    """A piece of work whose result is the JSON file `path`; `needs` is a unit whose result must exist first."""

    path: Path
    make: Callable[[], dict | list]
    needs: Unit | None = None

    @property
    def memory(self) -> Path:
        """The folder for a memory that the unit makes."""
        return self.path.with_suffix("")

    @property
    def checkpoint(self) -> Path:
        """The folder for an unfinished reading; removed when the result exists."""
        return self.memory / checkpoint.CHECKPOINT_FOLDER

    @property
    def unfinished(self) -> Path:
        """The file for other unfinished work; removed when the result exists."""
        return self.path.with_suffix(".unfinished")

    def has_begun(self) -> bool:
        """Return whether there is a result, or a reading that can continue."""
        return self.path.exists() or checkpoint.has_checkpoint(self.checkpoint)

    def load(self) -> Any:
        """Load the result."""
        return load_json(self.path)


def run_units(units: Sequence[Unit], progress: Progress = silent) -> None:
    """Make the results that do not exist; return when all of them do.

    A process that ends, in whatever way, frees its locks, and another process makes its unit. The progress line counts
    the results of all processes, whose `units` must be the same.
    """
    units = add_needed(units)
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


def add_needed(units: Sequence[Unit]) -> list[Unit]:
    """Return units, each once, and before each one the unit that it needs."""
    return list(dict.fromkeys(one for unit in units for one in (unit.needs, unit) if one is not None))


def remove_unit(unit: Unit, folder: Path, names: Sequence[str]) -> None:
    """Remove a unit's files below a folder, its memory's by their names, and the folders that are empty then."""
    for file in (unit.path, _lock_path(unit.path), *(unit.memory / name for name in names)):
        file.unlink(missing_ok=True)
    _remove_unfinished(unit)
    for directory in (unit.memory, *unit.path.parents):
        if directory == folder:
            break
        with suppress(OSError):
            directory.rmdir()


def is_locked(unit: Unit) -> bool:
    """Return whether a process is at work on a unit."""
    if not _lock_path(unit.path).exists():
        return False
    try:
        with locked(unit.path, wait=False):
            return False
    except checkpoint.InUse:
        return True


def locked(path: Path, wait: bool = True) -> AbstractContextManager[None]:
    """Hold a result's lock within the context (see `checkpoint.held`)."""
    return checkpoint.held(_lock_path(path), wait)


def _make(unit: Unit) -> bool:
    """Make a unit's result, unless another process holds the unit; return whether the result exists."""
    unit.path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(unit.path, wait=False))
        except checkpoint.InUse:
            return False
        if not unit.path.exists():
            write_json(unit.path, unit.make())
        _remove_unfinished(unit)  # not earlier: until the result exists, the work can continue from there
    return True


def _lock_path(path: Path) -> Path:
    return Path(f"{path}.lock")


def _remove_unfinished(unit: Unit) -> None:
    checkpoint.remove(unit.checkpoint)
    for file in (unit.unfinished, unit.checkpoint / checkpoint.LOCK):
        file.unlink(missing_ok=True)
    for folder in (unit.checkpoint, unit.memory):
        with suppress(OSError):  # it does not exist, or holds other files
            folder.rmdir()
