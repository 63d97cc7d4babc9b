"""The checkpoint of an unfinished reading: its file, its folder, and the lock of that folder.

A checkpoint is written to a temporary file, flushed and renamed, so that a kill, a full disk or a power cut leaves one
that can be loaded. It is loaded with `weights_only`: it holds tensors and plain values, and runs no code.
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
]
__all__ += ["remove", "save"]

CHECKPOINT_FOLDER = "checkpoint"  # in a memory's folder: an unfinished reading
CHECKPOINT = "checkpoint.pt"
UNFINISHED = "checkpoint.tmp"
LOCK = "checkpoint.lock"
_KIND, _VERSION = "locas-checkpoint", 10


def has_checkpoint(directory: str | Path) -> bool:
    return (Path(directory) / CHECKPOINT).exists()


def save(directory: str | Path, state: dict[str, Any]) -> Path:
    """Write tensors and plain values (also nested) into a folder, in place of its former checkpoint; return the path.

    An `OSError` leaves the former checkpoint as it is and nothing half-written.
    """
    _check_plain(state)
    path, unfinished = Path(directory) / CHECKPOINT, Path(directory) / UNFINISHED
    content = (
        io.BytesIO()
    )  # torch.save reports a full disk in its own way; a file's write raises an OSError
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

    A file that is damaged, not a checkpoint of ours, or of another version is a `ValueError`.
    """
    path = Path(directory) / CHECKPOINT
    if not path.exists():
        return None
    if not path.is_file():
        raise ValueError(
            f"checkpoint must be a file, got {str(path)!r}: remove it, or choose another folder"
        )
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and torch raise errors of many types
        raise damaged(directory, error) from None
    if not isinstance(found, dict) or found.get("kind") != _KIND:
        raise ValueError(
            f"checkpoint must be written by locas_peft, got {str(path)!r}: choose another folder"
        )
    if found.get("version") != _VERSION:
        remedy = "load it with the locas_peft that wrote it, or delete it to start afresh"
        got = f"{found.get('version')} in {str(path)!r}"
        raise ValueError(f"checkpoint must be of version {_VERSION}, got {got}: {remedy}")
    return found["state"]


def damaged(directory: str | Path, error: Exception) -> ValueError:
    """Return the error for a checkpoint that cannot be used."""
    reason = " ".join(str(error).split())[:200]
    found = (
        f"the damaged file {str(Path(directory) / CHECKPOINT)!r} ({type(error).__name__}: {reason})"
    )
    return ValueError(f"checkpoint must be whole, got {found}: delete it to start afresh")


def remove(directory: str | Path) -> None:
    """Delete a folder's checkpoint, and the temporary file of a writer that was killed."""
    for name in (
        UNFINISHED,
        CHECKPOINT,
    ):  # a folder without a checkpoint then has no other file of one
        (Path(directory) / name).unlink(missing_ok=True)


def _explain(error: OSError, directory: Path) -> OSError:
    what = f"checkpoint folder must be writable, got {str(directory)!r} ({error.strerror or error})"
    explained = OSError(
        f"{what}: free some space or choose another folder; a former checkpoint stands as it was"
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
        found = f"a {type(value).__name__} in the optimizer's state: use an optimizer without such objects"
        raise ValueError(f"checkpoint must hold tensors and plain values, got {found}")


class InUse(ValueError):
    """Another process, or another holder in this one, has a lock."""


@contextmanager
def locked(directory: str | Path) -> Iterator[Path]:
    """Hold a checkpoint's folder for one writer within the context; `InUse` if another reading holds it.

    The folder is made where it is missing. Afterwards it is removed where it is empty, with parents that were made.
    """
    directory = Path(directory)
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        with ExitStack() as stack:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                stack.enter_context(held(directory / LOCK))
            except InUse:
                found = f"{str(directory)!r}, which another reading is using"
                remedy = "wait for it, or choose another folder"
                raise InUse(
                    f"checkpoint folder must have one writer, got {found}: {remedy}"
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
    """Hold a lock file within the context, and at most until the process ends, in whatever way; then remove it.

    Where another one holds it, wait, or else raise `InUse`.
    """
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        raise InUse(f"{str(path)!r} must have one holder, got another one: wait for it") from None
    file = os.stat(path)
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes no open file
            # Not the lock of a later holder, after the folder was removed. While it is held: filelock then refuses a
            # process that has opened the same file in between.
            if os.path.samestat(os.stat(path), file):
                os.unlink(path)
        lock.release()
