"""The forgetting protocol: what the memory of a whole book costs on unread texts.

The paper's section on general capabilities. Each measure is taken before, after, and with the
memory disabled, which must equal before to the last bit.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..memories.loading import memory_attached
from ..stages import ReadSettings, for_base
from ..stages.complete import training_settings
from ..tables import Sheet, format_figure, format_mean, to_number
from .drift import OWN_ANSWERS, Piece, cut_pieces, measure_drift, write_own_answers
from .intervals import mean_interval, rise_interval
from .runs import Run, describe_text, summarize_stage
from .units import Unit

__all__ = ["NAME", "ForgettingPlan", "run_forgetting", "tabulate"]

NAME = "forgetting"
BASE = "base"


@dataclass(frozen=True)
class ForgettingPlan:
    """The texts that are measured before and after, and that the memory does not read.

    Args:
        unread: LongTensor [T] by name.
        own_answers: whether the base's answers to everyday questions are measured as one more
            unread text (see `drift.write_own_answers`).
    """

    unread: dict[str, Tensor]
    own_answers: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fields that two runs in one folder must share."""
        unread = {name: describe_text(ids) for name, ids in self.unread.items()}
        return {"unread": unread, "own_answers": self.own_answers}


def run_forgetting(run: Run, book: Tensor, plan: ForgettingPlan) -> dict[str, Any]:
    """Measure the base, and each method's memory of a book.

    Args:
        run: its folder gets memories in `forgetting/memories`, each state's measures in
            `forgetting/*.json`, and the figures in `forgetting.json`. The methods' window and
            stride are also those of the frozen measures.
        book: LongTensor [T].
        plan: what is measured.

    Returns:
        The figures.

    Raises:
        ValueError: as for `perplexity.run_perplexity`, or the methods' windows differ.
    """
    methods = _list_readings(run)
    window, stride = _find_window(methods)
    folder = run.out / NAME
    # The base reads the book too: the memories' gain is measured against it.
    readers = {BASE: for_base(next(iter(methods.values())))}
    for name, settings in methods.items():
        if settings.method != "none":
            readers[name] = settings
    load_texts = cache(partial(_load_texts, run, plan, window, stride))
    readings = {}
    states = {}
    for name, settings in readers.items():
        is_base = name == BASE
        reading = run.learning(
            book,
            settings,
            folder / "memories" / f"{name}.json",
            f"{name} reads the book",
            keep_memory=not is_base,
        )
        memory = None if is_base else reading.memory
        path = folder / ("before.json" if is_base else f"after-{name}.json")
        make = partial(_measure_state, run, load_texts, name, memory)
        readings[name] = reading
        states[name] = Unit(path, make, needs=reading)
    shared = {
        "book": describe_text(book),
        "window": window,
        "stride": stride,
        "plan": plan.to_json(),
    }
    head = run.make(NAME, [*readings.values(), *states.values()], **shared)
    measured = {}
    for name in readers:
        teaching = summarize_stage(readings[name].load())
        measured[name] = {"teaching": teaching, **states[name].load()}
    before = measured.pop(BASE)
    figures = {
        **head,
        "before": _describe_before(before),
        "after": {name: _describe_after(before, state) for name, state in measured.items()},
    }
    run.save(NAME, figures)
    return figures


def _list_readings(run: Run) -> dict[str, ReadSettings]:
    """Return the methods' settings: the protocol reads the book."""
    methods: dict[str, ReadSettings] = {}
    for name, settings in run.methods.items():
        assert isinstance(settings, ReadSettings)
        methods[name] = settings
    return methods


def _find_window(methods: dict[str, ReadSettings]) -> tuple[int, int]:
    """Return the window and the stride that all methods share."""
    windows = set()
    for settings in methods.values():
        loop = training_settings(settings)
        windows.add((loop.window, loop.stride))
    if len(windows) != 1:
        raise ValueError(
            f"methods must share window and stride, got {sorted(windows)}: give them the same"
        )
    return windows.pop()


