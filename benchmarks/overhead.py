"""The cost of a memory that is not learning: forward, generation, calibration, import, and bytes on disk.

    python benchmarks/overhead.py                       # Qwen3-0.6B's shapes, random weights, a few minutes on 2 cores
    python benchmarks/overhead.py --shapes tiny         # a test, in seconds
    python benchmarks/overhead.py --device cuda --dtype bfloat16

The bare base, the base with an active memory, and the base with the memory merged are timed in turn, in one process.
Two figures each: the ratio of the fastest rounds, which other programs disturb least, and the median over rounds of
that round's ratio. Logits are made for the last token only, since the head would hide the rest. The share of the
parameters is printed too: wall time does not resolve the R more neurons of a merged model.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import (
    SHAPES,
    Clock,
    compare,
    describe_machine,
    load_shape,
    make_table,
    share_weights,
)
from peft import PeftModel, get_peft_model
from transformers.utils import logging

from locas_peft import LocasConfig, LocasLayer, calibrate


def race(
    calls: dict[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Time each call once a round, in a rotating order, after one round that is not counted; return seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(rounds + 1):
        start = number % len(names)
        for name in (*names[start:], *names[:start]):
            clock = Clock(device)
            calls[name]()
            seconds[name].append(clock.read()[0])
    return {name: taken[1:] for name, taken in seconds.items()}


def measure_import() -> float:
    """Return seconds that `import locas_peft` adds to `import peft, transformers`, the median of five processes."""
    script = (
        "import time, peft, transformers; start = time.perf_counter(); import locas_peft;"
        "print(time.perf_counter() - start)"
    )
    run = [sys.executable, "-c", script]
    taken = [
        float(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
        for _ in range(6)
    ]
    return statistics.median(taken[1:])


def count_saved_bytes(memory: PeftModel) -> int:
    with tempfile.TemporaryDirectory() as folder:
        memory.save_pretrained(folder)
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--r", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.disable_progress_bar()

    bare = load_shape(arguments.shapes, arguments.dtype, arguments.device)
    tokens = torch.randint(0, bare.config.vocab_size, (1, arguments.tokens), device=bare.device)
    memory = get_peft_model(share_weights(bare), LocasConfig(r=arguments.r))
    calls = {
        "bare": lambda: bare.model(tokens, use_cache=False),
        "calibrate": lambda: calibrate(memory, [tokens]),
    }
    calibration = race(calls, arguments.rounds, bare.device)
    for layer in memory.modules():
        if isinstance(layer, LocasLayer):
            torch.nn.init.normal_(layer.locas_down["default"].weight, std=0.02)
    # The merged model has a copy of the weights. Its time is relative to another copy of the bare base, since the
    # position of weights in memory also has a cost.
    merged = copy.deepcopy(memory).merge_and_unload()
    models = {"bare": bare, "memory": memory, "bare copy": copy.deepcopy(bare), "merged": merged}
    new_tokens = {"min_new_tokens": arguments.new_tokens, "max_new_tokens": arguments.new_tokens}

    def forward(model: torch.nn.Module) -> Callable[[], object]:
        return lambda: model(input_ids=tokens, logits_to_keep=1)

    def generate(model: torch.nn.Module) -> Callable[[], object]:
        return lambda: model.generate(
            input_ids=tokens[:, :16], **new_tokens, do_sample=False, pad_token_id=0
        )

    forwards, generations = (
        race({name: make(model) for name, model in models.items()}, arguments.rounds, bare.device)
        for make in (forward, generate)
    )
    ratios = {
        "a copy of the bare base / the bare base, generation": compare(
            generations["bare copy"], generations["bare"]
        ),
        "calibration / forward of the base without its head": compare(
            calibration["calibrate"], calibration["bare"]
        ),
    }
    for title, seconds in (
        (f"generation of {arguments.new_tokens} tokens", generations),
        (f"forward of {arguments.tokens} tokens", forwards),
    ):
        active, merged = (
            compare(seconds["memory"], seconds["bare"]),
            compare(seconds["merged"], seconds["bare copy"]),
        )
        ratios = {f"{title}, active memory": active, f"{title}, merged": merged, **ratios}
    extra = sum(
        parameter.numel() for name, parameter in memory.named_parameters() if "locas_" in name
    )
    result = {
        **{name: getattr(arguments, name) for name in ("shapes", "r", "dtype", "rounds")},
        **describe_machine(bare.device),
        "ratios": ratios,
        "base_forward_seconds": statistics.median(forwards["bare"]),
        "base_generation_seconds": statistics.median(generations["bare"]),
        "extra_parameters": extra,
        "extra_parameters_share": extra / sum(parameter.numel() for parameter in bare.parameters()),
        "saved_bytes": count_saved_bytes(memory),
        "import_seconds": measure_import(),
    }
    rows = [[name, *(f"{value:.3f}" for value in ratio.values())] for name, ratio in ratios.items()]
    print(
        make_table(
            ["against the bare base", "fastest rounds", "median round", "least", "most"], rows
        )
    )
    share, saved = result["extra_parameters_share"], result["saved_bytes"]
    print(f"\nextra parameters: {extra:,} ({share:.2%} of the base); saved: {saved:,} bytes")
    print(f"import locas_peft adds {result['import_seconds']:.2f} s to import peft, transformers\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
