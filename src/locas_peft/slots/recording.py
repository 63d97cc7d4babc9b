"""Record a memory's inputs and gradients in a chunk, for the rules that write it.

Axes: L layers, N tokens, D hidden size, R slots.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..ttt.steps import Step
from ..tuner.attached import find_memory
from ..tuner.layer import LocasLayer
from ..tuner.norm_clip import clip_norms_

if TYPE_CHECKING:
    from ..ttt import TestTimeTrainer

__all__ = ["Moves", "Writer"]

Moves = dict[nn.Parameter, tuple[int, Tensor]]
"""By weight: the dimension of its slots, and their former indices, LongTensor [R] (-1 for new)."""


class Writer(Step):
    """A rule that changes a memory from the recorded passes over a chunk. Each rule is a subclass.

    Args:
        model: a model with a LOCAS memory of one width, without gates if `needs_two_layers`.
        adapter_name: the memory, `None` for the active one.
    """

    name = "writer"
    learns = True
    arguments: ClassVar[tuple[str, ...]]
    needs_two_layers: ClassVar[bool] = True

    def __init__(self, model: nn.Module, adapter_name: str | None = None) -> None:
        name, layers = _find_writable(model, adapter_name, self.needs_two_layers)
        self.adapter_name = name
        self._layers = layers
        # Of each layer, A [N, D], and the gradient of the loss by its output, [N, D].
        self._inputs: list[Tensor | None] = []
        self._gradients: list[Tensor | None] = []
        self._finite: bool | Tensor | None = None

    def check(self, trainer: "TestTimeTrainer") -> None:
        inactive = [
            layer for layer in self._layers if self.adapter_name not in layer.active_adapters
        ]
        if inactive:
            rule = f"the memory {self.adapter_name!r} must be active to be written"
            raise ValueError(f"{rule}: call set_adapter({self.adapter_name!r}) first")

    @property
    def settings(self) -> dict[str, Any]:
        names = (*self.arguments, "adapter_name")
        return {name: getattr(self, name) for name in names}

    @property
    def capacity(self) -> int:
        """R, the number of slots of the memory."""
        return self._layers[0].locas_up[self.adapter_name].out_features

    def write(self, losses: Tensor) -> Moves:
        """Learn the recorded passes.

        Return where the slots went, so that an optimizer's state can follow.

        Args:
            losses: [N], the nll of the last N tokens that the passes predicted, whose sum or mean
                was differentiated.

        Raises:
            ValueError: if nothing was recorded, or values are not finite; nothing is changed.
        """
        raise NotImplementedError

    def after_chunk(self, trainer: "TestTimeTrainer", losses: Tensor) -> None:
        # The trainer has waited for the check, which `write` would wait for again.
        self._finite = True
        # The optimizer's step may have left rows that are longer than the norm clip allows.
        for layer in self._layers:
            layer.clip_(self.adapter_name)
        trainer.learner.move_slots(self.write(losses))
        for layer in self._layers:
            layer.keep_weights(self.adapter_name)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the first forward pass with gradients, and its backward pass, within the context.

        The passes after the first one, such as an anchor's, are not recorded.
        """
        self._inputs = [None] * len(self._layers)
        self._gradients = [None] * len(self._layers)
        self._finite = None
        try:
            for index, layer in enumerate(self._layers):
                layer.recorder = self._make_recorder(index)
            yield
        finally:
            for layer in self._layers:
                layer.recorder = None

    def is_finite(self) -> bool | Tensor:
        """Return whether the recorded passes are complete and finite and can be written."""
        if self._finite is None:
            self._finite = self._is_complete() and check_finite(self._inputs + self._gradients)
        return self._finite

    def _make_recorder(self, index: int) -> Callable[[Tensor, Tensor], None]:
        def record(ffn_input: Tensor, output: Tensor) -> None:
            if self._inputs[index] is None:
                self._inputs[index] = ffn_input.detach().flatten(0, -2)
                output.register_hook(record_gradient)

        def record_gradient(gradient: Tensor) -> None:
            self._gradients[index] = gradient.detach().flatten(0, -2)

        return record

    def _is_complete(self) -> bool:
        recorded = self._inputs + self._gradients
        return bool(recorded) and all(tensor is not None for tensor in recorded)

    def _check_recorded(self) -> None:
        if not self._is_complete():
            raise ValueError(
                "write needs a forward and a backward pass inside recording(): run them first."
            )
        if not self.is_finite():
            raise ValueError(
                "FFN inputs and gradients must be finite to be written, got NaN or infinity."
            )

    def _take_inputs(self, count: int, chosen: Tensor | None = None) -> Tensor:
        """Return A of the last `count` recorded tokens, float32 `[L, N, D]`.

        Args:
            count: how many of the recorded tokens count; the ones before them are context.
            chosen: LongTensor `[N]`, indices into the last `count` tokens; None for all.
        """
        return _stack(self._inputs, count, chosen)

    def _take_gradients(self, count: int, chosen: Tensor | None = None) -> Tensor:
        """Return G, the gradient of the log-likelihood, of the same tokens as `_take_inputs`."""
        # The loss was differentiated: the gradient of the log-likelihood has the other sign.
        return -_stack(self._gradients, count, chosen)

    def _release(self) -> None:
        self._inputs = []
        self._gradients = []

    def _weights(self) -> list[tuple[LocasLayer, nn.Parameter, nn.Parameter]]:
        """Return each layer with its keys, up `[R, D]`, and its stored values, down `[D, R]`."""
        weights = []
        for layer in self._layers:
            up, down = layer.projections(self.adapter_name)[-2:]
            weights.append((layer, up.weight, down.weight))
        return weights

    def _clip_values(self, layer: LocasLayer, values: Tensor) -> None:
        """Clip stored values, columns of a down `[D, n]`, in place, by the layer's norm clip."""
        radius = layer.locas_config[self.adapter_name].max_slot_norm
        if radius is not None:
            clip_norms_([values], [-2], radius)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all values of some tensors are finite; wait for the device only once."""
    return bool(check_finite(tensors))


def check_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether all values of some tensors are finite, a BoolTensor [], without waiting."""
    checks = [tensor.isfinite().all() for tensor in tensors]
    device = checks[0].device
    return torch.stack([check.to(device) for check in checks]).all()


