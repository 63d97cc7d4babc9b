"""The LoCoMo protocol: a method's memory of a conversation answers questions about it.

The paper's section on long-context dialogue, with the wrong-memory control that it lacks:
conversation i is also asked with the memory of conversation i - 1. A memory that helps no more than
that has learned style, not facts.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ..asking import answer_in_batches, count_shared, encode_answer
from ..asking.scoring import score_targets
from ..checks import check_choice
from ..files import load_json, write_json
from ..memories.loading import memory_attached
from ..tables import Sheet, format_figure, format_mean, format_percent, to_number
from ..text import digest_json, tokenize
from .conversations import Conversation, LocomoQuestion, dialogue_lines
from .f1 import ADVERSARIAL, CATEGORIES, abstains, answer_f1, load_stemmer
from .intervals import Interval, mean_interval
from .prompts import ANSWERED, PROMPTS, make_prompts
from .runs import Run, summarize_stage
from .units import Unit

__all__ = ["NAME", "LocomoPlan", "f1_by_category", "run_locomo", "tabulate"]

NAME = "locomo"
BASE = "none"

Case = tuple[str, str, str]
"""Setting, method and group: "none" for the base, "right" for the conversation's own memory,
"wrong" for another one's."""


@dataclass(frozen=True)
class LocomoPlan:
    """What is asked, and how.

    Args:
        settings: names of `ANSWERED`; another one is a `ValueError`.
        max_new_tokens: the most tokens of an answer.
        wrong_memory: whether each conversation is also asked with the memory of another one.
    """

    settings: tuple[str, ...] = ANSWERED
    max_new_tokens: int = 32
    wrong_memory: bool = True

    def __post_init__(self) -> None:
        for name in self.settings:
            check_choice("setting", name, ANSWERED)


def run_locomo(run: Run, conversations: Sequence[Conversation], plan: LocomoPlan) -> dict[str, Any]:
    """Ask about each conversation: the base, and each method with its memories.

    Args:
        run: its folder gets `locomo/predictions`, `locomo/memories`, and the figures in
            `locomo.json`.
        conversations: of `load_locomo`. Where there is one alone, it has no wrong memory.
        plan: what is asked.

    Returns:
        The figures.

    Raises:
        ValueError: as for `perplexity.run_perplexity`, or a question has more tokens than the
            model's positions.
    """
    # A missing package is reported before the work begins.
    load_stemmer()
    readings = _list_readings(run, conversations)
    asked = _list_asked(run, conversations, readings, plan)
    units: list[Unit] = []
    for method_units in readings.values():
        units += method_units.values()
    for case_units in asked.values():
        units += case_units
    digests = {talk.sample_id: digest_json(asdict(talk)) for talk in conversations}
    shared = {
        "prompts": PROMPTS,
        "max_new_tokens": plan.max_new_tokens,
        "wrong_memory": plan.wrong_memory,
    }
    head = run.make(NAME, units, conversations=digests, plan=shared)
    teachings: dict[str, dict[str, Any]] = {}
    for method, method_units in readings.items():
        teachings[method] = {}
        for name, unit in method_units.items():
            teachings[method][name] = summarize_stage(unit.load())
    figures = {
        **head,
        "conversations": list(digests),
        "teachings": teachings,
        "answers": _summarize_answers(asked),
    }
    run.save(NAME, figures)
    return figures


def _list_readings(run: Run, conversations: Sequence[Conversation]) -> dict[str, dict[str, Unit]]:
    """List the units that read, by method and by the conversation's id."""
    texts = {}
    for talk in conversations:
        texts[talk.sample_id] = tokenize(run.tokenizer, "\n".join(dialogue_lines(talk)))
    readings: dict[str, dict[str, Unit]] = {}
    for method, settings in run.methods.items():
        if settings.method == "none":
            continue
        folder = run.out / NAME / "memories" / method
        readings[method] = {}
        for name, ids in texts.items():
            label = f"{method} learns {name}"
            readings[method][name] = run.learning(ids, settings, folder / f"{name}.json", label)
    return readings


def _list_asked(
    run: Run,
    conversations: Sequence[Conversation],
    readings: dict[str, dict[str, Unit]],
    plan: LocomoPlan,
) -> dict[Case, list[Unit]]:
    """List the units that ask, one a conversation."""
    owners = {"right": conversations}
    if plan.wrong_memory and len(conversations) > 1:
        owners["wrong"] = [conversations[-1], *conversations[:-1]]
    asked: dict[Case, list[Unit]] = {}
    for setting in plan.settings:
        ask = partial(_make_unit, run, plan, setting)
        asked[setting, BASE, "none"] = [ask(talk, BASE, None) for talk in conversations]
        for method, method_units in readings.items():
            for group, others in owners.items():
                asked[setting, method, group] = [
                    ask(talk, method, method_units[owner.sample_id])
                    for talk, owner in zip(conversations, others, strict=True)
                ]
    return asked


def _make_unit(
    run: Run, plan: LocomoPlan, setting: str, talk: Conversation, method: str, reading: Unit | None
) -> Unit:
    """Return the unit that asks about one conversation, with the memory of a reading, if any."""
    memory = "none" if reading is None else reading.path.stem
    file = f"{talk.sample_id}.{setting}.memory-{memory}.json"
    model = "base" if reading is None else f"{method}, memory of {memory}"
    label = f"{model}: {talk.sample_id}, {setting}"

    def make() -> list[dict[str, Any]]:
        attached: AbstractContextManager[nn.Module] = nullcontext(run.base)
        if reading is not None:
            attached = memory_attached(run.base, reading.memory)
        with attached as model:
            records = _answer_questions(run, plan, model, talk, setting, unit.unfinished, label)
        shared = {"memory": None if reading is None else memory, "setting": setting}
        return [{**record, **shared} for record in records]

    path = run.out / NAME / "predictions" / method / file
    unit = Unit(path, make, needs=reading, size=len(talk.questions) * plan.max_new_tokens)
    return unit


