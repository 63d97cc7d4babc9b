"""Load saved memories onto their base, or describe them from their files alone."""

import dataclasses
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median, median_low
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..bases import load_base
from ..checks import first_line, one_line
from ..files import finish_replacement, is_out_of_memory, load_json
from ..tables import Sheet, format_figure
from ..tuner import LocasConfig
from ..tuner.memory_file import PREFIX, SCALES, split_tensors
from ..tuner.modules import remember_modules
from .base_sample import may_be_same_weights, sample_weights
from .folder import MEMORY_CONFIG, READING
from .guards import guard_memory, load_memory_file
from .signing import check_signature
from .tensor_file import find_tensor_file, load_tensors

__all__ = [
    "LEAST_OTHERS",
    "add_beside",
    "describe_memory",
    "find_unusual",
    "load_memory",
    "load_memory_config",
]
__all__ += ["memory_attached", "open_memory", "tabulate_memory"]

LEAST_OTHERS, MOST_OTHERS = 5, 50
_DEVIATIONS, _LEAST_FACTOR = 6.0, 2.0
"""Usual are values within so many standard deviations of the median, or within this factor of it."""

_QUANTITIES = ("r", "tau", "input_scale", "gate", "up", "down")
_NORMS = (("gate", "mean"), ("up", "mean"), ("down", "mean"), ("down", "max"))


def open_memory(
    directory: str | Path,
    base: str | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantize: str | None = None,
    require_signature: str | Path | None = None,
    **fields: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, PeftModel]:
    """Load a memory together with its base: the base, its tokenizer, and the base with the memory, all frozen.

    Base and memory share their modules: within `model.disable_adapter()` the model is the base.

    Args:
        base: name of the base; None for the one that the memory names.
        dtype, device, quantize: as for `load_base`.
        require_signature, fields: as for `load_memory`.
    """
    config, path = find_files(directory, require_signature)
    name = base or config.base_model_name_or_path
    if not name:
        raise ValueError(f"memory {str(directory)!r} does not name its base: give it with --model")
    model, tokenizer = load_base(name, dtype, device, quantize)
    return model, tokenizer, _attach(model, config, path, fields).eval()


def load_memory(
    base: PreTrainedModel,
    directory: str | Path,
    *,
    trainable: bool = False,
    require_signature: str | Path | None = None,
    **fields: Any,
) -> PeftModel:
    """Load a memory, LOCAS or another PEFT adapter, onto its base, frozen unless it is to be trained.

    Args:
        base: the model that it was made for; mutated (`PeftModel.unload` takes the memory out again).
        require_signature: file of a key: a memory that its owner has not signed is refused (see `check_signature`).
        fields: values for fields of its config, such as `pad_to_multiple_of`, in place of the saved ones.

    Raises:
        ValueError: the folder holds no memory, a damaged one, or one that was made for another base. The base is as it
            was before. A base of the same shapes with other weights gives a warning.
    """
    return _attach(base, *find_files(directory, require_signature), fields, trainable)


def add_beside(
    model: PeftModel, memories: Sequence[str | Path], require_signature: str | Path | None = None
) -> None:
    """Load saved memories of one type beside a model's own adapter, in place: all are active, the added ones frozen.

    The model's own adapter stays `active_adapter`, trained or frozen as before. Errors are those of `load_memory`.
    """
    own, trained = model.active_adapter, [each for each in model.parameters() if each.requires_grad]
    names = [f"beside {number}" for number, _ in enumerate(memories, 1)]
    for name, memory in zip(names, memories, strict=True):
        config, path = find_files(memory, require_signature)
        if config.peft_type != model.peft_config[own].peft_type:
            got = f"{config.peft_type.value} in {str(memory)!r}"
            raise ValueError(f"memories side by side must be of one type, got {got}: leave it out")
        _attach(model, config, path, {}, beside=name)
    model.base_model.set_adapter([*names, own])  # which lets all be trained
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)


@contextmanager
def memory_attached(
    base: PreTrainedModel,
    directory: str | Path,
    require_signature: str | Path | None = None,
    beside: Sequence = (),
) -> Iterator[PeftModel]:
    """Attach a saved memory to its base, a causal LM without adapters, within the context, frozen and for evaluation.

    Others `beside` it are active too. The base is mutated, and restored at the end.
    """
    restore = remember_modules(base)
    try:
        model = load_memory(base, directory, require_signature=require_signature)
        if beside:
            add_beside(model, beside, require_signature)
        yield model.requires_grad_(False).eval()
    finally:
        restore()


