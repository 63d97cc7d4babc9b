"""The forgetting protocol: what the memory of a whole book costs on unread texts.

The paper's section on general capabilities. Each measure is taken before, after, and with the memory disabled, which
must equal before to the last bit.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ..files import write_json
from ..memories.loading import memory_attached
from ..tables import Sheet, format_figure, format_mean
from ..units import Unit, run_units
from .drift import OWN_ANSWERS, Piece, cut_text, measure_drift, write_own_answers
from .intervals import mean_interval, rise_interval
from .runs import Run, describe_text, summarize_reading

__all__ = ["NAME", "ForgettingPlan", "run_forgetting", "tabulate"]

NAME = "forgetting"
BASE = "base"


@dataclass(frozen=True)
class ForgettingPlan:
    """The texts that are measured before and after, and that the memory does not read.

    `unread` has a LongTensor [T] by name. With `own_answers` the base's answers to everyday questions are measured as
    one more unread text (see `drift.write_own_answers`).
    """

    unread: dict[str, Tensor]
    own_answers: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fields that two runs in one folder must share."""
        unread = {name: describe_text(ids) for name, ids in self.unread.items()}
        return {"unread": unread, "own_answers": self.own_answers}


def run_forgetting(run: Run, book: Tensor, plan: ForgettingPlan) -> dict[str, Any]:
    """Measure the base, and each method's memory of a book, LongTensor [T].

    The run's folder gets memories in `forgetting/memories`, each state's measures in `forgetting/*.json`, and
    `forgetting.json`. The methods' window and stride are also those of the frozen measures.

    Returns, raises: as for `perplexity.run_perplexity`; and a `ValueError` where the methods' windows differ.
    """
    windows = {
        (settings.training.window, settings.training.stride) for settings in run.methods.values()
    }
    if len(windows) != 1:
        raise ValueError(
            f"methods must share window and stride, got {sorted(windows)}: give them the same"
        )
    (window, stride), folder = windows.pop(), run.out / NAME
    # The base reads the book too: the memories' gain is measured against it.
    readers = {BASE: next(iter(run.methods.values())).for_base()}
    readers |= {
        name: settings for name, settings in run.methods.items() if settings.method.name != "none"
    }
    texts = {name: cut_text(ids, window, stride) for name, ids in plan.unread.items()}
    readings, states = {}, {}
    for name, settings in readers.items():
        taught, path = name != BASE, folder / "memories" / f"{name}.json"
        readings[name] = run.reading(
            book, settings, path, f"{name} reads the book", keep_memory=taught
        )
        make = partial(_measure_state, run, texts, name, readings[name].memory if taught else None)
        states[name] = Unit(
            folder / (f"after-{name}.json" if taught else "before.json"), make, readings[name]
        )
    units = [*readings.values(), *states.values()]
    shared = {
        "book": describe_text(book),
        "window": window,
        "stride": stride,
        "plan": plan.to_json(),
    }
    head = run.open(NAME, units, **shared)
    if plan.own_answers and not all(unit.path.exists() for unit in units):
        texts[OWN_ANSWERS] = write_own_answers(run.base.eval(), run.tokenizer)
    run_units(units, run.progress)
    found = {
        name: {"teaching": summarize_reading(readings[name].load()), **states[name].load()}
        for name in readers
    }
    before = found.pop(BASE)
    after = {name: _describe_after(before, state) for name, state in found.items()}
    unread = {name: drift["perplexity"] for name, drift in before["drift"].items()}
    first = {"book_perplexity": before["teaching"]["perplexity"][0], "unread_perplexity": unread}
    figures = {**head, "before": first, "after": after}
    write_json(run.out / f"{NAME}.json", figures)
    return figures


def _measure_state(
    run: Run, texts: dict[str, list[Piece]], name: str, memory: Path | None
) -> dict[str, Any]:
    """Return the drift on each text: the base's own, or that of a memory, whose reference has the memory disabled."""
    with memory_attached(run.base, memory) if memory else nullcontext(run.base) as model:
        found = {}
        for text, pieces in texts.items():
            advance = run.progress(f"{name}: {text}", sum(scored for _, scored in pieces))
            found[text] = measure_drift(model, pieces, advance)
    return {"drift": found}


def _describe_after(before: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    base, drifts = before["drift"], state["drift"]
    # Logits that are equal to the last bit make the perplexity equal and the KL zero.
    same = {
        name: drift["reference_sha256"] == base[name]["reference_sha256"]
        for name, drift in drifts.items()
    }
    rises, kls = {}, {}
    for name, drift in drifts.items():
        rises[name] = rise_interval(
            base[name]["chunk_nll_nats"], drift["chunk_nll_nats"], drift["chunk_tokens"]
        )
        # The chunks are resampled: the tokens of one chunk share their context.
        kls[name] = {
            **mean_interval(drift["chunk_kl_nats"]),
            "mean_over_tokens": drift["kl_per_token"],
        }
    return {
        "parameters": state["teaching"]["parameters"],
        "book_perplexity": state["teaching"]["perplexity"],
        "book_gain": before["teaching"]["perplexity"][0] - state["teaching"]["perplexity"][0],
        "unread_perplexity": {name: drift["perplexity"] for name, drift in drifts.items()},
        "unread_rise": rises,
        "disabled_perplexity": {
            name: drift["reference_perplexity"] for name, drift in drifts.items()
        },
        "kl_per_token": kls,
        "disabled_is_before": all(same.values()),
        "disabled_is_before_in": same,
    }


def tabulate(figures: dict[str, Any]) -> list[Sheet]:
    """Return the tables: each measure before and after, and whether the memory can be disabled."""
    before, after = figures["before"], figures["after"]
    unread = list(before["unread_perplexity"])
    headers = [
        "",
        "parameters",
        "book ppl",
        *(f"ppl of {name}" for name in unread),
        *(f"KL on {n}" for n in unread),
    ]
    texts = [before["book_perplexity"], *before["unread_perplexity"].values()]
    rows = [["before", "0", *map(format_figure, texts), *("0" for _ in unread)]]
    disabled = []
    for name, found in after.items():
        row = [name, f"{found['parameters']:,}", format_figure(found["book_perplexity"][0])]
        for text, rise in found["unread_rise"].items():
            sign = "+" if rise["mean"] > 0 else ""
            row.append(
                f"{format_figure(found['unread_perplexity'][text])} ({sign}{format_mean(rise, 2)})"
            )
        row += [format_mean(kl, 4) for kl in found["kl_per_token"].values()]
        rows.append(row)
        unequal = [measure for measure, same in found["disabled_is_before_in"].items() if not same]
        disabled.append(
            [
                name,
                f"differs in {', '.join(unequal)}"
                if unequal
                else "equal to before, to the last bit",
            ]
        )
    return [
        Sheet("After a whole book, measured on other texts", headers, rows),
        Sheet("With the memory disabled", ["memory", "measures"], disabled),
    ]
