"""Learning rates: each row's best one on a training book, which reports nothing else."""

from collections.abc import Callable

from measuring import make_table

from locas_peft.evaluation import Unit

from .bench import SWEEP_BOOK, Bench
from .rows import Row, locas, lora

__all__ = ["LOCAS_RATES", "LORA_RATES", "fill", "find_best", "find_rate", "tabulate"]

# The first ones are tried at every scale.
LORA_RATES = (3e-4, 1e-3, 1e-4, 5e-5, 2e-3)
LOCAS_RATES = (4e-3, 2e-3, 8e-3, 1e-3, 1.6e-2)

MakeRow = Callable[[float], Row]


def list_units(bench: Bench, make_row: MakeRow, rates: tuple[float, ...]) -> dict[float, Unit]:
    """Return the readings of a sweep, by rate."""
    units = {}
    for rate in rates[: bench.scale.rates]:
        units[rate] = bench.reading(make_row(rate), SWEEP_BOOK, bench.scale.sweep_tokens)
    return units


def find_rate(
    bench: Bench, make_row: MakeRow, rates: tuple[float, ...], make: bool
) -> float | None:
    """Return the rate of a sweep on the training book with the lowest perplexity.

    Args:
        make: whether the readings that are missing are made. Without them the rate is None where
            one is missing.
    """
    units = list_units(bench, make_row, rates)
    if make:
        bench.run(list(units.values()))
    return find_best(units)


def find_best(units: dict[float, Unit]) -> float | None:
    """Return the rate of the reading with the lowest perplexity; None where one is missing."""
    perplexities = {}
    for rate, unit in units.items():
        if not unit.is_finished:
            return None
        perplexities[rate] = unit.load()["figures"]["perplexity"]
    return min(perplexities, key=perplexities.__getitem__)


def _list_sweeps(bench: Bench) -> list[tuple[str, MakeRow, tuple[float, ...]]]:
    """Return the sweeps of this table: their labels, rows and rates."""
    sweeps: list[tuple[str, MakeRow, tuple[float, ...]]] = [
        ("TempLoRA r=64", lambda rate: lora(64, rate), LORA_RATES)
    ]
    if bench.is_gated:
        sweeps.append(("Locas r=64", lambda rate: locas(64, rate), LOCAS_RATES))
    return sweeps


def fill(bench: Bench) -> None:
    """Read the training book with TempLoRA and Locas at several rates."""
    for _, make_row, rates in _list_sweeps(bench):
        find_rate(bench, make_row, rates, make=True)


def tabulate(bench: Bench) -> str:
    """Return the perplexities of the training book by rate."""
    rows = []
    for label, make_row, rates in _list_sweeps(bench):
        units = list_units(bench, make_row, rates)
        for rate in sorted(units):
            result = bench.load(units[rate])
            if result is not None:
                rows.append([label, f"{rate:g}", f"{result['figures']['perplexity']:.3f}"])
    if not rows:
        return ""
    note = f"The first {bench.scale.sweep_tokens:,} tokens of training book {SWEEP_BOOK}."
    return f"{note}\n\n{make_table(['row', 'rate', 'perplexity'], rows)}"
