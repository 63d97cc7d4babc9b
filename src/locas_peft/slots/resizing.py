"""Change how many slots a memory has: compress it, or grow it by slots that are still empty.

NL-SVD (`nl_svd`) compresses memories of two layers without a text. To keep n slots and refit their
values on a text, by least squares, suits every memory, since the output is linear in the values.

Axes: L layers, T tokens, D hidden size, R slots, n slots after.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_whole
from ..tuner import evaluating
from ..tuner.attached import find_memory
from ..tuner.calibration import (
    Batches,
    check_none_merged,
    each_batch,
    find_token_mask,
    observe_host,
    to_inputs,
)
from ..tuner.initialization import STRATEGIES, Rows, Statistics, make_generator
from ..tuner.layer import LocasLayer
from ..tuner.scale import KAPPA
from .nlsvd import check_rank, nl_svd
from .ridge import holds_map

__all__ = ["compress", "grow", "refit_slots"]


def compress(
    model: nn.Module, rank: int, adapter_name: str | None = None, batches: Batches | None = None
) -> None:
    """Reduce a memory to `rank` slots in every layer, in place, so that it can be saved.

    With `batches`, keep the slots that contribute most on that text and refit their values (any
    memory). Without, apply `nl_svd` (two-layer memories). The config's `r` follows. The weights are
    new parameters: create optimizers afterwards.

    Args:
        model: a model with a LOCAS memory, as `get_peft_model` or `inject_adapter_in_model` returns
            it; mutated.
        rank: n, from 1 to the memory's width.
        adapter_name: the memory; `None` for the active one.
        batches: the text, as for `calibrate`.

    Raises:
        TypeError, ValueError: for a rank out of range, or a memory that cannot be reduced; it is
            unchanged.
    """
    name, layers = find_memory(model, adapter_name, "compress")
    if batches is None and any(layer.ffn.gated for layer in layers):
        rule = "NL-SVD needs a memory of two layers"
        raise ValueError(f"{rule}, got one with gates: give batches of a text to fit.")
    check_rank(rank, min(_width_of(layer, name) for layer in layers))
    _check_weights(name, layers, "is compressed")
    if any(not layer.has_learned(name) for layer in layers):
        raise ValueError(
            f"the memory '{name}' is empty: train or write it before it is compressed."
        )
    # All layers are reduced before the first is changed: a failure leaves the memory unchanged.
    if batches is None:
        _check_no_map(name, layers)
        reduced = [_reduce_layer(layer, name, rank) for layer in layers]
    else:
        grams = _measure_slots(model, name, layers, batches)
        pairs = zip(layers, grams, strict=True)
        reduced = [_refit_layer(layer, name, rank, gram) for layer, gram in pairs]
    for layer, weights in zip(layers, reduced, strict=True):
        _replace_weights(layer, name, weights)
    config = layers[0].locas_config[name]
    config.r = rank
    config.rank_pattern = {}
    config.set_record("slots", None)
    if any(layer.exceeds_clip(name) for layer in layers):
        # Slots that are folded into one may be longer: they keep their function.
        config.max_slot_norm = None


@torch.no_grad()
def grow(
    model: nn.Module, rank: int, adapter_name: str | None = None, batches: Batches | None = None
) -> None:
    """Widen a memory to `rank` slots in every layer, in place, so that it can learn more.

    No output changes. The new slots have rows by the memory's own strategy, without those that it
    has cloned already, and values of zero. The config's `r` follows. The weights are new
    parameters: create optimizers afterwards.

    Args:
        model, adapter_name: as for `compress`.
        rank: the new width, above the memory's widest layer's.
        batches: the text that the rows are made from, as for `calibrate`; "gaussian" and "random"
            need none.

    Raises:
        TypeError, ValueError: for a rank out of range, or a memory that cannot grow; it is
            unchanged.
    """
    name, layers = find_memory(model, adapter_name, "grow")
    _check_growth(name, layers, rank, batches)
    statistics: list[Any]
    if batches is None:
        statistics = [None] * len(layers)
    else:
        statistics = observe_host(model, batches, name, layers, rank)
        _check_tokens(layers[0].locas_config[name].strategy, statistics, rank)
    pairs = zip(layers, statistics, strict=True)
    grown = [_grow_layer(layer, name, rank, seen) for layer, seen in pairs]
    config = layers[0].locas_config[name]
    for layer, (weights, slots) in zip(layers, grown, strict=True):
        _replace_weights(layer, name, weights)
        if slots is not None:
            layer.record_slots(name, slots)
    config.r = rank
    config.rank_pattern = {}


@torch.no_grad()
def refit_slots(gram: Tensor, value: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Choose slots of a memory and refit their values to the output of all slots.

    This is orthogonal least squares. With M the slots' activations over a text and V the values
    `[..., R, D]`, n slots S are chosen one at a time, each time the one that reduces the remaining
    error most, and V' minimises |M_S V' - M V|^2. If fewer slots already give the whole output, the
    rest get values of zero.

    Args:
        gram: M^T M `[..., R, R]`, float32 or float64.
        value: V `[..., R, D]`.
        rank: n.

    Returns:
        S, LongTensor `[..., n]`, in the order of choice, and V' `[..., n, D]`.
    """
    full = gram.double()
    # M^T M V
    target = full @ value.double()
    # Keeps the fit finite where slots are (nearly) inactive or equal on this text: above float32's
    # noise in M^T M.
    largest = full.diagonal(dim1=-2, dim2=-1).amax(dim=-1)
    ridge = 1e-6 * largest.clamp(min=torch.finfo(full.dtype).tiny)
    slots = _choose_slots(full, target, ridge, rank)
    rows = full.take_along_dim(slots[..., None], -2)
    chosen_gram = rows.take_along_dim(slots[..., None, :], -1)
    chosen_gram = chosen_gram + torch.diag_embed(ridge[..., None].expand(slots.shape))
    chosen_target = target.take_along_dim(slots[..., None], -2)
    return slots, torch.linalg.solve(chosen_gram, chosen_target).to(value.dtype)


