"""Several processes on one run: who does what, and where they wait for one another.

Whatever launches them (`accelerate launch`, `torchrun`, `mpirun`), Accelerate tells them apart and places them. What
they make goes to the run's folder; between them travels nothing but what is left to do and who failed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed

T = TypeVar("T")

_SEVERAL = ("LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_ACCELERATE = "ACCELERATE_MIXED_PRECISION"
_DTYPES = {"no": None, "bf16": "bfloat16", "fp16": "float16"}
_PATIENCE = timedelta(days=365)
"""Who is done first waits for the others, and a share of the work has no time limit."""
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Processes:
    """The processes that share a run, as one of them sees it. Without arguments: a process on its own.

    Args:
        index: this one's number among `count`; number 0 is the main process.
        count: how many there are.
        device: where Accelerate places this one's model; None where it has no say.
        dtype: "bfloat16" or "float16" as Accelerate's mixed precision has it, else None.
    """

    index: int = 0
    count: int = 1
    device: str | None = None
    dtype: str | None = None

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def share(self, costs: Sequence[float]) -> list[int]:
        """Gives the numbers of this process's tasks (see `share_out`)."""
        return share_out(costs, self.count)[self.index]

    @contextmanager
    def together(self) -> Iterator[None]:
        """A stretch that all processes come through, or none.

        Where it fails, the first process that failed raises its error; the others end without a word (`SystemExit`
        with code 2), so that one message is all there is. Each process must come here.
        """
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        failed = self._gather(failure is not None)
        if failure is not None and failed.index(True) == self.index:
            raise failure
        if any(failed):
            raise SystemExit(2)

    def from_main(self, make: Callable[[], T]) -> T:
        """Does something in the main process alone, and gives what came out to all. Each process must come here."""
        value = None
        with self.together():
            if self.is_main:
                value = make()
        return self._gather(value)[0]

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Waits until each process has come here.

        Args:
            meanwhile: called a few times a second.

        Raises:
            ChildProcessError: another process has ended before.
        """
        if self.count == 1:
            return
        with _one_line():
            barrier = torch.distributed.barrier(async_op=True)
            while not barrier.is_completed():
                meanwhile()
                time.sleep(_LOOK_SECONDS)
            barrier.wait()

    def _gather(self, value: Any) -> list[Any]:
        if self.count == 1:
            return [value]
        values = [None] * self.count
        with _one_line():
            torch.distributed.all_gather_object(values, value)
        return values


def join(cpu: bool = False) -> Processes:
    """Finds out from Accelerate which of how many processes this is; alone where nothing launched it.

    Args:
        cpu: whether the models shall be on the CPU.

    Raises:
        ValueError: Accelerate was told of something that this machine or this package does not have.
    """
    several = any(name in os.environ for name in _SEVERAL)
    if not several and _ACCELERATE not in os.environ:
        return Processes()
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    # gloo on a GPU too: a word or two is all that travels, and its waiting needs no GPU and has no watchdog.
    group = [InitProcessGroupKwargs(backend="gloo", timeout=_PATIENCE)] if several else []
    accelerator = Accelerator(cpu=cpu, kwargs_handlers=group)
    precision = accelerator.mixed_precision
    if precision not in _DTYPES:
        raise ValueError(f"mixed precision must be one of {', '.join(_DTYPES)}, got {precision!r}: choose one of them")
    return Processes(accelerator.process_index, accelerator.num_processes, str(accelerator.device), _DTYPES[precision])


def share_out(costs: Sequence[float], count: int) -> list[list[int]]:
    """Shares tasks out: the dearest first, each to whoever has the least to do so far.

    Args:
        costs: of each task, in any unit.
        count: among how many.

    Returns:
        Each one's tasks by number, ascending. The same costs always give the same shares.

    Example:
        >>> share_out([1, 5, 2, 2], 2)
        [[1], [0, 2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for task in sorted(range(len(costs)), key=lambda task: -costs[task]):
        least = loads.index(min(loads))
        shares[least].append(task)
        loads[least] += costs[task]
    return [sorted(share) for share in shares]


@contextmanager
def _one_line() -> Iterator[None]:
    """Turns what torch reports of a lost process, a page of it, into a line."""
    try:
        yield
    except RuntimeError as error:
        raise ChildProcessError(
            "another process ended before its share was done: see what it said; the same command goes on from there"
        ) from error
