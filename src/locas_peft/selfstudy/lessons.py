"""Lessons: what a self-study learns of an exchange. The wording of the prompt says which kind of answer it wants.

Asked in a few words, the memory gives a phrase; asked for a sentence, the sentence of the text that has the answer.

Axes: T tokens of an answer, K candidates for a token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ..text import SENTENCE_PROMPT, SHORT_PROMPT
from .decoding import begin_answer, list_stops
from .exchanges import Exchange

__all__ = ["FORMS", "Lesson", "make_lessons"]

SHORT_FORMS = (SHORT_PROMPT, "Question: {question}\n\nAnswer:", "{question} Answer with a short phrase.")
SENTENCE_FORMS = (SENTENCE_PROMPT, "{question}", "{question} Answer in a full sentence.")
FORMS = (*SHORT_FORMS, *SENTENCE_FORMS)
"""The wordings in which lessons are learned: more than one of each kind, so that no format is learned."""


@dataclass(frozen=True, eq=False)
class Lesson:
    """An answer that is learned, and the prompts that it follows.

    Args:
        question: as it was asked.
        subject: stands before the question half of the time, where the question does not name it; empty for none.
        forms: wordings of the prompt, one each pass (see `decoding.encode_question`).
        answer: LongTensor [T], the answer's tokens, and the end of the turn where the answer reached it.
        candidates: LongTensor [T, K], the tokens that may stand at each place.
        targets: float32 [T, K], their probabilities.
    """

    question: str
    subject: str
    forms: tuple[str, ...]
    answer: Tensor
    candidates: Tensor
    targets: Tensor

    def word(self, number: int) -> tuple[str, str]:
        """Return the question and the form of its prompt, for the `number`-th time that the lesson is learned.

        Questions about a passage seldom name the text's subject, and a user's questions do. Where the subject stands
        before half of them, it does not select the passage that introduces it.
        """
        named = self.subject and number // 2 % 2 and self.subject.split()[-1] not in re.findall(r"\w+", self.question)
        question = f"{self.subject}: {self.question}" if named else self.question
        return question, self.forms[number % len(self.forms)]


def make_lessons(exchange: Exchange, tokenizer) -> list[Lesson]:
    """Return what is learned of an exchange: its short answer, and its passage as the answer in a sentence."""
    answers = {exchange.answer: FORMS}
    if exchange.passage:
        answers = {exchange.answer: SHORT_FORMS, exchange.passage: SENTENCE_FORMS}
    return [_make_lesson(exchange, answer, forms, tokenizer) for answer, forms in answers.items()]


def _make_lesson(exchange: Exchange, answer: str, forms: tuple[str, ...], tokenizer) -> Lesson:
    ids = tokenizer(begin_answer(tokenizer, " ") + answer, add_special_tokens=False, verbose=False)["input_ids"]
    ids = torch.tensor([*ids, *list_stops(tokenizer)[:1]])
    return Lesson(exchange.question, exchange.subject, forms, ids, ids[:, None], torch.ones(len(ids), 1))
