"""The rows of the tables that read a book: a method, and the settings that differ from its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from locas_peft import TestTimeTrainer
from locas_peft.stages import ReadSettings, attached, complete, make_trainer

__all__ = [
    "DEFAULT_LORA",
    "GAINS",
    "LOCAS",
    "NARROW",
    "NARROW_GAINS",
    "NONE",
    "PAPER",
    "Row",
    "locas",
    "lora",
    "two_layer_rows",
    "with_anchor",
]

ANCHOR = 0.3


@dataclass(frozen=True)
class Row:
    """A method that reads a text with test-time training.

    Args:
        name: in the tables.
        method: of `ReadSettings`.
        given: the other settings that are not the method's own.
    """

    name: str
    method: str
    given: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, common: Mapping[str, Any], seed: int = 0) -> ReadSettings:
        """Return the settings of a reading; `common` has those that all rows share."""
        return ReadSettings(method=self.method, **{**common, **self.given}, seed=seed)

    @contextmanager
    def open(
        self,
        base: PreTrainedModel,
        common: Mapping[str, Any],
        seed: int = 0,
        compiled: bool = False,
    ) -> Iterator[TestTimeTrainer]:
        """Attach the row's fresh adapter within the context, and yield the trainer of a reading."""
        settings = complete(self.settings(common, seed), base)
        with attached(base, settings) as model:
            yield make_trainer(model, settings, compiled)


def lora(r: int = 64, rate: float | None = None, name: str = "", **given: Any) -> Row:
    """Make a row of TempLoRA: PEFT's LoRA on every projection, in the same loop."""
    return _make_row("TempLoRA", "lora", r, rate, name, given)


def locas(r: int = 64, rate: float | None = None, name: str = "", **given: Any) -> Row:
    """Make a row of a Locas memory beside gated FFNs."""
    return _make_row("Locas", "locas-glu", r, rate, name, given)


def _make_row(
    label: str, method: str, r: int, rate: float | None, name: str, given: dict[str, Any]
) -> Row:
    given = {"r": r, **given}
    label = f"{label} r={r}"
    if rate is not None:
        given["learning_rate"] = rate
        label += f" at {rate:g}"
    return Row(name or label, method, given)


def with_anchor(row: Row) -> Row:
    """Return a row with the anchor that a memory has by default."""
    given = {**row.given, "anchor": ANCHOR}
    return replace(row, name=f"{row.name}, with the anchor", given=given)


NONE = Row("no memory", "none")
LOCAS = locas(name="Locas r=64")
NARROW = locas(16, name="Locas r=16")
GAINS = locas(name="Locas r=64 with gains", gains=True)
NARROW_GAINS = locas(16, name="Locas r=16 with gains", gains=True)
PAPER = locas(name="Locas r=64, preset paper", preset="paper")
DEFAULT_LORA = lora(name="TempLoRA r=64, default rate")


def two_layer_rows() -> list[Row]:
    """Return the rows of hosts with two-layer FFNs: slots that are written, clones, and ridge."""
    return [
        Row("Locas-MLP, backpropagation", "locas-mlp", {"preset": "paper"}),
        Row("Locas-MLP, NL-SVD", "locas-mlp", {"preset": "paper", "update": "nlsvd"}),
        Row("Locas-MLP, clones", "locas-mlp"),
        Row("Locas-MLP, ridge", "locas-mlp", {"init": "write", "update": "ridge"}),
    ]
