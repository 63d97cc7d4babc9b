"""What a reading's checkpoint holds of the model, and whether a model is the one that it was written with.

An adapter's configuration falls into three: what changes its arithmetic, which a continuation must share; what came
with its weights, which a checkpoint carries; and the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

_FILLED = ("slots",)
"""A LOCAS memory's calibration fills these in."""

_NO_ARITHMETIC = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_version",
    "revision",
    "task_type",
)


def below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Gives the tensors whose names begin with a prefix, without it."""
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


# Adapters


def active_adapters(model: nn.Module) -> list[str]:
    """Gives the names of the adapters that a model's layers have active, but for those it has no configuration of."""
    names = {}
    for module in model.modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            names.update(dict.fromkeys(module.active_adapters))
    configs = getattr(model, "peft_config", None) or {}
    return [name for name in names if name in configs]


def adapter_tensors(model: nn.Module, trained: Iterable[nn.Parameter]) -> dict[str, Tensor]:
    """Gives the active adapters' weights as "adapter/...", and what else is trained as "parameter/..."."""
    tensors = {}
    for name in active_adapters(model):
        weights = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        tensors.update({f"adapter/{name}/{key}": value for key, value in weights.items()})
    known, trained = {value.data_ptr() for value in tensors.values()}, {id(parameter) for parameter in trained}
    for name, parameter in model.named_parameters():
        if id(parameter) in trained and parameter.data_ptr() not in known:
            tensors[f"parameter/{name}"] = parameter
    return tensors


def restore_adapters(model: nn.Module, tensors: dict[str, Tensor], filled: dict[str, dict]) -> None:
    """Takes up what `adapter_tensors` and `filled_fields` gave.

    Raises:
        KeyError: a tensor of something that is not trained, the base's weights say.
    """
    for name in active_adapters(model):
        set_peft_model_state_dict(model, below(tensors, f"adapter/{name}/"), adapter_name=name)
        fill(model, {name: filled[name]})
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name, value in below(tensors, "parameter/").items():
            trained[name].copy_(value)


def filled_fields(model: nn.Module) -> dict[str, dict]:
    """Gives, for each active adapter, the fields of its configuration that came with its weights."""
    configs = {name: model.peft_config[name] for name in active_adapters(model)}
    return {
        name: {field: getattr(config, field) for field in _FILLED if hasattr(config, field)}
        for name, config in configs.items()
    }


def fill(model: nn.Module, fields: dict[str, dict]) -> None:
    """Writes into adapters' configurations what came with their weights."""
    for name, values in fields.items():
        for field, value in values.items():
            setattr(model.peft_config[name], field, value)


# Random state


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Gives torch's random state: the CPU's and, of a model on CUDA, its device's."""
    state = {"random/cpu": torch.get_rng_state()}
    return {**state, "random/cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def set_random_state(tensors: dict[str, Tensor], device: torch.device) -> None:
    """Takes up what `random_state` gave, on whatever device of that kind the model is on now."""
    torch.set_rng_state(tensors["random/cpu"])
    if device.type == "cuda" and "random/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random/cuda"], device)


# The same run


def describe_run(model: nn.Module, settings: dict) -> dict:
    """Says, as JSON can hold it, what a continuation must share with the run that was begun.

    Args:
        settings: the reading's own.
    """
    return {
        "settings": settings,
        "adapters": {name: _adapter_config(model, name) for name in active_adapters(model)},
        "base": _fingerprint(model),
    }


def check_same_run(ours: dict, theirs: dict, directory: Path) -> None:
    """Compares two of `describe_run`.

    Raises:
        ValueError: they differ; names the first difference.
    """
    if ours["adapters"].keys() != theirs["adapters"].keys():
        raise ValueError(
            f"active adapters must be {sorted(theirs['adapters'])} as in the checkpoint in {str(directory)!r}, "
            f"got {sorted(ours['adapters'])}: activate those, or choose another folder"
        )
    if ours["base"] != theirs["base"]:
        raise ValueError(
            f"model must be the one of the checkpoint in {str(directory)!r}, got other base weights: "
            "load that model in the same dtype, or choose another folder"
        )
    pairs = [("", ours["settings"], theirs["settings"])]
    pairs += [(f"adapter {name!r}: ", ours["adapters"][name], theirs["adapters"][name]) for name in ours["adapters"]]
    for where, here, there in pairs:
        for field in sorted(here.keys() | there.keys()):
            if here.get(field) != there.get(field):
                raise ValueError(
                    f"{where}{field} must be {there.get(field)!r} as in the checkpoint in {str(directory)!r}, got "
                    f"{here.get(field)!r}: give the former value, or choose another folder"
                )


def _adapter_config(model: nn.Module, name: str) -> dict:
    """An adapter's configuration as JSON, without what does not change its arithmetic."""
    config = model.peft_config[name].to_dict()
    config = {field: value for field, value in config.items() if field not in _NO_ARITHMETIC + _FILLED}
    return json.loads(json.dumps(config, default=_to_plain))


def _to_plain(value: object) -> object:
    """What JSON cannot hold in a form that it can."""
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def _fingerprint(model: nn.Module) -> str:
    """A hash over the base's parameters: names, shapes, dtypes, and the first few numbers of each."""
    digest = hashlib.sha256()
    adapters = [
        (name + ".", ("base_layer.", "original_module."))
        for name, module in model.named_modules()
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
    ]
    for name, parameter in model.named_parameters():
        if any(name.startswith(prefix) and not name[len(prefix) :].startswith(base) for prefix, base in adapters):
            continue
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        trained = parameter.requires_grad and bool(adapters)
        if not trained and parameter.device.type != "meta":
            digest.update(repr(parameter.detach().reshape(-1)[:16].double().tolist()).encode())
    return digest.hexdigest()
