"""Whether a memory's config and file fit a model, checked before PEFT copies a tensor of the file into the model."""

from __future__ import annotations

import re
from contextlib import suppress

import torch
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from .config import LocasConfig
from .ffn import WIDENABLE_DTYPES
from .memory_file import PREFIX, one_line

# What PEFT's wrapper of a task takes from the model, after the memory has been added.
_TASK_NEEDS = {
    "CAUSAL_LM": "prepare_inputs_for_generation",
    "SEQ_2_SEQ_LM": "_prepare_encoder_decoder_kwargs_for_generation",
}


def find_load_problem(
    model: nn.Module, adapter_name: str, saved_embeddings: list[str] | None, state_dict: dict[str, torch.Tensor]
) -> str | None:
    """Compare the tensors to be loaded, on the meta device or not, with the model's; return the first problem."""
    own = model.state_dict(keep_vars=True)
    part = re.compile(rf"\.locas_\w+\.{re.escape(adapter_name)}(\.weight)?$")
    memory = {key for key in own if part.search(key)}
    beside = _list_beside(model, adapter_name, saved_embeddings)
    given = {key if key in own else key.removeprefix(PREFIX): state_dict[key] for key in state_dict}
    for key in sorted(memory - given.keys()):
        return f"the file has no {key}; load the base that the memory was made for"
    for key, tensor in given.items():
        name = one_line(key)
        if key not in memory | beside:
            if key in own and ".locas_" not in key:
                return (
                    f"{name} is a weight of the base and no part of a memory; get the file from a trusted source, or "
                    "name the embedding in the config's saved_embeddings"
                )
            return f"the model has no layer for {name}; load the base that the memory was made for"
        shape = list(own[key].shape)
        if list(tensor.shape) != shape:
            return f"{name} has shape {list(tensor.shape)}, expected {shape}; load the base that it was made for"
        if own[key].is_floating_point() or key in memory:
            if tensor.dtype not in WIDENABLE_DTYPES:
                return f"{name} is of {tensor.dtype}, a floating dtype of 16 bits or more expected; save it again"
            if not tensor.is_meta and not tensor.isfinite().all():
                return f"{name} holds values that are not finite; save or copy the memory again"
        elif tensor.dtype != own[key].dtype:
            return f"{name} is of {tensor.dtype}, {own[key].dtype} expected; save the memory again"
    return None


def _list_beside(model: nn.Module, adapter_name: str, saved_embeddings: list[str] | None) -> set[str]:
    """Name the model's tensors that a memory's file may hold beside the memory: none of them unless the config asks.

    They are the memory's copies of fully trained modules, its trained tokens, and the embeddings in
    `saved_embeddings`, which are the base's own.
    """
    names, embeddings = set(), set()
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            names |= {f"{name}.{key}" for key in module.adapter_state_dict_load_map(adapter_name).values()}
        elif isinstance(module, PreTrainedModel):
            for find in (module.get_input_embeddings, module.get_output_embeddings):
                with suppress(NotImplementedError, AttributeError):  # a part of the model may have no embeddings
                    embeddings |= {id(parameter) for parameter in find().parameters()}
    for key, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in embeddings and key.removeprefix(PREFIX) in (saved_embeddings or ()):
            names.add(key)
    return names


def rename_beside(model: nn.Module, adapter_name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a file's tensors with the model's names for those of fully trained modules and of trained tokens.

    Raises:
        ValueError: one of them is missing, for which PEFT raises a KeyError halfway.
    """
    renamed = dict(tensors)
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            for saved, own in module.adapter_state_dict_load_map(adapter_name).items():
                key = f"{PREFIX}{name}.{saved}"
                if key not in renamed:
                    raise ValueError(f"the memory does not fit the model: the file has no {one_line(key)}.")
                renamed[f"{PREFIX}{name}.{own}"] = renamed.pop(key)
    return renamed


def check_tokens(config: LocasConfig, model: nn.Module) -> None:
    """Raise a `ValueError` if a token to be trained is outside the vocabulary: on a GPU, PEFT would crash."""
    indices = config.trainable_token_indices
    for target, numbers in (indices if isinstance(indices, dict) else {None: indices or []}).items():
        embeddings = getattr(model, "get_input_embeddings", lambda: None)() if target is None and numbers else None
        for name, module in model.named_modules():
            rows = getattr(getattr(module, "weight", None), "shape", None)
            if (module is embeddings or (target is not None and name.endswith(target))) and numbers and rows:
                if max(numbers) >= rows[0]:
                    raise ValueError(
                        f"trainable_token_indices must be below the {rows[0]} rows of {name}, got {max(numbers)}: use "
                        "ids of this vocabulary."
                    )


def check_task(config: LocasConfig, model: nn.Module) -> None:
    """Raise a `ValueError` if the model cannot do a memory's task."""
    needed = _TASK_NEEDS.get(config.task_type)
    if needed is not None and not hasattr(model, needed):
        raise ValueError(
            f"the memory was made for task_type {str(config.task_type)!r}, which {type(model).__name__} cannot do: "
            "load the base that it was made for."
        )