def load_memory_config(
    directory: str | Path, require_signature: str | Path | None = None
) -> dict[str, Any]:
    """Load the JSON config of a memory's folder; finish a replacement that was stopped midway first (`files.staged`).

    A folder without a memory, a damaged config, and files that the owner of a required key has not signed are a
    `ValueError`. Each way to open a memory begins here.
    """
    finish_replacement(directory)
    path = Path(directory) / MEMORY_CONFIG
    if not path.is_file():
        found = "a folder without " + MEMORY_CONFIG if Path(directory).is_dir() else "no folder"
        rule, remedy = (
            "memory must be a folder that holds a memory",
            "make one with `locas memorize TEXT --out DIR`",
        )
        raise ValueError(f"{rule}, got {str(directory)!r}, {found}: {remedy}")
    if require_signature is not None:
        check_signature(directory, require_signature)
    config = load_json(path)
    if not isinstance(config, dict) or "peft_type" not in config:
        raise ValueError(f"{path} must name its peft_type, got none: copy or save the memory again")
    if (
        not isinstance(config["peft_type"], str)
        or config["peft_type"] not in PEFT_TYPE_TO_CONFIG_MAPPING
    ):
        raise ValueError(
            f"{path} must name a peft_type that PEFT has, got {config['peft_type']!r}: update peft"
        )
    base = config.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise ValueError(
            f"{path} must name its base by a string, got {base!r}: copy or save the memory again"
        )
    return config


def describe_memory(directory: str | Path) -> dict[str, Any]:
    """Describe a memory from its files alone: no base is loaded.

    Returns:
        JSON values: `memory_dir`, `base`, `peft_type`, `r`, `init`, `scaling`, `dtype`, `parameters`, `bytes`
        (of the tensors' file), `host`, `replaces` (the tensors of a LOCAS memory's file that replace weights of the
        base, by name), `learned` (False for a LOCAS memory without an output; None for other adapters), `digests` (of
        the reading's record), `layers`: for a LOCAS memory an entry for each FFN with `name`, `r`, `tau`,
        `input_scale`, `slots` (None where no host slots were cloned) and, for `gate` (None in a two-layer memory),
        `up` and `down`, `mean` and `max` of the slots' norms.

    Raises:
        ValueError: there is no memory, or its files hold something that loading refuses.
    """
    config, path = find_files(directory)
    is_memory = config.peft_type == "LOCAS"
    tensors = load_memory_file(path, config) if is_memory else _load_other_tensors(path)
    parts, others = split_tensors(tensors) if is_memory else ({}, [])
    record_of_config = getattr(config, "record", None) or {}
    slots, layers = record_of_config.get("slots") or {}, []
    record = load_json(path.with_name(READING)) if path.with_name(READING).is_file() else {}
    if not isinstance(record, dict):
        raise ValueError(
            f"{path.with_name(READING)} must be the record of a reading: copy or save the memory again"
        )
    for name in sorted(
        parts, key=lambda name: [int(number) for number in re.findall(r"\d+", name)]
    ):
        layer = {"name": name, "slots": slots.get(name), **dict.fromkeys(_QUANTITIES)}
        for part, tensor in parts[name].items():
            if part in SCALES:
                layer[part.removeprefix("locas_")] = tensor.item()
            else:
                norms = tensor.float().norm(
                    dim=0 if part == "locas_down" else 1
                )  # gate, up [R, D]; down [D, R]
                found = {"mean": norms.mean().item(), "max": norms.max().item()}
                layer |= {part.removeprefix("locas_"): found, "r": len(norms)}
        layers.append(layer)
    return {
        "memory_dir": str(directory),
        "base": config.base_model_name_or_path,
        "peft_type": str(config.peft_type.value),
        "r": getattr(config, "r", None),
        "init": getattr(config, "strategy", None),
        "scaling": getattr(config, "scaling", None),
        "dtype": ", ".join(
            sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
        ),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": path.stat().st_size,
        "host": record_of_config.get("host"),
        "digests": {key: value for key, value in record.items() if key.endswith("_sha256")},
        "replaces": [key.removeprefix(PREFIX) for key in others],
        "learned": any(layer["down"]["max"] > 0 for layer in layers) if is_memory else None,
        "layers": layers,
    }


