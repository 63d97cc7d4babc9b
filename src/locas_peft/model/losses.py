"""The losses of tokens, computed in pieces: a large vocabulary needs no float32 copy of all the logits.

Axes: N tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

PIECE = 2**23  # logits: 32 MiB in float32


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return each token's negative log-likelihood [N], in nats, float32 or wider; differentiable once.

    `logits` are [N, V] of any floating dtype, `targets` a LongTensor [N].
    """
    return _TokenLosses.apply(logits, targets.to(logits.device))


def divergences(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return each token's KL divergence [N] from the teacher's next-token distribution to the student's, in nats.

    Both logits are [N, V] of any floating dtype. The result is float32 or wider, 0 where the two agree, and
    differentiable once, by the student's logits.
    """
    return _Divergences.apply(logits, teacher_logits.detach())


def _pieces(logits: Tensor) -> Iterator[slice]:
    rows = max(1, PIECE // logits.shape[1])
    return (slice(begin, begin + rows) for begin in range(0, max(1, len(logits)), rows))


def _norms(logits: Tensor) -> Tensor:
    """Return what log_softmax subtracts, [2, N, 1], in float32 or wider.

    These are the greatest logit of each row, and the logarithm of the softmax's denominator after it was subtracted:
    two steps, so that the rounding error does not grow with the logits.
    """
    dtype, norms = torch.promote_types(logits.dtype, torch.float32), []
    for rows in _pieces(logits):
        piece = logits[rows].to(dtype)
        peaks = piece.amax(dim=-1, keepdim=True)
        norms.append(torch.stack([peaks, (piece - peaks).exp_().sum(dim=-1, keepdim=True).log_()]))
    return torch.cat(norms, dim=1)


def _log_softmax(logits: Tensor, norms: Tensor, rows: slice, out: Tensor | None = None) -> Tensor:
    peaks, log_sums = norms[:, rows]
    return torch.sub(logits[rows], peaks, out=out).sub_(log_sums)


def _gradient(logits: Tensor, norms: Tensor, subtract_target: Callable, outer: Tensor) -> Tensor:
    """Return the gradient [N, V] by the logits, (softmax - target distribution) * outer; outer [N] is by the losses.

    `subtract_target` subtracts the target distribution of some rows (a slice) from a piece, in place.
    """
    gradient = torch.empty_like(logits)
    for rows in _pieces(logits):
        # Work in the gradient's own memory where its dtype allows: new pages are expensive on a CPU.
        out = gradient[rows] if gradient.dtype == norms.dtype else None
        piece = _log_softmax(logits, norms, rows, out).exp_()
        subtract_target(piece, rows)
        piece.mul_(outer[rows].unsqueeze(1))
        if out is None:
            gradient[rows] = piece
    return gradient


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:
        norms = _norms(logits)
        ctx.save_for_backward(logits, targets, norms)
        peaks, log_sums = norms
        return (log_sums - (logits.gather(1, targets.unsqueeze(1)) - peaks)).squeeze(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, outer: Tensor):
        logits, targets, norms = ctx.saved_tensors

        def subtract_target(piece: Tensor, rows: slice) -> None:
            piece.scatter_add_(1, targets[rows].unsqueeze(1), -torch.ones_like(norms[0, rows]))

        return _gradient(logits, norms, subtract_target, outer), None


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        norms, teacher_norms = _norms(logits), _norms(teacher_logits)
        ctx.save_for_backward(logits, teacher_logits, norms, teacher_norms)
        divergences = []
        for rows in _pieces(logits):
            log_teacher = _log_softmax(teacher_logits, teacher_norms, rows)
            log_ratio = log_teacher - _log_softmax(logits, norms, rows)
            divergences.append((log_teacher.exp_() * log_ratio).sum(dim=-1))
        return torch.cat(divergences)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, outer: Tensor):
        logits, teacher_logits, norms, teacher_norms = ctx.saved_tensors

        def subtract_target(piece: Tensor, rows: slice) -> None:
            piece.sub_(_log_softmax(teacher_logits, teacher_norms, rows).exp_())

        return _gradient(logits, norms, subtract_target, outer), None
