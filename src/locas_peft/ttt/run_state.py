"""The part of a checkpoint that is the model's: what was trained, and what a continuation must share.

Of an adapter's configuration, the fields that change its arithmetic must be the same; the fields that calibration
fills in are restored; the rest is ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

__all__ = ["describe_run", "differing_field", "find_difference", "fingerprint", "model_state", "restore_model_state"]

_FILLED_BY_CALIBRATION = ("slots",)
_NO_ARITHMETIC = (
    "auto_mapping",
    "base_model_name_or_path",
    "host",  # a description of the base, which is compared by its fingerprint
    "inference_mode",
    "peft_version",
    "revision",
    "task_type",
)


def list_active_adapters(model: nn.Module) -> list[str]:
    """Return the names of the active adapters that the model has a configuration of."""
    names = dict.fromkeys(name for module in _adapter_modules(model).values() for name in module.active_adapters)
    configs = getattr(model, "peft_config", None) or {}
    return [name for name in names if name in configs]


def model_state(model: nn.Module, trained: Iterable[nn.Parameter]) -> dict[str, Any]:
    """Return what training changes: parameters, the active adapters' buffers, and fields filled by calibration."""
    trained = {id(parameter) for parameter in trained}
    return {
        "parameters": {name: value for name, value in model.named_parameters() if id(value) in trained},
        "buffers": dict(_adapter_buffers(model)),
        "filled": {
            name: {
                field: getattr(model.peft_config[name], field)
                for field in _FILLED_BY_CALIBRATION
                if hasattr(model.peft_config[name], field)
            }
            for name in list_active_adapters(model)
        },
    }


@torch.no_grad()
def restore_model_state(model: nn.Module, trained: Iterable[nn.Parameter], state: dict[str, Any]) -> None:
    """Copy what `model_state` returned into a model.

    Raises:
        ValueError: other tensors than those that are trained here, or of another shape or dtype.
    """
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


def _adapter_modules(model: nn.Module) -> dict[str, nn.Module]:
    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def _adapter_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    inactive = (getattr(model, "peft_config", None) or {}).keys() - list_active_adapters(model)
    for prefix, module in _adapter_modules(model).items():
        for name, buffer in module.named_buffers():
            if not name.startswith(("base_layer.", "original_module.")) and name.rpartition(".")[2] not in inactive:
                yield f"{prefix}.{name}", buffer


# ---------------------------------------------------------------------- the same run


def describe_run(model: nn.Module, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what a continuation must share with the reading that was begun, as plain values.

    Args:
        settings: the reading's own.
    """
    return {
        "settings": settings,
        "adapters": {name: _describe_adapter(model, name) for name in list_active_adapters(model)},
        "base": fingerprint(model),
    }


def find_difference(ours: dict[str, Any], theirs: dict[str, Any], directory: Path) -> str | None:
    """Compare two results of `describe_run`.

    Returns:
        The message for the first difference; None where there is none.
    """
    where = f"as in the checkpoint in {str(directory)!r}"
    compared = {"": (ours["settings"], theirs["settings"])}
    for name, config in ours["adapters"].items():
        compared[f"adapter {name!r}: "] = config, theirs["adapters"].get(name, config)
    for prefix, (here, there) in compared.items():
        field = differing_field(here, there)
        if field is not None:
            return (
                f"{prefix}{field} must be {there.get(field)!r} {where}, got {here.get(field)!r}: give the former "
                "value, or choose another folder"
            )
    if ours["adapters"].keys() != theirs["adapters"].keys():
        return (
            f"active adapters must be {sorted(theirs['adapters'])} {where}, got {sorted(ours['adapters'])}: activate "
            "those, or choose another folder"
        )
    if ours["base"] != theirs["base"]:
        return (
            f"model must be the one of the checkpoint in {str(directory)!r}, got other base weights: load that model "
            "in the same dtype, or choose another folder"
        )
    return None


def differing_field(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Return the first field in which two settings differ; `method` and `preset`, which others follow from, first."""
    fields = ("method", "preset", *ours, *theirs)
    return next((field for field in fields if ours.get(field) != theirs.get(field)), None)


def _describe_adapter(model: nn.Module, name: str) -> dict[str, Any]:
    config = model.peft_config[name].to_dict()
    config = {field: config[field] for field in config if field not in _NO_ARITHMETIC + _FILLED_BY_CALIBRATION}
    return json.loads(
        json.dumps(config, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    )


def fingerprint(model: nn.Module) -> str:
    """Return a hash over the base's frozen parameters: names, shapes, dtypes, and the first 16 numbers of each.

    It is the same with and without adapters.
    """
    digest = hashlib.sha256()
    adapters = [(f"{name}.", module) for name, module in _adapter_modules(model).items()]
    for name, parameter in model.named_parameters():
        wrapped = [name[len(prefix) :] for prefix, _ in adapters if name.startswith(prefix)]
        if any(not rest.startswith(("base_layer.", "original_module.")) for rest in wrapped):
            continue  # an adapter's own
        plain = name.removeprefix("base_model.model.").replace("base_layer.", "").replace("original_module.", "")
        digest.update(f"{plain} {tuple(parameter.shape)} {parameter.dtype}".encode())
        trained = parameter.requires_grad and bool(adapters)
        if not trained and parameter.device.type != "meta":
            digest.update(repr(parameter.detach().reshape(-1)[:16].double().tolist()).encode())
    return digest.hexdigest()
