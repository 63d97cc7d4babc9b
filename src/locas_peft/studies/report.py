"""What the studies found, for people: tables on the terminal, and one Markdown file with tables and plots."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..evaluation.locomo import CATEGORIES
from ..files import staged_file
from ..report import make_figure, save_figure

# Settings that are no method's own, or that the report says elsewhere.
_SHARED = ("method", "model", "preset", "window", "stride", "context", "epochs", "max_tokens", "seed", "dtype")


@dataclass(frozen=True)
class Sheet:
    """A table: its title, its column headers (the first column is left-aligned) and its rows, all of them texts."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for number, header in enumerate(self.headers):
            table.add_column(header, justify="right" if number else "left", no_wrap=not number)
        for row in self.rows:
            table.add_row(*row)
        return table

    def to_markdown(self) -> str:
        rule = "|".join(["---"] + ["---:"] * (len(self.headers) - 1))
        lines = [f"| {' | '.join(self.headers)} |", f"|{rule}|"]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in self.rows]
        return f"**{self.title}**\n\n" + "\n".join(lines)


def print_locomo(figures: dict[str, Any], console: Console) -> None:
    """Prints what `run_locomo` returned."""
    _print(_locomo_sheets(figures), console)


def print_forgetting(figures: dict[str, Any], console: Console) -> None:
    """Prints what `run_forgetting` returned."""
    _print(_forgetting_sheets(figures), console)


def print_perplexity(figures: dict[str, Any], console: Console) -> None:
    """Prints what `run_perplexity` returned."""
    _print(_perplexity_sheets(figures), console)


def _print(sheets: Sequence[Sheet], console: Console) -> None:
    for sheet in sheets:
        console.print(sheet.to_rich())


def write_report(folders: Sequence[Path], path: Path, remark: Callable[[str], None] = lambda line: None) -> list[Path]:
    """Writes one Markdown file with the tables and plots of all runs in some folders.

    Args:
        folders: what the studies were given as `out`.
        path: the Markdown file; the plots lie beside it, named after it.
        remark: told what is left out.

    Returns:
        The files that were written, the Markdown file first.

    Raises:
        ValueError: no folder holds the figures of a study, or figures are not readable.
        OSError: a file cannot be written.
    """
    runs = [(folder, study, _read(folder / f"{study}.json")) for folder in folders for study in _STUDIES]
    runs = [(folder, study, figures) for folder, study, figures in runs if figures is not None]
    if not runs:
        named = ", ".join(repr(str(folder)) for folder in folders)
        raise ValueError(f"folders must hold figures of locas eval, got none in {named}: run a study with --out first")
    parts, plots = ["# What the memories hold and what they cost"], []
    for number, (folder, study, figures) in enumerate(runs):
        make_sheets, draw, title = _STUDIES[study]
        parts.append(f"## {title}\n\n{_describe(folder, figures)}")
        parts += [sheet.to_markdown() for sheet in make_sheets(figures)]
        picture = path.with_name(f"{path.stem}-{number}-{study}.png")
        try:
            if draw(figures, picture):
                parts.append(f"![{title}]({picture.name})")
                plots.append(picture)
        except ModuleNotFoundError as error:
            remark(f"no plot: {error}")
    with staged_file(path) as temporary:
        temporary.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return [path, *plots]


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"figures must be JSON, got {str(path)!r} ({error}): run the study again") from None


def _describe(folder: Path, figures: dict[str, Any]) -> str:
    methods = figures["methods"].values()
    windows = {f"window {m['window']}, stride {m['stride']}, {m['context']}, epochs {m['epochs']}" for m in methods}
    lines = [f"Model {figures.get('model', 'unknown')}, {'; '.join(sorted(windows))}."]
    recipe = figures.get("recipe")
    if recipe:
        taught = (
            f"{recipe['readings']} reading{'s' if recipe['readings'] > 1 else ''}, objective {recipe['objective']}"
        )
        lines.append(f"Taught in {taught}, tokens weighted {recipe['token_weighting']}.")
    for name, settings in figures["methods"].items():
        own = {field: value for field, value in settings.items() if value is not None and field not in _SHARED}
        if own:
            told = ", ".join(f"{field.replace('_', ' ')} {value}" for field, value in own.items())
            lines.append(f"{name}: {told}.")
    if figures.get("conversations"):
        lines.append(f"Conversations {', '.join(figures['conversations'])}.")
    lines.append("In brackets 95% bootstrap intervals.")
    return " ".join(line for line in lines if line)


# ---------------------------------------------------------------------- LoCoMo


