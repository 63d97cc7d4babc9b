"""Next-token losses whose peak memory the vocabulary does not set.

Axes: N tokens scored, V vocabulary.
"""

from __future__ import annotations

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


class _TokenLosses(torch.autograd.Function):
    PIECE = 2**23  # logits a piece: 32 MiB in fp32

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        norms = torch.cat([piece.to(dtype).logsumexp(dim=-1) for piece in logits.split(_TokenLosses.rows(logits))])
        ctx.save_for_backward(logits, targets, norms)
        return norms - logits.gather(1, targets.unsqueeze(1)).squeeze(1).to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, outer: Tensor):
        logits, targets, norms = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        rows = _TokenLosses.rows(logits)
        for begin in range(0, len(logits), rows):
            part = slice(begin, begin + rows)
            # In the gradient's own memory where its dtype allows: fresh pages are dear on a CPU.
            out = gradient[part] if gradient.dtype == norms.dtype else None
            piece = torch.sub(logits[part], norms[part].unsqueeze(1), out=out).exp_()
            piece.scatter_add_(1, targets[part].unsqueeze(1), -torch.ones_like(norms[part]).unsqueeze(1))
            piece.mul_(outer[part].unsqueeze(1))
            if out is None:
                gradient[part] = piece
        return gradient, None

    @staticmethod
    def rows(logits: Tensor) -> int:
        return max(1, _TokenLosses.PIECE // logits.shape[1])
