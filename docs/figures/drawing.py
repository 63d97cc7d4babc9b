"""The style that the figures share: colours, boxes, arrows, and saving as SVG."""

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

__all__ = ["HOST", "INK", "MEMORY", "PALE_HOST", "PALE_MEMORY", "arrow", "box", "canvas", "save"]

INK, HOST, PALE_HOST, MEMORY, PALE_MEMORY = "#263238", "#607d8b", "#eceff1", "#d84315", "#fbe9e7"

matplotlib.use("svg")
# Text stays text, and a second run writes the same bytes.
plt.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "locas_peft",
        "font.family": "sans-serif",
        "font.size": 11,
    }
    | {
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
)


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of this size in inches, and axes over all of it whose unit is the inch."""
    figure = plt.figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str = "", **style
) -> None:
    """Draw a box with rounded corners, from its lower left corner; `style` is the patch's, `size` the text's."""
    size, colour = style.pop("size", 11), style.pop("color", INK)
    style = {"facecolor": PALE_HOST, "edgecolor": HOST, "linewidth": 1.2} | style
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.06", **style)
    )
    axes.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=colour
    )


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = INK, **style
) -> None:
    """Draw an arrow between two points."""
    style = {
        "arrowstyle": "-|>",
        "color": color,
        "linewidth": 1.4,
        "shrinkA": 0,
        "shrinkB": 0,
    } | style
    axes.annotate("", end, start, arrowprops=style)


def save(figure: Figure, name: str) -> None:
    """Write a figure to docs/images."""
    figure.savefig(Path(__file__).parents[1] / "images" / f"{name}.svg", metadata={"Date": None})
