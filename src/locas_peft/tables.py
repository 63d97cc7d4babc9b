"""Tables of results, for the terminal and for a Markdown file, and the texts of their cells."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

__all__ = ["Sheet", "format_count", "format_figure", "format_mean", "format_percent", "to_number"]

# The first column is not made narrower than this: the others wrap first.
_FIRST_COLUMN_CHARACTERS = 40


@dataclass(frozen=True)
class Sheet:
    """A table of texts: the first column is left-aligned, the others right; `best` is bold."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: tuple[int, int] | None = None

    def to_rich(self) -> Table:
        """Return the table for a rich console."""
        table = Table(title=Text(self.title) if self.title else None, title_justify="left")
        self._add_columns(table)
        for row, cells in enumerate(self.rows):
            texts = [Text(cell) for cell in cells]
            if self.best is not None and self.best[0] == row:
                texts[self.best[1]].stylize("bold")
            table.add_row(*texts)
        return table

    def _add_columns(self, table: Table) -> None:
        widest = max((len(row[0]) for row in self.rows), default=0)
        least = min(widest, _FIRST_COLUMN_CHARACTERS)
        for column, header in enumerate(self.headers):
            if column == 0:
                table.add_column(Text(header), overflow="fold", min_width=least)
            else:
                table.add_column(Text(header), overflow="fold", justify="right")


def format_figure(value: float | None, digits: int = 2) -> str:
    """Return a number with so many decimals; "-" for None and numbers that are not finite."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def format_mean(mean: Mapping[str, Any] | None, digits: int = 3, factor: float = 1.0) -> str:
    """Return a mean with its interval, both times a factor; "-" without values.

    `mean` is `{"mean", "low", "high", "n"}`.
    """
    if not mean or not mean["n"]:
        return "-"
    value, low, high = (to_number(mean[key]) * factor for key in ("mean", "low", "high"))
    if not math.isfinite(low):
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def format_percent(mean: Mapping[str, Any] | None, digits: int = 1) -> str:
    """Return a mean share with its interval in percent."""
    return format_mean(mean, digits, 100.0)


def format_count(tokens: int) -> str:
    """Return a number of tokens, in thousands from 1000: "500", "1K", "2.5K"."""
    return f"{tokens / 1000:g}K" if tokens >= 1000 else str(tokens)


def to_number(value: float | None) -> float:
    """Return NaN for a figure that JSON cannot hold (null)."""
    return math.nan if value is None else value
