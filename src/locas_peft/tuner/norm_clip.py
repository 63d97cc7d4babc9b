"""The norm clip: after each optimizer step, project each slot's gate row, up row and down column into a ball.

Paper, section "Weight Norm Clipping for Implicit KL Constraint": w <- w / max(norm(w), 1). The paper clips "during
inference"; projecting the parameters instead computes the same function, and the memory can be saved and merged as it
is. PyTorch calls a hook after each step of every optimizer, so that no trainer and no bare loop needs a call.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from .config import LocasConfig
    from .layer import LocasLayer

_layers: weakref.WeakSet[LocasLayer] = weakref.WeakSet()
_indices: weakref.WeakKeyDictionary[Optimizer, _Index] = weakref.WeakKeyDictionary()
_hook = None


def clip_after_optimizer_steps(layer: LocasLayer) -> None:
    """Clip the layer's memories after each optimizer step that trains them, as long as the layer lives."""
    global _hook
    _layers.add(layer)
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_clip_trained_weights)


@torch.no_grad()
def clip_norms_(weights: Sequence[Tensor], dims: Sequence[int], max_norm: float) -> None:
    """Project vectors of several tensors into the ball of radius `max_norm`, in place; vectors inside keep their bits.

    `dims` has -1 for a tensor of rows `[..., R, D]`, -2 for one of columns `[..., D, R]`.
    """
    # A norm for each tensor: reductions of stacked tensors may add in another order. The rest is grouped.
    norms = [_norm(weight, dim) for weight, dim in zip(weights, dims, strict=True)]
    torch._foreach_div_(norms, max_norm)
    torch._foreach_clamp_min_(norms, 1.0)
    torch._foreach_reciprocal_(norms)
    torch._foreach_mul_(
        weights, [norm.to(weight.dtype) for norm, weight in zip(norms, weights, strict=True)]
    )


def _norm(weight: Tensor, dim: int) -> Tensor:
    if weight.dim() < 2:
        problem = f"the norm clip needs the whole rows of a memory, got a flattened part of shape {list(weight.shape)}"
        raise ValueError(
            f"{problem}: use FSDP2 (fully_shard, or fsdp_version=2 in Accelerate) or max_slot_norm=None."
        )
    dtype = torch.promote_types(weight.dtype, torch.float32)
    norm = torch.linalg.vector_norm(weight, dim=dim, keepdim=True, dtype=dtype)
    if isinstance(
        norm, DTensor
    ):  # FSDP2 spreads a column over the processes: add up what each of them has
        norm = norm.redistribute(
            placements=[Replicate() if p.is_partial() else p for p in norm.placements]
        )
    return norm


class _Index:
    """The memory weights among an optimizer's parameters. Keeps no parameter or layer alive."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        known: dict[int, tuple[nn.Linear, int, LocasConfig]] = {}
        for layer in _layers:
            for name, config in layer.locas_config.items():
                *rows, down = layer.projections(name)
                known |= {id(module.weight): (module, -1, config) for module in rows}
                known[id(down.weight)] = (down, -2, config)
        # The module shows whether the parameter is still a memory's; the config holds the radius.
        self._weights = []
        for parameter in parameters:
            if id(parameter) in known:
                module, dim, config = known[id(parameter)]
                self._weights.append((weakref.ref(parameter), weakref.ref(module), dim, config))

    def fits(self, parameters: list[nn.Parameter]) -> bool:
        """Return whether the optimizer still holds these parameters, and memories' weights are in their modules."""
        if [id(parameter) for parameter in parameters] != [id(ref()) for ref in self._parameters]:
            return False
        weights = [(ref(), module()) for ref, module, _, _ in self._weights]
        return all(
            weight is not None and getattr(module, "weight", None) is weight
            for weight, module in weights
        )

    def clip(self) -> None:
        """Clip the weights that the step changed: those with a gradient, or all if none of them has one."""
        weights = [(ref(), dim, config.max_slot_norm) for ref, _, dim, config in self._weights]
        # Optimizers skip parameters without a gradient. Those that work without gradients change all.
        changed = [entry for entry in weights if entry[0].grad is not None] or weights
        groups: dict[float, tuple[list[Tensor], list[int]]] = {}
        for weight, dim, radius in changed:
            if radius is not None:
                group = groups.setdefault(radius, ([], []))
                group[0].append(weight)
                group[1].append(dim)
        for radius, (tensors, dims) in groups.items():
            clip_norms_(tensors, dims, radius)


def _clip_trained_weights(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    if not _layers:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    index = _indices.get(optimizer)
    if index is None or not index.fits(parameters):
        index = _indices[optimizer] = _Index(parameters)
    index.clip()
