"""The paper's ablations: how a memory's rows are made (table init), and its width (table width)."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from measuring import make_table

from locas_peft.evaluation import Unit
from locas_peft.tables import format_mean

from .bench import LONG_BOOKS, Bench, compare_chunks
from .pg19 import best_lora
from .rows import LOCAS, NONE, Row, locas, lora
from .sweep import LOCAS_RATES, find_rate

__all__ = ["Init", "Width"]

BOOK = LONG_BOOKS[0]
STRATEGIES = {
    "topk": "top-K clones",
    "random": "random clones",
    "bottomk": "bottom-K clones",
    "gaussian": "gaussian",
    "activation": "normalised activations",
}
# The paper found that activations converge at 1e-6 alone.
ACTIVATION_RATES = (4e-3, 1e-3, 1e-6, 1e-4, 1e-5)
WIDTHS = (16, 32, 64, 128)


class Init:
    """Strategies of initialisation, each at the best rate of its own sweep, over seeds."""

    PAPER = (
        "The paper, Qwen3-1.7B-Base, 50K tokens: no memory 20.60, gaussian 20.44, activations "
        "20.58, random clones 20.02, bottom-K 20.04, top-K 20.00."
    )

    def _make_row(self, strategy: str) -> Callable[[float], Row]:
        def make(rate: float) -> Row:
            return locas(64, rate, name=STRATEGIES[strategy], init=strategy)

        return make

    def _choose(self, bench: Bench, strategy: str, make: bool) -> Row | None:
        """Return a strategy's row at its best rate; None where the sweep has not been finished."""
        rates = ACTIVATION_RATES if strategy == "activation" else LOCAS_RATES
        make_row = self._make_row(strategy)
        rate = find_rate(bench, make_row, rates, make)
        return None if rate is None else make_row(rate)

    def _list_units(self, bench: Bench, row: Row) -> list[Unit]:
        seeds = range(bench.scale.seeds)
        return [bench.reading(row, BOOK, bench.scale.ablation_tokens, seed) for seed in seeds]

    def fill(self, bench: Bench) -> None:
        """Read the first tokens of a book with each strategy."""
        if not bench.is_gated:
            return
        units = [bench.reading(NONE, BOOK, bench.scale.ablation_tokens)]
        for strategy in STRATEGIES:
            units += self._list_units(bench, self._choose(bench, strategy, make=True))
        bench.run(units)

    def tabulate(self, bench: Bench) -> str:
        """Return the perplexities by strategy: mean and standard deviation over seeds."""
        if not bench.is_gated:
            return ""
        none = bench.load(bench.reading(NONE, BOOK, bench.scale.ablation_tokens))
        if none is None:
            return ""
        lines = [["no memory", "-", f"{none['figures']['perplexity']:.3f}", "-", "1", "-"]]
        reference = None
        for strategy, label in STRATEGIES.items():
            row = self._choose(bench, strategy, make=False)
            if row is None:
                continue
            loaded = [bench.load(unit) for unit in self._list_units(bench, row)]
            results = [result for result in loaded if result is not None]
            if not results:
                continue
            perplexities = [result["figures"]["perplexity"] for result in results]
            mean = _average_seeds(results)
            difference = "-"
            if strategy == "topk":
                reference = mean
            elif reference is not None:
                difference = format_mean(compare_chunks(mean, reference), 4)
            rate = f"{row.given['learning_rate']:g}"
            lines.append([label, rate, *_spread(perplexities), difference])
        if len(lines) == 1:
            return ""
        numbers = ["perplexity", "standard deviation", "seeds", "nats a token to top-K clones"]
        head = ["", "rate", *numbers]
        note = (
            f"The first {bench.scale.ablation_tokens:,} tokens of book {BOOK}. Differences are of "
            "the means over seeds, paired by chunks."
        )
        return f"{note}\n\n{make_table(head, lines)}\n\n{self.PAPER}"


def _average_seeds(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one reading whose chunks have the mean nats of several readings of a text."""
    chunks = []
    for of_seeds in zip(*(result["figures"]["chunks"] for result in results), strict=True):
        stop, tokens, _ = of_seeds[0]
        chunks.append([stop, tokens, statistics.fmean(chunk[2] for chunk in of_seeds)])
    return {"figures": {"chunks": chunks}}


def _spread(values: list[float]) -> list[str]:
    """Return the cells of a mean, a standard deviation and a count."""
    deviation = "-"
    if len(values) > 1:
        deviation = f"{statistics.stdev(values):.3f}"
    return [f"{statistics.fmean(values):.3f}", deviation, str(len(values))]


class Width:
    """Widths of Locas, at its default rate, and of LoRA at the best rate of r=64's sweep."""

    PAPER = (
        "The paper, Qwen3-1.7B-Base, 50K tokens, r = 16, 32, 64, 128: TempLoRA 20.19, 20.09, "
        "20.03, 20.04; Locas 20.01, 20.01, 20.00, 19.97; no memory 20.60."
    )

    def _list_rows(self, bench: Bench, make: bool) -> Iterator[Row]:
        best = best_lora(bench, make)
        yield NONE
        for width in WIDTHS:
            if best is not None:
                yield lora(width, best.given["learning_rate"])
        for width in WIDTHS:
            if bench.is_gated:
                yield LOCAS if width == 64 else locas(width)

    def fill(self, bench: Bench) -> None:
        """Read the first tokens of a book with each width."""
        units = []
        for row in self._list_rows(bench, make=True):
            units.append(bench.reading(row, BOOK, bench.scale.ablation_tokens))
        bench.run(units)

    def tabulate(self, bench: Bench) -> str:
        """Return the perplexities by width, and the difference from Locas of r=64."""
        results = {}
        for row in self._list_rows(bench, make=False):
            result = bench.load(bench.reading(row, BOOK, bench.scale.ablation_tokens))
            if result is not None:
                results[row.name] = result
        if not results:
            return ""
        reference = results.get(LOCAS.name)
        lines = []
        for name, result in results.items():
            figures = result["figures"]
            difference = "-"
            if reference is not None and result is not reference:
                difference = format_mean(compare_chunks(result, reference), 4)
            cells = [name, f"{figures['parameters']:,}", f"{figures['perplexity']:.3f}", difference]
            lines.append(cells)
        head = ["", "parameters", "perplexity", "nats a token to Locas r=64"]
        note = f"The first {bench.scale.ablation_tokens:,} tokens of book {BOOK}."
        return f"{note}\n\n{make_table(head, lines)}\n\n{self.PAPER}"
