"""Files and folders that are written whole or not at all, and JSON.

This module imports nothing of the package, so that a process that only writes files starts at once.
"""

import errno
import json
import math
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
from huggingface_hub import cached_assets_path

T = TypeVar("T")

__all__ = [
    "check_output_directory",
    "check_output_file",
    "drop_former",
    "find_kept",
    "finish_replacement",
    "fold_name",
    "format_json",
    "is_disk_full",
    "is_name_character",
    "is_out_of_memory",
    "is_reserved",
    "is_same_folder",
    "load_json",
    "load_json_lines",
    "normalize_name",
    "parse_json_lines",
    "remove_unfinished",
    "staged",
    "staged_file",
    "write_json",
]

# A replacement of a folder's entries passes through two folders inside it. `_STAGED` appears in one
# step, complete. The old entries move into it; when they are all out of the way it becomes
# `_MOVING`, and the new entries move up.
_STAGED = ".locas-staged"
_MOVING = ".locas-moving"
_OLD = ".old"
# In the new folder: its files have the names of the old entries that get no successor.
_GONE = ".gone"
_MOST_LINES_SHOWN = 20
# What Windows keeps for its devices, whatever the case and the suffix. It reads superscript digits
# as digits.
_PORTS = {f"{port}{digit}" for port in ("COM", "LPT") for digit in "123456789\xb9\xb2\xb3"}
_RESERVED = {"CON", "PRN", "AUX", "NUL", *_PORTS}


@contextmanager
def staged(directory: str | Path) -> Iterator[Path]:
    """Yield a new folder, whose entries become those of `directory` at the end of the block.

    A folder that does not exist appears in one step. In a folder that exists, the new entries
    replace those of the same name, and all others stay. A process that is killed during the
    replacement leaves either old entries or new ones, and some may be missing. `finish_replacement`
    then moves the remaining new entries in.

    After an error the new folder is removed, with the parent folders that were made for it. At most
    one process may fill a folder at a time. Errors of the disk, also those that safetensors reports
    in its own type, are an `OSError`.
    """
    directory = Path(os.path.abspath(directory))
    missing_parents = [parent for parent in directory.parents if not parent.exists()]
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Beside a new folder, inside an existing one: a mounted volume is another disk than its parent.
    if directory.is_dir():
        home = directory
        prefix = "."
    else:
        home = directory.parent
        prefix = f".{directory.name}."
    new = home / f"{prefix}{os.getpid()}.partial"
    try:
        finish_replacement(directory)
        _sweep(home, re.escape(prefix))
        new.mkdir()
        yield new
        for path in new.rglob("*"):
            if path.is_file():
                _write_out(path)
        if directory.exists():
            os.replace(new, directory / _STAGED)
            finish_replacement(directory)
        else:
            shutil.rmtree(new / _GONE, ignore_errors=True)
            os.replace(new, directory)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        for parent in missing_parents:
            with suppress(OSError):
                parent.rmdir()
        number = _find_disk_error(error)
        if number is not None:
            raise OSError(number, os.strerror(number), str(directory)) from error
        raise


def drop_former(folder: Path, names: Iterable[str]) -> None:
    """Let `staged` also remove former entries: those of these names, with the replacement.

    Args:
        folder: the new one, as `staged` yields it.
        names: of files that it does not have.
    """
    (folder / _GONE).mkdir()
    for name in names:
        (folder / _GONE / name).touch()


def finish_replacement(directory: str | Path) -> None:
    """Finish a replacement of a folder's entries by `staged` that was stopped midway, if any.

    Two processes may do this at the same time: each step is one rename, and a rename whose source
    or target folder is gone was done by the other process.
    """
    complete = Path(directory) / _STAGED
    moving = Path(directory) / _MOVING
    _move_in(moving)
    if not _is_own_folder(complete):
        return
    with suppress(FileNotFoundError):
        (complete / _OLD).mkdir(exist_ok=True)
    # Through a link, a folder of a stranger would move files out of itself.
    if (complete / _OLD).is_symlink() or (complete / _GONE).is_symlink():
        return
    for name in (*_list_new(complete / _GONE), *_list_new(complete)):
        with suppress(FileNotFoundError):
            os.replace(Path(directory) / name, complete / _OLD / name)
    with suppress(FileNotFoundError):
        os.replace(complete, moving)
    _move_in(moving)


def remove_unfinished(directory: str | Path) -> None:
    """Remove what `staged` and `staged_file` left inside a folder in processes that have ended."""
    _sweep(Path(directory), r"\.(?:.+\.)?")


