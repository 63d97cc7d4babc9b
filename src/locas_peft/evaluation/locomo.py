"""The LoCoMo protocol: a method's memory of a conversation answers questions about it and about another conversation.

The paper's section on long-context dialogue, with the wrong-memory control that it lacks: a memory that helps no more
than another conversation's memory has learned style, not facts. Conversation i is also asked with the memory of
conversation i - 1 (the first one with that of the last).

A question passes through `load_locomo`, `make_prompts`, `asking.answer`, `_answer_questions` (a record with its F1)
and `f1_by_category` (a mean).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from ..asking import answer, encode_answer, recite_for
from ..checks import check_choice
from ..files import load_json, write_json
from ..memories.loading import memory_attached
from ..plots import GREY, label_axes
from ..tables import Sheet, format_figure, format_mean, format_percent, to_number
from ..text import tokenize
from ..tuner.modes import adapters_disabled
from ..units import Unit, run_units
from .cloze import find_spans, firsts, gains, score_spans
from .conversations import Conversation, dialogue
from .f1 import ADVERSARIAL, CATEGORIES, abstains, answer_f1, load_stemmer
from .intervals import Interval, mean_interval
from .prompts import ANSWERED, FROM_RECITED, PROMPTS, make_prompts
from .runs import Run, digest, summarize_reading
from .scoring import score_targets

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["NAME", "SETTINGS", "TITLE", "LocomoPlan", "draw", "f1_by_category", "run_locomo", "tabulate"]

NAME, TITLE = "locomo", "LoCoMo"
BASE = "none"
CLOZE = "cloze"
SETTINGS = (*ANSWERED, CLOZE)


@dataclass(frozen=True)
class LocomoPlan:
    """What is asked, and how; a setting that is not in `SETTINGS` is a `ValueError`.

    `batch_size` counts answers; `batch_tokens` and `seed` are for the cloze. With `wrong_memory` each conversation is
    also asked with another one's memory.
    """

    settings: tuple[str, ...] = SETTINGS
    prompts: dict[str, str] = field(default_factory=lambda: dict(PROMPTS))
    max_new_tokens: int = 32
    batch_size: int = 16
    batch_tokens: int = 4096
    seed: int = 0
    wrong_memory: bool = True

    def __post_init__(self) -> None:
        for name in self.settings:
            check_choice("setting", name, SETTINGS)


class _Row(NamedTuple):
    """One conversation, asked in one setting with one memory; `path` is the file of its records.

    `group` is "none" for the base, "right" for the conversation's own memory, "wrong" for another one's. `reading`
    makes the memory; None for the base.
    """

    method: str
    setting: str
    group: str
    conversation: Conversation
    reading: Unit | None
    path: Path

    @property
    def memory(self) -> str | None:
        """The conversation that the memory is of."""
        return None if self.reading is None else self.reading.path.stem


def run_locomo(run: Run, conversations: Sequence[Conversation], plan: LocomoPlan) -> dict[str, Any]:
    """Ask about each conversation: the base, and each method with its memories.

    Args:
        run: its folder gets answers in `locomo/predictions`, scored spans in `locomo/cloze`, memories in
            `locomo/memories`, and `locomo.json`.
        conversations: at least one; a single one has no wrong memory.
        plan: what is asked.

    Returns, raises: as for `perplexity.run_perplexity`; and a `ValueError` where the model has too few positions for
    the questions.
    """
    if set(plan.settings) - {CLOZE}:
        load_stemmer()  # a missing package is reported before the work begins
    folder = run.out / NAME
    texts = {one.sample_id: tokenize(run.tokenizer, dialogue(one)) for one in conversations}
    readings = {
        method: {
            name: run.reading(ids, settings, folder / "memories" / method / f"{name}.json", f"{method} reads {name}")
            for name, ids in texts.items()
        }
        for method, settings in run.methods.items()
        if settings.method.name != "none"
    }
    rows = _list_rows(folder, conversations, readings, plan)
    units = [unit for row in readings.values() for unit in row.values()]
    for row in rows:
        label = f"{row.method}, memory of {row.memory}" if row.memory else "base"
        label += f": {row.conversation.sample_id}, {row.setting}"
        units.append(Unit(row.path, partial(_ask, run, plan, row, label), row.reading))
    head = run.open(
        NAME,
        units,
        conversations={one.sample_id: digest(asdict(one)) for one in conversations},
        plan={name: value for name, value in asdict(plan).items() if name != "settings"},
    )
    run_units(units, run.progress)
    figures = {
        **head,
        "conversations": list(texts),
        "teachings": {
            method: {name: summarize_reading(unit.load()) for name, unit in row.items()}
            for method, row in readings.items()
        },
        "answers": _summarize_answers([row for row in rows if row.setting != CLOZE]),
        "cloze": _summarize_cloze([row for row in rows if row.setting == CLOZE]) if CLOZE in plan.settings else {},
    }
    write_json(run.out / f"{NAME}.json", figures)
    return figures


def _list_rows(
    folder: Path, conversations: Sequence[Conversation], readings: dict[str, dict[str, Unit]], plan: LocomoPlan
) -> list[_Row]:
    """List what is asked; the rows of one setting, method and group follow each other."""
    groups = {"right": conversations}
    if plan.wrong_memory and len(conversations) > 1:
        groups["wrong"] = [conversations[-1], *conversations[:-1]]
    asked = [(BASE, "none", conversation, None) for conversation in conversations]
    asked += [
        (method, group, conversation, row[owner.sample_id])
        for method, row in readings.items()
        for group, owners in groups.items()
        for conversation, owner in zip(conversations, owners, strict=True)
    ]
    rows = []
    for setting in plan.settings:
        kind, middle = ("cloze", "") if setting == CLOZE else ("predictions", f".{setting}")
        for method, group, conversation, reading in asked:
            memory = "none" if reading is None else reading.path.stem
            path = folder / kind / method / f"{conversation.sample_id}{middle}.memory-{memory}.json"
            if reading is not None or setting != FROM_RECITED:
                rows.append(_Row(method, setting, group, conversation, reading, path))
    return rows


def _ask(run: Run, plan: LocomoPlan, row: _Row, label: str) -> list[dict[str, Any]]:
    with nullcontext(run.base) if row.reading is None else memory_attached(run.base, row.reading.memory) as model:
        if row.setting == CLOZE:
            spans = find_spans(row.conversation, plan.seed)
            advance = run.progress(label, sum(1 + len(span.others) for span in spans))
            return score_spans(model, run.tokenizer, spans, batch_tokens=plan.batch_tokens, on_batch=advance)
        advance = run.progress(label, len(row.conversation.questions))
        return _answer_questions(model, run.tokenizer, row, plan, advance)


def _answer_questions(
    model: nn.Module, tokenizer, row: _Row, plan: LocomoPlan, advance: Callable[..., None]
) -> list[dict[str, Any]]:
    """Answer a conversation's questions; what is recited and each batch are kept in a file, not to be asked again."""
    questions, unfinished = row.conversation.questions, Unit(row.path, list).unfinished
    records = {record["index"]: record for record in (load_json(unfinished) if unfinished.exists() else [])}
    if row.setting == FROM_RECITED:
        left = [each for each in questions if each.index not in records]
        passages = recite_for(model, tokenizer, [each.question for each in left])
        for each, found in zip(left, passages, strict=True):
            records[each.index] = {"index": each.index, "recited": found}
        write_json(unfinished, [records[index] for index in sorted(records)])
    recited = {index: record.get("recited") for index, record in records.items()}
    wording = {"prompts": plan.prompts, "max_new_tokens": plan.max_new_tokens, "recited": recited}
    prompts, dropped = make_prompts(model, tokenizer, row.conversation, row.setting, **wording)
    known = {number for number, each in enumerate(questions) if "prediction" in records.get(each.index, ())}
    advance(len(known))
    options = {"max_new_tokens": plan.max_new_tokens, "batch_size": plan.batch_size, "known": known}
    # The base answers from what its memory has recited.
    with adapters_disabled(model) if row.setting == FROM_RECITED else nullcontext():
        for batch, texts in answer(model, tokenizer, prompts, **options):
            golds = [(prompts[number], encode_answer(tokenizer, questions[number].answer)) for number in batch]
            scores = score_targets(model, golds, batch_tokens=plan.batch_tokens)
            for number, text, score in zip(batch, texts, scores, strict=True):
                question = questions[number]
                records[question.index] = {
                    "sample_id": row.conversation.sample_id,
                    "index": question.index,
                    "question": question.question,
                    "category": question.category,
                    "answer": question.answer,
                    "prediction": text,
                    "recited": recited.get(question.index),
                    "f1": answer_f1(text, question.answer, question.category),
                    "abstains": abstains(text),
                    "gold_nats": score.per_token,
                    "memory": row.memory,
                    "setting": row.setting,
                    "dropped_lines": dropped,
                }
            write_json(unfinished, [records[index] for index in sorted(records)])
            advance(len(batch))
    return [records[index] for index in sorted(records)]


