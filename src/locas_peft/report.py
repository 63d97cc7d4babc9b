"""Readings for people: a table, and a plot of the perplexity so far against the tokens read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .files import staged_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .methods import Reading

# One colour and dash a method, the same in every plot; a method without an entry takes what is left.
_LINES = {
    "none": ("#777777", "--"),
    "lora": ("#d9722e", "-"),
    "locas-glu": ("#1f6fb4", "-"),
    "locas-mlp": ("#2a8c5a", "-"),
}


def make_table(readings: Sequence[Reading], title: str | None = None) -> Table:
    """Puts readings of one text side by side, a row each.

    Time is relative to the reading with the method "none", where there is one to compare with.

    Args:
        readings: at least one.
        title: stands above the table.
    """
    table = Table(title=title)
    table.add_column("method")
    end = min(reading.curve[-1][0] for reading in readings)
    marks = sorted({mark for reading in readings for mark in reading.perplexity_at if int(mark) < end}, key=int)
    headers = ["r", "parameters", *(f"ppl at {_short(int(mark))}" for mark in marks), "perplexity", "time", "tokens/s"]
    for header in headers:
        table.add_column(header, justify="right")
    baseline = next((reading for reading in readings if reading.method == "none" and len(readings) > 1), None)
    best = min(reading.perplexity for reading in readings)
    for reading in readings:
        perplexity = f"{reading.perplexity:.2f}"
        table.add_row(
            reading.method,
            "-" if reading.settings.r is None else str(reading.settings.r),
            f"{reading.extra_parameters:,}",
            *(_number(reading.perplexity_at.get(mark)) for mark in marks),
            f"[bold]{perplexity}[/bold]" if len(readings) > 1 and reading.perplexity == best else perplexity,
            f"{reading.seconds / baseline.seconds:.2f}x"
            if baseline and baseline.seconds
            else f"{reading.seconds:.1f} s",
            f"{reading.tokens_per_second:,.0f}",
        )
    return table


def plot(readings: Sequence[Reading], path: str | Path, title: str | None = None) -> None:
    """Draws the perplexity so far against the tokens read, a line for each reading, into a PNG file.

    Args:
        readings: at least one, of one text.
        path: the file to be; replaced in one step.
        title: stands above the plot.

    Raises:
        ModuleNotFoundError: matplotlib, which comes with the extra `plot`, is not installed.
        OSError: the file cannot be written; one that was there is untouched.
    """
    figure, axes = make_figure()
    for reading in readings:
        colour, dash = _LINES.get(reading.method, (None, "-"))
        tokens, values = zip(*reading.curve, strict=True)
        name = reading.method if reading.settings.r is None else f"{reading.method}, r={reading.settings.r}"
        axes.plot(tokens, values, dash, color=colour, label=f"{name}: {reading.perplexity:.2f}")
    axes.set_yscale("log")
    axes.set_ylim(*_y_limits(readings))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(lambda value, _: _short(round(value)))
    axes.set_xlim(0, max(reading.curve[-1][0] for reading in readings))
    axes.set_xlabel("tokens read")
    axes.set_ylabel("perplexity so far")
    axes.grid(which="both", alpha=0.25)
    axes.legend()
    if title:
        axes.set_title(title)

    save_figure(figure, path)


def make_figure() -> tuple[Figure, Axes]:
    """Gives an empty figure of one plot, without a window system and without global state.

    Raises:
        ModuleNotFoundError: matplotlib, which comes with the extra `plot`, is not installed.
    """
    try:
        # The figure alone, not pyplot: no window system is asked for and no global state is left.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "matplotlib must be installed for plots: pip install matplotlib (or the extra 'plot' of locas_peft)"
        ) from None

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def save_figure(figure: Figure, path: str | Path) -> None:
    """Writes a figure as PNG, replacing the file in one step.

    Raises:
        OSError: the file cannot be written; one that was there is untouched.
    """
    with staged_file(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


def _y_limits(readings: Sequence[Reading]) -> tuple[float, float]:
    """Limits that leave out the first twentieth of the text, where few tokens make the perplexity jump."""
    values = [
        value
        for reading in readings
        for tokens, value in reading.curve
        if tokens >= reading.curve[-1][0] / 20 and math.isfinite(value)
    ]
    return (min(values) / 1.05, max(values) * 1.05) if values else (1.0, 10.0)


def make_memory_table(memory: dict[str, Any]) -> Table:
    """Puts the layers of a LOCAS memory into a table: width, tau, norms of its slots (mean and maximum), host slots.

    Args:
        memory: what `loading.describe_memory` returns, with at least one layer.
    """
    table = Table()
    table.add_column("FFN", overflow="fold")
    for header in ("r", "tau", "gate mean", "max", "up mean", "max", "down mean", "max"):
        table.add_column(header, justify="right")
    table.add_column("cloned from slots")
    for layer in memory["layers"]:
        norms = [_norm(layer[part], which) for part in ("gate", "up", "down") for which in ("mean", "max")]
        tau = "-" if layer["tau"] is None else f"{layer['tau']:.4g}"
        table.add_row(layer["name"], str(layer["r"]), tau, *norms, _list_slots(layer["slots"]))
    return table


def _norm(norms: dict[str, float] | None, which: str) -> str:
    return "-" if norms is None else f"{norms[which]:.3f}"


def _list_slots(slots: list[int] | None, shown: int = 4) -> str:
    if not slots:
        return "-"
    return ", ".join(map(str, slots[:shown])) + (f", ... ({len(slots)})" if len(slots) > shown else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _short(tokens: int) -> str:
    return f"{tokens / 1000:g}K" if tokens >= 1000 else str(tokens)
