"""The `locas` command. Ctrl-C and SIGTERM end it with one line while `locas_peft` is imported.

It is beside `locas_peft` because importing any module of that package imports torch first, which takes seconds.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

__all__ = ["main"]

_LINES = {signal.SIGINT: b"interrupted\n", signal.SIGTERM: b"terminated\n"}


def main() -> NoReturn:
    """Import the command line and run it. The process ends with its exit code."""
    former = {number: signal.getsignal(number) for number in _LINES}
    for number, handler in former.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, _end)
    from .program import main

    for number, handler in former.items():
        signal.signal(number, handler)
    main()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    # No exception: code that is being imported could catch it, or report it as an import that failed.
    os.write(2, _LINES[signal.Signals(number)])
    os._exit(128 + number)
