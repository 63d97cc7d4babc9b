"""Several processes on one run: who does what, and where they wait for one another.

Whatever launches them (`accelerate launch`, `torchrun`, `mpirun`), Accelerate tells them apart and places them. What
they make goes to the run's folder; between them travels nothing but what is left to do and who failed.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import distributed

T = TypeVar("T")

_SEVERAL = ("LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_ACCELERATE = "ACCELERATE_MIXED_PRECISION"
_DTYPES = {"no": None, "bf16": "bfloat16", "fp16": "float16"}
_FAILED = "failed"
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Processes:
    """The processes that share a run, as one of them sees it. Without arguments: a process on its own.

    What each of them must call, in the same order, is `together`, `from_main` and `wait`.

    Args:
        index: this one's number among `count`; number 0 is the main process.
        count: how many there are.
        device: where Accelerate places this one's model; None where it has no say.
        dtype: "bfloat16" or "float16" as Accelerate's mixed precision has it, else None.
        store: what they leave their words in: one of `torch.distributed`'s stores; None for a process on its own.
    """

    index: int = 0
    count: int = 1
    device: str | None = None
    dtype: str | None = None
    store: Any = None
    _steps: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

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
        with code 2), so that one message is all there is.
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
        """Does something in the main process alone, and gives what came out, a JSON value, to all."""
        value = None
        with self.together():
            if self.is_main:
                value = make()
        return self._gather(value)[0]

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Waits until each process has come here, for however long; ends with code 2 where one has given up.

        Args:
            meanwhile: called a few times a second.

        Raises:
            ChildProcessError: the main process is gone.
        """
        self._gather(None, meanwhile)

    def give_up(self) -> None:
        """Tells the others that this one has failed: who waits for it ends."""
        if self.store is not None:
            with suppress(RuntimeError):
                self.store.set(_FAILED, "")

    def _gather(self, value: Any, meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
        if self.count == 1:
            return [value]
        step = next(self._steps)
        said, seen = ([f"{word}/{step}/{index}" for index in range(self.count)] for word in ("said", "seen"))
        try:
            self.store.set(said[self.index], json.dumps(value))
            self._await(said, meanwhile)
            values = [json.loads(self.store.get(key)) for key in said]
            self.store.set(seen[self.index], "")
            if self.is_main:  # whose store it is: it must not leave before the others have read
                self._await(seen, meanwhile)
        except RuntimeError as error:
            raise ChildProcessError(
                "the main process ended before the others: see what it said; the same command goes on from there"
            ) from error
        return values

    def _await(self, keys: list[str], meanwhile: Callable[[], None]) -> None:
        while not self.store.check(keys):
            if self.store.check([_FAILED]):
                raise SystemExit(2)
            meanwhile()
            time.sleep(_LOOK_SECONDS)


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

    # gloo on a GPU too: hardly anything travels.
    accelerator = Accelerator(cpu=cpu, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if several else [])
    precision = accelerator.mixed_precision
    if precision not in _DTYPES:
        raise ValueError(f"mixed precision must be one of {', '.join(_DTYPES)}, got {precision!r}: choose one of them")
    index, count = accelerator.process_index, accelerator.num_processes
    store = _open_store(index, count) if count > 1 else None
    return Processes(index, count, str(accelerator.device), _DTYPES[precision], store)


def _open_store(index: int, count: int) -> distributed.Store:
    """Opens a store in the main process, for all, in place of the process group.

    In a process group memories would be calibrated on what all processes read, as is right where they train one
    model. Here each reads a text of its own.
    """
    host, ports = os.environ.get("MASTER_ADDR", "127.0.0.1"), [0] * count
    store = distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False) if index == 0 else None
    distributed.all_gather_object(ports, store.port if store is not None else 0)
    if store is None:
        store = distributed.TCPStore(host, ports[0], is_master=False, wait_for_workers=False)
    distributed.destroy_process_group()
    return store


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
