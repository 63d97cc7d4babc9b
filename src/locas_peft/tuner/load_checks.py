"""Whether a memory's file is sound and fits its config, and whether both fit a model, before PEFT copies a tensor.

A sample of the base's weights, kept in the config, recognises the base that the memory was made for.
"""

import math
import re
import struct
from contextlib import suppress

import torch
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from .config import LocasConfig
from .ffn import WIDENABLE_DTYPES
from .memory_file import LARGEST, PREFIX, SCALES, load_tensors, one_line, split_tensors
from .modules import base_parameters

Tensors = dict[str, Tensor]
MATRICES = 32
NUMBERS = 4
_UNKNOWN = "----"
# One unit in the last place of bfloat16, relative; and the spacing of the smallest float16 numbers, absolute.
_RELATIVE, _ABSOLUTE = 2**-7, 2**-24
# What PEFT's wrapper of a task takes from the model, after the memory has been added.
_TASK_NEEDS = {
    "CAUSAL_LM": "prepare_inputs_for_generation",
    "SEQ_2_SEQ_LM": "_prepare_encoder_decoder_kwargs_for_generation",
}


def load_memory_file(path: str, config: LocasConfig) -> tuple[Tensors, dict[str, int]]:
    """Load a memory's file and check it against its config: return its tensors, and R by the name of each FFN.

    The file must be complete and consistent, of the configured widths, and of finite numbers whose product is below
    `LARGEST`. Each tensor must belong to the memory or to what the config names: `modules_to_save`,
    `trainable_token_indices`, `saved_embeddings`. A broken rule is a `ValueError`.
    """
    tensors, _ = load_tensors(path)
    layers, others = split_tensors(tensors)
    if not layers:
        raise ValueError(f"{path} holds no LOCAS memory: no tensor of it is named locas_up.")
    for key, tensor in tensors.items():
        problem = _find_number_problem(tensor, is_memory=key not in others)
        if not key.startswith(PREFIX):
            problem = f"must start with {PREFIX!r}, as PEFT names tensors"
        if problem:
            raise ValueError(f"{path}: {one_line(key)} {problem}; save or copy the memory again.")
    # PEFT loads each of these without a question, also in place of the base's own weights.
    fields = {key: config.field_that_names(key) for key in others}
    for key in (key for key, field in fields.items() if field is None):
        what = f"{path}: {one_line(key)} is a weight of the base and no part of a memory"
        remedy = "get the file from a trusted source, or name the tensor in the config's saved_embeddings."
        raise ValueError(f"{what}; {remedy}")
    for field in ("modules_to_save", "trainable_token_indices", "saved_embeddings"):
        # A classifier has one of several names, so that one tensor is enough here.
        if getattr(config, field) and field not in fields.values():
            raise ValueError(
                f"{path} does not fit its config: no tensor is for {field}. Save the memory again."
            )
    for name, parts in layers.items():
        problem = _find_shape_problem(parts, config) or _find_gain_problem(parts, config)
        if problem:
            raise ValueError(
                f"{path} does not fit its config at {one_line(name)}: {problem}. Save the memory again."
            )
    return tensors, {name: len(parts["locas_up"]) for name, parts in layers.items()}


def find_divergence(tensors: Tensors, config: LocasConfig) -> str | None:
    """Return why a memory of these tensors, with the names of a file, could not be loaded; None where it could."""
    tensors = {
        key: tensor.detach()
        for key, tensor in tensors.items()
        if tensor.numel() and not tensor.is_meta
    }
    problems = {
        key: _find_number_problem(tensor, is_memory=True) for key, tensor in tensors.items()
    }
    if not any(problems.values()):
        layers = split_tensors(tensors)[0]
        problems = {
            f"at {name}": _find_gain_problem(parts, config) for name, parts in layers.items()
        }
    return next((f"{name} {problem}" for name, problem in problems.items() if problem), None)


