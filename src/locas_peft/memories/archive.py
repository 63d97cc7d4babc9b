"""Zip archives of memories. An archive that is unpacked may be hostile."""

from __future__ import annotations

import io
import shutil
import stat
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from .folder import FILES

__all__ = ["MOST_BYTES", "pack", "unpack"]

MOST_BYTES = 2**30
"""The most bytes that an archive unpacks to."""
_MOST_LISTED_BYTES = 2**20


def pack(folder: Path, archive: Path, names: Sequence[str] | None = None) -> None:
    """Write a folder's files, or those of some names, into a zip archive, uncompressed: weights do not shrink.

    Links are left out.
    """
    files = sorted(folder.rglob("*")) if names is None else [folder / name for name in names]
    with zipfile.ZipFile(archive, "w") as packed:
        for file in files:
            if file.is_file() and not file.is_symlink():
                packed.write(file, Path(folder.name, file.relative_to(folder)))


def unpack(archive: Path, folder: Path) -> None:
    """Write a memory's files out of a zip archive into an empty folder. No file gets a name that is not in `FILES`.

    Args:
        archive: holds a memory's files, at its top or in one folder, and nothing else.

    Raises:
        ValueError: the archive is damaged, or holds something else. The folder may then hold some files.
    """
    try:
        with _ShortReads(archive) as file, zipfile.ZipFile(file) as packed:
            for entry in _list_entries(packed):  # zipfile writes at most the bytes that an entry declares
                with packed.open(entry) as source, (folder / Path(entry.filename).name).open("xb") as target:
                    shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, FileExistsError) as error:
        raise ValueError(f"the archive must be a sound zip of a memory ({error}): download the memory again") from None


class _ShortReads(io.FileIO):
    """A file that refuses long reads: zipfile reads the list of an archive's entries at once, however long it is."""

    def read(self, size: int = -1) -> bytes:
        if size > _MOST_LISTED_BYTES:
            raise ValueError(f"the archive must list few files, got a list of {size:,} bytes: pack one memory alone")
        return super().read(size)


def _list_entries(packed: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the files in an archive; a `ValueError` unless they are files of one memory and not too large."""
    entries = [entry for entry in packed.infolist() if not entry.is_dir()]
    home, slash, _ = entries[0].filename.rpartition("/") if entries else ("", "", "")
    is_plain = "/" not in home and (not slash or home not in ("", ".", ".."))
    for entry in entries:
        is_link = stat.S_ISLNK(entry.external_attr >> 16)
        if not is_plain or is_link or entry.filename not in [home + slash + name for name in FILES]:
            raise ValueError(
                f"the archive must hold the files of one memory ({', '.join(FILES)}), no links and one folder at "
                f"most, got {entry.filename[:80]!r}: pack one memory alone"
            )
    if sum(entry.file_size for entry in entries) > MOST_BYTES:
        raise ValueError(f"a memory must have at most {MOST_BYTES:,} bytes, got more: upload less")
    return entries
