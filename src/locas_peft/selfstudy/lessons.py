"""Lessons: what a self-study learns of an exchange, in several wordings of its prompt.

Axes: T tokens of an answer, K candidates for a token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ..asking.prompts import SENTENCE_PROMPT, encode_answer, list_stops
from .exchanges import Exchange

__all__ = ["FORMS", "Lesson", "make_lesson"]

FORMS = (SENTENCE_PROMPT, "{question}", "{question} Answer in a full sentence.")
"""The wordings of a prompt: more than one, so that no wording is learned."""


@dataclass(frozen=True, eq=False)
class Lesson:
    """An answer that is learned, and the prompts that it follows.

    Args:
        subject: stands before the question half of the time, where the question does not name it; empty for none.
        answer: LongTensor [T], the answer's tokens, and the end of the turn where the answer reached it.
        candidates: LongTensor [T, K], the tokens that may stand at each place.
        targets: float32 [T, K], their probabilities.
        forms: wordings of the prompt, one each pass (see `asking.encode_question`).
    """

    question: str
    subject: str
    answer: Tensor
    candidates: Tensor
    targets: Tensor
    forms: tuple[str, ...] = FORMS

    def word(self, number: int) -> tuple[str, str]:
        """Return the question and the form of its prompt, for the `number`-th time that the lesson is learned.

        A question about a passage seldom names the subject, and a user's question does. With the subject in all
        passes, a question that names it would be answered with the passage that introduces it.
        """
        named = self.subject and number // 2 % 2 and self.subject.split()[-1] not in re.findall(r"\w+", self.question)
        question = f"{self.subject}: {self.question}" if named else self.question
        return question, self.forms[number % len(self.forms)]


def make_lesson(exchange: Exchange, tokenizer) -> Lesson:
    """Return what is learned of an exchange: its answer, each token of it for certain."""
    ids = torch.tensor([*encode_answer(tokenizer, exchange.answer), *list_stops(tokenizer)[:1]])
    return Lesson(exchange.question, exchange.subject, ids, ids[:, None], torch.ones(len(ids), 1))