# ---------------------------------------------------------------------- summary


def _summarize_answers(rows: Sequence[_Row]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for (method, setting, group), part in groupby(rows, key=lambda row: row[:3]):
        records = [record for row in part for record in load_json(row.path)]
        if records:
            figures.setdefault(method, {}).setdefault(setting, {})[group] = {
                **f1_by_category(records),
                "gold_nats": mean_interval([one["gold_nats"] for one in records if one["category"] != ADVERSARIAL]),
                "dropped_lines": {record["sample_id"]: record["dropped_lines"] for record in records},
            }
    return figures


def f1_by_category(records: Sequence[dict[str, Any]]) -> dict[str, Interval]:
    """Return the mean F1 of each category that has questions, by its name ("multi-hop", ...), with intervals.

    "adversarial" is the negative F1 with the trap, "answerable" the mean over categories 1 to 4, "abstention" the
    share of category 5 that was declined. The records have `category`, `f1` and `abstains`.
    """
    values = {
        name: [record["f1"] for record in records if record["category"] == category]
        for category, name in CATEGORIES.items()
    }
    values["answerable"] = [record["f1"] for record in records if record["category"] != ADVERSARIAL]
    values["abstention"] = [float(record["abstains"]) for record in records if record["category"] == ADVERSARIAL]
    return {name: mean_interval(numbers) for name, numbers in values.items() if numbers}


def _summarize_cloze(rows: Sequence[_Row]) -> dict[str, Any]:
    spans: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        spans.setdefault(row.method, {}).setdefault(row.group, []).extend(load_json(row.path))
    base = spans.pop(BASE)["none"]
    methods: dict[str, dict[str, Any]] = {}
    contrasts: dict[str, list[float]] = {}  # each method's gains of the right memory over the wrong one
    for method, groups in spans.items():
        right, wrong = groups["right"], groups.get("wrong", [])
        methods[method] = {
            "gain_right": mean_interval(gains(right, base)),
            "first_right": mean_interval(firsts(right)),
        }
        if len(wrong) == len(right):
            contrast = contrasts[method] = gains(right, wrong)
            by_category = {
                name: [gain for record, gain in zip(right, contrast, strict=True) if record["category"] == number]
                for number, name in CATEGORIES.items()
            }
            methods[method] |= {
                "gain_wrong": mean_interval(gains(wrong, base)),
                "first_wrong": mean_interval(firsts(wrong)),
                "right_minus_wrong": mean_interval(contrast),
                "by_category": {name: mean_interval(values) for name, values in by_category.items() if values},
            }
    differences = [
        {
            "method": one,
            "against": other,
            "right_minus_wrong": mean_interval([a - b for a, b in zip(contrasts[one], contrasts[other], strict=True)]),
        }
        for number, one in enumerate(contrasts)
        for other in list(contrasts)[:number]
    ]
    first = {"first": mean_interval(firsts(base))}
    return {"spans": len(base), "base": first, "methods": methods, "differences": differences}


# ---------------------------------------------------------------------- tables and plot


def tabulate(figures: dict[str, Any]) -> list[Sheet]:
    """Return the tables: answers, the nats of gold answers, lines of dialogues left out, the cloze and differences."""
    groups = {
        f"{method}, {setting}" + ("" if memory == "none" else f", {memory} memory"): found
        for method, settings in figures["answers"].items()
        for setting, memories in settings.items()
        for memory, found in memories.items()
    }
    names = [*CATEGORIES.values(), "answerable", "abstention"]
    f1 = [[title, *(format_percent(found.get(name)) for name in names)] for title, found in groups.items()]
    gold = [[title, format_mean(found["gold_nats"]), _gap_closed(figures, found)] for title, found in groups.items()]
    dropped = {
        f"{sample_id}, {setting}": str(lines)
        for settings in figures["answers"].values()
        for setting, memories in settings.items()
        for found in memories.values()
        for sample_id, lines in found["dropped_lines"].items()
        if lines
    }
    nats = (
        "LoCoMo, categories 1 to 4: nats a token of the gold answer, and the share of the gap to the evidence closed"
    )
    lines = "Dialogues longer than the model's positions: oldest lines left out"
    sheets = [
        Sheet("LoCoMo answers: F1 in %, adversarial: negative F1 with the trap", ["", *names], f1),
        Sheet(nats, ["", "nats", "gap closed"], gold),
        Sheet(lines, ["", "lines"], sorted(dropped.items())),
    ]
    if cloze := figures.get("cloze"):
        gains, shares = ("gain_right", "gain_wrong", "right_minus_wrong"), ("first_right", "first_wrong")
        rows = [["base", "", "", "", format_percent(cloze["base"]["first"]), ""]]
        for method, found in cloze["methods"].items():
            means = [format_mean(found.get(key)) for key in gains] + [format_percent(found.get(key)) for key in shares]
            rows.append([method, *means])
        headers = ["memory", "gain", "of a wrong one", "right - wrong", "first, %", "with a wrong one, %"]
        sheets.append(Sheet(f"LoCoMo cloze: nats a token, {cloze['spans']} spans", headers, rows))
        rows = [[f"{d['method']} - {d['against']}", format_mean(d["right_minus_wrong"])] for d in cloze["differences"]]
        sheets.append(Sheet("Difference of right - wrong, nats a token", ["methods", "mean"], rows))
    return sheets


def _gap_closed(figures: dict[str, Any], found: dict[str, Any]) -> str:
    """Return which share of the base's way from no context to the evidence in context a setting covers."""
    base = figures["answers"].get(BASE, {})
    if not {"no-context", "evidence"} <= base.keys():
        return "-"
    groups = base["no-context"]["none"], base["evidence"]["none"], found
    alone, evidence, own = (to_number(group["gold_nats"]["mean"]) for group in groups)
    return format_figure((alone - own) / (alone - evidence)) if alone != evidence else "-"


def draw(figures: dict[str, Any], axes: Axes) -> bool:
    """Draw the gains of the cloze, with each conversation's own memory and with another one's."""
    methods = {n: f for n, f in figures["cloze"].get("methods", {}).items() if "right_minus_wrong" in f}
    if not methods or not figures["cloze"]["spans"]:
        return False
    bars = ((-0.2, "gain_right", "C0", "its own memory"), (0.2, "gain_wrong", GREY, "another one's"))
    for offset, key, colour, label in bars:
        means = [found[key] for found in methods.values()]
        errors = [[m["mean"] - to_number(m["low"]) for m in means], [to_number(m["high"]) - m["mean"] for m in means]]
        positions = [number + offset for number in range(len(means))]
        axes.bar(positions, [m["mean"] for m in means], 0.38, yerr=errors, color=colour, capsize=4, label=label)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(methods)), list(methods))
    label_axes(axes, "", "nats a token gained on spans", "LoCoMo cloze")
    axes.legend()
    return True
