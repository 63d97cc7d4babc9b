"""A memory as a LoRA adapter of a wider base, for engines that serve LoRA adapters and do not know LOCAS.

Neurons of zeros in each FFN of the base leave its output as it is. On that base a memory of width R is exactly a LoRA
of rank R and alpha R on the projections of the FFNs. With F the base's width, W >= R the neurons that were added, and
k and tau the memory's scales (`layer.py`):

    gate  A = k Wgate [R, D],  B = [0; I; 0] [F + W, R]        up likewise
    down  A = [0, I, 0] [R, F + W],  B = tau Wdown [D, R]

where I stands at the neurons F to F + R. A fused gate and up projection has one LoRA of rank 2 R. All memories of one
base share the wider base, each as wide as its own R; an engine can thus serve many of them at once.
"""

from collections.abc import Sequence

import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..tuner import LocasConfig
from ..tuner.attached import find_memory
from ..tuner.ffn import HostFFN
from ..tuner.finding import AnyFFN, find_ffns
from ..tuner.layer import scale_neurons
from ..tuner.memory_file import WEIGHTS, split_tensors
from ..tuner.mixture import HostMixture
from ..tuner.widths import WidthGroup, widen_to, widened_config

Lora = tuple[LoraConfig, dict[str, Tensor]]
"""The config and the tensors of a LoRA, by the names that PEFT gives them in a file."""


@torch.no_grad()
def widen_base(
    base: PreTrainedModel, neurons: int, ffn_parts: dict[str, str] | None = None
) -> None:
    """Append neurons of zeros to each FFN of a base, in place, and write the new width into its config.

    `base` is a model without adapters; `neurons` is W, the largest R of the memories that are to be served; for
    `ffn_parts` see `LocasConfig`. An FFN that cannot be widened, or a width that no field of the config holds, is a
    `ValueError`, and the base is as it was.
    """
    if neurons < 1:
        raise ValueError(
            f"neurons must be at least 1, got {neurons}: give the largest r of the memories."
        )
    by_width: dict[int, WidthGroup] = {}
    for name, ffn in find_ffns(base, ffn_parts).items():
        _check_dense(name, ffn)
        obstacle = ffn.find_obstacle()
        if obstacle:
            raise ValueError(f"cannot widen {name}: {obstacle}.")
        by_width.setdefault(ffn.width, WidthGroup(ffn.width, ffn.width + neurons, {})).ffns[
            name
        ] = ffn
    groups = list(by_width.values())
    widen_to(groups, base, widened_config(base, groups, ffn_parts))


@torch.no_grad()
def to_lora(model: PeftModel, adapter_name: str | None = None, neurons: int | None = None) -> Lora:
    """Return a memory as a LoRA of its base widened by `widen_base`: the config, and the tensors as PEFT saves them.

    The model is not changed, and its base's weights are not used: it may be quantised. Without a name, the active
    memory is taken; `neurons` is W, by how many the base is widened, by default the memory's own largest R. A memory
    that is merged or beside a mixture, or a W that is too small, is a `ValueError`.
    """
    adapter_name, layers = find_memory(model, adapter_name, "export")
    widest = max(layer.locas_up[adapter_name].out_features for layer in layers)
    neurons = widest if neurons is None else neurons
    for layer in layers:
        if layer.merged:
            raise ValueError(
                f"the memory must not be merged, got {layer.name} merged: call unmerge_adapter() first."
            )
        layer.check_exportable(adapter_name)
    ffns = {
        layer.name: (layer.ffn, layer.ffn.width, layer.neurons(adapter_name)) for layer in layers
    }
    return _make_lora(model.get_base_model(), ffns, neurons)


@torch.no_grad()
def tensors_to_lora(
    tensors: dict[str, Tensor], config: LocasConfig, base: PreTrainedModel, neurons: int
) -> Lora:
    """Return what `to_lora` returns, from the tensors of a memory's file (see `load_memory_file`).

    The base is wider by `neurons` already; no weight of it is used: it may be on the meta device.
    """
    layers, others = split_tensors(tensors)
    found, ffns = find_ffns(base, config.ffn_parts), {}
    if others or not layers.keys() <= found.keys():
        raise ValueError(
            "a memory must stand beside FFNs of the base alone, got other tensors too: merge it."
        )
    for name, parts in layers.items():
        weights = [parts[part] for part in WEIGHTS if part in parts]
        rows = scale_neurons(
            weights, parts.get("locas_input_scale", 1.0), parts["locas_tau"] * config.scaling
        )
        ffns[name] = found[name], found[name].width - neurons, rows
    return _make_lora(base, ffns, neurons)


def _make_lora(
    base: nn.Module, ffns: dict[str, tuple[HostFFN, int, Sequence[Tensor]]], neurons: int
) -> Lora:
    """Return the LoRA from each FFN by its name, with its F and the memory's rows (see `LocasLayer.neurons`)."""
    factors: dict[
        str, tuple[Tensor, Tensor]
    ] = {}  # A [R, in] and B [out, R], by the projection's name
    for name, (ffn, width, (gate, up, down)) in ffns.items():
        _check_dense(name, ffn)
        parts, r = ffn.parts, len(up)
        if r > neurons:
            raise ValueError(
                f"neurons must be at least the memory's r of {r}, got {neurons}: raise it."
            )
        added = up.new_zeros(width + neurons, r)  # [0; I; 0]
        added[width : width + r] = torch.eye(r, dtype=up.dtype, device=up.device)
        pairs = {parts.down: (added.T, down), parts.up: (up, added), parts.gate: (gate, added)}
        if parts.gate_up:
            pairs[parts.gate_up] = torch.cat([gate, up]), torch.block_diag(added, added)
        owner = name.removesuffix(f".{parts.down}") if ffn.is_flat else name
        factors |= {f"{owner}.{part}": pairs[part] for part in parts.projections}
    ranks = {name: len(down) for name, (down, _) in factors.items()}
    r = min(ranks.values())
    others = {name: rank for name, rank in ranks.items() if rank != r}
    options = {
        "rank_pattern": others,
        "alpha_pattern": dict(others),
        "target_modules": _shorten(ranks, base),
    }
    options["fan_in_fan_out"] = any(isinstance(base.get_submodule(name), Conv1D) for name in ranks)
    config = LoraConfig(r=r, lora_alpha=r, task_type="CAUSAL_LM", inference_mode=True, **options)
    # Copies, contiguous: safetensors saves no views.
    return config, {
        f"base_model.model.{name}.lora_{part}.weight": tensor.cpu().clone(
            memory_format=torch.contiguous_format
        )
        for name, pair in factors.items()
        for part, tensor in zip("AB", pair, strict=True)
    }


def _check_dense(name: str, ffn: AnyFFN) -> None:
    if isinstance(ffn, HostMixture):
        raise ValueError(
            f"a memory beside a mixture of experts cannot be exported as LoRA, got {name}: merge it."
        )


def _shorten(names: dict[str, int], base: nn.Module) -> list[str]:
    """Return the last parts of modules' names, such as "up_proj", where no other module has them; else whole names."""
    last = {name.rpartition(".")[2] for name in names}
    plain = (name.replace(".base_layer", "") for name, _ in base.named_modules())
    others = {name.rpartition(".")[2] for name in plain if name not in names}
    return sorted(last if last.isdisjoint(others) else names)