def _locomo_sheets(figures: dict[str, Any]) -> list[Sheet]:
    sheets = []
    names = [*CATEGORIES.values(), "answerable", "abstention"]
    rows = []
    for method, settings in figures["answers"].items():
        for setting, groups in settings.items():
            for memory, found in groups.items():
                cells = [_percent(found.get(name)) for name in names]
                rows.append([f"{method}, {setting}" + ("" if memory == "none" else f", {memory} memory"), *cells])
    if rows:
        sheets.append(Sheet("LoCoMo answers: F1 in %, adversarial: negative F1 with the trap", ["", *names], rows))
    dropped = {
        (setting, sample_id): lines
        for settings in figures["answers"].values()
        for setting, groups in settings.items()
        for found in groups.values()
        for sample_id, lines in found["dropped_lines"].items()
        if lines
    }
    if dropped:
        rows = [[f"{sample_id}, {setting}", str(lines)] for (setting, sample_id), lines in sorted(dropped.items())]
        title = "The model's positions do not hold these dialogues: oldest lines left out"
        sheets.append(Sheet(title, ["", "lines"], rows))
    cloze = figures.get("cloze")
    if cloze:
        rows = [["base", "", "", "", _percent(cloze["base"]["first"]), ""]]
        for method, found in cloze["methods"].items():
            keys = ("gain_right", "gain_wrong", "right_minus_wrong")
            shares = ("first_right", "first_wrong")
            rows.append(
                [method, *(_mean(found.get(key)) for key in keys), *(_percent(found.get(key)) for key in shares)]
            )
        headers = ["memory", "gain", "of a wrong one", "right - wrong", "first, %", "with a wrong one, %"]
        sheets.append(Sheet(f"LoCoMo cloze: nats a token, {cloze['spans']} spans", headers, rows))
        rows = [[f"{d['method']} - {d['against']}", _mean(d["right_minus_wrong"])] for d in cloze["differences"]]
        if rows:
            sheets.append(Sheet("Difference of right - wrong, nats a token", ["methods", "mean"], rows))
    return sheets


def _draw_locomo(figures: dict[str, Any], path: Path) -> bool:
    methods = {n: f for n, f in figures.get("cloze", {}).get("methods", {}).items() if f.get("right_minus_wrong")}
    if not methods:
        return False
    figure, axes = make_figure()
    for number, found in enumerate(methods.values()):
        for offset, key, colour in ((-0.2, "gain_right", "#1f6fb4"), (0.2, "gain_wrong", "#999999")):
            mean = found[key]
            error = [[mean["mean"] - _number(mean["low"])], [_number(mean["high"]) - mean["mean"]]]
            label = {"gain_right": "its own memory", "gain_wrong": "another one's"}[key] if not number else None
            axes.bar(number + offset, mean["mean"], 0.38, yerr=error, color=colour, capsize=4, label=label)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(methods)), list(methods))
    axes.set_ylabel("nats a token gained on spans")
    axes.set_title("LoCoMo cloze")
    axes.legend()
    save_figure(figure, path)
    return True


# ---------------------------------------------------------------------- forgetting


def _forgetting_sheets(figures: dict[str, Any]) -> list[Sheet]:
    before, after = figures["before"], figures["after"]
    unread = list(before["unread_perplexity"])
    headers = ["", "parameters", "book ppl"]
    headers += [f"ppl of {name}" for name in unread] + [f"KL on {name}" for name in unread]
    if "blimp" in before:
        headers += ["BLiMP, %", "drop"]
    row = ["before", "0", _figure(before["book_perplexity"])]
    row += [_figure(before["unread_perplexity"][name]) for name in unread] + ["0" for _ in unread]
    if "blimp" in before:
        row += [_percent(before["blimp"]["accuracy"]), ""]
    rows = [row]
    for name, found in after.items():
        row = [name, f"{found['parameters']:,}", _figure(found["book_perplexity"][0])]
        row += [
            f"{_figure(found['unread_perplexity'][text])} ({_rise(found['unread_rise'][text])})" for text in unread
        ]
        row += [_mean(found["kl_per_token"][text], 4) for text in unread]
        if "blimp" in before:
            row += [_percent(found["blimp"]["accuracy"]), _percent(found["blimp_drop"], 2)]
        rows.append(row)
    sheets = [Sheet("After a whole book, on what it has nothing to do with", headers, rows)]
    rows = []
    for name, found in after.items():
        where = [place for place, same in found["disabled_is_before_in"].items() if not same]
        rows.append([name, "equal to before, to the last bit" if not where else f"differs in {', '.join(where)}"])
    if rows:
        sheets.append(Sheet("With the memory disabled", ["memory", "measures"], rows))
    tasks = sorted({(task, name) for task, measures in before["tasks"].items() for name in measures})
    tasks = [(task, name) for task, name in tasks if "stderr" not in name]
    if tasks:
        rows = [
            [
                f"{task} {name}",
                _figure(before["tasks"][task][name], 4),
                *(_figure(found["tasks"].get(task, {}).get(name), 4) for found in after.values()),
            ]
            for task, name in tasks
        ]
        sheets.append(Sheet("lm-evaluation-harness", ["task", "before", *after], rows))
    return sheets


