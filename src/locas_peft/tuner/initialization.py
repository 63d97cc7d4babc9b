"""How a memory's gate and up rows are initialised: calibration collects statistics, a strategy chooses the rows.

Paper, section "Memory Initialization for Locas-GLU", and its table on initialisation: alpha_j = mean over tokens of
|M_j| measures how active the host's slot j is. The value matrix starts at zero, so that a fresh memory changes no
output. A new strategy is one function and one row of `STRATEGIES`.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from .ffn import SumActivity
from .finding import AnyFFN


@dataclass(frozen=True)
class Statistics:
    """The result of a calibration, the same on every process."""

    importance: Tensor  # alpha [F], float64
    inputs: Tensor  # A of the sampled tokens, [tokens, D] float32
    output_norms: Tensor  # |FFN(A)| of the same tokens, [tokens] float32


class Calibration:
    """Collects the statistics of one FFN over a text: sums, and a sample of at most `samples` tokens, drawn by `seed`.

    Padding does not count. With `across_processes`, under torch.distributed, the text is that of all processes.
    """

    def __init__(self, samples: int, seed: int = 0, across_processes: bool = True) -> None:
        distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._across_processes = across_processes and distributed
        self._samples, self._tokens = samples, 0
        self._activity: Tensor | None = None  # [F] float64, sum over tokens of |M|
        # Of each sampled token its random key [n] float64, A [n, D] and |FFN(A)| [n].
        self._sample: tuple[Tensor, Tensor, Tensor] | None = None
        rank = dist.get_rank() if self._across_processes else 0
        self._generator = make_generator(seed, f"process {rank}")

    @torch.no_grad()
    def update(
        self,
        ffn_input: Tensor,
        sum_activity: SumActivity,
        output: Tensor,
        token_mask: Tensor | None = None,
    ):
        """Add the tokens of a forward pass: A `[..., D]`, the sum of their |M|, and FFN(A) `[..., D]`.

        `token_mask`, `[B, T]`, is nonzero where a token is no padding; ignored if its size is not that of the batch.
        """
        ffn_input, output = (tensor.flatten(0, -2) for tensor in (ffn_input, output))
        kept = None
        if (
            token_mask is not None
            and token_mask.dim() == 2
            and token_mask.numel() == len(ffn_input)
        ):
            kept = token_mask.flatten().to(output.device).bool()
            ffn_input, output = ffn_input[kept], output[kept]
        activity = sum_activity(kept).double()
        self._activity = activity if self._activity is None else self._activity + activity
        self._tokens += len(ffn_input)
        # Each token gets a random key and the largest keys stay. This draws uniformly from a stream of unknown
        # length, the same tokens in every layer.
        keys = torch.rand(len(ffn_input), generator=self._generator, dtype=torch.float64)
        sample = (keys, ffn_input.float(), output.float().norm(dim=-1))
        self._sample = self._keep_largest(
            [sample] if self._sample is None else [self._sample, sample]
        )

    def _keep_largest(self, samples: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        tensors = [torch.cat(parts) for parts in zip(*samples, strict=True)]
        largest = tensors[0].topk(min(self._samples, len(tensors[0]))).indices
        return tuple(tensor[largest.to(tensor.device)] for tensor in tensors)

    def finish(self) -> Statistics:
        """Return the statistics; raise a `ValueError` if there were no tokens, or values that are not finite."""
        tokens = torch.tensor(float(self._tokens), dtype=torch.float64)
        if self._activity is not None and self._across_processes:
            tokens = tokens.to(self._activity.device)
            dist.all_reduce(self._activity)
            dist.all_reduce(tokens)
            gathered: list = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, tuple(tensor.cpu() for tensor in self._sample))
            self._sample = self._keep_largest(gathered)
        if tokens == 0:
            raise ValueError(
                "calibration saw no tokens: give at least one batch with a token that is no padding."
            )
        _, inputs, output_norms = (tensor.to(self._activity.device) for tensor in self._sample)
        if not all(tensor.isfinite().all() for tensor in (self._activity, inputs, output_norms)):
            raise ValueError(
                "an FFN's activations are not finite on the calibration text: check base and dtype."
            )
        return Statistics(self._activity / tokens.to(self._activity.device), inputs, output_norms)


@dataclass(frozen=True)
class Rows:
    """The initial rows of a memory: unit rows `[R, D]`, float32."""

    gate: Tensor | None  # None for a two-layer memory
    up: Tensor
    slots: Tensor | None = None  # LongTensor [R], the cloned host slots; None if none was cloned


@dataclass(frozen=True)
class Strategy:
    """One way to make a memory's rows, from the host FFN, the statistics (or `None`), R and a generator."""

    make: Callable[[AnyFFN, Statistics | None, int, torch.Generator], Rows]
    needs_calibration: bool = True  # whether `make` uses the statistics
    clones: bool = True  # whether the rows are slots of the host, so that R cannot exceed F
    takes_tokens: bool = False  # whether each row is a token of the calibration text
    # Whether the memory starts empty and is written slot by slot (`SlotWriter`); `make` then only serves the scale.
    written: bool = False


def clone_slots(ffn: AnyFFN, slots: Tensor) -> Rows:
    """Clone slots of the host, `LongTensor [R]`, each row scaled to unit norm; rows of zeros stay zero."""
    gate, up = ffn.gate_and_up_rows(slots)
    return Rows(gate=None if gate is None else _to_unit(gate), up=_to_unit(up), slots=slots)


def draw_gaussian(
    ffn: AnyFFN, statistics: Statistics | None, r: int, generator: torch.Generator
) -> Rows:
    """Draw unit rows in random directions, independent of the host."""
    gate, up = (_to_unit(torch.randn(r, ffn.hidden_size, generator=generator)) for _ in range(2))
    return Rows(gate=gate if ffn.gated else None, up=up)


def take_activations(
    ffn: AnyFFN, statistics: Statistics, r: int, generator: torch.Generator
) -> Rows:
    """Take the normalised FFN inputs of R tokens, in turns if there are fewer; gate and up start equal."""
    inputs = statistics.inputs
    rows = _to_unit(inputs[torch.arange(r, device=inputs.device) % len(inputs)])
    return Rows(gate=rows.clone() if ffn.gated else None, up=rows)


def _to_unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


STRATEGIES: dict[str, Strategy] = {
    # The slots with the largest alpha, largest first: the paper's strategy.
    "topk": Strategy(lambda ffn, seen, r, _: clone_slots(ffn, seen.importance.topk(r).indices)),
    "bottomk": Strategy(
        lambda ffn, seen, r, _: clone_slots(ffn, seen.importance.topk(r, largest=False).indices)
    ),
    "random": Strategy(
        lambda ffn, _, r, own: clone_slots(ffn, torch.randperm(ffn.slots, generator=own)[:r]), False
    ),
    "gaussian": Strategy(draw_gaussian, needs_calibration=False, clones=False),
    "activation": Strategy(take_activations, clones=False, takes_tokens=True),
    "write": Strategy(take_activations, clones=False, written=True),
}


def make_generator(seed: int, name: str) -> torch.Generator:
    """Return a generator for one purpose, such as one FFN: reproducible, and different for each name."""
    # Hashed together, since PyTorch's generator uses only 32 bits of a seed.
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
