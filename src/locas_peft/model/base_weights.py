"""The base's weights: their digest, and what is computed once because it depends on them alone."""

import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from ..tuner.modules import ADAPTER_LAYERS, adapters_disabled, base_parameters, used_modules

MOST_KNOWN = 256
_KNOWN: dict[Hashable, Any] = {}


def fingerprint(model: nn.Module) -> str:
    """Return a SHA-256 of the base's frozen parameters.

    It is over names, shapes, dtypes, and up to 4,096 numbers of each.
    The numbers are evenly spread: a change of others alone is not seen, nor one of weights that are
    sharded, on the meta device, or of a tensor type of their own. It is the same with and without
    adapters.
    """
    digest = hashlib.sha256()
    is_adapted = any(isinstance(module, ADAPTER_LAYERS) for module in model.modules())
    for name, parameter in base_parameters(model):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        is_trained = is_adapted and parameter.requires_grad
        if type(parameter.data) is torch.Tensor and not parameter.is_meta and not is_trained:
            numbers = parameter.detach().reshape(-1)
            step = -(-len(numbers) // 4096) or 1
            digest.update(numbers[::step].to("cpu", torch.float64).numpy())
    return digest.hexdigest()


def compute_once(
    model: nn.Module,
    compute: Callable[..., Any],
    *arguments: Hashable,
    reference: str | None = None,
    state: Hashable = None,
) -> Any:
    """Return `compute(model, *arguments, reference)`: once in a process for each base.

    A base is known by its name and fingerprint. With a reference, and where frozen adapters stay on
    as part of the base, the result is computed at each call.

    Args:
        model: the base, with or without adapters.
        compute: a function of the model and the arguments. Do not change what it returns.
        arguments: what the result depends on beside the base.
        reference: see `reference_active`.
        state: what else the result depends on, such as the chat template of a tokenizer among the
            arguments.
    """
    if reference is not None or _has_adapters_on(model):
        return compute(model, *arguments, reference)
    key = model.config.name_or_path, fingerprint(model), compute, arguments, state
    if key not in _KNOWN:
        if len(_KNOWN) == MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = compute(model, *arguments, None)
    return _KNOWN[key]


def _has_adapters_on(model: nn.Module) -> bool:
    """Return whether adapters stay on where the active ones are disabled."""
    with adapters_disabled(model):
        for module in used_modules(model):
            if isinstance(module, ADAPTER_LAYERS) and not module._disable_adapters:
                return True
    return False
