"""The PG-19 tables in Markdown, and their plots, made of the results in a folder."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring import make_table
from pg19_rows import TUNING
from plotting import make_figure, save_figure

from locas_peft.ttt import perplexity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EMPTY = "(nothing read yet)"
Readings = list[dict[str, Any]]
"""Results of readings, row by row, as `pg19.read` makes them."""


def to_markdown(name: str, readings: Readings) -> str:
    """Return one table, or one for each document.

    Args:
        name: in `pg19_rows.TABLES`.
        readings: all results for it.
    """
    return TABLE_FORMS[name](readings) if readings else EMPTY


def compact(readings: Readings) -> dict[str, Any]:
    """Return readings for a summary: without their single chunks, and with what all of them share listed once.

    Args:
        readings: at least one.
    """
    values = [{key: item for key, item in value.items() if key != "chunks"} for value in readings]
    first, *others = values
    # An older result may lack a setting.
    is_shared = {
        key: all(key in other and other[key] == item for other in others)
        for key, item in first.items()
    }
    shared = {key for key, same in is_shared.items() if same and others}
    own = [
        {key: item for key, item in value.items() if key not in shared and item is not None}
        for value in values
    ]
    return {
        "shared": {key: first[key] for key in first if key in shared and first[key] is not None},
        "readings": own,
    }


# ---------------------------------------------------------------------- tables


def _headline(readings: Readings) -> str:
    by_document = _group(readings, "document")
    pooled = [name for name in by_document if name != TUNING] or list(by_document)
    rows = []
    for name, own in _group(readings, "row").items():
        of = {value["document"]: value for value in own}
        found = [of[document] for document in pooled if document in of]
        nll_nats, tokens = (
            sum(value[key] for value in found) for key in ("nll_nats", "scored_tokens")
        )
        mean = perplexity(nll_nats, tokens) if len(found) == len(pooled) else None
        values = [
            of[document]["perplexity"] if document in of else None for document in by_document
        ]
        rows.append([name, _rate(own), _parameters(own), *map(_number, (*values, mean))])
    head = ["row", "rate", "parameters", *by_document, f"mean of {', '.join(pooled)}"]
    return "\n\n".join([make_table(head, rows), *map(_one_document, by_document.values())])


def _one_document(readings: Readings) -> str:
    marks, spans = (
        list(dict.fromkeys(item for value in readings for item in value[key]))
        for key in ("perplexity_at", "perplexity_between")
    )
    rows = [
        [
            value["row"],
            *(_number(value["perplexity_at"].get(mark)) for mark in marks),
            *(_number(value["perplexity_between"].get(span)) for span in spans),
            _number(value["perplexity"]),
        ]
        for value in readings
    ]
    ranges = [" to ".join(f"{int(end):,}" for end in span.split("-")) for span in spans]
    return _titled(
        readings, ["row", *(f"first {int(mark):,}" for mark in marks), *ranges, "all"], rows
    )


def _over_seeds(readings: Readings) -> str:
    rows = []
    for name, own in _group(readings, "row").items():
        values = [value["perplexity"] for value in own]
        several = len(values) > 1
        rows.append(
            [
                *(name, _rate(own), _parameters(own), str(len(values))),
                f"{statistics.fmean(values):.3f}",
                f"{statistics.stdev(values):.3f}" if several else "-",
                f"{min(values):.3f} to {max(values):.3f}" if several else "-",
                f"{statistics.fmean(_last(value) for value in own):.3f}",
            ]
        )
    head = [
        "row",
        "rate",
        "parameters",
        "seeds",
        "perplexity",
        "standard deviation",
        "range",
        _last_span(readings),
    ]
    return _titled(readings, head, rows)


def _sweep(readings: Readings) -> str:
    """Perplexity over all tokens and over the last segment, whose best rate in each group of rows is in bold."""
    documents = list(_group(readings, "document"))
    best: dict[tuple[str, str], float] = {}
    for value in readings:
        group = _without_rate(value), value["document"]
        best[group] = min(best.get(group, math.inf), _last(value))
    rows = []
    for name, own in _group(readings, "row").items():
        of = {value["document"]: value for value in own}
        cells = []
        for document in documents:
            value = of.get(document)
            if value is None:
                cells += ["-", "-"]
                continue
            last = f"{_last(value):.3f}"
            chosen = _without_rate(value) and _last(value) == best[_without_rate(value), document]
            cells += [f"{value['perplexity']:.3f}", f"**{last}**" if chosen else last]
        rows.append([name, _parameters(own), *cells])
    parts = f"first {readings[0]['tokens_read']:,}", _last_span(readings)
    return make_table(
        ["row", "parameters", *(f"{name}, {part}" for name in documents for part in parts)], rows
    )


def _curves(readings: Readings) -> str:
    level = _unread_level(readings)
    rows = []
    for value in readings:
        mean = statistics.fmean(value["unread"].values())
        numbers = (value["perplexity"], *value["unread"].values(), mean)
        rise = "-" if level is None else f"{mean - level:+.2f}"
        rows.append([value["row"], _parameters([value]), *map(_number, numbers), rise])
    return _titled(
        readings,
        ["row", "parameters", "perplexity", *readings[0]["unread"], "mean of those", "rise"],
        rows,
    )


def _curves_by_document(readings: Readings) -> str:
    return "\n\n".join(map(_curves, _group(readings, "document").values()))


TABLE_FORMS: dict[str, Callable[[Readings], str]] = {
    "headline": _headline,
    "init": _over_seeds,
    "width": _over_seeds,
    "sweep": _sweep,
    "sweep-training": _sweep,
    "curves": _curves,
    "pretrained": _curves_by_document,
    "pretrained-sweep": _sweep,
}


def timing_to_markdown(value: dict[str, Any]) -> str:
    """Return the table of times, operations and memory; absolute times only for a GPU.

    Args:
        value: the content of `timing.json`.
    """
    gpu = not value["hardware"].startswith("CPU")
    references = list(value["rows"][0]["relative_time"])
    first = references[0]
    head = ["row", "parameters", "on disk, MB"]
    head += [
        cell for name in references for cell in (f"time / {name}", "quartiles", "with its start")
    ]
    head += [] if gpu else [f"processor time / {name}" for name in references]
    head += [f"operations / {first}"]
    head += ["tokens/s", "s for 200K tokens"] if gpu else []
    head += ["peak above the model, MB", "in the first quarter"]
    rows = []
    for row in value["rows"]:
        cells = [row["row"], _parameters([row]), _megabytes(row.get("adapter_bytes"), 2)]
        for name in references:
            low, high = row["relative_time_quartiles"][name]
            cells += [_number(row["relative_time"][name]), f"{low:.2f} to {high:.2f}"]
            cells += [_number(row["relative_time_with_start"][name])]
        cells += (
            [] if gpu else [_number(row["relative_processor_time"][name]) for name in references]
        )
        cells += [_number(row["relative_operations"][first])]
        cells += (
            [f"{row['tokens_per_second']:,.0f}", f"{row['seconds_for_200k_tokens']:.1f}"]
            if gpu
            else []
        )
        rows.append(
            [*cells, _megabytes(row.get("peak_bytes")), _megabytes(row.get("peak_bytes_early"))]
        )
    versions = ", ".join(f"{name} {value[name]}" for name in ("torch", "transformers", "peft"))
    about = (
        f"{value['model']}, {value['dtype']}, window {value['window']:,}, stride {value['stride']:,}, "
        f"{value['tokens']:,} tokens, {value['rows'][0]['turns']} turns, memory over {value['memory_tokens']:,}; "
        f"{value['hardware']}, threads: {value['threads']}, {versions}"
    )
    return f"{about}\n\n{make_table(head, rows)}"


def block_to_markdown(value: dict[str, Any]) -> str:
    """Return a table of the first block; times are relative to the first row's."""
    results = value["results"]
    marks, seconds = list(results[0]["perplexity_at"]), results[0]["seconds"]
    rows = []
    for result in results:
        perplexities = (*(result["perplexity_at"][mark] for mark in marks), result["perplexity"])
        relative = _number(result["seconds"] / seconds)
        rows.append(
            [
                result["row"],
                result["settings"],
                *map(_number, perplexities),
                _parameters([result]),
                relative,
            ]
        )
    head = [
        "row",
        "settings",
        *(f"{int(mark):,}" for mark in marks),
        "all",
        "parameters",
        "relative time",
    ]
    return make_table(head, rows)


