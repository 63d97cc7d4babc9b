"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def name_of(optimizer: str | OptimizerFactory) -> str:
    """Gives the name under which a checkpoint knows an optimizer."""
    if isinstance(optimizer, str):
        return optimizer
    named = optimizer if hasattr(optimizer, "__qualname__") else type(optimizer)
    return f"{named.__module__}.{named.__qualname__}"


def _fused(
    kind: type[torch.optim.Optimizer], parameters: list[nn.Parameter], rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    # One kernel over all parameters: unfused, a step over many small matrices costs a tenth of a chunk on a CPU.
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    return kind(parameters, lr=rate, weight_decay=weight_decay, fused=fused)


def _muon(parameters: list[nn.Parameter], rate: float, weight_decay: float) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"optimizer 'muon' must have torch 2.9 or later, got {torch.__version__}: use 'adamw'")
    other = next((tuple(parameter.shape) for parameter in parameters if parameter.ndim != 2), None)
    if other is not None:
        raise ValueError(f"optimizer 'muon' must have matrices only, got a parameter of shape {other}: use 'adamw'")
    return torch.optim.Muon(parameters, lr=rate, weight_decay=weight_decay)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], float, float], torch.optim.Optimizer]] = {
    "adamw": partial(_fused, torch.optim.AdamW),
    "adam": partial(_fused, torch.optim.Adam),
    "sgd": partial(_fused, torch.optim.SGD),
    "muon": _muon,
}
"""From parameters, learning rate and weight decay to the optimizer."""
