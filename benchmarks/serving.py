"""vLLM's speed on batches of 16 requests, by a bare base, by a widened one, and with 1 or 16 memories in the batch.

It runs in vLLM's environment, once for each engine. `bare` is the model's own checkpoint, `served` what `locas export`
made of the model and a memory:

    python benchmarks/serving.py bare --json benchmarks/results/serving.json
    python benchmarks/serving.py served/base --json benchmarks/results/serving.json
    python benchmarks/serving.py served/base --adapter served/adapter --json benchmarks/results/serving.json

A row is the median of three batches after one that is not counted, in processor time, which other programs disturb
least; set OMP_NUM_THREADS=1. Each request has 8 random prompt tokens and gets 8 more. The 16 memories are one adapter
under 16 names, which vLLM keeps and applies as different ones. The operations are those of torch's profiler, of one
more batch, without compilation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

REQUESTS, PROMPT_TOKENS, NEW_TOKENS, ROUNDS, VOCABULARY = 16, 8, 8, 3, 10_000


def measure(model: str, adapter: str | None, rank: int) -> list[dict[str, Any]]:
    """Return a row for 0, 1 and 16 memories in the batch; `adapter` is None for an engine without LoRA."""
    options = {"enable_lora": True, "max_lora_rank": rank, "max_loras": REQUESTS} if adapter else {}
    options |= {"max_num_seqs": REQUESTS, "enable_prefix_caching": False, "enforce_eager": True}
    options |= {"dtype": "float32", "max_model_len": 1024, "distributed_executor_backend": "uni"}
    engine = LLM(model, **options)
    draw, known = (
        random.Random(0),
        json.loads((Path(model) / "config.json").read_text())["vocab_size"],
    )
    drawn = range(min(VOCABULARY, known))
    prompts = [{"prompt_token_ids": draw.choices(drawn, k=PROMPT_TOKENS)} for _ in range(REQUESTS)]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)

    def generate(requests: list[Any] | None) -> float:
        began = time.process_time()
        engine.generate(prompts, sampling, lora_request=requests, use_tqdm=False)
        return REQUESTS * NEW_TOKENS / (time.process_time() - began)

    rows = []
    for count in [0, 1, REQUESTS] if adapter else [0]:
        names = [number % count + 1 for number in range(REQUESTS)] if count else []
        requests = [LoRARequest(f"memory{name}", name, adapter) for name in names] or None
        generate(requests)
        speeds = [generate(requests) for _ in range(ROUNDS)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            generate(requests)
        events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
        total = sum(event.self_cpu_time_total for event in events)
        row = {
            "memories": count if adapter else None,
            "tokens_per_second": statistics.median(speeds),
            "rounds": speeds,
        }
        rows.append(
            row
            | {"profile": {event.key: event.self_cpu_time_total / total for event in events[:5]}}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint's folder")
    parser.add_argument(
        "--adapter", help="the folder of an adapter that fits it; LoRA is enabled with one only"
    )
    parser.add_argument("--max-lora-rank", type=int, default=64)
    parser.add_argument("--json", type=Path, help="add the result to the list in this file")
    arguments = parser.parse_args()
    # The engine in this process, where the profiler sees it; 1 GiB for the key-value cache.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    rows = measure(arguments.model, arguments.adapter, arguments.max_lora_rank)
    print("| memories in the batch | tokens/s | where the time goes |\n|---|---:|---|")
    for row in rows:
        profile = ", ".join(f"{key} {share:.0%}" for key, share in list(row["profile"].items())[:3])
        count = "LoRA off" if row["memories"] is None else row["memories"]
        print(f"| {count} | {row['tokens_per_second']:.1f} | {profile} |")
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    machine = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), **versions}
    result = {"model": arguments.model, "adapter": arguments.adapter, **machine, "rows": rows}
    if arguments.json:
        earlier = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
        arguments.json.write_text(json.dumps([*earlier, result], indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