def _stack(tensors: list[Tensor | None], count: int, chosen: Tensor | None) -> Tensor:
    # None is missing: `_check_recorded` was called.
    recorded = [tensor for tensor in tensors if tensor is not None]
    device = recorded[0].device
    parts = []
    for tensor in recorded:
        part = tensor[-count:]
        if chosen is not None:
            part = part[chosen.to(part.device)]
        parts.append(part.to(device).float())
    return torch.stack(parts)


def _find_writable(
    model: nn.Module, adapter_name: str | None, two_layers: bool
) -> tuple[str, list[LocasLayer]]:
    name, layers = find_memory(model, adapter_name, "write into")
    if two_layers and any(name in layer.locas_gate for layer in layers):
        rule = f"the memory {name!r} must have two layers to be written"
        remedy = "train it, or use a host with two-layer FFNs."
        raise ValueError(f"{rule}, got gates beside {layers[0].name}: {remedy}")
    if any(name in layer.merged_adapters for layer in layers):
        raise ValueError(
            f"the memory {name!r} must not be merged while it is written: call unmerge_adapter()."
        )
    widths = sorted({layer.locas_up[name].out_features for layer in layers})
    if len(widths) > 1:
        rule = "all layers of a written memory must have one width"
        raise ValueError(f"{rule}, got {widths}: leave out rank_pattern.")
    if widths[0] < 2:
        rule = "r must be at least 2 for a memory that is written"
        raise ValueError(f"{rule}, got 1: one slot cannot be halved.")
    if any(float(layer.saved_scale(name)) == 0 for layer in layers):
        rule = f"the memory {name!r} must have an output scale above 0 to be written"
        raise ValueError(f"{rule}: raise scaling.")
    return name, layers
