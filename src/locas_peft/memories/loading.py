"""Load saved memories onto their base, or describe them from their files alone."""

import copy
import dataclasses
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..bases import load_base
from ..checks import first_line, invalid, one_line
from ..files import finish_replacement, is_out_of_memory, load_json
from ..tables import Sheet, format_figure
from ..tuner import LocasConfig
from ..tuner.memory_file import GAIN, PREFIX, SCALES, split_tensors
from ..tuner.modules import plain_name, remember_modules, unmerged_at_end
from .base_sample import may_be_same_weights, sample_weights
from .folder import MEMORY_CONFIG, READING, RECORD
from .guards import guard_memory, load_memory_file
from .tensor_file import find_tensor_file, load_tensors

__all__ = [
    "describe_memory",
    "load_memory",
    "load_memory_config",
    "memory_attached",
    "open_memory",
    "tabulate_memory",
]

_SAVE_AGAIN = "copy or save the memory again"
# With these PEFT subtracts the adapter's first product from the base's weights as it is added.
_INITS_THAT_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_DESCRIBED_PARTS = ("r", "tau", "input_scale", "gate", "up", "down", "gain")
_TABULATED_NORMS = (("gate", "mean"), ("up", "mean"), ("down", "mean"), ("down", "max"))


def open_memory(
    directory: str | Path,
    base: str | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantize: str | None = None,
    **fields: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, PeftModel]:
    """Load a memory together with its base, frozen: the base, its tokenizer, the adapted model.

    Base and memory share their modules: within `model.disable_adapter()` the model is the base, but
    for embeddings that were saved with the memory.

    Args:
        base: name of the base; None for the one that the memory names.
        dtype, device, quantize: as for `load_base`.
        fields: as for `load_memory`.
    """
    config, path = find_files(directory)
    name = base or config.base_model_name_or_path
    if not name:
        raise ValueError(f"memory {str(directory)!r} does not name its base: give it with --model")
    model, tokenizer = load_base(name, dtype, device, quantize)
    return model, tokenizer, _attach(model, config, path, fields).eval()


def load_memory(
    base: PreTrainedModel, directory: str | Path, *, trainable: bool = False, **fields: Any
) -> PeftModel:
    """Load a memory, LOCAS or another PEFT adapter, onto its base.

    It is frozen unless it is to be trained. Embeddings that were saved with it take the place of
    the base's, in this model alone; they stay there after `unload`.

    Args:
        base: the model that it was made for; mutated (`PeftModel.unload` takes the memory out
            again).
        fields: values for fields of its config, such as `pad_to_multiple_of`, in place of the saved
            ones.

    Raises:
        ValueError: the folder holds no memory, a damaged one, or one that was made for another
            base. The base is as it was before. A base of the same shapes with other weights gives a
            warning.
    """
    config, path = find_files(directory)
    return _attach(base, config, path, fields, trainable)


@contextmanager
def memory_attached(base: PreTrainedModel, directory: str | Path) -> Iterator[PeftModel]:
    """Attach a saved memory to its base within the context, frozen and for evaluation.

    The base is a causal LM without adapters. It is mutated, and restored at the end.
    """
    restore = remember_modules(base)
    try:
        model = load_memory(base, directory)
        with unmerged_at_end(model):
            yield model.requires_grad_(False).eval()
    finally:
        restore()


def load_memory_config(directory: str | Path) -> dict[str, Any]:
    """Load the JSON config of a memory's folder.

    A replacement that was stopped midway is finished first (`files.staged`). Each way to open a
    memory begins here.

    Raises:
        ValueError: the folder holds no memory, or its config is damaged.
    """
    finish_replacement(directory)
    path = Path(directory) / MEMORY_CONFIG
    if not path.is_file():
        problem = f"a folder without {MEMORY_CONFIG}" if Path(directory).is_dir() else "no folder"
        got = f"{str(directory)!r}, {problem}"
        remedy = "make one with `locas read TEXT --out DIR`"
        raise invalid("memory", "be a folder that holds a memory", got, remedy)
    config = load_json(path)
    if not isinstance(config, dict) or "peft_type" not in config:
        raise invalid(str(path), "name its peft_type", "none", _SAVE_AGAIN)
    peft_type = config["peft_type"]
    if not isinstance(peft_type, str) or peft_type not in PEFT_TYPE_TO_CONFIG_MAPPING:
        rule = "name a peft_type that PEFT has"
        raise invalid(str(path), rule, repr(peft_type), "update peft")
    base = config.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise invalid(str(path), "name its base by a string", repr(base), _SAVE_AGAIN)
    return config


