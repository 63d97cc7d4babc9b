"""NL-SVD: reduce a two-layer memory of R slots to n slots. Pure functions of tensors.

Paper, appendix "Non-Linear SVD for Memory Compression of Locas-MLP". In the paper's orientation a
memory is

    f(A) = V^T phi(K^T A),    K [D, R] the keys, V [R, D] the values,

so slot i is column i of K and row i of V. f does not change when a slot's key is divided and its
value multiplied by one factor (phi = ReLU), which leaves one norm for each slot:

    alpha_i = |column i of K|,  beta_i = |row i of V|,  s_i = alpha_i beta_i
    K~ = K diag(s_i / alpha_i) = U Sigma W^T
    the probes p_1 ... p_n are the first n columns of U;  v_j = f(p_j)

Departures from the text:
- Sign. An eigenvector's sign is arbitrary, but f(p) and f(-p) differ. The sign is chosen at which
  the sum of the slots' squared outputs is larger, which gave the smallest errors on text
  (`benchmarks/LOG.md`).
- "Identical on the span of the probes" does not follow. The reduced memory equals f at each probe
  and, for ReLU, on the ray through it. Between the rays f is not additive.
- The threshold. The paper's epsilon bounds the norms of rows, ours singular values relative to the
  largest.
- Other activations. With phi(0) = 0 and v_j = f(rho p_j) / phi(rho), the reduced memory equals f at
  rho p_j, for any one rho > 0.

Axes: D hidden size, R slots, n slots after the reduction; leading dimensions (layers) are a batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from ..checks import check_whole

__all__ = ["ReducedMemory", "check_rank", "nl_svd"]

Activation = Callable[[Tensor], Tensor]


class ReducedMemory(NamedTuple):
    """The result of `nl_svd`, in the dtype of its arguments."""

    # K' [..., D, n]: its kept columns are the orthonormal probes, strongest first.
    key: Tensor
    # V' [..., n, D].
    value: Tensor
    # BoolTensor [..., n]: False where there are fewer than n directions; key and value are zero.
    kept: Tensor


def nl_svd(
    key: Tensor,
    value: Tensor,
    rank: int,
    *,
    activation: Activation = torch.relu,
    probe_norm: float = 1.0,
    threshold: float = 0.0,
) -> ReducedMemory:
    """Reduce a two-layer memory to `rank` slots.

    Its output equals the memory's at `rank` orthonormal probes.

    Args:
        key, value: K `[..., D, R]` and V `[..., R, D]`, both float32 or float64.
        rank: n, from 1 to R. There are at most min(D, R) directions: further slots are zeros.
        activation: phi, with phi(0) = 0.
        probe_norm: rho, the norm of the probes as inputs; 1 in the paper. It has no effect with
            ReLU; for another activation, use the norm of the memory's inputs.
        threshold: directions at most this strong, relative to the strongest, are zeros too.

    Raises:
        TypeError, ValueError: for another dtype or shape, and values that are zero or not finite.
    """
    _check(key, value, rank)
    unit = activation(key.new_tensor(float(probe_norm)))  # phi(rho)
    if not unit.isfinite() or unit == 0 or not probe_norm > 0:
        got = f"got {probe_norm} with activation {unit.item()}."
        raise ValueError(f"probe_norm must be above 0 and activate, {got}")
    scale = key.norm(dim=-2) * value.norm(dim=-1)  # s [..., R]
    if not scale.any():
        rule = "key and value must hold a slot that is not zero"
        raise ValueError(f"{rule}, got an empty memory: write one first.")
    weighted = normalize(key, dim=-2) * scale.unsqueeze(-2)  # K~ [..., D, R]
    probes, kept = _leading_directions(weighted, rank, threshold)
    # One product serves both signs: K^T (-p) = -(K^T p).
    products = probe_norm * (key.mT @ probes)  # [..., R, n]
    sign = _choose_signs(products, value, activation)
    new_value = activation(products * sign).mT @ value / unit
    new_value = new_value * kept.unsqueeze(-1)
    free = rank - kept.shape[-1]
    return ReducedMemory(
        key=pad(probes * sign, (0, free)),
        value=pad(new_value, (0, 0, 0, free)),
        kept=pad(kept, (0, free)),
    )


def _choose_signs(products: Tensor, value: Tensor, activation: Activation) -> Tensor:
    """Return for each probe the sign, 1 or -1, at which the slots' outputs are larger, [..., 1, n].

    Args:
        products: rho K^T p `[..., R, n]`.
        value: V `[..., R, D]`.
    """
    weight = value.square().sum(dim=-1, keepdim=True)
    plus = (weight * activation(products).square()).sum(dim=-2)
    minus = (weight * activation(-products).square()).sum(dim=-2)
    return 1 - 2 * (minus > plus).to(products.dtype).unsqueeze(-2)


def _leading_directions(weighted: Tensor, rank: int, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the first left singular vectors of K~ `[..., D, n]`, and which are significant.

    A Gram matrix does not resolve singular values below the square root of the dtype's precision,
    relative to the largest: significant ones are four times as large.
    """
    hidden_size, width = weighted.shape[-2:]
    directions = min(rank, hidden_size, width)
    limits = torch.finfo(weighted.dtype)
    # Scaled to order 1, so that the squares in the Gram matrix neither overflow nor vanish.
    size = weighted.flatten(-2).norm(dim=-1)[..., None, None]
    unit = weighted / size.clamp(min=limits.tiny)
    wide = width > hidden_size
    # The smaller one of the two Gram matrices.
    thin = unit.mT if wide else unit
    gram = thin.mT @ thin
    with _one_thread(gram.device):
        squares, vectors = torch.linalg.eigh(gram)
    vectors = vectors.flip(-1)[..., :directions]
    strength = squares.flip(-1)[..., :directions].clamp(min=0).sqrt()  # Sigma
    least = max(threshold, 4 * limits.eps**0.5) * strength[..., :1]
    kept = (strength > least) & (strength > 0)
    if not wide:
        # U = K~ W / Sigma. Weak directions are not exactly orthogonal: two steps towards the
        # nearest orthonormal set.
        vectors = normalize(unit @ vectors, dim=-2) * kept.unsqueeze(-2)
        for _ in range(2):
            vectors = 1.5 * vectors - 0.5 * vectors @ (vectors.mT @ vectors)
    return normalize(vectors, dim=-2) * kept.unsqueeze(-2), kept


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Run LAPACK on one thread of the CPU: several take up to ten times as long on busy cores."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def check_rank(rank: int, width: int) -> None:
    """Raise a `TypeError` or `ValueError` unless `width` slots can be reduced to `rank`."""
    check_whole("rank", rank, 1)
    if rank > width:
        raise ValueError(f"rank must be at most the memory's width {width}, got {rank}: lower it.")


def _check(key: Tensor, value: Tensor, rank: int) -> None:
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"{name} must be float32 or float64, got {tensor.dtype}: give {name}.float()."
            )
    if key.dtype != value.dtype:
        rule = "key and value must have one dtype"
        raise TypeError(f"{rule}, got {key.dtype} and {value.dtype}: convert one of them.")
    if key.dim() < 2 or value.shape != key.mT.shape:
        rule = "key must be [..., D, R] and value [..., R, D]"
        got = f"got {list(key.shape)} and {list(value.shape)}"
        raise ValueError(f"{rule}, {got}: transpose one of them.")
    check_rank(rank, key.shape[-1])
    if not (key.isfinite().all() and value.isfinite().all()):
        rule = "key and value must be finite"
        raise ValueError(f"{rule}, got NaN or infinity: load or write the memory again.")
