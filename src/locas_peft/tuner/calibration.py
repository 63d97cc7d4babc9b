"""Calibrate the memories of a model on a text."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .attached import list_layers, names_or_active
from .initialization import Statistics
from .layer import LocasLayer
from .modules import adapters_disabled, evaluating

Batches = Iterable[Tensor | Mapping[str, Tensor]]


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Batches,
    adapter_name: str | None = None,
    across_processes: bool = True,
) -> None:
    """Make a memory's gate and up rows from what the host does on a text, and measure its scale. The values stay zero.

    Each batch takes one forward pass of the host without its head. Other memories are switched off meanwhile. Paper,
    "Activation-Based Basis Selection".

    Args:
        model: a model with a LOCAS memory, as `get_peft_model` or `inject_adapter_in_model` returns it; mutated.
        batches: `LongTensor [B, T]`, or mappings with `input_ids` and, if padded, `attention_mask`, both `[B, T]`.
        adapter_name: the memory; `None` for the active ones.
        across_processes: under torch.distributed, whether the text is that of all processes together, which train one
            memory; else each process has a memory of its own.

    A memory that is missing, has learned already, is merged or sharded, and a text without tokens or with values that
    are not finite, are a `ValueError`; the memory is unchanged.
    """
    memories = {name: list_layers(model, name) for name in names_or_active(model, adapter_name)}
    if not any(memories.values()):
        raise ValueError(
            f"the model has no LOCAS memory {adapter_name or 'that is active'!r} to calibrate."
        )
    for name, layers in memories.items():
        if any(isinstance(layer.locas_up[name].weight, DTensor) for layer in layers):
            raise ValueError(
                f"the memory '{name}' is sharded across processes: calibrate it before the model is."
            )
        if any(layer.is_written(name) and not layer.needs_calibration(name) for layer in layers):
            raise ValueError(
                f"the memory '{name}' is written while reading, not calibrated: use SlotWriter."
            )
        if any(layer.has_learned(name) for layer in layers):
            raise ValueError(
                f"the memory '{name}' has learned already: calibrating would lose it. Add a new adapter."
            )
        if any(name in layer.merged_adapters for layer in layers):
            raise ValueError(
                f"the memory '{name}' is merged: call unmerge_adapter() before it is calibrated."
            )
    batches = list(batches) if len(memories) > 1 else batches  # a generator gives its batches once
    for name, layers in memories.items():
        # All layers' rows are computed before the first is changed: a failure leaves every layer unchanged.
        statistics = observe_host(model, batches, name, layers, across_processes=across_processes)
        rows = [layer.make_rows(name, seen) for layer, seen in zip(layers, statistics, strict=True)]
        for layer, layer_rows, seen in zip(layers, rows, statistics, strict=True):
            layer.initialize(name, layer_rows, seen)


def observe_host(
    model: nn.Module,
    batches: Iterable,
    name: str,
    layers: list,
    r: int | None = None,
    across_processes=True,
) -> list[Statistics]:
    """Return what the host's FFNs do on a text, for each of the layers of a memory. No memory takes part.

    The statistics suffice for a memory of width `r`, by default its own.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    backbone = base.base_model if isinstance(base, PreTrainedModel) else base  # without the head
    # Adapters of other kinds are part of the host that the memory runs in: they stay as they are.
    kept = [
        module
        for module in model.modules()
        if not isinstance(module, LocasLayer) or module in layers
    ]
    try:
        for layer in layers:
            layer.calibration = layer.start_calibration(name, r, across_processes)
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


def to_inputs(model: nn.Module, batch: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch, `LongTensor [B, T]` or a mapping, as the model's arguments, on the device of its embeddings."""
    inputs = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":  # offloaded: accelerate moves the inputs
        device = inputs["input_ids"].device
    return {key: inputs[key].to(device) for key in ("input_ids", "attention_mask") if key in inputs}
