"""One Markdown file with the tables and plots of runs of `locas eval`.

python benchmarks/report.py locas-eval other-run --out report.md
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import make_table
from plotting import label_axes, make_figure, pick_colours, save_figure, settled_points

from locas_peft.evaluation import tabulate_figures
from locas_peft.files import check_output_file, load_json, staged_file
from locas_peft.stages import METHODS
from locas_peft.tables import to_number

TITLES = {"locomo": "LoCoMo", "forgetting": "Forgetting", "perplexity": "Perplexity"}


def write_report(folders: Sequence[Path], path: Path) -> list[Path]:
    """Write one Markdown file with the tables and plots of all runs in some folders; the plots lie beside it.

    The plots are named after the Markdown file. Return the files
    that were written, the Markdown file first. Folders without figures of a protocol are a `ValueError`.
    """
    runs = [
        (folder, name)
        for folder in folders
        for name in TITLES
        if (folder / f"{name}.json").exists()
    ]
    if not runs:
        named = ", ".join(repr(str(folder)) for folder in folders)
        raise ValueError(
            f"folders must hold figures of locas eval, got none in {named}: run a study with --out first"
        )
    parts, plots = ["# What the memories hold and what they cost"], []
    for number, (folder, name) in enumerate(runs):
        figures, title = load_json(folder / f"{name}.json"), TITLES[name]
        sheets = tabulate_figures(figures)
        parts += [f"## {title}", _describe(figures)]
        parts += [
            f"**{sheet.title}**\n\n{make_table(sheet.headers, sheet.rows)}" for sheet in sheets
        ]
        picture = path.with_name(f"{path.stem}-{number}-{name}.png")
        figure, axes = make_figure()
        if name in DRAWN and DRAWN[name](figures, axes):
            save_figure(figure, picture)
            parts.append(f"![{title}]({picture.name})")
            plots.append(picture)
    with staged_file(path) as temporary:
        temporary.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return [path, *plots]


def _list_method_fields() -> set[str]:
    """Return the settings that not every method has."""
    fields: set[str] = set()
    for method in METHODS.values():
        fields.update(method.reading["paper"], method.study or ())
    return fields


def _describe_stage(settings: dict[str, Any]) -> str:
    """Return the part of the settings that all methods have: of a reading, or of a study."""
    if "stride" not in settings:
        return "study, window {window}".format_map(settings)
    return "window {window}, stride {stride}, {context}, readings {readings}".format_map(settings)


def _describe(figures: dict[str, Any]) -> str:
    """Return a paragraph with the model and the settings of a run."""
    windows = sorted({_describe_stage(settings) for settings in figures["methods"].values()})
    method_fields = _list_method_fields()
    parts = [f"Model {figures.get('model', 'unknown')}, {'; '.join(windows)}."]
    for method, settings in figures["methods"].items():
        if settings["method"] != "none":
            own = {
                name: value
                for name, value in settings.items()
                if name in method_fields and value is not None
            }
            parts.append(
                f"{method}: {', '.join(f'{n} {value}' for n, value in own.items()).replace('_', ' ')}."
            )
    if figures.get("conversations"):
        parts.append(f"Conversations {', '.join(figures['conversations'])}.")
    return " ".join([*parts, "In brackets 95% bootstrap intervals."])


def draw_perplexity(figures: dict[str, Any], axes: Any) -> bool:
    """Draw the perplexity so far against the tokens read, a line for each method and document."""
    dashes, colours = ("-", "--", ":", "-."), pick_colours(figures["readings"])
    for number, name in enumerate(figures["documents"]):
        for method, rows in figures["readings"].items():
            points = settled_points([(at, to_number(value)) for at, value in rows[name]["curve"]])
            if points:
                style = {"linestyle": dashes[number % len(dashes)], "color": colours[method]}
                axes.plot(*zip(*points, strict=True), label=f"{method}, {name}", **style)
    label_axes(axes, "tokens read", "perplexity so far")
    axes.legend(fontsize="small")
    return True


def draw_forgetting(figures: dict[str, Any], axes: Any) -> bool:
    """Draw each memory's gain on the book against its cost on unread texts."""
    memories, colours = figures["after"], pick_colours(figures["after"])
    if not figures["before"]["unread_perplexity"] or not memories:
        return False
    for name, found in memories.items():
        rises = [rise["mean"] for rise in found["unread_rise"].values()]
        point = found["book_gain"], sum(rises) / len(rises)
        axes.plot(*point, "o", label=name, color=colours[name])
        axes.annotate(name, point, xytext=(5, 5), textcoords="offset points")
    axes.plot(0, 0, "k+", label="base")  # the slope from here to a point is what its gain costs
    axes.margins(0.15)
    gain, loss = "perplexity gained while reading the book", "perplexity lost on unread text"
    label_axes(axes, gain, loss, "Gain against forgetting")
    return True


DRAWN = {"forgetting": draw_forgetting, "perplexity": draw_perplexity}
"""From a protocol to the function that draws its figures; it returns whether there was something to draw."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="each the --out of a command")
    parser.add_argument(
        "--out", type=Path, default=Path("report.md"), help="the plots lie beside it"
    )
    arguments = parser.parse_args()
    check_output_file("--out", arguments.out)
    print("Written:", *write_report(arguments.folders, arguments.out))


if __name__ == "__main__":
    main()
