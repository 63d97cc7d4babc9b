"""How fast a model reads, studies and answers with each adapter, beside the same model without one.

    python benchmarks/speed.py smollm2 --threads 1
    python benchmarks/speed.py --shapes qwen3-0.6b --device cuda     # random weights; about ten minutes
    python benchmarks/speed.py --shapes tiny --quick                 # a test

Four tables, each printed when it has been measured:

- reading: chunks are scored and learned, from the cache, without the anchor; "no memory" only scores them;
- study: a step on eight lessons, as a self-study takes it; "no memory" only scores them;
- prompt: a forward pass over `--prompt-tokens` tokens, without gradients;
- answering: tokens that are generated one by one.

The rows take turns, so that each ratio compares times of one minute. Times do not depend on what is read: all tokens
are random. The roofline is the greater of two times: the operations of the row's matrix products and attention at the
speed of a large product, and the bytes of the weights at the speed of a copy, both of which the script measures.
Activations and logits are left out of the bytes. Ratios to the roofline are of processor time on a CPU, of wall time on
a GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import (
    SHAPES,
    Clock,
    describe_machine,
    draw_tokens,
    load_shape,
    make_table,
    share_weights,
)
from paper_tables.command import running
from paper_tables.rows import NONE, Row, locas, lora
from paper_tables.timing import (
    TURN_CHUNKS,
    count_least_tokens,
    count_operations,
    format_ratio,
    measure_peaks,
    time_rows,
)
from transformers import PreTrainedModel

from locas_peft import TestTimeTrainer, calibrate
from locas_peft.asking.continuation import continue_rows
from locas_peft.bases import load_base
from locas_peft.files import write_json
from locas_peft.model import token_losses
from locas_peft.tuner import uncalibrated_memories

ROWS = (
    NONE,
    lora(16),
    lora(64),
    locas(16, anchor=0.0),
    locas(64, anchor=0.0),
)
MERGED = "Locas r=64, merged"
LESSONS = 8
LESSON_TOKENS = 96
ANSWER_TOKENS = 32
PROMPT_OF_AN_ANSWER = 16
# Reads of a parameter, its gradient and both moments; writes of the parameter and the moments.
OPTIMIZER_PASSES = 7

Act = Callable[[TestTimeTrainer], Any]


@dataclass(frozen=True)
class Host:
    """The model that is timed.

    Args:
        base: the model, which is not changed.
        common: the settings that all rows share.
        load: loads the model once more, in another process.
        compiled: whether readings go through `torch.compile`.
    """

    base: PreTrainedModel
    common: Mapping[str, Any]
    load: Callable[[], PreTrainedModel]
    compiled: bool = False

    @property
    def clock(self) -> str:
        """The name of the times that are compared with the roofline."""
        return "seconds" if self.base.device.type == "cuda" else "processor_seconds"


@dataclass(frozen=True)
class Task:
    """What is timed.

    Args:
        name: of the table.
        act: does it once with a row's trainer.
        tokens: how many tokens that is.
        passes: how often it reads all weights.
        learns: whether the adapters learn in it.
    """

    name: str
    act: Act
    tokens: int
    passes: int
    learns: bool = False


# ---------------------------------------------------------------------- tasks


def list_tasks(host: Host, prompt_tokens: int) -> list[Task]:
    """Return the tasks beside reading."""
    base = host.base
    lessons = draw_tokens(base, LESSONS * (LESSON_TOKENS + 1)).view(LESSONS, -1).to(base.device)
    prompt = draw_tokens(base, prompt_tokens)[None].to(base.device)

    def study(trainer: TestTimeTrainer) -> None:
        learner = trainer.learner
        learns = bool(learner.parameters())
        with torch.set_grad_enabled(learns):
            logits = trainer.host.logits(lessons[:, :-1], ANSWER_TOKENS, use_cache=False)
            targets = lessons[:, -ANSWER_TOKENS:].flatten()
            loss = token_losses(logits.flatten(0, 1), targets).mean()
        if learns:
            learner.begin()
            loss.backward()
            learner.finish()

    @torch.no_grad()
    def read_prompt(trainer: TestTimeTrainer) -> None:
        trainer.host.logits(prompt, 1, use_cache=False)

    def answer(trainer: TestTimeTrainer) -> None:
        tokens = prompt[0, :PROMPT_OF_AN_ANSWER].tolist()
        continue_rows(trainer.host, [tokens], ANSWER_TOKENS)

    return [
        Task("study", study, LESSONS * LESSON_TOKENS, 2, learns=True),
        Task("prompt", read_prompt, prompt_tokens, 1),
        Task("answering", answer, ANSWER_TOKENS, ANSWER_TOKENS),
    ]


@contextmanager
def opened(host: Host, with_merged: bool) -> Iterator[dict[str, TestTimeTrainer]]:
    """Attach each row's adapter to a model of its own within the context, and yield the trainers."""
    sample = draw_tokens(host.base, 64)[None].to(host.base.device)
    with ExitStack() as stack:
        trainers = {}
        for row in ROWS:
            trainers[row.name] = _open(stack, share_weights(host.base), row, host.common, sample)
        if with_merged:
            # Merging widens the weights themselves, which the other rows share.
            base = copy.deepcopy(host.base)
            trainers[MERGED] = _open(stack, base, ROWS[-1], host.common, sample)
            trainers[MERGED].model.merge_adapter()
        yield trainers