def _find_number_problem(tensor: Tensor, is_memory: bool) -> str | None:
    if not is_memory and not tensor.is_floating_point():
        return None
    if tensor.dtype not in WIDENABLE_DTYPES:
        return f"is of {tensor.dtype}, a floating dtype of 16 bits or more expected"
    if not tensor.is_meta and not tensor.isfinite().all():
        return "holds values that are not finite"
    if not tensor.is_meta and tensor.numel() and tensor.abs().max() > LARGEST:
        return f"holds {tensor.abs().max().item():.3g}, at most {LARGEST:.0e} in size expected"
    return None


def _find_shape_problem(parts: Tensors, config: LocasConfig) -> str | None:
    for part in ("locas_up", "locas_down", "locas_tau"):
        if part not in parts:
            return f"{part} is missing"
    up = list(parts["locas_up"].shape)
    if len(up) != 2 or 0 in up:
        return f"locas_up has shape {up}, two dimensions expected"
    # The names in rank_pattern are not compared: a file may bring a regular expression that takes forever.
    r = up[0] if up[0] in config.rank_pattern.values() else config.r
    d = (config.host or {}).get("hidden_size") or up[1]
    expected = {"locas_gate": [r, d], "locas_up": [r, d], "locas_down": [d, r]} | {
        scale: [] for scale in SCALES
    }
    for part, tensor in parts.items():
        if list(tensor.shape) != expected[part]:
            return f"{part} has shape {list(tensor.shape)}, expected {expected[part]}"
    return None


def _find_gain_problem(parts: Tensors, config: LocasConfig) -> str | None:
    factors = {part: tensor.abs().max().item() for part, tensor in parts.items()}
    projections = [factors.pop("locas_input_scale", 1.0)] * (2 if "locas_gate" in factors else 1)
    gain = math.prod(
        max(1.0, factor) for factor in (*factors.values(), *projections, abs(config.scaling))
    )
    if gain > LARGEST:
        return f"the product of its largest numbers is {gain:.3g}, at most {LARGEST:.0e} expected"
    return None


def find_misfit(
    model: nn.Module, adapter_name: str, config: LocasConfig, tensors: Tensors
) -> str | None:
    """Compare the tensors to be loaded, with the model's names, with the model's own; return the first problem."""
    saved = config.saved_embeddings or ()
    own, embeddings = model.state_dict(keep_vars=True), set()
    for find in ("get_input_embeddings", "get_output_embeddings"):
        with suppress(NotImplementedError, AttributeError):  # the model may have no embeddings
            embeddings |= {id(parameter) for parameter in getattr(model, find)().parameters()}
    part = re.compile(
        rf"\.(locas_\w+|modules_to_save|trainable_tokens_delta)\.{re.escape(adapter_name)}(\.|$)"
    )
    added = {key for key in own if part.search(key)}
    memory = {key for key in added if ".locas_" in key}
    known = added | {
        key for key in own if id(own[key]) in embeddings and key.removeprefix(PREFIX) in saved
    }
    given = {
        key if key in own else key.removeprefix(PREFIX): tensor for key, tensor in tensors.items()
    }
    for key in sorted(memory - given.keys()):
        return f"the file has no {key}; load the base that the memory was made for"
    for key, tensor in given.items():
        name = one_line(key)
        if key not in known:
            if key in own and ".locas_" not in key:
                remedy = "get the file from a trusted source, or name the embedding in the config's saved_embeddings"
                return f"{name} is a weight of the base and no part of a memory; {remedy}"
            return f"the model has no layer for {name}; load the base that the memory was made for"
        shape, is_float = list(own[key].shape), own[key].is_floating_point() or key in memory
        if list(tensor.shape) != shape:
            return f"{name} has shape {list(tensor.shape)}, expected {shape}; load the base that it was made for"
        problem = _find_number_problem(tensor, is_memory=is_float)
        if not is_float and tensor.dtype != own[key].dtype:
            problem = f"is of {tensor.dtype}, {own[key].dtype} expected"
        if problem:
            return f"{name} {problem}; save or copy the memory again"
    return None


