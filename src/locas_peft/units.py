"""Work that any number of processes share, of which any may be killed: each piece is made once.

A unit is a piece of work whose result is a JSON file. A unit whose result exists is skipped.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .files import load_json, write_json
from .memories import checkpoint
from .progress import Progress, silent

__all__ = ["Unit", "add_needed", "is_locked", "lock_path", "remove_unit", "run_units", "share"]

POLL_SECONDS = 1.0
T = TypeVar("T")


@dataclass(frozen=True)
class Unit:
    """A piece of work whose result is the JSON file `path`; `needs` is a unit whose result must exist first."""

    path: Path
    make: Callable[[], dict | list]
    needs: "Unit | None" = None

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

    def load(self) -> Any:
        """Load the result."""
        return load_json(self.path)


def share(
    pieces: Sequence[T],
    make: Callable[[T], Any],
    progress: Progress = silent,
    title: str = "results",
) -> None:
    """Make each piece, here or in another process; return when all are made.

    `make` raises `InUse` for a piece that another process holds, and is called again for it after the others. When a
    process ends, its locks are free. The progress line shows what `make` returns, or how many pieces are left.
    """
    advance, left = progress(f"{len(pieces)} {title}", len(pieces)), list(pieces)
    while left:
        held = []
        for number, piece in enumerate(left, 1):
            try:
                note = make(piece)
            except checkpoint.InUse:
                held.append(piece)
            else:
                advance(1, note or f"{len(left) - number + len(held)} left")
        if len(held) == len(left):
            advance(0, f"{len(held)} left, in other processes")
            time.sleep(POLL_SECONDS)
        left = held


def run_units(units: Sequence[Unit], progress: Progress = silent) -> None:
    """Make the results that do not exist; return when all of them do. Processes with the same `units` share them."""
    units = add_needed(units)
    share([unit for unit in units if not unit.path.exists()], _make, progress)
    for unit in units:
        if lock_path(unit.path).exists():  # a process was killed between a result and its clean-up
            with suppress(checkpoint.InUse):
                _make(unit)


def add_needed(units: Sequence[Unit]) -> list[Unit]:
    """Return units, each once, and before each one the unit that it needs."""
    return list(
        dict.fromkeys(one for unit in units for one in (unit.needs, unit) if one is not None)
    )


def remove_unit(unit: Unit, folder: Path, names: Sequence[str]) -> None:
    """Remove a unit's files below a folder, its memory's by their names, and the folders that are empty then."""
    for file in (unit.path, lock_path(unit.path), *(unit.memory / name for name in names)):
        file.unlink(missing_ok=True)
    _remove_unfinished(unit)
    for directory in (unit.memory, *unit.path.parents):
        if directory == folder:
            break
        with suppress(OSError):
            directory.rmdir()


def is_locked(unit: Unit) -> bool:
    """Return whether a process is at work on a unit."""
    try:
        with (
            checkpoint.held(lock_path(unit.path))
            if lock_path(unit.path).exists()
            else nullcontext()
        ):
            return False
    except checkpoint.InUse:
        return True


def _make(unit: Unit) -> None:
    """Make a unit's result; `InUse` where another process holds the unit, or has not made what it needs."""
    if unit.needs is not None and not unit.needs.path.exists():
        raise checkpoint.InUse(f"{str(unit.needs.path)!r} must be made first: wait for it")
    unit.path.parent.mkdir(parents=True, exist_ok=True)
    with checkpoint.held(lock_path(unit.path)):
        if not unit.path.exists():
            write_json(unit.path, unit.make())
        _remove_unfinished(
            unit
        )  # not earlier: until the result exists, the work can continue from there


def lock_path(path: Path) -> Path:
    """Return the lock file of a result."""
    return Path(f"{path}.lock")


def _remove_unfinished(unit: Unit) -> None:
    checkpoint.remove(unit.checkpoint)
    for file in (unit.unfinished, unit.checkpoint / checkpoint.LOCK):
        file.unlink(missing_ok=True)
    for folder in (unit.checkpoint, unit.memory):
        with suppress(OSError):  # it does not exist, or holds other files
            folder.rmdir()
