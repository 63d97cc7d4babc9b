"""The paper's table of MMLU: what a model has lost after it has read a whole book."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from measuring import make_table
from torch import nn

from locas_peft.evaluation import Unit
from locas_peft.evaluation.drift import cut_pieces, measure_drift
from locas_peft.evaluation.intervals import mean_interval, rise_interval
from locas_peft.memories import checkpoint, memory_attached
from locas_peft.memories.folder import MEMORY_CONFIG
from locas_peft.tables import format_mean, format_percent

from . import choices
from .bench import LONG_BOOKS, UNREAD_BOOK, Bench
from .pg19 import best_lora
from .rows import DEFAULT_LORA, GAINS, LOCAS, NONE, Row, locas, lora, with_anchor

__all__ = ["compare_answers", "fill", "make_measure", "tabulate"]

BOOK = LONG_BOOKS[0]
PROBES = ("arc_challenge", "piqa", "openbook_qa")
FEW_SHOT = "mmlu-5-shot"
SETS = ("mmlu", FEW_SHOT, *PROBES, "blimp")
PAPER_NOTE = (
    "The paper, Qwen3-1.7B-Base, all of MMLU after a whole book: none 60.4, TempLoRA 59.8 (-0.6), "
    "Locas 60.2 (-0.2); of r=512 59.2 (-1.2) and 60.3 (-0.1)."
)

Measure = Callable[[nn.Module], dict[str, Any]]


def list_rows(bench: Bench, make: bool) -> list[Row]:
    """Return the rows, the base first: each method with and without the anchor."""
    rows = [NONE, DEFAULT_LORA, with_anchor(DEFAULT_LORA)]
    best = best_lora(bench, make)
    if best is not None:
        rows += [best, with_anchor(best)]
    if bench.is_gated:
        rows.append(LOCAS)
        if bench.settings(LOCAS).anchor:
            rows.append(locas(name="Locas r=64, without the anchor", anchor=0.0))
        rows.append(GAINS)
    width = bench.scale.large_width
    if width is not None:
        rows += [lora(width), locas(width)]
    return rows


def ask_letters(bench: Bench, with_examples: bool) -> Measure:
    """Prepare MMLU by letters, zero-shot or with the five examples of each subject."""
    items = choices.load_mmlu(bench.data / "mmlu" / "test.jsonl", bench.scale.questions)
    examples = []
    if with_examples:
        examples = choices.load_mmlu(bench.data / "mmlu" / "dev.jsonl")

    def measure(model: nn.Module) -> dict[str, Any]:
        right = choices.find_right_letters(model, bench.tokenizer, items, examples)
        return {"right": _to_numbers(right)}

    return measure


def ask_choices(bench: Bench, name: str) -> Measure:
    """Prepare the questions of a set in `PROBES`."""
    items = choices.load_items(bench.data / "probes" / f"{name}.jsonl", bench.scale.probes)

    def measure(model: nn.Module) -> dict[str, Any]:
        plain, by_character = choices.find_right_choices(model, bench.tokenizer, items)
        return {"right": _to_numbers(plain), "by_character": _to_numbers(by_character)}

    return measure


def ask_pairs(bench: Bench) -> Measure:
    """Prepare BLiMP's pairs."""
    pairs = choices.load_pairs(bench.data / "blimp" / "BLiMP.zip", bench.scale.pairs)

    def measure(model: nn.Module) -> dict[str, Any]:
        return {"right": _to_numbers(choices.find_pairs(model, bench.tokenizer, pairs))}

    return measure


def read_unread(bench: Bench) -> Measure:
    """Prepare a book that no memory has read."""
    ids = bench.document(UNREAD_BOOK, bench.scale.unread_tokens)
    return partial(measure_drift, pieces=cut_pieces(ids, **bench.common))


def compare_answers(bench: Bench) -> Measure:
    """Prepare the base's own answers, which it writes before a memory is attached."""
    return partial(measure_drift, pieces=bench.own_answers)


MEASURES: dict[str, Callable[[Bench], Measure]] = {
    "mmlu": partial(ask_letters, with_examples=False),
    FEW_SHOT: partial(ask_letters, with_examples=True),
}
MEASURES |= {name: partial(ask_choices, name=name) for name in PROBES}
MEASURES |= {"blimp": ask_pairs, "unread": read_unread, "own-answers": compare_answers}


def _to_numbers(flags: list[bool]) -> list[int]:
    return [int(flag) for flag in flags]


