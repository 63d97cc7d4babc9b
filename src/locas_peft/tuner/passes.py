"""Context managers and inputs for forward passes over a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode within the context. Each module's own mode is restored afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def adapters_disabled(model: nn.Module, except_for: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Switch a model's adapters off within the context, except for some: PEFT's layers and fully trained modules.

    Unlike PEFT's `disable_adapter`, it works on any module and leaves `requires_grad` alone.
    """
    kept = {id(module) for module in except_for}
    kinds = BaseTunerLayer | AuxiliaryTrainingWrapper
    adapters = [module for module in model.modules() if isinstance(module, kinds) and id(module) not in kept]
    switched = [module for module in adapters if not module._disable_adapters]
    for module in switched:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in switched:
            module._disable_adapters = False


def to_inputs(model: nn.Module, batch: torch.Tensor | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch as the model's keyword arguments, on the device of its embeddings.

    Args:
        batch: `LongTensor [B, T]`, or a mapping with `input_ids` and optionally `attention_mask`, both `[B, T]`.
    """
    inputs = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":  # offloaded: accelerate moves the inputs
        device = inputs["input_ids"].device
    return {key: inputs[key].to(device) for key in ("input_ids", "attention_mask") if key in inputs}
