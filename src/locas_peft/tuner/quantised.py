"""Weights of quantised bases: read as floating-point numbers, and kept in a layout in which they can be read."""

from __future__ import annotations

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import nn


def dequantize(module: nn.Module) -> torch.Tensor:
    """Return the weight of a projection, dequantised if it is quantised. The module does not change."""
    parameter = module.weight
    weight = dequantize_module_weight(module)
    if module.weight is not parameter:  # PEFT puts an 8-bit parameter without its scales in its place
        module.weight = parameter
    return weight


def forbid_packing(model: nn.Module) -> None:
    """Keep the layout of bitsandbytes' 4-bit weights on a CPU.

    In a forward without gradients, bitsandbytes packs them for the CPU's bfloat16 instructions. Packed weights cannot
    be dequantised, and give no gradient to the memories below.

    Raises:
        ValueError: the weights are packed already.
    """
    for name, module in model.named_modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
                raise ValueError(
                    f"{name} was packed by bitsandbytes in a forward on the CPU, which cannot be undone exactly: load "
                    "the base again, and add the memory before its first forward."
                )
            module.support_avx512bf16_for_cpu = False
