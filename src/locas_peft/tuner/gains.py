"""Gains: trained factors on the neurons of the host's FFN, beside a memory's own slots.

With M `[B, T, F]` what the host's down projection receives, and g `[F]` the gains of each memory
that takes part,

    output = Wdown (c * M) + the outputs of the memories,  c = product of (1 + SCALE g)

A slot adds a neuron and leaves those of the host as they are; a gain changes how much one of them
counts. Merging multiplies the down columns by c.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

SCALE = 3.0
"""Of the gains in the factors, so that they learn at the rate of the slots."""


class Gain(nn.Module):
    """The gains g of one memory: its parameter `weight`, `[F]`, begins at 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))


def combine_gains(
    gains: Mapping[str, Tensor], multipliers: Mapping[str, float], names: Iterable[str]
) -> Tensor:
    """Return the factors c `[F]` of several memories, float32.

    Args:
        gains: g of each memory that has gains, at least one.
        multipliers: those of `rescale`, for memories that are rescaled.
        names: the memories that take part.
    """
    factors = torch.ones_like(next(iter(gains.values())), dtype=torch.float32)
    for name in names:
        if name in gains:
            factors = factors * (1.0 + SCALE * multipliers.get(name, 1.0) * gains[name].float())
    return factors


def multiply(activations: Tensor, factors: Tensor) -> Tensor:
    """Return M times its factors, in the dtype of M.

    Args:
        activations: M, `[B, T, F]`, or `[B * T, F]` of a flat FFN.
        factors: c, `[F]`, or `[N, F]` where each B / N rows of a batch have others.
    """
    if factors.dim() == 1:
        return (activations * factors).to(activations.dtype)
    by_row = activations.reshape(len(factors), -1, activations.shape[-1])
    product = by_row * factors[:, None]
    return product.to(activations.dtype).reshape(activations.shape)
