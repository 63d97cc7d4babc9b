"""Paired differences between two methods of a run of `locas eval perplexity`, with an interval over its documents.

    python benchmarks/paired.py locas-eval locas-glu@64 lora@11-lr2e-3

The difference is of the mean nll in nats a token, the first method's less the second one's, each document with the
same weight. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from locas_peft.evaluation.intervals import mean_interval
from locas_peft.files import load_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the --out of the command")
    parser.add_argument("first")
    parser.add_argument("second")
    arguments = parser.parse_args()
    readings = load_json(arguments.folder / "perplexity.json")["readings"]
    rows = {}
    for name, own in readings[arguments.first].items():
        pair = own, readings[arguments.second][name]
        first, second = (each["nll_nats"] / each["scored_tokens"] for each in pair)
        rows[name] = first - second
        print(f"{name}: {pair[0]['perplexity']:.2f} {pair[1]['perplexity']:.2f} {rows[name]:+.4f}")
    print(json.dumps({**rows, "all": mean_interval(list(rows.values()))}))


if __name__ == "__main__":
    main()
