"""The norm clip: after every optimizer step, each slot's gate row, up row and down column is projected into a ball.

Paper, section "Weight Norm Clipping for Implicit KL Constraint": w <- w / max(norm(w), 1). The paper clips "during
inference"; here the parameters themselves are projected after each optimizer step, which is the same function at each
forward and lets the memory be saved and merged as it stands. PyTorch calls a hook after each step of each of its
optimizers, so a bare loop, Trainer, SFTTrainer and Accelerate are all served without the user's doing anything.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from .layer import LocasLayer

_layers: weakref.WeakSet[LocasLayer] = weakref.WeakSet()
_hook = None


def clip_after_optimizer_steps(layer: LocasLayer) -> None:
    """From now on, and as long as the layer lives, its memories are clipped after each step that trains them."""
    global _hook
    _layers.add(layer)
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_clip_trained_memories)


def _clip_trained_memories(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    if not _layers:
        return
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for layer in list(_layers):
        if layer.stack is not None:
            layer.stack.clip_slot_norms(trained)
            continue
        for adapter_name, up in layer.locas_up.items():
            if id(up.weight) in trained or id(layer.locas_down[adapter_name].weight) in trained:
                layer.clip_slot_norms(adapter_name)


@torch.no_grad()
def clip_norms_(weight: torch.Tensor, dim: int, max_norm: float) -> None:
    """Projects the vectors that lie along a dimension into the ball of a radius, in place.

    Args:
        weight: `[..., R, D]` with `dim=-1` (rows), or `[..., D, R]` with `dim=-2` (columns).
        dim: the dimension that a slot's vector lies along.
        max_norm: the radius.
    """
    norms = torch.linalg.vector_norm(
        weight, dim=dim, keepdim=True, dtype=torch.promote_types(weight.dtype, torch.float32)
    )
    weight.mul_((max_norm / norms.clamp_(min=max_norm)).to(weight.dtype))
