"""Record a memory's inputs and gradients in the passes of a reading, for the rules that write it.

Axes: L layers, N tokens, D hidden size, R slots.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..tuner.attached import find_memory
from ..tuner.layer import LocasLayer

Moves = dict[nn.Parameter, tuple[int, Tensor]]
"""By weight: the dimension of its slots, and the former index of each (LongTensor [R], -1 for a new slot)."""


class Writer:
    """A rule that changes a memory from the recorded passes over a chunk. Each rule is a subclass.

    `adapter_name` is the memory, `None` for the active one. It has one width, and no gates if `needs_two_layers`.
    """

    arguments: ClassVar[tuple[str, ...]]
    needs_two_layers: ClassVar[bool] = True

    def __init__(self, model: nn.Module, adapter_name: str | None = None) -> None:
        self.adapter_name, self._layers = _find_writable(model, adapter_name, self.needs_two_layers)
        self._inputs: list[Tensor | None] = []  # a layer's A [N, D] of the last recorded pass
        self._gradients: list[
            Tensor | None
        ] = []  # the gradient of the loss at a layer's output [N, D]
        self._paused = False

    @property
    def settings(self) -> dict[str, float | int | str]:
        """The arguments as plain values: a resumed reading needs a writer with the same ones."""
        return {name: getattr(self, name) for name in (*self.arguments, "adapter_name")}

    def write(self, losses: Tensor) -> Moves:
        """Learn the last recorded passes. Return where the slots went, so that an optimizer's state can follow.

        `losses` `[N]` is the nll of the last N tokens that those passes predicted, whose sum or mean was
        differentiated. If nothing was recorded, or values are not finite, raise a `ValueError`; nothing is changed.
        """
        raise NotImplementedError

    def take_back(self, rate_factor: float) -> None:
        """Follow the memory, which the brake has taken back to former weights; learn slower from here on."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a rule knows beside the memory's weights."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""

    @property
    def capacity(self) -> int:
        """R, the number of slots of the memory."""
        return self._layers[0].locas_up[self.adapter_name].out_features

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the last forward pass with gradients, and its backward pass, within the context."""
        self._inputs, self._gradients = [None] * len(self._layers), [None] * len(self._layers)

        def recorder(index: int) -> Callable[[Tensor, Tensor], None]:
            def record(ffn_input: Tensor, output: Tensor) -> None:
                if not self._paused:
                    self._inputs[index] = ffn_input.detach().flatten(0, -2)
                    output.register_hook(record_gradient)

            def record_gradient(gradient: Tensor) -> None:
                self._gradients[index] = gradient.detach().flatten(0, -2)

            return record

        try:
            for index, layer in enumerate(self._layers):
                layer.recorder = recorder(index)
            yield
        finally:
            for layer in self._layers:
                layer.recorder = None

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Record no passes within this context, which is used inside `recording`."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def is_finite(self) -> bool:
        """Return whether the last recorded passes are complete and finite, so that they can be written."""
        return all(
            t is not None and bool(t.isfinite().all()) for t in (*self._inputs, *self._gradients)
        )

    def _take(self, count: int) -> tuple[Tensor, Tensor]:
        """Return A and G, the log-likelihood's gradient, of the last `count` recorded tokens, float32 `[L, N, D]`."""
        if not self._inputs or any(tensor is None for tensor in (*self._inputs, *self._gradients)):
            raise ValueError(
                "write needs a forward and a backward pass inside recording(): run them first."
            )
        if not self.is_finite():
            raise ValueError(
                "FFN inputs and gradients must be finite to be written, got NaN or infinity."
            )
        device = self._inputs[0].device
        inputs, gradients = (
            torch.stack([tensor[-count:].to(device).float() for tensor in tensors])
            for tensors in (self._inputs, self._gradients)
        )
        self._inputs, self._gradients = [], []
        return (
            inputs,
            -gradients,
        )  # the loss was differentiated: the log-likelihood's gradient has the other sign

    def _weights(self) -> list[tuple[LocasLayer, nn.Parameter, nn.Parameter]]:
        """Return each layer with its up `[R, D]`, the keys, and its down `[D, R]`, the stored values."""
        return [
            (one, *(part.weight for part in one.projections(self.adapter_name)[-2:]))
            for one in self._layers
        ]


def _find_writable(
    model: nn.Module, adapter_name: str | None, two_layers: bool
) -> tuple[str, list[LocasLayer]]:
    name, layers = find_memory(model, adapter_name, "write into")
    if two_layers and any(name in layer.locas_gate for layer in layers):
        what = f"the memory {name!r} must have two layers to be written, got gates beside {layers[0].name}"
        raise ValueError(f"{what}: train it, or use a host with two-layer FFNs.")
    if any(name in layer.merged_adapters for layer in layers):
        raise ValueError(
            f"the memory {name!r} must not be merged while it is written: call unmerge_adapter()."
        )
    widths = sorted({layer.locas_up[name].out_features for layer in layers})
    if len(widths) > 1:
        raise ValueError(
            f"all layers of a written memory must have one width, got {widths}: leave out rank_pattern."
        )
    if widths[0] < 2:
        raise ValueError(
            "r must be at least 2 for a memory that is written, got 1: one slot cannot be halved."
        )
    if any(float(layer.saved_scale(name)) == 0 for layer in layers):
        raise ValueError(
            f"the memory {name!r} must have an output scale above 0 to be written: raise scaling."
        )
    return name, layers
