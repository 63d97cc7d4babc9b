"""The terminal of a command: results, remarks, progress, JSON, and the processes that share it."""

import logging
import os
import signal
import sys
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn

from . import handled

PLAIN_SECONDS = 30.0
# Error handlers of a stream that raise an error. The second one is that of stdout in some locales.
_RAISING = ("strict", "surrogateescape")
# What a launcher tells its processes: Accelerate and torchrun, and two kinds of MPI.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def open_missing_streams() -> None:
    """Open the null device for standard streams that are closed, as those of a daemon may be."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def replace_unknown_characters() -> None:
    """Let stdout and stderr replace a character that their encoding lacks, where it is an error.

    A pipe, an old terminal and PYTHONIOENCODING can have any encoding.
    """
    for stream in (sys.stdout, sys.stderr):
        # Streams of a notebook or a test need not have an encoding.
        if getattr(stream, "errors", None) in _RAISING and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def open_consoles(json_file: Path | None = None) -> tuple[Console, Console]:
    """Return the consoles of results and of remarks; both are stderr where --json prints to stdout.

    Of several processes all but the first have quiet ones. Texts are printed as they are, never as
    markup.
    """
    if json_file is not None and str(json_file) != "-":
        _check_json_file(json_file)
    stderr = _make_console(sys.stderr)
    stdout = stderr if str(json_file) == "-" else _make_console(sys.stdout)
    return stdout, stderr


def _check_json_file(file: Path) -> None:
    """Raise a `ValueError` for a file that cannot be written, or that should not be replaced."""
    from locas_peft.files import check_output_file, load_json
    from locas_peft.memories.folder import MEMORY_CONFIG

    check_output_file("--json", file)
    if (file.parent / MEMORY_CONFIG).exists():
        rule = "--json must lie outside the folder of a memory"
        raise ValueError(f"{rule}, got {str(file)!r}: name a file elsewhere")
    if not file.exists() or not file.stat().st_size:
        return
    refusal = ValueError(
        f"--json must be a new file or one of JSON, got {str(file)!r}: name another"
    )
    # A line of JSON is a question, an exchange or a row of a table.
    if file.suffix.lower() == ".jsonl":
        raise refusal
    try:
        load_json(file)
    except ValueError:
        raise refusal from None


def _make_console(stream: Any) -> Console:
    index, _ = find_process()
    # The default width of a pipe or a file, 80, would cut tables.
    width = None if stream.isatty() else 120
    return Console(
        file=stream,
        width=width,
        quiet=index > 0,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
    )


class ProgressLines:
    """Opens lines of progress (see `locas_peft.progress.Progress`), shown after their first step.

    On a terminal they are bars. Elsewhere a plain line is printed at each one's end and, in
    between, about every `PLAIN_SECONDS`, with the time that is left at the speed since the line
    before. On a quiet console there are none.
    """

    def __init__(self, console: Console) -> None:
        columns = (*Progress.get_default_columns(), TextColumn("{task.fields[note]}", markup=False))
        self._console = console
        self._bars = Progress(
            *columns, console=console, disable=console.quiet or not console.is_terminal
        )
        self._printed = time.monotonic()

    def __call__(self, description: str, total: int) -> Callable[..., None]:
        task = self._bars.add_task(description, total=total, visible=False, note="")
        done = 0
        latest = ""
        # When the line before was printed, or the first step was done, and what was done then.
        before: tuple[float, int] | None = None

        def advance(steps: int, note: str = "") -> None:
            nonlocal done, latest, before
            now = time.monotonic()
            done += steps
            latest = note or latest
            # Not earlier: an error before the first step needs no empty line above it.
            self._bars.start()
            self._bars.update(task, completed=done, visible=True, note=latest)
            is_due = done >= total or now > self._printed + PLAIN_SECONDS
            if is_due and not self._console.is_terminal:
                parts = [latest]
                if before and before[1] < done < total:
                    seconds = (now - before[0]) * (total - done) / (done - before[1])
                    parts.append(_describe_left(seconds))
                self._printed = now
                before = (now, done)
                share = done / max(total, 1)
                text = ", ".join(filter(None, parts))
                self._console.print(f"{description:10} {share:4.0%} {text}".rstrip())
            elif before is None:
                before = (now, done)

        return advance

    def close(self) -> None:
        """Leave the lines as they are and forget them, so that more can be printed below."""
        if self._bars.live.is_started:
            self._bars.stop()
        for task in self._bars.task_ids:
            self._bars.remove_task(task)


def _describe_left(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left"


def show_progress(console: Console) -> closing[ProgressLines]:
    """Return a context that yields `ProgressLines` and closes them at its end."""
    return closing(ProgressLines(console))


@contextmanager
def deferring_signals(console: Console) -> Iterator[Callable[[], None]]:
    """Yield a function that ends the command where Ctrl-C or SIGTERM came meanwhile.

    A second signal ends it at once. A state that is saved between two steps is whole; within a step
    it is not.
    """
    received: list[int] = []

    def end(number: int) -> None:
        signal.signal(number, former[number])
        signal.raise_signal(number)

    def keep(number: int, frame: Any) -> None:
        if received:
            end(number)
        received.append(number)
        console.print("stopping after this step")

    def check() -> None:
        if received:
            end(received[0])

    with handled({signal.SIGINT: keep, signal.SIGTERM: keep}) as former:
        yield check


def write_result(json_file: Path | None, value: Any) -> None:
    """Write what --json asks for: nothing where None, to stdout for "-".

    Of several processes the first one writes.
    """
    from locas_peft.files import format_json, write_json

    index, _ = find_process()
    if index > 0:
        return
    if str(json_file) == "-":
        print(format_json(value, sys.stdout.encoding or "utf-8"))
    elif json_file is not None:
        write_json(json_file, value)


def find_process() -> tuple[int, int]:
    """Return this process's index and the number of processes, from a launcher's variables.

    Torch, which knows them too, is imported later.
    """
    for index, count in _LAUNCHERS:
        if count in os.environ:
            return int(os.environ.get(index, 0)), int(os.environ[count])
    return 0, 1


def check_shared_device(device: str) -> None:
    """Raise a `ValueError` for one device of several processes: a launcher gives each its own."""
    _, count = find_process()
    if count > 1 and device not in ("auto", "cpu"):
        raise ValueError(
            f"--device must be auto or cpu for {count} processes, got {device!r}: leave it out"
        )


def show_own_remarks() -> None:
    """Print what our modules log from INFO on; hide what transformers prints, and deprecations."""
    from transformers.utils import logging as transformers_logging

    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logger = logging.getLogger("locas_peft")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _Remarks) for handler in logger.handlers):
        logger.addHandler(_Remarks())


class _Remarks(logging.Handler):
    """Prints each message on the console of remarks, on the stderr of that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        _make_console(sys.stderr).print(printable(record.getMessage()))


def printable(text: str) -> str:
    """Return a text on one line, with control characters and lone surrogates escaped."""
    return _escape(" ".join(text.split()), lambda character: not character.isprintable())


def without_controls(text: str) -> str:
    """Return a text with its control characters escaped, but line breaks and tabs.

    A model's words may hold those that move a terminal's cursor or clear it.
    """

    def is_control(character: str) -> bool:
        return unicodedata.category(character) == "Cc" and character not in "\n\t"

    return _escape(text, is_control)


def _escape(text: str, is_escaped: Callable[[str], bool]) -> str:
    """Return a text with some of its characters as in a Python literal."""
    characters = []
    for character in text:
        characters.append(repr(character)[1:-1] if is_escaped(character) else character)
    return "".join(characters)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print the warnings of the block to stderr when it ends, one line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    _, stderr = open_consoles()
    for warning in caught:
        stderr.print(f"warning: {printable(str(warning.message))}")
