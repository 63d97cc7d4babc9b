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
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..files import write_json
from ..memories.loading import memory_attached
from ..model.causal_lm import CausalLM
from ..progress import Progress, silent
from ..reading.settings import ReadingSettings
from ..ttt.chunks import cut, perplexity
from ..ttt.objectives import divergences, token_losses
from .blimp import MinimalPair, PairScore, score_pairs, summarize_pairs
from .harness import evaluate_tasks, find_tasks
from .intervals import Interval, mean_interval, rise_interval
from .own_answers import NAME as OWN_ANSWERS
from .own_answers import write_own_answers
from .study import Unit, describe_text, digest, open_study, reading_unit, run_units, summarize_reading

__all__ = ["Plan", "cut_text", "measure_drift", "perplexity_rise", "run_forgetting"]

STUDY = "forgetting"
BASE = "base"
Piece = tuple[Tensor, int]
"""Token ids, LongTensor [T], and how many of the last ones are scored."""


@dataclass(frozen=True)
class Plan:
    """What is measured before and after: pairs, texts that the memory does not read, and tasks of the harness.

    `unread` has a LongTensor [T] by name. With `own_answers` the base's answers to everyday questions are measured as
    one more unread text (see `own_answers`). `batch_tokens` is for the pairs; `include_path`, `limit`, `batch_size`
    and `seed` are for the tasks (see `harness.evaluate_tasks`).
    """

    pairs: Sequence[MinimalPair] = ()
    unread: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    own_answers: bool = False
    tasks: tuple[str, ...] = ()
    include_path: Path | None = None
    limit: int | None = None
    batch_tokens: int = 4096
    batch_size: int = 8
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields that two runs in one folder must share."""
        unread = {name: describe_text(ids) for name, ids in self.unread.items()}
        pairs = {"pairs": len(self.pairs), "pairs_sha256": digest(self.pairs)}
        tasks = {"tasks": list(self.tasks), "limit": self.limit, "seed": self.seed}
        return {**pairs, "unread": unread, "own_answers": self.own_answers, **tasks}


def run_forgetting(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    book: Tensor,
    methods: dict[str, ReadingSettings],
    out: Path,
    plan: Plan,
    *,
    common: dict[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Run the study, or continue it; return the figures, as in `forgetting.json`.

    Args: as for `perplexity.run_perplexity`, and
        book: LongTensor [T], the text that the memories read.
        methods: each method's settings, by its name in tables. Their window and stride are also those of the frozen
            measures and must be the same in all of them.
        out: the folder: memories in `forgetting/memories`, each state's measures in `forgetting/*.json`, and
            `forgetting.json`.
        plan: what is measured.

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
    shared = {**(common or {}), "book": describe_text(book), "window": first.window, "stride": first.stride}
    shared["plan"] = plan.to_json()
    # The base reads the book too: the memories' gain is measured against it.
    readers = {BASE: first.for_base()}
    readers |= {name: settings for name, settings in methods.items() if settings.method != "none"}
    folder = out / STUDY
    readings, states = {}, {}
    texts = {name: cut_text(ids, first.window, first.stride) for name, ids in plan.unread.items()}
    measure = partial(_measure, tokenizer=tokenizer, texts=texts, progress=progress)
    for name, settings in readers.items():
        path, label = folder / "memories" / f"{name}.json", f"{name} reads the book"
        taught = name != BASE
        options = {"tokenizer": tokenizer, "keep_memory": taught, "label": label, "progress": progress}
        readings[name] = reading_unit(base, book, settings, path, **options)
        memory = readings[name].memory if taught else None
        make = partial(_measure_state, base, memory, name, plan, measure)
        path = folder / (f"after-{name}.json" if taught else "before.json")
        states[name] = Unit(path, make, name, needs=readings[name])
    units = [*readings.values(), *states.values()]
    head = open_study(out, STUDY, shared, methods, overwrite, units)
    if plan.own_answers and not all(unit.path.exists() for unit in units):
        texts[OWN_ANSWERS] = write_own_answers(base.eval(), tokenizer)
    run_units(units, progress)
    teachings = {name: {"teaching": summarize_reading(unit.load())} for name, unit in readings.items()}
    found = {name: {**teachings[name], **state.load()} for name, state in states.items()}
    before = found.pop(BASE)
    after = {name: _describe_after(before, state) for name, state in found.items()}
    figures = {**head, "before": _describe_before(before), "after": after}
    write_json(out / f"{STUDY}.json", figures)
    return figures


def _measure_state(
    base: PreTrainedModel, memory: Path | None, name: str, plan: Plan, measure: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    """Measure the base, or a memory: after the book, and disabled."""
    if memory is None:
        return measure(base, nullcontext, plan, name)
    with memory_attached(base, memory) as model:
        after = measure(model, model.disable_adapter, plan, name)
        with model.disable_adapter():
            # The unread texts were scored with the memory disabled above: as the reference.
            disabled = measure(model, nullcontext, plan, f"{name}, disabled", texts={})
    return {"after": after, "disabled": disabled}


def _measure(
    model: nn.Module,
    reference: Callable[[], AbstractContextManager],
    plan: Plan,
    label: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    texts: dict[str, list[Piece]],
    progress: Progress,
) -> dict[str, Any]:
    found: dict[str, Any] = {"drift": {}, "pairs": [], "tasks": {}}
    for text, pieces in texts.items():
        advance = progress(f"{label}: {text}", sum(scored for _, scored in pieces))
        found["drift"][text] = measure_drift(model, reference, pieces, advance)
    if plan.pairs:
        advance = progress(f"{label}: minimal pairs", 2 * len(plan.pairs))
        found["pairs"] = score_pairs(model, tokenizer, plan.pairs, batch_tokens=plan.batch_tokens, on_batch=advance)
    if plan.tasks:
        advance = progress(f"{label}: {', '.join(plan.tasks)}", 1)
        options = {name: getattr(plan, name) for name in ("include_path", "limit", "batch_size", "seed")}
        found["tasks"] = evaluate_tasks(model, tokenizer, plan.tasks, **options)
        advance(1)
    return found


# ---------------------------------------------------------------------- figures


def _describe_before(before: dict[str, Any]) -> dict[str, Any]:
    return {
        "book_perplexity": before["teaching"]["perplexity"][0],
        "unread_perplexity": {name: value["perplexity"] for name, value in before["drift"].items()},
        "tasks": before["tasks"],
        **({"blimp": summarize_pairs(_load_scores(before))} if before["pairs"] else {}),
    }


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
        "unread_rise": {name: perplexity_rise(base[name], drift) for name, drift in drifts.items()},
        "disabled_perplexity": {name: drift["reference_perplexity"] for name, drift in drifts.items()},
        "kl_per_token": {
            # The chunks are resampled: the tokens of one chunk share their context.
            name: {**mean_interval(drift["chunk_kl_nats"]), "mean_over_tokens": drift["kl_per_token"]}
            for name, drift in drifts.items()
        },
        "tasks": after["tasks"],
        "disabled_tasks": disabled["tasks"],
        "disabled_is_before": all(same.values()),
        "disabled_is_before_in": same,
    }
    if before["pairs"]:
        first, later = _load_scores(before), _load_scores(after)
        drops = [float(one.right) - float(two.right) for one, two in zip(first, later, strict=True)]
        figures["blimp"] = summarize_pairs(later)
        figures["blimp_drop"] = mean_interval(drops)
        figures["blimp_disabled"] = summarize_pairs(_load_scores(disabled))["accuracy"]
    return figures


def _load_scores(state: dict[str, Any]) -> list[PairScore]:
    return [PairScore(*pair) for pair in state["pairs"]]


def _without_errors(tasks: dict[str, Any]) -> dict[str, Any]:
    """Leave out the tasks' standard errors, which may be drawn at random."""
    return {task: {key: value for key, value in row.items() if "stderr" not in key} for task, row in tasks.items()}


