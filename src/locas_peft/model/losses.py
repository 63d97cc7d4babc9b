"""The losses of tokens.

Those over the whole vocabulary are computed in pieces: a large one then needs no float32 copy of
all the logits. Axes: N tokens, V vocabulary, K candidates for a token.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["candidate_divergences", "divergences", "token_losses"]

PIECE = 2**23
"""The logits of a piece: 32 MiB in float32."""


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return each token's negative log-likelihood [N], in nats, float32 or wider.

    Args:
        logits: [N, V] of any floating dtype; the result is differentiable by them once.
        targets: LongTensor [N].
    """
    return _TokenLosses.apply(logits, targets.to(logits.device))


def divergences(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return each token's KL divergence [N] from the teacher's distribution to the student's.

    In nats, float32 or wider, 0 where the two agree.

    Args:
        logits: the student's, [N, V] of any floating dtype; the result is differentiable by them
            once.
        teacher_logits: the teacher's, [N, V].
    """
    return _Divergences.apply(logits, teacher_logits.detach())


def candidate_divergences(logits: Tensor, candidates: Tensor, probabilities: Tensor) -> Tensor:
    """Return each token's KL divergence [N] from a teacher's likeliest tokens to the student.

    In nats, float32. It is over K candidates and one more outcome, which stands for all other
    tokens. Over the candidates alone, a student that never says anything else would have the least.

    Args:
        logits: the student's, [N, V] of any floating dtype.
        candidates: LongTensor [N, K], the tokens whose probabilities the teacher gives.
        probabilities: [N, K], these probabilities; a sum below 1 leaves the rest to all others.
    """
    logs = logits.float().log_softmax(-1).gather(1, candidates.to(logits.device))
    targets = probabilities.to(logs)
    other_logs = torch.log1p(-logs.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    other_targets = (1 - targets.sum(-1, keepdim=True)).clamp(min=0)
    logs = torch.cat([logs, other_logs], -1)
    targets = torch.cat([targets, other_targets], -1)
    return (torch.xlogy(targets, targets) - targets * logs).sum(-1)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        norms = _norms(logits)
        ctx.save_for_backward(logits, targets, norms)
        peaks, log_sums = norms
        return (log_sums - (logits.gather(1, targets.unsqueeze(1)) - peaks)).squeeze(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None]:
        logits, targets, norms = ctx.saved_tensors

        def subtract_target(piece: Tensor, rows: slice) -> None:
            piece.scatter_add_(1, targets[rows].unsqueeze(1), -torch.ones_like(norms[0, rows]))

        return _gradient(logits, norms, subtract_target, outer), None


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        norms = _norms(logits)
        teacher_norms = _norms(teacher_logits)
        ctx.save_for_backward(logits, teacher_logits, norms, teacher_norms)
        sums = []
        for rows in _pieces(logits):
            log_teacher = _log_softmax(teacher_logits, teacher_norms, rows)
            log_ratio = log_teacher - _log_softmax(logits, norms, rows)
            sums.append((log_teacher.exp_() * log_ratio).sum(dim=-1))
        return torch.cat(sums)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None]:
        logits, teacher_logits, norms, teacher_norms = ctx.saved_tensors

        def subtract_target(piece: Tensor, rows: slice) -> None:
            piece.sub_(_log_softmax(teacher_logits, teacher_norms, rows).exp_())

        return _gradient(logits, norms, subtract_target, outer), None


def _pieces(logits: Tensor) -> Iterator[slice]:
    rows = max(1, PIECE // logits.shape[1])
    for begin in range(0, max(1, len(logits)), rows):
        yield slice(begin, begin + rows)


def _norms(logits: Tensor) -> Tensor:
    """Return what log_softmax subtracts, [2, N, 1], in float32 or wider.

    These are the greatest logit of each row, and the logarithm of the softmax's denominator after
    it was subtracted: two steps, so that the rounding error does not grow with the logits.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    norms = []
    for rows in _pieces(logits):
        piece = logits[rows].to(dtype)
        peaks = piece.amax(dim=-1, keepdim=True)
        log_sums = (piece - peaks).exp_().sum(dim=-1, keepdim=True).log_()
        norms.append(torch.stack([peaks, log_sums]))
    return torch.cat(norms, dim=1)


def _log_softmax(logits: Tensor, norms: Tensor, rows: slice, out: Tensor | None = None) -> Tensor:
    peaks, log_sums = norms[:, rows]
    return torch.sub(logits[rows], peaks, out=out).sub_(log_sums)


def _gradient(
    logits: Tensor,
    norms: Tensor,
    subtract_target: Callable[[Tensor, slice], None],
    outer: Tensor,
) -> Tensor:
    """Return the gradient [N, V] by the logits, (softmax - target distribution) * outer.

    Args:
        logits: [N, V].
        norms: what `_norms` returned for them.
        subtract_target: subtracts the target distribution of some rows from a piece, in place.
        outer: the gradient by the losses, [N].
    """
    gradient = torch.empty_like(logits)
    for rows in _pieces(logits):
        # Work in the gradient's own memory where its dtype allows: new pages are expensive.
        out = None
        if gradient.dtype == norms.dtype:
            out = gradient[rows]
        piece = _log_softmax(logits, norms, rows, out).exp_()
        subtract_target(piece, rows)
        piece.mul_(outer[rows].unsqueeze(1))
        if out is None:
            gradient[rows] = piece
    return gradient
