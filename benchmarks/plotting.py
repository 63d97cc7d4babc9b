"""What the plots of the benchmarks share: figures without a window, their labels and colours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from locas_peft.checks import import_extra
from locas_peft.files import staged_file

GREY = "#777777"


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
