"""Progress of a long command: lines that are advanced, whoever shows them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .selfstudy import StudyStep
from .ttt.chunks import Chunk, perplexity

__all__ = ["Progress", "follow_steps", "silent"]

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


def follow_steps(progress: Progress, label: str, tokens: int) -> Callable[[Any], None]:
    """Return a function that shows the steps of a stage, one after the other.

    Args:
        progress: opens lines of progress.
        label: of the line of a reading. A study has a line for each phase.
        tokens: of all passes over the text of a reading.
    """
    advances: dict[str, Callable[..., None]] = {}
    done: dict[str, int] = {}
    totals = _Totals()

    def show_chunk(chunk: Chunk) -> None:
        nonlocal totals
        if label not in advances:
            advances[label] = progress(label, tokens)
        if chunk.reading != totals.reading:
            totals = _Totals(chunk.reading)
        totals.add(chunk)
        advances[label](chunk.stop - chunk.start, totals.describe())

    def show_study_step(step: StudyStep) -> None:
        if step.phase not in advances:
            advances[step.phase] = progress(step.phase, step.total)
        note = f"{step.exchanges} exchanges"
        if step.loss_nats is not None:
            note += f", KL {step.loss_nats:.2f}"
        advances[step.phase](step.done - done.get(step.phase, 0), note)
        done[step.phase] = step.done

    def show(step: Chunk | StudyStep) -> None:
        if isinstance(step, Chunk):
            show_chunk(step)
        else:
            show_study_step(step)

    return show