def _open(
    stack: ExitStack,
    base: PreTrainedModel,
    row: Row,
    common: Mapping[str, Any],
    sample: torch.Tensor,
) -> TestTimeTrainer:
    trainer = stack.enter_context(row.open(base, common))
    for name in uncalibrated_memories(trainer.model):
        calibrate(trainer.model, [sample], name)
    trainer.model.eval()
    return trainer


def time_task(host: Host, task: Task, rounds: int) -> list[dict[str, Any]]:
    """Time a task side by side; return for each row what `time_rows` returns."""
    device = host.base.device
    with opened(host, not task.learns) as trainers:
        names = list(trainers)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for number in range(rounds + 1):
            # No row is always the first.
            start = number % len(names)
            for name in (*names[start:], *names[:start]):
                clock = Clock(device)
                task.act(trainers[name])
                times[name].append(clock.read())
        results = []
        for name, trainer in trainers.items():
            operations = count_operations(partial(task.act, trainer)) / task.tokens
            parameters = sum(weight.numel() for weight in trainer.learner.parameters())
            # The first round warms up.
            wall, processor = zip(*times[name][1:], strict=True)
            results.append(
                {
                    "row": name,
                    "parameters": parameters,
                    "operations": operations,
                    "seconds": list(wall),
                    "processor_seconds": list(processor),
                }
            )
    return results


# ---------------------------------------------------------------------- the roofline


