"""The record of a memory: the stages that made it, with their settings and figures, as JSON."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from locas_settings import AdapterSettings, ReadSettings, StudySettings

from ..files import finish_replacement, load_json
from ..memories.folder import READING, RECORD
from ..memories.loading import find_files
from ..text import digest_json

__all__ = [
    "ReadRecord",
    "Record",
    "StudyRecord",
    "describe_origin",
    "load_records",
    "parse_record",
    "records_to_json",
]

Self = TypeVar("Self", bound="Record")

_DERIVED = ("stage", "settings_sha256", "tokens_per_second")


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one stage made of one text. `to_json` returns the object that `--json` writes.

    Attributes:
        settings: complete ones.
        text_sha256, base_sha256, tokenizer_sha256: of the token ids, the base's weights
            (`fingerprint`) and the tokenizer's file.
        extra_parameters: trained parameters.
        seconds: wall time of the stage's steps.
        peak_bytes: see `PeakMemory`; the base is included.
        memory_dir: the memory's folder, None where nothing was saved.
        title: of the text.
        stopped: whether the caller stopped the stage before its end.
        origin: SHA-256 of the tensors of the memory that the stage went on with under another
            name, or None.
        resized_from: the r that the stage had, where the memory was resized since. The settings
            have its present r.
    """

    settings: AdapterSettings
    text_sha256: str
    extra_parameters: int
    seconds: float
    peak_bytes: int | None = None
    memory_dir: str | None = None
    title: str | None = None
    stopped: bool = False
    origin: str | None = None
    base_sha256: str | None = None
    tokenizer_sha256: str | None = None
    resized_from: int | None = None

    @property
    def kind(self) -> str:
        return _KINDS[type(self)]

    @property
    def method(self) -> str:
        return self.settings.method

    def to_json(self) -> dict[str, Any]:
        """Return the settings and the figures in one flat dictionary of JSON values."""
        figures = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        settings = vars(figures.pop("settings"))
        derived = {"stage": self.kind, "settings_sha256": digest_json(settings)}
        return {**derived, **settings, **figures}

    @classmethod
    def from_json(cls: type[Self], value: dict[str, Any]) -> Self:
        """Undo `to_json`; a missing or unknown key is a `ValueError`.

        A figure that JSON cannot hold (null) is NaN.
        """
        settings_class = _SETTINGS[cls]
        names = {field.name for field in dataclasses.fields(settings_class)}
        settings = {name: item for name, item in value.items() if name in names}
        figures = {
            name: _null_to_nan(item) if name in cls._numbers() else item
            for name, item in value.items()
            if name not in names and name not in _DERIVED
        }
        try:
            return cls(settings=settings_class(**settings), **figures)
        except TypeError as error:
            raise _make_unreadable(error) from None

    @classmethod
    def _numbers(cls) -> set[str]:
        """Return the names of the figures that are numbers, where null stands for NaN."""
        return {"seconds"}


@dataclass(frozen=True, kw_only=True)
class ReadRecord(Record):
    """What a reading made of a text.

    Attributes:
        scored_tokens, nll_nats, perplexity: of the first reading of the text; each token is scored
            before it is learned.
        perplexity_at: from the number of tokens read to the perplexity so far.
        perplexity_between: from "0-50000" and so on to the perplexity of that segment.
        perplexities: of each reading of the text; the first one is `perplexity`.
        all_scored_tokens: of all readings of the text; None where an earlier version did not
            record it.
        curve: (tokens read, perplexity so far) after each chunk of the first reading.
        skipped_chunks: chunks that were not learned because a loss or a gradient was not finite.
    """

    settings: ReadSettings
    scored_tokens: int
    nll_nats: float
    perplexity: float
    perplexity_at: dict[str, float]
    curve: list[tuple[int, float]]
    perplexity_between: dict[str, float] = field(default_factory=dict)
    perplexities: list[float] = field(default_factory=list)
    skipped_chunks: int = 0
    all_scored_tokens: int | None = None

    @property
    def tokens_per_second(self) -> float:
        if self.seconds <= 0:
            return float("nan")
        return self.count_scored_tokens() / self.seconds

    def count_scored_tokens(self) -> int:
        """Return how many tokens all readings of the text scored."""
        if self.all_scored_tokens is None:
            return self.scored_tokens * max(len(self.perplexities), 1)
        return self.all_scored_tokens

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "tokens_per_second": self.tokens_per_second}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "ReadRecord":
        record = super().from_json(value)
        try:
            curve = [(tokens, perplexity) for tokens, perplexity in record.curve]
        except (TypeError, ValueError) as error:
            raise _make_unreadable(error) from None
        if not curve:
            raise _make_unreadable("its curve is empty")
        return dataclasses.replace(record, curve=curve)

    @classmethod
    def _numbers(cls) -> set[str]:
        numbers = {"nll_nats", "perplexity", "perplexity_at", "perplexity_between"}
        return super()._numbers() | numbers | {"perplexities", "curve"}


