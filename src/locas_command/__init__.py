"""The `locas` command. It is beside `locas_peft`, whose import takes seconds, so that help is printed at once.

At their top, the modules of this package import neither torch nor `locas_peft`, but for `running`. A command imports
what it needs when it runs.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["main"]

_LINES = {signal.SIGINT: b"interrupted\n", signal.SIGTERM: b"terminated\n"}


def main() -> NoReturn:
    """Import the command line and run it. The process ends with its exit code."""
    with ended_at_once():
        from .program import main
    main()


@contextmanager
def ended_at_once() -> Iterator[None]:
    """End the process with one line on Ctrl-C or SIGTERM within the context, in which modules are imported."""
    if threading.current_thread() is not threading.main_thread():  # only there are signals handled
        yield
        return
    former = {number: signal.getsignal(number) for number in _LINES}
    for number, handler in former.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    # No exception: code that is being imported could catch it, or report it as an import that failed.
    os.write(2, _LINES[signal.Signals(number)])
    os._exit(128 + number)
