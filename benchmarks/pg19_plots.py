"""The plots of the PG-19 tables: perplexity against tokens read and against parameters, gain against forgetting."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locas_peft.evaluation.perplexity import perplexity
from locas_peft.report import make_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Readings = list[dict[str, Any]]
COLORS = ("blue", "orange", "green", "red", "purple", "brown", "pink", "gray", "olive", "cyan")


def draw(tables: dict[str, dict[str, Any]], out: Path) -> list[Path]:
    """Draws what the tables have readings for, as PNG files.

    Args:
        tables: by name; each with its `readings`.
        out: the folder.

    Returns:
        The files that were written.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    headline = tables.get("headline", {}).get("readings", [])
    width = tables.get("width", {}).get("readings", [])
    curves = tables.get("curves", {}).get("readings", [])
    written = []
    for document in dict.fromkeys(value["document"] for value in headline):
        own = [value for value in headline if value["document"] == document]
        written.append(_save(out / f"perplexity-{document}.png", own, _draw_tokens))
    if width:
        written.append(_save(out / "perplexity-parameters.png", width, _draw_parameters))
    if len(curves) > 1:
        written.append(_save(out / "gain-forgetting.png", curves, _draw_forgetting))
    return written


def _save(path: Path, readings: Readings, draw_into: Callable[[Axes, Readings], None]) -> Path:
    figure, axes = make_figure()
    # Ten colours, then the same again with other lines and marks: no two rows look alike.
    colors = [f"tab:{name}" for name in COLORS]
    axes.set_prop_cycle(color=colors * 2, linestyle=["-"] * 10 + [":"] * 10, marker=["o"] * 10 + ["s"] * 10)
    draw_into(axes, readings)
    axes.grid(alpha=0.25)
    if len(axes.get_lines()) > 4:
        figure.legend(fontsize=7, loc="outside right upper")
    else:
        axes.legend(fontsize=8)
    save_figure(figure, path)
    return path


def _draw_tokens(axes: Axes, readings: Readings) -> None:
    for value in readings:
        stops, counts, losses = value["chunks"][0::3], value["chunks"][1::3], value["chunks"][2::3]
        points, tokens, nll_nats = [], 0, 0.0
        for stop, count, loss in zip(stops, counts, losses, strict=True):
            tokens, nll_nats = tokens + count, nll_nats + loss
            if stop >= stops[-1] / 20:  # before that few tokens make it jump
                points.append((stop, perplexity(nll_nats, tokens)))
        label = f"{value['row']}: {value['perplexity']:.2f}"
        axes.plot(*zip(*points, strict=True), label=label, linewidth=1.2, marker="")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.set_title(f"book {readings[0]['document']}")
    axes.set_xlabel("tokens read")
    axes.set_ylabel("perplexity so far")


def _draw_parameters(axes: Axes, readings: Readings) -> None:
    for method in dict.fromkeys(value["method"] for value in readings):
        own = sorted(
            (value["extra_parameters"], value["perplexity"]) for value in readings if value["method"] == method
        )
        if method == "none":
            axes.axhline(own[0][1], color="#777777", linestyle="--", label="none")
        else:
            axes.plot(*zip(*own, strict=True), label=method)
    axes.set_xscale("log")
    axes.set_title(f"book {readings[0]['document']}, {readings[0]['tokens_read']:,} tokens")
    axes.set_xlabel("extra parameters")
    axes.set_ylabel("perplexity")


def _draw_forgetting(axes: Axes, readings: Readings) -> None:
    before = next((value for value in readings if value["method"] == "none"), None)
    level = 0.0 if before is None else statistics.fmean(before["unread"].values())
    lines: dict[str, list[tuple[float, float]]] = {}
    for value in readings:
        if value is not before:
            rise = statistics.fmean(value["unread"].values()) - level
            lines.setdefault(value["row"].rpartition(", lr ")[0], []).append((value["perplexity"], rise))
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=name)
    axes.set_title(
        f"book {readings[0]['document']} read, {readings[0]['tokens_read']:,} tokens; learning rates joined"
    )
    axes.set_xlabel("perplexity while reading")
    axes.set_ylabel("rise of the perplexity of unread books")
