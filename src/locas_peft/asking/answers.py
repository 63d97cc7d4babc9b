"""Ask a model questions about a text, and count how many of its answers are right."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..files import load_json_lines
from ..tuner import adapters_disabled
from .continuation import answer
from .prompts import SHORT_PROMPT, encode_answer, encode_question
from .scoring import score_targets

__all__ = ["Question", "answer_all", "answer_from", "ask", "ask_by_reciting", "count_right"]
__all__ += ["is_right", "load_questions", "measure_gain"]

Find = Callable[
    [Sequence[str]], list[dict[str, float]]
]  # passages and scores, the best first: `selfstudy.Finder`


@dataclass(frozen=True)
class Question:
    """A question and, where it is known, its gold answer."""

    question: str
    answer: str | None = None


def load_questions(path: str | Path) -> list[Question]:
    """Load questions from a JSON Lines file: an object a line with `question` and, if known, `answer`.

    Errors are those of `files.load_json_lines`.
    """
    return load_json_lines(
        path, _parse_question, "questions", "`question` and maybe `answer`, which are texts"
    )


def _parse_question(value: dict[str, Any]) -> Question:
    found = Question(value["question"], value.get("answer"))
    if not isinstance(found.question, str) or not isinstance(found.answer, str | None):
        raise TypeError
    return found


def ask(
    model: nn.Module,
    tokenizer,
    questions: Sequence[Question],
    *,
    context: str | None = None,
    max_new_tokens: int = 64,
) -> list[str]:
    """Ask a model questions, at least one, each for an answer in one sentence; answers are greedy.

    `context` is a text that stands before each question. The tokenizer's chat template is used where it has one. The
    model, with or without a memory, is only read. What is longer than its positions is a `ValueError`.
    """
    prompts = [
        encode_question(tokenizer, asked.question, context=context or "") for asked in questions
    ]
    return answer_all(model, tokenizer, prompts, max_new_tokens)


def ask_by_reciting(
    model: nn.Module,
    tokenizer,
    questions: Sequence[Question],
    find: Find,
    *,
    passage=False,
    max_new_tokens=64,
) -> tuple[list[str], list[list[str]]]:
    """Answer each question from the passages that `find` finds; return these too.

    The base answers in a few words with the passages in its context (Sun et al., 2023, arXiv:2210.01296). With
    `passage` the best one is the answer, where one is found.
    """
    found = [list(each) for each in find([asked.question for asked in questions])]
    answers = [passages[0] if passages and passage else "" for passages in found]
    left = [number for number, given in enumerate(answers) if not given]
    asked, passages = ([each[number] for number in left] for each in (questions, found))
    with adapters_disabled(model):
        for number, given in zip(
            left, answer_from(model, tokenizer, asked, passages, max_new_tokens), strict=True
        ):
            answers[number] = given
    return answers, found


def answer_from(
    model: nn.Module,
    tokenizer,
    questions: Sequence[Question],
    passages: Sequence[Sequence[str]],
    max_new_tokens=32,
) -> list[str]:
    """Answer questions in a few words, each with its passages in the context."""
    both = zip(questions, map("\n".join, passages), strict=True)
    prompts = [
        encode_question(tokenizer, asked.question, SHORT_PROMPT, context) for asked, context in both
    ]
    return answer_all(model, tokenizer, prompts, max_new_tokens)


def measure_gain(
    model: nn.Module, tokenizer, prompts: Sequence[Sequence[int]], answers: Sequence[str]
) -> list[float]:
    """Return by how many nats a token a memory makes its answers to prompts likelier than the base does.

    What the base would say as well has about 0, what a studied memory recites 2 to 5, and an empty answer 0.
    """
    pairs = [
        (prompt, encode_answer(tokenizer, given))
        for prompt, given in zip(prompts, answers, strict=True)
    ]
    own = score_targets(model, pairs)
    with adapters_disabled(model):
        both = zip(score_targets(model, pairs), own, answers, strict=True)
    return [
        base.per_token - with_memory.per_token if given else 0.0
        for base, with_memory, given in both
    ]


def answer_all(
    model: nn.Module, tokenizer, prompts: Sequence[list[int]], max_new_tokens: int = 64
) -> list[str]:
    """Return the first line of a greedy answer to each prompt (see `continuation.answer`)."""
    answers: dict[int, str] = {}
    for batch, texts in answer(model, tokenizer, prompts, max_new_tokens=max_new_tokens):
        answers.update(zip(batch, texts, strict=True))
    return [answers[number] for number in range(len(prompts))]


def count_right(answers: Sequence[str], questions: Sequence[Question]) -> int:
    """Return how many answers are right; each question has a gold answer."""
    return sum(
        is_right(given, asked.answer) for given, asked in zip(answers, questions, strict=True)
    )


def is_right(given: str, gold: str) -> bool:
    """Return whether the gold phrase occurs in an answer as whole words, case-folded, without its leading article."""
    given, gold = (" ".join(each.casefold().split()) for each in (given, gold))
    return (
        re.search(rf"(?<!\w){re.escape(re.sub('^(a|an|the) ', '', gold))}(?!\w)", given) is not None
    )
