"""Optional steps of a reading: what happens beside scoring a chunk and learning it.

A `TestTimeTrainer` takes a list of steps and calls each of them, in the order of the list, at fixed
points:

    with step.recording():
        score the chunk, differentiate its mean loss
        step.before_optimizer_step()
        the optimizer's step
        step.after_chunk()
    step.after_reading()

Where a gradient, or what a step has recorded, is not finite, the chunk is not learned: the
optimizer's step and `after_chunk` are left out.

The steps are `Anchor` and `MeanOfReadings` here, and `SlotWriter`, `RidgeWriter` and `ValueWriter`
in `slots/`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

if TYPE_CHECKING:
    from ..trainer import TestTimeTrainer

__all__ = ["Step"]


class Step:
    """A step of a reading that does nothing. Each step is a subclass.

    Attributes:
        name: names the step in a trainer's description and state; a trainer has at most one step of
            a name.
        learns: whether the step changes the adapter itself, so that a reading needs no optimizer.
    """

    name: ClassVar[str]
    learns: ClassVar[bool] = False

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments as plain values: a resumed reading needs a step with the same ones."""
        return {}

    def check(self, trainer: TestTimeTrainer) -> None:
        """Raise a `ValueError` where the step does not fit a trainer, which is being made."""

    def recording(self) -> AbstractContextManager[None]:
        """Return the context in which one chunk is scored and learned.

        Nothing of it may outlast the chunk.
        """
        return nullcontext()

    def before_optimizer_step(self, trainer: TestTimeTrainer) -> None:
        """Add gradients of the step's own to those of the chunk."""

    def is_finite(self) -> bool | Tensor:
        """Return whether what the step has recorded is finite, so that the chunk can be learned.

        Return a BoolTensor [] in place of its value: the loop waits for the device once a chunk.
        """
        return True

    def after_chunk(self, trainer: TestTimeTrainer, losses: Tensor) -> None:
        """Follow the optimizer's step on a chunk, or act in its place.

        Its losses `[N]`, in nats, and its gradients are finite.
        """

    def after_reading(self, trainer: TestTimeTrainer, reading: int) -> None:
        """Follow the end of a reading of the document; `reading` is its number, from 0."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the step knows beside the adapter's weights: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, after the adapter's weights were restored."""
