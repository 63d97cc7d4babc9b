"""Change how many slots a memory has: compress it to fewer, or grow it by slots that are still empty.

NL-SVD (`nl_svd`) compresses memories of two layers without a text. To keep n slots and refit their values on a text,
by least squares, suits every memory, since the output is linear in the values.

Axes: L layers, T tokens, D hidden size, R slots, n slots after.
"""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from ..checks import check_whole
from ..tuner import evaluating
from ..tuner.attached import find_memory
from ..tuner.calibration import Batches, observe_host, to_inputs
from ..tuner.initialization import STRATEGIES, Statistics, make_generator
from ..tuner.layer import LocasLayer
from ..tuner.scale import KAPPA
from .nlsvd import check_rank, nl_svd


def compress(
    model: nn.Module, rank: int, adapter_name: str | None = None, batches: Batches | None = None
) -> None:
    """Reduce a memory to `rank` slots in every layer, in place; its config's `r` follows, so that it can be saved.

    With `batches`, keep the slots that contribute most on that text and refit their values (any memory). Without,
    apply `nl_svd` (two-layer memories). The weights are new parameters: create optimizers afterwards.

    Args:
        model: a model with a LOCAS memory, as `get_peft_model` or `inject_adapter_in_model` returns it; mutated.
        rank: n, from 1 to the memory's width.
        adapter_name: the memory; `None` for the active one.
        batches: the text, as for `calibrate`.

    A rank out of range, or a memory that cannot be reduced, is a `TypeError` or `ValueError`; it is unchanged.
    """
    name, layers = find_memory(model, adapter_name, "compress")
    if batches is None and any(layer.ffn.gated for layer in layers):
        raise ValueError(
            "NL-SVD needs a memory of two layers, got one with gates: give batches of a text to fit."
        )
    check_rank(rank, min(layer.locas_up[name].out_features for layer in layers))
    _check_whole(name, layers, "is compressed")
    if any(not layer.has_learned(name) for layer in layers):
        raise ValueError(
            f"the memory '{name}' is empty: train or write it before it is compressed."
        )
    if batches is None:
        reduced = [_reduce_layer(layer, name, rank) for layer in layers]
    else:
        grams = _measure_slots(model, name, layers, batches)
        reduced = [
            _refit_layer(layer, name, rank, gram) for layer, gram in zip(layers, grams, strict=True)
        ]
    for layer, weights in zip(layers, reduced, strict=True):
        _replace_weights(layer, name, weights)
    config = layers[0].locas_config[name]
    config.r, config.rank_pattern, config.slots = rank, {}, None
    if any(layer.exceeds_clip(name) for layer in layers):
        # Slots that are folded into one may be longer: they keep their function.
        config.max_slot_norm = None


@torch.no_grad()
def grow(
    model: nn.Module, rank: int, adapter_name: str | None = None, batches: Batches | None = None
) -> None:
    """Widen a memory to `rank` slots in every layer, in place, so that it can learn more. No output changes.

    The new slots have rows by the memory's own strategy, without those that it has cloned already, and values of zero.
    The config's `r` follows. The weights are new parameters: create optimizers afterwards.

    Args:
        model, adapter_name: as for `compress`.
        rank: the new width, above the memory's widest layer's.
        batches: the text that the rows are made from, as for `calibrate`; "gaussian" and "random" need none.

    A rank out of range, or a memory that cannot grow, is a `TypeError` or `ValueError`; it is unchanged.
    """
    name, layers = find_memory(model, adapter_name, "grow")
    config = layers[0].locas_config[name]
    strategy = STRATEGIES[config.init_strategy]
    widest = max(layer.locas_up[name].out_features for layer in layers)
    check_whole("rank", rank, 1)
    if rank <= widest:
        raise ValueError(
            f"rank must be above the memory's width {widest}, got {rank}: raise it, or use compress()."
        )
    narrowest = min(layer.base_width for layer in layers)
    if strategy.clones and rank > narrowest:
        raise ValueError(
            f"rank must be at most the host's width {narrowest} where slots are cloned, got {rank}."
        )
    _check_whole(name, layers, "grows")
    if strategy.written:
        raise ValueError(
            f"the memory '{name}' is written while reading: SlotWriter fills its slots, it cannot grow."
        )
    if any(layer.needs_calibration(name) for layer in layers):
        raise ValueError(
            f"the memory '{name}' is empty: set r in its config, or calibrate it before it grows."
        )
    if batches is None and strategy.needs_calibration:
        raise ValueError(
            f"batches must be given for init_strategy={config.init_strategy!r}: give a text."
        )
    statistics = (
        [None] * len(layers)
        if batches is None
        else observe_host(model, batches, name, layers, rank)
    )
    tokens = min((len(seen.inputs) for seen in statistics if seen is not None), default=rank)
    if (
        strategy.takes_tokens and tokens < rank
    ):  # the same token in two slots with values of zero: they stay equal
        what = f"batches must have at least {rank} tokens for init_strategy={config.init_strategy!r}, got {tokens}"
        raise ValueError(f"{what}: give a longer text, or lower rank.")
    grown = [
        _grow_layer(layer, name, rank, seen) for layer, seen in zip(layers, statistics, strict=True)
    ]
    for layer, (weights, slots) in zip(layers, grown, strict=True):
        _replace_weights(layer, name, weights)
        if slots is not None:
            config.slots[layer.name] = slots
    config.r, config.rank_pattern = rank, {}


