"""The norm clip: project each slot's gate row, up row and down column into a ball.

Paper, section "Weight Norm Clipping for Implicit KL Constraint": w <- w / max(norm(w), 1). The
paper clips "during inference". A layer projects its parameters instead, where they are used: this
computes the same function, and the memory can be saved and merged as it is. It holds for every
trainer, optimizer and bare loop, without a call.

A memory is clipped
- before each forward with gradients in which it is trained, whatever changed its weights,
- before the first other forward after such a forward, or after a change that shows: another version
  counter, another parameter, another storage,
- before it is saved (`state_dict`), merged, exported, combined or resized.

Not promised: weights that are written through `.data` or by a fused optimizer, without a forward
with gradients in between, are clipped at the next forward with gradients or at the next save only;
a forward without gradients that `torch.compile` has traced, and a graph of `torch.export`, clip
nothing.

The clip writes through `.data`: no version counter moves, so that autograd does not object to two
forwards before one backward. It is idempotent. After a step of training it scales every row above
the radius, as a clip after each optimizer step does. Rows whose norms are those that the last clip
left, and rows that were initialized, loaded or restored, may exceed the radius by the rounding of
bfloat16.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

# Rows that nothing has trained here may be rounded to bfloat16, whatever their dtype is now.
BFLOAT16_EPS = torch.finfo(torch.bfloat16).eps
ROWS = -1
COLUMNS = -2


@torch.no_grad()
def clip_norms_(weights: Sequence[Tensor], dims: Sequence[int], max_norm: float) -> None:
    """Project vectors into the ball of radius `max_norm`, in place. Vectors inside keep their bits.

    Args:
        weights: tensors that hold the vectors.
        dims: for each tensor `ROWS` if it is `[..., R, D]`, or `COLUMNS` if it is `[..., D, R]`.
        max_norm: the radius.
    """
    for weight, dim in zip(weights, dims, strict=True):
        factor = _factor(_norm(weight, dim), max_norm)
        weight.data.mul_(factor.to(weight.dtype))


def exceeds(weight: Tensor, dim: int, max_norm: float) -> bool:
    """Return whether a vector is longer than the radius by more than the rounding of a clip."""
    return bool((_norm(weight.detach(), dim) > _limit(max_norm)).any())


class NormClip:
    """Keeps the weights of one memory in one layer within the ball."""

    def __init__(self) -> None:
        # The norms that the last clip left, of all weights together.
        self._norms: Tensor | None = None
        self._max_norm: float | None = None
        self._signature: list[tuple] = []
        # Whether the last clip was in a forward with gradients: a step may follow it unseen.
        self._is_trained = True

    def is_due(self, weights: Sequence[Tensor]) -> bool:
        """Return whether the weights may have changed since the last clip."""
        if not all(map(_is_writable, weights)):
            return False
        if _is_trained(weights) or self._is_trained:
            return True
        return self._signature != [_sign(weight) for weight in weights]

    def clip_(self, weights: Sequence[Tensor], dims: Sequence[int], max_norm: float) -> None:
        """Clip weights that have changed, in place; the arguments are those of `clip_norms_`."""
        if not all(map(_is_writable, weights)):
            return
        was_trained = self._is_trained
        has_gradient = any(weight.grad is not None for weight in weights)
        self._is_trained = has_gradient or _is_trained(weights)
        with torch.no_grad():
            norms = _list_norms(weights, dims)
            joined = _join(norms)
            known = self._norms
            if not was_trained or max_norm != self._max_norm or not _fit(known, joined):
                known = None
            _scale_(weights, norms, joined, known, max_norm)
            self._norms = _join(_list_norms(weights, dims))
        self._max_norm = max_norm
        self._signature = [_sign(weight) for weight in weights]


@torch.no_grad()
def clip_traced_(weights: Sequence[Tensor], dims: Sequence[int], max_norm: float) -> None:
    """Clip rows that exceed the radius by more than rounding, in operations that can be traced."""
    for weight, dim in zip(weights, dims, strict=True):
        norm = _norm(weight, dim)
        limit = max_norm * (1.0 + max(torch.finfo(weight.dtype).eps, 1e-6))
        factor = torch.where(norm > limit, _factor(norm, max_norm), 1.0)
        weight.data.mul_(factor.to(weight.dtype))


def _is_trained(weights: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)


def _is_writable(weight: Tensor) -> bool:
    # Inside torch.func's transforms a parameter is a wrapper, which has no storage.
    if weight.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(weight):
        return False
    return torch.is_inference_mode_enabled() or not weight.is_inference()


def _scale_(
    weights: Sequence[Tensor],
    norms: Sequence[Tensor],
    joined: Tensor,
    known: Tensor | None,
    max_norm: float,
) -> None:
    """Scale rows above the radius; without known norms, above it by more than rounding.

    A change of one row clips all rows of the memory, as a clip after each optimizer step does.
    """
    changed = None if known is None else (joined != known).any()
    if isinstance(norms[0], DTensor):
        _scale_shards_(weights, norms, changed, max_norm)
        return
    # No branch on the values of tensors: an accelerator would have to be waited for. All weights
    # together: it would have to start a kernel for each of them.
    condition = joined > _limit(max_norm) if changed is None else changed
    factors = torch.where(condition, _factor(joined, max_norm), 1.0)
    parts = factors.split([norm.numel() for norm in norms])
    for weight, norm, part in zip(weights, norms, parts, strict=True):
        weight.data.mul_(part.view_as(norm).to(weight.dtype))


def _scale_shards_(
    weights: Sequence[Tensor], norms: Sequence[Tensor], changed: Tensor | None, max_norm: float
) -> None:
    # A plain condition cannot be combined with distributed factors.
    if changed is not None and not changed:
        return
    for weight, norm in zip(weights, norms, strict=True):
        factor = _factor(norm, max_norm)
        if changed is None:
            factor = torch.where(norm > _limit(max_norm), factor, 1.0)
        weight.data.mul_(factor.to(weight.dtype))


def _factor(norm: Tensor, max_norm: float) -> Tensor:
    return (norm / max_norm).clamp(min=1.0).reciprocal()


def _limit(max_norm: float) -> float:
    """Return the radius and as much as rounding to bfloat16 may leave above it."""
    return max_norm * (1.0 + BFLOAT16_EPS)


def _norm(weight: Tensor, dim: int) -> Tensor:
    if weight.dim() < 2:
        problem = "the norm clip needs the whole rows of a memory, got a flattened part of shape"
        remedy = "use FSDP2 (fully_shard, or fsdp_version=2 in Accelerate) or max_slot_norm=None."
        raise ValueError(f"{problem} {list(weight.shape)}: {remedy}")
    dtype = torch.promote_types(weight.dtype, torch.float32)
    norm = torch.linalg.vector_norm(weight, dim=dim, keepdim=True, dtype=dtype)
    if isinstance(norm, DTensor):
        # FSDP2 spreads a column over the processes: add up what each of them has.
        placements = [Replicate() if p.is_partial() else p for p in norm.placements]
        norm = norm.redistribute(placements=placements)
    return norm


def _list_norms(weights: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
    return [_norm(weight, dim) for weight, dim in zip(weights, dims, strict=True)]


def _join(norms: Sequence[Tensor]) -> Tensor:
    """Return the norms of all weights in one tensor, gathered from the processes."""
    gathered = []
    for norm in norms:
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        gathered.append(whole.flatten())
    return torch.cat(gathered)


def _fit(known: Tensor | None, joined: Tensor) -> bool:
    """Return whether norms are of weights of as many rows on the same device."""
    if known is None:
        return False
    return known.shape == joined.shape and known.device == joined.device


def _sign(weight: Tensor) -> tuple:
    """Return what changes when a weight is written; never equal for inference tensors."""
    if weight.is_inference():
        return (object(),)
    if isinstance(weight, DTensor):
        return id(weight), weight._version
    return id(weight), weight._version, weight.data_ptr()
