"""The fresh adapter of a method, on its base within a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import get_peft_model
from torch import nn
from transformers import PreTrainedModel

from ..tuner.modules import remember_modules
from .settings import CompleteSettings

__all__ = ["attached"]


@contextmanager
def attached(base: PreTrainedModel, settings: CompleteSettings) -> Iterator[nn.Module]:
    """Attach a method's fresh adapter to a base within the context, after setting torch's seed.

    `base`, a causal LM without adapters, is mutated. Afterwards its modules, weights, `requires_grad` flags and mode
    are as before.

    Raises:
        ValueError: the method does not fit the base.
    """
    restore = remember_modules(base)
    torch.manual_seed(settings.seed)
    try:
        config = settings.method.make_config(base, settings.seed)
        yield base.requires_grad_(False) if config is None else get_peft_model(base, config)
    finally:
        restore()
        base.zero_grad(set_to_none=True)
