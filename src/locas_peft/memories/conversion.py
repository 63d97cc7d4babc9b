"""Convert saved memories: merge one into a checkpoint, export one as a LoRA.

Each function mutates the base that it is given: load it anew, or give one that shares its weights (`share_weights`).
"""

import copy
from pathlib import Path

from peft import PeftModel
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..files import staged
from ..slots import to_lora, widen_base
from ..tuner import list_layers
from .base_sample import sample_weights
from .folder import escape, make_card, save_memory
from .loading import load_memory, memory_attached

__all__ = ["export_memory", "merge_memory", "save_adapter", "share_weights"]


def share_weights(base: PreTrainedModel) -> PreTrainedModel:
    """Return a second, frozen model with the weights of a base, which adapters and merges then leave as it is."""
    shared = {
        id(weight): nn.Parameter(weight.data, requires_grad=False) for weight in base.parameters()
    }
    return copy.deepcopy(base, shared)


def merge_memory(
    base: PreTrainedModel, tokenizer, memory: Path, out: Path, pad_to_multiple_of: int | None = None
) -> PreTrainedModel:
    """Save a memory merged into its base, as a checkpoint that stock transformers loads, and return that model.

    `pad_to_multiple_of` replaces the value in the memory's config.
    """
    fields = {} if pad_to_multiple_of is None else {"pad_to_multiple_of": pad_to_multiple_of}
    merged = load_memory(base, memory, **fields).merge_and_unload()
    with staged(out) as folder:
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return merged


def export_memory(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    memory: Path,
    out: Path,
    *,
    neurons: int | None = None,
    with_base: bool = True,
    with_adapter: bool = True,
    base_path: str | None = None,
) -> tuple[int, int]:
    """Save a memory as a LoRA adapter in `out/adapter`, and the base that it fits in `out/base`.

    The base gets so many neurons, or the memory's own r, which is returned with the rank of the LoRA. The adapter's
    config says that the base is at `base_path`, or at `out/base` if it is saved.
    """
    with memory_attached(base, memory) as model:
        widths = [layer.locas_up["default"].out_features for layer in list_layers(model, "default")]
        neurons = neurons or max(widths, default=1)
        config, tensors = to_lora(model, neurons=neurons)
        made_for = model.peft_config["default"]
        host = {**made_for.get_record("host"), "weights": sample_weights(model)}
    with staged(out) as folder:
        if with_adapter:
            # An adapter alone names no base: which copy of the widened base it will be served with is not known.
            config.base_model_name_or_path = base_path or (str(out / "base") if with_base else None)
            config.save_pretrained(str(folder / "adapter"))
            save_file(
                tensors, folder / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"}
            )
        if with_base:
            widen_base(base, neurons, made_for.ffn_parts)
            base.config.locas_widened = {
                "neurons": neurons,
                "host": host,
            }  # for `library.adapters`
            base.save_pretrained(folder / "base")
            tokenizer.save_pretrained(folder / "base")
    return neurons, max([config.r, *config.rank_pattern.values()])


def save_adapter(
    model: PeftModel, adapter_name: str, base_name: str, out: Path, title: str, rows: dict
) -> None:
    """Save a memory that was made of others, with a title and rows, in Markdown, for its card (see `make_card`)."""
    config = model.peft_config[adapter_name]
    rows = {"base": escape(base_name), "slots in a layer": str(config.r), **rows}
    card = make_card(base_name, config.peft_type, title, "made of other memories", rows)
    save_memory(model, out, base_name, card, adapter_name=adapter_name)
