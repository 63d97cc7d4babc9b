"""The PG-19 tables in Markdown, from the readings of a folder."""

from __future__ import annotations

import math
import statistics
from typing import Any

from pg19_quality import Job
from pg19_rows import APART

from locas_peft.evaluation.perplexity import perplexity

NOTHING = "(nothing read yet)"
Readings = list[tuple[Job, dict[str, Any]]]


def to_markdown(name: str, readings: Readings) -> str:
    """Gives one table, or the tables of its documents.

    Args:
        name: in `pg19_rows.TABLES`.
        readings: what lies in the folder for it, row by row.
    """
    return _FORMS[name](readings) if readings else NOTHING


def compact(values: list[dict[str, Any]]) -> dict[str, Any]:
    """Gives readings for a summary: without their single chunks, and what all of them share once.

    Args:
        values: at least one, as the folder has them.
    """
    values = [{key: item for key, item in value.items() if key != "chunks"} for value in values]
    first, *others = values
    shared = {
        key: item
        for key, item in first.items()
        if others and all(key in other and other[key] == item for other in others)  # an older one may lack a setting
    }
    own = [{key: item for key, item in value.items() if key not in shared and item is not None} for value in values]
    return {"shared": {key: item for key, item in shared.items() if item is not None}, "readings": own}


def timing_to_markdown(value: dict[str, Any]) -> str:
    """Gives the table of times, operations and memory; absolute times only for a GPU.

    Args:
        value: what `timing.json` holds.
    """
    gpu = not value["hardware"].startswith("CPU")
    references = list(value["rows"][0]["relative_time"])
    first = references[0]
    head = ["row", "parameters", "on disk, MB"]
    head += [cell for name in references for cell in (f"time / {name}", "quartiles", "with its start")]
    head += [] if gpu else [f"processor time / {name}" for name in references]
    head += [f"operations / {first}"]
    head += ["tokens/s", "s for 200K tokens"] if gpu else []
    head += ["peak above the model, MB", "in the first quarter"]
    rows = []
    for row in value["rows"]:
        cells = [row["row"], f"{row['extra_parameters']:,}", _megabytes(row.get("adapter_bytes"), 2)]
        for name in references:
            low, high = row["relative_time_quartiles"][name]
            cells += [f"{row['relative_time'][name]:.2f}", f"{low:.2f} to {high:.2f}"]
            cells.append(f"{row['relative_time_with_start'][name]:.2f}")
        cells += [] if gpu else [f"{row['relative_processor_time'][name]:.2f}" for name in references]
        cells.append(f"{row['relative_operations'][first]:.2f}")
        cells += [f"{row['tokens_per_second']:,.0f}", f"{row['seconds_for_200k_tokens']:.1f}"] if gpu else []
        cells += [_megabytes(row.get("peak_bytes")), _megabytes(row.get("peak_bytes_early"))]
        rows.append(cells)
    versions = ", ".join(f"{name} {value[name]}" for name in ("torch", "transformers", "peft"))
    about = (
        f"{value['model']}, {value['dtype']}, window {value['window']:,}, stride {value['stride']:,}, "
        f"{value['tokens']:,} tokens, {value['rows'][0]['turns']} turns, memory over {value['memory_tokens']:,}; "
        f"{value['hardware']}, "
        f"threads: {value['threads']}, {versions}"
    )
    return f"{about}\n\n{_table(head, rows)}"


def _megabytes(count: int | None, places: int = 1) -> str:
    return "-" if count is None else f"{count / 1e6:.{places}f}"


def _headline(readings: Readings) -> str:
    parts = [_per_document(readings)]
    for document in _names(job.document for job, _ in readings):
        own = [(job, value) for job, value in readings if job.document == document]
        marks = _names(mark for _, value in own for mark in value["perplexity_at"])
        spans = _names(span for _, value in own for span in value["perplexity_between"])
        rows = [
            [
                job.row.name,
                *(_number(value["perplexity_at"].get(mark)) for mark in marks),
                *(_number(value["perplexity_between"].get(span)) for span in spans),
                _number(value["perplexity"]),
            ]
            for job, value in own
        ]
        head = [
            "row",
            *(f"first {int(mark):,}" for mark in marks),
            *("to".join(f"{int(end):,}" for end in span.split("-")).replace("to", " to ") for span in spans),
            "all",
        ]
        parts.append(f"{document}, {own[0][1]['tokens_read']:,} tokens\n\n" + _table(head, rows))
    return "\n\n".join(parts)