def find_unusual(memory: dict[str, Any], folders: Sequence[str | Path] = ()) -> dict[str, Any]:
    """Compare slots, scales and norms of a memory, as `describe_memory` returns it, with the latest 50 of its base.

    These are in `folders`, or in the folder around the memory; damaged ones are left out. The standard deviation is
    that of logarithms, from their median absolute deviation.

    Returns:
        JSON values: `others`, how many were compared; `unusual`, None for fewer than 5, else for each quantity that is
        not usual `quantity`, `value`, and the usual range from `low` to `high`.
    """
    own, others = Path(memory["memory_dir"]).resolve(), list[dict[str, float]]()
    places = [Path(folder).resolve() for folder in folders or [own.parent]]
    configs = {file for place in places for file in place.glob(f"*/{MEMORY_CONFIG}")} - {
        own / MEMORY_CONFIG
    }
    for file in sorted(configs, key=lambda file: -file.stat().st_mtime) if memory["layers"] else ():
        with suppress(ValueError):
            if (
                len(others) < MOST_OTHERS
                and (other := describe_memory(file.parent))["host"] == memory["host"]
            ):
                others.append(_list_quantities(other))
    unusual, known = list[dict[str, Any]](), len(others) >= LEAST_OTHERS
    for name, value in _list_quantities(memory).items() if known else ():
        logs = [math.log(other[name]) for other in others if name in other] or [math.log(value)]
        middle = median(logs)
        width = max(
            _DEVIATIONS * 1.4826 * median(abs(each - middle) for each in logs),
            math.log(_LEAST_FACTOR),
        )
        if abs(math.log(value) - middle) > width:
            low, high = math.exp(middle - width), math.exp(middle + width)
            unusual.append({"quantity": name, "value": value, "low": low, "high": high})
    return {"others": len(others), "unusual": unusual if known else None}


def _list_quantities(memory: dict[str, Any]) -> dict[str, float]:
    """Return the quantities by their names, all positive: medians over the layers, and each layer relative to them."""
    found = {"scaling": memory["scaling"]}
    for part in _QUANTITIES:
        layers = {
            layer["name"]: layer[part] for layer in memory["layers"] if layer[part] is not None
        }
        values = {
            name: abs(each["mean"] if isinstance(each, dict) else each)
            for name, each in layers.items()
        }
        found[f"{part}, median of the layers"] = middle = median_low(values.values() or [0.0])
        for name, value in values.items():
            found[f"{part} in {name} over that median"] = value / (middle or 1.0)
            if isinstance(layers[name], dict):
                found[f"{part} in {name}, largest norm over the mean"] = layers[name]["max"] / (
                    value or 1.0
                )
    return {name: max(abs(value), 1e-12) for name, value in found.items()}


def tabulate_memory(memory: dict[str, Any]) -> Sheet:
    """Return the layers of `describe_memory`, a line each that fits 80 columns.

    The title has what the names of the FFNs share, the first column the rest of each, the last one two host slots.
    """
    pattern, names = _shorten([layer["name"] for layer in memory["layers"]])
    rows = []
    for name, layer in zip(names, memory["layers"], strict=True):
        norms = [format_figure(layer[part] and layer[part][which], 3) for part, which in _NORMS]
        tau = "-" if layer["tau"] is None else f"{layer['tau']:.4g}"
        slots = ", ".join(map(str, (layer["slots"] or [])[:2])) + ", ..." * (
            len(layer["slots"] or []) > 2
        )
        rows.append([name, str(layer["r"]), tau, *norms, slots or "-"])
    title = f"{pattern}   (gate, up, down: mean norm of the slots; max: of down)".strip()
    return Sheet(title, ["FFN", "r", "tau", "gate", "up", "down", "max", "host slots"], rows)


def _load_other_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of another adapter, or raise a `ValueError` where one of them is not finite."""
    tensors, _ = load_tensors(path)
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.float().isfinite().all():
            raise ValueError(
                f"{path}: {one_line(key)} holds values that are not finite; save or copy it again."
            )
    return tensors


def _check_other_adapter(base: PreTrainedModel, config: PeftConfig, path: Path) -> None:
    """Raise a `ValueError` for weights in another adapter's file that PEFT would copy into the base unasked."""
    own = base.state_dict()
    named = [f".{name}." for name in getattr(config, "modules_to_save", None) or ()]
    for key in _load_other_tensors(path):
        name = key.removeprefix("base_model.model.")
        plain = name.replace(".base_layer.", ".").replace(".original_module.", ".")
        if plain in own and not (plain == name and any(mark in f".{name}" for mark in named)):
            remedy = (
                "save it with save_embedding_layers=False, or get the file from a trusted source."
            )
            raise ValueError(
                f"{path}: {one_line(key)} is a weight of the base and no part of the adapter; {remedy}"
            )


