"""Compression of slots, gradients of a whole chunk compared with those of single tokens, and the time of NL-SVD.

    python benchmarks/slots.py compression --book eval/1684.txt
    python benchmarks/slots.py gradients --book train/2118.txt
    python benchmarks/slots.py nlsvd

`compression` reads a text into a memory, reduces it to half and to a quarter, and measures the perplexity of the part
read last and of the part that follows, with the memory frozen. `gradients` compares the G_t of a chunk's summed
log-likelihood with those of each token's own. `nlsvd` folds 28 layers of 512 slots, D = 1024, to 256. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import Clock, make_table
from peft import get_peft_model
from torch import nn
from torch.nn.functional import cosine_similarity

from locas_peft import LocasConfig, TestTimeTrainer, backbone, compress
from locas_peft.bases import load_base
from locas_peft.slots import nl_svd
from locas_peft.stages import ReadSettings, complete, score
from locas_peft.text import load_text, tokenize, unwrap
from locas_peft.tuner import list_layers

Load = Callable[[str, int], torch.Tensor]
"""Loads the first tokens of the book for a backbone: (name, tokens) -> LongTensor [T]."""
READ_TOKENS, PART_TOKENS = 20_480, 8_192
RATES = {backbone.NAME: 2e-3, backbone.MLP_NAME: 8e-3}  # those of pg19.py
WINDOWS = {"window": 512, "stride": 256, "context": "cache"}


def compression(load: Load) -> list[dict[str, Any]]:
    """Reduce a gated and a two-layer memory of 64 slots to 32, and from there to 16."""
    rows = []
    for name, rate in RATES.items():
        text = load(name, READ_TOKENS + PART_TOKENS)
        parts = {"read": text[READ_TOKENS - PART_TOKENS : READ_TOKENS], "next": text[READ_TOKENS:]}
        base, _ = load_base(name)
        rows.append({"backbone": name, "memory": "none", "r": 0, **score_parts(base, parts)})
        model = get_peft_model(base, LocasConfig(r=64, output_scale="paper", scaling=64.0))
        for _ in TestTimeTrainer(model, learning_rate=rate, **WINDOWS).read(text[:READ_TOKENS]):
            pass
        figures = score_parts(model, parts)
        rows.append({"backbone": name, "memory": "as read", "r": 64, **figures})
        for method in ["refit"] if name == backbone.NAME else ["refit", "nlsvd"]:
            reduced = copy.deepcopy(model)
            batches = None
            if method == "refit":
                batches = [parts["read"].view(-1, 512)]
            for r in (32, 16):
                compress(reduced, r, batches=batches)
                figures = score_parts(reduced, parts)
                rows.append({"backbone": name, "memory": method, "r": r, **figures})
    return rows


def score_parts(model: nn.Module, parts: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the perplexity of each part of a text, with a frozen copy of the model."""
    frozen = copy.deepcopy(model).requires_grad_(False)
    settings = complete(ReadSettings(method="none", **WINDOWS))
    figures = {}
    for part, ids in parts.items():
        figures[f"perplexity_{part}"] = score(frozen, ids, settings)
    return figures


def gradients(load: Load, tokens: int = 128) -> list[dict[str, Any]]:
    """Compare the G_t that share one backward pass with those of one backward pass for each token."""
    base, _ = load_base(backbone.MLP_NAME)
    model = get_peft_model(base, LocasConfig(r=2, init_weights="write"))
    layers = list_layers(model)
    text = load(backbone.MLP_NAME, tokens + 1)
    outputs: list[torch.Tensor] = []
    for layer in layers:
        layer.recorder = lambda ffn_input, output: outputs.append(output)

    def differentiate(likelihood: torch.Tensor) -> torch.Tensor:
        return torch.stack(torch.autograd.grad(likelihood, outputs, retain_graph=True))[
            :, 0
        ]  # [L, N, D]

    logits = model(input_ids=text[None, :-1]).logits[0]
    likelihoods = logits.log_softmax(dim=-1).gather(1, text[1:, None])[:, 0]  # [N]
    shared = differentiate(likelihoods.sum())
    alone = torch.stack([differentiate(likelihoods[t])[:, t] for t in range(tokens)], dim=1)
    parts = {
        **{number: slice(number, number + 1) for number in range(len(layers))},
        "all": slice(None),
    }
    return [
        {"layer": layer, **compare_gradients(shared[part], alone[part])}
        for layer, part in parts.items()
    ]


def compare_gradients(together: torch.Tensor, alone: torch.Tensor) -> dict[str, float]:
    """Return cosines and the ratio of lengths over tokens, of gradients [L, N, D]."""
    one, other = (gradient.transpose(0, 1).flatten(1) for gradient in (together, alone))
    cosines = cosine_similarity(one, other, dim=1)
    return {
        "mean_cosine": cosines.mean().item(),
        "least_cosine": cosines.min().item(),
        "median_length_ratio": (one.norm(dim=1) / other.norm(dim=1)).median().item(),
    }


def nlsvd(load: Load) -> list[dict[str, Any]]:
    """Time one fold of all layers, five times."""
    generator = torch.Generator().manual_seed(0)
    key, value = (
        torch.randn(28, *shape, generator=generator) for shape in ((1024, 512), (512, 1024))
    )
    taken = []
    for _ in range(5):
        clock = Clock(key.device)
        nl_svd(key, value, 256)
        taken.append(clock.read())
    wall, processor = zip(*taken, strict=True)
    seconds = {"least_seconds": min(wall), "median_seconds": statistics.median(wall)}
    return [
        {"threads": torch.get_num_threads(), **seconds, "least_processor_seconds": min(processor)}
    ]


PARTS = {"compression": compression, "gradients": gradients, "nlsvd": nlsvd}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=PARTS)
    parser.add_argument("--book", type=Path, help="a plain-text book; not used by nlsvd")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.book is None and arguments.what != "nlsvd":
        parser.error(f"{arguments.what} needs --book")

    def load(name: str, tokens: int) -> torch.Tensor:
        return tokenize(backbone.load(name=name)[1], unwrap(load_text(arguments.book)), tokens)

    torch.manual_seed(0)
    rows = PARTS[arguments.what](load)
    cells = [
        [f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()]
        for row in rows
    ]
    print(make_table(list(rows[0]), cells))
    book = None if arguments.book is None else arguments.book.name
    print(json.dumps({"benchmark": f"slots {arguments.what}", "book": book, "rows": rows}))


if __name__ == "__main__":
    main()
