"""The settings of test-time training: plain values, checked once."""

import math
from dataclasses import dataclass

from ..checks import check_choice, check_whole

CONTEXTS = ("recompute", "cache")
_LEAST = {
    "window": 1,
    "stride": 1,
    "epochs": 1,
    "readings": 1,
    "warmup_steps": 0,
    "decay_steps": 0,
    "sinks": 0,
}


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings of the loop that scores and learns a document chunk by chunk.

    Args:
        window: W, the longest stretch of text that a prediction may rest on, in tokens; within the model's positions.
        stride: S, the chunk's length in tokens, 1 <= S <= W. With S = W the context is the one token before the chunk.
        learning_rate: the rate after the warm-up. None to train nothing, or for an optimizer with its own rates.
        epochs: optimizer steps a chunk. The first uses the forward pass that scores; each further one runs it again.
        readings: how often the document is read. With 6 chunks or more an adapter without a writer is then the mean of
            its weights after each, since the last ones lose what carries over to other text.
        context: "recompute" feeds each chunk's context again, as in the paper; gradients flow through it. "cache"
            takes it from a detached key/value cache that slides with the text, and feeds it again each time the
            positions reach two windows.
        sinks: how many of its first tokens the cache keeps beside the last ones; trained attention needs them.
        start_token: the token that each window and the cache begin with (`text.find_start_token`). None: the
            document's first token, where it is the model's `bos_token_id`; else none.
        warmup_steps: the first n steps use 1/(n+1), 2/(n+1), ..., n/(n+1) of the rate.
        decay_steps: step t, counted from 0, uses 1 / sqrt(1 + t / decay_steps) of the rate. 0 for a constant rate.
        brake: whether an adapter that makes the text worse than the base does is taken back (`brake.py`).

    A value out of range is a `TypeError` or `ValueError`, in one line.
    """

    window: int
    stride: int
    learning_rate: float | None
    epochs: int = 1
    readings: int = 1
    context: str = "recompute"
    sinks: int = 4
    start_token: int | None = None
    warmup_steps: int = 2
    decay_steps: int = 0
    brake: bool = True

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            check_whole(name, getattr(self, name), least)
        if self.start_token is not None:
            check_whole("start_token", self.start_token, 0)
        if self.stride > self.window:
            found = f"stride {self.stride} with window {self.window}"
            raise ValueError(
                f"stride must be at most window, got {found}: lower stride or raise window"
            )
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            remedy = (
                "give one, 1e-3 say; to read without learning, give the model without its adapter"
            )
            raise ValueError(
                f"learning_rate must be a number above 0, got {self.learning_rate}: {remedy}"
            )
        check_choice("context", self.context, CONTEXTS)
