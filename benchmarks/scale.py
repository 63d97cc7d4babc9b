"""A million memories, simulated: how often a memory that is asked for is in a cache, and what a large folder costs.

    python benchmarks/scale.py                                        # half a minute of processor time
    python benchmarks/scale.py --memories 10000 --requests 20000 --folders 100    # a test, in seconds

Each request asks for one of the memories, drawn by Zipf's law: the k-th most popular one with a probability in
proportion to k to the power of minus the exponent. A cache keeps the memories that were asked for last. The first half
of the requests fills it and is not counted. `--folders` also times a real library of so many empty memories: to open
it, to list it, and to find a memory by its name. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import describe_machine, make_table

from locas_peft.library import Library

EXPONENTS, CAPACITIES = (0.6, 0.8, 1.0, 1.2), (4, 64, 1_000, 10_000, 100_000)


def draw(memories: int, requests: int, exponent: float, seed: int = 0) -> np.ndarray:
    """Return the memory of each request by its rank, int64 [requests]."""
    shares = np.arange(1, memories + 1, dtype=np.float64) ** -exponent
    bounds = np.cumsum(shares) / shares.sum()
    return np.searchsorted(bounds, np.random.default_rng(seed).random(requests))


def measure_hits(asked: np.ndarray, capacity: int) -> float:
    """Return the share of the second half of the requests that finds its memory in a cache of so many."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number, memory in enumerate(asked.tolist()):
        if memory in cache:
            hits += 2 * number >= len(asked)
            cache.move_to_end(memory)
        else:
            cache[memory] = None
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits / (len(asked) - len(asked) // 2)


def time_library(count: int) -> dict[str, Any]:
    """Return the seconds that a library of so many memories takes."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            home = Path(folder) / f"user {number}"
            home.mkdir()
            (home / "adapter_config.json").write_text(
                '{"peft_type": "LOCAS", "base_model_name_or_path": "b"}'
            )
        times = [time.perf_counter()]
        library = Library(folder)
        for act in (library.list, lambda: library.find(f"user {count // 2}")):
            times.append(time.perf_counter())
            act()
        times.append(time.perf_counter())
    opened, listed, found = np.diff(times).tolist()
    return {"memories": count, "open_s": opened, "list_s": listed, "find_s": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memories", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=2_000_000)
    parser.add_argument("--folders", type=int, default=1_000)
    arguments = parser.parse_args()
    rows = []
    for exponent in EXPONENTS:
        asked = draw(arguments.memories, arguments.requests, exponent)
        hits = {capacity: measure_hits(asked, capacity) for capacity in CAPACITIES}
        rows.append({"exponent": exponent, "asked_for": len(np.unique(asked)), "hits": hits})
    cells = [
        [
            f"{row['exponent']}",
            f"{row['asked_for']:,}",
            *(f"{hit:.1%}" for hit in row["hits"].values()),
        ]
        for row in rows
    ]
    print(
        make_table(
            [
                "exponent",
                "memories asked for",
                *(f"cache of {capacity:,}" for capacity in CAPACITIES),
            ],
            cells,
        )
    )
    folder = time_library(arguments.folders)
    print(" ".join(f"{name} {value:.4g}" for name, value in folder.items()))
    result = {
        "memories": arguments.memories,
        "requests": arguments.requests,
        "rows": rows,
        "library": folder,
    }
    print(json.dumps({**result, **describe_machine(torch.device("cpu"))}))


if __name__ == "__main__":
    main()