def _list_units(bench: Bench, row: Row) -> dict[str, Unit]:
    """Return the units of a state, by measure; those of a memory need its reading."""
    reading = None
    if row is not NONE:
        reading = bench.reading(row, BOOK, bench.scale.memory_tokens)
    slug = bench.name_file(row)
    units = {}
    for name, prepare in MEASURES.items():
        if name == FEW_SHOT and not bench.scale.few_shot:
            continue
        about = {"row": slug, "measure": name, "book": BOOK, "tokens": bench.scale.memory_tokens}
        if row is NONE:
            about = {"row": slug, "measure": name}
        units[name] = bench.unit(
            f"mmlu/{slug}/{name}.json", about, make_measure(bench, reading, prepare), reading
        )
    return units


def make_measure(
    bench: Bench, reading: Unit | None, prepare: Callable[[Bench], Measure]
) -> Callable[[Unit], dict[str, Any]]:
    """Return what makes a unit's figures: a measure of the memory of a reading, or of the base."""

    def run(unit: Unit) -> dict[str, Any]:
        measure = prepare(bench)
        attached = nullcontext(bench.base)
        if reading is not None:
            _make_memory(reading)
            attached = memory_attached(bench.base, reading.memory)
        with attached as model:
            return measure(model)

    return run


def _make_memory(reading: Unit) -> None:
    """Read the book again where the memory of a reading is missing.

    The results are kept in the repository, the memories are not. An interrupted reading leaves a
    folder with a checkpoint alone.
    """
    with checkpoint.held(reading.lock):
        if not (reading.memory / MEMORY_CONFIG).exists():
            reading.make()


def fill(bench: Bench) -> None:
    """Read a book with each row, and measure the base and each memory."""
    units = []
    for row in list_rows(bench, make=True):
        units += _list_units(bench, row).values()
    bench.run(units)


def tabulate(bench: Bench) -> str:
    """Return accuracies and their paired drops, and the drift on other text."""
    accuracies = []
    drifts = []
    before = _load(bench, NONE)
    if "mmlu" not in before:
        return ""
    for row in list_rows(bench, make=False):
        after = _load(bench, row)
        if not after:
            continue
        accuracies.append([row.name, *_list_accuracies(before, after, row is NONE)])
        drifts.append([row.name, *_list_drifts(before, after)])
    head = [""]
    for name in SETS:
        if name in before:
            head.append(f"{name} (n={len(before[name]['right'])})")
    note = (
        f"After {bench.scale.memory_tokens:,} tokens of book {BOOK}: accuracy in %, and below the "
        "first row its change with a paired 95% interval over questions. MMLU is by letters; "
        "ARC, PIQA and OpenBookQA are by the choice's log-likelihood a character."
    )
    unread = f"book {UNREAD_BOOK}, {bench.scale.unread_tokens:,} tokens: perplexity"
    drift_head = ["", unread, "its change", "KL from the base on its own answers, nats a token"]
    tables = [make_table(head, accuracies), make_table(drift_head, drifts)]
    return "\n\n".join([note, *tables, PAPER_NOTE])


def _load(bench: Bench, row: Row) -> dict[str, dict[str, Any]]:
    """Return the figures of a state that have been made, by measure."""
    figures = {}
    for name, unit in _list_units(bench, row).items():
        result = bench.load(unit)
        if result is not None:
            figures[name] = result["figures"]
    return figures


def _list_accuracies(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]], is_base: bool
) -> list[str]:
    cells = []
    for name in SETS:
        if name not in before:
            continue
        if name not in after:
            cells.append("-")
            continue
        key = "by_character" if name in PROBES else "right"
        own = after[name][key]
        if is_base:
            cells.append(format_percent(mean_interval(own)))
            continue
        changes = [new - old for new, old in zip(own, before[name][key], strict=True)]
        cells.append(format_percent(mean_interval(changes), 2))
    return cells


def _list_drifts(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    cells = ["-", "-", "-"]
    if "unread" in before and "unread" in after:
        unread = after["unread"]
        cells[0] = f"{unread['perplexity']:.2f}"
        rise = rise_interval(
            before["unread"]["chunk_nll_nats"], unread["chunk_nll_nats"], unread["chunk_tokens"]
        )
        cells[1] = format_mean(rise, 2)
    if "own-answers" in after:
        cells[2] = format_mean(mean_interval(after["own-answers"]["chunk_kl_nats"]), 4)
    return cells
