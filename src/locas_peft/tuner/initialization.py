"""How a memory's gate and up rows are initialised: calibration collects statistics, a strategy chooses the rows.

Paper, section "Memory Initialization for Locas-GLU": over a calibration text, alpha_j = mean over tokens of |M_j|
measures how active the host's slot j is; the rows of the R most active slots are cloned and scaled to unit norm; the
value matrix starts at zero, so that a fresh memory changes no output. The other strategies are the rows of the paper's
table on initialisation. A new strategy is one function and one row of `STRATEGIES`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import distributed as dist

from .ffn import HostFFN

_NO_TOKENS = "calibration saw no tokens: give at least one batch with a token that is no padding."


class Calibration:
    """Statistics of one FFN over a calibration text: sums, and at most R tokens' inputs. Padding does not count.

    Args:
        samples: the number of tokens whose inputs are kept, for strategies that start from inputs.
        seed: the seed for the choice of those tokens.
    """

    def __init__(self, samples: int = 0, seed: int = 0) -> None:
        self.samples = samples
        self.tokens = 0
        self._activity: torch.Tensor | None = None  # [F] float64, sum over tokens of |M|
        self._inputs: torch.Tensor | None = None  # [at most samples, D]
        self._keys: torch.Tensor | None = None  # [at most samples] float64, the tokens' random keys
        rank = dist.get_rank() if _is_distributed() else 0
        self._generator = make_generator(seed, f"process {rank}")

    @torch.no_grad()
    def update(self, ffn_input: torch.Tensor, activation: torch.Tensor, token_mask: torch.Tensor | None) -> None:
        """Adds the tokens of one forward pass.

        Args:
            ffn_input: A, `[..., D]`.
            activation: M, `[..., F]`.
            token_mask: `[B, T]`, nonzero where a token is no padding; ignored if its size is not that of the batch.
        """
        ffn_input, activation = ffn_input.flatten(0, -2), activation.flatten(0, -2)
        if token_mask is not None and token_mask.dim() == 2 and token_mask.numel() == len(activation):
            kept = token_mask.flatten().to(activation.device).bool()
            ffn_input, activation = ffn_input[kept], activation[kept]
        activity = activation.abs().sum(dim=0, dtype=torch.float32).double()
        self._activity = activity if self._activity is None else self._activity + activity
        self.tokens += len(activation)
        if self.samples:
            self._sample(ffn_input.float())

    def _sample(self, inputs: torch.Tensor) -> None:
        # Reservoir sampling: each token gets a random key and the largest keys stay. This draws uniformly from a
        # stream of unknown length, the same tokens in every layer.
        keys = torch.rand(len(inputs), generator=self._generator, dtype=torch.float64)
        if self._keys is not None:
            keys, inputs = torch.cat([self._keys, keys]), torch.cat([self._inputs, inputs])
        largest = keys.topk(min(self.samples, len(keys))).indices
        self._keys, self._inputs = keys[largest], inputs[largest.to(inputs.device)]

    def importance(self) -> torch.Tensor:
        """alpha `[F]`, float64: the mean of |M| over all tokens of all processes.

        Raises:
            ValueError: there were no tokens, or an activation was not finite.
        """
        if self._activity is None:
            raise ValueError(_NO_TOKENS)
        activity = self._activity.clone()
        tokens = torch.tensor(float(self.tokens), dtype=torch.float64, device=activity.device)
        if _is_distributed():
            dist.all_reduce(activity)
            dist.all_reduce(tokens)
        if tokens == 0:
            raise ValueError(_NO_TOKENS)
        if not activity.isfinite().all():
            raise ValueError(
                "an FFN's activations are not finite on the calibration text: check the base and its dtype."
            )
        return activity / tokens

    def inputs(self) -> torch.Tensor:
        """The sampled FFN inputs `[at most samples, D]`, float32, the same on every process."""
        inputs = self._inputs
        if _is_distributed():
            gathered: list = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, (self._keys, inputs.cpu()))
            keys = torch.cat([keys for keys, _ in gathered])
            largest = keys.topk(min(self.samples, len(keys))).indices
            inputs = torch.cat([sampled for _, sampled in gathered])[largest].to(inputs.device)
        return inputs


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@dataclass(frozen=True)
class Rows:
    """The initial rows of a memory.

    Args:
        gate: `[R, D]` float32, unit rows; `None` for a two-layer memory.
        up: `[R, D]` float32, unit rows.
        slots: the cloned host slots, `LongTensor [R]`; `None` if none was cloned.
    """

    gate: torch.Tensor | None
    up: torch.Tensor
    slots: torch.Tensor | None = None


@dataclass(frozen=True)
class Strategy:
    """One way to initialise a memory's rows.

    Args:
        make: returns the rows, given the host FFN, the calibration (`None` if none is needed), R and a generator.
        needs_calibration: whether `make` uses the calibration.
        samples_inputs: whether the calibration must keep FFN inputs.
        clones: whether the rows are slots of the host, so that R cannot exceed F.
        written: whether the memory starts without rows and is written slot by slot (`writing.py`).
    """

    make: Callable[[HostFFN, Calibration | None, int, torch.Generator], Rows]
    needs_calibration: bool = True
    samples_inputs: bool = False
    clones: bool = True
    written: bool = False


def clone_slots(ffn: HostFFN, slots: torch.Tensor) -> Rows:
    """Clones slots of the host, each row scaled to unit norm ("Parameter Cloning for Key and Gate Matrices").

    Args:
        slots: `LongTensor [R]`.
    """
    gate, up = ffn.gate_and_up_rows(slots)
    return Rows(gate=None if gate is None else to_unit_rows(gate), up=to_unit_rows(up), slots=slots)


def to_unit_rows(rows: torch.Tensor) -> torch.Tensor:
    """Scales the rows of `[R, D]` to unit L2 norm. Zero rows stay zero."""
    return torch.nn.functional.normalize(rows, dim=-1)


def clone_most_active(ffn: HostFFN, calibration: Calibration, r: int, generator: torch.Generator) -> Rows:
    """Clones the R slots with the largest alpha, largest first: the paper's strategy."""
    return clone_slots(ffn, calibration.importance().topk(r).indices)


