"""Readings of one text side by side: a table, and a plot; matplotlib comes with the extra `plot`."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..checks import import_extra
from ..files import staged_file
from ..tables import Sheet, format_count, format_figure
from .record import Reading

__all__ = ["GREY", "label_axes", "make_figure", "pick_colours", "plot_readings", "save_figure", "settled_points"]
__all__ += ["tabulate_readings"]

GREY = "#777777"


def tabulate_readings(readings: Sequence[Reading], title: str = "") -> Sheet:
    """Return the readings of one text, at least one, side by side, a row each.

    Time is relative to the reading with the method "none", where there are others to compare it with.
    """
    end = min(reading.curve[-1][0] for reading in readings)
    marks = sorted({mark for reading in readings for mark in reading.perplexity_at if int(mark) < end}, key=int)
    alone = next((each.seconds for each in readings if each.method == "none" and len(readings) > 1), 0.0)
    best = min(range(len(readings)), key=lambda row: readings[row].perplexity)
    rows = [
        [
            reading.method,
            "-" if reading.settings.method.r is None else str(reading.settings.method.r),
            f"{reading.extra_parameters:,}",
            *(format_figure(reading.perplexity_at.get(mark)) for mark in marks),
            f"{reading.perplexity:.2f}",
            f"{reading.seconds / alone:.2f}x" if alone else f"{reading.seconds:.1f} s",
            f"{reading.tokens_per_second:,.0f}",
        ]
        for reading in readings
    ]
    at_marks = [f"ppl at {format_count(int(mark))}" for mark in marks]
    headers = ["method", "r", "parameters", *at_marks, "perplexity", "time", "tokens/s"]
    if any(reading.taken_back for reading in readings):
        headers.append("taken back")
        for row, reading in zip(rows, readings, strict=True):
            row.append(f"{len(reading.taken_back)} times" if reading.taken_back else "-")
    return Sheet(title, headers, rows, (best, headers.index("perplexity")) if len(readings) > 1 else None)


def plot_readings(readings: Sequence[Reading], path: str | Path, title: str = "") -> None:
    """Draw the perplexity so far against the tokens read, a line for each reading of one text, into a PNG file."""
    figure, axes = make_figure()
    widths = [reading.settings.method.r for reading in readings]
    names = [one.method if r is None else f"{one.method}, r={r}" for one, r in zip(readings, widths, strict=True)]
    colours = pick_colours(names)
    for name, reading in zip(names, readings, strict=True):
        dash = "--" if reading.method == "none" else "-"
        label = f"{name}: {reading.perplexity:.2f}"
        axes.plot(*zip(*reading.curve, strict=True), dash, color=colours[name], label=label)
    values = [value for reading in readings for _, value in settled_points(reading.curve)]
    axes.set_yscale("log")
    axes.set_ylim(*((min(values) / 1.05, max(values) * 1.05) if values else (1.0, 10.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.xaxis.set_major_formatter(lambda value, _: format_count(round(value)))
    axes.set_xlim(0, max(reading.curve[-1][0] for reading in readings))
    label_axes(axes, "tokens read", "perplexity so far", title)
    axes.legend()
    save_figure(figure, path)


def make_figure() -> tuple[Any, Any]:
    """Return an empty figure of one plot, without a window system and without global state."""
    options = {"figsize": (8, 4.5), "dpi": 120, "layout": "constrained"}
    figure = import_extra("matplotlib.figure", "plot", "a plot").Figure(**options)
    return figure, figure.add_subplot()


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure as PNG, replacing the file in one step; an `OSError` leaves the one that was there."""
    with staged_file(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


def label_axes(axes: Any, x: str, y: str, title: str = "") -> None:
    """Label a plot's axes and draw its grid."""
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(which="both", alpha=0.25)


def pick_colours(methods: Iterable[str]) -> dict[str, str]:
    """Return a colour for each method: grey for "none", and those of matplotlib's cycle, in order, for the others."""
    others = (method for method in dict.fromkeys(methods) if method != "none")
    return {"none": GREY, **{method: f"C{number}" for number, method in enumerate(others)}}


def settled_points(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the finite points of a curve without the first twentieth of the text, where few tokens were scored."""
    return [(at, value) for at, value in curve if at >= curve[-1][0] / 20 and math.isfinite(value)]