def _choose_slots(gram: Tensor, target: Tensor, ridge: Tensor, rank: int) -> Tensor:
    """Return n slots, LongTensor `[..., n]`, each the one that reduces the remaining error most.

    Args:
        gram: M^T M `[..., R, R]`.
        target: M^T M V `[..., R, D]`.
        ridge: what is added to the diagonal of `gram`, `[...]`.
        rank: n.
    """
    rest = gram.clone()
    residual = target.clone()
    chosen = []
    taken = torch.zeros(gram.shape[:-1], dtype=torch.bool, device=gram.device)
    for _ in range(rank):
        squares = rest.diagonal(dim1=-2, dim2=-1).clamp(min=0)
        gain = residual.square().sum(dim=-1) / (squares + ridge[..., None])
        slot = torch.where(taken, -1.0, gain).argmax(dim=-1, keepdim=True)
        chosen.append(slot)
        taken.scatter_(-1, slot, True)
        # Subtract from every slot the part that the chosen one explains (a step of Cholesky's
        # elimination).
        column = rest.take_along_dim(slot[..., None, :], -1)
        pivot = squares.gather(-1, slot)[..., None] + ridge[..., None, None]
        explained = residual.take_along_dim(slot[..., None], -2)
        rest = rest - column @ column.mT / pivot
        residual = residual - column @ explained / pivot
    return torch.cat(chosen, dim=-1)


