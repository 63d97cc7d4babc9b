"""The LoCoMo study: each method's memory of each conversation, asked about its own conversation and about another.

The paper's section on long-context dialogue, with the wrong-memory control that it lacks: a memory that helps no more
than another conversation's has learned style, not facts. Conversation i is asked with the memory of conversation
i - 1 (the first with that of the last).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..evaluation import cloze, locomo
from ..evaluation.answering import answer, encode_prompt
from ..evaluation.f1 import abstains, answer_f1
from ..evaluation.intervals import mean_interval
from ..evaluation.locomo import ADVERSARIAL, CATEGORIES, Conversation
from ..evaluation.metrics import ClozeGain, LocomoF1, ShareFirst
from ..files import write_json
from ..methods import Settings
from ..text import tokenize
from .progress import Start, silent
from .run import (
    ALONE,
    Recipe,
    Task,
    do_tasks,
    has_memory,
    make_memory,
    open_run,
    read_records,
    read_teaching,
    reading_cost,
    with_memory,
    write_records,
)
from .sharing import Processes

STUDY = "locomo"
CLOZE = "cloze"
SETTINGS = (*locomo.SETTINGS, CLOZE)


@dataclass(frozen=True)
class Plan:
    """What is asked, and how.

    Args:
        settings: some of "no-context", "full-context" and "cloze".
        prompts: see `locomo.PROMPTS`.
        max_new_tokens: an answer's length at most.
        batch_size: answers at once.
        batch_tokens: tokens at once, in the cloze.
        seed: of the cloze's other spans.
        wrong_memory: whether each conversation is also asked with another one's memory.

    Raises:
        ValueError: there is no such setting.
    """

    settings: tuple[str, ...] = SETTINGS
    prompts: dict[str, str] = field(default_factory=lambda: dict(locomo.PROMPTS))
    max_new_tokens: int = 32
    batch_size: int = 16
    batch_tokens: int = 4096
    seed: int = 0
    wrong_memory: bool = True

    def __post_init__(self) -> None:
        for name in self.settings:
            if name not in SETTINGS:
                raise ValueError(f"setting must be one of {', '.join(SETTINGS)}, got {name!r}: choose one of them")


@dataclass(frozen=True)
class _Unit:
    """One conversation, asked in one setting with one memory (None: the base)."""

    conversation: Conversation
    setting: str
    memory: str | None
    path: Path


def run_locomo(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    methods: dict[str, Settings],
    out: Path,
    *,
    recipe: Recipe | None = None,
    plan: Plan | None = None,
    common: dict[str, Any] | None = None,
    overwrite: bool = False,
    start: Start = silent,
    processes: Processes = ALONE,
) -> dict[str, Any]:
    """Runs the study, or goes on with it: what lies finished in the folder is not done again.

    Args:
        base: a causal LM without adapters; mutated while it runs, and left as it was.
        tokenizer: its tokenizer.
        conversations: at least one; with one alone there is no wrong memory.
        methods: the settings of each method by the name that it shall have; the base is always asked too.
        out: the folder. `locomo/predictions` and `locomo/cloze` hold what was answered and scored, `locomo/memories`
            the memories, `locomo.json` the figures.
        recipe: how the conversations are taught.
        plan: what is asked.
        common: more to record of the run, as JSON values; another run in the same folder must share it.
        overwrite: removes what an earlier run left.
        start: shows progress.
        processes: which share the memories; the figures are the same for any number of them. Each must call this.

    Returns:
        The figures, as `locomo.json` has them.

    Raises:
        ValueError: the folder holds another run, or the model has no room for the questions.
        OSError: the disk is full, the folder cannot be written, or another process has ended before.
    """
    recipe, plan = recipe or Recipe(), plan or Plan()
    names = [conversation.sample_id for conversation in conversations]
    asked = {name: value for name, value in dataclasses.asdict(plan).items() if name != "settings"}
    shared = {**(common or {}), "conversations": names, "recipe": dataclasses.asdict(recipe), "plan": asked}
    learners = [name for name, settings in methods.items() if settings.method != "none"]
    folder = out / STUDY

    def ask_base(conversation: Conversation) -> Task:
        units = _units(folder, "none", [conversation], None, plan)
        return Task(
            lambda: not any(map(_missing, units)),
            lambda: _run_units(base, tokenizer, units, plan, start, "base"),
            len(conversation.questions) * plan.max_new_tokens,
        )

    def make_and_ask(method: str, conversation: Conversation) -> Task:
        memory = conversation.sample_id
        directory = folder / "memories" / method / memory
        units = _units(folder, method, conversations, memory, plan)
        ids = tokenize(tokenizer, locomo.dialogue(conversation))

        def do() -> None:
            title = f"{method} reads {memory}"
            make_memory(base, ids, methods[method], recipe, directory, start, title)
            if any(map(_missing, units)):
                with with_memory(base, directory) as model:
                    _run_units(model, tokenizer, units, plan, start, f"{method}, memory of {memory}")

        asked = sum(len(unit.conversation.questions) for unit in units) * plan.max_new_tokens
        return Task(
            lambda: has_memory(directory) and not any(map(_missing, units)),
            do,
            asked + reading_cost(len(ids), methods[method], recipe.readings),
        )

    tasks = [ask_base(conversation) for conversation in conversations]
    tasks += [make_and_ask(name, conversation) for name in learners for conversation in conversations]
    do_tasks(tasks, lambda: open_run(out, STUDY, shared, methods, overwrite), processes, start)
    teachings = {
        name: {memory: read_teaching(folder / "memories" / name / memory) for memory in names} for name in learners
    }
    figures = {
        "study": STUDY,
        **(common or {}),
        "conversations": names,
        "recipe": dataclasses.asdict(recipe),
        "methods": {name: dataclasses.asdict(settings) for name, settings in methods.items()},
        "teachings": teachings,
        "answers": _summarize_answers(folder, conversations, learners, plan),
        "cloze": _summarize_cloze(folder, conversations, learners) if CLOZE in plan.settings else {},
    }
    if processes.is_main:
        write_json(out / f"{STUDY}.json", figures)
    return figures


# ---------------------------------------------------------------------- units


def _units(
    folder: Path, method: str, conversations: Sequence[Conversation], memory: str | None, plan: Plan
) -> list[_Unit]:
    """Lists what is to be asked with one memory: its own conversation, and the one after it; of the base, all."""
    asked = list(conversations)
    if memory is not None:
        place = next(n for n, conversation in enumerate(conversations) if conversation.sample_id == memory)
        asked = [conversations[place]]
        if plan.wrong_memory and len(conversations) > 1:
            asked.append(conversations[(place + 1) % len(conversations)])
    return [
        _Unit(conversation, setting, memory, _path(folder, method, setting, conversation.sample_id, memory))
        for conversation in asked
        for setting in plan.settings
    ]


def _path(folder: Path, method: str, setting: str, sample_id: str, memory: str | None) -> Path:
    kind = CLOZE if setting == CLOZE else "predictions"
    middle = "" if setting == CLOZE else f".{setting}"
    return folder / kind / method / f"{sample_id}{middle}.memory-{memory or 'none'}.json"


def _missing(unit: _Unit) -> bool:
    if unit.setting == CLOZE:
        return not unit.path.exists()
    return len(read_records(unit.path)) < len(unit.conversation.questions)


def _run_units(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    units: Sequence[_Unit],
    plan: Plan,
    start: Start,
    title: str,
) -> None:
    for unit in units:
        if not _missing(unit):
            continue
        description = f"{title}: {unit.conversation.sample_id}, {unit.setting}"
        if unit.setting == CLOZE:
            spans = cloze.find_spans(unit.conversation, plan.seed)
            advance = start(description, sum(1 + len(span.others) for span in spans))
            scores = cloze.score_spans(model, tokenizer, spans, batch_tokens=plan.batch_tokens, on_batch=advance)
            write_records(unit.path, [score.to_json() for score in scores])
        else:
            _ask(model, tokenizer, unit, plan, start, description)


def _ask(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    unit: _Unit,
    plan: Plan,
    start: Start,
    description: str,
) -> None:
    """Asks all questions of a conversation; the file grows with each batch, and its batches are not asked again."""
    questions = unit.conversation.questions
    prompts, dropped = make_prompts(model, tokenizer, unit.conversation, unit.setting, plan)
    records = {record["index"]: record for record in read_records(unit.path)}
    advance = start(description, len(questions))
    advance(len(records))

    def keep(batch: list[int], texts: list[str]) -> None:
        for number, text in zip(batch, texts, strict=True):
            question = questions[number]
            records[question.index] = {
                "sample_id": unit.conversation.sample_id,
                "index": question.index,
                "question": question.question,
                "category": question.category,
                "answer": question.answer,
                "prediction": text,
                "f1": answer_f1(text, question.answer, question.category),
                "abstains": abstains(text),
                "memory": unit.memory,
                "setting": unit.setting,
                "dropped_lines": dropped,
            }
        write_records(unit.path, [records[index] for index in sorted(records)])
        advance(len(batch))

    answer(
        model,
        tokenizer,
        prompts,
        max_new_tokens=plan.max_new_tokens,
        batch_size=plan.batch_size,
        skip=lambda batch: all(questions[number].index in records for number in batch),
        on_batch=keep,
    )


def make_prompts(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    setting: str,
    plan: Plan,
) -> tuple[list[list[int]], int]:
    """Makes the prompts of a conversation's questions, as token ids.

    Where the whole dialogue is more than the model's positions hold, its newest lines stand in context: as many as
    leave room for the longest question and its answer.

    Args:
        model: for its positions.
        tokenizer: its tokenizer.
        conversation: with its questions.
        setting: "no-context" or "full-context".
        plan: the prompts and the answers' length.

    Returns:
        The prompts, and how many of the dialogue's lines had to be left out.

    Raises:
        ValueError: not even a question without its dialogue fits.
    """

    def encode(text: str | None) -> list[list[int]]:
        return [
            encode_prompt(
                tokenizer, locomo.make_prompt(conversation, question, setting, text=text, prompts=plan.prompts)
            )
            for question in conversation.questions
        ]

    prompts = encode(None)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if setting == "no-context" or not prompts or not isinstance(limit, int) or limit < 1:
        return prompts, 0
    room = limit - plan.max_new_tokens
    if max(map(len, prompts)) <= room:
        return prompts, 0
    lines = locomo.dialogue_lines(conversation)
    longest = max(range(len(prompts)), key=lambda number: len(prompts[number]))
    question = conversation.questions[longest]

    def length(kept: int) -> int:
        text = "\n".join(lines[len(lines) - kept :])
        prompt = locomo.make_prompt(conversation, question, setting, text=text, prompts=plan.prompts)
        return len(encode_prompt(tokenizer, prompt))

    low, high = 0, len(lines)  # the most lines that fit: by halving
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if length(middle) <= room else (low, middle - 1)
    return encode("\n".join(lines[len(lines) - low :])), len(lines) - low


# ---------------------------------------------------------------------- figures


def _memories(conversations: Sequence[Conversation]) -> dict[str, dict[str, str]]:
    """Each conversation's right and wrong memory, by the conversation that it is of."""
    names = [conversation.sample_id for conversation in conversations]
    wrong = dict(zip(names, [names[-1], *names[:-1]], strict=True)) if len(names) > 1 else {}
    return {"right": {name: name for name in names}, "wrong": wrong}


