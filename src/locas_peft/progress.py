"""Progress of a long command: lines that are advanced, whoever shows them."""

from collections.abc import Callable

from .selfstudy import StudyStep
from .ttt.chunks import Chunk, perplexity

__all__ = ["Progress", "follow", "follow_study", "silent"]

Progress = Callable[[str, int], Callable[..., None]]
"""Opens a line of progress: (description, total steps) -> advance(steps, note="")."""


def silent(description: str, total: int) -> Callable[..., None]:
    """Show no progress."""
    return lambda steps, note="": None


def follow(advance: Callable[..., None]) -> Callable[[Chunk], None]:
    """Make an `on_chunk` for `memorize` that advances by a chunk's tokens, with perplexity and speed as the note."""
    totals: dict[int, tuple[float, int, float]] = {}  # by reading

    def on_chunk(chunk: Chunk) -> None:
        nll_nats, tokens, seconds = totals.get(chunk.reading, (0.0, 0, 0.0))
        nll_nats, tokens, seconds = (
            nll_nats + chunk.nll_nats,
            tokens + chunk.tokens,
            seconds + chunk.seconds,
        )
        totals[chunk.reading] = nll_nats, tokens, seconds
        note = f"perplexity {perplexity(nll_nats, tokens):.2f}" if tokens else ""
        if note and seconds:
            note += f", {tokens / seconds:,.0f} tokens/s"
        advance(chunk.stop - chunk.start, note)

    return on_chunk


def follow_study(progress: Progress) -> Callable[[StudyStep], None]:
    """Make an `on_study` for `memorize` that shows a line of progress for writing and one for learning."""
    lines: dict[str, tuple[Callable[..., None], int]] = {}

    def on_study(step: StudyStep) -> None:
        advance, before = lines.get(step.phase) or (progress(step.phase, step.total), 0)
        kept = f"{step.exchanges} exchanges"
        advance(
            step.done - before,
            kept if step.loss_nats is None else f"{kept}, KL {step.loss_nats:.2f}",
        )
        lines[step.phase] = advance, step.done

    return on_study
