"""One memory a row: a batch in which each row is answered, and taught, by a memory of its own.

The memories of a layer lie stacked, gate over up, so that one batched product serves all rows. The memories' own
parameters are views of the stack meanwhile: what an optimizer does to them, it does to the stack.

Axes: B rows of the batch, one memory each; G projections into a memory (2 with a gate, else 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .layer import LocasLayer, list_layers
from .norm_clip import clip_norms_


class MemoryStack:
    """The memories of one layer, one for each row of a batch.

    From construction to `release` the memories' weights are views of the stack.

    Args:
        layer: the layer; its memories of these names have one width, dtype and structure.
        names: the memories, in the order of the batch's rows.

    Attributes:
        rows: leaf [B, G * R, D], the gate rows (where there are any) over the up rows.
        down: leaf [B, D, R].
        scale: [B, 1, 1], tau times the config's `scaling`, as they are at construction.
    """

    def __init__(self, layer: LocasLayer, names: list[str]) -> None:
        self.layer, self.names = layer, names
        projections = [layer.projections(name) for name in names]
        with torch.no_grad():
            self.rows = nn.Parameter(torch.stack([torch.cat([p.weight for p in parts[:-1]]) for parts in projections]))
            self.down = nn.Parameter(torch.stack([parts[-1].weight for parts in projections]))
        scales = [layer.scale(name) for name in names]
        self.scale = torch.stack(scales).to(self.down).reshape(-1, 1, 1)
        self._weights = [[part.weight for part in parts] for parts in projections]
        for weights, views in zip(self._weights, self._views(self.rows.data, self.down.data), strict=True):
            for weight, view in zip(weights, views, strict=True):
                weight.data = view

    def _views(self, rows: torch.Tensor, down: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """For each memory its gate (where there is one), up and down, as views of something of the stack's shape."""
        for its_rows, its_down in zip(rows, down, strict=True):
            yield [*its_rows.split(down.shape[-1]), its_down]

    @property
    def leaves(self) -> tuple[nn.Parameter, nn.Parameter]:
        return self.rows, self.down

    @property
    def gated(self) -> bool:
        return self.rows.shape[1] == 2 * self.down.shape[2]

    def add_to(self, result: torch.Tensor, ffn_input: torch.Tensor) -> torch.Tensor:
        """The FFN's output plus each row's own memory's: result + tau * Locas(A).

        Args:
            result: the FFN's output, `[B, T, D]`, or `[B * T, D]` where the FFN is flat.
            ffn_input: A, of the same shape.
        """
        return _add_recalled(self, self.rows, self.down, self.scale, result, ffn_input)

    def hand_out_gradients(self) -> None:
        """Gives each memory's weights their part of the stack's gradient, which is none's any more then."""
        for weights, gradients in zip(self._weights, self._views(self.rows.grad, self.down.grad), strict=True):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
        self.rows.grad = self.down.grad = None

    def clip_slot_norms(self, trained: set[int]) -> None:
        """Clips the slots of those memories that were trained in this step; see `norm_clip`.

        Args:
            trained: ids of the parameters that the optimizer has. Those without a gradient it left alone.
        """
        radius = self.layer.locas_config[self.names[0]].max_slot_norm
        if radius is None:
            return
        moved = [row for row, w in enumerate(self._weights) if id(w[-1]) in trained and w[-1].grad is not None]
        places = [slice(None)] if len(moved) == len(self.names) else moved
        for place in places:
            clip_norms_(self.rows.data[place], dim=-1, max_norm=radius)
            clip_norms_(self.down.data[place], dim=-2, max_norm=radius)

    def is_whole(self) -> bool:
        """Whether the layer's memories are still the stack's views: nobody moved, merged or deleted one."""
        views = self._views(self.rows.data, self.down.data)
        for name, weights, its_views in zip(self.names, self._weights, views, strict=True):
            if name not in self.layer.locas_up or self.layer.merged:
                return False
            parts = self.layer.projections(name)
            if any(
                part.weight is not weight or weight.data_ptr() != view.data_ptr()
                for part, weight, view in zip(parts, weights, its_views, strict=True)
            ):
                return False
        return True

    def release(self) -> None:
        """Gives the memories weights of their own; the stack is not to be used any more."""
        for weights in self._weights:
            for weight in weights:
                weight.grad = None
                weight.data = weight.data.clone()


class _SomeRows:
    """Some rows of a stack, for reading without gradients."""

    def __init__(self, stack: MemoryStack, rows: list[int]) -> None:
        self._stack = stack
        self._parts = stack.rows.detach()[rows], stack.down.detach()[rows], stack.scale[rows]

    def add_to(self, result: torch.Tensor, ffn_input: torch.Tensor) -> torch.Tensor:
        return _add_recalled(self._stack, *self._parts, result, ffn_input)


def _add_recalled(
    stack: MemoryStack,
    rows: torch.Tensor,
    down: torch.Tensor,
    scale: torch.Tensor,
    result: torch.Tensor,
    ffn_input: torch.Tensor,
) -> torch.Tensor:
    layer = stack.layer
    inputs = layer._cast_input_dtype(ffn_input, rows.dtype).reshape(len(rows), -1, ffn_input.shape[-1])
    # Slots before tokens: gate and up are halves that lie in one piece, and so do the gradients of the stack.
    hidden = torch.bmm(rows, inputs.transpose(1, 2))  # [B, G * R, T]
    act = layer.activation_of(stack.names[0])
    if stack.gated:
        gate, up = hidden.chunk(2, dim=1)
        hidden = act(gate) * up
    else:
        hidden = act(hidden)
    hidden, down = (hidden * scale).transpose(1, 2), down.transpose(1, 2)
    if result.dtype == hidden.dtype:
        return torch.baddbmm(result.reshape(inputs.shape), hidden, down).reshape(result.shape)
    return result + torch.bmm(hidden, down).to(result.dtype).reshape(result.shape)


@contextmanager
def stacked(model: nn.Module, stacks: Iterable[MemoryStack], rows: list[int] | None = None) -> Iterator[None]:
    """Within the context, each row of a batch is answered by its own memory of the stacks, and by no other.

    Args:
        model: the model whose layers were stacked; mutated, and restored at the end.
        stacks: one a layer; layers without one answer for the base alone.
        rows: which rows of the stacks the batch consists of, without gradients; `None` for all, with gradients.
    """
    former = []
    by_layer = {stack.layer: stack for stack in stacks}
    try:
        for layer in list_layers(model):
            former.append((layer, layer.stack, layer._disable_adapters))
            stack = by_layer.get(layer)
            layer._disable_adapters = stack is None
            layer.stack = stack if stack is None or rows is None else _SomeRows(stack, rows)
        yield
    finally:
        for layer, stack, disabled in former:
            layer.stack, layer._disable_adapters = stack, disabled
