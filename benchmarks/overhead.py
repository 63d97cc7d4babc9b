"""What a memory costs when it is not learning: forward, generation, calibration, import, and bytes on disk.

    python benchmarks/overhead.py                       # Qwen3-0.6B's shapes, random weights, a few minutes on 2 cores
    python benchmarks/overhead.py --shapes tiny         # seconds, to see that it runs
    python benchmarks/overhead.py --device cuda --dtype bfloat16

The bare base, the base with an active memory, and the base with the memory merged are timed in turn, in one process
and on the same weights. Two figures each: the ratio of the fastest rounds, which other programs disturb least, and the
median over rounds of that round's ratio. Logits are made for the last token only: the head would hide the rest. A wall
clock cannot tell the merged model's R more neurons from noise, so their share of the parameters stands beside it.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging

from locas_peft import LocasConfig, LocasLayer, calibrate

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 512},
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936},
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151936},
}


def make_config(shapes: str) -> Qwen3Config:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    tiny_heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return Qwen3Config(
        **SHAPES[shapes],
        **(tiny_heads if shapes == "tiny" else heads),
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        bos_token_id=0,  # which an anchor's text begins with
    )


def share_weights(source: torch.nn.Module) -> torch.nn.Module:
    """A second model object over the same weights, so that the bare base is bare."""
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(source.config, dtype=source.dtype)
    twin.load_state_dict(source.state_dict(), assign=True)
    twin.tie_weights()
    twin.model.rotary_emb = copy.deepcopy(source.model.rotary_emb)  # its buffers are not in the state dict
    return twin.eval()


def time_call(call: Callable[[], object], device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def race(calls: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, list[float]]:
    """Times each call once a round, in an order that turns, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for round_index in range(rounds + 1):
        for offset in range(len(names)):
            name = names[(round_index + offset) % len(names)]
            taken = time_call(calls[name], device)
            if round_index:
                seconds[name].append(taken)
    return seconds


def measure_import() -> float:
    """Seconds that `import locas_peft` adds to `import peft, transformers`: the median of five processes."""
    script = (
        "import time, peft, transformers; start = time.perf_counter(); import locas_peft;"
        "print(time.perf_counter() - start)"
    )
    run = [sys.executable, "-c", script]
    taken = [float(subprocess.run(run, capture_output=True, text=True, check=True).stdout) for _ in range(6)]
    return statistics.median(taken[1:])


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
    torch.manual_seed(0)
    logging.disable_progress_bar()
    device = arguments.device

    config = make_config(arguments.shapes)
    bare = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, arguments.dtype)).to(device).eval()
    tokens = torch.randint(0, config.vocab_size, (1, arguments.tokens), device=device)
    memory = get_peft_model(share_weights(bare), LocasConfig(r=arguments.r))

    with torch.no_grad():
        calibration = race(
            {"bare": lambda: bare.model(tokens, use_cache=False), "calibrate": lambda: calibrate(memory, [tokens])},
            arguments.rounds,
            device,
        )
        for layer in memory.modules():
            if isinstance(layer, LocasLayer):
                torch.nn.init.normal_(layer.locas_down["default"].weight, std=0.02)
    with tempfile.TemporaryDirectory() as folder:
        memory.save_pretrained(folder)
        saved_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    merged = copy.deepcopy(memory).merge_and_unload()

    # The merged model has weights of its own; so has what it is held against, since where weights lie costs time too.
    models = {"bare": bare, "memory": memory, "bare copy": copy.deepcopy(bare), "merged": merged}
    with torch.no_grad():
        forward = race(
            {name: lambda model=model: model(input_ids=tokens, logits_to_keep=1) for name, model in models.items()},
            arguments.rounds,
            device,
        )
        generate = race(
            {
                name: lambda model=model: model.generate(
                    input_ids=tokens[:, :16],
                    min_new_tokens=arguments.new_tokens,
                    max_new_tokens=arguments.new_tokens,
                    do_sample=False,
                    pad_token_id=0,
                )
                for name, model in models.items()
            },
            arguments.rounds,
            device,
        )

    def ratio(seconds: dict[str, list[float]], name: str, base: str = "bare") -> dict[str, float]:
        rounds = [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]
        return {
            "fastest": min(seconds[name]) / min(seconds[base]),
            "median": statistics.median(rounds),
            "min": min(rounds),
            "max": max(rounds),
        }

    base_parameters = sum(p.numel() for p in bare.parameters())
    rows = [
        (f"forward of {arguments.tokens} tokens, active memory", ratio(forward, "memory")),
        (f"forward of {arguments.tokens} tokens, merged", ratio(forward, "merged", "bare copy")),
        (f"generation of {arguments.new_tokens} tokens, active memory", ratio(generate, "memory")),
        (f"generation of {arguments.new_tokens} tokens, merged", ratio(generate, "merged", "bare copy")),
        ("a copy of the bare base / the bare base, generation", ratio(generate, "bare copy")),
        ("calibration / forward of the base without its head", ratio(calibration, "calibrate")),
    ]
    extra = sum(p.numel() for name, p in memory.named_parameters() if "locas_" in name)
    result = {
        "shapes": arguments.shapes,
        "r": arguments.r,
        "dtype": arguments.dtype,
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "cpu",
        "threads": arguments.threads,
        "cores": os.cpu_count(),
        "rounds": arguments.rounds,
        "torch": torch.__version__,
        "ratios": dict(rows),
        "base_forward_seconds": statistics.median(forward["bare"]),
        "base_generation_seconds": statistics.median(generate["bare"]),
        "extra_parameters": extra,
        "extra_parameters_share": extra / base_parameters,
        "saved_bytes": saved_bytes,
        "import_seconds": measure_import(),
    }
    print("| against the bare base | fastest rounds | median round | least | most |\n|---|---|---|---|---|")
    for name, r in result["ratios"].items():
        print(f"| {name} | {r['fastest']:.3f} | {r['median']:.3f} | {r['min']:.3f} | {r['max']:.3f} |")
    print(f"\nextra parameters: {extra:,} ({extra / base_parameters:.2%} of the base); saved: {saved_bytes:,} bytes")
    print(f"import locas_peft adds {result['import_seconds']:.2f} s to import peft, transformers\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
