"""Tables of questions with gold answers: each row is asked in two ways, and compared with none."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import measuring
from measuring import make_table
from paper_tables.baselines import PrefixModel
from torch import nn

from locas_peft.asking import SHORT_PROMPT, encode_question
from locas_peft.asking.prompts import SENTENCE_PROMPT
from locas_peft.evaluation import Unit
from locas_peft.evaluation.intervals import Interval, mean_interval
from locas_peft.tables import format_mean, format_percent
from locas_peft.text import digest_json

from .bench import KnowledgeBench
from .documents import Document
from .grading import METRICS, grade, ratio_interval, sum_groups
from .memories import article_unit
from .prefixes import answer_after_prefix
from .retrieval import FINDERS
from .rows import COST_HEAD, IN_CONTEXT, NONE, Row, choose_rows, list_costs, row_unit

__all__ = [
    "answer_prompts",
    "article_units",
    "ask",
    "asked_units",
    "collect",
    "load_results",
    "tabulate_rows",
]

FORMS = {"sentence": (SENTENCE_PROMPT, 64), "short": (SHORT_PROMPT, 32)}
"""How a question is put, and the most tokens of its answer."""
FOUND = 3
"""How many sentences are found for a question."""

Key = tuple[str, int]
"""A document and the number of its question."""


def ask(
    bench: KnowledgeBench, pool: Sequence[str], model: nn.Module, document: Document, row: Row
) -> dict[str, Any]:
    """Ask a document's questions in both ways; return the grades and the answers' texts.

    Args:
        pool: the sentences among which some are found for a row with such a context.
    """
    questions = document.questions
    contexts = _find_contexts(row, document, pool)
    answers = {}
    for name, (form, most_tokens) in FORMS.items():
        if row.is_printed:
            answers[name] = contexts
            continue
        prompts = []
        for asked, context in zip(questions, contexts, strict=True):
            prompts.append(encode_question(bench.tokenizer, asked.question, form, context))
        answers[name] = answer_prompts(model, bench.tokenizer, prompts, most_tokens)
    golds = [asked.answer for asked in questions]
    grades = grade(answers["sentence"], answers["short"], golds)
    texts = []
    for number, asked in enumerate(questions):
        given = {name: answers[name][number] for name in FORMS}
        texts.append({"question": asked.question, "gold": asked.answer, **given})
    return {"asked": len(golds), "right": sum(grades["within"]), **grades, "texts": texts}


def _find_contexts(row: Row, document: Document, pool: Sequence[str]) -> list[str]:
    questions = [asked.question for asked in document.questions]
    if row.context is None:
        return [""] * len(questions)
    if row.context == "text":
        return [asked.passage for asked in document.questions]
    count = 1 if row.is_printed else FOUND
    return ["\n".join(texts) for texts in FINDERS[row.context](questions, pool, count)]


def answer_prompts(
    model: nn.Module, tokenizer: Any, prompts: Sequence[list[int]], most_tokens: int
) -> list[str]:
    """Answer prompts greedily, in their order; of each answer the first line counts."""
    if isinstance(model, PrefixModel):
        return answer_after_prefix(model, tokenizer, prompts, most_tokens)
    return measuring.answer_prompts(model, tokenizer, prompts, max_new_tokens=most_tokens)


def asked_units(
    bench: KnowledgeBench,
    table: str,
    document: Document,
    row: Row,
    seeds: int,
    pool: Sequence[str],
) -> list[Unit]:
    """Return the units of a row: one a seed, or one alone where nothing is learned."""
    about: dict[str, Any] = {"forms": list(map(list, FORMS.values()))}
    if row.context in FINDERS:
        about["pool_sha256"] = digest_json(list(pool))
        # The same passage may be asked about among fewer or more others.
        table = f"{table}/among-{len(pool)}"
    units = []
    for seed in range(1 if row.recipe is None else seeds):
        measure = partial(ask, bench, pool)
        units.append(row_unit(bench, table, document, row, seed, measure, about))
    return units


def article_units(bench: KnowledgeBench, document: Document, row: Row) -> list[Unit]:
    """Return the units of the change of the article's other passages by a row's memory, seed 0."""
    if row.recipe is None or row.prefix is not None or not document.article:
        return []
    return [article_unit(bench, document, row.recipe, 0)]


def load_results(bench: KnowledgeBench, units: Sequence[Unit]) -> list[dict[str, Any]]:
    """Return the results that have been made."""
    results = [bench.load(unit) for unit in units]
    return [result for result in results if result is not None]


def collect(results: Sequence[dict[str, Any]]) -> dict[str, dict[Key, float]]:
    """Return each metric of a row by question: the mean over the seeds."""
    values: dict[str, dict[Key, list[float]]] = {metric: {} for metric in METRICS}
    for result in results:
        for metric, by_question in values.items():
            for number, value in enumerate(result["figures"][metric]):
                by_question.setdefault((result["document"], number), []).append(value)
    means: dict[str, dict[Key, float]] = {}
    for metric, by_question in values.items():
        means[metric] = {key: sum(each) / len(each) for key, each in by_question.items()}
    return means


def tabulate_rows(
    bench: KnowledgeBench,
    table: str,
    documents: Sequence[Document],
    rows: Sequence[Row],
    pool: Sequence[str],
    seeds: int = 1,
    by_title: bool = False,
) -> str:
    """Return the table of the rows that have results; "" for none.

    Args:
        by_title: whether the bootstrap draws titles, with all their questions, and not questions.
    """
    results = {}
    for row in choose_rows(bench, rows):
        units: list[Unit] = []
        for document in documents:
            units += asked_units(bench, table, document, row, seeds, pool)
        results[row] = load_results(bench, units)
    scores = {row: collect(row_results) for row, row_results in results.items() if row_results}
    titles = {}
    for document in documents:
        for number, asked in enumerate(document.questions):
            key = (document.name, number)
            titles[key] = asked.title if by_title else key
    has_articles = any(document.article for document in documents)
    lines = []
    for row, row_scores in scores.items():
        cells = [row.name]
        for metric in METRICS:
            cells.append(format_percent(_average(row_scores[metric], titles)))
        for metric in ("within", "f1"):
            change = _compare(row_scores[metric], scores.get(NONE, {}).get(metric, {}), titles)
            cells.append("-" if row == NONE else format_percent(change))
        for metric in ("within", "f1"):
            cells.append(_format_share(scores, row, metric, titles))
        cells += list_costs(bench, results[row])
        if has_articles:
            cells.append(_format_articles(bench, documents, row))
        cells.append(str(len(row_scores["within"])))
        lines.append(cells)
    if not lines:
        return ""
    head = ["", "gold within", "exact match", "F1", "gold within, change", "F1, change"]
    head += ["share of the gap, gold within", "share of the gap, F1", *COST_HEAD]
    head += ["article's perplexity, change", "n"] if has_articles else ["n"]
    return make_table(head, lines)


def _average(values: dict[Key, float], groups: dict[Key, Any]) -> Interval:
    return _ratio(values, dict.fromkeys(values, 1.0), groups)


def _compare(values: dict[Key, float], base: dict[Key, float], groups: dict[Key, Any]) -> Interval:
    """Return the mean change from the base, paired by questions."""
    changes = {key: value - base[key] for key, value in values.items() if key in base}
    return _ratio(changes, dict.fromkeys(changes, 1.0), groups)


def _format_share(
    scores: dict[Row, dict[str, dict[Key, float]]], row: Row, metric: str, groups: dict[Key, Any]
) -> str:
    """Return which share of the way from no context to the text in context a row covers."""
    if row == NONE or NONE not in scores or IN_CONTEXT not in scores:
        return "-"
    base = scores[NONE][metric]
    full = scores[IN_CONTEXT][metric]
    gains = {}
    gaps = {}
    for key, value in scores[row][metric].items():
        if key in base and key in full:
            gains[key] = value - base[key]
            gaps[key] = full[key] - base[key]
    return format_mean(_ratio(gains, gaps, groups), 2)


def _format_articles(bench: KnowledgeBench, documents: Sequence[Document], row: Row) -> str:
    """Return the mean change of the article's perplexity by a row's memories, in %."""
    units: list[Unit] = []
    for document in documents:
        units += article_units(bench, document, row)
    changes = []
    for result in load_results(bench, units):
        figures = result["figures"]
        if "failed" not in figures:
            changes.append(figures["perplexity"] / figures["base_perplexity"] - 1)
    return format_percent(mean_interval(changes), 2) if changes else "-"


def _ratio(
    numerators: dict[Key, float], denominators: dict[Key, float], groups: dict[Key, Any]
) -> Interval:
    names = [groups[key] for key in numerators]
    above = sum_groups(list(numerators.values()), names)
    below = sum_groups([denominators[key] for key in numerators], names)
    return ratio_interval(above, below)
