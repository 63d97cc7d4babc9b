"""The gain of each update rule against its processor time: one book, read once by each rule, on the embedded models.

    python benchmarks/rules.py --book eval/3649.txt --statistics train/2118.txt --out benchmarks/results/rules.json \\
        --plot benchmarks/results/rules.png

Each chunk is scored before it is learned. The gain is in nats a token against the same model without a memory, over
all tokens so far. Each model has a panel. "Dynamic evaluation" is the RMS form of arXiv:1709.07432 over all weights of
the model, with the mean squares of its gradients on `--statistics`, a text that it was trained on. The last line
printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from measuring import describe_machine
from paper_tables.baselines import DynamicEvaluation
from plotting import label_axes, make_figure, pick_colours, save_figure
from torch import nn

from locas_peft import TestTimeTrainer, backbone
from locas_peft.files import write_json
from locas_peft.stages import ReadSettings, attached, complete, make_trainer
from locas_peft.text import tokenize, unwrap

CHUNKS = {"window": 512, "stride": 256, "context": "cache"}
RULES: dict[str, dict[str, dict[str, Any]]] = {
    backbone.NAME: {
        "LoRA r=64, AdamW": {"method": "lora"},
        "clones, AdamW": {"method": "locas-glu", "anchor": 0.0},
        "values in closed form": {"method": "locas-glu", "update": "ridge"},
        "values in closed form, rows by AdamW": {
            "update": "ridge",
            "learning_rate": 4e-3,
            "anchor": 0.0,
        },
    },
    backbone.MLP_NAME: {
        "LoRA r=64, AdamW": {"method": "lora"},
        "clones, AdamW": {"method": "locas-mlp"},
        "map in closed form": {"method": "locas-mlp", "init": "write", "update": "ridge"},
        "NL-SVD (paper)": {"method": "locas-mlp", "preset": "paper", "update": "nlsvd"},
        "written and trained (paper's BP)": {"method": "locas-mlp", "preset": "paper"},
    },
}


def follow(trainer: TestTimeTrainer, ids: torch.Tensor) -> list[tuple[int, float, float]]:
    """Read a text; return after each chunk the tokens scored, their nll in nats, and the processor seconds so far."""
    points, tokens, nats, began = [], 0, 0.0, time.process_time()
    for chunk in trainer.read(ids):
        tokens, nats = tokens + chunk.tokens, nats + chunk.nll_nats
        points.append((tokens, round(nats, 2), round(time.process_time() - began, 3)))
    return points


def follow_dynamic(
    base: nn.Module, ids: torch.Tensor, other: torch.Tensor, rate: float, decay: float
) -> list[Any]:
    """As `follow`, by dynamic evaluation of all weights, which are restored; the pass over `other` is not timed."""
    parameters = list(base.requires_grad_(True).parameters())
    optimizer = DynamicEvaluation(parameters, 0.0, decay)
    options = {**CHUNKS, "learning_rate": None, "warmup_steps": 0, "parameters": parameters}
    options["optimizer"] = lambda _: optimizer
    for _ in TestTimeTrainer(base, **options).read(other):
        pass
    optimizer.param_groups[0]["lr"] = rate
    points = follow(TestTimeTrainer(base, **options), ids)
    optimizer.restore()
    base.requires_grad_(False)
    return points


def measure(
    name: str, book: str, statistics: str, tokens: int, rate: float, decay: float
) -> dict[str, Any]:
    """Return the points of each rule on one embedded model, and those without a memory."""
    base, tokenizer = backbone.load(name=name)
    base.requires_grad_(False)
    ids, other = (tokenize(tokenizer, unwrap(text), tokens) for text in (book, statistics))
    rows = {"none": follow(TestTimeTrainer(base, learning_rate=None, **CHUNKS), ids)}
    for rule, given in RULES[name].items():
        settings = complete(ReadSettings(**CHUNKS, **given), base)
        with attached(base, settings) as model:
            rows[rule] = follow(make_trainer(model, settings), ids)
        print_row(name, rule, rows)
    rows["all weights, dynamic evaluation"] = follow_dynamic(base, ids, other, rate, decay)
    print_row(name, "all weights, dynamic evaluation", rows)
    return rows


def print_row(model: str, rule: str, rows: dict[str, Any]) -> None:
    (tokens, nats, seconds), (_, none, alone) = rows[rule][-1], rows["none"][-1]
    figures = f"{(nats - none) / tokens:+.4f} nats a token, {seconds:.1f} s of processor time (none {alone:.1f})"
    print(f"{model}: {rule}: {figures}", flush=True)


def draw(models: dict[str, Any], path: Path) -> None:
    """Draw each rule's gain so far against its processor time, a panel for each model."""
    figure, first = make_figure()
    first.remove()
    for axes, (name, rows) in zip(figure.subplots(1, len(models)), models.items(), strict=True):
        colours = pick_colours(rows)
        for rule, points in rows.items():
            gains = [
                (at, (none - nats) / count)
                for (count, nats, at), (_, none, _) in zip(points, rows["none"], strict=True)
            ]
            axes.plot(*zip(*gains[2:], strict=True), label=rule, color=colours[rule])
        label_axes(axes, "processor seconds", "gain, nats a token so far", name.rpartition("/")[2])
        axes.set_ylim(top=1.5 * axes.get_ylim()[1])  # room for the legend
        axes.legend(fontsize="x-small", loc="upper left")
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--book", type=Path, required=True)
    parser.add_argument("--statistics", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=10_240)
    parser.add_argument("--rate", type=float, default=2e-4, help="of dynamic evaluation")
    parser.add_argument(
        "--decay", type=float, default=1e-3, help="of dynamic evaluation, towards the first weights"
    )
    parser.add_argument("--models", default=",".join(RULES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    texts = [path.read_text(encoding="utf-8") for path in (arguments.book, arguments.statistics)]
    shared = arguments.tokens, arguments.rate, arguments.decay
    models = {name: measure(name, *texts, *shared) for name in arguments.models.split(",")}
    figures = {
        **describe_machine(torch.device("cpu")),
        "book": arguments.book.name,
        "models": models,
    }
    if arguments.out is not None:
        write_json(arguments.out, figures)
    if arguments.plot is not None:
        draw(models, arguments.plot)
    print(
        json.dumps(
            {
                name: {rule: points[-1] for rule, points in rows.items()}
                for name, rows in models.items()
            }
        )
    )


if __name__ == "__main__":
    main()