def rename_trained_modules(model: nn.Module, adapter_name: str, tensors: Tensors) -> Tensors:
    """Return a file's tensors with the model's names for those of fully trained modules and of trained tokens."""
    renamed = dict(tensors)
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            for saved, own in module.adapter_state_dict_load_map(adapter_name).items():
                if f"{PREFIX}{name}.{saved}" not in tensors:  # PEFT would raise a KeyError halfway
                    raise ValueError(
                        f"the memory does not fit the model: the file has no {PREFIX}{name}.{saved}."
                    )
                renamed[f"{PREFIX}{name}.{own}"] = renamed.pop(f"{PREFIX}{name}.{saved}")
    return renamed


def check_tokens(config: LocasConfig, model: nn.Module) -> None:
    """Raise a `ValueError` if a token to be trained is outside the vocabulary: on a GPU, PEFT would crash."""
    indices = config.trainable_token_indices or {}
    for target, numbers in (indices if isinstance(indices, dict) else {None: indices}).items():
        embeddings = (
            getattr(model, "get_input_embeddings", lambda: None)() if target is None else None
        )
        for name, module in model.named_modules():
            rows = getattr(getattr(module, "weight", None), "shape", None)
            if (module is embeddings or (target is not None and name.endswith(target))) and rows:
                if max(numbers, default=0) >= rows[0]:
                    what = f"trainable_token_indices must be below the {rows[0]} rows of {name}, got {max(numbers)}"
                    raise ValueError(f"{what}: use ids of this vocabulary.")


def check_task(config: LocasConfig, model: nn.Module) -> None:
    """Raise a `ValueError` if the model cannot do a memory's task."""
    needed = _TASK_NEEDS.get(config.task_type)
    if needed is not None and not hasattr(model, needed):
        what = f"the memory was made for task_type {str(config.task_type)!r}, which {type(model).__name__} cannot do"
        raise ValueError(f"{what}: load the base that it was made for.")


@torch.no_grad()
def sample_weights(model: nn.Module) -> str:
    """Return the first numbers of up to 32 matrices of the base, spread over its depth, each as 4 hex digits.

    The digits are those of bfloat16. Adapters, merged memories and more rows of the vocabulary do not change the
    sample, other floating dtypes hardly. Weights that are quantised or on the meta device are "----".
    """
    matrices = [parameter for _, parameter in base_parameters(model) if parameter.dim() >= 2]
    if len(matrices) > MATRICES:
        matrices = [matrices[index * len(matrices) // MATRICES] for index in range(MATRICES)]
    return "".join(map(_to_digits, matrices))


def may_be_same_weights(expected: object, found: str) -> bool:
    """Return whether two samples can be of one base, in one dtype or in two; `expected` is from a file."""
    if not isinstance(expected, str) or len(expected) != len(found):
        return True
    pairs = [(expected[i : i + 4], found[i : i + 4]) for i in range(0, len(found), 4)]
    try:
        known = [
            bytes.fromhex("".join(f"{digits}0000" for digits in pair))
            for pair in pairs
            if _UNKNOWN not in pair
        ]
        numbers = [
            struct.unpack(">ff", pair) for pair in known
        ]  # bfloat16 is the first half of float32
    except (ValueError, struct.error):
        return True
    return all(abs(a - b) <= _RELATIVE * max(abs(a), abs(b)) + _ABSOLUTE for a, b in numbers)


def _to_digits(parameter: Tensor) -> str:
    plain = (
        type(parameter) is nn.Parameter and type(parameter.data) is Tensor
    )  # not quantised, not sharded
    known = plain and parameter.is_floating_point() and not parameter.is_meta
    if not known or parameter.numel() < NUMBERS or parameter.element_size() < 2:
        return _UNKNOWN * NUMBERS
    first = parameter.detach()[(0,) * (parameter.dim() - 1)][:NUMBERS]
    numbers = first.to("cpu", torch.bfloat16).view(torch.int16).tolist()
    return "".join(f"{number & 0xFFFF:04x}" for number in numbers) + _UNKNOWN * (
        NUMBERS - len(numbers)
    )
