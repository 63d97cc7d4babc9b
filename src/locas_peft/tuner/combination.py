"""One memory that adds what the weighted sum of several memories adds: their slots side by side.

With the memories m, their weights w, scales k and tau (`layer.py`), the combined memory has all their slots, the
largest k and the largest |w| tau, and for the slots of m

    gate, up   times  k_m / k             down   times  w_m tau_m / tau

No factor is above 1, so that slots within the norm clip stay within it.
"""

import copy
import math
from collections.abc import Sequence

import torch

from .config import LocasConfig
from .layer import LocasLayer


def combined_config(
    layers: Sequence[LocasLayer], configs: dict[str, LocasConfig], weights: Sequence
) -> LocasConfig:
    """Return the config of the memory that combines others, or raise a `ValueError` if they cannot be combined."""
    if len(weights) != len(configs) or not all(math.isfinite(weight) for weight in weights):
        raise ValueError(
            f"weights must be a finite number for each of {', '.join(configs)}, got {list(weights)}."
        )
    names = [layer.name for layer in layers if any(name in layer.locas_up for name in configs)]
    for name in configs:
        own = [layer for layer in layers if name in layer.locas_up]
        if [layer.name for layer in own] != names:
            raise ValueError(
                f"adapters must be beside the same FFNs, got {name!r} beside {len(own)} of {len(names)}."
            )
        if any(layer.is_empty(name) for layer in own):
            raise ValueError(
                f"the memory '{name}' is empty: calibrate(model, batches) or train it first."
            )
        if any(name in layer.merged_adapters for layer in own):
            raise ValueError(f"the memory '{name}' is merged: call unmerge_adapter() first.")
    combined = copy.deepcopy(next(iter(configs.values())))
    widths = {name: sum(config.width_of(name) for config in configs.values()) for name in names}
    combined.r = max(widths.values())
    combined.rank_pattern = {name: width for name, width in widths.items() if width != combined.r}
    combined.scaling = 1.0
    slots = [config.get_record("slots") for config in configs.values()]
    combined.set_record("slots", None)
    if all(slots):
        side_by_side = {name: sum((own[name] for own in slots), []) for name in names}
        combined.set_record("slots", side_by_side)
    return combined


@torch.no_grad()
def fill_combined(layer: LocasLayer, adapter_name: str, parts: dict[str, float]) -> None:
    """Fill a layer's new memory with the slots of others; `parts` has the weight of each of these, by name."""
    k = max(layer.locas_input_scale[name] for name in parts)
    scales = {name: weight * layer.saved_scale(name) for name, weight in parts.items()}
    tau = max(scale.abs() for scale in scales.values())
    rows, downs = [], []
    for name, scale in scales.items():
        *own, down = (projection.weight.float() for projection in layer.projections(name))
        rows.append([part * (layer.locas_input_scale[name] / k) for part in own])
        downs.append(down * (scale / tau if tau else 0.0))
    *targets, down = (projection.weight for projection in layer.projections(adapter_name))
    for target, of_each in zip(targets, zip(*rows, strict=True), strict=True):
        target.copy_(torch.cat(of_each))
    down.copy_(torch.cat(downs, dim=1))
    layer.locas_input_scale[adapter_name].copy_(k)
    layer.locas_tau[adapter_name].copy_(tau)
