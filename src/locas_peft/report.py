"""Tables and plots of readings, memories and studies, for the terminal and for a Markdown file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from .evaluation.f1 import CATEGORIES
from .files import load_json, staged_file
from .reading.settings import METHOD_FIELDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .reading.record import Reading

__all__ = [
    "Sheet",
    "make_figure",
    "plot_readings",
    "save_figure",
    "tabulate_memory",
    "tabulate_readings",
    "tabulate_study",
    "write_report",
]

# Each method has the same colour in every plot; another one takes the next colour of matplotlib's.
_COLOURS = {"none": "#777777", "lora": "#d9722e", "locas-glu": "#1f6fb4", "locas-mlp": "#2a8c5a"}
_RIGHT, _WRONG = _COLOURS["locas-glu"], _COLOURS["none"]


@dataclass(frozen=True)
class Sheet:
    """A table of texts; the first column is left-aligned, the others right-aligned; the cell `best` is bold."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: tuple[int, int] | None = None

    def to_rich(self) -> Table:
        """Return the table for a rich console."""
        table = Table(title=Text(self.title) if self.title else None, title_justify="left")
        widest = max((len(row[0]) for row in self.rows), default=0)
        for number, header in enumerate(self.headers):
            least = None if number else min(widest, 40)  # the other columns wrap first
            table.add_column(Text(header), justify="right" if number else "left", overflow="fold", min_width=least)
        for row, cells in enumerate(self.rows):
            bold = [self.best == (row, column) for column in range(len(cells))]
            table.add_row(*(Text(cell, style="bold" if b else "") for cell, b in zip(cells, bold, strict=True)))
        return table

    def to_markdown(self) -> str:
        """Return the table as Markdown, under its title."""
        rule = "|".join(["---"] + ["---:"] * (len(self.headers) - 1))
        rows = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in (self.headers, *self.rows)]
        return "\n".join([f"**{self.title}**", "", rows[0], f"|{rule}|", *rows[1:]])


# ---------------------------------------------------------------------- readings and memories


def tabulate_readings(readings: Sequence[Reading], title: str = "") -> Sheet:
    """Return the readings of one text, at least one, side by side, a row each.

    Time is relative to the reading with the method "none", where there are others to compare it with. How often the
    brake took an adapter back is a column where it happened.
    """
    end = min(reading.curve[-1][0] for reading in readings)
    marks = sorted({mark for reading in readings for mark in reading.perplexity_at if int(mark) < end}, key=int)
    baseline = next((reading for reading in readings if reading.method == "none" and len(readings) > 1), None)
    best = min(range(len(readings)), key=lambda row: readings[row].perplexity)

    def time(reading: Reading) -> str:
        if baseline and baseline.seconds:
            return f"{reading.seconds / baseline.seconds:.2f}x"
        return f"{reading.seconds:.1f} s"

    rows = [
        [
            reading.method,
            "-" if reading.settings.r is None else str(reading.settings.r),
            f"{reading.extra_parameters:,}",
            *(_figure(reading.perplexity_at.get(mark)) for mark in marks),
            f"{reading.perplexity:.2f}",
            time(reading),
            f"{reading.tokens_per_second:,.0f}",
        ]
        for reading in readings
    ]
    at_marks = [f"ppl at {_shorten(int(mark))}" for mark in marks]
    headers = ["method", "r", "parameters", *at_marks, "perplexity", "time", "tokens/s"]
    if any(reading.taken_back for reading in readings):
        headers.append("taken back")
        for row, reading in zip(rows, readings, strict=True):
            row.append(f"{len(reading.taken_back)} times" if reading.taken_back else "-")
    return Sheet(title, headers, rows, (best, headers.index("perplexity")) if len(readings) > 1 else None)


