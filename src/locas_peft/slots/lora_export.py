"""A memory as a LoRA adapter of a wider base, for engines that do not know LOCAS.

Neurons of zeros in each FFN of the base leave its output as it is. On that base a memory of width R
is exactly a LoRA of rank R and alpha R on the projections of the FFNs. With F the base's width, W
>= R the neurons that were added, and k and tau the memory's scales (`layer.py`):

    gate  A = k Wgate [R, D],  B = [0; I; 0] [F + W, R]        up likewise
    down  A = [0, I, 0] [R, F + W],  B = tau Wdown [D, R]

where I stands at the neurons F to F + R. A fused gate and up projection has one LoRA of rank 2 R.
All memories of one base share the wider base, each as wide as its own R; an engine can thus serve
many of them at once.
"""

from collections.abc import Collection

import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..checks import invalid
from ..tuner.attached import find_memory
from ..tuner.ffn import HostFFN
from ..tuner.finding import AnyFFN, check_unshared, find_ffns
from ..tuner.layer import LocasLayer
from ..tuner.mixture import HostMixture
from ..tuner.modules import plain_name
from ..tuner.widths import WidthGroup, widen_to, widened_config

Lora = tuple[LoraConfig, dict[str, Tensor]]
"""The config and the tensors of a LoRA, by the names that PEFT gives them in a file."""
Factors = tuple[Tensor, Tensor]
"""Of one projection: A [rank, in] and B [out, rank]."""


@torch.no_grad()
def widen_base(
    base: PreTrainedModel, neurons: int, ffn_parts: dict[str, str] | None = None
) -> None:
    """Append neurons of zeros to each FFN of a base, in place, and to its config.

    Args:
        base: a model without adapters.
        neurons: W, the largest R of the memories that are to be served.
        ffn_parts: as in `LocasConfig`.

    Raises:
        ValueError: an FFN cannot be widened, or no field of the config holds the width. The base is
            as it was.
    """
    if neurons < 1:
        remedy = "give the largest r of the memories."
        raise invalid("neurons", "be at least 1", neurons, remedy)
    groups: dict[int, WidthGroup] = {}
    ffns = find_ffns(base, ffn_parts)
    check_unshared(base, ffns)
    for name, ffn in ffns.items():
        _check_dense(name, ffn)
        ffn.verify()
        obstacle = ffn.find_obstacle()
        if obstacle:
            raise ValueError(f"cannot widen {name}: {obstacle}.")
        if ffn.width not in groups:
            groups[ffn.width] = WidthGroup(ffn.width, ffn.width + neurons, {})
        groups[ffn.width].ffns[name] = ffn
    config = widened_config(base, list(groups.values()), ffn_parts)
    widen_to(list(groups.values()), base, config)


@torch.no_grad()
def to_lora(model: PeftModel, adapter_name: str | None = None, neurons: int | None = None) -> Lora:
    """Return a memory as a LoRA of its base widened by `widen_base`.

    These are the config, and the tensors as PEFT saves them. The model is not changed, and its
    base's weights are not used: it may be quantised.

    Args:
        adapter_name: the memory; the active one where not given.
        neurons: W, by how many the base is widened; the memory's own largest R where not given.

    Raises:
        ValueError: the memory is merged, stands beside a mixture, or has more than slots; or W is
            too small.
    """
    adapter_name, layers = find_memory(model, adapter_name, "export")
    field = model.peft_config[adapter_name].field_beside_slots()
    if field is not None:
        raise invalid("the memory", "have slots alone", f"one with {field}", "merge it.")
    if neurons is None:
        neurons = max(layer.locas_up[adapter_name].out_features for layer in layers)
    factors: dict[str, Factors] = {}
    hosts: list[HostFFN] = []
    for layer in layers:
        if layer.merged:
            got = f"{layer.name} merged"
            raise invalid("the memory", "not be merged", got, "call unmerge_adapter() first.")
        layer.check_exportable(adapter_name)
        host = _check_dense(layer.name, layer.ffn)
        hosts.append(host)
        factors |= _factorize(layer, host, adapter_name, neurons)
    is_transposed = any(isinstance(host.down, Conv1D) for host in hosts)
    base = model.get_base_model()
    task_type = model.peft_config[adapter_name].task_type
    if task_type is None and hasattr(base, "generate"):
        task_type = "CAUSAL_LM"
    config = _make_config(base, factors, is_transposed, task_type)
    return config, _name_tensors(factors)


def _factorize(
    layer: LocasLayer, host: HostFFN, adapter_name: str, neurons: int
) -> dict[str, Factors]:
    """Return the factors of the LoRA on each projection of one FFN, by the projection's name."""
    gate, up, down = layer.neurons(adapter_name)
    parts = host.parts
    r = len(up)
    if r > neurons:
        rule = f"be at least the memory's r of {r}"
        raise invalid("neurons", rule, neurons, "raise it.")
    width = host.width
    # [0; I; 0]
    places = up.new_zeros(width + neurons, r)
    places[width : width + r] = torch.eye(r, dtype=up.dtype, device=up.device)
    factors = {parts.down: (places.T, down), parts.up: (up, places), parts.gate: (gate, places)}
    if parts.gate_up:
        factors[parts.gate_up] = torch.cat([gate, up]), torch.block_diag(places, places)
    owner = layer.name
    if layer.ffn.is_flat:
        owner = owner.removesuffix(f".{parts.down}")
    return {f"{owner}.{part}": factors[part] for part in parts.projections}


def _make_config(
    base: nn.Module, factors: dict[str, Factors], is_transposed: bool, task_type: str | None
) -> LoraConfig:
    """Return the config of a LoRA whose alpha is its rank, so that PEFT scales it by 1."""
    ranks = {name: len(down) for name, (down, _) in factors.items()}
    r = min(ranks.values())
    other_ranks = {name: rank for name, rank in ranks.items() if rank != r}
    return LoraConfig(
        r=r,
        lora_alpha=r,
        rank_pattern=other_ranks,
        alpha_pattern=dict(other_ranks),
        target_modules=_shorten(ranks, base),
        fan_in_fan_out=is_transposed,
        task_type=task_type,
        inference_mode=True,
    )


def _name_tensors(factors: dict[str, Factors]) -> dict[str, Tensor]:
    """Return copies of the factors on the CPU, by the names that PEFT gives them in a file."""
    tensors = {}
    for name, (a, b) in factors.items():
        for letter, tensor in (("A", a), ("B", b)):
            # Contiguous: safetensors saves no views.
            copy = tensor.cpu().clone(memory_format=torch.contiguous_format)
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = copy
    return tensors


def _check_dense(name: str, ffn: AnyFFN) -> HostFFN:
    """Return a dense FFN; a mixture of experts is a `ValueError`."""
    if isinstance(ffn, HostMixture):
        problem = "a memory beside a mixture of experts cannot be exported as LoRA"
        raise ValueError(f"{problem}, got {name}: merge it.")
    return ffn


def _shorten(names: Collection[str], base: nn.Module) -> list[str]:
    """Return the last parts of modules' names, such as "up_proj".

    Where another module has one of them too, return the whole names.
    """
    last_parts = {name.rpartition(".")[2] for name in names}
    for module_name, _ in base.named_modules():
        name = plain_name(module_name).replace(".base_layer", "")
        if name not in names and name.rpartition(".")[2] in last_parts:
            return sorted(names)
    return sorted(last_parts)