def find_files(directory: str | Path, key: str | Path | None = None) -> tuple[PeftConfig, Path]:
    """Parse the config of a memory's folder, and find its tensors' file: safetensors, or a pickle of tensors alone."""
    peft_type = load_memory_config(directory, key)["peft_type"]
    path = find_tensor_file(directory)
    if path is None:
        raise ValueError(
            f"memory {str(directory)!r} has no {SAFETENSORS_WEIGHTS_NAME}: copy or save the memory again"
        )
    try:
        open(path, "rb").close()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): check the file's permissions"
        ) from None
    try:
        config = PEFT_TYPE_TO_CONFIG_MAPPING[peft_type].from_pretrained(str(directory))
    except ValueError as error:
        raise ValueError(one_line(str(error))) from error
    except (TypeError, AttributeError, KeyError, RecursionError, OverflowError) as error:
        what = (
            f"{Path(directory) / MEMORY_CONFIG} has fields that a {peft_type} config does not have"
        )
        raise ValueError(f"{what} ({first_line(error)}): copy or save the memory again") from error
    return config, path


def _attach(
    model: nn.Module,
    config: PeftConfig,
    path: Path,
    fields: dict[str, Any],
    trainable: bool = False,
    beside: str = "",
) -> PeftModel:
    """Put a memory onto its base, or beside others under a name, with fields of its config in place of saved ones."""
    base = model.get_base_model() if beside else model
    directory = str(path.parent)
    _set_fields(config, fields)
    former_sample = None
    if isinstance(config, LocasConfig):
        guard_memory(path, config, base)
        former_sample = (config.get_record("host") or {}).get("weights")
    else:
        _check_other_adapter(base, config, path)
    restore = remember_modules(model)
    device_map = vars(base).pop(
        "hf_device_map", None
    )  # PEFT would fail with it (docs/upstream/peft-disk-offload.md)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            if beside:
                # With the config that was checked: PEFT would read the file's again.
                config.inference_mode = True
                model.add_adapter(beside, config)
                model.load_adapter(directory, beside)
                loaded = model
            else:
                loaded = PeftModel.from_pretrained(
                    base, directory, config=config, is_trainable=trainable
                )
    except Exception as error:
        restore()
        reason = _find_reason(error)
        if reason is None:
            raise
        what = f"memory {directory!r} does not fit {type(base).__name__} {base.name_or_path!r}"
        raise ValueError(f"{what} ({reason}): load the base that it was made for") from error
    finally:
        if device_map is not None:
            base.hf_device_map = device_map
    if former_sample is not None and not may_be_same_weights(former_sample, sample_weights(base)):
        warnings.warn(
            "this memory was made for a base of the same shapes with other weights: "
            "its output is not what was learned; load the base that it was made for.",
            stacklevel=3,
        )
    return loaded


def _set_fields(config: PeftConfig, fields: dict[str, Any]) -> None:
    """Set fields of a saved config, or raise the error of their values."""
    for name, value in fields.items():
        if not hasattr(config, name):
            what = f"a memory of type {config.peft_type.value}"
            raise ValueError(f"{name} has no meaning for {what}, got {value!r}: leave it out")
        # A new config checks its fields.
        dataclasses.replace(config, **{name: value})
        setattr(config, name, value)


def _find_reason(error: Exception) -> str | None:
    """Return why a memory does not fit its base; None for an error that says so in one line."""
    if isinstance(error, OSError) or is_out_of_memory(error):
        return None
    if isinstance(error, KeyError):
        # PEFT looks for each tensor of a module that is trained in full.
        return f"the file has no {one_line(str(error.args[0]))}"
    if isinstance(error, ValueError):
        if str(error).startswith("Target module"):
            # PEFT's message lists every module.
            return "it has other modules"
        if "\n" not in str(error):
            return None
    return first_line(error)


def _shorten(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return what several names share, with * for their numbers, and the numbers of each; else "" and the names."""
    patterns = {re.sub(r"\d+", "*", name) for name in names}
    if len(names) < 2 or len(patterns) > 1:
        return "", list(names)
    return patterns.pop(), [".".join(re.findall(r"\d+", name)) for name in names]
