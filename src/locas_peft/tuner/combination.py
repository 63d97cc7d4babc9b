"""One memory that adds what the weighted sum of several memories adds: their slots side by side.

With the memories m, their weights w, scales k and tau (`layer.py`), the combined memory has all
their slots, the largest k and the largest |w| tau, and for the slots of m

    gate, up   times  k_m / k             down   times  w_m tau_m / tau

No factor is above 1, so that slots within the norm clip stay within it.
"""

import copy
import math
from collections.abc import Iterable, Sequence

import torch

from .config import LocasConfig
from .errors import invalid
from .layer import LocasLayer


def combined_config(
    layers: Sequence[LocasLayer], configs: dict[str, LocasConfig], weights: Sequence[float]
) -> LocasConfig:
    """Return the config of the memory that combines others.

    Args:
        layers: the layers of the model.
        configs: the memories' configs by their names.
        weights: a factor for each of them.

    Raises:
        ValueError: where the memories cannot be combined.
    """
    finite = all(math.isfinite(weight) for weight in weights)
    if len(weights) != len(configs) or not finite:
        rule = f"be a finite number for each of {', '.join(configs)}"
        raise invalid("weights", rule, list(weights))
    names = [layer.name for layer in layers if any(name in layer.locas_up for name in configs)]
    for name in configs:
        _check_has_slots_alone(name, configs[name])
        _check_combinable(name, layers, names)
    configs_in_order = list(configs.values())
    combined = copy.deepcopy(configs_in_order[0])
    widths = {name: sum(config.width_of(name) for config in configs_in_order) for name in names}
    combined.r = max(widths.values())
    combined.rank_pattern = {name: width for name, width in widths.items() if width != combined.r}
    combined.scaling = 1.0
    if any(layer.name in widths and widths[layer.name] > layer.ffn.slots for layer in layers):
        # No strategy that clones slots makes so many rows, and none is made here.
        combined.init_weights = "gaussian"
    # Slots of each memory keep their length.
    radii: list[float] = []
    for config in configs_in_order:
        if config.max_slot_norm is not None:
            radii.append(config.max_slot_norm)
    all_clipped = len(radii) == len(configs_in_order)
    combined.max_slot_norm = max(radii) if all_clipped else None
    combined.set_record("slots", None)
    return combined


def _check_has_slots_alone(name: str, config: LocasConfig) -> None:
    # What is trained beside the memory would be missing from the combined one.
    field = config.field_beside_slots()
    if field is not None:
        remedy = f"train memories without {field} to combine them"
        raise invalid("adapters", "have slots alone", f"{name!r} with {field}", remedy)


def _check_combinable(name: str, layers: Sequence[LocasLayer], names: list[str]) -> None:
    chosen = [layer for layer in layers if name in layer.locas_up]
    if [layer.name for layer in chosen] != names:
        got = f"{name!r} beside {len(chosen)} of {len(names)}"
        raise invalid("adapters", "be beside the same FFNs", got)
    if any(layer.needs_calibration(name) for layer in chosen):
        remedy = "calibrate(model, batches) or train it first."
        raise ValueError(f"the memory '{name}' is empty: {remedy}")
    if any(name in layer.merged_adapters for layer in chosen):
        raise ValueError(f"the memory '{name}' is merged: call unmerge_adapter() first.")


def _join_slots(layer: LocasLayer, names: Iterable[str]) -> list[int] | None:
    """Return which host slots several memories were cloned from; None where one is unknown."""
    slots: list[int] = []
    for name in names:
        own = layer.recorded_slots(name)
        if own is None:
            return None
        slots += own
    return slots


@torch.no_grad()
def fill_combined(layer: LocasLayer, adapter_name: str, parts: dict[str, float]) -> None:
    """Fill a layer's new memory with the slots of others, which are clipped, and record them.

    Args:
        layer: the layer.
        adapter_name: the new memory.
        parts: the other memories' names, each with its weight.
    """
    k = max(layer.locas_input_scale[name] for name in parts)
    scales = {name: weight * layer.saved_scale(name) for name, weight in parts.items()}
    tau = max(scale.abs() for scale in scales.values())
    columns: list[list[torch.Tensor]] = [[] for _ in layer.weights(adapter_name)]
    for name, scale in scales.items():
        layer.clip_(name)
        *rows, down = (weight.float() for weight in layer.weights(name))
        scaled = [row * (layer.locas_input_scale[name] / k) for row in rows]
        scaled.append(down.T * (scale / tau if tau else 0.0))
        for column, part in zip(columns, scaled, strict=True):
            column.append(part)
    *targets, down = layer.weights(adapter_name)
    for target, parts_of_target in zip([*targets, down.T], columns, strict=True):
        target.copy_(torch.cat(parts_of_target))
    layer.locas_input_scale[adapter_name].copy_(k)
    layer.locas_tau[adapter_name].copy_(tau)
    layer.locas_calibrated[adapter_name].fill_(1.0)
    layer.record_slots(adapter_name, _join_slots(layer, parts))
    layer.keep_weights(adapter_name)
