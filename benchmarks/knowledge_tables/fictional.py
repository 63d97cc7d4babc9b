"""Fictional passages: nats and exact match of probes, after readings, a study, and another book.

The probes are those of Chang et al. (arXiv:2406.11813): the text's wording, paraphrase,
composition.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from measuring import encode_pair, make_table
from torch import nn

from locas_peft.evaluation import Unit
from locas_peft.evaluation.intervals import mean_interval
from locas_peft.model import CausalLM, token_losses
from locas_peft.tables import format_mean, format_percent

from .asked import load_results
from .bench import KnowledgeBench
from .documents import KINDS, Document, Probe, load_fictional
from .memories import LORA, LORA_FREE, STUDY, Recipe
from .rows import (
    COST_HEAD,
    LORA_FREE_ROW,
    LORA_ROW,
    NONE,
    STUDY_ROW,
    Row,
    choose_rows,
    fill_rows,
    list_costs,
    row_unit,
)

__all__ = ["fill", "list_rows", "score_probes", "tabulate"]

TABLE = "fictional"
ADAPTERS = {"study": ("Locas", STUDY, STUDY_ROW), "lora": ("LoRA r=16", LORA, LORA_ROW)}


def list_rows(readings: Sequence[int]) -> list[Row]:
    """Return the rows: the base, and of each adapter its readings, its study, and retention."""
    rows = [NONE]
    for adapter, (name, study, study_row) in ADAPTERS.items():
        before = None
        done = 0
        for count in readings:
            key = f"{adapter}-readings-{count}" if adapter == "lora" else f"readings-{count}"
            before = Recipe(key, "read", adapter, start=before, times=count - done)
            done = count
            rows.append(Row(key, f"{name}, read {count} times", before))
        retention = Recipe(f"{study.name}-then-book", "read", adapter, study, reads="book")
        rows.append(Row(study_row.key, f"{name}, studied", study))
        rows.append(Row(retention.name, f"{name}, studied, then another book", retention))
    rows.append(Row(LORA_FREE_ROW.key, "LoRA r=16, studied, no anchor", LORA_FREE))
    return rows


@torch.inference_mode()
def score_probes(model: nn.Module, tokenizer: Any, probes: Sequence[Probe]) -> dict[str, Any]:
    """Score the targets of probes after their beginnings.

    Returns:
        Of each probe its `kinds`; `nats` of its target; its `tokens`; whether the likeliest tokens
        are those of the target, `exact`.
    """
    host = CausalLM(model)
    figures: dict[str, Any] = {"kinds": [], "nats": [], "tokens": [], "exact": []}
    for probe in probes:
        prompt, target = encode_pair(tokenizer, probe.input, f" {probe.target}")
        ids = torch.tensor([[*prompt, *target]], device=host.device)
        # [N, V]
        logits = host.logits(ids[:, :-1], len(target), use_cache=False)[0]
        expected = ids[0, -len(target) :]
        figures["kinds"].append(probe.kind)
        figures["nats"].append(token_losses(logits, expected).double().sum().item())
        figures["tokens"].append(len(target))
        figures["exact"].append(int(torch.equal(logits.argmax(-1), expected)))
    return figures


def _measure(bench: KnowledgeBench, model: nn.Module, document: Document, row: Row) -> dict:
    return score_probes(model, bench.tokenizer, document.questions)


def fill(bench: KnowledgeBench) -> None:
    fill_rows(bench, load_fictional(bench), partial(_list_units, bench))


def _list_units(bench: KnowledgeBench, document: Document) -> list[Unit]:
    return [_make_unit(bench, document, row) for row in _choose_rows(bench)]


def _choose_rows(bench: KnowledgeBench) -> list[Row]:
    return choose_rows(bench, list_rows(bench.scale.readings))


def _make_unit(bench: KnowledgeBench, document: Document, row: Row) -> Unit:
    return row_unit(bench, TABLE, document, row, 0, partial(_measure, bench))


def tabulate(bench: KnowledgeBench) -> str:
    """Return nats and exact match by kind of probe, and the changes from the base."""
    documents = load_fictional(bench)
    results = {}
    for row in _choose_rows(bench):
        units = [_make_unit(bench, document, row) for document in documents]
        row_results = load_results(bench, units)
        if row_results:
            results[row] = row_results
    if not results:
        return ""
    base = {kind: _find_values(results.get(NONE, []), "nats", kind) for kind in KINDS}
    lines = []
    for row, row_results in results.items():
        cells = [row.name]
        for kind in KINDS:
            nats = _find_values(row_results, "nats", kind)
            changes = [value - base[kind][key] for key, value in nats.items() if key in base[kind]]
            cells.append(format_mean(mean_interval(list(nats.values())), 2))
            cells.append("-" if row == NONE else format_mean(mean_interval(changes), 2))
            exact = _find_values(row_results, "exact", kind)
            cells.append(format_percent(mean_interval(list(exact.values()))))
        count = sum(len(result["figures"]["kinds"]) for result in row_results)
        lines.append([*cells, *list_costs(bench, row_results), str(count)])
    head = [""]
    for name in KINDS.values():
        head += [f"{name}: nats a target", "change", "exact match, %"]
    note = (
        "Mean nats of a probe's target, and how many targets the likeliest tokens are; changes are "
        "from the base, with 95% intervals over probes. "
        f"The other book has {bench.scale.retention_tokens:,} tokens."
    )
    return f"{note}\n\n{make_table([*head, *COST_HEAD, 'n'], lines)}"


def _find_values(
    results: Sequence[dict[str, Any]], name: str, kind: str
) -> dict[tuple[str, int], float]:
    """Return a figure of the probes of a kind, by document and number."""
    values = {}
    for result in results:
        figures = result["figures"]
        for number, value in enumerate(figures[name]):
            if figures["kinds"][number] == kind:
                values[result["document"], number] = value
    return values
