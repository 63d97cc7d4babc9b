"""Texts written in one parallel pass, in batches of several windows, against one window after the other.

    python benchmarks/parallel_writing.py --book eval/1684.txt --threads 2

Stretches of a book are written into one two-layer memory by `RidgeWriter.add`, and solved for once. The maps must be
the same up to rounding. Beside them is the reading chunk by chunk, which solves after each. The text that follows the
stretches is scored with the memory frozen. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import describe_machine
from peft import PeftModel, get_peft_model
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from locas_peft import LocasConfig, LocasLayer, RidgeWriter, TestTimeTrainer, backbone, calibrate
from locas_peft.text import tokenize, unwrap
from locas_peft.tuner import list_layers

CHUNKS = {"window": 512, "stride": 256, "context": "cache", "learning_rate": None}
ONE_SOLVE = {"rate": 0.01, "prior": 1000.0}
"""Shorter than the defaults of `RidgeWriter`: no later gradient corrects the map."""


def write(
    model: PeftModel, windows: Sequence[torch.Tensor], batch_size: int, passes: int = 1
) -> None:
    """Write windows, LongTensors [T], into the active memory; each pass corrects what the ones before have written."""
    calibrate(model, [windows[0][None]])
    for _ in range(passes):
        writer = RidgeWriter(model, **ONE_SOLVE)
        for start in range(0, len(windows), batch_size):
            batch = windows[start : start + batch_size]
            ids = pad_sequence(batch, batch_first=True)
            labels = pad_sequence(batch, batch_first=True, padding_value=-100)
            with writer.recording():
                model(
                    input_ids=ids, attention_mask=(labels != -100).long(), labels=labels
                ).loss.backward()
            writer.add(pad(labels[:, 1:] != -100, (0, 1)))
        writer.solve()


def read(model: PeftModel, ids: torch.Tensor) -> None:
    for _ in TestTimeTrainer(model, **CHUNKS, steps=[RidgeWriter(model)]).read(ids):
        pass


def read_map(layer: LocasLayer) -> torch.Tensor:
    """Return the linear map [D, D] that the slots of a layer's memory hold."""
    up, down = (projection.weight.detach() for projection in layer.projections("default"))
    scale = layer.locas_input_scale["default"] * layer.saved_scale("default")
    return scale * (up.T @ down.T)


def score(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Return the nll in nats a token of a text, LongTensor [T], after its first chunk, with the model frozen."""
    model.requires_grad_(False)
    chunks = [chunk for chunk in TestTimeTrainer(model, **CHUNKS).read(ids) if chunk.start]
    return sum(chunk.nll_nats for chunk in chunks) / sum(chunk.tokens for chunk in chunks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--book", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="of each document")
    parser.add_argument(
        "--window", type=int, default=512, help="that is read without the text before it"
    )
    parser.add_argument(
        "--start", type=int, default=0, help="the token of the book that the documents begin at"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    base, tokenizer = backbone.load(name=backbone.MLP_NAME)
    written, begin = arguments.documents * arguments.tokens, arguments.start
    text = unwrap(arguments.book.read_text(encoding="utf-8"))
    ids = tokenize(tokenizer, text, begin + written + 2048)[begin:]
    documents, after = ids[:written].split(arguments.tokens), ids[written - CHUNKS["stride"] :]
    windows = [window for document in documents for window in document.split(arguments.window)]
    ways = {
        "one after the other": lambda model: write(model, windows, 1),
        "at once": lambda model: write(model, windows, arguments.documents),
        "at once, two passes": lambda model: write(model, windows, arguments.documents, 2),
        "chunk by chunk": lambda model: read(model, ids[:written]),
    }
    none, rows, maps = score(base, after), {}, {}
    for number in range(arguments.rounds + 1):  # the first round warms up
        for way, run in ways.items():
            model = get_peft_model(base, LocasConfig(r=64, init_weights="write"))
            wall, processor = time.perf_counter(), time.process_time()
            run(model)
            seconds = time.perf_counter() - wall, time.process_time() - processor
            maps[way] = torch.stack([read_map(layer) for layer in list_layers(model)])
            gain = score(model, after) - none
            base = model.unload()
            if number:
                rows.setdefault(way, []).append(
                    {"wall": seconds[0], "processor": seconds[1], "next": gain}
                )
                print(
                    f"{way}: {seconds[0]:.1f} s, {seconds[1]:.1f} s of processor time, next {gain:+.4f}",
                    flush=True,
                )
    one, many = (maps[way] for way in list(ways)[:2])
    figures: dict[str, Any] = {
        "relative difference of the maps": ((one - many).norm() / one.norm()).item()
    }
    shared = {name: str(value) for name, value in vars(arguments).items()}
    print(json.dumps({**describe_machine(torch.device("cpu")), **shared, **figures, "rows": rows}))


if __name__ == "__main__":
    main()
