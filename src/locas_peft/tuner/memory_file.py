"""Checks of a memory's file before it is loaded: safetensors and JSON; nothing is unpickled."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from .config import LocasConfig

WEIGHTS = ("locas_gate", "locas_up", "locas_down")
SCALES = ("locas_tau", "locas_input_scale")
REQUIRED = ("locas_up", "locas_down", "locas_tau")


def check_memory_file(folder: str, config: LocasConfig) -> None:
    """Check the header of a memory's file against its config: readable, complete, and of the configured widths.

    The tensors are not loaded. A folder without weights is left to PEFT.

    Raises:
        ValueError: the file is pickled, truncated, or its tensors do not fit the config.
    """
    path, pickle = (os.path.join(folder, name) for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME))
    if not os.path.isfile(path):
        if os.path.isfile(pickle):
            raise ValueError(
                f"{pickle} is a pickle, and a memory is never unpickled: save it as {SAFETENSORS_WEIGHTS_NAME}."
            )
        return
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is truncated or not a safetensors file ({error}): copy or save it again.") from None

    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in shapes.items():
        layer, _, part = key.removesuffix(".weight").rpartition(".")  # 'a.b.locas_up.weight' -> 'a.b', 'locas_up'
        if part in (WEIGHTS if key.endswith(".weight") else SCALES):
            layers.setdefault(layer, {})[part] = shape
    if not layers:
        raise ValueError(f"{path} holds no LOCAS memory: no tensor of it is named locas_up.")
    # Without these tensors PEFT stops halfway, with a KeyError. (A classifier has one of several names.)
    required = {
        "modules_to_save": [f".{name}." for name in config.modules_to_save or ()],
        "trainable_token_indices": [".trainable_tokens_delta"] if config.trainable_token_indices else [],
    }
    for field, marks in required.items():
        if marks and not any(mark in f".{key}" for key in shapes for mark in marks):
            raise ValueError(f"{path} does not fit its config: no tensor is for {field}. Save the memory again.")
    hidden_size = (config.host or {}).get("hidden_size")
    for layer, parts in layers.items():
        name = layer.removeprefix("base_model.model.")
        problem = _find_problem(parts, config.width_of(name), hidden_size)
        if problem:
            raise ValueError(f"{path} does not fit its config at {name}: {problem}. Save the memory again.")


def _find_problem(parts: dict[str, tuple[int, ...]], r: int, hidden_size: int | None) -> str | None:
    for part in REQUIRED:
        if part not in parts:
            return f"{part} is missing"
    if len(parts["locas_up"]) != 2:
        return f"locas_up has shape {parts['locas_up']}, two dimensions expected"
    d = hidden_size or parts["locas_up"][1]
    expected = {"locas_gate": (r, d), "locas_up": (r, d), "locas_down": (d, r)} | dict.fromkeys(SCALES, ())
    for part, shape in parts.items():
        if shape != expected[part]:
            return f"{part} has shape {list(shape)}, expected {list(expected[part])}"
    return None
