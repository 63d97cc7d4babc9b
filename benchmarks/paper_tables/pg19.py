"""The paper's table of PG-19: online perplexity of whole books, by marks, with paired intervals."""

import math
from dataclasses import replace
from typing import Any

from measuring import make_table

from locas_peft.evaluation.intervals import mean_interval
from locas_peft.model import count_positions
from locas_peft.tables import format_mean
from locas_peft.ttt import perplexity

from .bench import LONG_BOOKS, SHORT_BOOKS, Bench, compare_chunks, find_nats
from .rows import (
    DEFAULT_LORA,
    GAINS,
    LOCAS,
    NARROW,
    NARROW_GAINS,
    NONE,
    PAPER,
    Row,
    lora,
    two_layer_rows,
)
from .sweep import LORA_RATES, find_rate

__all__ = ["best_lora", "fill", "tabulate"]

BEST = "TempLoRA r=64, best rate"
PAPER_NOTE = (
    "The paper, Qwen3-0.6B-Base, 50K to 200K tokens of PG-19: 2K window 27.49 to "
    "27.28, 16K window 25.24 to 24.57, TempLoRA (36.7M parameters) 26.71 to 25.22, Locas (5.5M) "
    "26.58 to 25.00, in 1, 13.9, 4.3 and 1.4 times the time."
)
TWO_LAYER_NOTE = (
    "The paper, a model of 0.6B with two-layer FFNs, 50K to 200K tokens of PG-19: 2K window 19.35 "
    "to 18.72, 4K window 18.98 to 18.31, TempLoRA (41.9M parameters) 18.94 to 17.93, Locas-MLP "
    "(4.2M) with NL-SVD 18.87 to 17.89, with backpropagation 18.89 to 17.90, in 1, 1.4, 4.7, 12.7 "
    "and 1.7 times the time."
)


def _tuned_lora(rate: float) -> Row:
    return lora(64, rate)


def best_lora(bench: Bench, make: bool = False) -> Row | None:
    """Return TempLoRA at the best rate of its sweep on this host; None where it is not known."""
    rate = bench.lora_rate
    if rate is None:
        rate = find_rate(bench, _tuned_lora, LORA_RATES, make)
    if rate is None:
        return None
    return replace(_tuned_lora(rate), name=f"{BEST} ({rate:g})")


def list_rows(bench: Bench, make: bool = False) -> list[Row]:
    """Return the rows of the two long books."""
    wide = 2 * bench.common["window"]
    positions = count_positions(bench.base)
    rows = [NONE]
    if positions is None or wide <= positions:
        rows.append(replace(NONE, name="no memory, window x 2", given={"window": wide}))
    longest = min(positions or wide, bench.scale.book_tokens)
    # Books are longer than most hosts' positions.
    longest = min(2 ** math.floor(math.log2(longest)), 16_384)
    if longest > wide:
        given = {"window": longest, "stride": bench.common["stride"]}
        rows.append(replace(NONE, name=f"no memory, window of {longest:,}", given=given))
    rows += _list_learning(bench, make)
    if bench.is_gated and bench.preset == "tuned":
        rows.append(PAPER)
    return rows


def _list_learning(bench: Bench, make: bool) -> list[Row]:
    """Return the rows that learn and that all books are read with."""
    best = best_lora(bench, make)
    rows = [DEFAULT_LORA]
    if best is not None:
        rows.insert(0, best)
    if bench.is_gated:
        return [*rows, LOCAS, NARROW, GAINS, NARROW_GAINS]
    return [*rows, *two_layer_rows()]


def fill(bench: Bench) -> None:
    """Read the two long books with all rows, and the beginnings of the others with seven."""
    rows = list_rows(bench, make=True)
    rows_of_all_books = [NONE, *_list_learning(bench, make=True)]
    units = []
    for document in LONG_BOOKS:
        for row in rows:
            units.append(bench.reading(row, document, bench.scale.book_tokens))
    for document in SHORT_BOOKS:
        if bench.scale.short_tokens and document not in LONG_BOOKS:
            for row in rows_of_all_books:
                units.append(bench.reading(row, document, bench.scale.short_tokens))
    bench.run(units)