def _per_document(readings: Readings) -> str:
    documents = _names(job.document for job, _ in readings)
    together = [document for document in documents if document != APART] or documents
    rows = []
    for name, own in _by_row(readings).items():
        of = {job.document: value for job, value in own}
        found = [of[document] for document in together if document in of]
        mean = "-"
        if len(found) == len(together):
            mean = _number(_mean_perplexity(found))
        rows.append(
            [
                name,
                _rate(own[0][1]),
                f"{own[0][1]['extra_parameters']:,}",
                *(_number(of[document]["perplexity"]) if document in of else "-" for document in documents),
                mean,
            ]
        )
    return _table(["row", "rate", "parameters", *documents, f"mean of {', '.join(together)}"], rows)


def _over_seeds(readings: Readings) -> str:
    rows = []
    for name, own in _by_row(readings).items():
        values = [value["perplexity"] for _, value in own]
        spread = f"{min(values):.3f} to {max(values):.3f}" if len(values) > 1 else "-"
        last = [_last(value) for _, value in own]
        rows.append(
            [
                name,
                _rate(own[0][1]),
                f"{own[0][1]['extra_parameters']:,}",
                str(len(values)),
                f"{statistics.fmean(values):.3f}",
                f"{statistics.stdev(values):.3f}" if len(values) > 1 else "-",
                spread,
                f"{statistics.fmean(last):.3f}",
            ]
        )
    span = list(readings[0][1]["perplexity_between"])[-1]
    head = ["row", "rate", "parameters", "seeds", "perplexity", "standard deviation", "range", f"tokens {span}"]
    return _titled(readings, _table(head, rows))


def _sweep(readings: Readings) -> str:
    """Perplexity over all that was read and over its last part, where the best of each group is in bold."""
    documents = _names(job.document for job, _ in readings)
    best: dict[tuple[str, str], float] = {}
    for job, value in readings:
        key = (_group(job), job.document)
        best[key] = min(best.get(key, math.inf), _last(value))
    rows = []
    for name, own in _by_row(readings).items():
        of = {job.document: (job, value) for job, value in own}
        cells = []
        for document in documents:
            if document not in of:
                cells += ["-", "-"]
                continue
            job, value = of[document]
            chosen = job.row.method != "none" and _last(value) == best[_group(job), document]
            cells += [f"{value['perplexity']:.3f}", f"**{_last(value):.3f}**" if chosen else f"{_last(value):.3f}"]
        rows.append([name, f"{own[0][1]['extra_parameters']:,}", *cells])
    tokens, span = readings[0][1]["tokens_read"], list(readings[0][1]["perplexity_between"])[-1]
    heads = (f"{document}, {part}" for document in documents for part in (f"first {tokens:,}", f"tokens {span}"))
    return _table(["row", "parameters", *heads], rows)


def _last(value: dict[str, Any]) -> float:
    return list(value["perplexity_between"].values())[-1]


def _curves(readings: Readings) -> str:
    before = next((value for job, value in readings if job.row.method == "none"), None)
    rows = []
    for job, value in readings:
        unread = value["unread"]
        mean = statistics.fmean(unread.values())
        rise = None if before is None else mean - statistics.fmean(before["unread"].values())
        rows.append(
            [
                job.row.name,
                f"{value['extra_parameters']:,}",
                _number(value["perplexity"]),
                *(_number(item) for item in unread.values()),
                _number(mean),
                "-" if rise is None else f"{rise:+.2f}",
            ]
        )
    head = ["row", "parameters", "perplexity", *readings[0][1]["unread"], "mean of those", "rise"]
    return _titled(readings, _table(head, rows))


_FORMS = {
    "headline": _headline,
    "init": _over_seeds,
    "width": _over_seeds,
    "sweep": _sweep,
    "sweep-training": _sweep,
    "curves": _curves,
}


def _titled(readings: Readings, table: str) -> str:
    documents = _names(job.document for job, _ in readings)
    return f"{', '.join(documents)}, {readings[0][1]['tokens_read']:,} tokens\n\n{table}"


def _group(job: Job) -> str:
    return job.row.name.rpartition(", lr ")[0]


def _by_row(readings: Readings) -> dict[str, Readings]:
    rows: dict[str, Readings] = {}
    for job, value in readings:
        rows.setdefault(job.row.name, []).append((job, value))
    return rows


def _mean_perplexity(values: list[dict[str, Any]]) -> float:
    return perplexity(sum(value["nll_nats"] for value in values), sum(value["scored_tokens"] for value in values))


def _rate(value: dict[str, Any]) -> str:
    return "-" if value["learning_rate"] is None else f"{value['learning_rate']:g}"


def _names(items: Any) -> list[str]:
    return list(dict.fromkeys(items))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
