"""The tables and plots of protocols' figures, and one Markdown file with those of several runs.

Each protocol's module has its `NAME` and `TITLE`, `tabulate(figures)`, which returns its tables, and
`draw(figures, axes)`, with axes of matplotlib, which returns whether there was something to draw.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..files import load_json, staged_file
from ..plots import make_figure, save_figure
from ..reading.methods import METHOD_FIELDS
from ..tables import Sheet
from . import forgetting, locomo, perplexity

__all__ = ["PROTOCOLS", "tabulate_figures", "write_report"]

PROTOCOLS = {module.NAME: module for module in (locomo, forgetting, perplexity)}


def tabulate_figures(figures: dict[str, Any]) -> list[Sheet]:
    """Return the tables of a protocol's figures (`perplexity.json`, `locomo.json`, `forgetting.json`)."""
    return [sheet for sheet in PROTOCOLS[figures["study"]].tabulate(figures) if sheet.rows]


def write_report(folders: Sequence[Path], path: Path, remark: Callable[[str], None] = lambda line: None) -> list[Path]:
    """Write one Markdown file with the tables and plots of all runs in some folders; the plots lie beside it.

    The plots are named after the Markdown file; `remark` is called with a line for what is left out. Return the files
    that were written, the Markdown file first. Folders without figures of a protocol are a `ValueError`.
    """
    runs = [(folder, name) for folder in folders for name in PROTOCOLS if (folder / f"{name}.json").exists()]
    if not runs:
        named = ", ".join(repr(str(folder)) for folder in folders)
        raise ValueError(f"folders must hold figures of locas eval, got none in {named}: run a study with --out first")
    parts, plots = ["# What the memories hold and what they cost"], []
    for number, (folder, name) in enumerate(runs):
        figures, protocol = load_json(folder / f"{name}.json"), PROTOCOLS[name]
        sheets = tabulate_figures(figures)
        parts += [f"## {protocol.TITLE}", _describe(figures), *(sheet.to_markdown() for sheet in sheets)]
        picture = path.with_name(f"{path.stem}-{number}-{name}.png")
        try:
            figure, axes = make_figure()
            if protocol.draw(figures, axes):
                save_figure(figure, picture)
                parts.append(f"![{protocol.TITLE}]({picture.name})")
                plots.append(picture)
        except ModuleNotFoundError as error:
            remark(f"no plot: {error}")
    with staged_file(path) as temporary:
        temporary.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return [path, *plots]


def _describe(figures: dict[str, Any]) -> str:
    """Return a paragraph with the model and the settings of a run."""
    form = "window {window}, stride {stride}, {context}, epochs {epochs}, readings {readings}"
    windows = sorted({form.format_map(settings) for settings in figures["methods"].values()})
    parts = [f"Model {figures.get('model', 'unknown')}, {'; '.join(windows)}."]
    for method, settings in figures["methods"].items():
        if settings["method"] != "none":
            own = {name: value for name, value in settings.items() if name in METHOD_FIELDS and value is not None}
            parts.append(f"{method}: {', '.join(f'{n} {value}' for n, value in own.items()).replace('_', ' ')}.")
    if figures.get("conversations"):
        parts.append(f"Conversations {', '.join(figures['conversations'])}.")
    return " ".join([*parts, "In brackets 95% bootstrap intervals."])