def _reduce_layer(layer: LocasLayer, name: str, rank: int) -> list[Tensor]:
    """Return a layer's weights after NL-SVD: up `[n, D]` and down `[D, n]`."""
    up, down = (module.weight.detach().float() for module in layer.projections(name))
    # The norm of the memory's inputs: measured, or as after a layer norm.
    size = 1.0
    if layer.locas_config[name].output_scale == "measured":
        size = KAPPA
    probe_norm = size * layer.ffn.hidden_size**0.5
    key, value, _ = nl_svd(up.T, down.T, rank, activation=layer.ffn.act, probe_norm=probe_norm)
    return [key.T, value.T]


def _refit_layer(layer: LocasLayer, name: str, rank: int, gram: Tensor) -> list[Tensor]:
    """Return a layer's weights with n slots: gate, if gated, and up `[n, D]`, and down `[D, n]`."""
    *rows, down = (module.weight.detach().float() for module in layer.projections(name))
    slots, value = refit_slots(gram, down.T, rank)
    return [*(weight[slots] for weight in rows), value.T]


def _grow_layer(
    layer: LocasLayer, name: str, rank: int, statistics: Statistics | None
) -> tuple[list[Tensor], list[int] | None]:
    """Return a layer's wider weights, and the host's slots of all its rows, where that is known."""
    config = layer.locas_config[name]
    *own_rows, down = (module.weight.detach() for module in layer.projections(name))
    new = rank - down.shape[1]
    generator = make_generator(config.seed, f"{layer.name} grows to {rank}")
    rows = STRATEGIES[config.strategy].make(layer.ffn, statistics, rank, generator)
    cloned = layer.recorded_slots(name)
    chosen, slots = _choose_new(rows, cloned, rank, new)
    made = [rows.up]
    if rows.gate is not None:
        made = [rows.gate, rows.up]
    weights = []
    for own, part in zip(own_rows, made, strict=True):
        added = part[chosen.to(part.device)].to(own_rows[-1])
        weights.append(torch.cat([own, added]))
    zeros = down.new_zeros(len(down), new)
    weights.append(torch.cat([down, zeros], dim=1))
    return weights, slots


def _choose_new(
    rows: Rows, cloned: list[int] | None, rank: int, new: int
) -> tuple[Tensor, list[int] | None]:
    """Return which of `rank` rows are added, LongTensor [new], and the host's slots of all rows.

    Rows of host slots that the memory has cloned already are not added again.
    """
    # A file may record other slots than its rows.
    if rows.slots is None or cloned is None or len(cloned) != rank - new:
        return torch.arange(rank - new, rank, device="cpu"), None
    candidates = rows.slots.cpu()
    chosen = (~torch.isin(candidates, torch.tensor(cloned, device="cpu"))).nonzero()[:new, 0]
    return chosen, [*cloned, *candidates[chosen].tolist()]


@torch.no_grad()
def _measure_slots(
    model: nn.Module, name: str, layers: list[LocasLayer], batches: Batches
) -> list[Tensor]:
    """Return M^T M of each layer's memory over a text, `[R, R]` float32 sums, without padding."""
    # By the layer's index.
    grams: dict[int, Tensor] = {}
    inputs: dict[str, Tensor] = {}

    def make_counter(index: int) -> Callable[[str, Tensor], None]:
        def count(adapter_name: str, activations: Tensor) -> None:
            if adapter_name != name:
                return
            activation = activations.float().flatten(0, -2)
            mask = find_token_mask(model, layers[index], inputs)
            if mask is not None:
                activation = activation[mask.flatten().bool()]
            gram = activation.T @ activation
            if index in grams:
                gram = grams[index] + gram
            grams[index] = gram

        return count

    counters = [make_counter(index) for index in range(len(layers))]
    with evaluating(model), _recording(layers, counters):
        for batch in each_batch(batches):
            inputs = to_inputs(model, batch)
            model(**inputs)
    if len(grams) < len(layers):
        rule = f"batches must hold a text that the memory '{name}' is active on"
        raise ValueError(f"{rule}, got none: activate it.")
    if not all(gram.isfinite().all() for gram in grams.values()):
        raise ValueError(
            "a memory's activations are not finite on the text: check the base and its dtype."
        )
    return [grams[index] for index in range(len(layers))]


