"""A shelf: a folder whose subfolders are memories, each under the name of its subfolder.

Names come from visitors. No path is made of anything but a name that `check_name` accepts, and links are not followed.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path

from ..files import staged
from ..memories import FILES, MEMORY_CONFIG
from ..memories.archive import unpack

__all__ = ["MOST_MEMORIES", "Shelf", "check_name"]

MOST_MEMORIES = 100
_NAME = re.compile(r"[^\W_][\w .()-]{0,58}[\w)]|[^\W_]")


def check_name(name: str) -> str:
    """Return a memory's name, without the space around it; a `ValueError` where it cannot name a folder everywhere."""
    name = name.strip()
    if not _NAME.fullmatch(name):
        raise ValueError(
            "name must be at most 60 letters, digits, spaces or any of . ( ) _ - and begin with a letter or digit, "
            f"got {name[:60]!r}: choose another"
        )
    return name


class Shelf:
    """The memories in a folder, which is made where it does not exist. Threads may use it at the same time."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._reserved: set[str] = set()  # of memories that are being made

    def list_names(self) -> list[str]:
        """Return the memories' names, the latest first."""
        entries = [entry for entry in os.scandir(self._folder) if self._holds(entry.name)]
        return [entry.name for entry in sorted(entries, key=lambda entry: -entry.stat().st_mtime)]

    def find(self, name: str | None) -> Path:
        """Return the folder of a memory; a `ValueError` where there is none of that name."""
        if not self._holds(name or ""):
            raise ValueError(f"there is no memory {name or ''!r} on this shelf: choose one of the list")
        return self._folder / name

    def bytes_of(self, name: str) -> int:
        """Return how many bytes the files of a memory have."""
        return sum(file.stat().st_size for file in map(self.find(name).joinpath, FILES) if file.is_file())

    @contextmanager
    def new(self, name: str) -> Iterator[Path]:
        """Yield the folder for a new memory, which does not exist yet, under a name that is free: "name 2", say.

        Raises:
            ValueError: the name is not one, or the shelf is full.
        """
        name = check_name(name)
        with self._lock:
            taken = self._reserved | {entry.name.casefold() for entry in os.scandir(self._folder)}
            if len(taken) >= MOST_MEMORIES:
                raise ValueError(f"this shelf must hold at most {MOST_MEMORIES} memories: delete some first")
            numbered = (f"{name[:50].rstrip()} {number}" for number in count(2))
            free = next(each for each in chain([name], numbered) if each.casefold() not in taken)
            self._reserved.add(free.casefold())
        try:
            yield self._folder / free
        finally:
            with self._lock:
                self._reserved.discard(free.casefold())

    def rename(self, name: str, new_name: str) -> str:
        """Give a memory another name, which is returned: the next free one where it is taken."""
        source = self.find(name)
        if check_name(new_name) == name:
            return name
        with self.new(new_name) as target:
            os.rename(source, target)
        return target.name

    def delete(self, name: str) -> None:
        """Delete a memory's files, and its folder unless it holds other ones."""
        folder = self.find(name)
        for file in FILES:
            (folder / file).unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()

    def add(self, archive: Path, name: str, check: Callable[[Path], None]) -> str:
        """Add a memory out of a zip archive and return its name.

        Args:
            archive: see `memories.archive.unpack`.
            name: the name that it gets if that is free.
            check: called with the unpacked folder; raises where the memory is refused.

        Raises:
            ValueError: the archive is refused, or the memory. Nothing is left of it.
        """
        with self.new(name) as folder:
            with staged(folder) as unpacked:
                unpack(archive, unpacked)
                try:
                    check(unpacked)
                except ValueError as error:  # visitors need not know where the shelf is
                    raise ValueError(str(error).replace(str(unpacked), name)) from None
            return folder.name

    def _holds(self, name: str) -> bool:
        """Return whether a text is the name of a memory: a folder here, not a link, with a config in it."""
        folder = self._folder / name
        return bool(_NAME.fullmatch(name)) and not folder.is_symlink() and (folder / MEMORY_CONFIG).is_file()
