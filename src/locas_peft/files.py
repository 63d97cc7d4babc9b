"""Files written whole or not at all: a run that fails, or meets a full disk, leaves what was there before."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def staged(directory: str | Path, last: str | None = None) -> Iterator[Path]:
    """Gives a new folder to write into; its entries move to `directory` when the block ends without an error.

    The new folder lies inside `directory` where that exists, else beside it: on the same disk, so that moving needs
    no space. After an error it is removed, with the parent folders that were made for it. Other files in `directory`
    stay.

    Args:
        directory: where the entries go in the end; made where it does not exist, parents too.
        last: the entry to move last: the one whose presence says that the rest is complete.

    Raises:
        OSError: the disk is full, or a folder cannot be written. Errors of the disk that safetensors reports in its
            own type are raised as OSError too.

    Example:
        >>> with staged("memory") as folder:
        ...     model.save_pretrained(folder)
    """
    directory = Path(os.path.abspath(directory))
    made = _make_parents(directory)
    staging = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    if directory.is_dir():  # a mounted volume is another disk than its parent, which may not be writable either
        staging = directory / f".{os.getpid()}.partial"
    try:
        staging.mkdir()
        yield staging
        if not directory.exists():
            os.replace(staging, directory)
            return
        for entry in sorted(staging.iterdir(), key=lambda entry: (entry.name == last, entry.name)):
            target = directory / entry.name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            os.replace(entry, target)
        staging.rmdir()
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        found = re.search(r"os error (\d+)", str(error)) if not isinstance(error, OSError) else None
        if found:
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(directory)) from error
        raise


@contextmanager
def staged_file(path: str | Path) -> Iterator[Path]:
    """Gives the path of a new file to write; it becomes `path`, in one step, when the block ends without an error.

    After an error it is removed, and a file that was there is untouched.

    Raises:
        OSError: the disk is full, or the file cannot be written.
    """
    path = Path(os.path.abspath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: str | Path, value: Any) -> None:
    """Writes a value as indented JSON (UTF-8), replacing the file in one step. NaN and infinities become null.

    Raises:
        OSError: the file cannot be written; one that was there is untouched.
    """
    with staged_file(path) as temporary:
        temporary.write_text(format_json(value) + "\n", encoding="utf-8")


def format_json(value: Any) -> str:
    """Gives a value as indented JSON; NaN and infinities, which JSON does not have, become null."""
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    # Lists of numbers on one line each. Strings in JSON hold no raw line breaks, so that none can match.
    return re.sub(r"\[\n([^\[\]{}\"]*)\]", lambda found: f"[{' '.join(found[1].split())}]", text)


def check_output_file(option: str, path: str | Path) -> None:
    """Checks, before the work begins, that a file can be written there. Nothing is written.

    Args:
        option: what the user calls it, for the message.
        path: the file to be.

    Raises:
        ValueError: its folder does not exist or cannot be written, or `path` is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{option} must be a file, got the folder {str(path)!r}: name a file inside it")
    if not path.parent.is_dir():
        raise ValueError(f"{option} must lie in an existing folder, got {str(path)!r}: make its folder first")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{option} must be writable, got {str(path)!r}: choose a folder that you may write to")


def check_output_directory(option: str, path: str | Path) -> None:
    """Checks, before the work begins, that a folder can be made or filled there. Nothing is written.

    Args:
        option: what the user calls it, for the message.
        path: the folder to be.

    Raises:
        ValueError: `path` is a file, or the nearest folder that exists cannot be written.
    """
    path = Path(os.path.abspath(path))
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not existing.is_dir():
        raise ValueError(f"{option} must be a folder, got {str(path)!r} ({existing.name} is a file): choose another")
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{option} must be writable, got {str(path)!r}: choose a folder that you may write to")


def is_disk_full(error: OSError) -> bool:
    """Says whether an error means that the disk, or one's share of it, is used up."""
    return error.errno in (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))


def _make_parents(directory: Path) -> list[Path]:
    """Makes the folders above `directory`; returns those that were not there, the deepest first."""
    missing = [parent for parent in directory.parents if not parent.exists()]
    directory.parent.mkdir(parents=True, exist_ok=True)
    return missing


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
