"""LoCoMo: a whole dialogue, studied, and its questions of all categories by the release's F1."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from measuring import make_table
from paper_tables.attention import masked_attention
from paper_tables.locomo import load_conversations
from torch import nn

from locas_peft.asking import encode_prompt
from locas_peft.evaluation import Unit
from locas_peft.evaluation.conversations import Conversation, dialogue_lines
from locas_peft.evaluation.f1 import ADVERSARIAL, CATEGORIES, abstains, answer_f1
from locas_peft.evaluation.intervals import mean_interval
from locas_peft.evaluation.locomo import f1_by_category
from locas_peft.evaluation.prompts import make_prompt, make_prompts
from locas_peft.tables import format_percent

from .asked import answer_prompts, load_results
from .bench import KnowledgeBench
from .documents import Document
from .memories import Recipe
from .retrieval import FINDERS
from .rows import (
    BM25,
    COST_HEAD,
    IN_CONTEXT,
    LORA_ROW,
    NONE,
    STUDY_ROW,
    Row,
    choose_rows,
    fill_rows,
    list_costs,
    row_unit,
)

__all__ = ["ROWS", "fill", "tabulate"]

TEMPLORA = Row("templora", "TempLoRA r=16, reading alone", Recipe("lora-reading", "read", "lora"))
ROWS = (NONE, TEMPLORA, STUDY_ROW, LORA_ROW, IN_CONTEXT, BM25)
TABLE = "locomo"
MOST_TOKENS = 32
FOUND = 5
"""How many turns are found for a question."""


def _load(bench: KnowledgeBench) -> list[tuple[Conversation, Document]]:
    talks = []
    for talk in load_conversations(bench):
        text = "\n".join(dialogue_lines(talk))
        talks.append((talk, Document(talk.sample_id, text, talk.questions, talk.sample_id)))
    return talks


def list_turns(conversation: Conversation) -> list[str]:
    """Return the turns of a dialogue as lines, each with the date of its session."""
    turns = []
    for session in conversation.sessions:
        for turn in session.turns:
            date = f"{session.date_time}, " if session.date_time else ""
            turns.append(f"{date}{turn.speaker}: {' '.join(turn.text.split())}")
    return turns


def _list_prompts(
    bench: KnowledgeBench, model: nn.Module, talk: Conversation, row: Row
) -> tuple[list[list[int]], int]:
    """Return the prompts of a dialogue's questions, and how many of its lines are left out."""
    if row.context != "bm25":
        setting = "no-context" if row.context is None else "full-context"
        return make_prompts(model, bench.tokenizer, talk, setting, max_new_tokens=MOST_TOKENS)
    questions = [question.question for question in talk.questions]
    prompts = []
    for question, turns in zip(
        talk.questions, FINDERS["bm25"](questions, list_turns(talk), FOUND), strict=True
    ):
        prompt = make_prompt(talk, question, "full-context", "\n".join(turns))
        prompts.append(encode_prompt(bench.tokenizer, prompt))
    return prompts, 0


def _measure(
    bench: KnowledgeBench, talk: Conversation, model: nn.Module, document: Document, row: Row
) -> dict[str, Any]:
    prompts, dropped_lines = _list_prompts(bench, model, talk, row)
    with masked_attention(bench.base):
        answers = answer_prompts(model, bench.tokenizer, prompts, MOST_TOKENS)
    figures: dict[str, Any] = {"dropped_lines": dropped_lines, "category": [], "f1": []}
    figures["abstains"] = []
    texts = []
    for question, answer in zip(talk.questions, answers, strict=True):
        figures["category"].append(question.category)
        figures["f1"].append(answer_f1(answer, question.answer, question.category))
        figures["abstains"].append(int(abstains(answer)))
        texts.append({"question": question.question, "gold": question.answer, "answer": answer})
    return {**figures, "texts": texts}


def _make_unit(bench: KnowledgeBench, talk: Conversation, document: Document, row: Row) -> Unit:
    return row_unit(bench, TABLE, document, row, 0, partial(_measure, bench, talk))


def fill(bench: KnowledgeBench) -> None:
    talks = {document.name: talk for talk, document in _load(bench)}
    rows = choose_rows(bench, ROWS)

    def list_units(document: Document) -> list[Unit]:
        return [_make_unit(bench, talks[document.name], document, row) for row in rows]

    fill_rows(bench, [document for _, document in _load(bench)], list_units)


def tabulate(bench: KnowledgeBench) -> str:
    """Return the F1s by category, and the change of those that have an answer."""
    names = [*CATEGORIES.values(), "answerable", "abstention"]
    base: list[float] = []
    lines = []
    for row in choose_rows(bench, ROWS):
        units = [_make_unit(bench, talk, document, row) for talk, document in _load(bench)]
        results = load_results(bench, units)
        if not results:
            continue
        records = _list_records(results)
        means = f1_by_category(records)
        answerable = [item["f1"] for item in records if item["category"] != ADVERSARIAL]
        if row == NONE:
            base = answerable
        change = "-"
        if row != NONE and len(base) == len(answerable):
            pairs = zip(answerable, base, strict=True)
            change = format_percent(mean_interval([mine - other for mine, other in pairs]))
        cells = [row.name, *(format_percent(means.get(name)) for name in names), change]
        lines.append([*cells, *list_costs(bench, results), str(len(records))])
    if not lines:
        return ""
    note = (
        "F1 in %, by LoCoMo's rules for each category, with 95% intervals over questions; the "
        "adversarial one is negative. The change is that of categories 1 to 4 from no context. "
        f"Greedy answers of at most {MOST_TOKENS} tokens; BM25 has {FOUND} turns. Where a dialogue "
        "exceeds the positions, its newest lines are in context."
    )
    return f"{note}\n\n{make_table(['', *names, 'change', *COST_HEAD, 'n'], lines)}"


def _list_records(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of all questions, one dictionary each."""
    names = ("category", "f1", "abstains")
    records = []
    for result in results:
        columns = [result["figures"][name] for name in names]
        for values in zip(*columns, strict=True):
            records.append(dict(zip(names, values, strict=True)))
    return records
