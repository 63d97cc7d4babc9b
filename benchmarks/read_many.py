"""Many documents at once: `read_many` compared with one `TestTimeTrainer` after the other.

    python benchmarks/read_many.py                                      # the embedded backbone, minutes on one core
    python benchmarks/read_many.py --shape tiny --tokens 512 --rounds 1  # a test, in seconds
    python benchmarks/read_many.py --shape qwen3-0.6b --device cuda --dtype bfloat16 --window 512 --stride 256

The documents are stretches of one text, of equal length, so that all of them stay in the batch to the end. Both ways
start from the same base with fresh memories, in one process, and take turns; calibration is included. The figures are
the median over rounds of a round's ratio, for wall time and for processor time, which other programs disturb least.
The perplexities of both ways must agree and are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import SHAPES, Clock, compare, describe_machine, draw_tokens, load_shape, make_table
from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel

from locas_peft import LocasConfig, TestTimeTrainer, backbone, read_many
from locas_peft.bases import load_base
from locas_peft.text import load_text, python_reference, tokenize, unwrap

Documents = dict[str, torch.Tensor]


def load(arguments: argparse.Namespace) -> tuple[PreTrainedModel, torch.Tensor]:
    """Load the base and all tokens: of the text for the embedded backbone, random ones for random weights."""
    tokens = arguments.documents * arguments.tokens
    if arguments.shape == "embedded":
        base, tokenizer = load_base(backbone.NAME, arguments.dtype, arguments.device)
        text = unwrap(python_reference()) if arguments.text is None else load_text(arguments.text)
        return base, tokenize(tokenizer, text, max_tokens=tokens)
    base = load_shape(arguments.shape, arguments.dtype, arguments.device)
    return base, draw_tokens(base, tokens)


def read_in_turn(
    model: PeftModel, documents: Documents, settings: dict[str, Any]
) -> dict[str, float]:
    """Read each document with a `TestTimeTrainer` of its own, into a memory of its own; return perplexities."""
    perplexities, like = {}, model.peft_config["default"]
    for name, ids in documents.items():
        model.add_adapter(name, LocasConfig(r=like.r))
        model.set_adapter(name)
        trainer = TestTimeTrainer(model, **settings)
        for _ in trainer.read(ids):
            pass
        perplexities[name] = trainer.perplexity
    return perplexities


def read_at_once(
    model: PeftModel, documents: Documents, settings: dict[str, Any]
) -> dict[str, float]:
    reading = read_many(model, documents, **settings)
    for _ in reading:
        pass
    return {name: reading.perplexity(name) for name in documents}


WAYS: dict[str, Callable[[PeftModel, Documents, dict[str, Any]], dict[str, float]]] = {
    "in_turn": read_in_turn,
    "at_once": read_at_once,
}


def measure(
    way: str, model: PeftModel, documents: Documents, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return wall and processor seconds, peak bytes on a GPU, and perplexities; delete the memories that were made."""
    clock, before = Clock(model.device), None
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device)
    perplexities = WAYS[way](model, documents, settings)
    wall, processor = clock.read()
    peak_bytes = None if before is None else torch.cuda.max_memory_allocated(model.device) - before
    model.set_adapter("default")
    for name in perplexities:
        model.delete_adapter(name)
    return {
        "wall": wall,
        "processor": processor,
        "peak_bytes": peak_bytes,
        "perplexities": perplexities,
    }


def run(
    model: PeftModel, documents: Documents, settings: dict[str, Any], rounds: int
) -> dict[str, Any]:
    """Measure both ways in some rounds, after a short one that is not counted."""
    for way in WAYS:
        measure(
            way,
            model,
            {name: ids[: 2 * settings["stride"]] for name, ids in documents.items()},
            settings,
        )
    taken: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            taken[way].append(measure(way, model, documents, settings))
    row: dict[str, Any] = {"context": settings["context"], "rounds": rounds}
    for clock in ("wall", "processor"):
        ratios = compare(*([one[clock] for one in taken[way]] for way in WAYS))
        row |= {
            f"{clock}_ratio": ratios["median"],
            f"{clock}_least": ratios["min"],
            f"{clock}_most": ratios["max"],
        }
    for way, own in taken.items():
        seconds = statistics.median(one["wall"] for one in own)
        row[f"tokens_per_second_{way}"] = sum(map(len, documents.values())) / seconds
        row[f"processor_seconds_{way}"] = statistics.median(one["processor"] for one in own)
        if own[0]["peak_bytes"] is not None:
            row[f"peak_bytes_{way}"] = max(one["peak_bytes"] for one in own)
    alone, at_once = (taken[way][-1]["perplexities"] for way in WAYS)
    row["largest_relative_perplexity_difference"] = max(
        abs(at_once[name] / alone[name] - 1) for name in alone
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=["embedded", *SHAPES], default="embedded")
    parser.add_argument(
        "--text", type=Path, help="for the embedded backbone; default: Python's language reference"
    )
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="of each document")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--stride", type=int, default=256)
    parser.add_argument("--context", default="cache,recompute")
    parser.add_argument("--r", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    base, ids = load(arguments)
    torch.manual_seed(0)
    model = get_peft_model(base, LocasConfig(r=arguments.r))
    documents = {
        f"document {number}": part for number, part in enumerate(ids.split(arguments.tokens))
    }
    shared = {name: getattr(arguments, name) for name in ("window", "stride", "learning_rate")}
    contexts = arguments.context.split(",")
    rows = [
        run(model, documents, {**shared, "context": context}, arguments.rounds)
        for context in contexts
    ]
    head = [
        "context",
        "wall, one after the other / read_many",
        "least to most",
        "processor time",
        "least to most",
    ]
    head += [
        "tokens/s, one after the other",
        "tokens/s, read_many",
        "largest difference of a perplexity",
    ]
    cells = [
        [
            row["context"],
            *(f"{row['wall_ratio']:.2f}x", f"{row['wall_least']:.2f} to {row['wall_most']:.2f}"),
            *(
                f"{row['processor_ratio']:.2f}x",
                f"{row['processor_least']:.2f} to {row['processor_most']:.2f}",
            ),
            *(
                f"{row['tokens_per_second_in_turn']:,.0f}",
                f"{row['tokens_per_second_at_once']:,.0f}",
            ),
            f"{row['largest_relative_perplexity_difference']:.1e}",
        ]
        for row in rows
    ]
    print(make_table(head, cells))
    print(
        json.dumps({**vars(arguments), **describe_machine(base.device), "rows": rows}, default=str)
    )


if __name__ == "__main__":
    main()
