"""What a chunk is learned by: losses whose peak memory the vocabulary does not set, and how tokens are weighed.

Axes: N tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Gives each token's negative log-likelihood, in fp32, without an fp32 copy of all the logits.

    Forward and backward pass over the tokens in pieces, so that what a large vocabulary takes beyond the logits and
    their gradient, both in the model's dtype, stays at a fixed size.

    Args:
        logits: [N, V], any floating dtype; float64 is kept.
        targets: LongTensor [N].

    Returns:
        Tensor [N], in nats; differentiable once.
    """
    return _TokenLosses.apply(logits, targets.to(logits.device))


def divergences(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Gives each token's KL divergence from the teacher's next-token distribution to the pupil's, in pieces likewise.

    Args:
        logits: [N, V], the pupil's; any floating dtype; float64 is kept.
        teacher_logits: [N, V], the teacher's; no gradient flows into them.

    Returns:
        Tensor [N], in nats, fp32 or wider (float64 where either is); 0 where the two agree. Differentiable once.
    """
    return _Divergences.apply(logits, teacher_logits.detach())


def _by_loss(losses: Tensor) -> Tensor:
    """The mean in which each token counts in proportion to its own loss. The proportions carry no gradient."""
    weights = losses.detach().clamp_min(0)
    return (weights * losses).sum() / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)


WEIGHTINGS: dict[str, Callable[[Tensor], Tensor]] = {"uniform": torch.mean, "loss": _by_loss}
"""From the losses of a chunk's tokens [N] to the one number that is differentiated."""

PIECE = 2**23
"""Logits a piece: 32 MiB in fp32."""


def _pieces(logits: Tensor) -> Iterator[slice]:
    rows = max(1, PIECE // logits.shape[1])
    return (slice(begin, begin + rows) for begin in range(0, max(1, len(logits)), rows))


class _LogSoftmax:
    """log_softmax of [N, V] a piece at a time, in fp32 or wider.

    A row's greatest logit is taken off first, so that the rounding does not grow with the logits.

    Args:
        norms: of the same logits, where they are known.
    """

    def __init__(self, logits: Tensor, norms: Tensor | None = None):
        self.logits = logits
        self.norms = self._find_norms() if norms is None else norms

    def _find_norms(self) -> Tensor:
        """The greatest logit, and the logarithm of the denominator that is left then, of each row: [2, N, 1]."""
        dtype, found = torch.promote_types(self.logits.dtype, torch.float32), []
        for part in _pieces(self.logits):
            piece = self.logits[part].to(dtype)
            peaks = piece.amax(dim=-1, keepdim=True)
            found.append(torch.stack([peaks, (piece - peaks).exp_().sum(dim=-1, keepdim=True).log_()]))
        return torch.cat(found, dim=1)

    def piece(self, part: slice, out: Tensor | None = None) -> Tensor:
        peaks, rest = self.norms[:, part]
        return torch.sub(self.logits[part], peaks, out=out).sub_(rest)


def _gradient(pupil: _LogSoftmax, take_off: Callable[[Tensor, slice], None], outer: Tensor) -> Tensor:
    """The gradient of losses by the pupil's logits: its softmax, less what the losses want of it, times their own."""
    gradient = torch.empty_like(pupil.logits)
    for part in _pieces(pupil.logits):
        # In the gradient's own memory where its dtype allows: fresh pages are dear on a CPU.
        out = gradient[part] if gradient.dtype == pupil.norms.dtype else None
        piece = pupil.piece(part, out).exp_()
        take_off(piece, part)
        piece.mul_(outer[part].unsqueeze(1))
        if out is None:
            gradient[part] = piece
    return gradient


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:
        norms = _LogSoftmax(logits).norms
        ctx.save_for_backward(logits, targets, norms)
        peaks, rest = norms
        return (rest - (logits.gather(1, targets.unsqueeze(1)) - peaks)).squeeze(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, outer: Tensor):
        logits, targets, norms = ctx.saved_tensors

        def take_off_targets(piece: Tensor, part: slice) -> None:
            piece.scatter_add_(1, targets[part].unsqueeze(1), -torch.ones_like(norms[0, part]))

        return _gradient(_LogSoftmax(logits, norms), take_off_targets, outer), None


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, teacher: Tensor) -> Tensor:
        pupil, teaching = _LogSoftmax(logits), _LogSoftmax(teacher)
        ctx.save_for_backward(logits, teacher, pupil.norms, teaching.norms)
        found = []
        for part in _pieces(logits):
            told = teaching.piece(part)
            apart = told - pupil.piece(part)
            found.append((told.exp_() * apart).sum(dim=-1))
        return torch.cat(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, outer: Tensor):
        logits, teacher, norms, teacher_norms = ctx.saved_tensors
        teaching = _LogSoftmax(teacher, teacher_norms)

        def take_off_teacher(piece: Tensor, part: slice) -> None:
            piece.sub_(teaching.piece(part).exp_())

        return _gradient(_LogSoftmax(logits, norms), take_off_teacher, outer), None
