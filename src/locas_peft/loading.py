"""What lies on disk or on the hub: bases by name, memories by folder, and what a memory's files say by themselves."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from . import backbone
from .tuner import LocasConfig

MEMORY_CONFIG = "adapter_config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_SECONDS = 10.0


def load_base(
    name: str = backbone.NAME, dtype: str = "auto", device: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal LM and its tokenizer, frozen and in evaluation mode.

    Args:
        name: `backbone.NAME` or `backbone.MLP_NAME` for an embedded backbone, a folder, or a name on the hub.
        dtype: "float32", "bfloat16", "float16", or "auto": the one that the weights are stored in (float32 for the
            embedded backbone).
        device: a torch device, or "auto": CUDA where there is one, else the CPU.

    Raises:
        ValueError: there is no such model, it cannot be read, or dtype or device are none that we know.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    place = choose_device(device)
    if backbone.is_embedded(name):
        model, tokenizer = backbone.load(DTYPES.get(dtype), place, backbone.name_of(name))
    else:
        source = _find_source(name)
        try:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES.get(dtype, "auto"))
            tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ValueError(
                f"model {name!r} cannot be loaded ({_first_line(error)}): give a causal LM with its tokenizer"
            ) from error
        model.to(place)
    return model.requires_grad_(False).eval(), tokenizer


def load_memory(base: PreTrainedModel, directory: str | Path, **fields: Any) -> PeftModel:
    """Loads a memory, LOCAS or another PEFT adapter, onto its base, for reading and writing but not for learning.

    Args:
        base: the model that it was made for; mutated (`PeftModel.unload` takes the memory out again).
        directory: the memory's folder.
        fields: fields of its config to set otherwise, such as `pad_to_multiple_of`.

    Raises:
        ValueError: the folder holds no memory, or one that was made for another base.
    """
    read_memory_config(directory)
    if not (Path(directory) / SAFETENSORS_WEIGHTS_NAME).is_file():  # PEFT would take a pickle in its place
        raise ValueError(f"memory {str(directory)!r} has no {SAFETENSORS_WEIGHTS_NAME}: copy or save the memory again")
    config = PeftConfig.from_pretrained(str(directory))
    # Once more by its own class, which checks the file before anything of the claimed width is made.
    config = type(config).from_pretrained(str(directory))
    for name, value in fields.items():
        if not hasattr(config, name):
            raise ValueError(f"{name} has no meaning for a memory of type {config.peft_type.value}, got {value!r}")
        setattr(config, name, value)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return PeftModel.from_pretrained(base, str(directory), config=config)
    except (RuntimeError, UserWarning, ValueError, SafetensorError) as error:
        if isinstance(error, ValueError) and not str(error).startswith("Target modules"):
            raise
        # PEFT lists every module name here, a screen of them.
        reason = "it has other modules" if isinstance(error, ValueError) else _first_line(error)
        raise ValueError(
            f"memory {str(directory)!r} does not fit {type(base).__name__} {base.name_or_path!r} ({reason}): "
            "load the base that it was made for"
        ) from error


def read_memory_config(directory: str | Path) -> dict[str, Any]:
    """Reads the JSON config of a memory's folder.

    Raises:
        ValueError: there is no such folder, or no memory in it, or its config is not readable.
    """
    path = Path(directory) / MEMORY_CONFIG
    if not path.is_file():
        found = "a folder without " + MEMORY_CONFIG if Path(directory).is_dir() else "no folder"
        raise ValueError(
            f"memory must be a folder that holds a memory, got {str(directory)!r}, {found}: "
            "make one with `locas memorize TEXT --out DIR`"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable as JSON ({error}): copy or save the memory again") from None
    if not isinstance(config, dict) or "peft_type" not in config:
        raise ValueError(f"{path} must name its peft_type, got none: copy or save the memory again")
    if not isinstance(config["peft_type"], str) or config["peft_type"] not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise ValueError(f"{path} must name a peft_type that PEFT has, got {config['peft_type']!r}: update peft")
    base = config.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise ValueError(f"{path} must name its base by a string, got {base!r}: copy or save the memory again")
    return config


def describe_memory(directory: str | Path) -> dict[str, Any]:
    """Says what is in a memory, from its files alone: no base is loaded.

    Args:
        directory: the memory's folder.

    Returns:
        JSON values: `memory_dir`, `base`, `peft_type`, `r`, `init`, `scaling`, `dtype`, `parameters`, `bytes`
        (of the tensors' file), `host`, `layers`. For a LOCAS memory `layers` has an entry for each FFN: `name`, `r`,
        `tau`, `slots` (None where no host slots were cloned) and, for `gate` (None in a two-layer memory), `up` and
        `down`, the `mean` and `max` of the slots' norms. For other adapters it is empty.

    Raises:
        ValueError: there is no memory, or its files are damaged.
    """
    directory = Path(directory)
    config = read_memory_config(directory)
    path = directory / SAFETENSORS_WEIGHTS_NAME
    if not path.is_file():
        raise ValueError(f"memory {str(directory)!r} has no {SAFETENSORS_WEIGHTS_NAME}: copy or save the memory again")
    if config["peft_type"] == "LOCAS":
        LocasConfig.from_pretrained(str(directory))  # for its checks
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or not a safetensors file ({error}): copy or save it again") from None
    slots = config.get("slots") or {}
    layers: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        owner, _, part = key.removesuffix(".weight").rpartition(".locas_")
        if not owner:
            continue
        name = owner.removeprefix("base_model.model.")
        empty = {
            "name": name,
            "r": None,
            "tau": None,
            **dict.fromkeys(("gate", "up", "down")),
            "slots": slots.get(name),
        }
        layer = layers.setdefault(name, empty)
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
        "layers": sorted(layers.values(), key=lambda layer: _natural(layer["name"])),
    }


def choose_device(device: str) -> torch.device:
    """Turns a device's name into a device; "auto" is CUDA where there is one, else the CPU.

    Raises:
        ValueError: torch knows no such device, or it is not there.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device must be one that torch can use, got {device!r} ({_first_line(error)})") from None
    return torch.device(device)


def _find_source(name: str) -> str:
    """Gives the folder, or the hub name after a quick look whether it can be had."""
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
    """Asks once, where loading without a network would try again and again for the better part of a minute."""
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


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(":.") if lines else type(error).__name__


def _natural(name: str) -> list:
    """Sort key that puts layer 10 after layer 9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