def tabulate(bench: Bench) -> str:
    """Return the tables: each long book at its marks, and the differences over books."""
    parts = []
    for document in LONG_BOOKS:
        table = _tabulate_book(bench, document)
        if table:
            parts.append(f"Book {document}:\n\n{table}")
    if parts and bench.scale.short_tokens:
        books = _tabulate_books(bench)
        if books:
            parts.append(books)
    if parts:
        parts.append(PAPER_NOTE if bench.is_gated else TWO_LAYER_NOTE)
    return "\n\n".join(parts)


def _tabulate_book(bench: Bench, document: str) -> str:
    """Return a book's perplexities at the marks, and the difference from TempLoRA's best rate."""
    tokens = bench.scale.book_tokens
    results: dict[str, dict[str, Any]] = {}
    for row in list_rows(bench):
        result = bench.load(bench.reading(row, document, tokens))
        if result is not None:
            results[row.name] = result
    best = next((result for name, result in results.items() if name.startswith(BEST)), None)
    lines = []
    for name, result in results.items():
        cells = [name, f"{result['figures']['parameters']:,}"]
        cells += [_perplexity(result, mark) for mark in bench.scale.marks]
        difference = "-"
        if best is not None and result is not best:
            difference = format_mean(compare_chunks(result, best), 4)
        gain = _gain(result, results.get(NONE.name), best)
        seconds = result["figures"]["processor_seconds"]
        cells += [difference, gain, "-" if seconds is None else f"{seconds:,.0f}"]
        lines.append(cells)
    if not lines:
        return ""
    head = ["", "parameters", *(f"{mark:,} tokens" for mark in bench.scale.marks)]
    head += ["nats a token to TempLoRA's best", "share of its gain", "processor time, s"]
    return make_table(head, lines)


def _perplexity(result: dict[str, Any], mark: int) -> str:
    nats, counts = find_nats(result, mark)
    return f"{perplexity(sum(nats), sum(counts)):.3f}"


def _gain(result: dict[str, Any], none: dict[str, Any] | None, best: dict[str, Any] | None) -> str:
    """Return which share of TempLoRA's gain in nats, at its best rate, a row has."""
    if none is None or best is None or result is none:
        return "-"
    base = _mean_nats(none)
    return f"{(base - _mean_nats(result)) / (base - _mean_nats(best)):.3f}"


def _mean_nats(result: dict[str, Any], tokens: int | None = None) -> float:
    nats, counts = find_nats(result, tokens)
    return sum(nats) / sum(counts)


def _tabulate_books(bench: Bench) -> str:
    """Return each row's perplexities over the first tokens of six books, and paired differences."""
    tokens = bench.scale.short_tokens
    best = best_lora(bench)
    rows = [NONE, *_list_learning(bench, make=False)]
    if best is None:
        return ""
    found: dict[str, list[float]] = {}
    for row in rows:
        found[row.name] = []
        for document in SHORT_BOOKS:
            length = bench.scale.book_tokens if document in LONG_BOOKS else tokens
            result = bench.load(bench.reading(row, document, length))
            if result is not None:
                found[row.name].append(_mean_nats(result, tokens))
    lines = []
    for name, nats in found.items():
        if len(nats) < len(SHORT_BOOKS):
            continue
        cells = [name, *(f"{math.exp(mean):.2f}" for mean in nats)]
        if len(found[best.name]) == len(nats):
            pairs = zip(nats, found[best.name], strict=True)
            cells.append(format_mean(mean_interval([own - other for own, other in pairs]), 4))
        else:
            cells.append("-")
        lines.append(cells)
    if not lines:
        return ""
    table = make_table(["", *SHORT_BOOKS, "nats a token to TempLoRA's best"], lines)
    note = f"The first {tokens:,} tokens of six books; the interval is over the books (n = 6)."
    return f"{note}\n\n{table}"
