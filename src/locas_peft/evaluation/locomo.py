"""The LoCoMo protocol: a method's memory of a conversation answers questions about it.

The paper's section on long-context dialogue, with the wrong-memory control that it lacks: conversation i is also asked
with the memory of conversation i - 1. A memory that helps no more than that has learned style, not facts.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ..asking import answer_in_batches, encode_answer
from ..asking.scoring import score_targets
from ..checks import check_choice
from ..files import load_json, write_json
from ..memories.loading import memory_attached
from ..tables import Sheet, format_figure, format_mean, format_percent, to_number
from ..text import digest_json, tokenize
from ..units import Unit, run_units
from .conversations import Conversation, dialogue_lines
from .f1 import ADVERSARIAL, CATEGORIES, abstains, answer_f1, load_stemmer
from .intervals import Interval, mean_interval
from .prompts import ANSWERED, PROMPTS, make_prompts
from .runs import Run, summarize_reading

__all__ = ["NAME", "LocomoPlan", "f1_by_category", "run_locomo", "tabulate"]

NAME = "locomo"
BASE = "none"


@dataclass(frozen=True)
class LocomoPlan:
    """What is asked, and how: `wrong_memory` asks another one too. A setting not in `ANSWERED` is a `ValueError`."""

    settings: tuple[str, ...] = ANSWERED
    max_new_tokens: int = 32
    wrong_memory: bool = True

    def __post_init__(self) -> None:
        for name in self.settings:
            check_choice("setting", name, ANSWERED)


def run_locomo(run: Run, conversations: Sequence[Conversation], plan: LocomoPlan) -> dict[str, Any]:
    """Ask about each conversation: the base, and each method with its memories.

    The run's folder gets `locomo/predictions`, `locomo/memories`, `locomo.json`. One conversation has no wrong memory.

    Returns, raises: as for `perplexity.run_perplexity`; too few positions for a question are a `ValueError`.
    """
    load_stemmer()  # a missing package is reported before the work begins
    texts = {
        one.sample_id: tokenize(run.tokenizer, "\n".join(dialogue_lines(one)))
        for one in conversations
    }
    readings: dict[str, dict[str, Unit]] = {}
    for method, settings in run.methods.items():
        if settings.method.name != "none":
            folder, row = run.out / NAME / "memories" / method, readings.setdefault(method, {})
            for name, ids in texts.items():
                row[name] = run.reading(
                    ids, settings, folder / f"{name}.json", f"{method} reads {name}"
                )
    asked = _list_asked(run, conversations, readings, plan)
    units = [unit for row in readings.values() for unit in row.values()]
    units += [unit for row in asked.values() for unit in row]
    digests = {one.sample_id: digest_json(asdict(one)) for one in conversations}
    shared = {
        "prompts": PROMPTS,
        "max_new_tokens": plan.max_new_tokens,
        "wrong_memory": plan.wrong_memory,
    }
    head = run.open(NAME, units, conversations=digests, plan=shared)
    run_units(units, run.progress)
    taught = {
        m: {name: summarize_reading(unit.load()) for name, unit in row.items()}
        for m, row in readings.items()
    }
    records = {
        row: [record for unit in row_units for record in unit.load()]
        for row, row_units in asked.items()
    }
    figures = {**head, "conversations": list(texts), "teachings": taught}
    figures["answers"] = _summarize_answers(records)
    write_json(run.out / f"{NAME}.json", figures)
    return figures


def _list_asked(
    run: Run,
    conversations: Sequence[Conversation],
    readings: dict[str, dict[str, Unit]],
    plan: LocomoPlan,
) -> dict[tuple[str, str, str], list[Unit]]:
    """List the units that ask, one a conversation, by setting, method and group.

    The group is "none" for the base, "right" for the conversation's own memory, "wrong" for another one's.
    """
    groups = {"right": conversations}
    if plan.wrong_memory and len(conversations) > 1:
        groups["wrong"] = [conversations[-1], *conversations[:-1]]
    memories: dict[tuple[str, str], list[Unit | None]] = {
        (BASE, "none"): [None] * len(conversations)
    }
    for method, row in readings.items():
        memories |= {
            (method, group): [row[one.sample_id] for one in owners]
            for group, owners in groups.items()
        }
    asked: dict[tuple[str, str, str], list[Unit]] = {}
    for setting in plan.settings:
        for (method, group), row in memories.items():
            units = asked[setting, method, group] = []
            for conversation, reading in zip(conversations, row, strict=True):
                memory, name = (
                    "none" if reading is None else reading.path.stem,
                    conversation.sample_id,
                )
                path = (
                    run.out
                    / NAME
                    / "predictions"
                    / method
                    / f"{name}.{setting}.memory-{memory}.json"
                )
                label = f"{method}, memory of {memory}" if reading else "base"
                make = partial(
                    _ask,
                    run,
                    plan,
                    setting,
                    conversation,
                    reading,
                    path,
                    f"{label}: {name}, {setting}",
                )
                units.append(Unit(path, make, reading))
    return asked


def _ask(
    run: Run,
    plan: LocomoPlan,
    setting: str,
    conversation: Conversation,
    reading: Unit | None,
    path: Path,
    label: str,
) -> list[dict[str, Any]]:
    attached = nullcontext(run.base)
    if reading is not None:
        attached = memory_attached(run.base, reading.memory)
    with attached as model:
        return _answer_questions(
            run, plan, model, conversation, reading, setting, Unit(path, list).unfinished, label
        )


def _answer_questions(
    run: Run,
    plan: LocomoPlan,
    model: nn.Module,
    talk: Conversation,
    unit: Unit,
    setting: str,
    file: Path,
    label: str,
) -> list[dict[str, Any]]:
    """Answer a conversation's questions with the memory of `unit`, if any; what is done stays in `file`."""
    tokenizer, questions = run.tokenizer, talk.questions
    shared = {"memory": None if unit is None else unit.path.stem, "setting": setting}
    advance = run.progress(label, len(questions))
    records = {record["index"]: record for record in (load_json(file) if file.exists() else [])}
    most = plan.max_new_tokens
    prompts, dropped = make_prompts(model, tokenizer, talk, setting, max_new_tokens=most)
    known = {number for number, each in enumerate(questions) if each.index in records}
    advance(len(known))
    for batch, texts in answer_in_batches(
        model, tokenizer, prompts, known=known, max_new_tokens=most
    ):
        golds = [
            (prompts[number], encode_answer(tokenizer, questions[number].answer))
            for number in batch
        ]
        for number, text, score in zip(batch, texts, score_targets(model, golds), strict=True):
            asked = questions[number]
            records[asked.index] = {
                "sample_id": talk.sample_id,
                **{
                    name: getattr(asked, name)
                    for name in ("index", "question", "category", "answer")
                },
                "prediction": text,
                "f1": answer_f1(text, asked.answer, asked.category),
                "abstains": abstains(text),
                "gold_nats": score.per_token,
                **shared,
                "dropped_lines": dropped,
            }
        write_json(file, [records[index] for index in sorted(records)])
        advance(len(batch))
    return [records[index] for index in sorted(records)]


