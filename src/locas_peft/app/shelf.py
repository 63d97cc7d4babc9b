"""A shelf: a folder whose subfolders are memories, each under the name of its subfolder.

Names and archives come from visitors. No path is made of anything but a name that `check_name` accepts, links are not
followed, and of an archive only the files that a memory has are unpacked.
"""

from __future__ import annotations

import io
import os
import re
import stat
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..files import staged
from ..memories import FILES, MEMORY_CONFIG, describe_memory

__all__ = ["MOST_BYTES", "MOST_MEMORIES", "Shelf", "check_name", "pack"]

MOST_MEMORIES = 100
MOST_BYTES = 2**30
"""Of an uploaded archive, and of the files in it."""
_NAME = re.compile(r"[^\W_][\w .()-]{0,58}[\w)]|[^\W_]")
_PIECE = 2**20


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
    """The memories in a folder. Threads may use it at the same time.

    Args:
        folder: made where it does not exist.
    """

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
            number, free = 1, name
            while free.casefold() in taken:
                number += 1
                free = check_name(f"{name[:50].rstrip()} {number}")
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

    def pack(self, name: str, archive: Path) -> None:
        """Write a memory's files into a zip archive."""
        pack(self.find(name), archive, FILES)

    def add(self, archive: Path, name: str, check: Callable[[Path], None]) -> str:
        """Add a memory out of a zip archive and return its name.

        Args:
            archive: holds a memory's files, at its top or in one folder, and nothing else.
            name: the name that it gets if that is free.
            check: called with the unpacked folder; raises where the memory is refused.

        Raises:
            ValueError: the archive is refused, or the memory. Nothing is left of it.
        """
        with self.new(name) as folder:
            with staged(folder) as unpacked:
                _unpack(archive, unpacked)
                try:
                    describe_memory(unpacked)
                    check(unpacked)
                except ValueError as error:  # visitors need not know where the shelf is
                    raise ValueError(str(error).replace(str(unpacked), name)) from None
            return folder.name

    def _holds(self, name: str) -> bool:
        """Return whether a text is the name of a memory: a folder here, not a link, with a config in it."""
        folder = self._folder / name
        inside = bool(_NAME.fullmatch(name)) and not folder.is_symlink()
        return inside and (folder / MEMORY_CONFIG).is_file()


def pack(folder: Path, archive: Path, names: tuple[str, ...] | None = None) -> None:
    """Write a folder's files, or those of some names, into a zip archive, uncompressed: weights do not shrink."""
    files = sorted(folder.rglob("*")) if names is None else [folder / name for name in names]
    with zipfile.ZipFile(archive, "w") as packed:
        for file in files:
            if file.is_file() and not file.is_symlink():
                packed.write(file, Path(folder.name, file.relative_to(folder)))


class _ShortReads(io.FileIO):
    """A file that refuses long reads: zipfile reads the list of an archive's entries at once, however long it is."""

    def read(self, size: int = -1) -> bytes:
        if size > _PIECE:
            raise ValueError(f"the archive must list few files, got a list of {size:,} bytes: pack one memory alone")
        return super().read(size)


def _unpack(archive: Path, folder: Path) -> None:
    """Write the files of a memory out of a zip archive into a folder, under no names but those in `FILES`."""
    left = MOST_BYTES
    try:
        with _ShortReads(archive) as file, zipfile.ZipFile(file) as packed:
            for entry in _list_entries(packed):
                name = entry.filename.rpartition("/")[2]
                with packed.open(entry) as source, (folder / name).open("xb") as target:
                    while piece := source.read(_PIECE):
                        left -= len(piece)
                        if left < 0:
                            raise ValueError(f"a memory must have at most {MOST_BYTES:,} bytes, got more: upload less")
                        target.write(piece)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, FileExistsError) as error:
        raise ValueError(f"the archive must be a sound zip of a memory ({error}): download the memory again") from None


def _list_entries(packed: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the files in an archive; a `ValueError` unless all are files of a memory, in one folder at most."""
    entries = [entry for entry in packed.infolist() if not entry.is_dir()]
    homes = {entry.filename.rpartition("/")[0] for entry in entries}
    for entry in entries:
        home, _, name = entry.filename.rpartition("/")
        deep = len(homes) > 1 or "/" in home or home in (".", "..") or entry.filename.startswith("/")
        if deep or name not in FILES or stat.S_ISLNK(entry.external_attr >> 16):
            raise ValueError(
                f"the archive must hold the files of one memory ({', '.join(FILES)}), no links and one folder at "
                f"most, got {entry.filename[:80]!r}: pack one memory alone"
            )
    return entries
