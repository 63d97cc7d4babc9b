"""What guards a memory's files beyond the tuner's own check of tensors.

Everything here runs before PEFT adds the memory to a model. The config then holds no regular
expression of the file, and widths that the file has: neither time nor space beyond the file's own
size is spent on it.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..tuner import LocasConfig
from ..tuner.finding import to_parts
from ..tuner.load_checks import find_gain_problem, find_number_problem
from ..tuner.memory_file import GAIN, PREFIX, SCALES, one_line, split_tensors
from .tensor_file import load_tensors

__all__ = ["guard_memory", "load_memory_file"]

Tensors = dict[str, Tensor]
# What PEFT's wrapper of a task takes from the model, after the memory has been added.
_TASK_NEEDS = {
    "CAUSAL_LM": "prepare_inputs_for_generation",
    "SEQ_2_SEQ_LM": "_prepare_encoder_decoder_kwargs_for_generation",
}
# The fields of a config that name tensors in its file beside the memory's own.
_NAMING_FIELDS = ("modules_to_save", "trainable_token_indices", "saved_embeddings")


def guard_memory(path: str | Path, config: LocasConfig, base: nn.Module) -> None:
    """Check a memory's file and config, and make the config safe in place, before PEFT loads them.

    Raises:
        ValueError: the file is not sound, does not fit its config, or is for a task that the base
            cannot do.
    """
    tensors = load_memory_file(path, config)
    _check_task(config, base)
    layers, _ = split_tensors(tensors)
    widths = {name: len(parts["locas_up"]) for name, parts in layers.items()}
    _name_modules(config, widths)


def load_memory_file(path: str | Path, config: LocasConfig) -> Tensors:
    """Load the tensors of a memory's file and check them against its config.

    The file must be complete and consistent, of the configured widths, and of finite numbers whose
    product is below `LARGEST`. Each tensor must belong to the memory or to what the config names:
    `modules_to_save`, `trainable_token_indices`, and `saved_embeddings` in its record.

    Raises:
        ValueError: a rule is broken. The message is one line.
    """
    tensors, _ = load_tensors(path)
    layers, others = split_tensors(tensors)
    if not layers:
        raise ValueError(f"{path} holds no LOCAS memory: no tensor of it is named locas_up.")
    for key, tensor in tensors.items():
        problem = None
        if key not in others or tensor.is_floating_point():
            problem = find_number_problem(tensor)
        if not key.startswith(PREFIX):
            problem = f"must start with {PREFIX!r}, as PEFT names tensors"
        if problem is not None:
            raise ValueError(f"{path}: {one_line(key)} {problem}; save or copy the memory again.")
    _check_others(path, config, others)
    if config.ffn_parts is not None:
        to_parts(config.ffn_parts)
    for name, parts in layers.items():
        problem = _find_shape_problem(parts, config)
        if problem is None:
            problem = find_gain_problem(parts, config.scaling)
        if problem is not None:
            raise ValueError(
                f"{path} does not fit its config at {one_line(name)}: {problem}. "
                "Save the memory again."
            )
    return tensors


def _check_others(path: str | Path, config: LocasConfig, others: list[str]) -> None:
    """Raise a `ValueError` unless a field names each other tensor, and such fields name one."""
    named = set()
    for key in others:
        field = config.field_that_names(key)
        # PEFT would load it without a question, also in place of the base's own weights.
        if field is None:
            raise ValueError(
                f"{path}: {one_line(key)} is a weight of the base and no part of a memory; get the "
                "file from a trusted source, or name the tensor in the config's saved_embeddings."
            )
        named.add(field)
    for field in _NAMING_FIELDS:
        value = getattr(config, field, None) or config.get_record(field)
        # A classifier has one of several names, so that one tensor is enough here.
        if value and field not in named:
            raise ValueError(
                f"{path} does not fit its config: no tensor is for {field}. Save the memory again."
            )


def _find_shape_problem(parts: Tensors, config: LocasConfig) -> str | None:
    for part in ("locas_up", "locas_down", "locas_tau"):
        if part not in parts:
            return f"{part} is missing"
    up_shape = list(parts["locas_up"].shape)
    if len(up_shape) != 2 or 0 in up_shape:
        return f"locas_up has shape {up_shape}, two dimensions expected"
    if config.gains != (GAIN in parts):
        return f"gains is {config.gains}, which the tensors contradict"
    r, d = up_shape
    # The names in rank_pattern are not compared: a file may bring a regular expression that takes
    # forever.
    if r not in config.rank_pattern.values():
        r = config.r
    host = config.get_record("host") or {}
    d = host.get("hidden_size") or d
    expected = {"locas_gate": [r, d], "locas_up": [r, d], "locas_down": [d, r]}
    for scale in SCALES:
        expected[scale] = []
    if GAIN in parts:
        # The width of the host's FFN is not known here; loading compares it.
        expected[GAIN] = [max(1, parts[GAIN].numel())]
    for part, tensor in parts.items():
        if list(tensor.shape) != expected[part]:
            return f"{part} has shape {list(tensor.shape)}, expected {expected[part]}"
    return None


def _name_modules(config: LocasConfig, widths: dict[str, int]) -> None:
    """Replace regular expressions in a config by the names of the FFNs that have a memory."""
    has_pattern = isinstance(config.target_modules, str) or isinstance(config.exclude_modules, str)
    if has_pattern or config.layers_pattern:
        config.target_modules = set(widths)
        config.exclude_modules = None
        config.layers_to_transform = None
        config.layers_pattern = None
    config.rank_pattern = {}
    if set(widths.values()) != {config.r}:
        # The longest names first, since a name may end with another.
        for name in sorted(widths, key=len, reverse=True):
            config.rank_pattern[re.escape(name)] = widths[name]


def _check_task(config: LocasConfig, model: nn.Module) -> None:
    """Raise a `ValueError` if the model cannot do a memory's task."""
    needed: Any = _TASK_NEEDS.get(config.task_type)
    if needed is not None and not hasattr(model, needed):
        raise ValueError(
            f"the memory was made for task_type {str(config.task_type)!r}, "
            f"which {type(model).__name__} cannot do: "
            "load the base that it was made for."
        )
