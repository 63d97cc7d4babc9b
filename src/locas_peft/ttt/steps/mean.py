"""The mean of readings: an adapter becomes the mean of its weights after each reading.

The weights of the last reading alone lose what carries over to other text. This is our addition to
the paper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...tuner import clip_memories, keep_weights
from . import Step

if TYPE_CHECKING:
    from ..trainer import TestTimeTrainer

__all__ = ["LEAST_CHUNKS", "MeanOfReadings"]

LEAST_CHUNKS = 6
"""A document of fewer chunks is read again to learn it at all: its last weights are kept."""


class MeanOfReadings(Step):
    """After the last reading, replace the trained weights by their mean after each reading.

    A document of fewer than `LEAST_CHUNKS` chunks, or one reading, leaves the weights as they are.
    The step holds one copy of the trained weights.
    """

    name = "mean"

    def __init__(self) -> None:
        self._mean: list[Tensor] = []

    def check(self, trainer: TestTimeTrainer) -> None:
        writers = [step.name for step in trainer.steps if step.learns]
        if writers:
            rule = f"steps must not have a MeanOfReadings beside a {writers[0]}, got both"
            raise ValueError(f"{rule}: leave it out, since two maps may have other slots")

    @torch.no_grad()
    def after_reading(self, trainer: TestTimeTrainer, reading: int) -> None:
        chunks = sum(chunk.reading == reading for chunk in trainer.chunks)
        if trainer.settings.readings == 1 or chunks < LEAST_CHUNKS:
            return
        # The last optimizer step may have left rows that are longer than the norm clip allows.
        clip_memories(trainer.model)
        parameters = trainer.learner.parameters()
        weights = [parameter.detach().clone() for parameter in parameters]
        if reading == 0:
            self._mean = weights
        else:
            share = 1 / (reading + 1)
            pairs = zip(self._mean, weights, strict=True)
            self._mean = [mean.to(weight).lerp(weight, share) for mean, weight in pairs]
        if reading + 1 == trainer.settings.readings:
            for parameter, mean in zip(parameters, self._mean, strict=True):
                parameter.copy_(mean)
            keep_weights(trainer.model)
            self._mean = []

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mean = list(state["mean"])
