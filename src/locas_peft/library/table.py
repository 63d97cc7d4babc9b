"""A table of documents: each is taught into a memory of its own in a library, by any number of processes.

What is finished is skipped, what was interrupted goes on, and what fails is listed while the rest goes on.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..checks import first_line, import_extra
from ..files import is_disk_full, parse_json_lines, staged_file
from ..memories.checkpoint import InUse, held
from ..progress import Progress, silent
from ..reading import ReadingSettings
from ..text import load_text, unwrap
from ..units import share
from .library import FAILURES, Library, check_name
from .routing import make_sample

__all__ = ["FAILURES", "Document", "load_rows", "load_table", "teach_table"]

SETTINGS = tuple(name for name in vars(ReadingSettings()) if name not in ("model", "dtype"))
_OPTIONS = {"lr": "learning_rate", "layers": "layers_to_transform", "width": "r"}
_FORMATS = {".csv": "csv", ".json": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class Document:
    """A row of a table: its line, from 1, the memory's name, the text or its file, how that is read, or an error."""

    line: int
    name: str | None
    text: str | Path = ""
    settings: ReadingSettings = ReadingSettings()
    error: str = ""

    def load(self) -> str:
        """Return the text; a row or a file that cannot be used is a `ValueError`."""
        if self.error:
            raise ValueError(self.error)
        return self.text if isinstance(self.text, str) else load_text(self.text)


def load_table(source: str, settings: ReadingSettings) -> list[Document]:
    """Load a table of documents; one that cannot be read, or has no rows, is a `ValueError`.

    Args:
        source: a JSON Lines file (.jsonl), or another table (see `load_rows`). A row has `name`, and `text` or `path`,
            which is relative to the table's folder. Its other values are its own settings, by the names of
            `ReadingSettings` or of the command's options. In other tables than JSON Lines, other columns are ignored.
        settings: for what a row does not set.
    """
    folder, documents, known = Path(source).parent, [], {"name", "text", "path", *SETTINGS, *_OPTIONS}
    lines = Path(source).suffix == ".jsonl"
    rows = parse_json_lines(load_text(source).split("\n"), dict) if lines else enumerate(load_rows(source), 1)
    for line, row in rows:
        try:
            given = {key: value for key, value in (row or {}).items() if lines or key in known}
            given = {_OPTIONS.get(key, key): value for key, value in given.items() if value is not None}
            name, text, file = (given.pop(key, None) for key in ("name", "text", "path"))
            if name is None or not isinstance(text or file, str) or (text is None) == (file is None):
                raise ValueError("each line must have name, and either text or path: correct or delete it")
            if unknown := sorted(given.keys() - set(SETTINGS)):
                raise ValueError(f"settings must be those of locas memorize, got {unknown[0]!r}: see its --help")
            if given.get("method") == "none":
                raise ValueError("method must be one that learns, got 'none': choose another")
            documents.append(Document(line, check_name(str(name)), text or folder / file, replace(settings, **given)))
        except (ValueError, TypeError) as error:
            documents.append(Document(line, row and row.get("name") and str(row["name"]), error=first_line(error)))
    if not documents:
        raise ValueError(f"table must have a document a row, got none in {source!r}: add one")
    counts = Counter((each.name or "").casefold() for each in documents if not each.error)
    twice = "name must be that of one row alone, whatever its case, got it twice: rename one"
    return [replace(each, error=twice) if counts[(each.name or "").casefold()] > 1 else each for each in documents]


def load_rows(source: str, split: str = "train") -> Iterator[dict[str, Any]]:
    """Yield the rows of a .csv, .json or .parquet file, or of a dataset in a folder or on the hub, as they are needed.

    A `ValueError` if there is none, or if `datasets` is not installed.
    """
    datasets, kind = import_extra("datasets", what="a table"), _FORMATS.get(Path(source).suffix)
    found = {"path": source, "split": split} if kind is None else {"path": kind, "data_files": source}
    try:
        yield from datasets.load_dataset(**{"split": "train", "streaming": True, **found})
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"dataset {source!r} cannot be read ({first_line(error)}): check name and split") from error


def teach_table(
    library: Library,
    base: PreTrainedModel,
    tokenizer: Any,
    documents: Sequence[Document],
    *,
    unwrapped: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> list[dict[str, Any]]:
    """Teach each document into a memory of its name; return the rows of `FAILURES`.

    Processes that do this with the same documents at once share them. A full disk ends it with its `OSError`.

    With `unwrapped`, hard-wrapped lines are joined to paragraphs first. The progress has one line for all documents.
    The other options are those of `reading.memorize`; `overwrite` replaces what was made of other texts or settings.
    """
    file, began, done, taught = library.folder / FAILURES, time.monotonic(), 0, 0
    new, failures = {each.name for each in documents if not each.error} - set(library.list()), {}

    def save_failures() -> list[dict[str, Any]]:
        """Write what failed here, and what failed in other processes and was not tried here yet; return it."""
        with held(library.folder / f".{FAILURES}.lock", wait=True):
            written = file.read_text(encoding="utf-8").split("\n") if file.is_file() else []
            there = [row for _, row in parse_json_lines(written, dict) if row and row.get("name") in new]
            found = [each for _, each in sorted(({each["line"]: each for each in there} | failures).items())]
            with staged_file(file) as temporary:
                temporary.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in found), "utf-8")
            if not found:
                file.unlink()
        return found

    def make(document: Document) -> str:
        nonlocal done, taught
        try:
            content = document.load()
            text, given = unwrap(content) if unwrapped else content, {"sample": make_sample(content), **options}
            library.add(base, tokenizer, text, document.name, document.settings, resume=True, **given)
            done, taught = done + 1, taught + (document.name in new)
        except Exception as error:
            if isinstance(error, InUse) or (isinstance(error, OSError) and is_disk_full(error)):
                raise
            message = first_line(error) if isinstance(error, ValueError | TypeError | OSError) else repr(error)
            failures[document.line] = {"line": document.line, "name": document.name, "error": message}
            save_failures()
        new.discard(document.name)
        hours = (time.monotonic() - began) / 3600
        speed = f", {taught / hours:,.0f} an hour, {hours * len(new) / taught:.1f} hours left" if taught else ""
        return f"{done} done, {len(failures)} failed{speed}"

    share(documents, make, progress, "documents")
    return save_failures()
