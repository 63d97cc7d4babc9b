"""The `locas` command: memorize a text, ask, generate, merge, inspect, evaluate.

Results go to stdout, progress and remarks to stderr. Exit codes: 0; 2 for bad input, with one line on stderr; 130 for
an interruption, 143 for a termination; 3 where documents of a table failed; 1 for other errors, with the traceback.
"""

import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
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
    consolidate,
    export,
    forget,
    inspect,
    library,
    merge,
    push,
    resize,
)
from .options import ReadingOptions
from .reading import memorize

__all__ = ["app", "main"]

app = App(
    name="locas",
    help="A memory made of weights for language models: read a text, keep what was learned in a small file.",
    help_epilogue="LOCAS_TRACEBACK=1 shows the traceback behind an error's one line.",
    help_format="plaintext",
    version=lambda: version("locas_peft"),
    default_parameter=Parameter(negative="", allow_repeating=True),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
_ABOUT_EVAL = "Measure memories: the protocols, resumable, shared by any number of processes."
eval_app = App(name="eval", help=_ABOUT_EVAL, sort_key=10)
_COMMANDS = (
    *(demo, open_page, memorize, ask, chat, generate, library, forget, consolidate),
    *(merge, export, resize, push, inspect),
)
_PROTOCOLS = (perplexity, locomo, forgetting)
for _parent, _functions in ((app, _COMMANDS), (eval_app, _PROTOCOLS)):
    for _index, _function in enumerate(_functions):
        _parent.command(_function, sort_key=_index)
app.command(eval_app)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line on these arguments, or the process's, and end the process with its exit code."""

    def terminate(number: int, frame: Any) -> NoReturn:
        raise _Terminated

    with handled({signal.SIGTERM: terminate}):
        code = _run(list(sys.argv[1:] if args is None else args) or ["--help"])
    sys.exit(code)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as an exception that lets each `finally` run."""


def _run(args: list[str]) -> int:
    """Run one command and return the exit code."""
    index, count = find_process()
    try:
        shares = args[0] == "eval" or any(arg.partition("=")[0] == "--manifest" for arg in args)
        if count > 1 and not shares and not args[0].startswith("-"):
            remedy = "start it without a launcher; several processes can share locas eval and memorize --manifest"
            raise ValueError(f"this command must run in one process, got {count}: {remedy}")
        command, arguments, _ = app.parse_args(args, exit_on_error=False, print_error=False)
        if command in (*_COMMANDS, *_PROTOCOLS):  # and not what prints help or the version
            with ended_at_once():
                import locas_peft  # noqa: F401
            for options in arguments.kwargs.values():
                if isinstance(options, ReadingOptions):
                    from locas_peft.reading import ReadingSettings

                    ReadingSettings(**vars(options))  # for its checks, before a base is loaded
        code = command(*arguments.args, **arguments.kwargs)
        sys.stdout.flush()
        return code or 0
    except KeyboardInterrupt as error:
        terminated = isinstance(error, _Terminated)
        _print_error("terminated" if terminated else "interrupted", index)
        return 143 if terminated else 130
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
        if isinstance(error, ValueError | TypeError):
            line = _name_options(line, args)
        # A ValueError is of an input that all processes share: the first one prints it.
        if isinstance(error, ValueError):
            _print_error(f"error: {line}", index)
        else:
            where = f" in process {index}" if index else ""
            print(f"error{where}: {line}", file=sys.stderr)
        if isinstance(error, OSError):
            _give_up_stdout()
    return 2


def _print_error(line: str, index: int) -> None:
    if index == 0:
        print(line, file=sys.stderr)


def _explain(error: Exception) -> str | None:
    """Return one line for an error that input or machine can cause; None for a defect of the program."""
    from locas_peft.files import is_disk_full, is_out_of_memory

    if is_out_of_memory(error):
        place = "device" if type(error).__name__ == "OutOfMemoryError" else "machine"
        return f"the {place} is out of memory: lower the width or the window, or choose another model, dtype or device"
    if isinstance(error, OSError):
        where = repr(str(error.filename)) if error.filename else ""
        if is_disk_full(error):
            where = f" while writing {where}" if where else ""
            return f"the disk is full{where}: free some space or choose another folder; nothing was left half-written"
        if where:
            return f"{where} cannot be read or written ({error.strerror}): check the path and its permissions"
        return printable(error.strerror or str(error))
    *_, (frame, _) = walk_tb(
        error.__traceback__
    )  # a TypeError from elsewhere is a defect, not an input
    ours = frame.f_globals.get("__name__", "").partition(".")[0] in ("locas_command", "locas_peft")
    known = isinstance(error, ValueError) or (isinstance(error, TypeError) and ours)
    return printable(str(error)) or type(error).__name__ if known else None


def _name_options(line: str, args: list[str]) -> str:
    """Return an error's line with the command's options in place of the settings' fields, such as `learning_rate`.

    These are the words of the line with an underscore that are fields of the command's settings. Words in quotes are
    the user's own. Fields of one word, such as `window`, are named as they are.
    """
    _, apps, _ = app.parse_commands(args)
    options = {}
    for argument in apps[-1].assemble_argument_collection():
        field = argument.field_info.name
        if "_" in field and argument.name.startswith("--"):
            options[field] = argument.name
    return re.sub(
        r"(?<![\w'\"./-])[a-z]+(?:_[a-z]+)+(?![\w'\"./-])",
        lambda match: options.get(match[0], match[0]),
        line,
    )


def _give_up_stdout() -> None:
    """Discard the rest of stdout's buffer if it cannot be written: Python would try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
