"""The rows of the PG-19 tables and the settings that they are read with.

The learning rates in `RATES` were chosen on book 1684. That book was also used for exploration, so every table lists
it separately. Rule: for each method and width, the rate of the sweep with the lowest perplexity over the last quarter
of its 40,000 tokens, since most of a whole book comes later. For Locas the rate is then halved: over 220,000 tokens of
that book 2e-3 is better than 4e-3, whereas LoRA's best rates do not change. Widths that are not in the sweep take the
rate of the nearest width that is, the lower one between two. The
anchored row keeps 4e-3, the best of the sweep's anchored rows.

The other books were not untouched: before these rates were written down, an earlier version had read 3649 whole with
LoRA and Locas of r 64 at these rates, and 20,000 tokens each of 5274 and 36235. The protocol asks for a sweep on a
training book, but the embedded backbone was trained on all of those. On one of them (2118, "sweep-training") little is
gained; LoRA's best rates are the same there, and those of Locas one step higher than on 1684.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from locas_peft.stages import ReadSettings, complete

HEADLINE = ("3649", "5274", "36235")
TUNING = "1684"
TRAINING = "2118"

RATES: dict[str, float] = {
    "lora@4": 2e-3,
    "lora@16": 2e-3,
    "lora@64": 1e-3,
    "lora@256": 1e-3,
    "locas-glu@4": 4e-3,
    "locas-glu@16": 4e-3,
    "locas-glu@32": 2e-3,
    "locas-glu@64": 2e-3,
    "locas-glu@256": 2e-3,
    "locas-glu@64, paper": 4e-3,
}
"""By method, width and variant. "paper" has tau and rate as published; all other memories have tau times r."""

STRATEGIES = ("gaussian", "activation", "random", "bottomk", "topk")
SEEDED = ("gaussian", "activation", "random")
"""The initialisations that depend on the seed; the others give the same result with every seed."""


@dataclass(frozen=True)
class Row:
    """One row of a table: a method and its settings.

    Args:
        name: in tables and files.
        method: a name in `locas_peft.stages.METHODS`.
        given: settings besides the command's window, stride, seed and model.
        windows: a multiple of the command's window.
        seeds: how many seeds it is read with.
        writer: arguments of the `SlotWriter` of a written memory, in the first block's tables.
    """

    name: str
    method: str = "none"
    given: dict[str, Any] = field(default_factory=dict)
    windows: int = 1
    seeds: int = 1
    writer: dict[str, Any] | None = None

    def settings(
        self, common: ReadSettings, seed: int = 0, max_tokens: int | None = None
    ) -> ReadSettings:
        """Return the row's complete settings.

        Args:
            common: of the method "none", with the command's model, window, stride and dtype.
            seed: of the method.
            max_tokens: how many tokens are read; None for all.
        """
        values = {"context": common.context or "cache", "window": common.window * self.windows}
        if self.method == "locas-glu":
            values["anchor"] = 0.0  # not the preset's
        if self.method != "none":
            values["decay_steps"] = None if self.given.get("update") in ("nlsvd", "ridge") else 0
        if self.method.startswith("locas") and self.given.get("preset") != "paper":
            # The scale of the published tables: tau undivided.
            values |= {"output_scale": "paper", "scaling": float(self.given.get("r", 64))}
        values |= {"method": self.method, "seed": seed, "max_tokens": max_tokens, **self.given}
        return complete(dataclasses.replace(common, **values))

    def describe(self) -> str:
        """Return the settings that the first block's sweep varies."""
        rate = self.given.get("learning_rate")
        parts = [] if rate is None else [f"lr {rate:g}"]
        parts += [
            f"{name} {value}" for name, value in (self.writer or {}).items() if name != "fold"
        ]
        return ", ".join(parts) or "-"


