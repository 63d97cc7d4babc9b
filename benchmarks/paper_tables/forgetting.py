"""Forgetting over books: the KL on the base's own answers after a reading of each."""

from measuring import make_table

from locas_peft.evaluation import Unit
from locas_peft.evaluation.intervals import mean_interval
from locas_peft.tables import format_mean

from .bench import SHORT_BOOKS, Bench
from .mmlu import compare_answers, make_measure
from .pg19 import best_lora
from .rows import LOCAS, Row, with_anchor

__all__ = ["fill", "tabulate"]

BOOKS = SHORT_BOOKS[2:]
"""Those of which the table pg19 reads the beginning alone."""


def list_rows(bench: Bench, make: bool) -> list[Row]:
    """Return the two methods, both with the memory's anchor; the memory first."""
    if not bench.scale.short_tokens or not bench.is_gated:
        return []
    best = best_lora(bench, make)
    if best is None:
        return []
    return [LOCAS, with_anchor(best) if bench.settings(LOCAS).anchor else best]


def _make_unit(bench: Bench, row: Row, book: str) -> Unit:
    """Return the unit of a memory of one book; it needs the reading."""
    tokens = bench.scale.short_tokens
    reading = bench.reading(row, book, tokens)
    slug = bench.name_file(row)
    about = {"row": slug, "measure": "own-answers", "book": book, "tokens": tokens}
    measure = make_measure(bench, reading, compare_answers)
    return bench.unit(f"forgetting/{book}-{tokens}/{slug}.json", about, measure, reading)


def fill(bench: Bench) -> None:
    """Read the beginning of each book with each row, and compare the base's own answers."""
    rows = list_rows(bench, make=True)
    bench.run([_make_unit(bench, row, book) for book in BOOKS for row in rows])


def tabulate(bench: Bench) -> str:
    """Return the KL by book, and the paired difference from the memory over the books."""
    rows = list_rows(bench, make=False)
    means = {row.name: _find_means(bench, row) for row in rows}
    books = [book for book in BOOKS if all(book in found for found in means.values())]
    if not means or not books:
        return ""
    memory = means[LOCAS.name]
    lines = []
    for name, found in means.items():
        cells = [name, *(f"{found[book]:.4f}" for book in books)]
        cells.append(format_mean(mean_interval([found[book] for book in books]), 4))
        differences = [found[book] - memory[book] for book in books]
        cells.append("-" if found is memory else format_mean(mean_interval(differences), 4))
        lines.append(cells)
    note = (
        f"After {bench.scale.short_tokens:,} tokens of each of {len(books)} books: the KL from the "
        "base on its own answers, nats a token; intervals are over the books."
    )
    table = make_table(["", *books, "mean", f"more than {LOCAS.name}"], lines)
    return f"{note}\n\n{table}"


def _find_means(bench: Bench, row: Row) -> dict[str, float]:
    """Return the mean KL over the answers, by book, of the memories that were measured."""
    means = {}
    for book in BOOKS:
        result = bench.load(_make_unit(bench, row, book))
        if result is not None:
            kls = result["figures"]["chunk_kl_nats"]
            means[book] = sum(kls) / len(kls)
    return means
