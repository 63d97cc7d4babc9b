"""Compressing a memory to fewer slots: NL-SVD where its guarantee reaches, slots chosen and refitted elsewhere.

Two-layer memories can be folded without any text (`nl_svd`). A gated memory's slots have two input directions each,
and the paper says that NL-SVD does not carry over. What does work for every structure, since the output is linear in
the values whatever the activation is: keep n of the slots and fit their values, by least squares over a calibration
text, to what the whole memory said there. The slots are chosen one by one, each time the one that takes away most of
what the chosen ones cannot say yet.

Axes: L layers, T tokens, D hidden size, R slots, n slots after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from .layer import LocasLayer, list_active_memories, list_layers
from .nlsvd import nl_svd
from .passes import evaluating, to_inputs


def compress(
    model: nn.Module,
    rank: int,
    adapter_name: str | None = None,
    batches: Iterable[Tensor | Mapping[str, Tensor]] | None = None,
    method: Literal["nlsvd", "refit"] | None = None,
) -> None:
    """Reduces a memory to `rank` slots in every layer, in place; its config's `r` follows, so that it can be saved.

    "nlsvd" is for two-layer memories and needs no text; `nl_svd` says what it keeps, under ReLU and otherwise. "refit"
    is for every memory and keeps what the memory does on a text: the slots that contribute most, with their values
    fitted again. The weights are new parameters: make optimizers after this. The output scale stays what it was.

    Args:
        model: a model with a LOCAS memory, as `get_peft_model` or `inject_adapter_in_model` return it; mutated.
        rank: n, from 1 to the memory's width.
        adapter_name: which memory; `None` for the active one.
        batches: the text for "refit": `LongTensor [B, T]`, or mappings with `input_ids` and `attention_mask`, both
            `[B, T]`. The memory is switched on while they are read.
        method: "nlsvd" or "refit"; `None` for "refit" where `batches` are given and "nlsvd" elsewhere.

    Raises:
        TypeError: `rank` is no whole number.
        ValueError: a rank above the width, an empty or merged memory, slots that are not finite, a gated memory
            without `batches`; the memory is as it was.

    Example:
        ```py
        compress(model, 32, batches=[tokenizer(text, return_tensors="pt").input_ids])
        ```
    """
    name, layers = _find_layers(model, adapter_name)
    gated = any(name in layer.locas_gate for layer in layers)
    method = _choose_method(method, gated, batches is not None)
    _check_memory(name, layers, rank)
    if method == "nlsvd":
        reduced = [_fold_layer(layer, name, rank) for layer in layers]
    else:
        grams = _measure_slots(model, name, layers, batches)
        reduced = [_refit_layer(layer, name, rank, gram) for layer, gram in zip(layers, grams, strict=True)]
    for layer, weights in zip(layers, reduced, strict=True):
        _replace_weights(layer, name, weights)
    config = layers[0].locas_config[name]
    config.r, config.rank_pattern, config.slots = rank, {}, None


@torch.no_grad()
def refit_slots(gram: Tensor, value: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Chooses slots of a memory and refits their values to what all of them said: orthogonal least squares.

    With M the slots' activations over a text and V the values, slots S are chosen greedily and V' minimises
    |M_S V' - M V|^2. Only M^T M is needed.

    Args:
        gram: M^T M, `[..., R, R]`, float32 or float64.
        value: V `[..., R, D]`.
        rank: n, at most R.

    Returns:
        The slots, LongTensor `[..., n]`, in the order of choice, and V' `[..., n, D]` in the dtype of `value`. Where
        the chosen ones already say all, the rest are slots that add nothing, with values of zero.
    """
    full = gram.double()
    target = full @ value.double()  # M^T M V
    # Keeps the fit finite where slots are (nearly) silent or the same on this text: above float32's noise in M^T M.
    ridge = 1e-6 * full.diagonal(dim1=-2, dim2=-1).amax(dim=-1).clamp(min=torch.finfo(full.dtype).tiny)
    rest, left = full.clone(), target.clone()
    chosen = []
    taken = torch.zeros(full.shape[:-1], dtype=torch.bool, device=full.device)
    for _ in range(rank):
        own = rest.diagonal(dim1=-2, dim2=-1).clamp(min=0)
        gain = left.square().sum(dim=-1) / (own + ridge[..., None])
        slot = torch.where(taken, -1.0, gain).argmax(dim=-1, keepdim=True)
        chosen.append(slot)
        taken.scatter_(-1, slot, True)
        # The part of every slot that the chosen one can say is taken out (a step of Cholesky's elimination).
        column = rest.gather(-1, slot[..., None, :].expand(*rest.shape[:-1], 1))
        pivot = own.gather(-1, slot)[..., None] + ridge[..., None, None]
        said = left.gather(-2, slot[..., None].expand(*slot.shape, left.shape[-1]))
        rest = rest - column @ column.mT / pivot
        left = left - column @ said / pivot
    slots = torch.cat(chosen, dim=-1)
    rows = full.gather(-2, slots[..., None].expand(*slots.shape, full.shape[-1]))
    among = rows.gather(-1, slots[..., None, :].expand(*rows.shape[:-1], rank))
    among = among + torch.diag_embed(ridge[..., None].expand(slots.shape))
    goal = target.gather(-2, slots[..., None].expand(*slots.shape, target.shape[-1]))
    return slots, torch.linalg.solve(among, goal).to(value.dtype)


