"""The first block of the paper's PG-19 table, on tinybook-mlp: memories beside two-layer FFNs.

No memory at two windows, TempLoRA, Locas-MLP with NL-SVD, Locas-MLP with gradient descent (BP), and top-K cloning; and
one of ours, written slots whose values are refitted when the memory is folded, without any training. Every row has its
own copy of the base, and the rows take turns chunk by chunk, so that their times compare on a machine that does other
things besides. Relative time is the chunks' wall time over that of `none` re-reading its window. `ROWS` has the
settings that the sweep chose on book 1684, which had been explored on; the table's book had been read once before, on
a weaker backbone and with other settings.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from locas_peft import Chunk, LocasConfig, SlotWriter, TestTimeTrainer, backbone
from locas_peft.evaluation.perplexity import at_marks, perplexity

TURN_CHUNKS = 4
MARKS = (10_000, 20_000, 30_000, 50_000, 100_000, 150_000, 200_000)


@dataclass(frozen=True)
class Row:
    """One row: what is attached to the base and how it is taught. `window` is a multiple of the command's."""

    name: str
    kind: str = "none"
    learning_rate: float | None = None
    r: int = 64
    windows: int = 1
    context: str | None = None
    gradient: str = "full"
    writer: dict[str, Any] | None = field(default=None)

    def describe(self) -> str:
        """The settings that a sweep varies."""
        parts = [] if self.learning_rate is None else [f"lr {self.learning_rate:g}"]
        parts += [self.gradient] if self.gradient != "full" else []
        parts += [f"{name} {value}" for name, value in (self.writer or {}).items() if name != "fold"]
        return ", ".join(parts) or "-"


# The best of the sweep on book 1684, 30,000 tokens (benchmarks/README.md).
CHUNKWISE = {"fold": "refit", "tokens": "all", "normalization": "chunk"}
LORA = Row("TempLoRA", "lora", 1e-3)
NLSVD = Row("Locas-MLP + NL-SVD", "write", None, writer={"fold": "nlsvd", "epsilon": 0.0003})
BP = Row("Locas-MLP + BP", "write", 5e-4, writer={"fold": "refit", "epsilon": 0.01})
BP_CHUNKWISE = Row("Locas-MLP + BP", "write", 5e-4, writer={**CHUNKWISE, "epsilon": 0.03})
REFIT = Row("Locas-MLP, written + refit", "write", writer={**CHUNKWISE, "epsilon": 0.03})
TOPK = Row("top-K cloning", "topk", 8e-3)

ROWS = [
    Row("none"),
    Row("none, window x2", windows=2),
    Row("none, cached", context="cache"),
    LORA,
    NLSVD,
    REFIT,
    BP,
    BP_CHUNKWISE,
    TOPK,
]
SWEEP = [
    *(replace(LORA, learning_rate=rate) for rate in (5e-4, 1e-3, 2e-3, 4e-3)),
    *(replace(TOPK, learning_rate=rate) for rate in (2e-3, 4e-3, 8e-3, 1.6e-2)),
    *(replace(BP, learning_rate=rate) for rate in (2.5e-4, 5e-4, 1e-3, 2e-3)),
    *(replace(BP, learning_rate=1e-3, writer={**BP.writer, "epsilon": epsilon}) for epsilon in (0.001, 0.1)),
    *(
        replace(BP_CHUNKWISE, learning_rate=rate, writer={**CHUNKWISE, "epsilon": epsilon})
        for rate, epsilon in ((5e-4, 0.01), (5e-4, 0.03), (1e-3, 0.01))
    ),
    *(replace(NLSVD, writer={**NLSVD.writer, "epsilon": epsilon}) for epsilon in (0.0003, 0.001, 0.003)),
    *(replace(REFIT, writer={**REFIT.writer, "epsilon": epsilon}) for epsilon in (0.003, 0.01, 0.03)),
    *(replace(row, gradient="tokenwise") for row in (TOPK, BP, BP_CHUNKWISE, REFIT)),
]


