"""The state of an unfinished reading in one file, and the lock of its folder.

A checkpoint is written to a temporary file, flushed and renamed, so that a kill, a full disk or a power cut leaves one
that can be loaded. It is loaded with `weights_only`: it holds tensors and plain values, and runs no code.
"""

from __future__ import annotations

import io
import os
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

__all__ = ["CHECKPOINT", "InUse", "Lock", "damaged", "has_checkpoint", "load", "locked", "remove", "save"]

CHECKPOINT = "checkpoint.pt"
UNFINISHED = "checkpoint.tmp"
LOCK = "checkpoint.lock"
_KIND, _VERSION = "locas-checkpoint", 6


def has_checkpoint(directory: str | Path) -> bool:
    return (Path(directory) / CHECKPOINT).exists()


def save(directory: str | Path, state: dict[str, Any]) -> Path:
    """Write tensors and plain values (also nested) into a folder, in place of its former checkpoint; return the path.

    Raises:
        ValueError: `state` holds something else.
        OSError: the folder cannot be written; the former checkpoint stands and nothing half-written is left.
    """
    _check_plain(state)
    path, unfinished = Path(directory) / CHECKPOINT, Path(directory) / UNFINISHED
    content = io.BytesIO()  # torch.save reports a full disk in its own way; a file's write raises an OSError
    torch.save({"kind": _KIND, "version": _VERSION, "state": state}, content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.unlink(missing_ok=True)  # a link: its target would be overwritten
        with open(unfinished, "xb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise _explain(error, path.parent) from error
    finally:
        with suppress(OSError):
            unfinished.unlink()
    return path


def load(directory: str | Path) -> dict[str, Any] | None:
    """Load the state that was given to `save`, its tensors onto the CPU; None where there is no checkpoint.

    Raises:
        ValueError: the file is damaged, not a checkpoint of ours, or of another version.
    """
    path = Path(directory) / CHECKPOINT
    if not path.exists():
        return None
    if not path.is_file():
        raise ValueError(f"checkpoint must be a file, got {str(path)!r}: remove it, or choose another folder")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and torch raise errors of many types
        raise damaged(directory, error) from None
    if not isinstance(found, dict) or found.get("kind") != _KIND:
        raise ValueError(f"checkpoint must be written by locas_peft, got {str(path)!r}: choose another folder")
    if found.get("version") != _VERSION:
        raise ValueError(
            f"checkpoint must be of version {_VERSION}, got {found.get('version')} in {str(path)!r}: "
            "load it with the locas_peft that wrote it, or delete it to start afresh"
        )
    return found["state"]


def damaged(directory: str | Path, error: Exception) -> ValueError:
    """Return the error for a checkpoint that cannot be used."""
    reason = " ".join(str(error).split())[:200]
    return ValueError(
        f"checkpoint must be whole, got the damaged file {str(Path(directory) / CHECKPOINT)!r} "
        f"({type(error).__name__}: {reason}): delete it to start afresh"
    )


def remove(directory: str | Path) -> None:
    """Delete a folder's checkpoint, and the temporary file of a writer that was killed."""
    for name in (UNFINISHED, CHECKPOINT):  # a folder without a checkpoint then has no other file of one
        (Path(directory) / name).unlink(missing_ok=True)


class InUse(ValueError):
    """Another writer holds a checkpoint's folder."""


class Lock:
    """Holds a folder (`directory`) for one writer, until `close` or the end of the process, in whatever way it ends.

    Raises:
        InUse: another process, or another trainer of this one, holds it.
        OSError: the folder cannot be made or written.
    """

    def __init__(self, directory: str | Path):
        self.directory = directory = Path(directory)
        lock = FileLock(directory / LOCK, timeout=0, thread_local=False)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            file = os.stat(lock.lock_file)
        except Timeout:
            raise InUse(
                f"checkpoint folder must have one writer, got {str(directory)!r}, which another reading is using: "
                "wait for it, or choose another folder"
            ) from None
        except OSError as error:
            raise _explain(error, directory) from error
        self._release = weakref.finalize(self, _release, lock, file)

    def close(self) -> None:
        """Free the folder; a second call does nothing."""
        self._release()


def _release(lock: FileLock, file: os.stat_result) -> None:
    with suppress(OSError):
        # Not the lock of a later holder, after the folder was removed. While it is held: filelock then refuses a
        # process that has opened the same file in between.
        if os.path.samestat(os.stat(lock.lock_file), file):
            os.unlink(lock.lock_file)
    lock.release()


def _explain(error: OSError, directory: Path) -> OSError:
    explained = OSError(
        f"checkpoint folder must be writable, got {str(directory)!r} ({error.strerror or error}): "
        "free some space or choose another folder; a former checkpoint stands as it was"
    )
    explained.errno = error.errno  # given to the constructor, it would stand in the message
    return explained


def _check_plain(value: Any) -> None:
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(item)
    elif value is not None and not isinstance(value, (torch.Tensor, bool, int, float, str)):
        raise ValueError(
            f"checkpoint must hold tensors and plain values, got a {type(value).__name__} in the optimizer's state: "
            "use an optimizer without such objects"
        )


@contextmanager
def locked(directory: str | Path) -> Iterator[Lock]:
    """Lock a checkpoint's folder; afterwards remove it where it is empty, and the parents that were made for it."""
    directory = Path(directory)
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        with closing(Lock(directory)) as lock:
            yield lock
    finally:
        for folder in dict.fromkeys((directory, *made)):
            with suppress(OSError):
                folder.rmdir()
