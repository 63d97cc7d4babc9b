"""Online perplexity of whole books: the paper's PG-19 table on the embedded backbones.

    python benchmarks/pg19.py --book eval/3649.txt --tokens 50000
    python benchmarks/pg19.py --book train/2118.txt --tokens 30000 --sweep

The first block of the table, on tinybook-mlp: no memory at two windows, TempLoRA, Locas-MLP with NL-SVD, Locas-MLP
with gradient descent (BP), and top-K cloning; and one of ours, written slots whose values are refitted when the memory
is folded, without any training. Each chunk is scored before it is learned; every row has its own copy of the
base, and the rows take turns chunk by chunk, so that their times compare on a machine that does other things besides.
Relative time is the chunks' wall time over that of `none` re-reading its window. The settings in `ROWS` were chosen by
`--sweep` on a book that the backbone was trained on, before an evaluation book was opened. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from locas_peft import Chunk, LocasConfig, SlotWriter, TestTimeTrainer, backbone
from locas_peft.evaluation.perplexity import at_marks, perplexity
from locas_peft.text import tokenize, unwrap

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
    writer: dict[str, Any] | None = field(default=None)

    def describe(self) -> str:
        """The settings that a sweep varies."""
        parts = [] if self.learning_rate is None else [f"lr {self.learning_rate:g}"]
        parts += [f"{name} {value}" for name, value in (self.writer or {}).items() if name != "fold"]
        return ", ".join(parts) or "-"


# The best of the sweep on book 2118, 30,000 tokens (benchmarks/README.md).
CHUNKWISE = {"fold": "refit", "tokens": "all", "normalization": "chunk"}
LORA = Row("TempLoRA", "lora", 2e-3)
NLSVD = Row("Locas-MLP + NL-SVD", "write", None, writer={"fold": "nlsvd", "epsilon": 0.001})
BP = Row("Locas-MLP + BP", "write", 4e-3, writer={"fold": "refit", "epsilon": 0.01})
BP_CHUNKWISE = Row("Locas-MLP + BP", "write", 2e-3, writer={**CHUNKWISE, "epsilon": 0.03})
REFIT = Row("Locas-MLP, written + refit", "write", writer={**CHUNKWISE, "epsilon": 0.1})
TOPK = Row("top-K cloning", "topk", 1.6e-2)

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
    *(replace(LORA, learning_rate=rate) for rate in (1e-3, 2e-3, 4e-3)),
    *(replace(TOPK, learning_rate=rate) for rate in (4e-3, 8e-3, 1.6e-2, 3.2e-2)),
    *(replace(BP, learning_rate=rate) for rate in (1e-3, 2e-3, 4e-3, 8e-3)),
    replace(BP, learning_rate=2e-3, writer={**BP.writer, "epsilon": 0.1}),
    *(replace(BP_CHUNKWISE, learning_rate=rate) for rate in (2e-3, 4e-3)),
    *(replace(NLSVD, writer={**NLSVD.writer, "epsilon": epsilon}) for epsilon in (0.001, 0.003, 0.01)),
    *(replace(REFIT, writer={**REFIT.writer, "epsilon": epsilon}) for epsilon in (0.01, 0.03, 0.1)),
]


def build(row: Row, name: str) -> tuple[nn.Module, int]:
    """A fresh base with a row's adapter, and how many parameters that adds."""
    base, _ = backbone.load(name=name)
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


def start(row: Row, arguments: argparse.Namespace, ids: torch.Tensor) -> tuple[Iterator[Chunk], TestTimeTrainer, int]:
    """A row's reading, its trainer, and its extra parameters."""
    model, parameters = build(row, arguments.backbone)
    trainer = TestTimeTrainer(
        model,
        window=arguments.window * row.windows,
        stride=arguments.stride,
        learning_rate=row.learning_rate,
        context=row.context or arguments.context,
        writer=None if row.writer is None else SlotWriter(model, **row.writer),
    )
    return trainer.read(ids), trainer, parameters


def read_in_turns(rows: list[Row], arguments: argparse.Namespace, ids: torch.Tensor) -> list[dict[str, Any]]:
    """Reads the book with every row, a few chunks each at a time; an interrupt (SIGINT) ends it early."""
    readings = [start(row, arguments, ids) for row in rows]
    chunks = -(-len(ids) // arguments.stride)
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
                "perplexity_at": at_marks(done, [mark for mark in arguments.marks if mark <= done[-1].stop]),
                "perplexity": perplexity(sum(c.nll_nats for c in done), sum(c.tokens for c in done)),
                "extra_parameters": parameters,
                "seconds": sum(chunk.seconds for chunk in done),
                "median_chunk_seconds": statistics.median(chunk.seconds for chunk in done),
                "skipped_chunks": trainer.skipped_chunks,
                "folds": None if trainer.writer is None else trainer.writer.folds,
            }
        )
    return results


def to_table(results: list[dict[str, Any]], marks: list[int]) -> str:
    """The results in Markdown; times are relative to the first row's."""
    head = ["row", "settings", *(f"{mark:,}" for mark in marks), "all", "parameters", "relative time"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for result in results:
        at = result["perplexity_at"]
        cells = [result["row"], result["settings"], *(f"{at[str(mark)]:.2f}" for mark in marks)]
        relative = result["seconds"] / results[0]["seconds"]
        cells += [f"{result['perplexity']:.2f}", f"{result['extra_parameters']:,}", f"{relative:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--book", type=Path, required=True, help="a plain-text book")
    parser.add_argument("--tokens", type=int, default=50_000, help="how many tokens of it are read")
    parser.add_argument("--backbone", default=backbone.MLP_NAME, choices=[backbone.MLP_NAME])
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--stride", type=int, default=256)
    parser.add_argument("--context", choices=["recompute", "cache"], default="recompute")
    parser.add_argument("--sweep", action="store_true", help="the settings to choose from, in place of the rows")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the rows to read with, from 0")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    _, tokenizer = backbone.load(name=arguments.backbone)
    ids = tokenize(tokenizer, unwrap(arguments.book.read_text(encoding="utf-8")), arguments.tokens)
    arguments.marks = [mark for mark in MARKS if mark <= len(ids)]
    began = time.perf_counter()
    rows = [Row("none"), *SWEEP] if arguments.sweep else ROWS
    if arguments.only:
        rows = [rows[number] for number in arguments.only]
    results = read_in_turns(rows, arguments, ids)
    read = results[0]["tokens"]
    print(to_table(results, [mark for mark in arguments.marks if mark <= read]))
    summary = {
        "benchmark": "pg19, first block" + (", sweep" if arguments.sweep else ""),
        "backbone": arguments.backbone,
        "book": arguments.book.name,
        "tokens": read,
        "window": arguments.window,
        "stride": arguments.stride,
        "context": arguments.context,
        "seed": 0,
        "threads": arguments.threads,
        "hardware": f"CPU, {platform.machine()}",
        "seconds": time.perf_counter() - began,
        "rows": results,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
