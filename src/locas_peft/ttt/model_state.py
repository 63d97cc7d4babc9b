"""What training changes in a model: parameters, adapters' buffers, what calibration fills in."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..tuner import clip_memories, keep_weights
from ..tuner.modules import ADAPTER_LAYERS

__all__ = ["active_configs", "model_state", "restore_model_state"]

_BASE = ("base_layer.", "original_module.")


def active_configs(model: nn.Module) -> dict[str, Any]:
    """Return the configurations of the active adapters, by name."""
    names: dict[str, None] = {}
    for module in model.modules():
        if isinstance(module, ADAPTER_LAYERS):
            names.update(dict.fromkeys(module.active_adapters))
    configs = _configs_of(model)
    return {name: configs[name] for name in names if name in configs}


def model_state(model: nn.Module, trained: Iterable[nn.Parameter]) -> dict[str, Any]:
    """Return trained parameters, active adapters' buffers, and what calibration fills in."""
    clip_memories(model)
    trained_ids = {id(parameter) for parameter in trained}
    parameters = {
        name: value for name, value in model.named_parameters() if id(value) in trained_ids
    }
    active = active_configs(model)
    filled = {
        name: {"record": config.record}
        for name, config in active.items()
        if hasattr(config, "record")
    }
    inactive = _configs_of(model).keys() - active.keys()
    return {"parameters": parameters, "buffers": _list_buffers(model, inactive), "filled": filled}


@torch.no_grad()
def restore_model_state(
    model: nn.Module, trained: Iterable[nn.Parameter], state: dict[str, Any]
) -> None:
    """Copy what `model_state` returned into a model.

    Raises:
        ValueError: where other tensors are trained here.
    """
    current = model_state(model, trained)
    for kind in ("parameters", "buffers"):
        if current[kind].keys() != state[kind].keys():
            raise ValueError(f"other {kind} than those that are trained")
        for name, tensor in current[kind].items():
            _copy(name, tensor, state[kind][name])
    keep_weights(model)
    for name, fields in state["filled"].items():
        for field, value in fields.items():
            setattr(model.peft_config[name], field, value)


def _configs_of(model: nn.Module) -> dict[str, Any]:
    return getattr(model, "peft_config", None) or {}


def _list_buffers(model: nn.Module, inactive: Iterable[str]) -> dict[str, Tensor]:
    """Return the adapter layers' buffers, without the base's and those of inactive adapters."""
    buffers: dict[str, Tensor] = {}
    for prefix, layer in model.named_modules():
        if not isinstance(layer, ADAPTER_LAYERS):
            continue
        for name, buffer in layer.named_buffers():
            adapter_name = name.rpartition(".")[2]
            if not name.startswith(_BASE) and adapter_name not in inactive:
                buffers[f"{prefix}.{name}"] = buffer
    return buffers


def _copy(name: str, tensor: Tensor, value: Tensor) -> None:
    if tensor.shape != value.shape or tensor.dtype != value.dtype:
        got = f"{list(value.shape)} {value.dtype}"
        raise ValueError(f"{name} is {got}, expected {list(tensor.shape)} {tensor.dtype}")
    tensor.copy_(value)
