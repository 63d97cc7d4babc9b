"""What every command has: its app, one line for foreseeable errors, two consoles, and JSON where it is asked for."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from .options import spread

_LAUNCHERS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))

app = typer.Typer(
    name="locas",
    help="A memory made of weights for language models: read a text, keep what was learned in a small file.",
    epilog="LOCAS_TRACEBACK=1 shows the traceback behind an error's one line.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and leaves the process with its exit code.

    Args:
        args: the arguments; the process's own where None.
    """
    given = list(sys.argv[1:] if args is None else args)
    usage_error = typer.BadParameter.__base__
    try:
        code = app(args=given or ["--help"], prog_name="locas", standalone_mode=False)
    except usage_error as error:
        place = "locas" if error.ctx is None else error.ctx.command_path
        if _place()[0] == 0:  # the others were given the same words
            print(f"error: {_one_line(error.format_message()).rstrip('.')}: see {place} --help", file=sys.stderr)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)


def command(several: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a command: its groups of options are spread, and its foreseeable errors are one line.

    Those end with exit code 2, an interruption with 130.

    Args:
        several: whether several processes (of `accelerate launch`, say) can share its work. Else they are refused.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> None:
            index, count = _place()
            try:
                if count > 1 and not several:
                    if index:
                        raise typer.Exit(2)
                    raise ValueError(
                        f"this command must run in one process, got {count}: start it without a launcher; "
                        "what several can share is locas eval"
                    )
                function(*args, **options)
                sys.stdout.flush()
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                raise typer.Exit(130) from None
            except Exception as error:
                line = _explain(error)
                if line is None or os.environ.get("LOCAS_TRACEBACK"):
                    raise
                print(f"error in process {index}: {line}" if index else f"error: {line}", file=sys.stderr)
                if isinstance(error, OSError):
                    _give_up_stdout()
                raise typer.Exit(2) from None

        return spread(run)

    return decorate


def make_consoles(json_file: Path | None) -> tuple[Console, Console]:
    """Gives the consoles of results and of remarks; both are stderr where stdout is for JSON.

    Of several processes all but the first have quiet ones.
    """
    quiet = _place()[0] > 0

    def make(stream: Any) -> Console:
        # A pipe or a file has no width: 80 columns would cut tables off.
        width = None if stream.isatty() else 120
        return Console(file=stream, width=width, highlight=False, soft_wrap=True, quiet=quiet)

    stderr = make(sys.stderr)
    return (stderr if str(json_file) == "-" else make(sys.stdout)), stderr


def quieten() -> None:
    """Silences transformers' own bars and remarks: the command has its own."""
    from transformers.utils import logging

    # Announcements between libraries are nothing that the user of a command can act on.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def check_json_file(json_file: Path | None) -> None:
    from ..files import check_output_file

    if json_file is not None and str(json_file) != "-":
        check_output_file("--json", json_file)


def write_result(json_file: Path | None, value: Any, stderr: Console) -> None:
    from ..files import format_json, write_json

    if json_file is None:
        return
    if str(json_file) == "-":
        print(format_json(value))
    else:
        write_json(json_file, value)


def _place() -> tuple[int, int]:
    """Gives this process's number and how many there are, as `torchrun`, Accelerate or MPI have it."""
    for index, count in _LAUNCHERS:
        if count in os.environ:
            return int(os.environ.get(index, 0)), int(os.environ[count])
    return 0, 1


def _explain(error: Exception) -> str | None:
    """Gives the one line for an error that input or machine can cause, or None for one that nobody foresaw."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return "the device is out of memory: lower --window, or choose another --dtype or --device"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        return "the machine is out of memory: lower --r or --window, or choose another --dtype"
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        from ..files import is_disk_full

        if is_disk_full(error) and error.strerror:
            where = f" while writing {error.filename}" if error.filename else ""
            return f"the disk is full{where}: free some space or choose another folder; nothing was left half-written"
        return _one_line(str(error))
    if isinstance(error, ValueError) or (isinstance(error, TypeError) and _is_ours(error)):
        return _one_line(str(error)) or type(error).__name__
    return None


def _give_up_stdout() -> None:
    """Sends what is left in stdout's buffer to nowhere where it cannot be written: Python would try once more."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_ours(error: Exception) -> bool:
    """Says whether an error was raised in this package: a TypeError from elsewhere is a defect, not an input."""
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    return Path(frame.tb_frame.f_code.co_filename).is_relative_to(Path(__file__).parents[1])


def _one_line(message: str) -> str:
    return " ".join(message.split())
