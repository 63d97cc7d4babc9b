"""The forgetting protocol: what the memory of a whole book costs on grammar and on unread texts.

The paper's section on general capabilities. Each measure is taken before, after, and with the memory disabled, which
must equal before to the last bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..files import write_json
from ..memories.loading import memory_attached
from ..tables import Sheet, format_figure, format_mean, format_percent
from ..units import Unit, run_units
from .blimp import MinimalPair, PairScore, score_pairs, summarize_pairs
from .drift import OWN_ANSWERS, Piece, cut_text, measure_drift, write_own_answers
from .intervals import mean_interval, rise_interval
from .runs import Run, describe_text, digest, summarize_reading

__all__ = ["NAME", "ForgettingPlan", "run_forgetting", "tabulate"]

NAME = "forgetting"
BASE = "base"


@dataclass(frozen=True)
class ForgettingPlan:
    """What is measured before and after: pairs, and texts that the memory does not read.

    `unread` has a LongTensor [T] by name. With `own_answers` the base's answers to everyday questions are measured as
    one more unread text (see `drift.write_own_answers`). `batch_tokens` is for the pairs.
    """

    pairs: Sequence[MinimalPair] = ()
    unread: dict[str, Tensor] = field(default_factory=dict)
    own_answers: bool = False
    batch_tokens: int = 4096

    def to_json(self) -> dict[str, Any]:
        """Return the fields that two runs in one folder must share."""
        unread = {name: describe_text(ids) for name, ids in self.unread.items()}
        pairs = {"pairs": len(self.pairs), "pairs_sha256": digest(self.pairs)}
        return {**pairs, "unread": unread, "own_answers": self.own_answers}


def run_forgetting(run: Run, book: Tensor, plan: ForgettingPlan) -> dict[str, Any]:
    """Measure the base, and each method's memory of a book, LongTensor [T].

    The run's folder gets memories in `forgetting/memories`, each state's measures in `forgetting/*.json`, and
    `forgetting.json`. The methods' window and stride are also those of the frozen measures.

    Returns, raises: as for `perplexity.run_perplexity`; and a `ValueError` where the methods' windows differ.
    """
    windows = {(settings.training.window, settings.training.stride) for settings in run.methods.values()}
    if len(windows) != 1:
        raise ValueError(f"methods must share window and stride, got {sorted(windows)}: give them the same")
    (window, stride), folder = windows.pop(), run.out / NAME
    # The base reads the book too: the memories' gain is measured against it.
    readers = {BASE: next(iter(run.methods.values())).for_base()}
    readers |= {name: settings for name, settings in run.methods.items() if settings.method.name != "none"}
    texts = {name: cut_text(ids, window, stride) for name, ids in plan.unread.items()}
    readings, states = {}, {}
    for name, settings in readers.items():
        taught, path = name != BASE, folder / "memories" / f"{name}.json"
        readings[name] = run.reading(book, settings, path, f"{name} reads the book", keep_memory=taught)
        make = partial(_measure_state, run, plan, texts, name, readings[name].memory if taught else None)
        states[name] = Unit(folder / (f"after-{name}.json" if taught else "before.json"), make, readings[name])
    units = [*readings.values(), *states.values()]
    shared = {"book": describe_text(book), "window": window, "stride": stride, "plan": plan.to_json()}
    head = run.open(NAME, units, **shared)
    if plan.own_answers and not all(unit.path.exists() for unit in units):
        texts[OWN_ANSWERS] = write_own_answers(run.base.eval(), run.tokenizer)
    run_units(units, run.progress)
    found = {name: {"teaching": summarize_reading(readings[name].load()), **states[name].load()} for name in readers}
    before = found.pop(BASE)
    after = {name: _describe_after(before, state) for name, state in found.items()}
    figures = {**head, "before": _describe_before(before), "after": after}
    write_json(run.out / f"{NAME}.json", figures)
    return figures


def _measure_state(
    run: Run, plan: ForgettingPlan, texts: dict[str, list[Piece]], name: str, memory: Path | None
) -> dict[str, Any]:
    """Measure the base, or a memory: after the book, and disabled."""
    if memory is None:
        return _measure(run, plan, run.base, texts, name)
    with memory_attached(run.base, memory) as model:
        after = _measure(run, plan, model, texts, name)
        with model.disable_adapter():
            # The unread texts were scored with the memory disabled above: as the reference.
            disabled = _measure(run, plan, model, {}, f"{name}, disabled")
    return {"after": after, "disabled": disabled}


def _measure(
    run: Run, plan: ForgettingPlan, model: nn.Module, texts: dict[str, list[Piece]], label: str
) -> dict[str, Any]:
    found: dict[str, Any] = {"drift": {}, "pairs": []}
    for text, pieces in texts.items():
        advance = run.progress(f"{label}: {text}", sum(scored for _, scored in pieces))
        found["drift"][text] = measure_drift(model, pieces, advance)
    if plan.pairs:
        advance, batch = run.progress(f"{label}: minimal pairs", 2 * len(plan.pairs)), plan.batch_tokens
        found["pairs"] = score_pairs(model, run.tokenizer, plan.pairs, batch_tokens=batch, on_batch=advance)
    return found


def _describe_before(before: dict[str, Any]) -> dict[str, Any]:
    unread = {name: drift["perplexity"] for name, drift in before["drift"].items()}
    found = {"book_perplexity": before["teaching"]["perplexity"][0], "unread_perplexity": unread}
    blimp = {"blimp": summarize_pairs(_load_scores(before))} if before["pairs"] else {}
    return {**found, **blimp}


def _describe_after(before: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    after, disabled = state["after"], state["disabled"]
    base, drifts = before["drift"], after["drift"]
    same = {
        # Logits that are equal to the last bit make the perplexity equal and the KL zero.
        "unread": all(drifts[name]["reference_sha256"] == base[name]["reference_sha256"] for name in base),
        "blimp": disabled["pairs"] == before["pairs"],
    }
    rises, kls = {}, {}
    for name, drift in drifts.items():
        rises[name] = rise_interval(base[name]["chunk_nll_nats"], drift["chunk_nll_nats"], drift["chunk_tokens"])
        # The chunks are resampled: the tokens of one chunk share their context.
        kls[name] = {**mean_interval(drift["chunk_kl_nats"]), "mean_over_tokens": drift["kl_per_token"]}
    first, later, off = map(_load_scores, (before, after, disabled))
    drops = [float(one.right) - float(two.right) for one, two in zip(first, later, strict=True)]
    blimp = {"blimp": summarize_pairs(later), "blimp_drop": mean_interval(drops)}
    return {
        "parameters": state["teaching"]["parameters"],
        "book_perplexity": state["teaching"]["perplexity"],
        "book_gain": before["teaching"]["perplexity"][0] - state["teaching"]["perplexity"][0],
        "unread_perplexity": {name: drift["perplexity"] for name, drift in drifts.items()},
        "unread_rise": rises,
        "disabled_perplexity": {name: drift["reference_perplexity"] for name, drift in drifts.items()},
        "kl_per_token": kls,
        "disabled_is_before": all(same.values()),
        "disabled_is_before_in": same,
        **(blimp | {"blimp_disabled": summarize_pairs(off)["accuracy"]} if before["pairs"] else {}),
    }


def _load_scores(state: dict[str, Any]) -> list[PairScore]:
    return [PairScore(*pair) for pair in state["pairs"]]


def tabulate(figures: dict[str, Any]) -> list[Sheet]:
    """Return the tables: each measure before and after, and whether the memory can be disabled."""
    before, after = figures["before"], figures["after"]
    unread, blimp = list(before["unread_perplexity"]), "blimp" in before
    headers = ["", "parameters", "book ppl", *(f"ppl of {name}" for name in unread), *(f"KL on {n}" for n in unread)]
    headers += ["BLiMP, %", "drop"] if blimp else []
    texts = [before["book_perplexity"], *before["unread_perplexity"].values()]
    rows = [["before", "0", *map(format_figure, texts), *("0" for _ in unread)]]
    rows[0] += [format_percent(before["blimp"]["accuracy"]), ""] if blimp else []
    disabled = []
    for name, found in after.items():
        row = [name, f"{found['parameters']:,}", format_figure(found["book_perplexity"][0])]
        for text, rise in found["unread_rise"].items():
            sign = "+" if rise["mean"] > 0 else ""
            row.append(f"{format_figure(found['unread_perplexity'][text])} ({sign}{format_mean(rise, 2)})")
        row += [format_mean(kl, 4) for kl in found["kl_per_token"].values()]
        row += [format_percent(found["blimp"]["accuracy"]), format_percent(found["blimp_drop"], 2)] if blimp else []
        rows.append(row)
        unequal = [measure for measure, same in found["disabled_is_before_in"].items() if not same]
        disabled.append([name, f"differs in {', '.join(unequal)}" if unequal else "equal to before, to the last bit"])
    return [
        Sheet("After a whole book, measured on other texts", headers, rows),
        Sheet("With the memory disabled", ["memory", "measures"], disabled),
    ]
