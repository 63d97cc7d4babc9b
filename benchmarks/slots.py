"""What slots cost and keep: compression, gradients of a whole chunk against token by token, NL-SVD's time.

    python benchmarks/slots.py compression --book eval/1684.txt
    python benchmarks/slots.py gradients --book train/2118.txt
    python benchmarks/slots.py nlsvd

`compression` lets a memory read, reduces it to half and to a quarter, and measures the perplexity, memory frozen, of
the stretch it read last and of the stretch that follows. `gradients` compares the G_t that a chunk's summed
log-likelihood gives, in full and tokenwise, with those of each token's own. `nlsvd` folds 28 layers of 512 slots,
D = 1024, to 256. The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch import nn
from torch.nn.functional import cosine_similarity

from locas_peft import LocasConfig, LocasLayer, TestTimeTrainer, backbone, compress
from locas_peft.text import tokenize, unwrap
from locas_peft.ttt.gradient import bypassing, list_attention
from locas_peft.tuner import nl_svd

READ_TOKENS, PART_TOKENS = 20_480, 8_192
RATES = {backbone.NAME: 2e-3, backbone.MLP_NAME: 8e-3}  # those of pg19.py


def frozen_perplexity(model: nn.Module, ids: torch.Tensor) -> float:
    """The perplexity of a stretch that is read and not learned."""
    flags = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in flags:
        parameter.requires_grad_(False)
    trainer = TestTimeTrainer(model, window=512, stride=256, learning_rate=None, context="cache")
    for _ in trainer.read(ids):
        pass
    for parameter in flags:
        parameter.requires_grad_(True)
    return trainer.perplexity


def compression(ids: Callable[[str, int], torch.Tensor]) -> list[dict[str, Any]]:
    """A gated and a two-layer memory of 64 slots, reduced to 32 and from there to 16."""
    rows = []
    for name in (backbone.NAME, backbone.MLP_NAME):
        text = ids(name, READ_TOKENS + PART_TOKENS)
        parts = {"read": text[READ_TOKENS - PART_TOKENS : READ_TOKENS], "next": text[READ_TOKENS:]}
        base, _ = backbone.load(name=name)
        rows.append({"backbone": name, "memory": "none", "r": 0, **measure(base.requires_grad_(False), parts)})
        model = get_peft_model(base, LocasConfig(r=64, scaling=64.0))
        trainer = TestTimeTrainer(model, window=512, stride=256, learning_rate=RATES[name], context="cache")
        for _ in trainer.read(text[:READ_TOKENS]):
            pass
        rows.append({"backbone": name, "memory": "as read", "r": 64, **measure(model, parts)})
        for method in ["refit"] if name == backbone.NAME else ["refit", "nlsvd"]:
            reduced = copy.deepcopy(model)
            for rank in (32, 16):
                batches = parts["read"].view(-1, 512) if method == "refit" else None
                compress(reduced, rank, batches=None if batches is None else [batches])
                rows.append({"backbone": name, "memory": method, "r": rank, **measure(reduced, parts)})
    return rows


def measure(model: nn.Module, parts: dict[str, torch.Tensor]) -> dict[str, float]:
    return {f"perplexity_{name}": frozen_perplexity(model, ids) for name, ids in parts.items()}


def gradients(ids: Callable[[str, int], torch.Tensor], tokens: int = 128) -> list[dict[str, Any]]:
    """The cosine of the G_t that share one backward pass with each token's own; tokenwise ones share one too."""
    base, _ = backbone.load(name=backbone.MLP_NAME)
    model = get_peft_model(base, LocasConfig(r=2, init_strategy="write"))
    layers = [module for module in model.modules() if isinstance(module, LocasLayer)]
    text = ids(backbone.MLP_NAME, tokens + 1)
    outputs: list[torch.Tensor] = []

    def read() -> torch.Tensor:
        outputs.clear()
        for layer in layers:
            layer.recorder = lambda a, output: outputs.append(output)
        logits = model(input_ids=text[None, :-1]).logits[0]
        return logits.log_softmax(dim=-1).gather(1, text[1:, None])[:, 0]

    with bypassing(list_attention(model)):
        tokenwise = torch.stack(torch.autograd.grad(read().sum(), outputs))[:, 0]  # [L, N, D]
    likelihoods = read()
    together = torch.stack(torch.autograd.grad(likelihoods.sum(), outputs, retain_graph=True))[:, 0]
    alone = torch.stack(
        [
            torch.stack([g[0, t] for g in torch.autograd.grad(likelihoods[t], outputs, retain_graph=True)])
            for t in range(tokens)
        ],
        dim=1,
    )
    parts = {**{number: slice(number, number + 1) for number in range(len(layers))}, "all": slice(None)}
    return [
        {"gradient": name, "layer": layer, **compare(shared[part], alone[part])}
        for name, shared in (("full", together), ("tokenwise", tokenwise))
        for layer, part in parts.items()
    ]


def compare(together: torch.Tensor, alone: torch.Tensor) -> dict[str, float]:
    """Over tokens: cosine of the two gradients, and how long the one is against the other."""
    one, other = together.transpose(0, 1).flatten(1), alone.transpose(0, 1).flatten(1)
    cosines = cosine_similarity(one, other, dim=1)
    return {
        "mean_cosine": cosines.mean().item(),
        "least_cosine": cosines.min().item(),
        "median_length_ratio": (one.norm(dim=1) / other.norm(dim=1)).median().item(),
    }


def nlsvd(ids: Callable[[str, int], torch.Tensor]) -> list[dict[str, Any]]:
    """Wall and processor time of one fold of all layers, five times."""
    generator = torch.Generator().manual_seed(0)
    key, value = (
        torch.randn(28, 1024, 512, generator=generator),
        torch.randn(28, 512, 1024, generator=generator),
    )
    wall, cpu = [], []
    for _ in range(5):
        began, processor = time.perf_counter(), time.process_time()
        nl_svd(key, value, 256)
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - processor)
    return [
        {"threads": torch.get_num_threads(), "least_seconds": min(wall), "median_seconds": statistics.median(wall)}
        | {"least_processor_seconds": min(cpu)}
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["compression", "gradients", "nlsvd"])
    parser.add_argument("--book", type=Path, help="a plain-text book, for all but nlsvd")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.book is None and arguments.what != "nlsvd":
        parser.error(f"{arguments.what} needs --book")

    def ids(name: str, tokens: int) -> torch.Tensor:
        _, tokenizer = backbone.load(name=name)
        return tokenize(tokenizer, unwrap(arguments.book.read_text(encoding="utf-8")), tokens)

    torch.manual_seed(0)
    rows = {"compression": compression, "gradients": gradients, "nlsvd": nlsvd}[arguments.what](ids)
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()) + " |")
    book = None if arguments.book is None else arguments.book.name
    print(json.dumps({"benchmark": f"slots {arguments.what}", "book": book, "rows": rows}))


if __name__ == "__main__":
    main()