@contextmanager
def staged_file(path: str | Path) -> Iterator[Path]:
    """Yield the path of a new file, which becomes `path`, in one step, at the end of the block.

    After an error it is removed, and a file that was there is untouched. A link stays, and its
    target is replaced.
    """
    path = Path(os.path.realpath(path))
    # A name may have 255 bytes.
    temporary = path.with_name(f".{path.name[:40]}.{os.getpid()}.partial")
    try:
        yield temporary
        _write_out(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_out(path: Path) -> None:
    """Write a file to the disk: what it replaces may be gone when the power is cut."""
    # Windows needs a file that is open for writing.
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def normalize_name(name: str) -> str:
    """Return a file's name in the form that is compared: some systems take its accents apart."""
    return unicodedata.normalize("NFC", name)


def fold_name(name: str) -> str:
    """Return what is equal for two names that are one file's on some system."""
    return normalize_name(normalize_name(name).casefold())


def is_name_character(character: str) -> bool:
    """Return whether a character is a letter or digit of any script, a mark of one, or "_"."""
    is_mark = unicodedata.category(character).startswith("M")
    return character.isalnum() or is_mark or character == "_"


def is_reserved(name: str) -> bool:
    """Return whether Windows has a device, and no file, of a name."""
    return name.partition(".")[0].rstrip(" ").upper() in _RESERVED


def find_kept(kind: str, name: str) -> Path | None:
    """Return a folder in the Hugging Face cache for what is made once on a machine.

    None where it cannot be made.
    """
    try:
        return cached_assets_path(library_name="locas_peft", namespace=kind, subfolder=name)
    except (OSError, ValueError):  # a parent cannot be written, or a file has the folder's name
        return None


def write_json(path: str | Path, value: Any) -> None:
    """Write a value by `format_json` (UTF-8), replacing the file in one step."""
    with staged_file(path) as temporary:
        # The same bytes on every system.
        temporary.write_text(format_json(value) + "\n", encoding="utf-8", newline="\n")


def load_json(path: str | Path) -> Any:
    """Load a JSON file; one that cannot be read, or is not JSON, is a `ValueError`."""
    name = repr(str(path))
    try:
        return json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        problem = f"{name} must be an existing JSON file, got none: check the path"
    except OSError as error:
        problem = f"{name} cannot be read ({error.strerror}): check the file's permissions"
    except RecursionError:
        problem = f"{name} must be JSON of ordinary depth, got deeper nesting: write it again"
    except ValueError as error:
        problem = f"{name} must be JSON ({error}): write it again"
    raise ValueError(problem)


def load_json_lines(path: str | Path, parse: Callable[[Any], T], name: str, form: str) -> list[T]:
    """Load a JSON Lines file: an object a line; blank lines are left out.

    The file is UTF-8, with or without a byte-order mark.

    Args:
        parse: makes a value of each object (see `parse_json_lines`).
        name: what the file holds, such as "questions", for the messages.
        form: what each object must have, for the messages.

    Raises:
        ValueError: the file is not UTF-8, has no line, or has broken ones, whose numbers are named.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} must be UTF-8 text, got {str(path)!r} ({error.reason}): convert it"
        ) from None
    # Not splitlines: a string may hold U+2028.
    parsed = list(parse_json_lines(text.split("\n"), parse))
    broken = [number for number, value in parsed if value is None]
    if broken:
        shown = ", ".join(map(str, broken[:_MOST_LINES_SHOWN]))
        if len(broken) > _MOST_LINES_SHOWN:
            shown += f" and {len(broken) - _MOST_LINES_SHOWN} more"
        rule = f"each line of {str(path)!r} must be a JSON object with {form}"
        them = "it" if len(broken) == 1 else "them"
        raise ValueError(f"{rule}, got something else in line {shown}: correct or delete {them}")
    if not parsed:
        raise ValueError(f"{name} must be one a line, got none in {str(path)!r}: add one")
    return [value for _, value in parsed if value is not None]


def parse_json_lines(
    lines: Iterable[str], parse: Callable[[Any], T]
) -> Iterator[tuple[int, T | None]]:
    """Yield the number of each line that is not blank, and what `parse` makes of its JSON value.

    Numbers begin at 1. None stands for a broken line: one that is not JSON, has half of a
    character, or whose value `parse` cannot use. `parse` is given an object, and raises a
    ValueError, TypeError or KeyError for one that lacks something.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            # An escape such as \ud800 alone is half of a character, which no tokenizer takes.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
            parsed = parse(value) if isinstance(value, dict) else None
        except (ValueError, TypeError, KeyError, RecursionError):
            parsed = None
        yield number, parsed


def format_json(value: Any, encoding: str = "utf-8") -> str:
    """Return a value as indented JSON; NaN and infinities become null: JSON has neither.

    Where the encoding lacks a character, all that are not ASCII are escaped, as \\u00e9.
    """
    plain = _replace_infinities(value)
    text = json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = json.dumps(plain, indent=2, allow_nan=False)
    # Each list of numbers on one line. A string in JSON holds no raw line break, so none can match.
    return re.sub(r"\[\n([^\[\]{}\"]*)\]", lambda match: f"[{' '.join(match[1].split())}]", text)


def check_output_file(option: str, path: str | Path) -> None:
    """Raise a `ValueError`, before the work begins, for a file that cannot be written.

    `option` is the name of the option that gives the file.
    """
    name = repr(str(path))
    # A link stays, and its target is replaced.
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise ValueError(f"{option} must be a file, got the folder {name}: name a file inside it")
    if path.exists() and not path.is_file():
        raise ValueError(f"{option} must be a plain file, got the device {name}: name another")
    if not path.parent.is_dir():
        raise ValueError(
            f"{option} must lie in an existing folder, got {name}: make its folder first"
        )
    check_output_directory(option, path.parent)


def check_output_directory(option: str, path: str | Path) -> None:
    """Raise a `ValueError`, before the work begins, for a folder that cannot be made or filled.

    Nothing is written. `option` is the name of the option that gives the folder.
    """
    path = Path(os.path.abspath(path))
    try:
        str(path).encode()
    except UnicodeEncodeError:
        # safetensors would refuse it after the work.
        raise ValueError(f"{option} must be valid UTF-8, got {str(path)!a}: rename it") from None
    existing = next(filter(os.path.lexists, (path, *path.parents)), None)
    if existing is None:
        # Windows has no such drive.
        raise ValueError(
            f"{option} must be on an existing drive, got {str(path)!r}: choose another"
        )
    if not existing.is_dir():
        kind = "a file" if existing.exists() else "a broken link"
        got = f"{str(path)!r} ({existing.name} is {kind})"
        raise ValueError(f"{option} must be a folder, got {got}: choose another")
    if not os.access(existing, os.W_OK):
        raise ValueError(
            f"{option} must be writable, got {str(path)!r}: choose a folder that you may write to"
        )


def is_disk_full(error: OSError) -> bool:
    """Return whether an error means that the disk, or the user's quota, is used up."""
    return error.errno in (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))


