"""The forgetting study: a memory of one whole book, measured on what the book has nothing to do with.

The paper's section on general capabilities. Before, after, and with the memory disabled, which must be as before to
the last bit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..evaluation.forgetting import (
    Drift,
    MinimalPair,
    PairScore,
    by_paradigm,
    measure_drift,
    perplexity_rise,
    score_pairs,
)
from ..evaluation.harness import evaluate_tasks
from ..evaluation.intervals import mean_interval
from ..evaluation.metrics import MinimalPairs
from ..files import write_json
from ..methods import Settings
from .progress import Start, silent
from .run import (
    ALONE,
    Recipe,
    Task,
    describe_text,
    do_tasks,
    make_memory,
    memorize,
    open_run,
    read_teaching,
    reading_cost,
    with_memory,
    without_memory,
)
from .sharing import Processes

STUDY = "forgetting"


@dataclass(frozen=True)
class Plan:
    """What is measured before and after.

    Args:
        pairs: minimal pairs; none where empty.
        unread: texts that the memory does not read, by name: LongTensor [T] each.
        tasks: of lm-evaluation-harness.
        include_path: a folder with task files of one's own.
        limit: the first so many documents of each task.
        num_fewshot: examples before each question; the task's own number where None.
        batch_tokens: tokens at once, for the pairs.
        batch_size: documents at once, for the tasks.
        seed: of the tasks' examples.
    """

    pairs: Sequence[MinimalPair] = ()
    unread: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    include_path: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    batch_tokens: int = 4096
    batch_size: int = 8
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """Gives what two runs in one folder must share."""
        return {
            "pairs": len(self.pairs),
            "unread": {name: describe_text(ids) for name, ids in self.unread.items()},
            "tasks": list(self.tasks),
            "limit": self.limit,
            "num_fewshot": self.num_fewshot,
            "seed": self.seed,
        }


def run_forgetting(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    book: torch.Tensor,
    methods: dict[str, Settings],
    out: Path,
    plan: Plan,
    *,
    recipe: Recipe | None = None,
    common: dict[str, Any] | None = None,
    overwrite: bool = False,
    start: Start = silent,
    processes: Processes = ALONE,
) -> dict[str, Any]:
    """Runs the study, or goes on with it: what lies finished in the folder is not done again.

    Args:
        base: a causal LM without adapters; mutated while it runs, and left as it was.
        tokenizer: its tokenizer.
        book: LongTensor [T], what the memories read.
        methods: the settings of each method by the name that it shall have. Their window and stride also serve the
            frozen readings, and must be the same.
        out: the folder: `forgetting/memories`, each state's measures in `forgetting/*.json`, `forgetting.json`.
        plan: what is measured.
        recipe: how the book is taught.
        common: more to record of the run, as JSON values; another run in the same folder must share it.
        overwrite: removes what an earlier run left.
        start: shows progress.
        processes: which share the memories; the figures are the same for any number of them. Each must call this.

    Returns:
        The figures, as `forgetting.json` has them.

    Raises:
        ValueError: the folder holds another run, the methods' windows differ, or a task is not known.
        OSError: the disk is full, the folder cannot be written, or another process has ended before.
    """
    recipe = recipe or Recipe()
    windows = {(settings.window, settings.stride) for settings in methods.values()}
    if len(windows) != 1:
        raise ValueError(f"methods must share window and stride, got {sorted(windows)}: give them the same")
    window, stride = windows.pop()
    shared = {
        **(common or {}),
        "book": describe_text(book),
        "window": window,
        "stride": stride,
        "recipe": dataclasses.asdict(recipe),
        "plan": plan.to_json(),
    }
    folder = out / STUDY
    unread_tokens = sum(map(len, plan.unread.values()))

    def measure(model: nn.Module, reference: Callable, name: str, plan: Plan = plan) -> dict[str, Any]:
        return _measure(model, tokenizer, reference, plan, window, stride, start, name)

    def measure_base() -> None:
        advance = start("base reads the book", len(book))
        taught = memorize(base, book, reading, Recipe(), advance)
        _write(before, {"teaching": taught, **measure(base, nullcontext, "base")})

    def measure_memory(name: str) -> None:
        directory = folder / "memories" / name
        make_memory(base, book, methods[name], recipe, directory, start, f"{name} reads the book")
        with with_memory(base, directory) as model:
            after = measure(model, model.disable_adapter, name)
            with model.disable_adapter():
                # The unread texts were read with the memory disabled on the way: as the reference.
                rest = dataclasses.replace(plan, unread={})
                disabled = measure(model, nullcontext, f"{name}, disabled", rest)
        _write(afterwards[name], {"after": after, "disabled": disabled})

    before = folder / "before.json"
    afterwards = {
        name: folder / f"after-{name}.json" for name, settings in methods.items() if settings.method != "none"
    }
    reading = without_memory(next(iter(methods.values())))
    tasks = [Task(before.exists, measure_base, reading_cost(len(book), reading) + 2 * unread_tokens)]
    tasks += [
        Task(
            path.exists,
            lambda name=name: measure_memory(name),
            reading_cost(len(book), methods[name], recipe.readings) + 2 * unread_tokens,
        )
        for name, path in afterwards.items()
    ]
    do_tasks(tasks, lambda: open_run(out, STUDY, shared, methods, overwrite), processes, start)
    base_found = _read(before)
    states = {
        name: {"teaching": read_teaching(folder / "memories" / name), **_read(path)}
        for name, path in afterwards.items()
    }
    figures = {
        "study": STUDY,
        **shared,
        "methods": {name: dataclasses.asdict(settings) for name, settings in methods.items()},
        "before": _describe_before(base_found),
        "after": {name: _describe_after(base_found, state) for name, state in states.items()},
    }
    if processes.is_main:
        write_json(out / f"{STUDY}.json", figures)
    return figures


def _write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, found)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _measure(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    reference: Callable,
    plan: Plan,
    window: int,
    stride: int,
    start: Start,
    name: str,
) -> dict[str, Any]:
    found: dict[str, Any] = {"drift": {}, "pairs": [], "tasks": {}}
    for text, ids in plan.unread.items():
        advance = start(f"{name}: {text}", len(ids))
        found["drift"][text] = measure_drift(model, reference, ids, window, stride, advance).to_json()
    if plan.pairs:
        advance = start(f"{name}: minimal pairs", 2 * len(plan.pairs))
        scores = score_pairs(model, tokenizer, plan.pairs, batch_tokens=plan.batch_tokens, on_batch=advance)
        found["pairs"] = [dataclasses.astuple(score) for score in scores]
    if plan.tasks:
        advance = start(f"{name}: {', '.join(plan.tasks)}", 1)
        found["tasks"] = evaluate_tasks(
            model,
            tokenizer,
            plan.tasks,
            include_path=plan.include_path,
            limit=plan.limit,
            num_fewshot=plan.num_fewshot,
            batch_size=plan.batch_size,
            seed=plan.seed,
        )
        advance(1)
    return found


# ---------------------------------------------------------------------- figures


def _describe_before(before: dict[str, Any]) -> dict[str, Any]:
    drifts = {name: Drift.from_json(value) for name, value in before["drift"].items()}
    figures: dict[str, Any] = {
        "book_perplexity": before["teaching"]["perplexity"][0],
        "unread_perplexity": {name: drift.perplexity for name, drift in drifts.items()},
        "tasks": before["tasks"],
    }
    if before["pairs"]:
        figures["blimp"] = _accuracy([PairScore(*pair) for pair in before["pairs"]])
    return figures


def _describe_after(before: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    after, disabled = state["after"], state["disabled"]
    base = {name: Drift.from_json(value) for name, value in before["drift"].items()}
    drifts = {name: Drift.from_json(value) for name, value in after["drift"].items()}
    same = {
        # The memory is what differs: logits equal to the last bit make perplexity equal and the KL nought.
        "unread": all(drifts[name].reference_sha256 == base[name].reference_sha256 for name in base),
        "blimp": disabled["pairs"] == before["pairs"],
        "tasks": _values(disabled["tasks"]) == _values(before["tasks"]),
    }
    figures: dict[str, Any] = {
        "parameters": state["teaching"]["parameters"],
        "book_perplexity": state["teaching"]["perplexity"],
        "book_gain": before["teaching"]["perplexity"][0] - state["teaching"]["perplexity"][0],
        "unread_perplexity": {name: drift.perplexity for name, drift in drifts.items()},
        "unread_rise": {name: perplexity_rise(base[name], drift).to_json() for name, drift in drifts.items()},
        "disabled_perplexity": {name: drift.reference_perplexity for name, drift in drifts.items()},
        "kl_per_token": {
            # Chunks are what is resampled: tokens of one chunk share their context.
            name: {**mean_interval(drift.chunk_kl_nats).to_json(), "mean_over_tokens": drift.kl_per_token}
            for name, drift in drifts.items()
        },
        "tasks": after["tasks"],
        "disabled_tasks": disabled["tasks"],
        "disabled_is_before": all(same.values()),
        "disabled_is_before_in": same,
    }
    if before["pairs"]:
        first = [PairScore(*pair) for pair in before["pairs"]]
        later = [PairScore(*pair) for pair in after["pairs"]]
        drops = [float(one.right) - float(two.right) for one, two in zip(first, later, strict=True)]
        figures["blimp"] = _accuracy(later)
        figures["blimp_drop"] = mean_interval(drops).to_json()
        figures["blimp_disabled"] = _accuracy([PairScore(*pair) for pair in disabled["pairs"]])["accuracy"]
    return figures


def _accuracy(scores: Sequence[PairScore]) -> dict[str, Any]:
    metric = MinimalPairs()
    metric.add_batch(
        predictions=[score.good_nll_nats for score in scores], references=[score.bad_nll_nats for score in scores]
    )
    return {**metric.compute(), "paradigms": by_paradigm(scores)}


def _values(tasks: dict[str, Any]) -> dict[str, Any]:
    """A task's measures without its standard errors, which may be drawn."""
    return {
        task: {name: value for name, value in measures.items() if "stderr" not in name}
        for task, measures in tasks.items()
    }
