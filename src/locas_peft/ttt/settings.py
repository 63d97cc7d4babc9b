"""The settings of test-time training: plain values, checked once."""

import math
from dataclasses import dataclass

from ..checks import check_choice, check_whole

__all__ = ["CONTEXTS", "TrainingSettings"]

CONTEXTS = ("recompute", "cache")
_LEAST = {"window": 1, "stride": 1, "readings": 1, "warmup_steps": 0, "decay_steps": 0}


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings of the loop that scores and learns a document chunk by chunk.

    Args:
        window: W, the longest stretch of text that a prediction may rest on, in tokens; within the
            model's positions.
        stride: S, the chunk's length in tokens, 1 <= S <= W. With S = W the context is the one
            token before the chunk.
        learning_rate: the rate after the warm-up. None to train nothing, or for an optimizer with
            its own rates.
        readings: how often the document is read, with one adapter (see also `MeanOfReadings`).
        context: "recompute" feeds each chunk's context again; gradients flow through it. "cache"
            takes it from a detached key/value cache that slides with the text, and feeds it again
            each time the positions reach two windows.
        warmup_steps: the first n steps use 1/(n+1), 2/(n+1), ..., n/(n+1) of the rate.
        decay_steps: step t, counted from 0, uses 1 / sqrt(1 + t / decay_steps) of the rate. 0 for a
            constant rate.

    Raises:
        TypeError, ValueError: for a value out of range, in one line.
    """

    window: int
    stride: int
    learning_rate: float | None
    readings: int = 1
    context: str = "recompute"
    warmup_steps: int = 2
    decay_steps: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            check_whole(name, getattr(self, name), least)
        if self.stride > self.window:
            got = f"stride {self.stride} with window {self.window}"
            raise ValueError(
                f"stride must be at most window, got {got}: lower stride or raise window"
            )
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            remedy = (
                "give one, 1e-3 say; to read without learning, give the model without its adapter"
            )
            raise ValueError(
                f"learning_rate must be a number above 0, got {self.learning_rate}: {remedy}"
            )
        check_choice("context", self.context, CONTEXTS)
