"""Batches whose rows use different memories: PEFT's `adapter_names`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .layer import LocasLayer


def check_adapter_names(layer: LocasLayer, adapter_names: list[str], ffn_input: Tensor) -> None:
    """Check the names of a batch.

    Args:
        layer: the layer that is given the batch.
        adapter_names: a name for each row.
        ffn_input: A, `[B, T, D]`, or `[B * T, D]` of a flat FFN.

    Raises:
        ValueError: where the layer has merged memories, or there is not one name for each row.
    """
    if layer.merged:
        rule = "Cannot pass `adapter_names` when there are merged adapters"
        raise ValueError(f"{rule}, please call `unmerge_adapter` first.")
    inputs = len(ffn_input)
    names = len(adapter_names)
    if inputs % names or (ffn_input.dim() > 2 and inputs != names):
        rule = "Length of `adapter_names` should be the same as the number of inputs"
        raise ValueError(f"{rule}, but got {names} and {inputs} respectively.")


def add_by_row(
    layer: LocasLayer, adapter_names: list[str], ffn_input: Tensor, result: Tensor
) -> Tensor:
    """Return the FFN's output plus, for each row of the batch, the output of its memory.

    Args:
        layer: the layer that has the memories.
        adapter_names: a name for each row.
        ffn_input: A, `[B, T, D]`, or `[B * T, D]` of a flat FFN.
        result: FFN(A), of the same shape.
    """
    batch = len(adapter_names)
    inputs = ffn_input.reshape(batch, -1, ffn_input.shape[-1])  # [B, T, D], flat FFN or not
    outputs = result.reshape(batch, -1, result.shape[-1])
    for names, rows in _group_rows(layer, adapter_names):
        in_order = rows == list(range(batch))
        selected = inputs if in_order else inputs[rows]
        recalled = layer.recall(names, selected.reshape(len(names), -1, inputs.shape[-1]))
        recalled = recalled.reshape(len(rows), *outputs.shape[1:]).to(outputs.dtype)
        if in_order:
            outputs = outputs + recalled
        else:
            outputs = outputs.index_add(0, torch.tensor(rows, device=outputs.device), recalled)
    return outputs.reshape(result.shape)


def _group_rows(layer: LocasLayer, adapter_names: list[str]) -> list[tuple[list[str], list[int]]]:
    """Group the rows of a batch whose memories have one shape, dtype and number of rows.

    Returns:
        For each group its memories, and their rows, those of the first memory first. A row without
        a memory is in no group.
    """
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(adapter_names):
        if name in layer.locas_up:
            rows.setdefault(name, []).append(row)
    groups: dict[tuple, tuple[list[str], list[int]]] = {}
    for name, rows_of_name in rows.items():
        up = layer.locas_up[name].weight
        names, rows_of_group = groups.setdefault((up.shape, up.dtype, len(rows_of_name)), ([], []))
        names.append(name)
        rows_of_group += rows_of_name
    return list(groups.values())