def find_files(directory: str | Path) -> tuple[PeftConfig, Path]:
    """Parse the config of a memory's folder, and find its tensors' file.

    The file is safetensors, or a pickle of tensors alone.
    """
    peft_type = load_memory_config(directory)["peft_type"]
    path = find_tensor_file(directory)
    if path is None:
        raise ValueError(
            f"memory {str(directory)!r} has no {SAFETENSORS_WEIGHTS_NAME}: {_SAVE_AGAIN}"
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
        config_path = Path(directory) / MEMORY_CONFIG
        problem = f"has fields that a {peft_type} config does not have ({first_line(error)})"
        raise ValueError(f"{config_path} {problem}: {_SAVE_AGAIN}") from error
    return config, path


def describe_memory(directory: str | Path) -> dict[str, Any]:
    """Describe a memory from its files alone: no base is loaded.

    Returns:
        JSON values: `memory_dir`, `base`, `peft_type`, `r`, `init`, `scaling`, `dtype`,
        `parameters`, `bytes` (of the tensors' file), `host`, `replaces` (the tensors of a LOCAS
        memory's file that replace weights of the base, by name), `learned` (False for a LOCAS
        memory without an output; None for other adapters), `digests` (of the last stage's record),
        `layers`: for a LOCAS memory an entry for each FFN with `name`, `r`, `tau`, `input_scale`,
        `slots` (None where no host slots were cloned) and, for `gate` (None in a two-layer memory),
        `up` and `down`, `mean` and `max` of the slots' norms; for `gain` (None without gains) those
        of the gains' sizes.

    Raises:
        ValueError: there is no memory, or its files hold something that loading refuses.
    """
    config, path = find_files(directory)
    record = _load_last_stage(path.parent)
    layers = []
    others: list[str] = []
    learned = None
    host = None
    if config.peft_type == "LOCAS":
        tensors = load_memory_file(path, config)
        parts, others = split_tensors(tensors)
        slots = config.get_record("slots") or {}
        layers = [
            _describe_layer(name, parts[name], slots.get(name))
            for name in sorted(parts, key=_list_numbers)
        ]
        learned = any(layer["down"]["max"] > 0 for layer in layers)
        learned = learned or any(layer["gain"] and layer["gain"]["max"] > 0 for layer in layers)
        host = config.get_record("host")
    else:
        tensors = _load_other_tensors(path)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    return {
        "memory_dir": str(directory),
        "base": config.base_model_name_or_path,
        "peft_type": str(config.peft_type.value),
        "r": getattr(config, "r", None),
        "init": getattr(config, "strategy", None),
        "scaling": getattr(config, "scaling", None),
        "dtype": ", ".join(sorted(dtypes)),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": path.stat().st_size,
        "host": host,
        "digests": {key: value for key, value in record.items() if key.endswith("_sha256")},
        "replaces": [key.removeprefix(PREFIX) for key in others],
        "learned": learned,
        "layers": layers,
    }


def tabulate_memory(memory: dict[str, Any]) -> Sheet:
    """Return the layers of `describe_memory`, a line each that fits 80 columns.

    The title has what the names of the FFNs share, the first column the rest of each, the last one
    two host slots.
    """
    pattern, names = _shorten([layer["name"] for layer in memory["layers"]])
    rows = []
    for name, layer in zip(names, memory["layers"], strict=True):
        tau = "-"
        if layer["tau"] is not None:
            tau = f"{layer['tau']:.4g}"
        row = [one_line(name), str(layer["r"]), tau]
        for part, statistic in _TABULATED_NORMS:
            norms = layer[part]
            row.append(format_figure(norms and norms[statistic], 3))
        row.append(_format_slots(layer["slots"] or []))
        rows.append(row)
    title = f"{one_line(pattern)}   (gate, up, down: mean norm of the slots; max: of down)".strip()
    headers = ["FFN", "r", "tau", "gate", "up", "down", "max", "host slots"]
    return Sheet(title, headers, rows)


def _load_last_stage(directory: Path) -> dict[str, Any]:
    """Load the record of the last stage that made a memory; empty where there is none."""
    path = directory / RECORD
    if path.is_file():
        record = _take_last(load_json(path))
    else:
        path = directory / READING
        record = load_json(path) if path.is_file() else {}
    if not isinstance(record, dict):
        raise ValueError(f"{path} must be the record of a memory: {_SAVE_AGAIN}")
    return record


def _take_last(content: Any) -> Any:
    """Return the last stage of a record; None where it has none."""
    stages = content.get("stages") if isinstance(content, dict) else None
    if isinstance(stages, list) and stages:
        return stages[-1]
    return None


def _describe_layer(
    name: str, parts: dict[str, torch.Tensor], slots: list[int] | None
) -> dict[str, Any]:
    """Return the entry of `describe_memory` for the memory beside one FFN."""
    layer: dict[str, Any] = {"name": name, "slots": slots, **dict.fromkeys(_DESCRIBED_PARTS)}
    for key, tensor in parts.items():
        part = key.removeprefix("locas_")
        if key in SCALES:
            layer[part] = tensor.item()
            continue
        if key == GAIN:
            sizes = tensor.float().abs()
            layer[part] = {"mean": sizes.mean().item(), "max": sizes.max().item()}
            continue
        # The slots are the rows of gate and up [R, D], and the columns of down [D, R].
        dim = 0 if part == "down" else 1
        norms = tensor.float().norm(dim=dim)
        layer[part] = {"mean": norms.mean().item(), "max": norms.max().item()}
        layer["r"] = len(norms)
    return layer


def _list_numbers(name: str) -> list[int]:
    """Return the numbers in a module's name, by which layers are sorted."""
    return [int(number) for number in re.findall(r"\d+", name)]


def _format_slots(slots: Sequence[int]) -> str:
    if not slots:
        return "-"
    shown = ", ".join(map(str, slots[:2]))
    return f"{shown}, ..." if len(slots) > 2 else shown


def _shorten(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return what several names share, with * for their numbers, and the numbers of each.

    Where they share nothing, return "" and the names.
    """
    patterns = {re.sub(r"\d+", "*", name) for name in names}
    if len(names) < 2 or len(patterns) > 1:
        return "", list(names)
    return patterns.pop(), [".".join(re.findall(r"\d+", name)) for name in names]


def _load_other_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of another adapter; a `ValueError` where one of them is not finite."""
    tensors, _ = load_tensors(path)
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.float().isfinite().all():
            raise ValueError(
                f"{path}: {one_line(key)} holds values that are not finite; save or copy it again."
            )
    return tensors


def _check_other_adapter(base: PreTrainedModel, config: PeftConfig, path: Path) -> None:
    """Raise a `ValueError` where PEFT would change the base's weights as it loads an adapter."""
    init = getattr(config, "init_lora_weights", None)
    if isinstance(init, str) and init.lower().startswith(_INITS_THAT_CHANGE_THE_BASE):
        problem = f"{path.parent} must not change the base, got init_lora_weights={init!r}"
        remedy = "save it as a plain LoRA, with PEFT's path_initial_model_for_weight_conversion"
        raise ValueError(f"{problem}: {remedy}")
    weights = base.state_dict()
    modules_to_save = getattr(config, "modules_to_save", None) or ()
    for key in _load_other_tensors(path):
        name = key.removeprefix("base_model.model.")
        plain_name = name.replace(".base_layer.", ".").replace(".original_module.", ".")
        is_named = any(f".{module}." in f".{name}" for module in modules_to_save)
        if plain_name not in weights or (plain_name == name and is_named):
            continue
        remedy = "save it with save_embedding_layers=False, or get the file from a trusted source."
        problem = "is a weight of the base and no part of the adapter"
        raise ValueError(f"{path}: {one_line(key)} {problem}; {remedy}")


def _set_fields(config: PeftConfig, fields: dict[str, Any]) -> None:
    """Replace fields of a saved config, or raise a `ValueError`."""
    for name, value in fields.items():
        if not hasattr(config, name):
            kind = f"a memory of type {config.peft_type.value}"
            raise ValueError(f"{name} has no meaning for {kind}, got {value!r}: leave it out")
        # The copy is made for the checks of its values.
        dataclasses.replace(config, **{name: value})
        setattr(config, name, value)


def _attach(
    base: nn.Module,
    config: PeftConfig,
    path: Path,
    fields: dict[str, Any],
    trainable: bool = False,
) -> PeftModel:
    """Put a memory onto its base, with fields of its config in place of saved ones.

    After an error the base is as it was.
    """
    directory = str(path.parent)
    _set_fields(config, fields)
    former_sample = None
    if isinstance(config, LocasConfig):
        guard_memory(path, config, base)
        former_sample = (config.get_record("host") or {}).get("weights")
    else:
        _check_other_adapter(base, config, path)
    restore = remember_modules(base)
    # PEFT would fail with it (docs/upstream/peft-disk-offload.md).
    device_map = vars(base).pop("hf_device_map", None)
    try:
        if isinstance(config, LocasConfig):
            _copy_parameters(base, config.get_record("saved_embeddings") or ())
        # The numbers that PEFT draws for the weights are replaced by those of the file.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            model = PeftModel.from_pretrained(
                base, directory, config=config, is_trainable=trainable
            )
    except Exception as error:
        restore()
        problem = _explain_misfit(error)
        if problem is None:
            raise
        base_name = f"{type(base).__name__} {base.name_or_path!r}"
        misfit = f"memory {directory!r} does not fit {base_name} ({problem})"
        raise ValueError(f"{misfit}: load the base that it was made for") from error
    finally:
        if device_map is not None:
            base.hf_device_map = device_map
    _warn_of_other_weights(base, former_sample)
    return model


def _copy_parameters(base: nn.Module, names: Collection[str]) -> None:
    """Replace parameters of a base by copies; parameters that were tied stay tied.

    PEFT loads saved embeddings into the parameters that it finds. Those of the base may be used
    elsewhere, and have their values after the memory is gone.
    """
    copies = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if plain_name(name) in names and id(parameter) not in copies:
            copies[id(parameter)] = copy.deepcopy(parameter)
    for module in base.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in copies:
                module._parameters[name] = copies[id(parameter)]


def _warn_of_other_weights(base: nn.Module, former_sample: str | None) -> None:
    """Warn where the sample of weights that a memory was made for is not that of the base."""
    if former_sample is None or may_be_same_weights(former_sample, sample_weights(base)):
        return
    warnings.warn(
        "this memory was made for a base of the same shapes with other weights: "
        "its output is not what was learned; load the base that it was made for.",
        stacklevel=4,
    )


def _explain_misfit(error: Exception) -> str | None:
    """Return why a memory does not fit a base; None for an error that needs no other message."""
    if isinstance(error, OSError) or is_out_of_memory(error):
        return None
    if isinstance(error, KeyError):
        # PEFT looks for each tensor of a module that is trained in full.
        return f"the file has no {one_line(str(error.args[0]))}"
    if isinstance(error, ValueError):
        # This message of PEFT lists every module.
        if str(error).startswith("Target module"):
            return "it has other modules"
        if "\n" not in str(error):
            return None
    return first_line(error)