def _grow_layer(
    layer: LocasLayer, name: str, rank: int, statistics: Statistics | None
) -> tuple[list[Tensor], list[int] | None]:
    """Return a layer's wider weights, and the host's slots that all its rows were cloned from, where that is known."""
    config = layer.locas_config[name]
    *own, down = (module.weight.detach() for module in layer.projections(name))
    new = rank - down.shape[1]
    generator = make_generator(config.seed, f"{layer.name} grows to {rank}")
    rows = STRATEGIES[config.init_strategy].make(layer.ffn, statistics, rank, generator)
    known = (config.slots or {}).get(layer.name)
    chosen = torch.arange(rank - new, rank)
    if rows.slots is not None and known is not None:
        chosen = (~torch.isin(rows.slots.cpu(), torch.tensor(known))).nonzero()[:new, 0]
    made = [rows.up] if rows.gate is None else [rows.gate, rows.up]
    added = [
        (part[chosen.to(part.device)] * config.row_norm).to(up)
        for part, up in zip(made, own, strict=True)
    ]
    weights = [torch.cat(both) for both in zip(own, added, strict=True)]
    slots = (
        None
        if rows.slots is None or known is None
        else [*known, *rows.slots.cpu()[chosen].tolist()]
    )
    return [*weights, torch.cat([down, down.new_zeros(len(down), new)], dim=1)], slots


