"""Readings of one text side by side: a table, and a plot."""

from collections.abc import Sequence
from pathlib import Path

from ..plots import label_axes, make_figure, pick_colours, save_figure, settled_points
from ..tables import Sheet, format_count, format_figure
from .record import Reading

__all__ = ["plot_readings", "tabulate_readings"]


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
    """Draw the perplexity so far against the tokens read, a line for each reading of one text, into a PNG file.

    Errors are those of `plots.make_figure` and `plots.save_figure`.
    """
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