def clone_least_active(ffn: HostFFN, calibration: Calibration, r: int, generator: torch.Generator) -> Rows:
    """Clones the R slots with the smallest alpha, smallest first."""
    return clone_slots(ffn, calibration.importance().topk(r, largest=False).indices)


def clone_random(ffn: HostFFN, calibration: Calibration | None, r: int, generator: torch.Generator) -> Rows:
    """Clones R different slots, drawn uniformly."""
    return clone_slots(ffn, torch.randperm(ffn.width, generator=generator)[:r].to(ffn.down.weight.device))


def draw_gaussian(ffn: HostFFN, calibration: Calibration | None, r: int, generator: torch.Generator) -> Rows:
    """Draws unit rows in random directions, independent of the host."""
    gate, up = (to_unit_rows(torch.randn(r, ffn.hidden_size, generator=generator)) for _ in range(2))
    return Rows(gate=gate if ffn.gated else None, up=up)


def take_activations(ffn: HostFFN, calibration: Calibration, r: int, generator: torch.Generator) -> Rows:
    """Takes the normalised FFN inputs of R tokens, like the keys of Locas-MLP; gate and up start equal.

    A text with fewer than R tokens gives each of them several times.
    """
    calibration.importance()  # for its checks
    inputs = calibration.inputs()
    rows = to_unit_rows(inputs[torch.arange(r, device=inputs.device) % len(inputs)])
    return Rows(gate=rows.clone() if ffn.gated else None, up=rows)


def leave_empty(ffn: HostFFN, calibration: Calibration | None, r: int, generator: torch.Generator) -> Rows:
    """Leaves R free slots, for a two-layer memory that is written while reading (Locas-MLP)."""
    return Rows(gate=None, up=torch.zeros(r, ffn.hidden_size))


STRATEGIES: dict[str, Strategy] = {
    "topk": Strategy(clone_most_active),
    "bottomk": Strategy(clone_least_active),
    "random": Strategy(clone_random, needs_calibration=False),
    "gaussian": Strategy(draw_gaussian, needs_calibration=False, clones=False),
    "activation": Strategy(take_activations, samples_inputs=True, clones=False),
    "write": Strategy(leave_empty, needs_calibration=False, clones=False, written=True),
}


def make_generator(seed: int, name: str) -> torch.Generator:
    """Returns a generator for one purpose, such as one FFN: reproducible, and different for each name."""
    # Hashed together, since PyTorch's generator uses only 32 bits of a seed.
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
