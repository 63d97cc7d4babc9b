"""Many documents at once: `read_many` against `TestTimeTrainer` one document after the other.

    python benchmarks/read_many.py                                      # the embedded backbone, minutes on one core
    python benchmarks/read_many.py --shape tiny --tokens 512 --rounds 1  # seconds, to see that it runs
    python benchmarks/read_many.py --shape qwen3-0.6b --device cuda --dtype bfloat16 --window 512 --stride 256

The documents are equally long stretches of one text, so that all rows stay to the end. Both ways start from the same
base with fresh memories, in one process, and take turns; calibration is part of both. The median over rounds of that
round's ratio, by the wall clock and, on a CPU, by the processor time that the process used: the latter is what a
shared machine disturbs least. The perplexities of the two ways stand beside the times, since they must agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pg19_shapes
import torch
from machine import describe_machine
from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel

from locas_peft import LocasConfig, TestTimeTrainer, backbone, read_many
from locas_peft.loading import DTYPES
from locas_peft.text import python_reference, tokenize, unwrap


def load(shape: str, tokens: int, text: Path | None, dtype: str, device: str) -> tuple[PreTrainedModel, torch.Tensor]:
    """The base, and so many tokens: of the text for the embedded backbone, random ones for random weights."""
    if shape == "embedded":
        base, tokenizer = backbone.load()
        words = unwrap(python_reference()) if text is None else text.read_text(encoding="utf-8")
        return base.to(device, DTYPES[dtype]).eval(), tokenize(tokenizer, words, max_tokens=tokens)
    base = pg19_shapes.load(shape, dtype, device)
    return base, pg19_shapes.draw(base, tokens)


def read_in_turn(model: PeftModel, documents: dict[str, torch.Tensor], settings: dict) -> dict[str, float]:
    """Each document by a `TestTimeTrainer` of its own, into a memory of its own."""
    perplexities, like = {}, model.peft_config["default"]
    for name, ids in documents.items():
        model.add_adapter(name, LocasConfig(r=like.r, scaling=like.scaling))
        model.set_adapter(name)
        trainer = TestTimeTrainer(model, **settings)
        for _ in trainer.read(ids):
            pass
        perplexities[name] = trainer.perplexity
    return perplexities


def read_at_once(model: PeftModel, documents: dict[str, torch.Tensor], settings: dict) -> dict[str, float]:
    reading = read_many(model, documents, **settings)
    for _ in reading:
        pass
    return {name: reading.perplexity(name) for name in documents}


def measure(model: PeftModel, call: Callable[[], dict[str, float]], device: str) -> dict:
    """Seconds by two clocks, peak bytes on a GPU, perplexities; the memories that were made are deleted again."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    wall, processor = time.perf_counter(), time.process_time()
    perplexities = call()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    taken = {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}
    if device.startswith("cuda"):
        taken["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
    model.set_adapter("default")
    for name in perplexities:
        model.delete_adapter(name)
    return taken | {"perplexities": perplexities}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=["embedded", *pg19_shapes.SHAPES], default="embedded")
    parser.add_argument("--text", type=Path, help="for the embedded backbone; default: Python's language reference")
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
    torch.manual_seed(0)
    total = arguments.documents * arguments.tokens
    base, ids = load(arguments.shape, total, arguments.text, arguments.dtype, arguments.device)
    model = get_peft_model(base, LocasConfig(r=arguments.r, scaling=arguments.r))
    documents = {f"document {number}": part for number, part in enumerate(ids.split(arguments.tokens))}
    warm = {name: part[: 2 * arguments.stride] for name, part in documents.items()}

    rows = []
    for context in arguments.context.split(","):
        settings = {
            "window": arguments.window,
            "stride": arguments.stride,
            "learning_rate": arguments.learning_rate,
            "context": context,
        }
        ways = {"one after the other": read_in_turn, "read_many": read_at_once}
        for way in ways.values():
            measure(model, lambda: way(model, warm, settings), arguments.device)  # noqa: B023
        rounds = []
        for number in range(arguments.rounds):
            order = list(ways) if number % 2 == 0 else list(ways)[::-1]
            taken = {}
            for name in order:
                taken[name] = measure(model, lambda: ways[name](model, documents, settings), arguments.device)  # noqa: B023
            rounds.append(taken)
        rows.append(summarise(context, rounds, sum(map(len, documents.values()))))

    print(
        "| context | wall, one after the other / read_many | least to most | processor time | least to most "
        "| tokens/s, one after the other | tokens/s, read_many | largest difference of a perplexity |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['context']} | {row['wall_ratio']:.2f}x | {row['wall_least']:.2f} to {row['wall_most']:.2f} "
            f"| {row['processor_ratio']:.2f}x | {row['processor_least']:.2f} to {row['processor_most']:.2f} "
            f"| {row['tokens_per_second_in_turn']:,.0f} | {row['tokens_per_second_at_once']:,.0f} "
            f"| {row['largest_relative_perplexity_difference']:.1e} |"
        )
    print(json.dumps({
        **{key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()},
        **describe_machine(base.device), "rows": rows,
    }))  # fmt: skip


def summarise(context: str, rounds: list[dict], tokens: int) -> dict:
    row: dict = {"context": context, "rounds": len(rounds)}
    for clock in ("wall", "processor"):
        ratios = [taken["one after the other"][clock] / taken["read_many"][clock] for taken in rounds]
        row |= {
            f"{clock}_ratio": statistics.median(ratios),
            f"{clock}_least": min(ratios),
            f"{clock}_most": max(ratios),
        }
    for key, way in (("in_turn", "one after the other"), ("at_once", "read_many")):
        row[f"tokens_per_second_{key}"] = tokens / statistics.median(taken[way]["wall"] for taken in rounds)
        row[f"processor_seconds_{key}"] = statistics.median(taken[way]["processor"] for taken in rounds)
        if "peak_bytes" in rounds[0][way]:
            row[f"peak_bytes_{key}"] = max(taken[way]["peak_bytes"] for taken in rounds)
    alone, at_once = (rounds[-1][way]["perplexities"] for way in ("one after the other", "read_many"))
    row["largest_relative_perplexity_difference"] = max(abs(at_once[name] / alone[name] - 1) for name in alone)
    return row


if __name__ == "__main__":
    main()
