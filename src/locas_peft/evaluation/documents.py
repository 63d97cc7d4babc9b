"""Documents by name: from text files, folders of them, or a column of a dataset."""

import re
from collections.abc import Sequence
from pathlib import Path

from ..files import fold_name, is_name_character, is_reserved, normalize_name
from ..library.table import load_rows
from ..text import load_text

__all__ = ["load_column", "load_documents"]


def load_documents(sources: Sequence[str], limit: int | None = None) -> dict[str, str]:
    """Load text files, and the `.txt` files of folders, by their names without suffix.

    Args:
        sources: files, folders, or "-" for stdin.
        limit: how many are loaded; None for all.

    Raises:
        ValueError: a folder has no text, or two files have the same name.
    """
    paths: list[str | Path] = []
    for source in sources:
        paths += _list_files(source)
    texts = {}
    taken = set()
    for path in paths[:limit]:
        name = "stdin" if path == "-" else _as_name(Path(path).stem)
        if fold_name(name) in taken:
            raise ValueError(
                f"documents must have different names, got {name!r} twice: rename {str(path)!r}"
            )
        taken.add(fold_name(name))
        texts[name] = load_text(path)
    return texts


def _list_files(source: str) -> list[str | Path]:
    """Return the files that a source names."""
    if source == "-" or not Path(source).is_dir():
        return [source]
    files: list[str | Path] = []
    files += sorted(Path(source).glob("*.txt"))
    if not files:
        raise ValueError(
            f"folder must hold .txt files, got none in {source!r}: name another, or a file"
        )
    return files


def load_column(dataset: str, split: str, column: str, limit: int | None = None) -> dict[str, str]:
    """Load the texts of a dataset's column, named by split and row: "test-0", "test-1", ...

    Args:
        dataset: a folder, or a name on the hub (see `load_rows`).
        split: of the dataset.
        column: where the texts are.
        limit: how many are loaded; None for all.

    Raises:
        ValueError: there is no such column, or it has no texts.
    """
    texts: dict[str, str] = {}
    for number, row in enumerate(load_rows(dataset, split)):
        if limit is not None and len(texts) >= limit:
            break
        if column not in row:
            raise ValueError(
                f"column must be one of {', '.join(row)}, got {column!r}: choose one of them"
            )
        text = row[column]
        if isinstance(text, str) and text.strip():
            texts[f"{_as_name(split)}-{number}"] = text
    if not texts:
        raise ValueError(
            f"dataset must hold texts, got none in {column!r} of {dataset!r}: choose another column"
        )
    return texts


def _as_name(text: str) -> str:
    """Return a text as the name of a file on every system."""
    characters = []
    for character in normalize_name(text):
        is_allowed = character in ".-" or is_name_character(character)
        characters.append(character if is_allowed else " ")
    # One for each run of characters that a name cannot have.
    name = re.sub(" +", "_", "".join(characters)).strip(".") or "document"
    # "x.json" is the file of the result of "x", and would be the folder of the memory of "x.json".
    name = re.sub(r"(?i)\.(json|lock|unfinished)$", r"_\1", name)
    return f"{name}_" if is_reserved(name) else name
