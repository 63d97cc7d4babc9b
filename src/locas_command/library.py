"""`locas library` and `forget`: what a folder of memories holds, and taking one out of it."""

from __future__ import annotations

from pathlib import Path

from .console import open_consoles, write_result
from .options import JsonFile


def library(folder: Path, /, *, json_file: JsonFile = None) -> None:
    """List the memories of a library, the latest first.

    Args:
        folder: the library.
    """
    stdout, _ = open_consoles(json_file)
    held = _open(folder)
    rows = [{"name": name, "bytes": held.bytes_of(name)} for name in held.list()]
    for row in rows:
        stdout.print(f"{row['name']}   {row['bytes'] / 1e6:.1f} MB", markup=False)
    if not rows:
        stdout.print(f"{folder} holds no memory", markup=False)
    write_result(json_file, rows)


def forget(folder: Path, name: str, /) -> None:
    """Delete a memory of a library, whole or not at all. The memories that stay are not changed.

    Args:
        folder: the library.
        name: of the memory.
    """
    stdout, _ = open_consoles()
    _open(folder).forget(name)
    stdout.print(f"{name} is forgotten: no file in {folder} holds what it learned", markup=False)


def _open(folder: Path):
    from locas_peft.library import Library

    if not folder.is_dir():
        raise ValueError(
            f"a library must be a folder of memories, got {str(folder)!r}: make one with memorize --library"
        )
    return Library(folder)
