"""The demo's readings with one and two threads, in both dtypes, with two seeds: how do its figures vary?

    python benchmarks/demo_spread.py

`locas demo` prints these figures for one setting. Each row of the result is one method's reading.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measuring import describe_machine

from locas_command.demo import READ_TOKENS
from locas_peft import demo
from locas_peft.bases import load_base
from locas_peft.files import write_json
from locas_peft.progress import silent
from locas_peft.stages import ReadSettings

THREADS = (1, 2)
DTYPES = ("bfloat16", "float32")
SEEDS = (0, 1)
KEPT = ("method", "perplexity", "own_answers_kl", "seconds", "extra_parameters")


def read_once(model: str, dtype: str, seed: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of each method, read as by `locas demo`."""
    base, tokenizer = load_base(model, dtype, device="cpu")
    methods = demo.list_methods(base, ReadSettings(seed=seed, max_tokens=tokens))
    with TemporaryDirectory() as out:
        for reading in demo.read_pages(base, tokenizer, methods, Path(out), silent):
            figures = reading.to_json()
            yield {name: figures[name] for name in KEPT}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=demo.CHAT_MODEL)
    parser.add_argument("--max-tokens", type=int, default=READ_TOKENS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/demo.json"))
    arguments = parser.parse_args(argv)
    rows = []
    for threads, dtype, seed in product(THREADS, DTYPES, SEEDS):
        torch.set_num_threads(threads)
        setting = {"dtype": dtype, "seed": seed, **describe_machine(torch.device("cpu"))}
        for figures in read_once(arguments.model, dtype, seed, arguments.max_tokens):
            rows.append({**figures, **setting})
            print(f"{threads} threads, {dtype}, seed {seed}: {figures}", flush=True)
    write_json(arguments.out, rows)


if __name__ == "__main__":
    main()