def measure_machine(base: PreTrainedModel) -> dict[str, float]:
    """Return operations a second of a large product, and bytes a second of a copy, the best of five."""
    device = base.device
    is_gpu = device.type == "cuda"
    size = 8192 if is_gpu else 1024
    matrix = torch.randn(size, size, device=device).to(base.dtype)
    block = torch.empty(2**30 if is_gpu else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(block)
    index = 0 if is_gpu else 1
    products = []
    copies = []
    for _ in range(6):
        clock = Clock(device)
        matrix @ matrix
        products.append(clock.read()[index])
        clock = Clock(device)
        target.copy_(block)
        copies.append(clock.read()[index])
    return {
        "operations_per_second": 2 * size**3 / min(products[1:]),
        "bytes_per_second": 2 * block.numel() / min(copies[1:]),
    }


def count_bytes(host: Host, result: Mapping[str, Any], passes: int, learns: bool) -> int:
    """Return the bytes of weights that a row reads and writes in `passes` passes and a step."""
    weights = sum(weight.numel() * weight.element_size() for weight in host.base.parameters())
    # Adapters are in float32.
    adapter = 4 * result["parameters"]
    if not learns:
        return passes * (weights + adapter)
    if not adapter:
        # Scored alone, without the backward passes, which are half of all.
        return passes // 2 * weights
    steps = passes // 2
    return passes * (weights + adapter) + steps * OPTIMIZER_PASSES * adapter


def find_roofline(
    host: Host, task: Task, result: Mapping[str, Any], machine: Mapping[str, float]
) -> float:
    """Return the least seconds of a turn, by operations or by bytes."""
    bytes_moved = count_bytes(host, result, task.passes, task.learns)
    operations = result["operations"] * task.tokens
    by_operations = operations / machine["operations_per_second"]
    return max(by_operations, bytes_moved / machine["bytes_per_second"])


# ---------------------------------------------------------------------- tables


def make_rows(
    host: Host, task: Task, results: list[dict[str, Any]], machine: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Add tokens a second and the ratio to the roofline to a task's results."""
    for result in results:
        roofline = find_roofline(host, task, result, machine)
        for key in ("seconds", "processor_seconds"):
            seconds = statistics.median(result[key])
            result[f"tokens_per_{key.removesuffix('s')}"] = task.tokens / seconds
        result["to_roofline"] = statistics.median(result[host.clock]) / roofline
    return results


def print_table(task: Task, rows: list[dict[str, Any]]) -> None:
    """Print a task's rows, as ratios to the one without a memory."""
    reference = rows[0]
    lines = []
    for row in rows:
        peak = row.get("peak_bytes")
        lines.append(
            [
                row["row"],
                f"{row['parameters']:,}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['tokens_per_processor_second']:,.0f}",
                format_ratio(row, reference, "seconds"),
                format_ratio(row, reference, "processor_seconds"),
                f"{row['operations'] / reference['operations']:.2f}",
                f"{row['to_roofline']:.2f}",
                "-" if peak is None else f"{peak / 2**30:.2f}",
            ]
        )
    head = [
        task.name,
        "parameters",
        "tokens/s",
        "tokens a processor second",
        "wall time / no memory",
        "processor time / no memory",
        "operations / no memory",
        "time / roofline",
        "peak above the model, GiB",
    ]
    print(f"\n{make_table(head, lines)}", flush=True)


# ---------------------------------------------------------------------- the command


def load(arguments: argparse.Namespace) -> Host:
    """Load the model, or make one of the shapes that are asked for."""
    if arguments.shapes:
        make = partial(load_shape, arguments.shapes, arguments.dtype, arguments.device)
    else:
        make = partial(_load_model, arguments.model, arguments.dtype, arguments.device)
    base = make().requires_grad_(False).eval()
    common = {"window": arguments.window, "stride": arguments.stride}
    return Host(base, common, make, arguments.compile)


def _load_model(model: str, dtype: str, device: str) -> PreTrainedModel:
    return load_base(model, dtype, device)[0]


def measure_reading(
    host: Host, machine: Mapping[str, float], tokens: int | None, with_peaks: bool
) -> tuple[Task, list[dict[str, Any]]]:
    """Time the readings of all rows, and measure the peak memory of each."""
    ids = draw_tokens(host.base, tokens or count_least_tokens(host, ROWS))
    results = time_rows(host, ROWS, ids)
    if with_peaks:
        peaks = measure_peaks(host.load, ROWS, host.common, ids[: len(ids) // 2])
        for result in results:
            result["peak_bytes"] = peaks[result["row"]]
    turn_tokens = TURN_CHUNKS * host.common["stride"]
    task = Task("reading", lambda trainer: None, turn_tokens, 2 * TURN_CHUNKS, learns=True)
    return task, make_rows(host, task, results, machine)


def measure(host: Host, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time all tasks; print each table when it has been measured."""
    machine = measure_machine(host.base)
    teraops = machine["operations_per_second"] / 1e12
    gigabytes = machine["bytes_per_second"] / 1e9
    print(f"a large product: {teraops:.3f}e12 operations/s; a copy: {gigabytes:.1f} GB/s")
    with_peaks = not arguments.quick
    task, rows = measure_reading(host, machine, arguments.tokens, with_peaks)
    print_table(task, rows)
    tables = {task.name: rows}
    for task in list_tasks(host, arguments.prompt_tokens):
        results = time_task(host, task, arguments.rounds)
        tables[task.name] = make_rows(host, task, results, machine)
        print_table(task, tables[task.name])
    return {"machine": machine, "tables": tables}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="locas_peft/tinybook-glu")
    parser.add_argument("--shapes", choices=SHAPES, help="random weights, in place of a model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, help="of torch; by default its own number")
    parser.add_argument("--window", type=int, help="2048, with --quick 512")
    parser.add_argument("--stride", type=int, help="half the window")
    parser.add_argument("--tokens", type=int, help="of each reading; by default as few as suffice")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, help="of the other tables: 9, with --quick 3")
    parser.add_argument("--quick", action="store_true", help="shorter chunks, no peak memory")
    parser.add_argument("--compile", action="store_true", help="readings, with torch.compile")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/speed"))
    arguments = parser.parse_args(argv)
    arguments.window = arguments.window or (512 if arguments.quick else 2048)
    arguments.stride = arguments.stride or max(1, arguments.window // 2)
    arguments.rounds = arguments.rounds or (3 if arguments.quick else 9)
    if arguments.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {arguments.rounds}: quartiles need two")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    with running("speed", arguments):
        host = load(arguments)
        figures = measure(host, arguments)
        name = arguments.shapes or Path(arguments.model).name
        kind = "quick" if arguments.quick else "full"
        kind += "-compiled" if arguments.compile else ""
        record = {
            "model": name,
            "dtype": str(host.base.dtype).removeprefix("torch."),
            **host.common,
            "prompt_tokens": arguments.prompt_tokens,
            **describe_machine(host.base.device),
            **figures,
        }
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out / f"{name}-{host.base.device.type}-{kind}.json", record)
        print(json.dumps(record))


if __name__ == "__main__":
    main()
