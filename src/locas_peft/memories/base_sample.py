"""A sample of a base's weights, kept in a memory's record, which recognises the base."""

import struct

import torch
from torch import Tensor, nn

from ..tuner.attached import list_layers
from ..tuner.modules import base_parameters

__all__ = ["may_be_same_weights", "sample_weights"]

MATRICES = 32
NUMBERS = 4
# Four hex digits a number: the digits of its bfloat16.
DIGITS = 4
UNKNOWN = "-" * DIGITS
# One unit in the last place of bfloat16, relative; and the spacing of the smallest float16 numbers,
# absolute.
RELATIVE = 2**-7
ABSOLUTE = 2**-24


@torch.no_grad()
def sample_weights(model: nn.Module) -> str:
    """Return the first numbers of up to 32 matrices of the base, each as 4 hex digits.

    The matrices are spread over the depth. The digits are those of bfloat16. Adapters, merged
    memories and more rows of the vocabulary do not change the sample, other floating dtypes hardly.
    Weights that are quantised, sharded or on the meta device are "----".
    """
    matrices = [parameter for _, parameter in base_parameters(model) if parameter.dim() >= 2]
    # What merged gains have changed.
    own: dict[nn.Parameter, nn.Parameter] = {}
    for layer in list_layers(model):
        own |= layer.own_down_weight()
    if len(matrices) > MATRICES:
        matrices = [matrices[index * len(matrices) // MATRICES] for index in range(MATRICES)]
    return "".join(_to_digits(own.get(matrix, matrix)) for matrix in matrices)


def may_be_same_weights(expected: object, sample: str) -> bool:
    """Return whether a sample from a file can be of the same base as another, in any dtype."""
    if not isinstance(expected, str) or len(expected) != len(sample):
        return True
    for start in range(0, len(sample), DIGITS):
        digits = expected[start : start + DIGITS], sample[start : start + DIGITS]
        if UNKNOWN in digits:
            continue
        try:
            a = _to_number(digits[0])
            b = _to_number(digits[1])
        except (ValueError, struct.error):
            # No sample of ours: it tells nothing.
            return True
        limit = RELATIVE * max(abs(a), abs(b)) + ABSOLUTE
        # Not a number is not below the limit, and tells that they differ.
        if not abs(a - b) <= limit:
            return False
    return True


def _to_digits(parameter: Tensor) -> str:
    # Neither quantised nor sharded.
    is_plain = type(parameter) is nn.Parameter and type(parameter.data) is Tensor
    is_known = is_plain and parameter.is_floating_point() and not parameter.is_meta
    if not is_known or parameter.numel() < NUMBERS or parameter.element_size() < 2:
        return UNKNOWN * NUMBERS
    first_row = parameter.detach()[(0,) * (parameter.dim() - 1)]
    numbers = first_row[:NUMBERS].to("cpu", torch.bfloat16).view(torch.int16).tolist()
    digits = "".join(f"{number & 0xFFFF:04x}" for number in numbers)
    return digits + UNKNOWN * (NUMBERS - len(numbers))


def _to_number(digits: str) -> float:
    # bfloat16 is the first half of float32.
    (number,) = struct.unpack(">f", bytes.fromhex(f"{digits}0000"))
    return number
