"""A sample of a base's weights, to recognise the base by when a memory is loaded."""

from __future__ import annotations

import torch
from torch import nn

from .modules import base_parameters

MATRICES = 32
NUMBERS = 4
_UNKNOWN = "----"
# One unit in the last place of bfloat16, relative; and the spacing of the smallest float16 numbers, absolute.
_RELATIVE, _ABSOLUTE = 2**-7, 2**-24


@torch.no_grad()
def sample_weights(model: nn.Module) -> str:
    """Return the first numbers of up to 32 matrices of the base, spread over its depth, each as 4 hex digits.

    The digits are those of bfloat16. The sample is the same with and without adapters, merged memories, and more rows
    of the vocabulary, and nearly the same in each floating dtype (see `may_be_same_weights`). Weights that are
    quantised or on the meta device are "----".
    """
    matrices = [parameter for _, parameter in base_parameters(model) if parameter.dim() >= 2]
    if len(matrices) > MATRICES:
        matrices = [matrices[index * len(matrices) // MATRICES] for index in range(MATRICES)]
    return "".join(map(_to_digits, matrices))


def may_be_same_weights(expected: object, found: str) -> bool:
    """Return whether two samples can be of one base, in one dtype or in two.

    `expected` is from a memory's file: anything but a sample of the length of `found` can be of any base.
    """
    if not isinstance(expected, str) or len(expected) != len(found):
        return True
    pairs = [(expected[i : i + 4], found[i : i + 4]) for i in range(0, len(found), 4)]
    try:
        numbers = [[_to_number(digits) for digits in pair] for pair in pairs if _UNKNOWN not in pair]
    except ValueError:
        return True
    return all(abs(a - b) <= _RELATIVE * max(abs(a), abs(b)) + _ABSOLUTE for a, b in numbers)


def _to_digits(parameter: torch.Tensor) -> str:
    plain = type(parameter) is nn.Parameter and type(parameter.data) is torch.Tensor  # not quantised, not sharded
    known = plain and parameter.is_floating_point() and not parameter.is_meta
    if not known or parameter.numel() < NUMBERS or parameter.element_size() < 2:
        return _UNKNOWN * NUMBERS
    first = parameter.detach()[(0,) * (parameter.dim() - 1)][:NUMBERS]
    numbers = first.to("cpu", torch.bfloat16).view(torch.int16).tolist()
    return "".join(f"{number & 0xFFFF:04x}" for number in numbers) + _UNKNOWN * (NUMBERS - len(numbers))


def _to_number(digits: str) -> float:
    number = int(digits, 16)
    return torch.tensor(number - 0x10000 if number > 0x7FFF else number, dtype=torch.int16).view(torch.bfloat16).item()