@contextmanager
def _recording(
    layers: list[LocasLayer], recorders: list[Callable[[str, Tensor], None]]
) -> Iterator[None]:
    """Let each layer call its recorder with the activations of its slots within the context."""
    try:
        for layer, recorder in zip(layers, recorders, strict=True):
            layer.slot_recorder = recorder
        yield
    finally:
        for layer in layers:
            layer.slot_recorder = None


@torch.no_grad()
def _replace_weights(layer: LocasLayer, name: str, weights: list[Tensor]) -> None:
    for module, weight in zip(layer.projections(name), weights, strict=True):
        former = module.weight
        weight = weight.to(former.dtype).contiguous()
        module.weight = nn.Parameter(weight, requires_grad=former.requires_grad)
        module.out_features, module.in_features = weight.shape


def _width_of(layer: LocasLayer, name: str) -> int:
    return layer.locas_up[name].out_features


def _check_growth(name: str, layers: list[LocasLayer], rank: int, batches: Batches | None) -> None:
    strategy_name = layers[0].locas_config[name].strategy
    strategy = STRATEGIES[strategy_name]
    widest = max(_width_of(layer, name) for layer in layers)
    check_whole("rank", rank, 1)
    if rank <= widest:
        rule = f"rank must be above the memory's width {widest}"
        raise ValueError(f"{rule}, got {rank}: raise it, or use compress().")
    narrowest = min(layer.base_width for layer in layers)
    if strategy.clones and rank > narrowest:
        rule = f"rank must be at most the host's width {narrowest} where slots are cloned"
        raise ValueError(f"{rule}, got {rank}.")
    _check_weights(name, layers, "grows")
    check_none_merged(layers, name)
    if strategy.written:
        reason = "is written while reading: SlotWriter fills its slots, it cannot grow."
        raise ValueError(f"the memory '{name}' {reason}")
    if any(layer.needs_calibration(name) for layer in layers):
        remedy = "set r in its config, or calibrate it before it grows."
        raise ValueError(f"the memory '{name}' is empty: {remedy}")
    if batches is None and strategy.needs_calibration:
        rule = f"batches must be given for init_weights={strategy_name!r}"
        raise ValueError(f"{rule}: give a text.")


def _check_no_map(name: str, layers: list[LocasLayer]) -> None:
    """Raise a `ValueError` for a map of `RidgeWriter`.

    Its terms cancel a constant between them, which the probes of NL-SVD do not keep.
    """
    if any(holds_map(layer.locas_down[name].weight) for layer in layers):
        rule = f"the memory '{name}' holds a map that RidgeWriter wrote, which NL-SVD does not keep"
        raise ValueError(f"{rule}: give batches of a text to fit.")


def _check_tokens(strategy_name: str, statistics: list[Statistics], rank: int) -> None:
    # The same token in two slots with values of zero: they would stay equal.
    tokens = min(len(seen.inputs) for seen in statistics)
    if STRATEGIES[strategy_name].takes_tokens and tokens < rank:
        rule = f"batches must have at least {rank} tokens for init_weights={strategy_name!r}"
        raise ValueError(f"{rule}, got {tokens}: give a longer text, or lower rank.")


def _check_weights(name: str, layers: list[LocasLayer], change: str) -> None:
    """Raise a `ValueError` where a memory is merged, or has values that are not finite."""
    if any(name in layer.merged_adapters for layer in layers):
        raise ValueError(
            f"the memory '{name}' is merged: call unmerge_adapter() before it {change}."
        )
    for layer in layers:
        layer.clip_(name)
        for module in layer.projections(name):
            if not module.weight.isfinite().all():
                rule = f"the memory '{name}' holds values that are not finite"
                raise ValueError(f"{rule}: load it again.")
