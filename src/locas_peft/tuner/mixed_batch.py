"""Batches whose rows use different memories: PEFT's `adapter_names`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .layer import LocasLayer


Arguments = tuple[tuple, dict[str, Any]]
# The arguments of a host that have its rows, the decoder's first.
_ROWS = ("decoder_inputs_embeds", "decoder_input_ids", "inputs_embeds", "input_ids")


class RowNames:
    """The names of the memories of a batch's rows.

    `generate` repeats each row: for beams, for several returned sequences, or as its generation
    config says. The rows of each forward of the host show how often. An encoder sees each row once.

    Args:
        names: a name for each row that the user gives.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._times = 1
        self._may_repeat = False

    def check_inputs(self, host: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raise a `ValueError` if a forward or `generate` is given another number of rows."""
        names = ("inputs", getattr(host, "main_input_name", None))
        inputs = args[0] if args else _find_rows(kwargs, names)
        if not isinstance(inputs, Tensor):
            # PEFT's forward for a task tells no inputs, and repeats none.
            return
        if len(inputs) != len(self._names):
            raise _wrong_length(len(self._names), len(inputs))
        self._may_repeat = True

    @contextmanager
    def in_layers(self, layers: Sequence[LocasLayer]) -> Iterator[None]:
        """Give each layer the names within the context.

        They are an attribute, which compiled code sees; it does not see a hook that is new.
        """
        try:
            for layer in layers:
                layer.row_names = self._names
            yield
        finally:
            for layer in layers:
                layer.row_names = None

    def check_repeated(self, host: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before a forward of the host: see how often each row is repeated."""
        inputs = _find_rows(kwargs)
        if inputs is None and args:
            inputs = args[0]
        if isinstance(inputs, Tensor):
            self._times = self._find_times(inputs)

    def pass_names(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Arguments:
        """Before a forward of one of PEFT's wrappers: pass a name for each of its rows.

        An encoder and a decoder may share the module, whose inputs are `[B, T, ...]`.
        """
        times = self._times
        if args and isinstance(args[0], Tensor):
            times = self._find_times(args[0])
        repeated = [name for name in self._names for _ in range(times)]
        return args, {**kwargs, "adapter_names": repeated}

    def _find_times(self, inputs: Tensor) -> int:
        times, rest = divmod(len(inputs), len(self._names))
        if rest or (times != 1 and not self._may_repeat):
            raise _wrong_length(len(self._names), len(inputs))
        return times


def _find_rows(kwargs: dict[str, Any], names: tuple[str | None, ...] = ()) -> Tensor | None:
    for name in (*names, *_ROWS):
        if name is not None and kwargs.get(name) is not None:
            return kwargs[name]
    return None


def _wrong_length(names: int, inputs: int) -> ValueError:
    rule = "Length of `adapter_names` should be the same as the number of inputs"
    return ValueError(f"{rule}, but got {names} and {inputs} respectively.")


def check_row_names(layer: LocasLayer, row_names: list[str], ffn_input: Tensor) -> None:
    """Check the names of a batch.

    Args:
        layer: the layer that is given the batch.
        row_names: a name for each row, or for each group of rows of `generate`.
        ffn_input: A, `[B, T, D]`, or `[B * T, D]` of a flat FFN.

    Raises:
        ValueError: where the layer has merged memories, or the rows are not as many for each name.
    """
    if layer.merged:
        rule = "Cannot pass `adapter_names` when there are merged adapters"
        raise ValueError(f"{rule}, please call `unmerge_adapter` first.")
    if len(ffn_input) % len(row_names):
        raise _wrong_length(len(row_names), len(ffn_input))


def add_by_row(
    layer: LocasLayer, row_names: list[str], ffn_input: Tensor, result: Tensor
) -> Tensor:
    """Return the FFN's output plus, for each row of the batch, the output of its memory.

    Args:
        layer: the layer that has the memories.
        row_names: N names; each is that of B / N rows, which follow one another.
        ffn_input: A, `[B, T, D]`, or `[B * T, D]` of a flat FFN.
        result: FFN(A), of the same shape.
    """
    count = len(row_names)
    # The tokens of each name, [N, B / N * T, D].
    inputs = ffn_input.reshape(count, -1, ffn_input.shape[-1])
    outputs = result.reshape(count, -1, result.shape[-1])
    for names, rows in _group_rows(layer, row_names):
        in_order = rows == list(range(count))
        selected = inputs if in_order else inputs[rows]
        recalled = layer.recall(names, selected.reshape(len(names), -1, inputs.shape[-1]))
        recalled = recalled.reshape(len(rows), *outputs.shape[1:]).to(outputs.dtype)
        if in_order:
            outputs = outputs + recalled
        else:
            outputs = outputs.index_add(0, torch.tensor(rows, device=outputs.device), recalled)
    return outputs.reshape(result.shape)


def _group_rows(layer: LocasLayer, row_names: list[str]) -> list[tuple[list[str], list[int]]]:
    """Group the rows of a batch whose memories have one shape, dtype and number of rows.

    Returns:
        For each group its memories, and their rows, those of the first memory first. A row without
        a memory is in no group.
    """
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(row_names):
        if name in layer.locas_up:
            rows.setdefault(name, []).append(row)
    groups: dict[tuple, tuple[list[str], list[int]]] = {}
    for name, rows_of_name in rows.items():
        up = layer.locas_up[name].weight
        names, rows_of_group = groups.setdefault((up.shape, up.dtype, len(rows_of_name)), ([], []))
        names.append(name)
        rows_of_group += rows_of_name
    return list(groups.values())