def _summarize_answers(
    folder: Path, conversations: Sequence[Conversation], learners: Sequence[str], plan: Plan
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for setting in plan.settings:
        if setting == CLOZE:
            continue
        groups = [("none", "none", dict.fromkeys((c.sample_id for c in conversations), None))]
        for method in learners:
            groups += [(method, which, memories) for which, memories in _memories(conversations).items() if memories]
        for method, which, memories in groups:
            records = [
                record
                for sample_id, memory in memories.items()
                for record in read_records(_path(folder, method, setting, sample_id, memory))
            ]
            if records:
                metric = LocomoF1()
                metric.add_batch(
                    predictions=[record["prediction"] for record in records],
                    references=[record["answer"] for record in records],
                    categories=[record["category"] for record in records],
                )
                dropped = {record["sample_id"]: record["dropped_lines"] for record in records}
                figures.setdefault(method, {}).setdefault(setting, {})[which] = {
                    **metric.compute(),
                    "dropped_lines": dropped,
                }
    return figures


def _summarize_cloze(folder: Path, conversations: Sequence[Conversation], learners: Sequence[str]) -> dict[str, Any]:
    def read(method: str, memories: dict[str, str | None]) -> list[cloze.SpanScore]:
        return [
            cloze.SpanScore.from_json(record)
            for sample_id, memory in memories.items()
            for record in read_records(_path(folder, method, CLOZE, sample_id, memory))
        ]

    base = read("none", dict.fromkeys((conversation.sample_id for conversation in conversations), None))
    figures: dict[str, Any] = {"spans": len(base), "base": {"first": _share_first(base)}, "methods": {}}
    contrasts: dict[str, list[float]] = {}
    for method in learners:
        memories = _memories(conversations)
        right, wrong = read(method, memories["right"]), read(method, memories["wrong"])
        found = {"gain_right": _gain(right, base), "first_right": _share_first(right)}
        if len(wrong) == len(right):
            contrasts[method] = [w.nll_per_token - r.nll_per_token for r, w in zip(right, wrong, strict=True)]
            found |= {
                "gain_wrong": _gain(wrong, base),
                "first_wrong": _share_first(wrong),
                "right_minus_wrong": _gain(right, wrong),
                "by_category": {
                    name: mean_interval(values).to_json()
                    for category, name in CATEGORIES.items()
                    if category != ADVERSARIAL
                    and (
                        values := [v for v, r in zip(contrasts[method], right, strict=True) if r.category == category]
                    )
                },
            }
        figures["methods"][method] = found
    figures["differences"] = [
        {
            "method": one,
            "against": other,
            "right_minus_wrong": mean_interval(
                [a - b for a, b in zip(contrasts[one], contrasts[other], strict=True)]
            ).to_json(),
        }
        for number, one in enumerate(contrasts)
        for other in list(contrasts)[:number]
    ]
    return figures


def _gain(scores: Sequence[cloze.SpanScore], reference: Sequence[cloze.SpanScore]) -> dict[str, Any]:
    if not scores:
        return mean_interval([]).to_json()
    metric = ClozeGain()
    metric.add_batch(
        predictions=[score.nll_per_token for score in scores], references=[score.nll_per_token for score in reference]
    )
    return metric.compute()["gain"]


def _share_first(scores: Sequence[cloze.SpanScore]) -> dict[str, Any]:
    ranked = [score for score in scores if score.others]
    if not ranked:
        return mean_interval([]).to_json()
    metric = ShareFirst()
    metric.add_batch(
        predictions=[score.nll_per_token for score in ranked],
        references=[min(score.others_nll_per_token) for score in ranked],
    )
    return metric.compute()["first"]