@dataclass(frozen=True)
class Block:
    """What is read for one table.

    Args:
        rows: the first is what times are relative to.
        document: the book.
        tokens: how many of it are read.
        context: of the rows that do not have their own.
    """

    rows: tuple[Row, ...]
    document: str
    tokens: int
    context: str = "recompute"


BLOCKS = {
    "first-block": Block(tuple(ROWS), "3649", 50_000),
    "first-block-sweep": Block((Row("none"), *SWEEP), "1684", 30_000, "cache"),
}


def read_in_turns(
    rows: Sequence[Row], context: str, window: int, stride: int, ids: torch.Tensor
) -> list[dict[str, Any]]:
    """Reads a book with every row, a few chunks each at a time; an interrupt (SIGINT) ends it early.

    Args:
        rows: the first is what times are relative to.
        context: of the rows that do not have their own.
        window: tokens that a prediction may rest on, and the chunk with them.
        stride: tokens of a chunk.
        ids: LongTensor [T].

    Returns:
        One dictionary a row, of what every row has read.
    """
    readings = [_start(row, context, window, stride, ids) for row in rows]
    chunks = -(-len(ids) // stride)
    try:
        for first in range(0, chunks, TURN_CHUNKS):
            for reading, _, _ in readings:
                for _ in range(min(TURN_CHUNKS, chunks - first)):
                    next(reading)
            print(f"{min(first + TURN_CHUNKS, chunks)}/{chunks} chunks", file=sys.stderr, end="\r", flush=True)
    except KeyboardInterrupt:
        print("stopped: the figures are of what every row has read", file=sys.stderr)
    read = min(len(trainer.chunks) for _, trainer, _ in readings)
    results = []
    for row, (_, trainer, parameters) in zip(rows, readings, strict=True):
        done = trainer.chunks[:read]
        results.append(
            {
                "row": row.name,
                "tokens": done[-1].stop,
                "settings": row.describe(),
                "perplexity_at": at_marks(done, [mark for mark in MARKS if mark <= done[-1].stop]),
                "perplexity": perplexity(sum(c.nll_nats for c in done), sum(c.tokens for c in done)),
                "extra_parameters": parameters,
                "seconds": sum(chunk.seconds for chunk in done),
                "median_chunk_seconds": statistics.median(chunk.seconds for chunk in done),
                "skipped_chunks": trainer.skipped_chunks,
                "folds": None if trainer.writer is None else trainer.writer.folds,
            }
        )
    return results


def to_markdown(results: list[dict[str, Any]]) -> str:
    """Gives the table of `read_in_turns`; times are relative to the first row's."""
    marks = list(results[0]["perplexity_at"])
    head = ["row", "settings", *(f"{int(mark):,}" for mark in marks), "all", "parameters", "relative time"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for result in results:
        cells = [result["row"], result["settings"], *(f"{result['perplexity_at'][mark]:.2f}" for mark in marks)]
        relative = result["seconds"] / results[0]["seconds"]
        cells += [f"{result['perplexity']:.2f}", f"{result['extra_parameters']:,}", f"{relative:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _start(
    row: Row, context: str, window: int, stride: int, ids: torch.Tensor
) -> tuple[Iterator[Chunk], TestTimeTrainer, int]:
    """Gives a row's reading, its trainer, and its extra parameters."""
    model, parameters = _build(row)
    trainer = TestTimeTrainer(
        model,
        window=window * row.windows,
        stride=stride,
        learning_rate=row.learning_rate,
        context=row.context or context,
        gradient=row.gradient,
        writer=None if row.writer is None else SlotWriter(model, **row.writer),
    )
    return trainer.read(ids), trainer, parameters


def _build(row: Row) -> tuple[nn.Module, int]:
    """Gives a fresh base with a row's adapter, and how many parameters that adds."""
    base, _ = backbone.load(name=backbone.MLP_NAME)
    base.requires_grad_(False)
    if row.kind == "none":
        return base, 0
    torch.manual_seed(0)
    if row.kind == "lora":
        config = LoraConfig(r=row.r, lora_alpha=row.r, lora_dropout=0.0, target_modules="all-linear")
    else:
        config = LocasConfig(r=row.r, init_strategy=row.kind, scaling=float(row.r))
    model = get_peft_model(base, config)
    return model, sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