def _titled(readings: Readings, head: list[str], rows: list[list[str]]) -> str:
    documents = ", ".join(_group(readings, "document"))
    return f"{documents}, {readings[0]['tokens_read']:,} tokens\n\n{make_table(head, rows)}"


def _group(readings: Iterable[dict[str, Any]], key: str) -> dict[str, Readings]:
    groups: dict[str, Readings] = {}
    for value in readings:
        groups.setdefault(value[key], []).append(value)
    return groups


def _without_rate(value: dict[str, Any]) -> str:
    """The row's name without its rate; empty for a row that has none."""
    return value["row"].rpartition(", lr ")[0]


def _unread_level(readings: Readings) -> float | None:
    """The mean perplexity of the unread books before anything was learned."""
    before = next((value for value in readings if value["method"] == "none"), None)
    return None if before is None else statistics.fmean(before["unread"].values())


def _last(value: dict[str, Any]) -> float:
    return list(value["perplexity_between"].values())[-1]


def _last_span(readings: Readings) -> str:
    return f"tokens {list(readings[0]['perplexity_between'])[-1]}"


def _rate(readings: Readings) -> str:
    rate = readings[0]["learning_rate"]
    return "-" if rate is None else f"{rate:g}"


def _parameters(readings: Readings) -> str:
    return f"{readings[0]['extra_parameters']:,}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _megabytes(count: int | None, places: int = 1) -> str:
    return "-" if count is None else f"{count / 1e6:.{places}f}"


