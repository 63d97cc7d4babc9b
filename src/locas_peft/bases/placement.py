"""Where a base's weights go, and in which dtype: Accelerate's device, precision and device map; quantisation."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState, is_initialized
from accelerate.utils import compute_module_sizes, get_max_memory
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from ..checks import check_choice, first_line

__all__ = ["DTYPES", "QUANTIZATIONS", "choose_device", "choose_device_map", "choose_dtype", "choose_quantization"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZATIONS = ("nf4", "int8")
_PRECISIONS = {"no": "auto", "bf16": "bfloat16", "fp16": "float16"}
"""From Accelerate's mixed precision to a dtype."""
_SHARE = 0.8
"""Of a device's free memory that weights may take; the rest is for a chunk's activations."""


def choose_device(device: str) -> torch.device:
    """Turn a device's name into a device; "auto" is the one that Accelerate gives to this process.

    Raises:
        ValueError: torch has no such device, or the machine does not.
    """
    if device == "auto":
        return PartialState().device
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device must be one that torch can use, got {device!r} ({first_line(error)})") from None
    return torch.device(device)


def choose_dtype(dtype: str) -> torch.dtype | None:
    """Turn a dtype's name into a dtype; None for the one that the weights are stored in.

    "auto" is the mixed precision of Accelerate's state, where a program or a launcher has set one.
    """
    check_choice("dtype", dtype, ("auto", *DTYPES))
    if dtype == "auto" and is_initialized():
        precision = AcceleratorState().mixed_precision
        check_choice("mixed precision", precision, _PRECISIONS)
        dtype = _PRECISIONS[precision]
    return DTYPES.get(dtype)


def choose_device_map(
    source: str, dtype: torch.dtype | None, device: torch.device, split: bool, quantization: Any = None
) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that place a base: on one device, or split by Accelerate.

    Args:
        source: a folder or a name on the hub.
        dtype: of the weights; None for the one that they are stored in.
        device: the device that is preferred.
        split: whether a base that does not fit there may be split over all devices, the CPU's memory and the disk.
        quantization: of `choose_quantization`; quantised weights are placed by Accelerate.
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
    """Return transformers' configuration of a quantisation, by bitsandbytes, or for int8 without it by torchao.

    Raises:
        ValueError: the name is unknown, or the package is missing.
    """
    if name is None:
        return None
    check_choice("quantize", name, QUANTIZATIONS)
    if importlib.util.find_spec("bitsandbytes") is not None:
        if name == "int8":
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    if name == "int8" and importlib.util.find_spec("torchao") is not None:
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    packages = "bitsandbytes" if name == "nf4" else "bitsandbytes or torchao"
    raise ValueError(f"quantize must have its package, got {name!r} without {packages}: pip install bitsandbytes")
