"""Functions on the memories of a model, beyond PEFT's verbs: calibrate them, list empty ones, rescale them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .initialization import Statistics
from .layer import LocasLayer, list_active_memories, list_layers
from .modes import adapters_disabled, evaluating, to_inputs


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[torch.Tensor | Mapping[str, torch.Tensor]],
    adapter_name: str | None = None,
) -> None:
    """Make a memory's gate and up rows from what the host does on a text, and measure its scale. The values stay zero.

    Each batch takes one forward pass of the host without its head. Under torch.distributed the text is that of all
    processes together. Other memories are switched off meanwhile. Paper, "Activation-Based Basis Selection".

    Args:
        model: a model with a LOCAS memory, as `get_peft_model` or `inject_adapter_in_model` returns it; mutated.
        batches: `LongTensor [B, T]`, or mappings with `input_ids` and, where there is padding, `attention_mask` (both
            `[B, T]`, nonzero where a token counts).
        adapter_name: the memory; `None` for the active ones.

    Raises:
        ValueError: there is no such memory, it has learned already, is merged or sharded, or the text has no tokens or
            gives values that are not finite; the memory is unchanged.

    Example:
        ```py
        model = get_peft_model(base, LocasConfig(r=64))
        calibrate(model, [tokenizer(text, return_tensors="pt").input_ids])
        ```
    """
    memories = {name: list_layers(model, name) for name in _names(model, adapter_name)}
    if not any(memories.values()):
        raise ValueError(f"the model has no LOCAS memory {adapter_name or 'that is active'!r} to calibrate.")
    for name, layers in memories.items():
        if any(isinstance(layer.locas_up[name].weight, DTensor) for layer in layers):
            raise ValueError(f"the memory '{name}' is sharded across processes: calibrate it before the model is.")
        if any(layer.is_written(name) and not layer.needs_calibration(name) for layer in layers):
            raise ValueError(f"the memory '{name}' is written while reading, not calibrated: use SlotWriter.")
        if any(layer.has_learned(name) for layer in layers):
            raise ValueError(f"the memory '{name}' has learned already: calibrating would lose it. Add a new adapter.")
        if any(name in layer.merged_adapters for layer in layers):
            raise ValueError(f"the memory '{name}' is merged: call unmerge_adapter() before it is calibrated.")
    batches = list(batches) if len(memories) > 1 else batches  # a generator gives its batches once
    for name, layers in memories.items():
        _calibrate_one(model, batches, name, layers)


def _calibrate_one(model: nn.Module, batches: Iterable, name: str, layers: list[LocasLayer]) -> None:
    # All layers' rows are computed before the first is changed: a failure leaves every layer unchanged.
    statistics = observe_host(model, batches, name, layers)
    rows = [layer.make_rows(name, seen) for layer, seen in zip(layers, statistics, strict=True)]
    for layer, layer_rows, seen in zip(layers, rows, statistics, strict=True):
        layer.initialize(name, layer_rows, seen)


def observe_host(
    model: nn.Module, batches: Iterable, name: str, layers: list[LocasLayer], r: int | None = None
) -> list[Statistics]:
    """Return what the host's FFNs do on a text, for each of the layers of a memory. No memory takes part.

    The statistics suffice for a memory of width `r`, by default its own.

    Raises:
        ValueError: the text has no tokens, or gives values that are not finite.
    """
    backbone = _find_backbone(model)
    # Adapters of other kinds are part of the host that the memory runs in: they stay as they are.
    kept = [module for module in model.modules() if not isinstance(module, LocasLayer) or module in layers]
    try:
        for layer in layers:
            layer.calibration = layer.start_calibration(name, r)
        with evaluating(backbone), adapters_disabled(model, except_for=kept):
            for batch in batches:
                inputs = to_inputs(model, batch)
                for layer in layers:
                    layer.token_mask = inputs.get("attention_mask")
                backbone(**inputs, use_cache=False)
        return [layer.calibration.finish() for layer in layers]
    finally:
        for layer in layers:
            layer.calibration = layer.token_mask = None


def empty_memories(model: nn.Module, adapter_name: str | None = None) -> list[str]:
    """Name the memories that wait for their calibration, for rows or for the measured scale.

    Without a name, the active memories are checked.
    """
    return [
        name
        for name in _names(model, adapter_name)
        if any(layer.needs_calibration(name) for layer in list_layers(model, name))
    ]


def unwritten_memories(model: nn.Module) -> list[str]:
    """Name the active memories of the strategy "write" that have no slot yet, so that training cannot change them."""
    return [
        name
        for name in _names(model, None)
        if all(layer.is_written(name) and layer.is_empty(name) for layer in list_layers(model, name))
    ]


@contextmanager
def rescale(model: nn.Module, multiplier: float, adapter_name: str | None = None) -> Iterator[None]:
    """Multiply the output of a memory by a number within the context: 0 silences it, 1 changes nothing.

    The multiplier is not saved with the memory, and a memory cannot be merged inside the context. Contexts may be
    nested: their multipliers are multiplied. Without a name, the active memories are rescaled. PEFT's
    `rescale_adapter_scale` does this for LoRA.

    Raises:
        ValueError: the model has no such memory, or it is merged.
    """
    memories = [(layer, name) for name in _names(model, adapter_name) for layer in list_layers(model, name)]
    if not memories:
        raise ValueError(f"the model has no LOCAS memory {adapter_name or 'that is active'!r} to rescale.")
    for layer, name in memories:
        if name in layer.merged_adapters:
            raise ValueError(f"the memory '{name}' is merged: call unmerge_adapter() before it is rescaled.")
    former = [layer.locas_multiplier.get(name) for layer, name in memories]
    for (layer, name), value in zip(memories, former, strict=True):
        layer.locas_multiplier[name] = multiplier if value is None else value * multiplier
    try:
        yield
    finally:
        for (layer, name), value in zip(memories, former, strict=True):
            layer.locas_multiplier.pop(name, None)
            if value is not None and name in layer.locas_up:
                layer.locas_multiplier[name] = value


def _names(model: nn.Module, adapter_name: str | None) -> list[str]:
    return list_active_memories(model) if adapter_name is None else [adapter_name]


def _find_backbone(model: nn.Module) -> nn.Module:
    """Return the transformer without its head, from inside any PEFT wrapper."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return model.base_model if isinstance(model, PreTrainedModel) else model
