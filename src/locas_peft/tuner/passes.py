"""What every pass over a text needs: evaluation mode for its duration, and inputs where the model takes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within the context; each module's own mode is restored after it."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def to_inputs(model: nn.Module, batch: torch.Tensor | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch as the model's keyword arguments, on the device that it takes them on.

    Args:
        batch: `LongTensor [B, T]`, or a mapping with `input_ids` and maybe `attention_mask`, both `[B, T]`.
    """
    inputs = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":  # offloaded: accelerate moves the inputs
        device = inputs["input_ids"].device
    return {key: inputs[key].to(device) for key in ("input_ids", "attention_mask") if key in inputs}
