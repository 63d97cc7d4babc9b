"""The adapter of a method: a fresh one, or a saved memory, on its base within a context.

A method is one row of `ADAPTERS`, with its settings in each preset of `settings.PRESETS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..tuner import LocasConfig, find_ffns
from ..tuner.modules import remember_modules
from .settings import ReadingSettings

__all__ = ["ADAPTERS", "attached", "find_layers"]


@contextmanager
def attached(base: PreTrainedModel, settings: ReadingSettings) -> Iterator[nn.Module]:
    """Attach a method's fresh adapter to a base within the context, after setting torch's seed.

    `base`, a causal LM without adapters, is mutated. Afterwards its modules, weights, `requires_grad` flags and mode
    are as before.

    Raises:
        ValueError: the method does not fit the base.
    """
    restore = remember_modules(base)
    torch.manual_seed(settings.seed)
    make_config = ADAPTERS[settings.method]
    try:
        config = None if make_config is None else make_config(base, settings)
        yield base.requires_grad_(False) if config is None else get_peft_model(base, config)
    finally:
        restore()
        base.zero_grad(set_to_none=True)


def _lora_config(base: PreTrainedModel, settings: ReadingSettings) -> LoraConfig:
    """TempLoRA: LoRA on every projection of attention and FFN, alpha = r."""
    layers = find_layers(base, settings.layers_to_transform)
    return LoraConfig(
        r=settings.r,
        lora_alpha=settings.r,
        lora_dropout=0.0,
        # PEFT takes layers together with a list of names only.
        target_modules="all-linear" if layers is None else _name_projections(base),
        layers_to_transform=layers,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in base.modules()),
        task_type="CAUSAL_LM",
    )


def _name_projections(base: PreTrainedModel) -> list[str]:
    """Return the last part of the name of each linear layer but the output's, as PEFT's "all-linear" finds them."""
    head = base.get_output_embeddings()
    kinds = (nn.Linear, Conv1D)
    names = {name for name, module in base.named_modules() if isinstance(module, kinds) and module is not head}
    return sorted({name.rpartition(".")[2] for name in names})


def _memory_config(base: PreTrainedModel, settings: ReadingSettings) -> LocasConfig:
    gated = settings.method == "locas-glu"
    if {ffn.gated for ffn in find_ffns(base).values()} == {not gated}:
        found, other = ("two-layer", "locas-mlp") if gated else ("gated", "locas-glu")
        raise ValueError(
            f"method {settings.method!r} needs {'gated' if gated else 'two-layer'} FFNs, got {type(base).__name__} "
            f"with {found} ones: use {other!r}"
        )
    norms = {} if settings.row_norm is None else {"row_norm": settings.row_norm}
    if settings.max_slot_norm is not None:
        norms["max_slot_norm"] = settings.max_slot_norm or None
    return LocasConfig(
        r=settings.r,
        init_strategy=settings.init,
        output_scale=settings.output_scale,
        scaling=settings.scaling,
        layers_to_transform=find_layers(base, settings.layers_to_transform),
        **norms,
        seed=settings.seed,
        task_type="CAUSAL_LM",
    )


ADAPTERS: dict[str, Callable[[PreTrainedModel, ReadingSettings], PeftConfig] | None] = {
    "none": None,
    "lora": _lora_config,
    "locas-glu": _memory_config,
    "locas-mlp": _memory_config,
}
"""For each method the configuration of its adapter; None where the model only reads."""


def find_layers(base: PreTrainedModel, layers: list[int] | str | None) -> list[int] | None:
    """Return the layer indices that `ReadingSettings.layers_to_transform` means for a model; None for all layers.

    The upper half of an odd number of layers is the larger half. An index beyond the model's is a `ValueError`.
    """
    if layers is None:
        return None
    depth = base.config.get_text_config().num_hidden_layers
    if layers == "upper":
        return list(range(depth // 2, depth))
    beyond = next((index for index in layers if index >= depth), None)
    if beyond is not None:
        raise ValueError(
            f"layers_to_transform must lie below {depth}, the layers of {type(base).__name__}, got {beyond}: lower it"
        )
    return sorted(layers)