def _summarize_answers(asked: dict[tuple[str, str, str], list[dict[str, Any]]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for (setting, method, group), records in asked.items():
        if records:
            figures.setdefault(method, {}).setdefault(setting, {})[group] = {
                **f1_by_category(records),
                "gold_nats": mean_interval(
                    [one["gold_nats"] for one in records if one["category"] != ADVERSARIAL]
                ),
                "dropped_lines": {
                    record["sample_id"]: record["dropped_lines"] for record in records
                },
            }
    return figures


def f1_by_category(records: Sequence[dict[str, Any]]) -> dict[str, Interval]:
    """Return the mean F1 of each category that has questions, by its name ("multi-hop", ...), with intervals.

    "adversarial" is the negative F1 with the trap, "answerable" the mean over categories 1 to 4, "abstention" the
    share of category 5 that was declined. The records have `category`, `f1` and `abstains`.
    """
    found = {
        name: [one["f1"] for one in records if one["category"] == number]
        for number, name in CATEGORIES.items()
    }
    found["answerable"] = [record["f1"] for record in records if record["category"] != ADVERSARIAL]
    found["abstention"] = [
        float(record["abstains"]) for record in records if record["category"] == ADVERSARIAL
    ]
    return {name: mean_interval(values) for name, values in found.items() if values}


def tabulate(figures: dict[str, Any]) -> list[Sheet]:
    """Return the tables: answers, the nats of gold answers, lines of dialogues left out."""
    f1, gold, dropped = [], [], {}
    names = [*CATEGORIES.values(), "answerable", "abstention"]
    for method, settings in figures["answers"].items():
        for setting, groups in settings.items():
            for group, found in groups.items():
                title = f"{method}, {setting}" + ("" if group == "none" else f", {group} memory")
                f1.append([title, *(format_percent(found.get(name)) for name in names)])
                gold.append([title, format_mean(found["gold_nats"]), _gap_closed(figures, found)])
                left_out = {name: lines for name, lines in found["dropped_lines"].items() if lines}
                dropped |= {f"{name}, {setting}": str(lines) for name, lines in left_out.items()}
    nats = "nats a token of the gold answer, and the share of the gap to the evidence closed"
    lines = "Dialogues longer than the model's positions: oldest lines left out"
    return [
        Sheet("LoCoMo answers: F1 in %, adversarial: negative F1 with the trap", ["", *names], f1),
        Sheet(f"LoCoMo, categories 1 to 4: {nats}", ["", "nats", "gap closed"], gold),
        Sheet(lines, ["", "lines"], sorted(dropped.items())),
    ]


def _gap_closed(figures: dict[str, Any], found: dict[str, Any]) -> str:
    """Return which share of the base's way from no context to the evidence in context a setting covers."""
    base = figures["answers"].get(BASE, {})
    if not {"no-context", "evidence"} <= base.keys():
        return "-"
    groups = base["no-context"]["none"], base["evidence"]["none"], found
    alone, evidence, own = (to_number(group["gold_nats"]["mean"]) for group in groups)
    return format_figure((alone - own) / (alone - evidence)) if alone != evidence else "-"