def plot_readings(readings: Sequence[Reading], path: str | Path, title: str = "") -> None:
    """Draw the perplexity so far against the tokens read, a line for each reading of one text, into a PNG file.

    Raises:
        ModuleNotFoundError: matplotlib, which comes with the extra `plot`, is not installed.
        OSError: the file cannot be written; one that was there is untouched.
    """
    figure, axes = make_figure()
    for reading in readings:
        name = reading.method if reading.settings.r is None else f"{reading.method}, r={reading.settings.r}"
        dash = "--" if reading.method == "none" else "-"
        label = f"{name}: {reading.perplexity:.2f}"
        axes.plot(*zip(*reading.curve, strict=True), dash, color=_COLOURS.get(reading.method), label=label)
    values = [value for reading in readings for _, value in _settled(reading.curve)]
    axes.set_yscale("log")
    axes.set_ylim(*((min(values) / 1.05, max(values) * 1.05) if values else (1.0, 10.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(lambda value, _: _shorten(round(value)))
    axes.set_xlim(0, max(reading.curve[-1][0] for reading in readings))
    _label(axes, "tokens read", "perplexity so far", title)
    axes.legend()
    save_figure(figure, path)


def make_figure() -> tuple[Figure, Axes]:
    """Return an empty figure of one plot, without a window system and without global state.

    Raises:
        ModuleNotFoundError: matplotlib, which comes with the extra `plot`, is not installed.
    """
    try:
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
    """Write a figure as PNG, replacing the file in one step; an `OSError` leaves the one that was there."""
    with staged_file(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


def tabulate_memory(memory: dict[str, Any]) -> Sheet:
    """Return the layers of `loading.describe_memory`: width, tau, norms of the slots (mean, maximum), host slots."""
    rows = []
    for layer in memory["layers"]:
        norms = [layer[part] and layer[part][which] for part in ("gate", "up", "down") for which in ("mean", "max")]
        slots = layer["slots"] or []
        listed = ", ".join(map(str, slots[:3])) + (f", ... ({len(slots)})" if len(slots) > 3 else "")
        tau = "-" if layer["tau"] is None else f"{layer['tau']:.4g}"
        rows.append([layer["name"], str(layer["r"]), tau, *(_figure(norm, 3) for norm in norms), listed or "-"])
    norms = ["gate mean", "max", "up mean", "max", "down mean", "max"]
    return Sheet("", ["FFN", "r", "tau", *norms, "cloned from slots"], rows)


# ---------------------------------------------------------------------- studies


def tabulate_study(figures: dict[str, Any]) -> list[Sheet]:
    """Return the tables of a study's figures (`perplexity.json`, `locomo.json`, `forgetting.json`)."""
    return _STUDIES[figures["study"]][0](figures)


def write_report(folders: Sequence[Path], path: Path, remark: Callable[[str], None] = lambda line: None) -> list[Path]:
    """Write one Markdown file with the tables and plots of all studies in some folders; the plots lie beside it.

    Args:
        folders: the folders that the studies wrote to.
        path: the Markdown file, after which the plots are named.
        remark: called with a line for what is left out.

    Returns:
        The files that were written, the Markdown file first.

    Raises:
        ValueError: no folder holds the figures of a study, or figures are not readable.
        OSError: a file cannot be written.
    """
    runs = [(folder, name) for folder in folders for name in _STUDIES if (folder / f"{name}.json").exists()]
    if not runs:
        named = ", ".join(repr(str(folder)) for folder in folders)
        raise ValueError(f"folders must hold figures of locas eval, got none in {named}: run a study with --out first")
    parts, plots = ["# What the memories hold and what they cost"], []
    for number, (folder, name) in enumerate(runs):
        figures = load_json(folder / f"{name}.json")
        tabulate, draw, title = _STUDIES[name]
        parts += [f"## {title}", _describe(figures), *(sheet.to_markdown() for sheet in tabulate(figures))]
        picture = path.with_name(f"{path.stem}-{number}-{name}.png")
        try:
            figure, axes = make_figure()
            if draw(figures, axes):
                save_figure(figure, picture)
                parts.append(f"![{title}]({picture.name})")
                plots.append(picture)
        except ModuleNotFoundError as error:
            remark(f"no plot: {error}")
    with staged_file(path) as temporary:
        temporary.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return [path, *plots]


def _describe(figures: dict[str, Any]) -> str:
    """Return a paragraph with the model and the settings of a study."""
    methods, recipe = figures["methods"], figures.get("recipe")
    windows = {
        f"window {m['window']}, stride {m['stride']}, {m['context']}, epochs {m['epochs']}" for m in methods.values()
    }
    parts = [f"Model {figures.get('model', 'unknown')}, {'; '.join(sorted(windows))}."]
    if recipe:
        times = f"{recipe['readings']} reading{'s' if recipe['readings'] > 1 else ''}"
        parts.append(f"Trained in {times}, objective {recipe['objective']}, weighting {recipe['token_weighting']}.")
    for method, settings in methods.items():
        own = {name: value for name, value in settings.items() if name in METHOD_FIELDS and value is not None}
        if settings["method"] != "none":
            listed = ", ".join(f"{name} {value}" for name, value in own.items())
            parts.append(f"{method}: {listed.replace('_', ' ')}.")
    if figures.get("conversations"):
        parts.append(f"Conversations {', '.join(figures['conversations'])}.")
    return " ".join([*parts, "In brackets 95% bootstrap intervals."])


def _tabulate_locomo(figures: dict[str, Any]) -> list[Sheet]:
    groups = {
        f"{method}, {setting}" + ("" if memory == "none" else f", {memory} memory"): found
        for method, settings in figures["answers"].items()
        for setting, memories in settings.items()
        for memory, found in memories.items()
    }
    names = [*CATEGORIES.values(), "answerable", "abstention"]
    rows = [[title, *(_percent(found.get(name)) for name in names)] for title, found in groups.items()]
    sheets = [Sheet("LoCoMo answers: F1 in %, adversarial: negative F1 with the trap", ["", *names], rows)]
    rows = [[title, _mean(found["gold_nats"]), _gap_closed(figures, found)] for title, found in groups.items()]
    title = (
        "LoCoMo, categories 1 to 4: nats a token of the gold answer, and the share of the gap to the evidence closed"
    )
    sheets.append(Sheet(title, ["", "nats", "gap closed"], rows))
    dropped = {
        f"{sample_id}, {setting}": lines
        for settings in figures["answers"].values()
        for setting, memories in settings.items()
        for found in memories.values()
        for sample_id, lines in found["dropped_lines"].items()
        if lines
    }
    rows = [[where, str(lines)] for where, lines in sorted(dropped.items())]
    title = "Dialogues longer than the model's positions: oldest lines left out"
    sheets.append(Sheet(title, ["", "lines"], rows))
    if cloze := figures.get("cloze"):
        gains, shares = ("gain_right", "gain_wrong", "right_minus_wrong"), ("first_right", "first_wrong")
        rows = [["base", "", "", "", _percent(cloze["base"]["first"]), ""]]
        for method, found in cloze["methods"].items():
            means = [_mean(found.get(key)) for key in gains] + [_percent(found.get(key)) for key in shares]
            rows.append([method, *means])
        headers = ["memory", "gain", "of a wrong one", "right - wrong", "first, %", "with a wrong one, %"]
        sheets.append(Sheet(f"LoCoMo cloze: nats a token, {cloze['spans']} spans", headers, rows))
        rows = [[f"{d['method']} - {d['against']}", _mean(d["right_minus_wrong"])] for d in cloze["differences"]]
        sheets.append(Sheet("Difference of right - wrong, nats a token", ["methods", "mean"], rows))
    return [sheet for sheet in sheets if sheet.rows]


def _gap_closed(figures: dict[str, Any], found: dict[str, Any]) -> str:
    """Return which share of the base's way from no context to the evidence in context a setting covers."""
    base = figures["answers"].get("none", {})
    if not {"no-context", "evidence"} <= base.keys():
        return "-"
    alone, evidence, own = (
        _number(where["gold_nats"]["mean"]) for where in (base["no-context"]["none"], base["evidence"]["none"], found)
    )
    return _figure((alone - own) / (alone - evidence)) if alone != evidence else "-"


def _draw_locomo(figures: dict[str, Any], axes: Axes) -> bool:
    methods = {n: f for n, f in figures.get("cloze", {}).get("methods", {}).items() if f.get("right_minus_wrong")}
    if not methods:
        return False
    bars = ((-0.2, "gain_right", _RIGHT, "its own memory"), (0.2, "gain_wrong", _WRONG, "another one's"))
    for offset, key, colour, label in bars:
        means = [found[key] for found in methods.values()]
        errors = [[m["mean"] - _number(m["low"]) for m in means], [_number(m["high"]) - m["mean"] for m in means]]
        places = [number + offset for number in range(len(means))]
        axes.bar(places, [m["mean"] for m in means], 0.38, yerr=errors, color=colour, capsize=4, label=label)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(methods)), list(methods))
    _label(axes, "", "nats a token gained on spans", "LoCoMo cloze")
    axes.legend()
    return True


def _tabulate_forgetting(figures: dict[str, Any]) -> list[Sheet]:
    before, after = figures["before"], figures["after"]
    unread, blimp = list(before["unread_perplexity"]), "blimp" in before
    headers = ["", "parameters", "book ppl", *(f"ppl of {name}" for name in unread), *(f"KL on {n}" for n in unread)]
    rows = [["before", "0", _figure(before["book_perplexity"])]]
    rows[0] += [_figure(before["unread_perplexity"][name]) for name in unread] + ["0" for _ in unread]
    if blimp:
        headers += ["BLiMP, %", "drop"]
        rows[0] += [_percent(before["blimp"]["accuracy"]), ""]
    for name, found in after.items():
        row = [name, f"{found['parameters']:,}", _figure(found["book_perplexity"][0])]
        for text in unread:
            rise = found["unread_rise"][text]
            sign = "+" if rise["mean"] > 0 else ""
            row.append(f"{_figure(found['unread_perplexity'][text])} ({sign}{_mean(rise, 2)})")
        row += [_mean(found["kl_per_token"][text], 4) for text in unread]
        row += [_percent(found["blimp"]["accuracy"]), _percent(found["blimp_drop"], 2)] if blimp else []
        rows.append(row)
    sheets = [Sheet("After a whole book, measured on other texts", headers, rows)]
    rows = []
    for name, found in after.items():
        where = [measure for measure, same in found["disabled_is_before_in"].items() if not same]
        rows.append([name, f"differs in {', '.join(where)}" if where else "equal to before, to the last bit"])
    sheets.append(Sheet("With the memory disabled", ["memory", "measures"], rows))
    states = [before, *after.values()]
    tasks = sorted((task, name) for task, measures in before["tasks"].items() for name in measures)
    rows = [
        [f"{task} {name}", *(_figure(state["tasks"].get(task, {}).get(name), 4) for state in states)]
        for task, name in tasks
        if "stderr" not in name
    ]
    sheets.append(Sheet("lm-evaluation-harness", ["task", "before", *after], rows))
    return [sheet for sheet in sheets if sheet.rows]


def _draw_forgetting(figures: dict[str, Any], axes: Axes) -> bool:
    points = {}
    for name, found in figures["after"].items():
        if rises := [rise["mean"] for rise in found["unread_rise"].values()]:
            points[name] = (found["book_gain"], sum(rises) / len(rises))
    if not points:
        return False
    for name, (gain, rise) in points.items():
        axes.plot(gain, rise, "o", label=name, color=_COLOURS["lora" if name.startswith("lora") else "locas-glu"])
        axes.annotate(name, (gain, rise), xytext=(5, 5), textcoords="offset points")
    axes.plot(0, 0, "k+", label="base")  # the slope from here to a point is what its gain costs
    axes.margins(0.15)
    _label(
        axes, "perplexity gained while reading the book", "perplexity lost on unread text", "Gain against forgetting"
    )
    return True


def _tabulate_perplexity(figures: dict[str, Any]) -> list[Sheet]:
    readings, documents = figures["readings"], list(figures["documents"])
    rows = [
        [m, *(_figure(found[name]["perplexity"]) for name in documents), _figure(figures["means"][m]["perplexity"])]
        for m, found in readings.items()
    ]
    sheets = [Sheet("Perplexity, each token scored before it was learned", ["", *documents, "all tokens"], rows)]
    for name in documents:
        for key, title in (("perplexity_at", "so far, at"), ("perplexity_between", "between")):
            marks = list(dict.fromkeys(mark for found in readings.values() for mark in found[name][key]))
            rows = [[m, *(_figure(found[name][key].get(mark)) for mark in marks)] for m, found in readings.items()]
            if marks:
                sheets.append(Sheet(f"{name}: perplexity {title}", ["", *marks], rows))
    return sheets


def _draw_perplexity(figures: dict[str, Any], axes: Axes) -> bool:
    dashes = ("-", "--", ":", "-.")
    for number, name in enumerate(figures["documents"]):
        for colour, (method, rows) in enumerate(figures["readings"].items()):
            points = _settled([(at, _number(value)) for at, value in rows[name]["curve"]])
            if points:
                dash = dashes[number % len(dashes)]
                axes.plot(*zip(*points, strict=True), dash, color=f"C{colour}", label=f"{method}, {name}")
    _label(axes, "tokens read", "perplexity so far")
    axes.legend(fontsize="small")
    return True


_STUDIES: dict[str, tuple[Callable, Callable, str]] = {
    "locomo": (_tabulate_locomo, _draw_locomo, "LoCoMo"),
    "forgetting": (_tabulate_forgetting, _draw_forgetting, "Forgetting"),
    "perplexity": (_tabulate_perplexity, _draw_perplexity, "Perplexity"),
}
"""For each study: figures -> tables, (figures, axes) -> whether a plot was drawn, and the heading."""


# ---------------------------------------------------------------------- cells and axes


def _figure(value: float | None, digits: int = 2) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _mean(mean: dict[str, Any] | None, digits: int = 3, factor: float = 1.0) -> str:
    """Return a mean with its interval, both times a factor."""
    if not mean or not mean["n"]:
        return "-"
    value, low, high = (_number(mean[key]) * factor for key in ("mean", "low", "high"))
    return f"{value:.{digits}f}" + (f" [{low:.{digits}f}, {high:.{digits}f}]" if math.isfinite(low) else "")


def _percent(mean: dict[str, Any] | None, digits: int = 1) -> str:
    return _mean(mean, digits, 100.0)


def _number(value: float | None) -> float:
    """Return NaN for a figure that JSON could not hold (null)."""
    return math.nan if value is None else value


def _shorten(tokens: int) -> str:
    return f"{tokens / 1000:g}K" if tokens >= 1000 else str(tokens)


def _settled(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the finite points of a curve without the first twentieth of the text, where few tokens were scored."""
    return [(at, value) for at, value in curve if at >= curve[-1][0] / 20 and math.isfinite(value)]


def _label(axes: Axes, x: str, y: str, title: str = "") -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)
    axes.grid(which="both", alpha=0.25)
