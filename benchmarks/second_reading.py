"""What a second reading of the same text costs on the text that follows it, and what averaging the weights saves.

    python benchmarks/second_reading.py --book eval/1684.txt --model smollm2

Reads the first tokens of a book twice. After each reading, for a mean of the weights after the first and the second
one, and with the weights that the trainer leaves, the next tokens are scored with the memory frozen. The last line
printed is JSON, in nats a token against no memory.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn

from locas_peft.bases import load_base
from locas_peft.stages import ReadSettings, attached, complete, make_trainer
from locas_peft.text import tokenize, unwrap
from locas_peft.ttt import TestTimeTrainer


def score_after(model: nn.Module, ids: torch.Tensor, learned: int, window: int) -> float:
    """Return the nll in nats a token of the tokens after the first `learned` ones, after half a window of context."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    stride = window // 2
    trainer = TestTimeTrainer(
        model, window=window, stride=stride, learning_rate=None, context="recompute"
    )
    chunks = [chunk for chunk in trainer.read(ids[learned - stride :]) if chunk.start >= stride]
    for parameter in trained:
        parameter.requires_grad_(True)
    return sum(chunk.nll_nats for chunk in chunks) / sum(chunk.tokens for chunk in chunks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--book", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", default="locas-glu")
    parser.add_argument("--tokens", type=int, default=6144, help="that are read twice")
    parser.add_argument("--next", type=int, default=2048, help="that are scored afterwards")
    parser.add_argument("--window", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    base, tokenizer = load_base(arguments.model, "auto", "cpu")
    learned, window = arguments.tokens, arguments.window
    ids = tokenize(
        tokenizer, unwrap(arguments.book.read_text(encoding="utf-8")), learned + arguments.next
    )
    none = score_after(base.requires_grad_(False), ids, learned, window)
    settings = ReadSettings(method=arguments.method, window=window, stride=window // 2, readings=2)
    gains: dict[str, float] = {}
    settings = complete(settings, base)
    with attached(base, settings) as model:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        ends: list[list[torch.Tensor]] = []
        for chunk in make_trainer(model, settings).read(ids[:learned]):
            if chunk.stop == learned:
                ends.append([parameter.detach().clone() for parameter in trained])
                gains[f"after reading {len(ends)}"] = (
                    score_after(model, ids, learned, window) - none
                )
        gains["as the trainer leaves it"] = score_after(model, ids, learned, window) - none
        with torch.no_grad():
            for parameter, first, second in zip(trained, *ends, strict=True):
                parameter.copy_(first.lerp(second, 0.25))
        gains["0.25 of the second"] = score_after(model, ids, learned, window) - none
    print(json.dumps({"none": none, **gains}))


if __name__ == "__main__":
    main()
