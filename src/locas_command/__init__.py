"""The `locas` command.

It is beside `locas_peft`, whose import takes seconds, so that help is printed at once.
At their top, the modules of this package import neither torch nor `locas_peft`, but for `running`.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

__all__ = ["main"]

_LINES = {signal.SIGINT: b"interrupted\n", signal.SIGTERM: b"terminated\n"}


def main() -> NoReturn:
    """Import the command line and run it. The process ends with its exit code."""
    with ended_at_once():
        from .program import main
    main()


@contextmanager
def handled(handlers: Mapping[int, Callable[[int, Any], None]]) -> Iterator[dict[int, Any]]:
    """Handle signals within the context, unless they are ignored; yield the former handlers."""
    former = {}
    # Signals are handled in the main thread alone.
    if threading.current_thread() is threading.main_thread():
        former = {number: signal.getsignal(number) for number in handlers}
    try:
        for number, handler in former.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, handlers[number])
        yield former
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def ended_at_once() -> AbstractContextManager:
    """End the process with one line on Ctrl-C or SIGTERM, while modules are imported."""

    def end(number: int, frame: Any) -> NoReturn:
        # No exception: code that is imported could catch it, or report a failed import.
        os.write(2, _LINES[signal.Signals(number)])
        os._exit(128 + number)

    return handled(dict.fromkeys(_LINES, end))