@torch.no_grad()
def refit_slots(gram: Tensor, value: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Choose slots of a memory and refit their values to the output of all slots: orthogonal least squares.

    With M the slots' activations over a text and V the values `[..., R, D]`, n slots S are chosen one at a time, each
    time the one that reduces the remaining error most, and V' minimises |M_S V' - M V|^2. If fewer slots already give
    the whole output, the rest get values of zero. `gram` is M^T M `[..., R, R]`, float32 or float64.

    Returns S, LongTensor `[..., n]`, in the order of choice, and V' `[..., n, D]`.
    """
    full = gram.double()
    target = full @ value.double()  # M^T M V
    # Keeps the fit finite where slots are (nearly) inactive or equal on this text: above float32's noise in M^T M.
    ridge = 1e-6 * full.diagonal(dim1=-2, dim2=-1).amax(dim=-1).clamp(
        min=torch.finfo(full.dtype).tiny
    )
    rest, residual = full.clone(), target.clone()
    chosen = []
    taken = torch.zeros(full.shape[:-1], dtype=torch.bool, device=full.device)
    for _ in range(rank):
        own = rest.diagonal(dim1=-2, dim2=-1).clamp(min=0)
        gain = residual.square().sum(dim=-1) / (own + ridge[..., None])
        slot = torch.where(taken, -1.0, gain).argmax(dim=-1, keepdim=True)
        chosen.append(slot)
        taken.scatter_(-1, slot, True)
        # Subtract from every slot the part that the chosen one explains (a step of Cholesky's elimination).
        column = rest.gather(-1, slot[..., None, :].expand(*rest.shape[:-1], 1))
        pivot = own.gather(-1, slot)[..., None] + ridge[..., None, None]
        explained = residual.gather(-2, slot[..., None].expand(*slot.shape, residual.shape[-1]))
        rest = rest - column @ column.mT / pivot
        residual = residual - column @ explained / pivot
    slots = torch.cat(chosen, dim=-1)
    rows = full.gather(-2, slots[..., None].expand(*slots.shape, full.shape[-1]))
    chosen_gram = rows.gather(-1, slots[..., None, :].expand(*rows.shape[:-1], rank))
    chosen_gram = chosen_gram + torch.diag_embed(ridge[..., None].expand(slots.shape))
    chosen_target = target.gather(-2, slots[..., None].expand(*slots.shape, target.shape[-1]))
    return slots, torch.linalg.solve(chosen_gram, chosen_target).to(value.dtype)


def _check_whole(name: str, layers: list[LocasLayer], change: str) -> None:
    for layer in layers:
        layer.clip_(name)
    if any(name in layer.merged_adapters for layer in layers):
        raise ValueError(
            f"the memory '{name}' is merged: call unmerge_adapter() before it {change}."
        )
    if not all(
        module.weight.isfinite().all() for layer in layers for module in layer.projections(name)
    ):
        raise ValueError(f"the memory '{name}' holds values that are not finite: load it again.")


def _reduce_layer(layer: LocasLayer, name: str, rank: int) -> list[Tensor]:
    up, down = (module.weight.detach().float() for module in layer.projections(name))
    # The norm of the memory's inputs: measured, or as after a layer norm.
    size = KAPPA if layer.locas_config[name].output_scale == "measured" else 1.0
    probe_norm = size * layer.ffn.hidden_size**0.5
    key, value, _ = nl_svd(up.T, down.T, rank, activation=layer.ffn.act, probe_norm=probe_norm)
    return [key.T, value.T]


def _refit_layer(layer: LocasLayer, name: str, rank: int, gram: Tensor) -> list[Tensor]:
    *rows, down = (module.weight.detach().float() for module in layer.projections(name))
    slots, value = refit_slots(gram, down.T, rank)
    return [*(weight[slots] for weight in rows), value.T]


@torch.no_grad()
def _measure_slots(
    model: nn.Module, name: str, layers: list[LocasLayer], batches: Batches
) -> list[Tensor]:
    """Return M^T M of each layer's memory over a text, `[R, R]` float32 sums. Padding does not count."""
    grams: list[Tensor | None] = [None] * len(layers)
    mask: Tensor | None = None

    def counter(index: int) -> Callable[[nn.Module, tuple], None]:
        def count(module: nn.Module, args: tuple) -> None:
            activation = args[0].detach().float().flatten(0, -2)
            kept = activation if mask is None else activation[mask.flatten().bool()]
            gram = kept.T @ kept
            grams[index] = gram if grams[index] is None else grams[index] + gram

        return count

    with evaluating(model), ExitStack() as hooks:
        for index, layer in enumerate(layers):
            hooks.enter_context(layer.locas_down[name].register_forward_pre_hook(counter(index)))
        for batch in batches:
            inputs = to_inputs(model, batch)
            mask = inputs.get("attention_mask")
            model(**inputs)
    if any(gram is None for gram in grams):
        raise ValueError(
            f"batches must hold a text that the memory '{name}' is active on, got none: activate it."
        )
    if not all(gram.isfinite().all() for gram in grams):
        raise ValueError(
            "a memory's activations are not finite on the text: check the base and its dtype."
        )
    return grams


@torch.no_grad()
def _replace_weights(layer: LocasLayer, name: str, weights: list[Tensor]) -> None:
    for module, weight in zip(layer.projections(name), weights, strict=True):
        trained = module.weight.requires_grad
        module.weight = nn.Parameter(
            weight.to(module.weight.dtype).contiguous(), requires_grad=trained
        )
        module.out_features, module.in_features = weight.shape
