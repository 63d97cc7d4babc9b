"""What training changes in a model: parameters, buffers of adapters, and fields that calibration fills in."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..tuner import clip_memories, keep_weights
from ..tuner.modules import ADAPTER_LAYERS


def active_configs(model: nn.Module) -> dict[str, Any]:
    """Return the configurations of the active adapters, by name."""
    layers = [module for module in model.modules() if isinstance(module, ADAPTER_LAYERS)]
    names = dict.fromkeys(name for layer in layers for name in layer.active_adapters)
    configs = getattr(model, "peft_config", None) or {}
    return {name: configs[name] for name in names if name in configs}


def model_state(model: nn.Module, trained: Iterable[nn.Parameter]) -> dict[str, Any]:
    """Return the trained parameters, the active adapters' buffers, and the field that calibration fills in."""
    clip_memories(model)
    trained = {id(parameter) for parameter in trained}
    active = active_configs(model)
    inactive = (getattr(model, "peft_config", None) or {}).keys() - active.keys()
    buffers = {}
    for prefix, layer in model.named_modules():
        for name, buffer in layer.named_buffers() if isinstance(layer, ADAPTER_LAYERS) else ():
            if not (
                name.startswith(("base_layer.", "original_module."))
                or name.rpartition(".")[2] in inactive
            ):
                buffers[f"{prefix}.{name}"] = buffer
    return {
        "parameters": {
            name: value for name, value in model.named_parameters() if id(value) in trained
        },
        "buffers": buffers,
        "filled": {
            name: {"slots": one.slots} for name, one in active.items() if hasattr(one, "slots")
        },
    }


@torch.no_grad()
def restore_model_state(
    model: nn.Module, trained: Iterable[nn.Parameter], state: dict[str, Any]
) -> None:
    """Copy what `model_state` returned into a model; raise a `ValueError` where other tensors are trained here."""
    own = model_state(model, trained)
    for kind in ("parameters", "buffers"):
        if own[kind].keys() != state[kind].keys():
            raise ValueError(f"other {kind} than those that are trained")
        for name, tensor in own[kind].items():
            value = state[kind][name]
            if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
                expected = f"{list(tensor.shape)} {tensor.dtype}"
                raise ValueError(
                    f"{name} is {list(value.shape)} {value.dtype}, expected {expected}"
                )
            tensor.copy_(value)
    keep_weights(model)
    for name, fields in state["filled"].items():
        for field, value in fields.items():
            setattr(model.peft_config[name], field, value)
