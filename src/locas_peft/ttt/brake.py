"""The brake notices that an adapter makes its text worse, and takes the learning back.

Now and then a chunk is also scored by the base, without adapters. Where the adapter is worse, it goes back to its last
state that was better, and its learning rate is divided by 4. A check costs one forward pass over a window: with n
chunks there are about log2(n) of them, and one more every 32 chunks; a jump of the loss adds one.
"""

import math
from collections.abc import Sequence

from .chunks import Chunk

TOLERANCE = 0.05  # nats a token by which an adapter may be worse than the base on one chunk
NOISE = 0.01  # the same at two checks in a row
# Nats a token by which a chunk's loss must exceed the mean of the last `RECENT` ones for a check out of turn.
JUMP, RECENT = 0.7, 4
FIRST, LONGEST = (
    2,
    32,
)  # the number of the first chunk that is checked, and the most chunks between two checks
RATE_FACTOR = 0.25  # of the learning rate, each time the adapter goes back


def is_due(chunks: Sequence[Chunk], nats_per_token: float) -> bool:
    """Return whether a chunk with this mean loss is to be checked; `chunks` are the records before it."""
    if not chunks or not math.isfinite(nats_per_token):
        return bool(chunks)
    recent = [chunk.nll_nats / chunk.tokens for chunk in chunks[-RECENT:] if chunk.tokens]
    if recent and nats_per_token > sum(recent) / len(recent) + JUMP:
        return True
    checked = [number for number, chunk in enumerate(chunks) if chunk.base_nll_nats is not None]
    if not checked:
        return len(chunks) >= FIRST
    last = checked[-1]
    return len(chunks) - last >= (FIRST if chunks[last].taken_back else min(last + FIRST, LONGEST))


def is_worse(chunks: Sequence[Chunk], nats_per_token: float, base_nats_per_token: float) -> bool:
    """Return whether the adapter makes the text worse than the base, whose mean loss on the same chunk is given.

    It does by more than `TOLERANCE`, or twice in a row by more than `NOISE`.
    """
    excess = nats_per_token - base_nats_per_token
    if not excess <= TOLERANCE:  # nan too
        return math.isfinite(base_nats_per_token)
    last = next((chunk for chunk in reversed(chunks) if chunk.base_nll_nats is not None), None)
    if last is None or last.taken_back:
        return False
    return min(excess, (last.nll_nats - last.base_nll_nats) / last.tokens) > NOISE
