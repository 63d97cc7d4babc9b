"""The README's figures are those of the results in `benchmarks/results`."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
READINGS = (
    ROOT / "benchmarks" / "results" / "paper" / "Qwen2.5-Coder-0.5B-Instruct" / "cpu" / "readings"
)
BOOKS = ("3649", "36235")
BEST_LORA = "lora_learning_rate=0.0003"
ROWS = {
    "no memory": "none",
    "LoRA r=64": BEST_LORA,
    "Locas r=64": "locas-glu",
    "Locas r=16": "locas-glu_r=16",
}


def load_figures(book: str, row: str) -> dict:
    path = READINGS / f"{book}-50176" / f"{row}-seed0.json"
    return json.loads(path.read_text(encoding="utf-8"))["figures"]


def list_cells(name: str) -> list[str]:
    """The cells of a row of the README's table of readings."""
    table = README.split("perplexity, book 3649")[1].split("\n\n")[0]
    (line,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", table, re.MULTILINE)
    return [cell.strip() for cell in line.split("|")]


def sum_nats(figures: dict) -> float:
    return sum(chunk[2] for chunk in figures["chunks"])


@pytest.mark.parametrize("name", ROWS)
def test_the_table_of_readings_has_the_figures_of_the_results(name):
    parameters, *perplexities, shares, behind, seconds = list_cells(name)
    figures = [load_figures(book, ROWS[name]) for book in BOOKS]
    if name != "no memory":
        assert int(parameters.replace(",", "")) == figures[0]["parameters"]
    assert perplexities == [f"{one['perplexity']:.2f}" for one in figures]
    assert seconds == ", ".join(f"{one['processor_seconds']:.0f}" for one in figures)
    if not name.startswith("Locas"):
        return
    gains = []
    for book, one in zip(BOOKS, figures, strict=True):
        base = math.log(load_figures(book, "none")["perplexity"])
        best = math.log(load_figures(book, BEST_LORA)["perplexity"])
        gains.append((base - math.log(one["perplexity"])) / (base - best))
    assert shares == ", ".join(f"{gain:.2f}" for gain in gains)
    means = re.findall(r"(\d\.\d{3}) \[", behind)
    for mean, book, one in zip(means, BOOKS, figures, strict=True):
        best = load_figures(book, BEST_LORA)
        difference = (sum_nats(one) - sum_nats(best)) / one["scored_tokens"]
        assert mean == f"{difference:.3f}"
