"""One file that holds a long run's whole state, written so that it is either the former one or the new one.

Tensors and JSON in a single safetensors file: nothing is ever unpickled. `write` fills a temporary file beside the
checkpoint, brings it to the disk and renames it over the former one; a kill, a full disk or a power cut at any
moment leaves a checkpoint that can be read. `Lock` keeps a second process from writing to the same folder.
"""

from __future__ import annotations

import json
import os
import weakref
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows has no flock: there the folder stays unguarded
    fcntl = None

CHECKPOINT = "checkpoint.safetensors"
UNFINISHED = "checkpoint.tmp"
LOCK = "checkpoint.lock"
_KIND = "locas-checkpoint"
_VERSION = 2


def write(directory: str | Path, tensors: dict[str, Tensor], state: dict) -> Path:
    """Writes a checkpoint into a folder, in place of the former one; the folder is made where it is missing.

    Args:
        directory: the folder.
        tensors: any dtype and device; none may share its memory with another.
        state: what JSON can hold; floats come back bit for bit.

    Returns:
        The checkpoint's path.

    Raises:
        OSError: where the disk is full or the folder cannot be written; the former checkpoint still stands then and
            nothing half-written is left.
    """
    path = Path(directory) / CHECKPOINT
    unfinished = path.with_name(UNFINISHED)
    metadata = {"kind": _KIND, "version": str(_VERSION), "state": json.dumps(state)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, metadata=metadata)
        _bring_to_disk(unfinished)
        os.replace(unfinished, path)
        _bring_to_disk(path.parent)
    except (OSError, SafetensorError) as error:
        raise _explained(error, path.parent) from error
    finally:
        _remove(unfinished)
    return path


def read(directory: str | Path) -> tuple[dict[str, Tensor], dict] | None:
    """Reads the checkpoint of a folder.

    Args:
        directory: the folder.

    Returns:
        (tensors on the CPU, state) as given to `write`, or None where there is no checkpoint.

    Raises:
        ValueError: where the file is damaged, no checkpoint of ours, or from a later version.
    """
    path = Path(directory) / CHECKPOINT
    if not path.exists():
        return None
    if not path.is_file():
        raise ValueError(f"checkpoint must be a file, got {str(path)!r}: remove it, or choose another folder")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != _KIND:
                raise ValueError(f"checkpoint must be written by locas_peft, got {str(path)!r}: choose another folder")
            if metadata["version"] != str(_VERSION):
                raise ValueError(
                    f"checkpoint must be of version {_VERSION}, got {metadata['version']} in {str(path)!r}: "
                    "read it with the locas_peft that wrote it, or delete it to start afresh"
                )
            names = list(file.keys())
            # Clones: the tensors that safe_open gives may lie in the mapped file itself.
            return {name: file.get_tensor(name).clone() for name in names}, json.loads(metadata["state"])
    except (SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise ValueError(
            f"checkpoint must be whole, got the damaged file {str(path)!r} ({error}): delete it to start afresh"
        ) from None


def remove(directory: str | Path) -> None:
    """Takes a folder's checkpoint away, and what a killed writer left of one; the folder and its lock stay.

    Raises:
        OSError: the folder cannot be written.
    """
    for name in (CHECKPOINT, UNFINISHED):
        (Path(directory) / name).unlink(missing_ok=True)


class InUse(ValueError):
    """Another writer holds a checkpoint's folder."""


class Lock:
    """Holds a folder's checkpoint for one writer, from its making until `release` or the end of the process.

    The operating system drops the lock with the process that held it, however that ended: there are no stale ones.
    Where there is no `fcntl` (Windows) nothing is locked, nor made.

    Args:
        directory: the folder; made where it is missing.

    Raises:
        InUse: where another process, or another trainer of this one, holds it.
        OSError: where the folder cannot be written.
    """

    def __init__(self, directory: str | Path):
        self._path = Path(directory) / LOCK
        self._release = lambda: None
        if fcntl is None:
            return
        try:
            self._release = weakref.finalize(self, _let_go, self._acquire(), self._path)
        except BlockingIOError:
            raise InUse(
                f"checkpoint folder must have one writer, got {str(self._path.parent)!r} which process "
                f"{self._holder()} is using: wait for it, or choose another folder"
            ) from None
        except OSError as error:
            raise _explained(error, self._path.parent) from error

    def release(self) -> None:
        """Gives the folder free; a second call does nothing. It happens by itself when the lock is forgotten."""
        self._release()

    def _acquire(self) -> IO:
        for attempt in count():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                file = open(self._path, "a+", encoding="ascii")  # noqa: SIM115 - it stays open while the lock is held
            except FileNotFoundError:  # a former holder has just taken the folder away
                if attempt == 100:
                    raise
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_current(file, self._path):
                    with suppress(OSError):  # a full disk: the number serves a message only
                        os.ftruncate(file.fileno(), 0)
                        os.write(file.fileno(), str(os.getpid()).encode("ascii"))
                    return file
            except BaseException:
                file.close()
                raise
            file.close()

    def _holder(self) -> str:
        try:
            return self._path.read_text(encoding="ascii").strip() or "of unknown number"
        except OSError:
            return "of unknown number"


def _explained(error: Exception, directory: Path) -> OSError:
    reason = getattr(error, "strerror", None) or str(error)
    failure = OSError(
        f"checkpoint folder must be writable, got {str(directory)!r} ({reason}): "
        "free some space or choose another folder; a former checkpoint stands as it was"
    )
    failure.errno = getattr(error, "errno", None)
    return failure


def _bring_to_disk(path: Path) -> None:
    if path.is_dir():
        if os.name != "posix":  # a folder's entries can be flushed by name on POSIX systems only
            return
        descriptor = os.open(path, os.O_RDONLY)
    else:
        descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_current(file: IO, path: Path) -> bool:
    """Whether an open file is still the one of that name: another may have removed it, or put one in its place."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _let_go(file: IO, path: Path) -> None:
    if _is_current(file, path):
        _remove(path)
    file.close()


def _remove(path: Path) -> None:
    with suppress(OSError):
        os.unlink(path)
