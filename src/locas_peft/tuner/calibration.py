"""Calibrate the memories of a model on a text."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .attached import find_memories, list_layers
from .errors import invalid
from .ffn import SumActivity
from .initialization import Calibration, Observer, Statistics
from .layer import LocasLayer
from .modules import evaluating, unwrap

DECODER_MASK = "decoder_attention_mask"
Batch: TypeAlias = Tensor | Mapping[str, Tensor]
Batches: TypeAlias = Batch | Iterable[Batch]


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Batches,
    adapter_name: str | None = None,
    across_processes: bool = True,
) -> None:
    """Make a memory's rows from what the host does on a text, and measure its scale.

    The values stay zero. Each batch takes one forward pass of the host without its head. Other
    memories are switched off meanwhile. Paper, "Activation-Based Basis Selection".

    Args:
        model: a model with a LOCAS memory, as `get_peft_model` or `inject_adapter_in_model` returns
            it; mutated.
        batches: `LongTensor [B, T]`, or mappings with `input_ids` and, if padded, `attention_mask`,
            both `[B, T]`; or one of these alone. Models with an encoder and a decoder also need
            `labels`, or `decoder_input_ids` and, if padded, `decoder_attention_mask`.
        adapter_name: the memory; `None` for the active ones.
        across_processes: under torch.distributed, whether the text is that of all processes
            together, which train one memory; else each process has a memory of its own.

    Raises:
        ValueError: for a memory that is missing, has learned already or is sharded, where a memory
            of the model is merged, and for a text without tokens or with values that are not
            finite. The memory is unchanged.
    """
    memories = find_memories(model, adapter_name)
    if not memories:
        wanted = adapter_name or "that is active"
        raise ValueError(f"the model has no LOCAS memory {wanted!r} to calibrate.")
    for name, layers in memories.items():
        for layer in layers:
            _check_calibratable(layer, name)
    if len(memories) > 1:
        # A generator gives its batches once.
        batches = list(each_batch(batches))
    for name, layers in memories.items():
        # All rows are computed before a layer is changed: a failure leaves every layer unchanged.
        statistics = observe_host(model, batches, name, layers, across_processes=across_processes)
        pairs = list(zip(layers, statistics, strict=True))
        rows = [layer.make_rows(name, measured) for layer, measured in pairs]
        for (layer, measured), layer_rows in zip(pairs, rows, strict=True):
            layer.initialize(name, layer_rows, measured)


def _check_calibratable(layer: LocasLayer, name: str) -> None:
    problem = None
    if isinstance(layer.locas_up[name].weight, DTensor):
        problem = "is sharded across processes: calibrate it before the model is"
    elif layer.is_written(name) and not layer.needs_calibration(name):
        problem = "is written while reading, not calibrated: use SlotWriter"
    elif layer.has_learned(name):
        problem = "has learned already: calibrating would lose it. Add a new adapter"
    elif name in layer.merged_adapters:
        problem = "is merged: call unmerge_adapter() before it is calibrated"
    if problem is not None:
        raise ValueError(f"the memory '{name}' {problem}.")


def observe_host(
    model: nn.Module,
    batches: Batches,
    name: str,
    layers: list[LocasLayer],
    r: int | None = None,
    across_processes: bool = True,
) -> list[Statistics]:
    """Return what the host's FFNs do on a text, for each layer of a memory. No memory takes part.

    Args:
        model, batches, across_processes: as for `calibrate`.
        name: the memory.
        layers: its layers.
        r: the width R that the statistics must suffice for; `None` for the memory's own.

    Raises:
        ValueError: for a memory that is merged anywhere in the model, which would be unmerged, and
            for a text without tokens or with values that are not finite.
    """
    check_none_merged(list_layers(model), name)
    base = unwrap(model.get_base_model() if hasattr(model, "get_base_model") else model)
    backbone = base
    if isinstance(base, PreTrainedModel) and not _has_two_texts(base):
        # Without the head. Models of two texts make the decoder's input from labels with it.
        backbone = base.base_model
    inputs: dict[str, Tensor] = {}

    def make_observer(layer: LocasLayer, calibration: Calibration) -> Observer:
        # The host's hooks forget the layer's own mask in a forward without gradients.
        def observe(
            ffn_input: Tensor, sum_activity: SumActivity, output: Tensor, _: Tensor | None
        ) -> None:
            mask = find_token_mask(model, layer, inputs)
            calibration.update(ffn_input, sum_activity, output, mask)

        return observe

    try:
        calibrations = []
        for layer in layers:
            calibration = layer.start_calibration(name, r, across_processes)
            layer.observer = make_observer(layer, calibration)
            calibrations.append(calibration)
        # Adapters of other kinds are part of the host that the memory runs in: they stay as they
        # are. In the memory's own layers the host's FFN runs alone.
        others = [layer for layer in list_layers(model) if layer not in layers]
        with evaluating(backbone), _switched_off(others):
            for batch in each_batch(batches):
                inputs = to_inputs(model, batch)
                backbone(**inputs, use_cache=False)
        return [calibration.finish() for calibration in calibrations]
    finally:
        for layer in layers:
            layer.observer = None


def check_none_merged(layers: list[LocasLayer], name: str) -> None:
    """Raise a `ValueError` where a memory is merged: its neurons look like slots of the host."""
    if any(layer.merged for layer in layers):
        problem = "is beside a merged one"
        raise ValueError(f"the memory '{name}' {problem}: call unmerge_adapter() first.")


@contextmanager
def _switched_off(layers: list[LocasLayer]) -> Iterator[None]:
    """Switch all memories of some layers off within the context, those that are frozen too."""
    former = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, is_off in zip(layers, former, strict=True):
            layer._disable_adapters = is_off


def find_token_mask(
    model: nn.Module, layer: LocasLayer, inputs: Mapping[str, Tensor]
) -> Tensor | None:
    """Return the padding mask of the text that a layer runs on, [B, T]; None without one."""
    is_decoding = _has_two_texts(model) and "decoder" in layer.name.split(".")
    return inputs.get(DECODER_MASK if is_decoding else "attention_mask")


def _has_two_texts(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def each_batch(batches: Batches) -> Iterator[Batch]:
    """Yield the batches of a text, which may be one batch alone."""
    if isinstance(batches, Mapping) or (isinstance(batches, Tensor) and batches.dim() == 2):
        yield batches
    else:
        yield from batches


def to_inputs(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return a batch as the model's arguments, on the device of its embeddings.

    Args:
        model: the model.
        batch: `LongTensor [B, T]`, or a mapping. `input_ids` and `attention_mask` are kept, and
            the decoder's entries and the labels where the model has an encoder and a decoder.

    Raises:
        ValueError: for a batch of another shape.
    """
    inputs = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        got = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise invalid("each batch", "have input_ids [B, T]", got, "give ids[None] for one text")
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":
        # Offloaded: accelerate moves the inputs.
        device = inputs["input_ids"].device
    names = ["input_ids", "attention_mask"]
    if _has_two_texts(model):
        names += ["decoder_input_ids", DECODER_MASK, "labels"]
    return {name: inputs[name].to(device) for name in names if name in inputs}
