"""Progress of a long command: lines that are advanced, whoever shows them."""

from collections.abc import Callable
from dataclasses import dataclass

from .selfstudy import StudyStep
from .ttt.chunks import Chunk, perplexity

__all__ = ["Progress", "follow", "follow_study", "silent"]

Progress = Callable[[str, int], Callable[..., None]]
"""Opens a line of progress: (description, total steps) -> advance(steps, note="")."""


def silent(description: str, total: int) -> Callable[..., None]:
    """Show no progress."""
    return lambda steps, note="": None


@dataclass
class _Totals:
    """The sums of the chunks of one reading so far."""

    reading: int = 0
    tokens: int = 0
    nll_nats: float = 0.0
    seconds: float = 0.0

    def add(self, chunk: Chunk) -> None:
        self.tokens += chunk.tokens
        self.nll_nats += chunk.nll_nats
        self.seconds += chunk.seconds

    def describe(self) -> str:
        """Return the perplexity, and the speed where it is known."""
        if not self.tokens:
            return ""
        note = f"perplexity {perplexity(self.nll_nats, self.tokens):.2f}"
        if self.seconds:
            note += f", {self.tokens / self.seconds:,.0f} tokens/s"
        return note


def follow(advance: Callable[..., None]) -> Callable[[Chunk], None]:
    """Make an `on_chunk` for `memorize` that advances by a chunk's tokens.

    The note has the perplexity and the speed.
    """
    totals = _Totals()

    def on_chunk(chunk: Chunk) -> None:
        nonlocal totals
        if chunk.reading != totals.reading:
            totals = _Totals(chunk.reading)
        totals.add(chunk)
        advance(chunk.stop - chunk.start, totals.describe())

    return on_chunk


def follow_study(progress: Progress) -> Callable[[StudyStep], None]:
    """Make an `on_study` for `memorize` with a line of progress for writing, one for learning."""
    lines: dict[str, Callable[..., None]] = {}
    done: dict[str, int] = {}

    def on_study(step: StudyStep) -> None:
        if step.phase not in lines:
            lines[step.phase] = progress(step.phase, step.total)
        note = f"{step.exchanges} exchanges"
        if step.loss_nats is not None:
            note += f", KL {step.loss_nats:.2f}"
        lines[step.phase](step.done - done.get(step.phase, 0), note)
        done[step.phase] = step.done

    return on_study
