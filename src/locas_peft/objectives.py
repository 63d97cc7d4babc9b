"""What a chunk's tokens are taught by, beyond their own negative log-likelihood, and how they are weighed.

Axes: N tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def divergences(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Gives each token's KL divergence from the teacher's next-token distribution to the pupil's.

    Args:
        logits: [N, V], the pupil's; any floating dtype.
        teacher_logits: [N, V], the teacher's; no gradient flows into them.

    Returns:
        Tensor [N], in nats, fp32 or wider; 0 where the two agree.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    pupil = logits.to(dtype).log_softmax(dim=-1)
    teacher = teacher_logits.detach().to(dtype).log_softmax(dim=-1)
    return (teacher.exp() * (teacher - pupil)).sum(dim=-1)


def _by_loss(losses: Tensor) -> Tensor:
    """The mean in which each token counts in proportion to its own loss. The proportions carry no gradient."""
    weights = losses.detach().clamp_min(0)
    return (weights * losses).sum() / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)


WEIGHTINGS: dict[str, Callable[[Tensor], Tensor]] = {"uniform": torch.mean, "loss": _by_loss}
"""From the losses of a chunk's tokens [N] to the one number that is differentiated."""
