"""The names of a memory's tensors in its file, and the limits of what they hold."""

import re
from collections.abc import Iterable

import torch
from torch import Tensor

# PEFT puts it before each name in a file.
PREFIX = "base_model.model."
GAIN = "locas_gain"
WEIGHTS = ("locas_gate", "locas_up", "locas_down", GAIN)
SCALES = ("locas_tau", "locas_input_scale", "locas_calibrated")
# The limit of a layer's gain, the product of its largest numbers, and of any other number in a
# memory's files: outputs stay far below the largest float32. Trained memories are below 1e3.
LARGEST = 1e12

MAX_CHARACTERS = 200


def parse_key(key: str) -> tuple[str, str] | None:
    """Return the FFN and the part that a tensor's name tells; None where it is no part of a memory.

    "base_model.model.layers.0.mlp.locas_up.weight" gives ("layers.0.mlp", "locas_up").
    """
    ffn, _, part = key.removesuffix(".weight").rpartition(".")
    parts = WEIGHTS if key.endswith(".weight") else SCALES
    if part not in parts or not ffn:
        return None
    return ffn.removeprefix(PREFIX), part


def remove_adapter_name(key: str, adapter_name: str) -> str:
    """Return the name in a file of an adapter's tensor in a model; other names stay.

    "layers.0.mlp.locas_up.default.weight" gives "layers.0.mlp.locas_up.weight".
    """
    name = re.escape(adapter_name)
    key = re.sub(rf"\.({'|'.join(WEIGHTS)})\.{name}\.weight$", r".\1.weight", key)
    key = re.sub(rf"\.({'|'.join(SCALES)})\.{name}$", r".\1", key)
    # PEFT saves these a second time, with the adapter's name, where it saves a resized embedding.
    key = re.sub(rf"\.modules_to_save\.{name}\.", ".", key)
    return re.sub(rf"(\.token_adapter\.trainable_tokens_delta)\.{name}$", r"\1", key)


def make_calibrated_flag(up: Tensor, input_scale: Tensor) -> Tensor:
    """Return the flag that files of 0.2.0 lack: 1 where there are rows and an input scale, else 0.

    Args:
        up: the up rows `[R, D]`.
        input_scale: k, a scalar; 0 in a memory that waited for its text.
    """
    is_calibrated = up.is_meta or bool(up.any() and input_scale.any())
    return torch.tensor(float(is_calibrated), device=up.device)


def split_keys(keys: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names of the memory's tensors, and the names of all other tensors."""
    memory = []
    others = []
    for key in keys:
        if parse_key(key) is None:
            others.append(key)
        else:
            memory.append(key)
    return memory, others


def split_tensors(tensors: dict[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Return the parts of the memory beside each FFN, by its name, and all other tensors' names."""
    others: list[str] = []
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        parsed = parse_key(key)
        if parsed is None:
            others.append(key)
            continue
        ffn, part = parsed
        parts = layers.setdefault(ffn, {})
        parts[part] = tensor
    return layers, others


def one_line(text: str) -> str:
    """Return a text from a file, fit for a message: one line, short, control characters escaped."""
    escaped = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    if len(escaped) <= MAX_CHARACTERS:
        return escaped
    return f"{escaped[:MAX_CHARACTERS]}..."
