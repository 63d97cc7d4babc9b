"""The record of a reading: its settings and figures, as JSON, in a memory's folder and on its model card."""

import dataclasses
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel
from torch import Tensor

from ..checks import describe_difference
from ..files import finish_replacement, load_json, write_json
from ..memories.checkpoint import CHECKPOINT_FOLDER, InUse, has_checkpoint, locked
from ..memories.folder import (
    MEMORY_CONFIG,
    READING,
    SAMPLE,
    SIGNATURE,
    TEXT_SIGNATURE,
    escape,
    make_card,
    save_memory,
)
from ..memories.loading import find_files
from ..selfstudy import Exchange, save_exchanges
from ..selfstudy.exchanges import EXCHANGES, PASSAGES, digest_exchanges
from ..text import digest_ids, digest_json
from .settings import FIELDS, CompleteSettings, ReadingSettings

__all__ = ["Reading", "describe_origin", "find_finished", "load_reading", "save_reading"]

_CARD_SETTINGS = (
    "preset",
    "r",
    "init",
    "learning_rate",
    "window",
    "stride",
    "context",
    "readings",
)
_CARD_SETTINGS += ("anchor", "passes", "seed", "dtype")


@dataclass(frozen=True)
class Reading:
    """What one method made of one text. `to_json` returns the object that `--json` writes.

    Attributes:
        text_sha256, base_sha256, tokenizer_sha256: of the token ids, `fingerprint`, `digest_tokenizer`; `to_json` adds
            settings_sha256, of the settings as JSON.
        scored_tokens, nll_nats: of the first reading of the text; each token is scored before it is learned.
        perplexity_at: from the number of tokens read to the perplexity so far.
        perplexity_between: from "0-50000" and so on to the perplexity of that segment.
        perplexities: of each reading of the text; the first one is `perplexity`.
        curve: (tokens read, perplexity so far) after each chunk of the first reading.
        extra_parameters: trained parameters.
        seconds: for scoring and learning all chunks, the anchor's texts included.
        peak_bytes: see `PeakMemory`; the base is included.
        skipped_chunks: chunks that were not learned because a loss or a gradient was not finite.
        studied: of a self-study (see `SelfStudy.figures`), or None.
        stopped: whether a callback ended the reading before its end.
        origin: SHA-256 of another memory's tensors: `start`, which went on under another name.
    """

    settings: CompleteSettings
    text_sha256: str
    scored_tokens: int
    nll_nats: float
    perplexity: float
    perplexity_at: dict[str, float]
    curve: list[tuple[int, float]]
    extra_parameters: int
    seconds: float
    peak_bytes: int | None
    skipped_chunks: int = 0
    memory_dir: str | None = None
    perplexities: list[float] = field(default_factory=list)
    perplexity_between: dict[str, float] = field(default_factory=dict)
    studied: dict[str, Any] | None = None
    stopped: bool = False
    title: str | None = None
    origin: dict[str, Any] | None = None
    base_sha256: str | None = None
    tokenizer_sha256: str | None = None

    @property
    def method(self) -> str:
        return self.settings.method.name

    @property
    def tokens_per_second(self) -> float:
        tokens = self.scored_tokens * self.settings.training.readings
        return tokens / self.seconds if self.seconds > 0 else float("nan")

    def to_json(self) -> dict[str, Any]:
        """Return the settings and the figures in one flat dictionary of JSON values."""
        figures = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        settings = figures.pop("settings").to_json()
        derived = {
            "settings_sha256": digest_json(settings),
            "tokens_per_second": self.tokens_per_second,
        }
        return {**settings, **figures, **derived}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Reading":
        """Undo `to_json`; a missing or unknown key is a `ValueError`. A figure that JSON cannot hold (null) is NaN."""
        derived = ("settings_sha256", "tokens_per_second")
        value = {name: item for name, item in value.items() if name not in derived}
        settings = {name: value.pop(name) for name in list(value) if name in FIELDS}
        optional = {
            "peak_bytes",
            "memory_dir",
            "studied",
            "stopped",
            "title",
        }
        optional |= {"origin", "base_sha256", "tokenizer_sha256"}
        value |= {name: _null_to_nan(value[name]) for name in value.keys() - optional}
        try:
            reading = cls(settings=ReadingSettings(**settings).complete(), **value)
        except TypeError as error:
            raise ValueError(
                f"{READING} must be one that this version wrote ({error}): read the text again"
            ) from None
        return dataclasses.replace(reading, curve=[tuple(point) for point in reading.curve])


def _null_to_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _null_to_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_null_to_nan(item) for item in value]
    return float("nan") if value is None else value


