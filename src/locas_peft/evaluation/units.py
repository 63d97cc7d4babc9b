"""Units of a protocol: pieces of work, each of which makes one JSON file, once.

A unit whose file exists is skipped. Each file is written whole, by the one process that holds the
unit's lock, so that a run that was killed goes on with what is left.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import load_json, write_json
from ..memories import checkpoint
from ..processes import take_share, wait_for_others
from ..progress import Progress, silent

__all__ = ["Unit", "add_needed", "remove_unit", "run_units"]


@dataclass(frozen=True)
class Unit:
    """A piece of work whose result is the JSON file `path`.

    Args:
        path: the file of the result.
        make: does the work and returns the result.
        needs: a unit whose result must exist first.
        size: how long the work takes beside other units, such as its number of tokens.
    """

    path: Path
    make: Callable[[], dict | list]
    needs: "Unit | None" = None
    size: int = 1

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

    @property
    def has_begun(self) -> bool:
        """Whether there is the result, or a part of the work."""
        is_under_way = checkpoint.has_checkpoint(self.checkpoint) or self.unfinished.exists()
        return self.path.exists() or is_under_way

    @property
    def lock(self) -> Path:
        """The lock file, which exists while a process works on the unit, or after it was killed."""
        return Path(f"{self.path}.lock")

    @property
    def is_finished(self) -> bool:
        """Whether the result exists, and nothing else that a killed process left."""
        return self.path.exists() and not self.lock.exists()

    def load(self) -> Any:
        """Load the result."""
        return load_json(self.path)

    def list_needed(self) -> list["Unit"]:
        """Return the unit and those that it needs, in the order in which they are made."""
        before = [] if self.needs is None else self.needs.list_needed()
        return [*before, self]


def add_needed(units: Sequence[Unit]) -> list[Unit]:
    """Return units, each once, and before each one the units that it needs."""
    ordered = []
    for unit in units:
        ordered += unit.list_needed()
    return list(dict.fromkeys(ordered))


def run_units(units: Sequence[Unit], progress: Progress = silent) -> None:
    """Make the results that do not exist; return when all of them do.

    The processes of a launcher share the units: one that needs another is made by the process that
    makes that one. A unit that a process of another command holds is an `InUse`.
    """
    units = add_needed(units)
    groups: dict[Unit, list[Unit]] = {}
    for unit in units:
        first_needed = unit.list_needed()[0]
        groups.setdefault(first_needed, []).append(unit)

    def measure(group: list[Unit]) -> int:
        return sum(unit.size for unit in group if not unit.is_finished)

    share = set()
    for group in take_share(list(groups.values()), measure):
        share.update(group)
    left = [unit for unit in units if unit in share and not unit.is_finished]
    advance = progress(f"{len(left)} results", len(left))
    for number, unit in enumerate(left, 1):
        try:
            _make(unit)
        except ValueError as error:
            # The other processes do not see it.
            error.is_of_one_process = True  # type: ignore[attr-defined]
            raise
        advance(1, f"{len(left) - number} left")
    wait_for_others()


def remove_unit(unit: Unit, folder: Path, names: Sequence[str]) -> None:
    """Remove a unit's files below a folder, its memory's by their names.

    The folders that are empty then are removed too. A unit that a process works on is an `InUse`.
    """
    if unit.path.parent.is_dir():
        with checkpoint.held(unit.lock):
            unit.path.unlink(missing_ok=True)
            for name in names:
                (unit.memory / name).unlink(missing_ok=True)
            _remove_unfinished(unit)
    for directory in (unit.memory, *unit.path.parents):
        if directory == folder:
            break
        with suppress(OSError):
            directory.rmdir()


def _make(unit: Unit) -> None:
    unit.path.parent.mkdir(parents=True, exist_ok=True)
    with checkpoint.held(unit.lock):
        if not unit.path.exists():
            write_json(unit.path, unit.make())
        # Not earlier: until the result exists, the work can go on from there.
        _remove_unfinished(unit)


def _remove_unfinished(unit: Unit) -> None:
    checkpoint.remove(unit.checkpoint)
    for file in (unit.unfinished, unit.checkpoint / checkpoint.LOCK):
        file.unlink(missing_ok=True)
    for folder in (unit.checkpoint, unit.memory):
        # It does not exist, or holds other files.
        with suppress(OSError):
            folder.rmdir()
