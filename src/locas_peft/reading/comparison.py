"""Readings of one text side by side, as a table."""

from collections.abc import Sequence

from ..tables import Sheet, format_count, format_figure
from .record import Reading

__all__ = ["tabulate_readings"]


def tabulate_readings(readings: Sequence[Reading], title: str = "") -> Sheet:
    """Return the readings of one text, at least one, side by side, a row each.

    Time is relative to the reading with the method "none", where there are others to compare it with.
    """
    end = min(reading.curve[-1][0] for reading in readings)
    marks = sorted({mark for reading in readings for mark in reading.perplexity_at if int(mark) < end}, key=int)
    alone = next((each.seconds for each in readings if each.method == "none" and len(readings) > 1), 0.0)
    best = min(range(len(readings)), key=lambda row: readings[row].perplexity)
    rows = [
        [
            reading.method,
            "-" if reading.settings.method.r is None else str(reading.settings.method.r),
            f"{reading.extra_parameters:,}",
            *(format_figure(reading.perplexity_at.get(mark)) for mark in marks),
            f"{reading.perplexity:.2f}",
            f"{reading.seconds / alone:.2f}x" if alone else f"{reading.seconds:.1f} s",
            f"{reading.tokens_per_second:,.0f}",
        ]
        for reading in readings
    ]
    at_marks = [f"ppl at {format_count(int(mark))}" for mark in marks]
    headers = ["method", "r", "parameters", *at_marks, "perplexity", "time", "tokens/s"]
    if any(reading.taken_back for reading in readings):
        headers.append("taken back")
        for row, reading in zip(rows, readings, strict=True):
            row.append(f"{len(reading.taken_back)} times" if reading.taken_back else "-")
    return Sheet(title, headers, rows, (best, headers.index("perplexity")) if len(readings) > 1 else None)
