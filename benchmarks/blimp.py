"""BLiMP: how often a model finds the grammatical sentence of a pair likelier, before a memory and with it.

    locas read 3649.txt --out memory
    python benchmarks/blimp.py BLiMP.zip --memory memory --pairs 200 --out blimp.json

Each sentence is scored after the begin-of-text token alone; of two equal ones none is likelier. The drop is paired.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path
from statistics import fmean
from typing import Any

from measuring import describe_machine, encode_pair, make_table
from torch import nn

from locas_peft import backbone
from locas_peft.asking.scoring import score_targets
from locas_peft.bases import load_base
from locas_peft.evaluation.intervals import mean_interval
from locas_peft.files import write_json
from locas_peft.memories import memory_attached
from locas_peft.tables import format_percent

Pair = dict[str, str]


def load_pairs(archive: Path, most: int) -> list[Pair]:
    """Load the first pairs of each paradigm from the release's zip file: "UID", "sentence_good", "sentence_bad"."""
    pairs = []
    with zipfile.ZipFile(archive) as file:
        for name in sorted(file.namelist()):
            if name.startswith("data/") and name.endswith(".jsonl"):
                pairs += [json.loads(line) for line in file.read(name).splitlines()[:most]]
    return pairs


def find_right(model: nn.Module, tokenizer, pairs: list[Pair]) -> list[bool]:
    """Return of each pair whether the grammatical sentence has the lower nll."""
    sentences = [pair[kind] for pair in pairs for kind in ("sentence_good", "sentence_bad")]
    scores = score_targets(model, [encode_pair(tokenizer, "", sentence) for sentence in sentences])
    nats = [score.nll_nats for score in scores]
    return [good < bad for good, bad in zip(nats[::2], nats[1::2], strict=True)]


def summarize(
    pairs: list[Pair], right: list[bool], before: list[bool] | None = None
) -> dict[str, Any]:
    """Return the share of pairs that are right, of each paradigm too, and the drop from what was right before."""
    paradigms: dict[str, list[bool]] = {}
    for pair, each in zip(pairs, right, strict=True):
        paradigms.setdefault(pair["UID"], []).append(each)
    found: dict[str, Any] = {"accuracy": mean_interval([float(each) for each in right])}
    if before is not None:
        found["drop"] = mean_interval(
            [float(one) - float(two) for one, two in zip(before, right, strict=True)]
        )
    return {**found, "paradigms": {name: fmean(each) for name, each in sorted(paradigms.items())}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path, help="BLiMP.zip, as released")
    parser.add_argument("--model", default=backbone.NAME)
    parser.add_argument("--memory", type=Path, nargs="*", default=[])
    parser.add_argument("--pairs", type=int, default=1000, help="the first pairs of each paradigm")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    base, tokenizer = load_base(args.model)
    pairs = load_pairs(args.archive, args.pairs)
    before = find_right(base.eval(), tokenizer, pairs)
    found = {"base": summarize(pairs, before)}
    for memory in args.memory:
        with memory_attached(base, memory) as model:
            found[str(memory)] = summarize(pairs, find_right(model, tokenizer, pairs), before)
    rows = [
        [name, format_percent(each["accuracy"]), format_percent(each.get("drop"), 2)]
        for name, each in found.items()
    ]
    print(make_table(["", "BLiMP, %", "drop"], rows))
    if args.out is not None:
        write_json(
            args.out,
            {"machine": describe_machine(base.device), "pairs": len(pairs), "states": found},
        )


if __name__ == "__main__":
    main()