def _load_texts(run: Run, plan: ForgettingPlan, window: int, stride: int) -> dict[str, list[Piece]]:
    """Return the pieces of the unread texts; the base, without a memory, writes its own answers."""
    texts = {name: cut_pieces(ids, window, stride) for name, ids in plan.unread.items()}
    if plan.own_answers:
        texts[OWN_ANSWERS] = write_own_answers(run.base.eval(), run.tokenizer)
    return texts


def _measure_state(
    run: Run, load_texts: Callable[[], dict[str, list[Piece]]], name: str, memory: Path | None
) -> dict[str, Any]:
    """Return the drift of the base, or of a memory from itself disabled, on each text."""
    texts = load_texts()
    drifts = {}
    attached: AbstractContextManager[nn.Module] = nullcontext(run.base)
    if memory is not None:
        attached = memory_attached(run.base, memory)
    with attached as model:
        for text, pieces in texts.items():
            tokens = sum(scored for _, scored in pieces)
            advance = run.progress(f"{name}: {text}", tokens)
            drifts[text] = measure_drift(model, pieces, advance)
    return {"drift": drifts}


def _describe_before(before: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the base."""
    return {
        "book_perplexity": before["teaching"]["perplexity"][0],
        "unread_perplexity": {name: drift["perplexity"] for name, drift in before["drift"].items()},
    }


def _describe_after(before: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a memory beside those of the base."""
    unread = {}
    disabled = {}
    rises = {}
    kls = {}
    same = {}
    for name, drift in state["drift"].items():
        base = before["drift"][name]
        unread[name] = drift["perplexity"]
        disabled[name] = drift["reference_perplexity"]
        rises[name] = rise_interval(
            base["chunk_nll_nats"], drift["chunk_nll_nats"], drift["chunk_tokens"]
        )
        # The chunks are resampled: the tokens of one chunk share their context.
        kls[name] = {
            **mean_interval(drift["chunk_kl_nats"]),
            "mean_over_tokens": drift["kl_per_token"],
        }
        # Logits that are equal to the last bit make the perplexity equal and the KL zero.
        same[name] = drift["reference_sha256"] == base["reference_sha256"]
    teaching = state["teaching"]
    return {
        "parameters": teaching["parameters"],
        "book_perplexity": teaching["perplexity"],
        "book_gain": before["teaching"]["perplexity"][0] - teaching["perplexity"][0],
        "unread_perplexity": unread,
        "unread_rise": rises,
        "disabled_perplexity": disabled,
        "kl_per_token": kls,
        "disabled_is_before": all(same.values()),
        "disabled_is_before_in": same,
    }


def tabulate(figures: dict[str, Any]) -> list[Sheet]:
    """Return the tables: each measure before and after, and whether the memory can be disabled."""
    before = figures["before"]
    unread = list(before["unread_perplexity"])
    headers = ["", "parameters", "book ppl"]
    headers += [f"ppl of {name}" for name in unread]
    headers += [f"KL on {name}" for name in unread]
    perplexities = [before["book_perplexity"], *before["unread_perplexity"].values()]
    rows = [["before", "0", *map(format_figure, perplexities), *("0" for _ in unread)]]
    disabled = []
    for name, after in figures["after"].items():
        rows.append([name, *_describe_row(after)])
        unequal = [text for text, same in after["disabled_is_before_in"].items() if not same]
        verdict = "equal to before, to the last bit"
        if unequal:
            verdict = f"differs in {', '.join(unequal)}"
        disabled.append([name, verdict])
    return [
        Sheet("After a whole book, measured on other texts", headers, rows),
        Sheet("With the memory disabled", ["memory", "measures"], disabled),
    ]


def _describe_row(after: dict[str, Any]) -> list[str]:
    """Return the cells of a memory's row."""
    row = [f"{after['parameters']:,}", format_figure(after["book_perplexity"][0])]
    for text, rise in after["unread_rise"].items():
        sign = "+" if to_number(rise["mean"]) > 0 else ""
        perplexity = format_figure(after["unread_perplexity"][text])
        row.append(f"{perplexity} ({sign}{format_mean(rise, 2)})")
    row += [format_mean(kl, 4) for kl in after["kl_per_token"].values()]
    return row
