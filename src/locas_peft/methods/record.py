"""What a reading found: its settings and its figures, to JSON and back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .settings import Settings

READING = "reading.json"
"""The file that holds a reading in its memory's folder."""


@dataclass(frozen=True)
class Reading:
    """What one method made of one text. `to_json` gives the object that `--json` writes.

    `nll_nats` is the sum over `scored_tokens`, each scored before it was learned. `perplexity_at` maps numbers of
    tokens read to the perplexity so far, `curve` has it as (tokens read, perplexity) after each chunk. `seconds` is
    the time spent on an anchor's text and on chunks (scoring and learning; no loading, no checkpoints). `peak_bytes`
    is the highest memory in use meanwhile, the base model included: on CUDA what torch had allocated, elsewhere the
    resident size of the process, which where the system cannot reset its record (other than Linux) is the highest
    since the start; None on systems that keep none. `memory_dir` is None where nothing was saved.
    """

    settings: Settings
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

    @property
    def method(self) -> str:
        return self.settings.method

    @property
    def tokens_per_second(self) -> float:
        return self.scored_tokens / self.seconds if self.seconds > 0 else float("nan")

    def to_json(self) -> dict[str, Any]:
        """Gives the settings and the results in one flat dictionary of JSON values."""
        results = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        settings = dataclasses.asdict(results.pop("settings"))
        return {**settings, **results, "tokens_per_second": self.tokens_per_second}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Reading:
        """Undoes `to_json`; a figure that JSON could not hold (null) comes back as NaN.

        Raises:
            ValueError: a key is missing or unknown.
        """
        value = {name: item for name, item in value.items() if name != "tokens_per_second"}
        names = {field.name for field in dataclasses.fields(Settings)}
        try:
            settings = Settings(**{name: value.pop(name) for name in list(value) if name in names})
            reading = cls(settings=settings, **value)
        except TypeError as error:
            raise ValueError(f"{READING} must be one that this version wrote ({error}): read the text again") from None
        return dataclasses.replace(
            reading,
            nll_nats=_or_nan(reading.nll_nats),
            perplexity=_or_nan(reading.perplexity),
            perplexity_at={mark: _or_nan(item) for mark, item in reading.perplexity_at.items()},
            curve=[(tokens, _or_nan(item)) for tokens, item in reading.curve],
        )


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