# ---------------------------------------------------------------------- unread texts


def cut_text(input_ids: Tensor, window: int, stride: int) -> list[Piece]:
    """Cut a text, LongTensor [T], T >= 2, into the pieces that `measure_drift` scores; see `chunks.cut`.

    Raises:
        ValueError: the text has fewer than two tokens.
    """
    if input_ids.dim() != 1 or len(input_ids) < 2:
        raise ValueError(f"input_ids must be of shape [T] with T >= 2, got {list(input_ids.shape)}: give more text")
    spans = cut(len(input_ids), window, stride)
    return [(input_ids[span.begin : span.stop], span.scored) for span in spans if span.scored]


@torch.inference_mode()
def measure_drift(
    model: nn.Module,
    reference: Callable[[], AbstractContextManager],
    pieces: Iterable[Piece],
    on_chunk: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Score pieces of text with frozen weights, one by one under the model and under its reference.

    Args:
        model: a causal language model in evaluation mode; not changed.
        reference: makes a context within which the model is the reference: `model.disable_adapter` for the base of a
            PEFT model, `contextlib.nullcontext` for the model itself.
        pieces: at least one: LongTensor [T] and how many of its last tokens are scored, fewer than T.
        on_chunk: called with the number of tokens that were scored.

    Returns:
        A record with `perplexity` and `reference_perplexity`; `kl_per_token`, the mean KL of the next-token
        distributions from the reference's to the model's; `reference_sha256` over the bytes of all the reference's
        logits, by which two references are equal to the last bit; the number of `tokens`, `nll_nats`,
        `reference_nll_nats` and `kl_nats` in all; and of each piece `chunk_tokens`, `chunk_nll_nats` under the model
        and `chunk_kl_nats`, the mean KL a token.
    """
    host = CausalLM(model)
    rows = []
    hashed = hashlib.sha256()
    for ids, scored in pieces:
        ids = ids.to(host.device)
        targets, read = ids[-scored:], ids[None, :-1]
        logits = host.logits(read, scored, use_cache=False)[0]  # [N, V]
        with reference():
            reference_logits = host.logits(read, scored, use_cache=False)[0]
        hashed.update(reference_logits.contiguous().view(torch.uint8).cpu().numpy())
        losses = token_losses(logits, targets), token_losses(reference_logits, targets)
        kls = divergences(logits, reference_logits)
        rows.append((scored, *(values.double().sum().item() for values in (*losses, kls))))
        if on_chunk is not None:
            on_chunk(scored)
    counts, ours, theirs, kls = map(list, zip(*rows, strict=True))
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


def perplexity_rise(before: dict[str, Any], after: dict[str, Any]) -> Interval:
    """Return the rise of a text's perplexity from one record of `measure_drift` to another, with its 95% interval.

    Raises:
        ValueError: the chunks differ.
    """
    chunks, others = before["chunk_tokens"], after["chunk_tokens"]
    if chunks != others:
        raise ValueError(
            f"before and after must be of the same chunks, got {len(chunks)} and {len(others)} of them, or other "
            "ones: measure both with the same window and stride"
        )
    return rise_interval(before["chunk_nll_nats"], after["chunk_nll_nats"], chunks)
