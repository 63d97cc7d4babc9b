"""How a memory's gate and up rows are initialised.

Calibration collects statistics, and a strategy makes the rows. Paper, section "Memory
Initialization for Locas-GLU", and its table on initialisation: alpha_j = mean over tokens of |M_j|
measures how active the host's slot j is. The value matrix starts at zero, so that a fresh memory
changes no output. A new strategy is one function and one row of `STRATEGIES`.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


Observer = Callable[[Tensor, SumActivity, Tensor, Tensor | None], None]
"""Takes the tokens of a layer's forward pass, such as `Calibration.update`."""


class Calibration:
    """Collects the statistics of one FFN over a text: sums, and a sample of its tokens.

    Padding does not count.

    Args:
        samples: the largest number of tokens in the sample.
        seed: the seed by which they are drawn.
        across_processes: whether, under torch.distributed, the text is that of all processes.
    """

    def __init__(self, samples: int, seed: int = 0, across_processes: bool = True) -> None:
        self._across_processes = across_processes and is_distributed()
        self._samples = samples
        self._tokens = 0
        # Sum over tokens of |M|, [F] float64.
        self._activity: Tensor | None = None
        # Of each sampled token its random key [n] float64, A [n, D] and |FFN(A)| [n].
        self._sample: tuple[Tensor, ...] | None = None
        rank = dist.get_rank() if self._across_processes else 0
        self._generator = make_generator(seed, f"process {rank}")

    @torch.no_grad()
    def update(
        self,
        ffn_input: Tensor,
        sum_activity: SumActivity,
        output: Tensor,
        token_mask: Tensor | None = None,
    ) -> None:
        """Add the tokens of a forward pass.

        Args:
            ffn_input: A, `[..., D]`.
            sum_activity: returns the sum of their |M|.
            output: FFN(A), `[..., D]`.
            token_mask: `[B, T]`, nonzero where a token is no padding; ignored if its size is not
                that of the batch.
        """
        inputs = ffn_input.flatten(0, -2)
        outputs = output.flatten(0, -2)
        is_token = None
        if token_mask is not None and token_mask.dim() == 2 and token_mask.numel() == len(inputs):
            is_token = token_mask.flatten().to(outputs.device).bool()
            inputs = inputs[is_token]
            outputs = outputs[is_token]
        activity = sum_activity(is_token).double()
        self._activity = activity if self._activity is None else self._activity + activity
        self._tokens += len(inputs)
        # Each token gets a random key and the largest keys stay. This draws uniformly from a stream
        # of unknown length, the same tokens in every layer.
        keys = torch.rand(len(inputs), generator=self._generator, dtype=torch.float64, device="cpu")
        samples: list[tuple[Tensor, ...]] = [(keys, inputs.float(), outputs.float().norm(dim=-1))]
        if self._sample is not None:
            samples.insert(0, self._sample)
        self._sample = self._keep_largest(samples)

    def _keep_largest(self, samples: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        tensors = [torch.cat(parts) for parts in zip(*samples, strict=True)]
        largest = tensors[0].topk(min(self._samples, len(tensors[0]))).indices
        return tuple(tensor[largest.to(tensor.device)] for tensor in tensors)

    def finish(self) -> Statistics:
        """Return the statistics.

        Raises:
            ValueError: where there were no tokens, or values that are not finite.
        """
        activity = self._activity
        sample = self._sample
        # Both are there after the first forward.
        has_run = activity is not None and sample is not None
        if self._across_processes:
            # All fail together: one that fails alone would leave the others waiting.
            have_run: list = [None] * dist.get_world_size()
            dist.all_gather_object(have_run, has_run)
            has_run = all(have_run)
        if not has_run:
            raise _describe_no_tokens()
        assert activity is not None and sample is not None
        tokens = torch.tensor(float(self._tokens), dtype=torch.float64, device=activity.device)
        if self._across_processes:
            dist.all_reduce(activity)
            dist.all_reduce(tokens)
            gathered: list = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, tuple(tensor.cpu() for tensor in sample))
            sample = self._keep_largest(gathered)
        if tokens == 0:
            raise _describe_no_tokens()
        _, inputs, output_norms = (tensor.to(activity.device) for tensor in sample)
        for tensor in (activity, inputs, output_norms):
            if not tensor.isfinite().all():
                problem = "an FFN's activations are not finite on the calibration text"
                raise ValueError(f"{problem}: check base and dtype.")
        return Statistics(activity / tokens, inputs, output_norms)


