"""The record of one chunk, and the perplexity over many."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..evaluation.perplexity import perplexity


@dataclass(frozen=True)
class Chunk:
    """What one chunk cost: the tokens [start, stop) of the document.

    Attributes:
        index: the chunk's number, from 0.
        start: its first token's place in the document.
        stop: the place after its last token.
        tokens: how many of its tokens were scored; all but the document's first one.
        nll_nats: their summed negative log-likelihood, in nats, before anything of the chunk was learned.
        seconds: wall time of scoring and learning together.
        learned: False where the memory is as it was before: nothing is trainable, or a loss or a gradient was not
            finite.
    """

    index: int
    start: int
    stop: int
    tokens: int
    nll_nats: float
    seconds: float
    learned: bool


def perplexity_of(chunks: Iterable[Chunk]) -> float:
    """Gives exp(sum of nll / number of scored tokens); nan without a scored token, inf where it overflows."""
    chunks = list(chunks)
    tokens = sum(chunk.tokens for chunk in chunks)
    return perplexity(math.fsum(chunk.nll_nats for chunk in chunks), tokens) if tokens else math.nan
