"""The measured scale: a slot means the same on every host, so that one learning rate suits all.

With A `[tokens, D]` a sample of an FFN's inputs from the calibration text and M `[tokens, R]` the
memory's activations on it, which are computed from k A in place of A:

    k   = KAPPA sqrt(D) / median over tokens of |A|
    tau = (ALPHA / R) (median over tokens of |FFN(A)|) / sqrt(D) / (mean over tokens, slots of |M|)

The elements of k A have the size KAPPA. R slots whose values have elements of the size v add at
most ALPHA v times the size of the elements of the FFN's own output: a step of AdamW has the same
effect for every width D and R. The medians leave out single tokens whose FFN output is hundreds of
times as long as the others' (attention sinks).
"""

from collections.abc import Callable

import torch
from peft.tuners._buffer_dict import BufferDict
from torch import Tensor

KAPPA = 0.5
ALPHA = 4.608
SAMPLED_TOKENS = 256


def measure_input_scale(inputs: Tensor) -> Tensor:
    """Return k, a scalar, from the inputs A `[tokens, D]`; 1 where they are zero."""
    norm = inputs.norm(dim=-1).median()
    return torch.where(norm > 0, KAPPA * inputs.shape[-1] ** 0.5 / norm, 1.0)


def measure_output_scale(
    activations: Tensor, output_norms: Tensor, hidden_size: int, otherwise: Tensor
) -> Tensor:
    """Return tau, a scalar.

    Args:
        activations: M `[tokens, R]`, with k applied.
        output_norms: |FFN(A)| `[tokens]`.
        hidden_size: D.
        otherwise: the value where no slot is active.
    """
    activity = activations.float().abs().mean()
    share = ALPHA / hidden_size**0.5
    tau = share / activations.shape[-1] * output_norms.median() / activity
    return torch.where(activity > 0, tau, otherwise)


class ScaleDict(BufferDict):
    """A number of each memory. They move with the layer and stay float32 in any model."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ScaleDict":
        scales = dict(self.items())
        super()._apply(fn, recurse)
        for name, scale in scales.items():
            if self[name].dtype != scale.dtype:
                self[name] = scale.to(self[name].device)
        return self
