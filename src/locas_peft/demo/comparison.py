"""`locas demo --full`: studies of several pages with several seeds, by several methods.

Each result is a JSON file of its own, so that a run that was stopped goes on with what is left.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel

from ..asking import Answer, Answerer
from ..evaluation.intervals import mean_interval
from ..evaluation.units import Unit, run_units
from ..exchanges import PER_PASSAGE, Exchange, write_exchanges
from ..progress import Progress, silent
from ..stages import Place, StudySettings
from ..tables import Sheet, format_percent
from ..text import digest_json, split_passages
from .pages import COMPARED, load_page, load_page_questions
from .studying import study_and_ask

__all__ = ["IN_CONTEXT", "SEEDS", "Comparison"]

SEEDS = (0, 1, 2)
IN_CONTEXT = "page in context"
NONE = "no memory"


@dataclass(frozen=True)
class Comparison:
    """Studies of pages, compared by the answers to questions about them.

    Args:
        base, tokenizer: a causal LM that answers questions, and its tokenizer.
        methods: complete settings by method; the seed is that of the comparison.
        out: the folder of the results. Those of another model, dtype or setting lie in another
            folder in it.
        pages: names of pages.
        seeds: of the studies.
    """

    base: PreTrainedModel
    tokenizer: Any
    methods: Mapping[str, StudySettings]
    out: Path
    pages: Sequence[str] = COMPARED
    seeds: Sequence[int] = SEEDS

    @property
    def folder(self) -> Path:
        """The folder of the results of these settings."""
        settings = {name: asdict(chosen) for name, chosen in self.methods.items()}
        return self.out / digest_json(settings)[:8]

    def run(self, progress: Progress = silent) -> Sheet:
        """Make the results that do not exist; return the table of all."""
        self.base.eval()
        units = self._list_units()
        run_units([unit for row in units.values() for unit in row], progress)
        return self._tabulate(units)

    def _list_units(self) -> dict[str, list[Unit]]:
        """Return the units of each row of the table."""
        rows: dict[str, list[Unit]] = {NONE: [], IN_CONTEXT: []}
        for page in self.pages:
            rows[NONE].append(self._unit(page, NONE, self._ask_base(page, "")))
            in_context = self._ask_base(page, load_page(page))
            rows[IN_CONTEXT].append(self._unit(page, IN_CONTEXT, in_context))
            for seed in self.seeds:
                # Written once for all methods: no adapter takes part in it.
                exchanges = self._unit(page, f"exchanges-seed{seed}", self._write(page, seed))
                for method in self.methods:
                    make = self._teach(page, method, seed, exchanges)
                    unit = self._unit(page, f"{method}-seed{seed}", make, exchanges)
                    rows.setdefault(method, []).append(unit)
        return rows

    def _unit(
        self,
        page: str,
        name: str,
        make: Callable[[], dict[str, Any] | list[Any]],
        needs: Unit | None = None,
    ) -> Unit:
        file = name.replace(" ", "-")
        return Unit(self.folder / page / f"{file}.json", make, needs)

    def _ask_base(self, page: str, context: str) -> Callable[[], dict[str, Any]]:
        def make() -> dict[str, Any]:
            answerer = Answerer(self.base, self.tokenizer, context=context)
            return {"page": page, **_describe(answerer.answer(load_page_questions(page)))}

        return make

    def _write(self, page: str, seed: int) -> Callable[[], list[Any]]:
        def make() -> list[Any]:
            passages = split_passages(self.tokenizer, load_page(page))
            exchanges: list[Exchange] = []
            for written in write_exchanges(
                self.base, self.tokenizer, passages, PER_PASSAGE, seed=seed
            ):
                exchanges += written.exchanges
            return [asdict(exchange) for exchange in exchanges]

        return make

    def _teach(
        self, page: str, method: str, seed: int, exchanges: Unit
    ) -> Callable[[], dict[str, Any]]:
        def make() -> dict[str, Any]:
            given = [Exchange(**fields) for fields in exchanges.load()]
            settings = replace(self.methods[method], seed=seed)
            with TemporaryDirectory() as folder:
                record, answers = study_and_ask(
                    self.base,
                    self.tokenizer,
                    load_page(page),
                    settings,
                    Place(out=Path(folder) / "memory"),
                    load_page_questions(page),
                    exchanges=given,
                )
            return {
                "page": page,
                "seed": seed,
                "parameters": record.extra_parameters,
                "seconds": record.learning_seconds,
                **_describe(answers),
            }

        return make

    def _tabulate(self, rows: Mapping[str, Sequence[Unit]]) -> Sheet:
        lines = []
        for name, units in rows.items():
            results = [unit.load() for unit in units]
            lines.append(_make_line(name, results))
        count = len(self.pages)
        title = (
            f"{count} pages, {len(self.seeds)} seeds: answers that have the right words, in %, "
            "with 95% intervals over questions"
        )
        headers = ["", "right, %", "of a page: sd over seeds", "parameters", "learned in, s"]
        return Sheet(title, headers, lines)


def _describe(answers: Sequence[Answer]) -> dict[str, Any]:
    return {
        "right": [int(bool(answer.right)) for answer in answers],
        "answers": [answer.text for answer in answers],
    }


def _make_line(name: str, results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a row of the table, from a method's results of all pages and seeds."""
    by_page: dict[str, list[list[int]]] = {}
    for result in results:
        by_page.setdefault(result["page"], []).append(result["right"])
    shares = []
    deviations = []
    for runs in by_page.values():
        shares += [mean(flags) for flags in zip(*runs, strict=True)]
        if len(runs) > 1:
            deviations.append(stdev(sum(run) for run in runs))
    line = [name, format_percent(mean_interval(shares))]
    line.append(f"{mean(deviations):.1f}" if deviations else "-")
    if "seconds" not in results[0]:
        return [*line, "0", "-"]
    seconds = mean(result["seconds"] for result in results)
    return [*line, f"{results[0]['parameters']:,}", f"{seconds:.0f}"]
