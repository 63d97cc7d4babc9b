"""Documents by name: from text files, folders of them, or a column of a dataset."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..checks import first_line, import_extra
from ..text import load_text

__all__ = ["load_column", "load_documents"]


def load_documents(sources: Sequence[str], limit: int | None = None) -> dict[str, str]:
    """Load the first `limit` of text files (`-` is stdin), and of the `.txt` files of folders, by name without suffix.

    A folder without text, and two files with the same name, are a `ValueError`.
    """
    paths, texts = [], {}
    for source in sources:
        found = sorted(Path(source).glob("*.txt")) if source != "-" and Path(source).is_dir() else [source]
        if not found:
            raise ValueError(f"folder must hold .txt files, got none in {source!r}: name another, or a file")
        paths += found
    for path in paths[:limit]:
        name = "stdin" if path == "-" else _as_name(Path(path).stem)
        if name in texts:
            raise ValueError(f"documents must have different names, got {name!r} twice: rename {str(path)!r}")
        texts[name] = load_text(path)
    return texts


def load_column(dataset: str, split: str, column: str, limit: int | None = None) -> dict[str, str]:
    """Load the first `limit` documents of a dataset's column, named "test-0", "test-1", ... for the split "test".

    `dataset` is a name on the hub, or a folder that `datasets` can load. What is beyond the limit is not downloaded.

    Raises:
        ValueError: the dataset, split or column does not exist, has no text, or `datasets` is not installed.
    """
    datasets, texts = import_extra("datasets"), {}
    try:
        for number, row in enumerate(datasets.load_dataset(dataset, split=split, streaming=True)):
            if limit is not None and len(texts) >= limit:
                break
            if column not in row:
                raise ValueError(f"column must be one of {', '.join(row)}, got {column!r}")
            if isinstance(row[column], str) and row[column].strip():
                texts[f"{_as_name(split)}-{number}"] = row[column]
    except (OSError, ValueError, KeyError) as error:
        reason = first_line(error)
        raise ValueError(f"dataset {dataset!r} cannot be read ({reason}): check name, split and column") from error
    if not texts:
        raise ValueError(f"dataset must hold texts, got none in {column!r} of {dataset!r}: choose another column")
    return texts


def _as_name(text: str) -> str:
    """Replace the characters that a file's name cannot have on some system."""
    return re.sub(r"[^\w.-]+", "_", text).strip(".") or "document"