@dataclass(frozen=True)
class Table:
    """What is read for one table.

    Args:
        rows: in the order in which they are read and printed.
        documents: the books, of our evaluation split; all documents where none of ours is given.
        tokens: how many tokens of each are read; None for all.
        unread: books whose first `unread_tokens` are scored after the reading, with the memory frozen. The rise of
            their perplexity is the forgetting.
    """

    rows: tuple[Row, ...]
    documents: tuple[str, ...]
    tokens: int | None = None
    unread: tuple[str, ...] = ()
    unread_tokens: int = 0

    def shorten(self, tokens: int | None) -> Table:
        """Return a table that reads at most `tokens` of each document and a tenth of that of each unread one."""
        if tokens is None:
            return self
        unread_tokens = min(self.unread_tokens, max(2, tokens // 10))
        return dataclasses.replace(
            self, tokens=min(tokens, self.tokens or tokens), unread_tokens=unread_tokens
        )


def locas(r: int, rate: float | None = None, **given: Any) -> Row:
    """Make a row of a gated memory, tau times r."""
    return _make_row(f"locas-glu@{r}", rate, r=r, **given)


def paper(r: int, rate: float | None = None, **given: Any) -> Row:
    """Make a row of a gated memory, tau as published."""
    return _make_row(f"locas-glu@{r}, paper", rate, r=r, preset="paper", **given)


def lora(r: int, rate: float | None = None, **given: Any) -> Row:
    """Make a row of LoRA on every projection; TempLoRA as published recomputes the context."""
    return _make_row(f"lora@{r}", rate, r=r, **given)


_NAMES = {
    "context": "{}",
    "layers_to_transform": "{} layers",
    "init": "{}",
    "scaling": "scaling {:g}",
    "max_slot_norm": "no clip",
    "anchor": "anchor {:g}",
    "anchor_every": "every {}",
    "decay_steps": "decay {}",
}
"""How a setting appears in a row's name."""


def _make_row(key: str, rate: float | None, **given: Any) -> Row:
    parts = [key, *(text.format(given[name]) for name, text in _NAMES.items() if name in given)]
    parts += [] if rate is None else [f"lr {rate:g}"]
    return Row(
        ", ".join(parts), key.partition("@")[0], {"learning_rate": rate or RATES[key], **given}
    )


NONE = Row("none, cache")
NONE_RECOMPUTE = Row("none, recompute", given={"context": "recompute"})
LONG = Row("long, 4 windows", windows=4)
PUBLISHED = {"context": "recompute"}
TEMPLORA = lora(64, **PUBLISHED)
UPPER = {"layers_to_transform": "upper"}
ANCHOR = {"anchor": 1.0}
FALLING = {"decay_steps": 100}
ANCHORED = locas(64, 4e-3, anchor=0.3)


def _initialisations(make: Callable[..., Row]) -> Iterator[Row]:
    for name in STRATEGIES:
        yield dataclasses.replace(make(64, init=name), seeds=3 if name in SEEDED else 1)


def _sweep(make: Callable[..., Row], r: int, *rates: float, **given: Any) -> Iterator[Row]:
    return (make(r, rate, **given) for rate in rates)


# The most important rows first, for a run that is cut short.
_HEADLINE_ROWS = (
    *(
        NONE_RECOMPUTE,
        NONE,
        lora(64),
        locas(64),
        ANCHORED,
        lora(16),
        locas(16),
        locas(32),
        locas(64, **UPPER),
    ),
    *(paper(64), LONG, locas(64, context="recompute"), TEMPLORA, lora(16, **PUBLISHED)),
)
_SWEEP_ROWS = (
    NONE,
    *_sweep(lora, 64, 5e-4, 1e-3, 2e-3, 4e-3),
    *_sweep(locas, 64, 1e-3, 2e-3, 4e-3, 8e-3),
    *_sweep(locas, 64, 2e-3, 4e-3, 8e-3, **ANCHOR),
    *_sweep(lora, 16, 5e-4, 1e-3, 2e-3, 4e-3),
    *_sweep(locas, 16, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    *_sweep(paper, 64, 2e-3, 4e-3, 8e-3, 1.6e-2),
)
_CURVES_ROWS = (
    NONE,
    *_sweep(locas, 64, 2e-3, 4e-3, 8e-3, **ANCHOR),
    *_sweep(lora, 64, 2.5e-4, 5e-4, 1e-3),
    *_sweep(locas, 64, 1e-3, 2e-3, 4e-3),
    *_sweep(lora, 64, 5e-4, 1e-3, **ANCHOR),
    *(
        locas(64, 2e-3, scaling=256.0, **ANCHOR),
        locas(64, 4e-3, **ANCHOR, anchor_every=8),
        ANCHORED,
    ),
    *(lora(8, 1e-3), lora(16, 1e-3), paper(64, 8e-3)),
)
_WIDTH_ROWS = (NONE, *(make(r) for make in (locas, lora) for r in (4, 16, 64, 256)))


# On a pretrained model: the measured output scale, whose rates are those of the presets; LoRA's are the best of
# "pretrained-sweep". LoRA r=11 has as many parameters as Locas r=64 in SmolLM2-135M.
def measured(r: int = 64, rate: float = 4e-3, **given: Any) -> Row:
    """Make a row of a gated memory with the measured output scale."""
    row = _make_row(f"locas-glu@{r}", rate, r=r, **given)
    return dataclasses.replace(row, given={**row.given, "output_scale": "measured", "scaling": 1.0})


_PRETRAINED_ROWS = (
    *(
        NONE_RECOMPUTE,
        NONE,
        dataclasses.replace(lora(64, 1e-3), seeds=3),
        dataclasses.replace(measured(), seeds=3),
    ),
    *(lora(11, 2e-3), measured(anchor=0.3)),
    *(measured(16), measured(256), measured(**UPPER), paper(64)),
    *(measured(init=name) for name in ("gaussian", "random", "bottomk")),
    lora(64, 5e-4, **PUBLISHED),
    *(
        measured(**FALLING),
        measured(**FALLING, anchor=0.3),
        lora(11, 2e-3, **FALLING),
        lora(64, 1e-3, **FALLING),
    ),
)
_PRETRAINED_SWEEP = (
    NONE,
    *_sweep(lora, 64, 5e-4, 1e-3, 2e-3),
    *_sweep(measured, 64, 2e-3, 4e-3, 8e-3),
    *_sweep(lora, 11, 1e-3, 2e-3, 4e-3),
)

TABLES: dict[str, Table] = {
    "headline": Table(_HEADLINE_ROWS, (*HEADLINE, TUNING)),
    "init": Table(
        (NONE, *_initialisations(locas), *_initialisations(paper)), (HEADLINE[0],), 30_000
    ),
    "width": Table(_WIDTH_ROWS, (HEADLINE[0],), 50_000),
    "sweep": Table(_SWEEP_ROWS, (TUNING,), 40_000),
    "curves": Table(
        _CURVES_ROWS, (TUNING,), 60_000, unread=("5274", "36235"), unread_tokens=10_000
    ),
    "sweep-training": Table(_SWEEP_ROWS, (TRAINING,), 20_000),
    "pretrained": Table(
        _PRETRAINED_ROWS, ("3649", "36235"), 50_000, unread=("5274",), unread_tokens=4_096
    ),
    "pretrained-sweep": Table(_PRETRAINED_SWEEP, (TUNING,), 12_288),
}


# ---------------------------------------------------------------------- the first block, on tinybook-mlp


@dataclass(frozen=True)
class Block:
    """What is read for a table of the first block: memories beside two-layer FFNs.

    Args:
        rows: times are relative to the first one.
        document: the book.
        tokens: how many of its tokens are read.
        context: of the rows that do not have their own.
    """

    rows: tuple[Row, ...]
    document: str
    tokens: int
    context: str = "recompute"


# The best of the sweep on book 1684, 30,000 tokens (benchmarks/README.md). The table's book had been read once before,
# on a weaker backbone and with other settings.
_UNTRAINED = {"init": "write", "update": "nlsvd"}
_LORA = Row("TempLoRA", "lora", {"learning_rate": 1e-3})
_NLSVD = Row(
    "Locas-MLP + NL-SVD", "locas-mlp", _UNTRAINED, writer={"fold": "nlsvd", "epsilon": 0.0003}
)
_REFIT = Row(
    "Locas-MLP, written + refit", "locas-mlp", _UNTRAINED, writer={"fold": "refit", "epsilon": 0.03}
)
_TRAINED = {"init": "write", "learning_rate": 5e-4}
_BP = Row("Locas-MLP + BP", "locas-mlp", _TRAINED, writer={"fold": "refit", "epsilon": 0.01})
_TOPK = Row("top-K cloning", "locas-mlp", {"learning_rate": 8e-3})
_RIDGE = Row("ridge, cached", "locas-mlp", {"init": "write", "update": "ridge", "context": "cache"})


def _vary(row: Row, *rates: float, epsilon: float | None = None) -> Iterator[Row]:
    """Make rows with other learning rates, or with another epsilon where no rate is given, or both."""
    writer = row.writer if epsilon is None else {**row.writer, "epsilon": epsilon}
    for rate in rates or (None,):
        given = row.given if rate is None else {**row.given, "learning_rate": rate}
        yield dataclasses.replace(row, given=given, writer=writer)


_BLOCK_ROWS = (
    *(
        Row("none"),
        Row("none, window x2", windows=2),
        Row("none, cached", given={"context": "cache"}),
    ),
    *(_LORA, _NLSVD, _REFIT, _BP, _TOPK, _RIDGE),
)
_BLOCK_SWEEP = (
    Row("none"),
    *_vary(_LORA, 5e-4, 1e-3, 2e-3, 4e-3),
    *_vary(_TOPK, 2e-3, 4e-3, 8e-3, 1.6e-2),
    *_vary(_BP, 2.5e-4, 5e-4, 1e-3, 2e-3),
    *(*_vary(_BP, 1e-3, epsilon=0.001), *_vary(_BP, 1e-3, epsilon=0.1)),
    *(row for epsilon in (0.0003, 0.001, 0.003) for row in _vary(_NLSVD, epsilon=epsilon)),
    *(row for epsilon in (0.003, 0.01, 0.03) for row in _vary(_REFIT, epsilon=epsilon)),
)
BLOCKS = {
    "first-block": Block(_BLOCK_ROWS, "3649", 50_000),
    "first-block-sweep": Block(_BLOCK_SWEEP, "1684", 30_000, "cache"),
}
