"""The forgetting study: what the memory of a whole book costs on grammar, on unread texts and on other tasks.

The paper's section on general capabilities. Each measure is taken before, after, and with the memory disabled, which
must equal before to the last bit. Grammar (BLiMP), the perplexity of unread texts and the KL from the base need only
losses, so they work on models of any size; MMLU and other tasks run through `harness`.

Axes: N tokens scored, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..files import write_json
from ..reading import memory_attached
from ..settings import ReadingSettings
from ..ttt.chunks import cut, perplexity
from ..ttt.host import Host
from ..ttt.objectives import divergences, token_losses
from .blimp import MinimalPair, PairScore, score_pairs, summarize_pairs
from .harness import evaluate_tasks, find_tasks
from .intervals import Mean, mean_interval, rise_interval
from .study import (
    Progress,
    Unit,
    describe_text,
    digest,
    open_study,
    reading_unit,
    run_units,
    silent,
    summarize_reading,
)

__all__ = ["Plan", "measure_drift", "perplexity_rise", "run_forgetting"]

STUDY = "forgetting"
BASE = "base"


@dataclass(frozen=True)
class Plan:
    """What is measured before and after.

    Args:
        pairs: minimal pairs; may be empty.
        unread: texts that the memory does not read, by name: LongTensor [T] each.
        tasks: names of tasks of lm-evaluation-harness.
        include_path: a folder with the user's task files.
        limit: the number of documents of each task, from the first; None for all of them.
        batch_tokens: tokens at once, for the pairs.
        batch_size: documents at once, for the tasks.
        seed: of the tasks' examples.
    """

    pairs: Sequence[MinimalPair] = ()
    unread: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    include_path: Path | None = None
    limit: int | None = None
    batch_tokens: int = 4096
    batch_size: int = 8
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields that two runs in one folder must share."""
        return {
            "pairs": len(self.pairs),
            "pairs_sha256": digest(self.pairs),
            "unread": {name: describe_text(ids) for name, ids in self.unread.items()},
            "tasks": list(self.tasks),
            "limit": self.limit,
            "seed": self.seed,
        }


