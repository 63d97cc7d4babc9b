"""The `locas` command: read or study a text, ask, generate, merge, inspect, evaluate.

Results go to stdout, progress and remarks to stderr. Exit codes: 0; 2 for bad input, with one line
on stderr; 130 for an interruption, 143 for a termination; 3 where documents of a table failed; 1
for other errors, with the traceback.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from traceback import walk_tb
from typing import Any, NoReturn

from cyclopts import App, CycloptsError, Parameter

from . import ended_at_once, handled
from .asking import ask, chat, generate
from .console import (
    find_process,
    open_missing_streams,
    printable,
    replace_unknown_characters,
)
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
)
from .stages import memorize, read, study

__all__ = ["app", "main"]

app = App(
    name="locas",
    help="A memory made of weights for language models: read a text, keep what was learned in a "
    "small file.",
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
_COMMANDS: tuple[Callable[..., Any], ...] = (
    demo,
    open_page,
    read,
    study,
    ask,
    chat,
    generate,
    library,
    forget,
    merge,
    export,
    resize,
    push,
    inspect,
)
_PROTOCOLS: tuple[Callable[..., Any], ...] = (perplexity, locomo, forgetting)
for _index, _function in enumerate(_COMMANDS):
    app.command(_function, sort_key=_index)
for _index, _function in enumerate(_PROTOCOLS):
    eval_app.command(_function, sort_key=_index)
app.command(eval_app)
app.command(memorize, show=False)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line on these arguments, or the process's, and end with its exit code."""

    def terminate(number: int, frame: Any) -> NoReturn:
        raise _Terminated

    open_missing_streams()
    replace_unknown_characters()
    if args is None:
        args = sys.argv[1:]
    with handled({signal.SIGTERM: terminate}):
        code = _run(list(args) or ["--help"])
    sys.exit(code)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as an exception that lets each `finally` run."""


def _run(args: list[str]) -> int:
    """Run one command and return the exit code."""
    index, _ = find_process()
    try:
        _check_processes(args)
        command, arguments, _ = app.parse_args(args, exit_on_error=False, print_error=False)
        # And not what prints help or the version.
        if command in (*_COMMANDS, *_PROTOCOLS):
            _import_package()
        code = command(*arguments.args, **arguments.kwargs)
        sys.stdout.flush()
        return code or 0
    except KeyboardInterrupt as error:
        terminated = isinstance(error, _Terminated)
        _print_error("terminated" if terminated else "interrupted", index)
        return 143 if terminated else 130
    except CycloptsError as error:
        chain = " ".join(("locas", *(error.command_chain or ())))
        _print_error(f"error: {printable(str(error)).rstrip('.')}: see {chain} --help", index)
        return 2
    except BrokenPipeError:
        _give_up_stdout()
        return 1
    except Exception as error:
        line = _explain(error)
        if line is None or os.environ.get("LOCAS_TRACEBACK"):
            raise
        _report(error, line, args, index)
        return 2


def _check_processes(args: list[str]) -> None:
    """Raise a `ValueError` where a launcher started several processes of a command for one."""
    _, count = find_process()
    names = [arg.partition("=")[0] for arg in args]
    shares = args[0] == "eval" or "--manifest" in names
    if count > 1 and not shares and not args[0].startswith("-"):
        can_share = "several processes can share locas eval, and read and study --manifest"
        remedy = f"start it without a launcher; {can_share}"
        raise ValueError(f"this command must run in one process, got {count}: {remedy}")


def _import_package() -> None:
    with ended_at_once():
        import locas_peft  # noqa: F401


def _report(error: Exception, line: str, args: list[str], index: int) -> None:
    """Print the line of an error that a user or the machine caused."""
    if isinstance(error, ValueError | TypeError):
        line = _name_options(line, args)
    # A ValueError is of an input that all processes share, unless it says otherwise: the first
    # process prints it.
    if isinstance(error, ValueError) and not getattr(error, "is_of_one_process", False):
        _print_error(f"error: {line}", index)
    else:
        where = f" in process {index}" if index else ""
        print(f"error{where}: {line}", file=sys.stderr)
    if isinstance(error, OSError):
        _give_up_stdout()


def _print_error(line: str, index: int) -> None:
    if index == 0:
        print(line, file=sys.stderr)


def _explain(error: Exception) -> str | None:
    """Return one line for an error of input or machine; None for a defect of the program."""
    from locas_peft.files import is_out_of_memory

    if is_out_of_memory(error):
        place = "device" if type(error).__name__ == "OutOfMemoryError" else "machine"
        remedy = "lower the width or the window, or choose another model, dtype or device"
        return f"the {place} is out of memory: {remedy}"
    if isinstance(error, OSError):
        return _explain_os_error(error)
    # A TypeError from elsewhere is a defect, not an input.
    *_, (frame, _) = walk_tb(error.__traceback__)
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    is_ours = package in ("locas_command", "locas_peft", "locas_settings")
    if isinstance(error, ValueError) or (isinstance(error, TypeError) and is_ours):
        return printable(str(error)) or type(error).__name__
    return None


def _explain_os_error(error: OSError) -> str:
    from locas_peft.files import is_disk_full

    name = repr(str(error.filename)) if error.filename else ""
    if is_disk_full(error):
        where = f" while writing {name}" if name else ""
        remedy = "free some space or choose another folder; nothing was left half-written"
        return f"the disk is full{where}: {remedy}"
    if name:
        remedy = "check the path and its permissions"
        return f"{name} cannot be read or written ({error.strerror}): {remedy}"
    return printable(error.strerror or str(error))


def _name_options(line: str, args: list[str]) -> str:
    """Return an error's line with the command's options in place of the settings' fields.

    Fields are the words with an underscore that the command's settings have, such as
    `learning_rate`. Words in quotes are the user's own. Fields of one word, such as `window`, are
    named as they are.
    """
    _, apps, _ = app.parse_commands(args)
    # An unknown command has none.
    if apps[-1].default_command is None:
        return line
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
    """Discard the rest of stdout's buffer if it cannot be written.

    Python would try again at its end.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