def _draw_forgetting(figures: dict[str, Any], path: Path) -> bool:
    points = {}
    for name, found in figures["after"].items():
        rises = [rise["mean"] for rise in found["unread_rise"].values()]
        if rises:
            points[name] = (found["book_gain"], sum(rises) / len(rises))
    if not points:
        return False
    figure, axes = make_figure()
    for name, (gain, rise) in points.items():
        axes.plot(gain, rise, "o", label=name, color="#d9722e" if name.startswith("lora") else "#1f6fb4")
        axes.annotate(name, (gain, rise), xytext=(5, 5), textcoords="offset points")
    axes.set_xlabel("perplexity gained while reading the book")
    axes.set_ylabel("perplexity lost on unread text")
    axes.plot(0, 0, "k+", label="base")  # from there on: what a point is worth is its slope
    axes.margins(0.15)
    axes.grid(alpha=0.25)
    axes.set_title("Gain against forgetting")
    save_figure(figure, path)
    return True


# ---------------------------------------------------------------------- perplexity


def _perplexity_sheets(figures: dict[str, Any]) -> list[Sheet]:
    readings = figures["readings"]
    documents = list(figures["documents"])
    rows = [
        [
            method,
            *(_figure(rows[name]["perplexity"]) for name in documents),
            _figure(figures["means"][method]["perplexity"]),
        ]
        for method, rows in readings.items()
    ]
    sheets = [Sheet("Perplexity, each token scored before it was learned", ["", *documents, "all tokens"], rows)]
    for name in documents:
        for key, title in (("perplexity_at", "so far, at"), ("perplexity_between", "between")):
            marks = list(dict.fromkeys(mark for rows in readings.values() for mark in rows[name][key]))
            if marks:
                rows = [[m, *(_figure(found[name][key].get(mark)) for mark in marks)] for m, found in readings.items()]
                sheets.append(Sheet(f"{name}: perplexity {title}", ["", *marks], rows))
    return sheets


def _draw_perplexity(figures: dict[str, Any], path: Path) -> bool:
    figure, axes = make_figure()
    styles = ("-", "--", ":", "-.")
    for number, name in enumerate(figures["documents"]):
        for colour, (method, rows) in enumerate(figures["readings"].items()):
            points = [(at, value) for at, value in rows[name]["curve"] if value is not None]
            points = points[len(points) // 20 :]
            if points:
                tokens, values = zip(*points, strict=True)
                axes.plot(tokens, values, styles[number % 4], color=f"C{colour}", label=f"{method}, {name}")
    axes.set_xlabel("tokens read")
    axes.set_ylabel("perplexity so far")
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small")
    save_figure(figure, path)
    return True


# ---------------------------------------------------------------------- cells


def _number(value: float | None) -> float:
    """A figure that JSON could not hold (null) is no number."""
    return math.nan if value is None else value


def _figure(value: float | None, digits: int = 2) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _mean(mean: dict[str, Any] | None, digits: int = 3, factor: float = 1.0) -> str:
    if not mean or not mean["n"]:
        return "-"
    value, low, high = (_number(mean[key]) * factor for key in ("mean", "low", "high"))
    interval = f" [{low:.{digits}f}, {high:.{digits}f}]" if math.isfinite(low) else ""
    return f"{value:.{digits}f}{interval}"


def _rise(rise: dict[str, Any]) -> str:
    return ("+" if rise["mean"] > 0 else "") + _mean(rise, 2)


def _percent(mean: dict[str, Any] | None, digits: int = 1) -> str:
    return _mean(mean, digits, 100.0)


_STUDIES: dict[str, tuple[Callable, Callable, str]] = {
    "locomo": (_locomo_sheets, _draw_locomo, "LoCoMo"),
    "forgetting": (_forgetting_sheets, _draw_forgetting, "Forgetting"),
    "perplexity": (_perplexity_sheets, _draw_perplexity, "Perplexity"),
}
