"""Convert saved memories: merge one into a checkpoint, export some as LoRAs.

Each function mutates the base that it is given: load it anew, or give one that shares its weights
(`share_weights`).
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checks import invalid
from ..files import drop_former, finish_replacement, is_same_folder, staged
from ..slots import to_lora, widen_base
from .folder import MEMORY_CONFIG, escape, make_card, save_memory
from .loading import describe_memory, load_memory, memory_attached

__all__ = ["export_memories", "merge_memory", "save_adapter", "share_weights"]

# What transformers loads of a checkpoint's folder beside `config.json`.
_CHECKPOINT_FILES = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model*",
    "generation_config.json",
    "chat_template.*",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
)


def share_weights(base: PreTrainedModel) -> PreTrainedModel:
    """Return a second, frozen model with the weights of a base.

    Adapters and merges of the second one leave the first as it is.
    """
    shared = {
        id(weight): nn.Parameter(weight.data, requires_grad=False) for weight in base.parameters()
    }
    return copy.deepcopy(base, shared)


def check_checkpoint_folder(out: Path) -> None:
    """Raise a `ValueError` for a folder that holds a memory.

    Transformers would load that memory with a checkpoint in the folder.
    """
    finish_replacement(out)
    if (out / MEMORY_CONFIG).exists():
        got = f"{str(out)!r} with a memory in it"
        raise invalid("--out", "be a folder without a memory", got, "choose another folder")


def merge_memory(
    base: PreTrainedModel, tokenizer, memory: Path, out: Path, pad_to_multiple_of: int | None = None
) -> PreTrainedModel:
    """Save a memory merged into its base, and return the merged model.

    Stock transformers loads the checkpoint. `pad_to_multiple_of` replaces the value in the memory's
    config. An `out` that holds a memory is a `ValueError`.
    """
    check_checkpoint_folder(out)
    if is_same_folder(out, base.name_or_path):
        got = f"{str(out)!r}, the base of the memory"
        raise invalid("--out", "be a folder of its own", got, "choose another folder")
    fields: dict[str, Any] = {}
    if pad_to_multiple_of is not None:
        fields["pad_to_multiple_of"] = pad_to_multiple_of
    merged = load_memory(base, memory, **fields).merge_and_unload()
    with staged(out) as folder:
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _drop_former_checkpoint(out, folder)
    return merged


def _drop_former_checkpoint(out: Path, folder: Path) -> None:
    """Let a new checkpoint also replace the files of a former one that it has no other for.

    A former chat template, or a single file of weights beside new parts, would be loaded with it.

    Args:
        out: the folder of the former checkpoint, if there is one.
        folder: the new checkpoint, as `files.staged` yields it.
    """
    former = []
    for pattern in _CHECKPOINT_FILES:
        for file in out.glob(pattern):
            if file.is_file() and not (folder / file.name).exists():
                former.append(file.name)
    if former:
        drop_former(folder, former)


def export_memories(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    memories: Mapping[str, Path],
    out: Path,
    *,
    neurons: int | None = None,
    with_base: bool = True,
    with_adapters: bool = True,
    base_name: str | None = None,
) -> tuple[int, int]:
    """Save memories as LoRA adapters, and in `out/base` the widened base: all or nothing.

    An engine that serves LoRA adapters serves each of them on that base (see `slots.lora_export`).

    Args:
        base: the base of all the memories, without adapters; it is widened in place.
        memories: for each adapter its folder inside `out`, such as "adapters/Ada", and the folder
            of its memory.
        out: a new or empty folder.
        neurons: by how many neurons the base is widened; the r of the widest memory where not
            given.
        with_base: whether the base is written.
        with_adapters: whether the adapters are written.
        base_name: what the adapters call the base; `out/base` where not given. Engines compare it.

    Returns:
        The number of neurons, and the largest rank of the adapters.

    Raises:
        ValueError: a memory is damaged, of another base or another type, has more than slots, or
            stands beside a mixture of experts. Nothing is written.
    """
    widest = max(_find_width(memory) for memory in memories.values())
    neurons = neurons or widest
    largest_rank = 1
    ffn_parts = None
    # An adapter alone names no base: which copy of the widened base it will be served with is not
    # known.
    if not base_name:
        base_name = str(out / "base") if with_base else None
    with staged(out) as folder:
        for adapter, memory in memories.items():
            with memory_attached(base, memory) as model:
                config, tensors = to_lora(model, neurons=neurons)
                ffn_parts = model.peft_config["default"].ffn_parts
            largest_rank = max([largest_rank, config.r, *config.rank_pattern.values()])
            if with_adapters:
                config.base_model_name_or_path = base_name
                config.save_pretrained(str(folder / adapter))
                path = folder / adapter / SAFETENSORS_WEIGHTS_NAME
                save_file(tensors, path, metadata={"format": "pt"})
        if with_base:
            widen_base(base, neurons, ffn_parts)
            base.save_pretrained(folder / "base")
            tokenizer.save_pretrained(folder / "base")
    return neurons, largest_rank


def _find_width(memory: Path) -> int:
    """Return the r of a memory's widest layer; a `ValueError` for one that is not FFNs alone."""
    description = describe_memory(memory)
    name = repr(str(memory))
    if not description["layers"]:
        got = f"{name} of type {description['peft_type']}"
        raise invalid("memory", "be of type LOCAS", got, "engines load other adapters as they are")
    if description["replaces"]:
        got = f"{name} that replaces {description['replaces'][0]} of the base"
        raise invalid("memory", "have slots alone", got, "merge it")
    if any(layer["gain"] for layer in description["layers"]):
        raise invalid("memory", "have slots alone", f"{name} with gains", "merge it")
    return max(layer["r"] for layer in description["layers"])


def save_adapter(
    model: PeftModel,
    adapter_name: str,
    base_name: str,
    out: Path,
    title: str,
    rows: dict,
    add_files: Callable[[Path], None] | None = None,
) -> None:
    """Save a memory that was made of others; its card has a title and rows (see `make_card`).

    For `add_files` see `save_memory`.
    """
    config = model.peft_config[adapter_name]
    rows = {"base": escape(base_name), "slots in a layer": str(config.r), **rows}
    card = make_card(base_name, config.peft_type, title, "made of other memories", rows)
    save_memory(model, out, base_name, card, adapter_name=adapter_name, add_files=add_files)
