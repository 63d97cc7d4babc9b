"""Recall: answers to questions about a text, and how many of them are right."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ..text import SENTENCE_PROMPT, encode_prompt
from .answering import answer

__all__ = ["Question", "ask", "count_right", "encode_questions", "is_right", "load_questions"]


@dataclass(frozen=True)
class Question:
    """A question and, where it is known, its gold answer."""

    question: str
    answer: str | None = None


def load_questions(path: str | Path) -> list[Question]:
    """Load questions from a JSON Lines file: an object a line with `question` and, if known, `answer`.

    Raises:
        ValueError: a line is no such object; the message has its number. Or the file has no questions.
        OSError: the file cannot be opened.
    """
    questions = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if not isinstance(value["question"], str) or not isinstance(value.get("answer"), str | None):
                raise TypeError("question and answer must be strings")
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"line {number} of {str(path)!r} must be a JSON object with `question` and maybe `answer` ({error}): "
                "correct that line"
            ) from None
        questions.append(Question(value["question"], value.get("answer")))
    if not questions:
        raise ValueError(f"questions must be one a line, got none in {str(path)!r}: add one")
    return questions


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
    model, with or without a memory, is only read.

    Raises:
        ValueError: context, question and answer are longer than the model's positions.
    """
    prompts = encode_questions(tokenizer, questions, context)
    answers = {}
    for batch, texts in answer(model, tokenizer, prompts, max_new_tokens=max_new_tokens):
        answers.update(zip(batch, texts, strict=True))
    return [answers[number] for number in range(len(prompts))]


def encode_questions(
    tokenizer, questions: Sequence[Question], context: str | None = None, form: str = SENTENCE_PROMPT
) -> list[list[int]]:
    """Return the token ids of each question's prompt, by the chat template where there is one; see `ask`."""
    before = "" if context is None else f"Read this text.\n\n{context.strip()}\n\n"
    prompts = (form.format(context=before, question=question.question) for question in questions)
    return [encode_prompt(tokenizer, prompt) for prompt in prompts]


def count_right(answers: Sequence[str], questions: Sequence[Question]) -> int:
    """Return how many answers are right; each question has a gold answer."""
    return sum(is_right(given, asked.answer) for given, asked in zip(answers, questions, strict=True))


def is_right(given: str, gold: str) -> bool:
    """Return whether the gold phrase occurs in an answer as whole words, case-folded, without its leading article."""
    phrase = re.sub(r"^(a|an|the)\s+", "", " ".join(gold.casefold().split()))
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", " ".join(given.casefold().split())) is not None
