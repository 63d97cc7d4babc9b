"""Where a base's weights go: their dtype, their device or devices, and their quantisation."""

import importlib.util
from typing import Any

import torch
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import compute_module_sizes, get_max_memory
from transformers import AutoConfig, AutoModelForCausalLM

from ..checks import check_choice, first_line, invalid
from ..processes import join_processes

__all__ = [
    "DTYPES",
    "QUANTIZATIONS",
    "choose_device",
    "choose_dtype",
    "choose_quantization",
    "is_fast_in_bfloat16",
    "place",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZATIONS = ("nf4", "int8")
# The dtype for each mixed precision of Accelerate.
_PRECISIONS = {"no": "auto", "bf16": "bfloat16", "fp16": "float16"}
_WITHOUT_FLOAT64 = "mps"
# Of a device's free memory that weights may take; the rest is for a chunk's activations.
_SHARE = 0.8


def choose_device(device: str) -> torch.device:
    """Turn a device's name into a device; "auto" is the one that Accelerate gives the process.

    An Apple GPU is not used: it has no float64, in which losses and statistics are summed.
    """
    if device == "auto":
        given = join_processes().device
        return torch.device("cpu") if given.type == _WITHOUT_FLOAT64 else given
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"device must be one that torch can use, got {device!r} ({first_line(error)})"
        ) from None
    chosen = torch.device(device)
    if chosen.type == _WITHOUT_FLOAT64:
        raise invalid("device", "have float64", device, "give cpu")
    return chosen


def choose_dtype(dtype: str) -> torch.dtype | None:
    """Turn a dtype's name into a dtype; None where the stored weights decide (see `load_base`)."""
    check_choice("dtype", dtype, ("auto", "stored", *DTYPES))
    if dtype == "auto" and is_initialized():
        precision = AcceleratorState().mixed_precision
        check_choice("mixed precision", precision, _PRECISIONS)
        dtype = _PRECISIONS[precision]
    return DTYPES.get(dtype)


def is_fast_in_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies in bfloat16 itself.

    Other CPUs take up to 20 times as long as in float32.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()


def place(
    source: str,
    dtype: torch.dtype | None,
    device: torch.device,
    split: bool,
    quantization: Any,
    convert: bool,
) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a base: its dtype, and one device or a split.

    Args:
        dtype: None for the stored one.
        split: whether Accelerate may split a base that does not fit on `device` over all devices.
        quantization: of `choose_quantization`; quantised weights are placed by Accelerate.
        convert: whether weights stored in 16 bits may become float32 where that is faster and fits.
    """
    if quantization is not None:
        device_map = "auto" if split else {"": device}
        return {
            "dtype": dtype or "auto",
            "device_map": device_map,
            "quantization_config": quantization,
        }
    config = AutoConfig.from_pretrained(source)
    memory_bytes = get_max_memory()
    key = "cpu" if device.type == "cpu" else device.index or 0
    free_bytes = _SHARE * memory_bytes.get(key, torch.inf)
    model_dtype = dtype or config.dtype or torch.float32
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=model_dtype)
    stored_bytes = compute_module_sizes(empty)[""]
    is_slow = device.type == "cpu" and empty.dtype.itemsize == 2 and not is_fast_in_bfloat16(device)
    is_quantized = hasattr(config, "quantization_config")
    may_convert = convert and dtype is None and not is_quantized
    if may_convert and is_slow and 2 * stored_bytes <= free_bytes:
        return {"dtype": torch.float32, "device_map": {"": device}}
    if split and stored_bytes > free_bytes:
        limits = {key: int(_SHARE * size) for key, size in memory_bytes.items()}
        return {"dtype": dtype or "auto", "device_map": "auto", "max_memory": limits}
    return {"dtype": dtype or "auto", "device_map": {"": device}}


def choose_quantization(name: str | None) -> Any:
    """Return transformers' configuration of a quantisation.

    It is done by bitsandbytes, or for int8 without that package by torchao.
    """
    if name is None:
        return None
    check_choice("quantize", name, QUANTIZATIONS)
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if importlib.util.find_spec("bitsandbytes") is not None:
        if name == "int8":
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    if name == "int8" and importlib.util.find_spec("torchao") is not None:
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    packages = "bitsandbytes" if name == "nf4" else "bitsandbytes or torchao"
    got = f"{name!r} without {packages}"
    raise invalid("quantize", "have its package", got, "pip install bitsandbytes")
