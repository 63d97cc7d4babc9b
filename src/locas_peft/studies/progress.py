"""How work tells how far it is: a line is opened for each task, and told of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ..evaluation.perplexity import perplexity

if TYPE_CHECKING:
    from ..ttt import Chunk


class Advance(Protocol):
    """Tells of steps that were done, and perhaps of what is known so far, in a few words."""

    def __call__(self, steps: int, note: str = "") -> None: ...


Start = Callable[[str, int], Advance]
"""Opens a line: what is being done and how many steps it takes; gives what to call as they are done."""


def silent(description: str, total: int) -> Advance:
    """Shows nothing."""
    return lambda steps, note="": None


def follow(advance: Advance) -> Callable[[Chunk], None]:
    """Gives what to call after each chunk of a reading: its tokens are the steps, perplexity and speed the note.

    Args:
        advance: of a line whose total is the text's number of tokens.
    """
    nll_nats, tokens, seconds = 0.0, 0, 0.0

    def tell(chunk: Chunk) -> None:
        nonlocal nll_nats, tokens, seconds
        nll_nats += chunk.nll_nats
        tokens += chunk.tokens
        seconds += chunk.seconds
        note = f"perplexity {perplexity(nll_nats, tokens):.2f}" if tokens else ""
        if note and seconds:
            note += f", {tokens / seconds:,.0f} tokens/s"
        advance(chunk.stop - chunk.start, note)

    return tell