def load_reading(directory: str | Path) -> Reading:
    """Load the record in a memory's folder; a `ValueError` where there is none, or a damaged one."""
    finish_replacement(directory)
    path = Path(directory) / READING
    if not path.is_file():
        raise ValueError(
            f"memory {str(directory)!r} must have a {READING}, got none: choose one that a reading made"
        )
    return Reading.from_json(load_json(path))


def describe_origin(start: str | Path | None) -> dict[str, Any]:
    """Return `Reading.origin` for a memory that goes on, if any."""
    if start is None:
        return {"start": None}
    _, file = find_files(start)
    return {"start": hashlib.sha256(file.read_bytes()).hexdigest()}


def find_finished(
    directory: str | Path,
    settings: CompleteSettings,
    input_ids: Tensor,
    exchanges: Any = None,
    origin: Any = None,
) -> Reading | None:
    """Return the finished reading of a folder; None where there is no memory, or an unfinished reading.

    `exchanges` are those that would be studied; None where the model writes them. For `origin` see `Reading`. The
    memory of another text [T], settings, exchanges or origin is a `ValueError`.
    """
    folder = Path(directory)
    finish_replacement(folder)
    if has_checkpoint(folder / CHECKPOINT_FOLDER) or not (folder / MEMORY_CONFIG).exists():
        return None
    if (folder / CHECKPOINT_FOLDER).is_dir():
        with suppress(InUse, OSError), locked(folder / CHECKPOINT_FOLDER):
            pass  # afterwards the lock is gone, and the folder where it is empty
    remedy = "choose another folder, or give --overwrite"

    def refuse(held: str) -> ValueError:
        return ValueError(f"--out {str(folder)!r} holds {held}: {remedy}")

    if not (folder / READING).exists():
        raise refuse("a memory that no reading here made")
    reading = load_reading(folder)
    here = {**settings.to_json(), **(origin or {})}
    there = {**reading.settings.to_json(), **(reading.origin or {})}
    if difference := describe_difference(here, there, f"the memory in {str(folder)!r}", remedy):
        raise ValueError(difference)
    if reading.text_sha256 != digest_ids(input_ids[: settings.max_tokens]):
        raise refuse("the memory of another text")
    if reading.stopped:
        raise refuse("the memory of a reading that was stopped early")
    studied = reading.studied or {}
    if exchanges is None and studied.get("given"):
        raise refuse("the memory of exchanges that were given")
    if exchanges is not None and studied.get("exchanges_sha256") != digest_exchanges(exchanges):
        raise refuse("the memory of other exchanges")
    return reading


def save_reading(
    model: PeftModel,
    directory: str | Path,
    reading: Reading,
    exchanges: Sequence[Exchange] | None = None,
    sample: str | None = None,
) -> None:
    """Write a reading's memory into a folder, whole or not at all, with its record and what belongs to it."""

    def add_files(folder: Path) -> None:
        write_json(folder / READING, reading.to_json())
        if exchanges is not None:
            save_exchanges(folder / EXCHANGES, exchanges)
        if sample is not None:
            (folder / SAMPLE).write_text(sample, encoding="utf-8")

    card = _make_card(model.peft_config[model.active_adapter], reading)
    save_memory(model, directory, reading.settings.model, card, add_files=add_files)
    written = {
        EXCHANGES: exchanges,
        PASSAGES: None,
        SAMPLE: sample,
        SIGNATURE: None,
        TEXT_SIGNATURE: None,
    }
    for name, value in written.items():
        if value is None:
            (Path(directory) / name).unlink(missing_ok=True)  # of the memory that this one replaces


def _make_card(config: PeftConfig, reading: Reading) -> str:
    """Return the model card of a reading's memory."""
    settings, title = reading.settings, escape(reading.title or "a text")
    given = settings.to_json()
    rows = {
        "text": f"{title}, {reading.curve[-1][0]:,} tokens",
        "base": escape(settings.model),
        "method": f"{reading.method}, {reading.extra_parameters:,} parameters",
        "perplexity while reading, each token scored before it was learned": f"{reading.perplexity:.2f}",
        "time to read": f"{reading.seconds:,.0f} s",
    }
    if reading.studied is not None:
        seconds = reading.studied["writing_seconds"] + reading.studied["learning_seconds"]
        rows["self-study"] = f"{reading.studied['kept']} exchanges in {seconds:,.0f} s"
    rows |= {name: f"`{value}`" for name in _CARD_SETTINGS if (value := given[name]) is not None}
    made = "trained by reading one text"
    note = f"The perplexities are of this text alone. All settings and figures are in `{READING}`."
    return make_card(settings.model, config.peft_type, title, made, rows, note)