def _answer_questions(
    run: Run,
    plan: LocomoPlan,
    model: nn.Module,
    talk: Conversation,
    setting: str,
    file: Path,
    label: str,
) -> list[dict[str, Any]]:
    """Answer a conversation's questions; what is done stays in `file`."""
    questions = talk.questions
    advance = run.progress(label, len(questions))
    done = load_json(file) if file.exists() else []
    records = {record["index"]: record for record in done}
    prompts, dropped_lines = make_prompts(
        model, run.tokenizer, talk, setting, max_new_tokens=plan.max_new_tokens
    )
    known = {number for number, question in enumerate(questions) if question.index in records}
    advance(len(known))
    # The dialogue in all prompts is read once, for answers and for scores.
    shared = count_shared(prompts)
    caches: dict[Any, Any] = {}
    batches = answer_in_batches(
        model,
        run.tokenizer,
        prompts,
        known=known,
        max_new_tokens=plan.max_new_tokens,
        caches=caches,
    )
    for batch, texts in batches:
        targets = []
        for number in batch:
            gold = encode_answer(run.tokenizer, questions[number].answer)
            targets.append((prompts[number], gold))
        scores = score_targets(model, targets, shared=shared, caches=caches)
        for number, text, score in zip(batch, texts, scores, strict=True):
            question = questions[number]
            records[question.index] = {
                "sample_id": talk.sample_id,
                **_grade(question, text),
                "gold_nats": score.per_token,
                "dropped_lines": dropped_lines,
            }
        write_json(file, [records[index] for index in sorted(records)])
        advance(len(batch))
    return [records[index] for index in sorted(records)]


def _grade(question: LocomoQuestion, text: str) -> dict[str, Any]:
    """Return the record of an answer, with its F1."""
    return {
        "index": question.index,
        "question": question.question,
        "category": question.category,
        "answer": question.answer,
        "prediction": text,
        "f1": answer_f1(text, question.answer, question.category),
        "abstains": abstains(text),
    }


def _summarize_answers(asked: dict[Case, list[Unit]]) -> dict[str, Any]:
    """Return the figures of the answers, by method, setting and group.

    A group without a record has none.
    """
    figures: dict[str, Any] = {}
    for (setting, method, group), units in asked.items():
        records = []
        for unit in units:
            records += unit.load()
        if not records:
            continue
        answerable = [record for record in records if record["category"] != ADVERSARIAL]
        by_setting = figures.setdefault(method, {}).setdefault(setting, {})
        by_setting[group] = {
            **f1_by_category(records),
            "gold_nats": mean_interval([record["gold_nats"] for record in answerable]),
            "dropped_lines": {record["sample_id"]: record["dropped_lines"] for record in records},
        }
    return figures


def f1_by_category(records: Sequence[dict[str, Any]]) -> dict[str, Interval]:
    """Return the mean F1 of each category that has questions, with intervals.

    Args:
        records: with `category`, `f1` and `abstains`.

    Returns:
        The means by the category's name ("multi-hop", ...): "adversarial" is the negative F1 with
        the trap, "answerable" the mean over categories 1 to 4, "abstention" the share of category 5
        that was declined.
    """
    values: dict[str, list[float]] = {}
    for number, name in CATEGORIES.items():
        values[name] = [record["f1"] for record in records if record["category"] == number]
    answerable = [record["f1"] for record in records if record["category"] != ADVERSARIAL]
    traps = [record for record in records if record["category"] == ADVERSARIAL]
    values["answerable"] = answerable
    values["abstention"] = [float(record["abstains"]) for record in traps]
    return {name: mean_interval(scores) for name, scores in values.items() if scores}


def tabulate(figures: dict[str, Any]) -> list[Sheet]:
    """Return the tables: answers, the nats of gold answers, lines of dialogues left out."""
    f1 = []
    gold = []
    dropped = {}
    names = [*CATEGORIES.values(), "answerable", "abstention"]
    for method, settings in figures["answers"].items():
        for setting, groups in settings.items():
            for group, means in groups.items():
                title = f"{method}, {setting}"
                if group != "none":
                    title += f", {group} memory"
                f1.append([title, *(format_percent(means.get(name)) for name in names)])
                gold.append([title, format_mean(means["gold_nats"]), _gap_closed(figures, means)])
                for name, lines in means["dropped_lines"].items():
                    if lines:
                        dropped[f"{name}, {setting}"] = str(lines)
    nats = "nats a token of the gold answer, and the share of the gap to the evidence closed"
    lines = "Dialogues longer than the model's positions: oldest lines left out"
    return [
        Sheet("LoCoMo answers: F1 in %, adversarial: negative F1 with the trap", ["", *names], f1),
        Sheet(f"LoCoMo, categories 1 to 4: {nats}", ["", "nats", "gap closed"], gold),
        Sheet(lines, ["", "lines"], sorted(dropped.items())),
    ]


def _gap_closed(figures: dict[str, Any], means: dict[str, Any]) -> str:
    """Return which share of the base's way from no context to the evidence a group covers."""
    base = figures["answers"].get(BASE, {})
    if not {"no-context", "evidence"} <= base.keys():
        return "-"
    alone = to_number(base["no-context"]["none"]["gold_nats"]["mean"])
    evidence = to_number(base["evidence"]["none"]["gold_nats"]["mean"])
    if alone == evidence:
        return "-"
    return format_figure((alone - to_number(means["gold_nats"]["mean"])) / (alone - evidence))
