"""Many memories on one model: time a step and resident memory, with up to 200 attached and after they are deleted.

    python benchmarks/many_memories.py                                   # minutes on one core
    python benchmarks/many_memories.py --memories 8 --rounds 2 --steps 2  # a test, in seconds
    python benchmarks/many_memories.py --shape qwen3-0.6b --memories 50 --steps 5

A round attaches memories from a file one after the other, switches among them, takes steps with one of them active,
and deletes all but the first. A step is a forward pass without gradients, one of training in a bare loop (forward,
backward and AdamW), or a chunk that `TestTimeTrainer` reads. Times are medians of processor time, which other programs
disturb least. Only the active memory computes, so that no step should take longer with more memories attached, and
nothing should be left of memories that are deleted: the last round's rows should be those of the first. LoRA of the
FFNs (`--adapter lora`) shows what PEFT itself takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import SHAPES, Clock, describe_machine, draw_tokens, load_shape, make_table
from peft import LoraConfig, PeftModel, get_peft_model

from locas_peft import LocasConfig, TestTimeTrainer, calibrate

FIRST = "default"
COLUMNS = ("attach", "switch", "forward", "train", "read", "delete")
NOT_COUNTED = 2  # steps before those that count


def read_resident_bytes() -> int | None:
    """Return the resident memory of this process; None where the system has no /proc."""
    gc.collect()
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def time_each(act: Callable[[int], Any], times: int, device: torch.device) -> float:
    """Return the median processor time of a call, in milliseconds; the call gets its number."""
    taken = []
    for number in range(times):
        clock = Clock(device)
        act(number)
        taken.append(1e3 * clock.read()[1])
    return statistics.median(taken)


def measure(model: PeftModel, names: list[str], ids: torch.Tensor, steps: int) -> dict[str, float]:
    """Return the milliseconds of a switch to another memory, and of steps with the last one, `ids` [1, T]."""
    device = ids.device
    row = {
        "switch": time_each(
            lambda number: model.set_adapter(names[number % len(names)]), 2 * steps, device
        )
    }
    model.set_adapter(names[-1])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def forward(number: int) -> None:
        with torch.no_grad():
            model(input_ids=ids)

    def train(number: int) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    text = ids[0].repeat(NOT_COUNTED + steps)
    window = {"window": 2 * ids.shape[1], "stride": ids.shape[1]}
    chunks = TestTimeTrainer(model, **window, learning_rate=1e-3).read(text)

    def read(number: int) -> None:
        next(chunks)

    for kind, act in (("forward", forward), ("train", train), ("read", read)):
        model.train(kind == "train")
        time_each(act, NOT_COUNTED, device)
        row[kind] = time_each(act, steps, device)
    chunks.close()
    return row


def run_round(
    model: PeftModel, folder: Path, ids: torch.Tensor, memories: int, steps: int
) -> list[dict[str, Any]]:
    """Attach memories, measure at 1, a quarter, a half and all of them, delete them, and measure again."""
    marks, rows, attached = {1, memories // 4, memories // 2, memories}, [], []

    def attach(number: int) -> None:
        model.load_adapter(folder, f"memory{len(attached)}", is_trainable=True)
        attached.append(f"memory{len(attached)}")

    def add_row(state: str, names: list[str], **own: float) -> None:
        rows.append(
            {
                "state": state,
                **own,
                **measure(model, names, ids, steps),
                "resident": read_resident_bytes(),
            }
        )

    add_row("1", [FIRST])
    for count in sorted(marks - {0, 1}):
        milliseconds = time_each(attach, count - 1 - len(attached), ids.device)
        add_row(str(count), [FIRST, *attached], attach=milliseconds)
    model.set_adapter(FIRST)
    milliseconds = time_each(
        lambda number: model.delete_adapter(attached.pop()), len(attached), ids.device
    )
    add_row("1, after deletion", [FIRST], delete=milliseconds)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--adapter", choices=["locas", "lora"], default="locas")
    parser.add_argument(
        "--memories", type=int, default=200, help="attached at the same time, at least 2"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="for each time")
    parser.add_argument("--tokens", type=int, default=128, help="of a step")
    parser.add_argument("--r", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    base = load_shape(arguments.shape, arguments.dtype, arguments.device)
    ids = draw_tokens(base, arguments.tokens)[None].to(base.device)
    if arguments.adapter == "locas":
        model = get_peft_model(base, LocasConfig(r=arguments.r, task_type="CAUSAL_LM"))
        calibrate(model, [ids])
    else:
        projections = ["gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(
            base, LoraConfig(r=arguments.r, target_modules=projections, task_type="CAUSAL_LM")
        )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        rounds = [
            run_round(model, folder, ids, arguments.memories, arguments.steps)
            for _ in range(arguments.rounds)
        ]
    rows = [{"round": number, **row} for number, own in enumerate(rounds, 1) for row in own]
    cells = [
        [
            *(str(row["round"]), row["state"]),
            *("-" if name not in row else f"{row[name]:.2f}" for name in COLUMNS),
            "-" if row["resident"] is None else f"{row['resident'] / 2**20:.1f}",
        ]
        for row in rows
    ]
    print(
        make_table(
            ["round", "memories", *(f"{name}, ms" for name in COLUMNS), "resident, MiB"], cells
        )
    )
    print(json.dumps({**vars(arguments), **describe_machine(base.device), "rows": rows}))


if __name__ == "__main__":
    main()
