"""The `locas` command: memorize a text, ask, generate, merge, inspect, evaluate.

Results go to stdout, progress and remarks to stderr. Exit codes: 0; 2 for bad input, with one line
on stderr; 130 for an interruption, 143 for a termination; 3 where documents of a table failed; 1
for other errors, with the traceback.
"""

import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from inspect import BoundArguments
from traceback import walk_tb
from typing import Any, NoReturn

from cyclopts import App, CycloptsError, Parameter

from . import ended_at_once, handled
from .asking import ask, chat, generate
from .console import find_process, printable
from .demo import app as open_page
from .demo import demo
from .evaluate import forgetting, locomo, perplexity
from .memories import (
    export,
    forget,
    inspect,
    library,
    merge,
    push,
    resize,
    sign,
    verify,
)
from .options import ReadingOptions
from .reading import memorize

__all__ = ["app", "main"]

app = App(
    name="locas",
    help=(
        "A memory made of weights for language models: "
        "read a text, keep what was learned in a small file."
    ),
    help_epilogue="LOCAS_TRACEBACK=1 shows the traceback behind an error's one line.",
    help_format="plaintext",
    version=lambda: version("locas_peft"),
    default_parameter=Parameter(negative="", allow_repeating=True),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
_ABOUT_EVAL = (
    "Measure memories: the protocols, resumable, shared by the processes of accelerate launch."
)
eval_app = App(name="eval", help=_ABOUT_EVAL, sort_key=10)
_COMMANDS = (
    demo,
    open_page,
    memorize,
    ask,
    chat,
    generate,
    library,
    forget,
    merge,
    export,
    resize,
    sign,
    verify,
    push,
    inspect,
)
_PROTOCOLS = (perplexity, locomo, forgetting)
for _index, _function in enumerate(_COMMANDS):
    app.command(_function, sort_key=_index)
for _index, _function in enumerate(_PROTOCOLS):
    eval_app.command(_function, sort_key=_index)
app.command(eval_app)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line on these arguments, or the process's, and end with its exit code."""

    def terminate(number: int, frame: Any) -> NoReturn:
        raise _Terminated

    with handled({signal.SIGTERM: terminate}):
        code = _run(list(sys.argv[1:] if args is None else args) or ["--help"])
    sys.exit(code)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as an exception that lets each `finally` run."""


def _run(args: list[str]) -> int:
    """Run one command and return the exit code."""
    index, _ = find_process()
    try:
        _check_processes(args)
        command, arguments, _ = app.parse_args(args, exit_on_error=False, print_error=False)
        # Help and the version are commands too, and import nothing.
        if command in _COMMANDS or command in _PROTOCOLS:
            _prepare(arguments)
        code = command(*arguments.args, **arguments.kwargs)
        sys.stdout.flush()
        return code or 0
    except _Terminated:
        _print_error("terminated", index)
        return 143
    except KeyboardInterrupt:
        _print_error("interrupted", index)
        return 130
    except CycloptsError as error:
        command = " ".join(("locas", *(error.command_chain or ())))
        _print_error(f"error: {printable(str(error)).rstrip('.')}: see {command} --help", index)
    except BrokenPipeError:
        _give_up_stdout()
        return 1
    except Exception as error:
        line = _explain(error)
        if line is None or os.environ.get("LOCAS_TRACEBACK"):
            raise
        if isinstance(error, ValueError):
            # An input that all processes share: one of them names it.
            _print_error(f"error: {line}", index)
        else:
            process = f" in process {index}" if index else ""
            print(f"error{process}: {line}", file=sys.stderr)
        if isinstance(error, OSError):
            _give_up_stdout()
    return 2


def _check_processes(args: list[str]) -> None:
    """Raise a `ValueError` for several processes of a command that runs in one."""
    _, count = find_process()
    shares = args[0] == "eval" or any(arg.partition("=")[0] == "--manifest" for arg in args)
    if count > 1 and not shares and not args[0].startswith("-"):
        raise ValueError(
            f"this command must run in one process, got {count}: start it without a launcher; "
            "several processes can share locas eval and memorize --manifest"
        )


def _prepare(arguments: BoundArguments) -> None:
    """Import the package, and check the settings of a reading before a base is loaded."""
    with ended_at_once():
        import locas_peft  # noqa: F401
    for options in arguments.kwargs.values():
        if isinstance(options, ReadingOptions):
            from locas_peft.reading import ReadingSettings

            ReadingSettings(**vars(options))


def _print_error(line: str, index: int) -> None:
    if index == 0:
        print(line, file=sys.stderr)


def _explain(error: Exception) -> str | None:
    """Return one line for an error that input or machine can cause; None for a defect."""
    from locas_peft.files import is_disk_full, is_out_of_memory

    if is_out_of_memory(error):
        place = "device" if type(error).__name__ == "OutOfMemoryError" else "machine"
        remedy = "lower the width or the window, or choose another model, dtype or device"
        return f"the {place} is out of memory: {remedy}"
    if isinstance(error, OSError):
        where = repr(str(error.filename)) if error.filename else ""
        if is_disk_full(error):
            while_writing = f" while writing {where}" if where else ""
            remedy = "free some space or choose another folder; nothing was left half-written"
            return f"the disk is full{while_writing}: {remedy}"
        if where:
            remedy = "check the path and its permissions"
            return f"{where} cannot be read or written ({error.strerror}): {remedy}"
        return printable(error.strerror or str(error))
    if isinstance(error, ValueError) or (isinstance(error, TypeError) and _is_raised_by_us(error)):
        return printable(str(error)) or type(error).__name__
    return None


def _is_raised_by_us(error: Exception) -> bool:
    """Return whether an error was raised in our modules: one from elsewhere may be a defect."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package in ("locas_command", "locas_peft")


def _give_up_stdout() -> None:
    """Discard stdout's buffer if it cannot be written: Python would try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
