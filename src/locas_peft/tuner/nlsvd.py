"""NL-SVD: reduce a two-layer memory of R slots to n slots. Pure functions of tensors.

Paper, appendix "Non-Linear SVD for Memory Compression of Locas-MLP". In the paper's orientation a memory is

    f(A) = V^T phi(K^T A),    K [D, R] the keys, V [R, D] the values,

so slot i is column i of K and row i of V. The paper mentions rows and columns of both; it means one norm for each
slot, since f does not change when a slot's key is divided and its value multiplied by one factor (phi = ReLU):

    alpha_i = |column i of K|,  beta_i = |row i of V|,  s_i = alpha_i beta_i,  K~ = K diag(s_i / alpha_i)
    K~ = U Sigma W^T;  the probes p_1 ... p_n are the first n columns of U;  v_j = f(p_j)

This module departs from the text in three points:

- Sign. An eigenvector's sign is arbitrary, but ReLU is not symmetric: f(p) and f(-p) differ. The sign is chosen at
  which the sum of the slots' squared outputs is larger; the memory's output on the other side is lost. This rule gave
  smaller errors on text than the norm of f(+-p), than the side with more inputs, and than half as many probes with
  both signs of each (`benchmarks/LOG.md`).
- "Identical on the span of the probes" does not follow. The reduced memory equals f at each probe and, since ReLU is
  positively homogeneous, on the ray through it. Between the rays f is not additive: for two keys at 60 degrees in the
  plane, full rank n = 2, the two functions differ at p_1 + p_2 (`tests/test_nlsvd.py` has the numbers). Orthogonal
  keys with distinct scales are reproduced exactly.
- Other activations. With phi(0) = 0 and v_j = f(rho p_j) / phi(rho), the reduced memory equals f at rho p_j, for any
  one rho > 0. Nothing is guaranteed elsewhere on the ray, and the scales s_i are approximate: a GELU is not
  homogeneous.

Axes: D hidden size, R slots, n slots after the reduction; leading dimensions (layers) are a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class ReducedMemory(NamedTuple):
    """The result of `nl_svd`.

    Attributes:
        key: K' `[..., D, n]`; its kept columns are the orthonormal probes, strongest first.
        value: V' `[..., n, D]`.
        kept: BoolTensor `[..., n]`; False where there are fewer than n directions. Such slots are zero in key and
            value.
    """

    key: Tensor
    value: Tensor
    kept: Tensor


def nl_svd(
    key: Tensor,
    value: Tensor,
    rank: int,
    *,
    activation: Callable[[Tensor], Tensor] = torch.relu,
    probe_norm: float = 1.0,
) -> ReducedMemory:
    """Reduces a two-layer memory to `rank` slots whose output equals the memory's at `rank` orthonormal probes.

    Paper, appendix on NL-SVD, algorithm "Non-Linear SVD for Two-Layer FFN Memory Compression"; the module's docstring
    lists the departures and the guarantees. Everything is computed in the dtype of the arguments, with the
    eigenvectors of the smaller of K~ K~^T and K~^T K~.

    Args:
        key: K `[..., D, R]`, float32 or float64.
        value: V `[..., R, D]`, same dtype and leading dimensions.
        rank: n, from 1 to R. There are at most min(D, R) directions: further slots are zeros.
        activation: phi, with phi(0) = 0.
        probe_norm: rho, the norm of the probes as inputs. The paper's is 1. ReLU gives the same result for every rho;
            for another activation, use the norm of the FFN's inputs.

    Returns:
        The reduced memory, in the dtype of the arguments.

    Raises:
        TypeError: half precision, or key and value of different dtypes.
        ValueError: shapes that are no memory, a rank out of range, values that are not finite, an empty memory, or
            a `probe_norm` at which the activation is 0.

    Example:
        >>> key, value = torch.randn(16, 8), torch.randn(8, 16)
        >>> reduced = nl_svd(key, value, 4)
        >>> reduced.key.shape, reduced.value.shape
        (torch.Size([16, 4]), torch.Size([4, 16]))
    """
    _check(key, value, rank)
    unit = activation(key.new_tensor(float(probe_norm)))
    if not unit.isfinite() or unit == 0 or not probe_norm > 0:
        raise ValueError(f"probe_norm must be above 0 and activate, got {probe_norm} with activation {unit.item()}.")

    scale = key.norm(dim=-2) * value.norm(dim=-1)  # s [..., R]
    if not scale.any():
        raise ValueError("key and value must hold a slot that is not zero, got an empty memory: write one first.")
    weighted = torch.nn.functional.normalize(key, dim=-2) * scale.unsqueeze(-2)  # K~
    probes, kept = _leading_directions(weighted, rank)

    # One product serves both signs: K^T (-p) = -(K^T p).
    products = probe_norm * (key.mT @ probes)  # [..., R, n]
    weight = value.square().sum(dim=-1, keepdim=True)
    plus, minus = ((weight * activation(sign * products).square()).sum(dim=-2) for sign in (1, -1))
    sign = 1 - 2 * (minus > plus).to(key.dtype).unsqueeze(-2)
    new_value = activation(products * sign).mT @ value / unit * kept.unsqueeze(-1)
    return ReducedMemory(_pad(probes * sign, rank, -1), _pad(new_value, rank, -2), _pad(kept, rank, -1))


def recall(key: Tensor, value: Tensor, inputs: Tensor, activation: Callable[[Tensor], Tensor] = torch.relu) -> Tensor:
    """f(A) = V^T phi(K^T A), the memory's output `[..., N, D]`.

    Args:
        key: K `[..., D, R]`.
        value: V `[..., R, D]`.
        inputs: A, N inputs as rows, `[..., N, D]`.
        activation: phi.
    """
    return activation(inputs @ key) @ value


def _leading_directions(weighted: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Returns the first left singular vectors `[..., D, n]` of K~, and which of them are significant `[..., n]`.

    n is `rank`, or fewer where the matrix has no more directions. A direction is significant if its singular value is
    above four times the square root of the dtype's precision, relative to the largest (1.4e-3 in float32). A Gram
    matrix does not resolve smaller ones.
    """
    d, r = weighted.shape[-2:]
    n = min(rank, d, r)
    # Scaled to order 1, so that the squares in the Gram matrix neither overflow nor vanish.
    size = weighted.flatten(-2).norm(dim=-1)[..., None, None].clamp(min=torch.finfo(weighted.dtype).tiny)
    unit = weighted / size
    wide = r > d
    gram = unit @ unit.mT if wide else unit.mT @ unit
    with _one_thread(gram.device):
        squares, vectors = torch.linalg.eigh(gram)
    squares, vectors = squares.flip(-1)[..., :n], vectors.flip(-1)[..., :n]
    strength = squares.clamp(min=0).sqrt()
    kept = (strength > 4 * torch.finfo(weighted.dtype).eps ** 0.5 * strength[..., :1]) & (strength > 0)
    if not wide:
        # U = K~ W / Sigma. Weak directions are not exactly orthogonal: two steps towards the nearest orthonormal set.
        vectors = torch.nn.functional.normalize(unit @ vectors, dim=-2) * kept.unsqueeze(-2)
        for _ in range(2):
            vectors = 1.5 * vectors - 0.5 * vectors @ (vectors.mT @ vectors)
    return torch.nn.functional.normalize(vectors, dim=-2) * kept.unsqueeze(-2), kept


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Runs LAPACK on one thread of the CPU: on busy cores, several threads take up to ten times as long."""
    if device.type != "cpu":
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _pad(tensor: Tensor, length: int, dim: int) -> Tensor:
    """Appends zeros along a dimension up to a length."""
    shape = list(tensor.shape)
    shape[dim] = length - shape[dim]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)


def _check(key: Tensor, value: Tensor, rank: int) -> None:
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"{name} must be float32 or float64, got {tensor.dtype}: NL-SVD has no meaning in half precision; "
                f"give {name}.float()."
            )
    if key.dtype != value.dtype:
        raise TypeError(f"key and value must have one dtype, got {key.dtype} and {value.dtype}: convert one of them.")
    if key.dim() < 2 or value.shape != key.mT.shape:
        raise ValueError(
            f"key must be [..., D, R] and value [..., R, D], got {list(key.shape)} and {list(value.shape)}: "
            "transpose one of them."
        )
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"rank must be an int, got {rank!r}: give a whole number of slots.")
    if not 1 <= rank <= key.shape[-1]:
        raise ValueError(f"rank must be from 1 to the memory's width {key.shape[-1]}, got {rank}: lower it.")
    if not (key.isfinite().all() and value.isfinite().all()):
        raise ValueError("key and value must be finite, got NaN or infinity: load or write the memory again.")