# ---------------------------------------------------------------------- plots

COLORS = ("blue", "orange", "green", "red", "purple", "brown", "pink", "gray", "olive", "cyan")


def draw(tables: dict[str, dict[str, Any]], out: Path) -> list[Path]:
    """Draw perplexity against tokens read and against parameters, and gain against forgetting, as PNG files.

    Args:
        tables: by name; a plot needs the `readings` of its table.
        out: the folder.

    Returns:
        The files that were written.

    Raises:
        ValueError: matplotlib is not installed.
    """
    headline, width, curves = (
        tables.get(name, {}).get("readings", []) for name in ("headline", "width", "curves")
    )
    plots = [
        (f"perplexity-{name}.png", own, _draw_tokens)
        for name, own in _group(headline, "document").items()
    ]
    plots += [("perplexity-parameters.png", width, _draw_parameters)] if width else []
    plots += [("gain-forgetting.png", curves, _draw_forgetting)] if len(curves) > 1 else []
    for name, readings, draw_into in plots:
        figure, axes = make_figure()
        # Ten colours, then the same with other lines and marks: no two rows look the same.
        colors = [f"tab:{color}" for color in COLORS]
        axes.set_prop_cycle(
            color=colors * 2, linestyle=["-"] * 10 + [":"] * 10, marker=["o"] * 10 + ["s"] * 10
        )
        draw_into(axes, readings)
        axes.grid(alpha=0.25)
        if len(axes.get_lines()) > 4:
            figure.legend(fontsize=7, loc="outside right upper")
        else:
            axes.legend(fontsize=8)
        save_figure(figure, out / name)
    return [out / name for name, _, _ in plots]


def _draw_tokens(axes: Axes, readings: Readings) -> None:
    for value in readings:
        stops, counts, losses = (value["chunks"][part::3] for part in range(3))
        points, tokens, nll_nats = [], 0, 0.0
        for stop, count, loss in zip(stops, counts, losses, strict=True):
            tokens, nll_nats = tokens + count, nll_nats + loss
            if stop >= stops[-1] / 20:  # over fewer tokens the perplexity varies too much
                points.append((stop, perplexity(nll_nats, tokens)))
        axes.plot(
            *zip(*points, strict=True),
            label=f"{value['row']}: {value['perplexity']:.2f}",
            lw=1.2,
            marker="",
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.set(
        title=f"book {readings[0]['document']}", xlabel="tokens read", ylabel="perplexity so far"
    )


def _draw_parameters(axes: Axes, readings: Readings) -> None:
    for method, values in _group(readings, "method").items():
        points = sorted((value["extra_parameters"], value["perplexity"]) for value in values)
        if method == "none":
            axes.axhline(points[0][1], color="#777777", linestyle="--", label="none")
        else:
            axes.plot(*zip(*points, strict=True), label=method)
    title = f"book {readings[0]['document']}, {readings[0]['tokens_read']:,} tokens"
    axes.set(xscale="log", title=title, xlabel="extra parameters", ylabel="perplexity")


def _draw_forgetting(axes: Axes, readings: Readings) -> None:
    level = _unread_level(readings) or 0.0
    lines: dict[str, list[tuple[float, float]]] = {}
    for value in readings:
        if value["method"] != "none":
            rise = statistics.fmean(value["unread"].values()) - level
            lines.setdefault(_without_rate(value), []).append((value["perplexity"], rise))
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=name)
    title = f"book {readings[0]['document']} read, {readings[0]['tokens_read']:,} tokens; learning rates joined"
    axes.set(
        title=title,
        xlabel="perplexity while reading",
        ylabel="rise of the perplexity of unread books",
    )
