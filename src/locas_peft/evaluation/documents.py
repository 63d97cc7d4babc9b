"""Documents by name: from text files, folders of them, or a column of a dataset."""

import re
from collections.abc import Sequence
from pathlib import Path

from ..library.table import load_rows
from ..text import load_text

__all__ = ["load_column", "load_documents"]


def load_documents(sources: Sequence[str], limit: int | None = None) -> dict[str, str]:
    """Load the first `limit` of text files (`-` is stdin), and of the `.txt` files of folders, by name without suffix.

    A folder without text, and two files with the same name, are a `ValueError`.
    """
    paths, texts = [], {}
    for source in sources:
        found = (
            sorted(Path(source).glob("*.txt"))
            if source != "-" and Path(source).is_dir()
            else [source]
        )
        if not found:
            raise ValueError(
                f"folder must hold .txt files, got none in {source!r}: name another, or a file"
            )
        paths += found
    for path in paths[:limit]:
        name = "stdin" if path == "-" else _as_name(Path(path).stem)
        if name in texts:
            raise ValueError(
                f"documents must have different names, got {name!r} twice: rename {str(path)!r}"
            )
        texts[name] = load_text(path)
    return texts


def load_column(dataset: str, split: str, column: str, limit: int | None = None) -> dict[str, str]:
    """Load the first `limit` documents of a dataset's column (see `load_rows`), named "test-0", "test-1", ...

    The names begin with the split. A column without texts is a `ValueError`.
    """
    texts: dict[str, str] = {}
    for number, row in enumerate(load_rows(dataset, split)):
        if limit is not None and len(texts) >= limit:
            break
        if column not in row:
            raise ValueError(
                f"column must be one of {', '.join(row)}, got {column!r}: choose one of them"
            )
        if isinstance(row[column], str) and row[column].strip():
            texts[f"{_as_name(split)}-{number}"] = row[column]
    if not texts:
        raise ValueError(
            f"dataset must hold texts, got none in {column!r} of {dataset!r}: choose another column"
        )
    return texts


def _as_name(text: str) -> str:
    """Replace the characters that a file's name cannot have on some system."""
    return re.sub(r"[^\w.-]+", "_", text).strip(".") or "document"