def run_forgetting(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    book: torch.Tensor,
    methods: dict[str, ReadingSettings],
    out: Path,
    plan: Plan,
    *,
    common: dict[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Run the study, or continue it.

    Args:
        base: a causal LM without adapters; mutated while it runs, and restored.
        tokenizer: its tokenizer.
        book: LongTensor [T], the text that the memories read.
        methods: each method's settings, by its name in tables. Their window and stride are also those of the frozen
            measures and must be the same in all of them.
        out: the folder: memories in `forgetting/memories`, each state's measures in `forgetting/*.json`, and
            `forgetting.json`.
        plan: what is measured.
        common: more fields for the record of the run, as JSON values.
        overwrite: see `study.open_study`.
        progress: shows progress.

    Returns:
        The figures, as in `forgetting.json`.

    Raises:
        ValueError: the folder holds another run, the methods' windows differ, or a task does not exist.
        OSError: the disk is full, or the folder cannot be written.
    """
    methods = {name: settings.complete(base) for name, settings in methods.items()}
    windows = {(settings.window, settings.stride) for settings in methods.values()}
    if len(windows) != 1:
        raise ValueError(f"methods must share window and stride, got {sorted(windows)}: give them the same")
    if plan.tasks:
        find_tasks(plan.tasks, plan.include_path)
    first = next(iter(methods.values()))
    shared = {
        **(common or {}),
        "book": describe_text(book),
        "window": first.window,
        "stride": first.stride,
        "plan": plan.to_json(),
    }
    # The base reads the book too: the memories' gain is measured against it.
    same = ("model", "window", "stride", "context", "max_tokens", "seed", "dtype")
    readers = {BASE: ReadingSettings(method="none", **{field: getattr(first, field) for field in same})}
    readers |= {name: settings for name, settings in methods.items() if settings.method != "none"}
    folder = out / STUDY
    readings, states = {}, {}
    for name, settings in readers.items():
        path, label = folder / "memories" / f"{name}.json", f"{name} reads the book"
        taught = name != BASE
        readings[name] = reading_unit(base, book, settings, path, keep_memory=taught, label=label, progress=progress)
        memory = readings[name].memory if taught else None
        make = partial(_measure_state, base, tokenizer, memory, plan, settings, name, progress)
        path = folder / (f"after-{name}.json" if taught else "before.json")
        states[name] = Unit(path, make, name, needs=readings[name])
    units = [*readings.values(), *states.values()]
    head = open_study(out, STUDY, shared, methods, overwrite, units)
    run_units(units, progress)
    found = {
        name: {"teaching": summarize_reading(readings[name].load()), **state.load()} for name, state in states.items()
    }
    before = found.pop(BASE)
    figures = {
        **head,
        "before": _describe_before(before),
        "after": {name: _describe_after(before, state) for name, state in found.items()},
    }
    write_json(out / f"{STUDY}.json", figures)
    return figures


def _measure_state(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    memory: Path | None,
    plan: Plan,
    settings: ReadingSettings,
    name: str,
    progress: Progress,
) -> dict[str, Any]:
    """Measure the base, or a memory: after the book, and disabled."""
    measure = partial(_measure, tokenizer=tokenizer, settings=settings, progress=progress)
    if memory is None:
        return measure(base, reference=nullcontext, plan=plan, label=name)
    with memory_attached(base, memory) as model:
        after = measure(model, reference=model.disable_adapter, plan=plan, label=name)
        with model.disable_adapter():
            # The unread texts were scored with the memory disabled above: as the reference.
            rest = dataclasses.replace(plan, unread={})
            disabled = measure(model, reference=nullcontext, plan=rest, label=f"{name}, disabled")
    return {"after": after, "disabled": disabled}


def _measure(
    model: nn.Module,
    *,
    tokenizer: PreTrainedTokenizerBase,
    reference: Callable[[], AbstractContextManager],
    plan: Plan,
    settings: ReadingSettings,
    label: str,
    progress: Progress,
) -> dict[str, Any]:
    found: dict[str, Any] = {"drift": {}, "pairs": [], "tasks": {}}
    for text, ids in plan.unread.items():
        advance = progress(f"{label}: {text}", len(ids))
        found["drift"][text] = measure_drift(model, reference, ids, settings.window, settings.stride, advance)
    if plan.pairs:
        advance = progress(f"{label}: minimal pairs", 2 * len(plan.pairs))
        found["pairs"] = score_pairs(model, tokenizer, plan.pairs, batch_tokens=plan.batch_tokens, on_batch=advance)
    if plan.tasks:
        advance = progress(f"{label}: {', '.join(plan.tasks)}", 1)
        found["tasks"] = evaluate_tasks(
            model,
            tokenizer,
            plan.tasks,
            include_path=plan.include_path,
            limit=plan.limit,
            batch_size=plan.batch_size,
            seed=plan.seed,
        )
        advance(1)
    return found


# ---------------------------------------------------------------------- figures


def _describe_before(before: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "book_perplexity": before["teaching"]["perplexity"][0],
        "unread_perplexity": {name: value["perplexity"] for name, value in before["drift"].items()},
        "tasks": before["tasks"],
    }
    if before["pairs"]:
        figures["blimp"] = summarize_pairs([PairScore(*pair) for pair in before["pairs"]])
    return figures


def _describe_after(before: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    after, disabled = state["after"], state["disabled"]
    base, drifts = before["drift"], after["drift"]
    same = {
        # Logits that are equal to the last bit make the perplexity equal and the KL zero.
        "unread": all(drifts[name]["reference_sha256"] == base[name]["reference_sha256"] for name in base),
        "blimp": disabled["pairs"] == before["pairs"],
        "tasks": _without_errors(disabled["tasks"]) == _without_errors(before["tasks"]),
    }
    figures: dict[str, Any] = {
        "parameters": state["teaching"]["parameters"],
        "book_perplexity": state["teaching"]["perplexity"],
        "book_gain": before["teaching"]["perplexity"][0] - state["teaching"]["perplexity"][0],
        "unread_perplexity": {name: drift["perplexity"] for name, drift in drifts.items()},
        "unread_rise": {name: perplexity_rise(base[name], drift).to_json() for name, drift in drifts.items()},
        "disabled_perplexity": {name: drift["reference_perplexity"] for name, drift in drifts.items()},
        "kl_per_token": {
            # The chunks are resampled: the tokens of one chunk share their context.
            name: {**mean_interval(drift["chunk_kl_nats"]).to_json(), "mean_over_tokens": drift["kl_per_token"]}
            for name, drift in drifts.items()
        },
        "tasks": after["tasks"],
        "disabled_tasks": disabled["tasks"],
        "disabled_is_before": all(same.values()),
        "disabled_is_before_in": same,
    }
    if before["pairs"]:
        first, later = ([PairScore(*pair) for pair in pairs] for pairs in (before["pairs"], after["pairs"]))
        drops = [float(one.right) - float(two.right) for one, two in zip(first, later, strict=True)]
        figures["blimp"] = summarize_pairs(later)
        figures["blimp_drop"] = mean_interval(drops).to_json()
        figures["blimp_disabled"] = summarize_pairs([PairScore(*pair) for pair in disabled["pairs"]])["accuracy"]
    return figures


def _without_errors(tasks: dict[str, Any]) -> dict[str, Any]:
    """Leave out the tasks' standard errors, which may be drawn at random."""
    return {
        task: {name: value for name, value in measures.items() if "stderr" not in name}
        for task, measures in tasks.items()
    }


# ---------------------------------------------------------------------- unread texts


@torch.inference_mode()
def measure_drift(
    model: nn.Module,
    reference: Callable[[], AbstractContextManager],
    input_ids: Tensor,
    window: int,
    stride: int,
    on_chunk: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Score a text with frozen weights, chunk by chunk under the model and under its reference.

    Args:
        model: a causal language model in evaluation mode; not changed.
        reference: makes a context within which the model is the reference: `model.disable_adapter` for the base of a
            PEFT model, `contextlib.nullcontext` for the model itself.
        input_ids: LongTensor [T], T >= 2.
        window: tokens of a chunk and its context together (see `chunks.cut`).
        stride: tokens of a chunk.
        on_chunk: called with the number of tokens that were scored.

    Returns:
        A record with `perplexity` and `reference_perplexity`; `kl_per_token`, the mean KL of the next-token
        distributions from the reference's to the model's; `reference_sha256` over the bytes of all the reference's
        logits, by which two references are equal to the last bit; the number of `tokens`, `nll_nats`,
        `reference_nll_nats` and `kl_nats` in all; and of each chunk `chunk_tokens`, `chunk_nll_nats` under the model
        and `chunk_kl_nats`, the mean KL a token.

    Raises:
        ValueError: the text has fewer than two tokens.
    """
    if input_ids.dim() != 1 or len(input_ids) < 2:
        raise ValueError(f"input_ids must be of shape [T] with T >= 2, got {list(input_ids.shape)}: give more text")
    host = Host(model)
    ids = input_ids.to(host.device)
    ours, theirs, kls, counts = [], [], [], []
    hashed = hashlib.sha256()
    for span in cut(len(ids), window, stride):
        if not span.scored:
            continue
        targets, read = ids[span.stop - span.scored : span.stop], ids[None, span.begin : span.stop - 1]
        logits = host.logits(read, span.scored, use_cache=False)[0]  # [N, V]
        with reference():
            reference_logits = host.logits(read, span.scored, use_cache=False)[0]
        hashed.update(reference_logits.contiguous().view(torch.uint8).cpu().numpy())
        ours.append(token_losses(logits, targets).double().sum().item())
        theirs.append(token_losses(reference_logits, targets).double().sum().item())
        kls.append(divergences(logits, reference_logits).double().sum().item())
        counts.append(span.scored)
        if on_chunk is not None:
            on_chunk(span.scored)
    tokens, nll_nats, reference_nll_nats, kl_nats = sum(counts), math.fsum(ours), math.fsum(theirs), math.fsum(kls)
    return {
        "tokens": tokens,
        "nll_nats": nll_nats,
        "reference_nll_nats": reference_nll_nats,
        "kl_nats": kl_nats,
        "reference_sha256": hashed.hexdigest(),
        "chunk_kl_nats": [kl / count for kl, count in zip(kls, counts, strict=True)],
        "chunk_nll_nats": ours,
        "chunk_tokens": counts,
        "perplexity": perplexity(nll_nats, tokens),
        "reference_perplexity": perplexity(reference_nll_nats, tokens),
        "kl_per_token": kl_nats / tokens,
    }


def perplexity_rise(before: dict[str, Any], after: dict[str, Any]) -> Mean:
    """Return the rise of a text's perplexity from one measurement to another, with its 95% interval over chunks.

    Args:
        before: a record of `measure_drift`.
        after: one of the same text in the same chunks.

    Raises:
        ValueError: the chunks differ.
    """
    if before["chunk_tokens"] != after["chunk_tokens"]:
        raise ValueError(
            f"before and after must be of the same chunks, got {len(before['chunk_tokens'])} and "
            f"{len(after['chunk_tokens'])} of them, or other ones: measure both with the same window and stride"
        )
    return rise_interval(before["chunk_nll_nats"], after["chunk_nll_nats"], after["chunk_tokens"])
