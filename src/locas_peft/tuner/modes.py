"""Context managers for forward passes: evaluation mode, and adapters switched off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from .modules import ADAPTER_LAYERS, used_modules


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode within the context. Each module's own mode is restored afterwards."""
    training = [module for module in used_modules(model) if module.training]
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
    modules = (module for module in used_modules(model) if id(module) not in kept)
    adapters = [module for module in modules if isinstance(module, ADAPTER_LAYERS)]
    switched = [module for module in adapters if not module._disable_adapters]
    for module in switched:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in switched:
            module._disable_adapters = False
