"""Batches whose rows use different memories: PEFT's `adapter_names`, one memory or "__base__" for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .layer import LocasLayer


def check_adapter_names(layer: LocasLayer, adapter_names: list[str], ffn_input: Tensor) -> None:
    """Raise a `ValueError` if the layer has merged memories, or there is not one name for each row of the batch."""
    if layer.merged:
        rule = "Cannot pass `adapter_names` when there are merged adapters"
        raise ValueError(f"{rule}, please call `unmerge_adapter` first.")
    inputs, names = len(ffn_input), len(adapter_names)
    if inputs % names or (
        ffn_input.dim() > 2 and inputs != names
    ):  # the input of a flat FFN is [B * T, D]
        rule = "Length of `adapter_names` should be the same as the number of inputs"
        raise ValueError(f"{rule}, but got {names} and {inputs} respectively.")


def add_by_row(
    layer: LocasLayer, adapter_names: list[str], ffn_input: Tensor, result: Tensor
) -> Tensor:
    """Return the FFN's output plus, for each row of the batch, the output of the memory of that name.

    `ffn_input` is A and `result` FFN(A), both `[B, T, D]`, or `[B * T, D]` of a flat FFN.
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

    Each group has its memories and their rows, those of the first memory first. A row without a memory has no group.
    """
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(adapter_names):
        if name in layer.locas_up:
            rows.setdefault(name, []).append(row)
    groups: dict[tuple, list[str]] = {}
    for name in rows:
        up = layer.locas_up[name].weight
        groups.setdefault((up.shape, up.dtype, len(rows[name])), []).append(name)
    return [(names, [row for name in names for row in rows[name]]) for names in groups.values()]
