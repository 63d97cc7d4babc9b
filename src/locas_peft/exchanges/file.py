"""Exchanges of a question and its answer, and the file that holds them."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..files import fold_name, load_json_lines, staged_file

__all__ = [
    "EXCHANGES",
    "Exchange",
    "correct",
    "digest_exchanges",
    "load_exchanges",
    "save_exchanges",
]

EXCHANGES = "exchanges.jsonl"
"""The file in a memory's folder with the exchanges that it has learned."""


@dataclass(frozen=True)
class Exchange:
    """A question and its answer: a passage, or what a user gives. For the subject see `Passage`."""

    question: str
    answer: str
    subject: str = ""


def correct(earlier: Sequence[Exchange], exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Return exchanges, and after them the earlier ones whose questions they do not ask.

    Questions are compared word for word, whatever their case and the form of their accents.
    """
    asked = {_fold(exchange.question) for exchange in exchanges}
    others = [exchange for exchange in earlier if _fold(exchange.question) not in asked]
    return [*exchanges, *others]


def _fold(question: str) -> str:
    return fold_name(" ".join(question.split()))


def load_exchanges(path: str | Path) -> list[Exchange]:
    """Load exchanges from a JSON Lines file.

    Each line is an object with `question`, `answer` and maybe `subject`. Errors are those of
    `files.load_json_lines`.
    """
    return load_json_lines(path, _parse_exchange, "exchanges", "the texts `question` and `answer`")


def _parse_exchange(value: dict[str, Any]) -> Exchange:
    question = value["question"]
    answer = value["answer"]
    subject = value.get("subject", "")
    if not all(isinstance(field, str) for field in (question, answer, subject)):
        raise TypeError
    if not question.strip() or not answer.strip():
        raise TypeError
    return Exchange(question, answer, subject.strip())


def save_exchanges(path: str | Path, exchanges: Iterable[Exchange]) -> None:
    """Write exchanges as JSON Lines, whole or not at all."""
    with staged_file(path) as new:
        # The same bytes on every system: they are digested.
        new.write_text(_format(exchanges), encoding="utf-8", newline="\n")


def digest_exchanges(exchanges: Sequence[Exchange]) -> str:
    """Return the SHA-256 of the exchanges' file."""
    return hashlib.sha256(_format(exchanges).encode("utf-8", "surrogatepass")).hexdigest()


def _format(exchanges: Iterable[Exchange]) -> str:
    lines = [json.dumps(asdict(exchange), ensure_ascii=False) for exchange in exchanges]
    return "".join(f"{line}\n" for line in lines)