def _describe_no_tokens() -> ValueError:
    remedy = "give at least one batch with a token that is no padding."
    return ValueError(f"calibration saw no tokens: {remedy}")


def is_distributed() -> bool:
    """Return whether there are several processes in torch's process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@dataclass(frozen=True)
class Rows:
    """The initial rows of a memory: unit rows `[R, D]`, float32."""

    gate: Tensor | None  # None for a two-layer memory
    up: Tensor
    slots: Tensor | None = None  # LongTensor [R], the cloned host slots; None if none was cloned


# The statistics are `Statistics`, or `None` where the strategy needs no calibration.
MakeRows = Callable[[AnyFFN, Any, int, torch.Generator], Rows]
"""Makes rows from the host FFN, the statistics (or `None`), R and a generator."""


@dataclass(frozen=True)
class Strategy:
    """One way to make a memory's rows."""

    make: MakeRows
    needs_calibration: bool = True  # whether `make` uses the statistics
    clones: bool = True  # whether the rows are slots of the host, so that R cannot exceed F
    takes_tokens: bool = False  # whether each row is a token of the calibration text
    # Whether the slots start free and are written one by one; `make` then only serves the scale.
    written: bool = False


def clone_slots(ffn: AnyFFN, slots: Tensor) -> Rows:
    """Clone slots of the host, `LongTensor [R]`, each row scaled to unit norm or zero."""
    gate, up = ffn.gate_and_up_rows(slots)
    if gate is not None:
        gate = _to_unit(gate)
    return Rows(gate=gate, up=_to_unit(up), slots=slots)


def clone_top(ffn: AnyFFN, statistics: Statistics, r: int, generator: torch.Generator) -> Rows:
    """Clone the slots with the largest alpha, largest first: the paper's strategy."""
    return clone_slots(ffn, statistics.importance.topk(r).indices)


def clone_bottom(ffn: AnyFFN, statistics: Statistics, r: int, generator: torch.Generator) -> Rows:
    """Clone the slots with the smallest alpha, smallest first."""
    return clone_slots(ffn, statistics.importance.topk(r, largest=False).indices)


def clone_random(
    ffn: AnyFFN, statistics: Statistics | None, r: int, generator: torch.Generator
) -> Rows:
    """Clone random slots, in turns if there are fewer than R."""
    order = torch.randperm(ffn.slots, generator=generator, device="cpu")
    return clone_slots(ffn, order[torch.arange(r, device="cpu") % len(order)])


def draw_gaussian(
    ffn: AnyFFN, statistics: Statistics | None, r: int, generator: torch.Generator
) -> Rows:
    """Draw unit rows in random directions, independent of the host."""
    gate = _to_unit(torch.randn(r, ffn.hidden_size, generator=generator, device="cpu"))
    up = _to_unit(torch.randn(r, ffn.hidden_size, generator=generator, device="cpu"))
    return Rows(gate=gate if ffn.gated else None, up=up)


def take_activations(
    ffn: AnyFFN, statistics: Statistics, r: int, generator: torch.Generator
) -> Rows:
    """Take the normalised FFN inputs of R tokens, in turns if there are fewer.

    Gate and up start equal.
    """
    inputs = statistics.inputs
    rows = _to_unit(inputs[torch.arange(r, device=inputs.device) % len(inputs)])
    return Rows(gate=rows.clone() if ffn.gated else None, up=rows)


def _to_unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


STRATEGIES: dict[str, Strategy] = {
    "topk": Strategy(clone_top),
    "bottomk": Strategy(clone_bottom),
    "random": Strategy(clone_random, needs_calibration=False),
    "gaussian": Strategy(draw_gaussian, needs_calibration=False, clones=False),
    "activation": Strategy(take_activations, clones=False, takes_tokens=True),
    "write": Strategy(take_activations, clones=False, written=True),
}


def make_generator(seed: int, name: str) -> torch.Generator:
    """Return a generator for one purpose, such as one FFN: another one for each name."""
    # Hashed together, since PyTorch's generator uses only 32 bits of a seed.
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