def is_same_folder(one: str | Path, other: str | Path) -> bool:
    """Return whether two paths name one folder, which need not exist."""
    return os.path.realpath(one) == os.path.realpath(other)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the memory of the machine or its device is used up."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def _find_disk_error(error: BaseException) -> int | None:
    """Return the number of a system's error that safetensors reports in its own type; or None."""
    if isinstance(error, OSError):
        return None
    match = re.search(r"os error (\d+)", str(error))
    return None if match is None else int(match[1])


def _is_own_folder(folder: Path) -> bool:
    """Return whether a folder exists and is no link: a link is not ours, and is not followed."""
    return folder.is_dir() and not folder.is_symlink()


def _move_in(moving: Path) -> None:
    """Move the entries of `_MOVING`, if there is such a folder, to the folder around it."""
    if not _is_own_folder(moving):
        return
    for name in _list_new(moving):
        with suppress(FileNotFoundError):
            os.replace(moving / name, moving.parent / name)
    shutil.rmtree(moving, ignore_errors=True)


def _list_new(folder: Path) -> list[str]:
    """Return the names of the new entries; none where another process has moved the folder on."""
    with suppress(FileNotFoundError):
        return sorted(name for name in os.listdir(folder) if name not in (_OLD, _GONE))
    return []


def _sweep(home: Path, prefix: str) -> None:
    """Remove the unfinished entries of `home` whose processes have ended.

    Those of a process that had this one's number are removed too.

    Args:
        prefix: how their names begin, before the number of the process; a regular expression.
    """
    for path in home.iterdir():
        match = re.fullmatch(rf"{prefix}(\d{{1,9}})\.partial", path.name)
        if match is None or not _has_ended(int(match[1])):
            continue
        if _is_own_folder(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _has_ended(process: int) -> bool:
    """Return whether a process that wrote a folder has ended; this one writes no other."""
    return process == os.getpid() or not psutil.pid_exists(process)


def _replace_infinities(value: Any) -> Any:
    """Return a JSON value with None in place of NaN and infinities, and with texts as keys."""
    if isinstance(value, dict):
        return {str(key): _replace_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_infinities(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
