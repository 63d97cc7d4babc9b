"""What a user does with the memories of a model, beyond PEFT's verbs: calibrate them, ask for empty ones, rescale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from .layer import LocasLayer, list_active_memories, list_layers
from .passes import evaluating, to_inputs


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[torch.Tensor | Mapping[str, torch.Tensor]],
    adapter_name: str | None = None,
) -> None:
    """Initialises a memory's gate and up rows from what the backbone does on a text; the values stay zero.

    One forward of the backbone a batch, without its head; only sums are kept. Under torch.distributed the processes'
    sums are added, so that all choose the same slots. Paper, "Activation-Based Basis Selection".

    Args:
        model: a model with a LOCAS memory, as `get_peft_model` or `inject_adapter_in_model` return it; mutated.
        batches: `LongTensor [B, T]`, or mappings with `input_ids` and, where there is padding, `attention_mask` (both
            `[B, T]`, nonzero where a token counts).
        adapter_name: which memory; `None` for the active ones.

    Raises:
        ValueError: there is no such memory, it has learned already, or the text gave no tokens or values that are not
            finite; the memory is as it was.

    Example:
        ```py
        model = get_peft_model(base, LocasConfig(r=64))
        calibrate(model, [tokenizer(text, return_tensors="pt").input_ids])
        ```
    """
    layers = {
        name: [layer for layer in list_layers(model) if name in layer.locas_up] for name in _names(model, adapter_name)
    }
    if not any(layers.values()):
        raise ValueError(f"the model has no LOCAS memory {adapter_name or 'that is active'!r} to calibrate.")
    for name, its_layers in layers.items():
        if any(layer.is_written(name) for layer in its_layers):
            raise ValueError(f"the memory '{name}' is written while reading, not calibrated: use SlotWriter.")
        if any(layer.has_learned(name) for layer in its_layers):
            raise ValueError(f"the memory '{name}' has learned already: calibrating would lose it. Add a new adapter.")
    batches = list(batches) if len(layers) > 1 else batches  # a generator gives its batches once
    for name, its_layers in layers.items():
        _calibrate_one(model, batches, name, its_layers)


def _calibrate_one(model: nn.Module, batches: Iterable, name: str, layers: list[LocasLayer]) -> None:
    backbone = _find_backbone(model)
    try:
        for layer in layers:
            layer.calibration = layer.start_calibration(name)
        with evaluating(backbone), _backbone_alone(model, layers):
            for batch in batches:
                inputs = to_inputs(model, batch)
                for layer in layers:
                    layer.token_mask = inputs.get("attention_mask")
                backbone(**inputs, use_cache=False)
        # All rows are made before the first is written: what fails leaves no layer changed.
        rows = [layer.make_rows(name, layer.calibration) for layer in layers]
    finally:
        for layer in layers:
            layer.calibration = layer.token_mask = None
    for layer, its_rows in zip(layers, rows, strict=True):
        layer.load_rows(name, its_rows)


@contextmanager
def _backbone_alone(model: nn.Module, counted: list[LocasLayer]) -> Iterator[None]:
    """Switches off the memories of layers that are not counted; those that are answer for the backbone alone."""
    others = [layer for layer in list_layers(model) if layer not in counted and not layer._disable_adapters]
    for layer in others:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in others:
            layer._disable_adapters = False


def empty_memories(model: nn.Module, adapter_name: str | None = None) -> list[str]:
    """Names the memories that still wait for their calibration.

    Args:
        model: any module; one without LOCAS memories has none that are empty. Those of the strategy "write" wait for
            their first slot, not for a calibration, and are not named.
        adapter_name: look at this one only; `None` for the active ones.
    """
    return [
        name
        for name in _names(model, adapter_name)
        if any(
            name in layer.locas_up and not layer.is_written(name) and layer.is_empty(name)
            for layer in list_layers(model)
        )
    ]


def unwritten_memories(model: nn.Module) -> list[str]:
    """Names the active memories of the strategy "write" that have no slot yet: training alone would leave them so."""
    return [
        name
        for name in _names(model, None)
        if all(
            layer.is_written(name) and layer.is_empty(name) for layer in list_layers(model) if name in layer.locas_up
        )
    ]


@contextmanager
def rescale(model: nn.Module, multiplier: float, adapter_name: str | None = None) -> Iterator[None]:
    """Within the context, the output of a memory is multiplied by a number: 0 silences it, 1 changes nothing.

    PEFT's `rescale_adapter_scale` does this for LoRA.

    Args:
        model: a model with LOCAS memories; mutated, and restored at the end.
        multiplier: the number.
        adapter_name: which memory; `None` for the active ones.

    Raises:
        ValueError: the model has no such memory.
    """
    taus = [
        (layer, name, layer.locas_tau[name])
        for layer in list_layers(model)
        for name in _names(model, adapter_name)
        if name in layer.locas_up
    ]
    if not taus:
        raise ValueError(f"the model has no LOCAS memory {adapter_name or 'that is active'!r} to rescale.")
    for layer, name, tau in taus:
        layer.locas_tau[name] = tau * multiplier
    try:
        yield
    finally:
        for layer, name, tau in taus:
            layer.locas_tau[name] = tau


def _names(model: nn.Module, adapter_name: str | None) -> list[str]:
    return list_active_memories(model) if adapter_name is None else [adapter_name]


def _find_backbone(model: nn.Module) -> nn.Module:
    """The transformer without its head, inside whatever PEFT put around it."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return model.base_model if isinstance(model, PreTrainedModel) else model
