"""The processes of one command: what each of them does, and where they wait for each other.

`accelerate launch` and `torchrun` start several. Without a launcher there is one.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, parse_flag_from_env

__all__ = ["in_first_process", "join_processes", "take_share", "wait_for_others"]

# Torch's own limit is half an hour, and a share can take that much longer than another one.
LONGEST_WAIT = timedelta(days=30)

T = TypeVar("T")


def join_processes() -> PartialState:
    """Join the processes that a launcher started, at the first call; return Accelerate's state."""
    # Accelerate joins processes without an accelerator only where it is told of the CPU.
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    return PartialState(cpu=on_cpu, timeout=LONGEST_WAIT)


def wait_for_others() -> None:
    """Wait until every process has come to this call."""
    join_processes().wait_for_everyone()


def in_first_process(function: Callable[[], T]) -> T:
    """Call a function in the first process; return its result, or raise its error, in all of them.

    Args:
        function: returns a value that can be pickled. Its `ValueError` or `OSError` is raised in
            every process.
    """
    state = join_processes()
    result: Any = None
    error: Exception | None = None
    if state.is_main_process:
        try:
            result = function()
        except (ValueError, OSError) as raised:
            error = raised
    if state.num_processes > 1:
        result, error = broadcast_object_list([result, error])
    if error is not None:
        raise error
    return result


def take_share(pieces: Sequence[T], size: Callable[[T], float]) -> list[T]:
    """Return the pieces that this process works on, in their order: of one process, all of them.

    Args:
        pieces: the same in every process.
        size: how long a piece takes, in any unit. The first process alone calls it, because it may
            depend on files that the others change at once. Shares have as many pieces as each
            other, and nearly the same size.
    """
    state = join_processes()
    if state.num_processes == 1:
        return list(pieces)

    def sort() -> list[int]:
        sizes = [size(piece) for piece in pieces]
        return sorted(range(len(pieces)), key=lambda index: -sizes[index])

    # Not by `split_between_processes`: of fewer pieces than processes, Accelerate 1.2 gives the
    # last one to several.
    largest_first = in_first_process(sort)
    share = largest_first[state.process_index :: state.num_processes]
    return [pieces[index] for index in sorted(share)]
