"""A table of documents: documents an hour with one process and with two, and the memory of many against one.

    python benchmarks/table.py                              # two minutes on two free cores
    python benchmarks/table.py --pages 2 --tokens 300 --many 3     # a test

Each process has one thread. The pages are stretches of the Python language reference, read by the embedded model. The
rate is the one that the command prints: models are loaded before. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from measuring import describe_machine

from locas_peft.text import python_reference

CHARACTERS = 4
"""Of a token, about."""


def write_table(path: Path, pages: int, tokens: int) -> None:
    """Write a table of pages, each with a text of its own of about so many tokens."""
    text, length = python_reference(), CHARACTERS * tokens
    starts = [number * length % (len(text) - length) for number in range(pages)]
    rows = [{"name": f"page {number}", "text": text[start : start + length]} for number, start in enumerate(starts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def teach(folder: Path, pages: int, tokens: int, workers: int) -> dict[str, float]:
    """Teach a table; return the documents an hour, the seconds of the command, and the highest resident bytes."""
    write_table(folder / "pages.jsonl", pages, tokens)
    command = [sys.executable, "-m", "locas_peft", "memorize", "--manifest", "pages.jsonl", "--device", "cpu"]
    command += ["--library", f"library-{pages}-{workers}", "--workers", str(workers)]
    environment, began, peak = {**os.environ, "OMP_NUM_THREADS": "1"}, time.perf_counter(), 0
    with open(folder / "log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        while process.poll() is None:
            try:
                peak = max(peak, psutil.Process(process.pid).memory_info().rss)
            except psutil.Error:  # it has just ended
                break
            time.sleep(0.05)
        if process.wait():
            log.seek(0)
            raise SystemExit(log.read())
        log.seek(0)
        rate = float(re.findall(r"([\d,]+) an hour", log.read())[-1].replace(",", ""))
    return {"an_hour": rate, "seconds": time.perf_counter() - began, "peak_bytes": peak}


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--pages", type=int, default=16)
parser.add_argument("--tokens", type=int, default=6_000, help="of a page")
parser.add_argument("--many", type=int, default=200, help="pages of 256 tokens, for the peak")
arguments = parser.parse_args()

with tempfile.TemporaryDirectory() as directory:
    folder = Path(directory)
    figures = {f"workers_{count}": teach(folder, arguments.pages, arguments.tokens, count) for count in (1, 2)}
    figures |= {f"pages_{count}": teach(folder, count, 256, 1) for count in (1, arguments.many) if arguments.many}
for name, found in figures.items():
    print(f"{name:12}{found['an_hour']:8,.0f} an hour{found['seconds']:8.1f} s{found['peak_bytes'] / 1e6:8,.0f} MB")
print(json.dumps({**figures, "machine": describe_machine(torch.device("cpu"))}))
