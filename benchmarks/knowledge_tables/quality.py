"""QuALITY: multiple-choice questions about long stories, by the likelihood of each choice."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from measuring import encode_pair, make_table
from paper_tables.choices import Item
from torch import nn

from locas_peft.asking.scoring import score_targets
from locas_peft.evaluation import Unit
from locas_peft.evaluation.intervals import mean_interval
from locas_peft.model import count_positions
from locas_peft.tables import format_percent
from locas_peft.text import encode_text

from .asked import load_results
from .bench import KnowledgeBench
from .documents import Document, load_stories
from .rows import (
    COST_HEAD,
    IN_CONTEXT,
    NONE,
    READING_ROW,
    STUDY_ROW,
    Row,
    choose_rows,
    fill_rows,
    list_costs,
    row_unit,
)

__all__ = ["ROWS", "fill", "find_right", "tabulate"]

ROWS = (NONE, IN_CONTEXT, READING_ROW, STUDY_ROW)
TABLE = "quality"


def find_right(
    model: nn.Module, tokenizer: Any, items: Sequence[Item], story: str = "", most_tokens: int = 0
) -> dict[str, Any]:
    """Find of each question whether the right choice has the highest log-likelihood.

    Args:
        story: stands before each question; "" for none.
        most_tokens: of the story; the beginning is kept. The model's positions limit it too.

    Returns:
        `right`, by the plain sum; `by_character`, by the sum divided by the choice's characters;
        and `context_tokens`, what was kept of the story.
    """
    pairs = []
    for item in items:
        for choice in item.choices:
            pairs.append(encode_pair(tokenizer, f"{item.question}\nAnswer:", f" {choice}"))
    begin: list[int] = []
    if story:
        begin = _cut_story(model, tokenizer, pairs, story, most_tokens)
        pairs = [([*begin, *prompt], target) for prompt, target in pairs]
    scores = score_targets(model, pairs, shared=len(begin))
    nats = iter([score.nll_nats for score in scores])
    right = []
    by_character = []
    for item in items:
        sums = [next(nats) for _ in item.choices]
        right.append(int(sums[item.gold] == min(sums)))
        means = []
        for nll, choice in zip(sums, item.choices, strict=True):
            means.append(nll / max(len(choice), 1))
        by_character.append(int(means[item.gold] == min(means)))
    return {"right": right, "by_character": by_character, "context_tokens": len(begin)}


def _cut_story(
    model: nn.Module, tokenizer: Any, pairs: Sequence[Any], story: str, most_tokens: int
) -> list[int]:
    """Return the tokens of a story's beginning that leave room for the longest question."""
    longest = max(len(prompt) + len(target) for prompt, target in pairs)
    positions = count_positions(model)
    if positions is not None:
        most_tokens = min(most_tokens, positions - longest)
    return encode_text(tokenizer, f"{story.strip()}\n\n")[: max(most_tokens, 1)]


def _measure(bench: KnowledgeBench, model: nn.Module, document: Document, row: Row) -> dict:
    story = document.text if row.context == "text" else ""
    most_tokens = bench.scale.context_tokens
    return find_right(model, bench.tokenizer, document.questions, story, most_tokens)


def _make_unit(bench: KnowledgeBench, document: Document, row: Row) -> Unit:
    about = {}
    if row.context == "text":
        about["most_tokens"] = bench.scale.context_tokens
    return row_unit(bench, TABLE, document, row, 0, partial(_measure, bench), about)


def _list_units(bench: KnowledgeBench, document: Document) -> list[Unit]:
    return [_make_unit(bench, document, row) for row in choose_rows(bench, ROWS)]


def fill(bench: KnowledgeBench) -> None:
    fill_rows(bench, load_stories(bench), partial(_list_units, bench))


def tabulate(bench: KnowledgeBench) -> str:
    """Return accuracies, and their changes from no context."""
    stories = load_stories(bench)
    lines = []
    base: dict[tuple[str, int], int] = {}
    for row in choose_rows(bench, ROWS):
        units = [_make_unit(bench, story, row) for story in stories]
        results = load_results(bench, units)
        if not results:
            continue
        values = _list_values(results, "by_character")
        if row == NONE:
            base = values
        changes = [value - base[key] for key, value in values.items() if key in base]
        plain = _list_values(results, "right")
        cells = [row.name, format_percent(mean_interval(list(values.values())))]
        cells.append("-" if row == NONE else format_percent(mean_interval(changes)))
        cells.append(format_percent(mean_interval(list(plain.values()))))
        tokens = [result["figures"]["context_tokens"] for result in results]
        cells.append(f"{sum(tokens) / len(tokens):,.0f}")
        lines.append([*cells, *list_costs(bench, results), str(len(values))])
    if not lines:
        return ""
    head = ["", "right, by character", "change", "right, plain", "tokens in context"]
    note = (
        f"{len(stories)} stories: right choices in % by likelihood a character, and by the plain "
        "sum, with 95% intervals over questions; by chance 25."
    )
    return f"{note}\n\n{make_table([*head, *COST_HEAD, 'n'], lines)}"


def _list_values(results: Sequence[dict[str, Any]], name: str) -> dict[tuple[str, int], int]:
    values = {}
    for result in results:
        for number, value in enumerate(result["figures"][name]):
            values[result["document"], number] = value
    return values
