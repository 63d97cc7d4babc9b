"""The windows that a document is read in, the record of a chunk, and perplexity over records.

Perplexity is exp(sum of nll / number of scored tokens), in nats, never a mean of chunk
perplexities.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class ChunkBounds:
    """One chunk's tokens, [start, stop), and its context, [begin, start), in a document."""

    begin: int
    start: int
    stop: int

    @property
    def scored(self) -> int:
        """The number of tokens that are scored: all but the document's first one."""
        return self.stop - max(self.start, 1)


def cut(tokens: int, window: int, stride: int, start: int = 0) -> Iterator[ChunkBounds]:
    """Cut a document, from the token `start` on, into chunks of `stride` tokens.

    The last chunk may be shorter.

    A chunk has up to `window - stride` tokens of context, and at least one, by which its first
    token is predicted.
    """
    for first in range(start, tokens, stride):
        yield ChunkBounds(
            max(0, first - max(window - stride, 1)), first, min(first + stride, tokens)
        )


@dataclass(frozen=True)
class Chunk:
    """The record of one chunk: the tokens [start, stop) of the document.

    Attributes:
        index: the chunk's number in its reading of the document, from 0.
        tokens: the number of its tokens that were scored; all but the document's first one.
        nll_nats: their summed negative log-likelihood, in nats, before the chunk was learned.
        seconds: wall time of scoring and learning together.
        learned: False where nothing is trainable, or a loss or gradient was not finite.
        reading: the number of the reading, from 0; above 0 only where a document is read several
            times.
    """

    index: int
    start: int
    stop: int
    tokens: int
    nll_nats: float
    seconds: float
    learned: bool
    reading: int = 0


def perplexity(nll_nats: float, tokens: int) -> float:
    """Return exp(nll_nats / tokens), or inf where it is too large.

    Raises:
        ValueError: where no token was scored.
    """
    if tokens < 1:
        raise ValueError(
            f"tokens must be at least 1, got {tokens}: score a token before asking for a perplexity"
        )
    try:
        return math.exp(nll_nats / tokens)
    except OverflowError:
        return math.inf


def perplexity_of(chunks: Iterable[Chunk]) -> float:
    """Return the perplexity over chunk records; nan where no token was scored."""
    chunks = list(chunks)
    tokens = sum(chunk.tokens for chunk in chunks)
    return perplexity(math.fsum(chunk.nll_nats for chunk in chunks), tokens) if tokens else math.nan


def cumulative(chunks: Iterable[Chunk]) -> list[tuple[int, float]]:
    """Return (tokens read, perplexity so far) at the end of each chunk.

    Chunks before the first scored token are left out.
    """
    chunks = list(chunks)
    nlls = accumulate(chunk.nll_nats for chunk in chunks)
    tokens = accumulate(chunk.tokens for chunk in chunks)
    rows = zip(chunks, nlls, tokens, strict=True)
    return [(chunk.stop, perplexity(nll, count)) for chunk, nll, count in rows if count]


def choose_marks(tokens: int) -> list[int]:
    """Choose at most four numbers of tokens, evenly spaced, at which perplexity is reported.

    Texts of 200,000 tokens and more have the protocol's 50K, 100K, 150K and 200K; shorter ones have
    smaller steps.
    """
    steps = (1_000, 2_500, 5_000, 10_000, 25_000, 50_000)
    step = next((step for step in steps if tokens <= 4 * step), steps[-1])
    return [mark for mark in range(step, 4 * step + 1, step) if mark <= tokens]


def at_marks(chunks: Iterable[Chunk], marks: Sequence[int]) -> dict[str, float]:
    """Return the cumulative perplexity at marks, numbers of tokens read.

    The result is {"50000": perplexity, ...}, ascending.

    A mark inside a chunk takes the value at that chunk's end. Marks beyond the end of the document
    are left out.
    """
    points = cumulative(chunks)
    reached = {
        mark: [value for stop, value in points if stop >= mark] for mark in sorted(set(marks))
    }
    return {str(mark): values[0] for mark, values in reached.items() if values}


def per_segment(chunks: Iterable[Chunk], marks: Sequence[int]) -> dict[str, float]:
    """Return the perplexity of each segment between the marks.

    The result is {"0-50000": perplexity, "50000-100000": ...}.

    A chunk that contains a mark belongs to the segment that the mark ends, as in `at_marks`. The
    tokens after the last mark are one more segment, named after the document's end. A segment
    without a scored token is left out.
    """
    segments, segment, begin, ends = {}, [], 0, sorted(set(marks))
    for chunk in chunks:
        segment.append(chunk)
        while ends and chunk.stop >= ends[0]:
            segments[f"{begin}-{ends[0]}"], segment = segment, []
            begin = ends.pop(0)
    if segment:
        segments[f"{begin}-{segment[-1].stop}"] = segment
    sums = {
        name: (sum(one.nll_nats for one in own), sum(one.tokens for one in own))
        for name, own in segments.items()
    }
    return {name: perplexity(nll, tokens) for name, (nll, tokens) in sums.items() if tokens}
