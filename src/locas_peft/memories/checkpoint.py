"""The checkpoint of an unfinished reading or study: its file, its folder, and the folder's lock.

A checkpoint is written to a temporary file, flushed and renamed, so that a kill, a full disk or a
power cut leaves one that can be loaded. It is loaded with `weights_only`: it holds tensors and
plain values, and runs no code.

This module imports nothing of the package, so that a process that only holds a lock starts at once.
"""

import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

__all__ = [
    "CHECKPOINT",
    "CHECKPOINT_FOLDER",
    "LOCK",
    "InUse",
    "damaged",
    "has_checkpoint",
    "held",
    "load",
    "locked",
    "remove",
    "save",
]

CHECKPOINT_FOLDER = "checkpoint"
"""In a memory's folder: the folder of an unfinished reading or study."""
CHECKPOINT = "checkpoint.pt"
UNFINISHED = "checkpoint.tmp"
LOCK = "checkpoint.lock"
_KIND = "locas-checkpoint"
_VERSION = 10
_PLAIN_TYPES = (torch.Tensor, bool, int, float, str)


def has_checkpoint(directory: str | Path) -> bool:
    """Return whether a folder holds a checkpoint."""
    return (Path(directory) / CHECKPOINT).exists()


def save(directory: str | Path, state: dict[str, Any]) -> Path:
    """Write tensors and plain values, also nested, into a folder; return the checkpoint's path.

    It takes the place of the former checkpoint. An `OSError` leaves the former checkpoint as it is
    and nothing half-written.
    """
    _check_plain(state)
    path = Path(directory) / CHECKPOINT
    unfinished = Path(directory) / UNFINISHED
    # torch.save reports a full disk in its own way; a file's write raises an OSError.
    content = io.BytesIO()
    torch.save({"kind": _KIND, "version": _VERSION, "state": state}, content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # It may be a link, whose target would be overwritten.
        unfinished.unlink(missing_ok=True)
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
    """Load the state that was given to `save`; None where there is no checkpoint.

    Its tensors are on the CPU.

    Raises:
        ValueError: the file is damaged, not a checkpoint of this package, or of another version.
    """
    path = Path(directory) / CHECKPOINT
    name = repr(str(path))
    if not path.exists():
        return None
    if not path.is_file():
        raise ValueError(
            f"checkpoint must be a file, got {name}: remove it, or choose another folder"
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    # zip, pickle and torch raise errors of many types.
    except Exception as error:
        # Without memory, a file that may be whole.
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise
        raise damaged(directory, error) from None
    if not isinstance(content, dict) or content.get("kind") != _KIND:
        raise ValueError(
            f"checkpoint must be written by locas_peft, got {name}: choose another folder"
        )
    version = content.get("version")
    if version != _VERSION:
        remedy = "load it with the locas_peft that wrote it, or delete it to start afresh"
        raise ValueError(
            f"checkpoint must be of version {_VERSION}, got {version} in {name}: {remedy}"
        )
    return content["state"]


def damaged(directory: str | Path, error: Exception) -> ValueError:
    """Return the error for a checkpoint that cannot be used."""
    path = Path(directory) / CHECKPOINT
    reason = " ".join(str(error).split())[:200]
    got = f"the damaged file {str(path)!r} ({type(error).__name__}: {reason})"
    return ValueError(f"checkpoint must be whole, got {got}: delete it to start afresh")


def remove(directory: str | Path) -> None:
    """Delete a folder's checkpoint, and the temporary file of a writer that was killed."""
    # In this order: a folder without a checkpoint then has no other file of one.
    for name in (UNFINISHED, CHECKPOINT):
        (Path(directory) / name).unlink(missing_ok=True)


class InUse(ValueError):  # noqa: N818 - the name is used for what it says
    """Another process, or another holder in this one, has a lock."""


@contextmanager
def locked(directory: str | Path) -> Iterator[Path]:
    """Hold a checkpoint's folder for one writer within the context.

    `InUse` is raised if another one holds it. The folder is made where it is missing.
    Afterwards it is removed where it is empty, with parents that were made.
    """
    directory = Path(directory)
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        with ExitStack() as stack:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                stack.enter_context(held(directory / LOCK))
            except InUse:
                got = f"{str(directory)!r}, which another reading or study is using"
                remedy = "wait for it, or choose another folder"
                raise InUse(
                    f"checkpoint folder must have one writer, got {got}: {remedy}"
                ) from None
            except OSError as error:
                raise _explain(error, directory) from error
            yield directory
    finally:
        for folder in dict.fromkeys((directory, *made)):
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def held(path: str | Path, wait: bool = False) -> Iterator[None]:
    """Hold a lock file within the context, then remove it.

    The lock is free again when the process ends, in whatever way. Where another one holds it, wait,
    or else raise `InUse`.
    """
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        raise InUse(f"{str(path)!r} must have one holder, got another one: wait for it") from None
    own_file = os.stat(path)
    try:
        yield
    finally:
        # Windows removes no open file.
        with suppress(OSError):
            # Not the lock of a later holder, after the folder was removed. While it is held:
            # filelock then refuses a process that has opened the same file in between.
            if os.path.samestat(os.stat(path), own_file):
                os.unlink(path)
        lock.release()


def _explain(error: OSError, directory: Path) -> OSError:
    """Return an error of the disk whose message names the folder and the remedy."""
    got = f"{str(directory)!r} ({error.strerror or error})"
    remedy = "free some space or choose another folder; a former checkpoint stands as it was"
    explained = OSError(f"checkpoint folder must be writable, got {got}: {remedy}")
    # Given to the constructor, the number would stand in the message.
    explained.errno = error.errno
    return explained


def _check_plain(value: Any) -> None:
    """Raise a `ValueError` for a value that `load` would refuse."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(item)
    elif value is not None and not isinstance(value, _PLAIN_TYPES):
        got = f"a {type(value).__name__} in the optimizer's state"
        remedy = "use an optimizer without such objects"
        raise ValueError(f"checkpoint must hold tensors and plain values, got {got}: {remedy}")