@dataclass(frozen=True, kw_only=True)
class StudyRecord(Record):
    """What a study made of a text.

    Attributes:
        passages, asked, kept: passages of the text, questions asked, exchanges kept.
        given: whether the exchanges were given.
        steps, skipped_steps: optimizer steps; those left out since a value was not finite.
        kl_nats: KL(teacher || student) a token over the first and the last pass.
        samples: replies of the model that were no question; those of a saved study are left out.
        writing_seconds, learning_seconds: wall time.
        exchanges_sha256: of the exchanges' file.
        date: the day that a chat template prints in the prompts, "2026-11-26"; None where an
            earlier version did not record it.
    """

    settings: StudySettings
    passages: int
    asked: int
    kept: int
    given: bool
    steps: int
    skipped_steps: int
    kl_nats: list[float]
    samples: list[str]
    writing_seconds: float
    learning_seconds: float
    exchanges_sha256: str
    date: str | None = None

    @classmethod
    def _numbers(cls) -> set[str]:
        return super()._numbers() | {"kl_nats", "writing_seconds", "learning_seconds"}


_KINDS: dict[type[Record], str] = {ReadRecord: "read", StudyRecord: "study"}
_SETTINGS: dict[type[Record], type[AdapterSettings]] = {
    ReadRecord: ReadSettings,
    StudyRecord: StudySettings,
}


def _make_unreadable(error: object) -> ValueError:
    rule = f"{RECORD} must be one that this version wrote ({error})"
    return ValueError(f"{rule}: read the text again")


def _null_to_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _null_to_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_null_to_nan(item) for item in value]
    if value is None:
        return float("nan")
    return value


def records_to_json(records: Sequence[Record]) -> dict[str, Any]:
    """Return the content of a memory's record file, without the folder's path: it is pushed."""
    return {"stages": [{**record.to_json(), "memory_dir": None} for record in records]}


def load_records(directory: str | Path) -> list[Record]:
    """Load the records of the stages that made a memory, the last one last.

    A folder without a record, or with a damaged one, is a `ValueError`.
    """
    folder = str(directory)
    return [dataclasses.replace(each, memory_dir=folder) for each in _load_stages(directory)]


def _load_stages(directory: str | Path) -> list[Record]:
    """Return the records as they are in the file."""
    finish_replacement(directory)
    path = Path(directory) / RECORD
    former = Path(directory) / READING
    if not path.is_file() and former.is_file():
        return [_translate_former(load_json(former))]
    if not path.is_file():
        rule = f"memory {str(directory)!r} must have a {RECORD}, got none"
        raise ValueError(f"{rule}: choose one that a reading or a study made")
    content = load_json(path)
    stages = content.get("stages") if isinstance(content, dict) else None
    if not isinstance(stages, list) or not stages:
        raise ValueError(f"{path} must list the stages of a memory: copy or save the memory again")
    return [parse_record(stage, str(path)) for stage in stages]


def parse_record(value: Any, name: str = RECORD) -> Record:
    """Return the record that `to_json` has written; `name` is that of its file, for messages."""
    classes = {kind: record_class for record_class, kind in _KINDS.items()}
    kind = value.get("stage") if isinstance(value, dict) else None
    if kind not in classes:
        raise ValueError(f"{name} must list readings and studies, got {kind!r}: save it again")
    return classes[kind].from_json(value)


def _translate_former(value: Any) -> Record:
    """Return the reading that version 0.2.0 recorded, without the settings that it had alone."""
    if not isinstance(value, dict):
        raise ValueError(
            f"{READING} must be the record of a reading: copy or save the memory again"
        )
    fields = {field.name for field in dataclasses.fields(ReadRecord)}
    fields |= {field.name for field in dataclasses.fields(ReadSettings)}
    fields -= {"settings", "origin"}
    known = {name: item for name, item in value.items() if name in fields}
    return ReadRecord.from_json(known)


def describe_origin(start: str | Path | None) -> str | None:
    """Return `Record.origin` for a memory that goes on under another name."""
    if start is None:
        return None
    file = find_files(start)[1]
    return hashlib.sha256(file.read_bytes()).hexdigest()