def _choose_method(method: str | None, gated: bool, has_text: bool) -> str:
    method = method or ("refit" if has_text else "nlsvd")
    if method not in ("nlsvd", "refit"):
        raise ValueError(f"method must be one of 'nlsvd', 'refit', got {method!r}.")
    if method == "nlsvd" and gated:
        raise ValueError(
            "NL-SVD needs a memory of two layers, got one with gates: give batches of a text to refit on."
        )
    if method == "refit" and not has_text:
        raise ValueError("method 'refit' needs a text, got batches=None: give batches, LongTensors [B, T].")
    return method


def _find_layers(model: nn.Module, adapter_name: str | None) -> tuple[str, list[LocasLayer]]:
    names = list_active_memories(model) if adapter_name is None else [adapter_name]
    layers = [layer for layer in list_layers(model) if names[:1] and names[0] in layer.locas_up]
    if len(names) != 1 or not layers:
        raise ValueError(f"the model has no single LOCAS memory {adapter_name or 'that is active'!r} to compress.")
    return names[0], layers


def _check_memory(name: str, layers: list[LocasLayer], rank: int) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"rank must be an int, got {rank!r}: give a whole number of slots.")
    width = min(layer.locas_up[name].out_features for layer in layers)
    if not 1 <= rank <= width:
        raise ValueError(f"rank must be from 1 to the memory's width {width}, got {rank}: lower it.")
    if any(name in layer.merged_adapters for layer in layers):
        raise ValueError(f"the memory '{name}' is merged: call unmerge_adapter() before it is compressed.")
    if any(not layer.has_learned(name) for layer in layers):
        raise ValueError(f"the memory '{name}' is empty: train or write it before it is compressed.")
    if not all(module.weight.isfinite().all() for layer in layers for module in layer.projections(name)):
        raise ValueError(f"the memory '{name}' holds values that are not finite: load it again.")


def _fold_layer(layer: LocasLayer, name: str, rank: int) -> list[Tensor]:
    up, down = (module.weight.detach().float() for module in layer.projections(name))
    # The norms that an FFN's inputs have after a layer norm; ReLU does not mind.
    probe_norm = layer.ffn.hidden_size**0.5
    reduced = nl_svd(up.T, down.T, rank, activation=layer.activation_of(name), probe_norm=probe_norm)
    return [reduced.key.T, reduced.value.T]


def _refit_layer(layer: LocasLayer, name: str, rank: int, gram: Tensor) -> list[Tensor]:
    *rows, down = (module.weight.detach().float() for module in layer.projections(name))
    slots, value = refit_slots(gram, down.T, rank)
    return [*(weight[slots] for weight in rows), value.T]


@torch.no_grad()
def _measure_slots(model: nn.Module, name: str, layers: list[LocasLayer], batches: Iterable) -> list[Tensor]:
    """M^T M of each layer's memory over a text, `[R, R]` float32 sums; padding does not count."""
    grams: list[Tensor | None] = [None] * len(layers)
    mask: Tensor | None = None

    def counter(place: int):
        def count(module: nn.Module, args: tuple) -> None:
            activation = args[0].detach().float().flatten(0, -2)
            kept = activation if mask is None else activation[mask.flatten().bool()]
            gram = kept.T @ kept
            grams[place] = gram if grams[place] is None else grams[place] + gram

        return count

    handles = [layer.locas_down[name].register_forward_pre_hook(counter(i)) for i, layer in enumerate(layers)]
    try:
        with evaluating(model):
            for batch in batches:
                inputs = to_inputs(model, batch)
                mask = inputs.get("attention_mask")
                model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    if any(gram is None for gram in grams):
        raise ValueError(f"batches must hold a text that the memory '{name}' is active on, got none: activate it.")
    if not all(gram.isfinite().all() for gram in grams):
        raise ValueError("a memory's activations are not finite on the text: check the base and its dtype.")
    return grams


@torch.no_grad()
def _replace_weights(layer: LocasLayer, name: str, weights: list[Tensor]) -> None:
    for old, weight in zip(layer.projections(name), weights, strict=True):
        parameter = nn.Parameter(weight.to(old.weight.dtype).contiguous(), requires_grad=old.weight.requires_grad)
        old.weight = parameter
        old.out_features, old.in_features = parameter.shape
