"""Lessons: what a self-study learns of an exchange, in several wordings of its prompt, and what it leaves as it is.

Axes: T tokens of an answer, K candidates for a token.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..asking import continue_rows, encode_question, find_pad_token, share_prefixes
from ..asking.prompts import SENTENCE_PROMPT, encode_answer, list_stops
from ..model import CausalLM
from ..tuner import adapters_disabled, evaluating
from .exchanges import Exchange
from .writing import write_replies

__all__ = ["FORMS", "Lesson", "make_lesson", "write_replay_lessons"]

FORMS = (SENTENCE_PROMPT, "{question}", "{question} Answer in a full sentence.")
"""The wordings of a prompt: more than one, so that no wording is learned."""
TOPICS = (
    *(
        "history",
        "geography",
        "science",
        "sports",
        "music",
        "food",
        "animals",
        "travel",
        "work",
        "family",
    ),
    *(
        "health",
        "books",
        "films",
        "weather",
        "money",
        "school",
        "computers",
        "art",
        "nature",
        "language",
    ),
)
BEGINNINGS = ("What", "Who", "When", "Where")
ANSWER_TOKENS = 16  # of other answers: the first ones are kept
CANDIDATES = 64  # K: the likeliest tokens, whose probabilities are kept


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
        named = (
            self.subject
            and number // 2 % 2
            and self.subject.split()[-1] not in re.findall(r"\w+", self.question)
        )
        question = f"{self.subject}: {self.question}" if named else self.question
        return question, self.forms[number % len(self.forms)]


def make_lesson(exchange: Exchange, tokenizer) -> Lesson:
    """Return what is learned of an exchange: its answer, each token of it for certain."""
    ids = torch.tensor([*encode_answer(tokenizer, exchange.answer), *list_stops(tokenizer)[:1]])
    return Lesson(exchange.question, exchange.subject, ids, ids[:, None], torch.ones(len(ids), 1))


@torch.no_grad()
def write_replay_lessons(model: nn.Module, tokenizer, seed: int = 0) -> list[tuple[Any, ...]]:
    """Let the base write questions about `TOPICS` and answer them greedily; its distributions are the targets.

    Return the fields of a `Lesson` for each question.

    Without such lessons, the model would answer every question in the study's wordings about the text's subject.
    The wordings of the prompts are those in `lessons.FORMS`, in turns; each lesson has one. The model's memory is
    disabled meanwhile. `seed` is that of the questions.
    """
    host, asked = CausalLM(model), [(topic, begin) for topic in TOPICS for begin in BEGINNINGS]
    generator = torch.Generator(host.device).manual_seed(seed)
    with evaluating(model), adapters_disabled(model):
        requests = [(f"Write a question about {topic}.", begin) for topic, begin in asked]
        lines = [
            reply.split("\n")[0] for reply in write_replies(host, tokenizer, requests, generator)
        ]
        questions = [line[: line.find("?") + 1] or line for line in lines]
        forms = [FORMS[number % len(FORMS)] for number in range(len(questions))]
        prompts = [encode_question(tokenizer, *each) for each in zip(questions, forms, strict=True)]
        answers = _answer(host, tokenizer, prompts)
    return [
        (question, "", *answer, (form,))
        for question, form, answer in zip(questions, forms, answers, strict=True)
    ]


def _answer(
    host: CausalLM, tokenizer, prompts: list[list[int]]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return greedy answers, LongTensor [T], their candidates [T, K], and the probabilities of these, [T, K]."""
    candidates, targets = [], []

    def choose(logits: Tensor) -> Tensor:
        top, likeliest = logits.topk(min(CANDIDATES, logits.shape[1]))
        candidates.append(likeliest.cpu())
        targets.append((top - logits.logsumexp(-1, keepdim=True)).exp().cpu())
        return likeliest[:, 0]  # not argmax: of equal logits it may take another one

    # Without stop tokens, so that all rows have candidates at each place; answers are cut afterwards.
    options = {
        "pad": find_pad_token(tokenizer),
        "choose": choose,
        "groups": share_prefixes(prompts),
    }
    stops = list_stops(tokenizer)
    answers = continue_rows(host, prompts, ANSWER_TOKENS, **options)
    ends = [
        next((end for end, token in enumerate(ids, 1) if token in stops), len(ids))
        for ids in answers
    ]
    rows = zip(answers, ends, torch.stack(candidates, 1), torch.stack(targets, 1), strict=True)
    return [
        (torch.tensor(ids[:end]), of[:end].clone(), shares[:end].clone())
        for ids, end, of, shares in rows
    ]
