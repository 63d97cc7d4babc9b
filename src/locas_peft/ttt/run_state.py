"""The part of a checkpoint that is the model's: what was trained, and what a continuation must share.

Of an adapter's configuration, the fields that change its arithmetic must be the same. The fields that calibration
fills in are restored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checks import describe_difference
from ..tuner.modes import ADAPTER_LAYERS, base_parameters

__all__ = ["describe_run", "find_difference", "fingerprint", "model_state"]
__all__ += ["restore_model_state"]

_FILLED_BY_CALIBRATION = ("slots",)
# "host" describes the base, which is compared by its fingerprint.
_NO_ARITHMETIC = {"auto_mapping", "base_model_name_or_path", "host", "inference_mode", "peft_version", "revision"}
_NO_ARITHMETIC |= {"task_type", *_FILLED_BY_CALIBRATION}


def _adapter_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ADAPTER_LAYERS)}


def _active_configs(model: nn.Module) -> dict[str, Any]:
    """Return the configurations of the active adapters, by name."""
    names = dict.fromkeys(name for module in _adapter_modules(model).values() for name in module.active_adapters)
    configs = getattr(model, "peft_config", None) or {}
    return {name: configs[name] for name in names if name in configs}


def model_state(model: nn.Module, trained: Iterable[nn.Parameter]) -> dict[str, Any]:
    """Return what training changes: parameters, the active adapters' buffers, and fields filled by calibration."""
    trained = {id(parameter) for parameter in trained}
    active = _active_configs(model)
    inactive = (getattr(model, "peft_config", None) or {}).keys() - active.keys()
    return {
        "parameters": {name: value for name, value in model.named_parameters() if id(value) in trained},
        "buffers": {
            f"{prefix}.{name}": buffer
            for prefix, module in _adapter_modules(model).items()
            for name, buffer in module.named_buffers()
            if not name.startswith(("base_layer.", "original_module.")) and name.rpartition(".")[2] not in inactive
        },
        "filled": {
            name: {field: getattr(config, field) for field in _FILLED_BY_CALIBRATION if hasattr(config, field)}
            for name, config in active.items()
        },
    }


@torch.no_grad()
def restore_model_state(model: nn.Module, trained: Iterable[nn.Parameter], state: dict[str, Any]) -> None:
    """Copy what `model_state` returned into a model; raise a `ValueError` where other tensors are trained here."""
    here = model_state(model, trained)
    for kind in ("parameters", "buffers"):
        if here[kind].keys() != state[kind].keys():
            raise ValueError(f"other {kind} than those that are trained")
        for name, tensor in here[kind].items():
            value = state[kind][name]
            if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
                raise ValueError(
                    f"{name} is {list(value.shape)} {value.dtype}, expected {list(tensor.shape)} {tensor.dtype}"
                )
            tensor.copy_(value)
    for name, fields in state["filled"].items():
        for field, value in fields.items():
            setattr(model.peft_config[name], field, value)


def describe_run(model: nn.Module, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what a continuation must share with the reading that was begun, as plain values."""
    adapters = {}
    for name, config in _active_configs(model).items():
        fields = {field: value for field, value in config.to_dict().items() if field not in _NO_ARITHMETIC}
        text = json.dumps(fields, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
        adapters[name] = json.loads(text)
    return {"settings": settings, "adapters": adapters, "base": fingerprint(model)}


def find_difference(ours: dict[str, Any], theirs: dict[str, Any], directory: Path) -> str | None:
    """Return the message for the first difference between two results of `describe_run`; None where there is none."""
    where = f"the checkpoint in {str(directory)!r}"
    compared = [("", ours["settings"], theirs["settings"])]
    for name, config in ours["adapters"].items():
        compared.append((f"adapter {name!r}: ", config, theirs["adapters"].get(name, config)))
    for prefix, here, there in compared:
        difference = describe_difference(here, there, where, "give the former value, or choose another folder", prefix)
        if difference is not None:
            return difference
    if ours["adapters"].keys() != theirs["adapters"].keys():
        return (
            f"active adapters must be {sorted(theirs['adapters'])} as in {where}, got {sorted(ours['adapters'])}: "
            "activate those, or choose another folder"
        )
    if ours["base"] != theirs["base"]:
        return (
            f"model must be the one of {where}, got other base weights: load that model in the same dtype, or choose "
            "another folder"
        )
    return None


def fingerprint(model: nn.Module) -> str:
    """Return a hash over the base's frozen parameters: names, shapes, dtypes, and the first 16 numbers of each.

    It is the same with and without adapters.
    """
    digest = hashlib.sha256()
    adapted = bool(_adapter_modules(model))
    for name, parameter in base_parameters(model):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if not (adapted and parameter.requires_grad) and parameter.device.type != "meta":
            digest.update(repr(parameter.detach().reshape(-1)[:16].double().tolist()).encode())
    return digest.hexdigest()
