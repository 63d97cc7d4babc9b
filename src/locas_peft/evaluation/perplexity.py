"""Perplexity from chunk records: what was read, how well it was foretold. Knows losses, no model and no adapter.

A chunk here is any object with `stop` (tokens of the document read once it is done), `tokens` (how many of its
own were scored) and `nll_nats` (their summed negative log-likelihood), in the order of the document. Perplexity
is exp(sum of nll / number of scored tokens), never a mean of chunk perplexities: those cannot be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def perplexity(nll_nats: float, tokens: int) -> float:
    """Gives exp(nll / tokens).

    Args:
        nll_nats: the summed negative log-likelihood, in nats.
        tokens: how many tokens it was summed over.

    Returns:
        The perplexity; inf where it is too large for a float, nan where the sum is.

    Raises:
        ValueError: where no token was scored.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}: score a token before asking for a perplexity")
    try:
        return math.exp(nll_nats / tokens)
    except OverflowError:
        return math.inf


def cumulative(chunks: Iterable) -> list[tuple[int, float]]:
    """Gives the perplexity of everything scored so far, at the end of each chunk.

    Args:
        chunks: chunk records, in order.

    Returns:
        One (tokens read, perplexity) a chunk; a chunk before the first scored token has none and is left out.
    """
    points, nll_nats, tokens = [], 0.0, 0
    for chunk in chunks:
        nll_nats += chunk.nll_nats
        tokens += chunk.tokens
        if tokens:
            points.append((chunk.stop, perplexity(nll_nats, tokens)))
    return points


def choose_marks(tokens: int) -> list[int]:
    """Chooses the numbers of tokens at which the perplexity so far is reported: at most four, evenly spaced.

    Long texts have the protocol's 50K, 100K, 150K and 200K, shorter ones smaller steps.

    Args:
        tokens: how many tokens the text has.
    """
    steps = (1_000, 2_500, 5_000, 10_000, 25_000, 50_000)
    step = next((step for step in steps if tokens <= 4 * step), steps[-1])
    return [mark for mark in range(step, 4 * step + 1, step) if mark <= tokens]


def at_marks(chunks: Iterable, marks: Sequence[int]) -> dict[str, float]:
    """Gives the cumulative perplexity at marks such as 50,000 and 100,000 tokens.

    Nothing is interpolated: a mark inside a chunk takes the value at that chunk's end, at most a stride further.

    Args:
        chunks: chunk records, in order.
        marks: numbers of tokens read, each at least 1, in any order.

    Returns:
        {"50000": perplexity, ...}, ascending; marks beyond the end of the document are left out.

    Raises:
        ValueError: where a mark is below 1.
    """
    points = cumulative(chunks)
    values = {}
    for mark in _ascending(marks):
        reached = next((value for stop, value in points if stop >= mark), None)
        if reached is not None:
            values[str(mark)] = reached
    return values


def per_segment(chunks: Iterable, marks: Sequence[int]) -> dict[str, float]:
    """Gives the perplexity between the marks, each segment on its own: a memory's gain shows late.

    A chunk that a mark falls into belongs to the segment that the mark ends, as in `at_marks`, so that the
    segments share no token and leave none out.

    Args:
        chunks: chunk records, in order.
        marks: numbers of tokens read, each at least 1, in any order.

    Returns:
        {"0-50000": perplexity, "50000-100000": ...}; what follows the last mark reached is a segment of its own that
        is named after the document's end. A segment in which nothing was scored is left out.

    Raises:
        ValueError: where a mark is below 1.
    """
    ends = iter(_ascending(marks))
    end, begin, values = next(ends, None), 0, {}
    nll_nats, tokens, stop = 0.0, 0, 0
    for chunk in chunks:
        nll_nats += chunk.nll_nats
        tokens += chunk.tokens
        stop = chunk.stop
        while end is not None and stop >= end:
            if tokens:
                values[f"{begin}-{end}"] = perplexity(nll_nats, tokens)
            nll_nats, tokens, begin, end = 0.0, 0, end, next(ends, None)
    if tokens:
        values[f"{begin}-{stop}"] = perplexity(nll_nats, tokens)
    return values


def _ascending(marks: Sequence[int]) -> list[int]:
    wrong = [mark for mark in marks if mark < 1]
    if wrong:
        raise ValueError(f"marks must be at least 1, got {wrong[0]}: give numbers of tokens read")
    return sorted(set(marks))
