"""Progress on the terminal: a line for each task, with its bar, its share, what it tells and the time left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from ..studies.progress import Advance, Start


@contextmanager
def show_progress(console: Console) -> Iterator[Start]:
    """Gives what opens a line (see `studies.progress.Start`). Nothing is shown before the first step is done.

    Args:
        console: where the lines are shown; a quiet one shows none.
    """
    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=console, disable=console.quiet)

    def start(description: str, total: int) -> Advance:
        task = progress.add_task(description, total=total, visible=False, note="")

        def advance(steps: int, note: str = "") -> None:
            progress.start()  # not before: an error that comes first needs no empty line above
            progress.update(task, advance=steps, visible=True, **({"note": note} if note else {}))

        return advance

    try:
        yield start
    finally:
        if progress.live.is_started:
            progress.stop()
