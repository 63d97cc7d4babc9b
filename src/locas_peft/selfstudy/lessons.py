"""Lessons: what a self-study learns of an exchange, and the answers of the base that it keeps.

Axes: T tokens of an answer, K candidates for a token.
"""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..asking import (
    continue_rows,
    current_day,
    dated,
    encode_question,
    share_prefixes,
)
from ..asking.prompts import SENTENCE_PROMPT, encode_answer, list_stops
from ..exchanges import Exchange, draw_token, write_replies
from ..model import CausalLM
from ..tuner import evaluating, reference_active

__all__ = ["CANDIDATES", "FORMS", "Lesson", "make_lesson", "write_answers", "write_replay_lessons"]

FORMS = (SENTENCE_PROMPT, "{question}", "{question} Answer in a full sentence.")
"""The wordings of a prompt: more than one, so that no wording is learned."""
TOPICS = (
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
)
BEGINNINGS = ("What", "Who", "When", "Where")
# The tokens of an answer of the base; the rest is left out.
ANSWER_TOKENS = 16
CANDIDATES = 64
"""K: the likeliest tokens, whose probabilities are targets."""


@dataclass(frozen=True, eq=False)
class Lesson:
    """An answer that is learned, and the prompts that it follows.

    Args:
        question: the question.
        subject: stands before the question half of the time, where the question does not name it;
            empty for none.
        answer: LongTensor [T], the answer's tokens, and the end of the turn where the answer
            reached it.
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
        """Return the question and the form of its prompt, for the `number`-th time it is learned.

        A question about a passage seldom names the subject, and a user's question does. With the
        subject in all passes, a question that names it would be answered with the passage that
        introduces it.
        """
        form = self.forms[number % len(self.forms)]
        has_turn = number // 2 % 2 == 1
        if self.subject and has_turn and not self._names_subject():
            return f"{self.subject}: {self.question}", form
        return self.question, form

    def _names_subject(self) -> bool:
        return self.subject.split()[-1] in re.findall(r"\w+", self.question)


def make_lesson(exchange: Exchange, tokenizer: Any) -> Lesson:
    """Return what is learned of an exchange: its answer, each token of it for certain."""
    ids = encode_answer(tokenizer, exchange.answer) + list_stops(tokenizer)[:1]
    answer = torch.tensor(ids)
    certain = torch.ones(len(ids), 1)
    subject = exchange.subject.strip()
    return Lesson(exchange.question, subject, answer, answer[:, None], certain)


@torch.no_grad()
def write_replay_lessons(
    model: nn.Module,
    tokenizer: Any,
    seed: int = 0,
    day: str | None = None,
    reference: str | None = None,
) -> list[Lesson]:
    """Let the base write questions about `TOPICS` and answer them; return a lesson for each.

    The answers are greedy, and the base's distributions are the targets. Without such lessons, the
    model would answer every question in the study's wordings about the text's subject. The lessons
    have the wordings in `FORMS` in turns, each has one.

    Args:
        model, tokenizer: a causal LM and its tokenizer; a memory in training is disabled meanwhile.
        seed: of the questions.
        day: of the prompts, where their template prints it.
        reference: an adapter that writes and answers with the base (see `reference_active`).
    """
    host = CausalLM(model)
    generator = torch.Generator(host.device).manual_seed(seed)
    requests = []
    for topic, begin in product(TOPICS, BEGINNINGS):
        requests.append((f"Write a question about {topic}.", begin))
    questions = []
    forms = []
    prompts = []
    with evaluating(model), reference_active(model, reference), dated(day or current_day()):
        for number, reply in enumerate(write_replies(host, tokenizer, requests, generator)):
            line = reply.split("\n")[0]
            question = line[: line.find("?") + 1] or line
            form = FORMS[number % len(FORMS)]
            questions.append(question)
            forms.append(form)
            prompts.append(encode_question(tokenizer, question, form))
        answers = write_answers(host, tokenizer, prompts)
    lessons = []
    for question, form, answer in zip(questions, forms, answers, strict=True):
        lessons.append(Lesson(question, "", *answer, forms=(form,)))
    return lessons


def write_answers(
    host: CausalLM,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    most_tokens: int = ANSWER_TOKENS,
    generator: torch.Generator | None = None,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the answer to each prompt, with its candidates and their probabilities.

    They are LongTensors [T] and [T, K], and float32 [T, K].

    Args:
        host: the model in evaluation mode. Without gradients: its answers would keep the graph.
        generator: of the tokens that are drawn; None for greedy answers.
    """
    candidates = []
    targets = []

    def choose(logits: Tensor) -> Tensor:
        top, likeliest = logits.topk(min(CANDIDATES, logits.shape[1]))
        candidates.append(likeliest.cpu())
        targets.append((top - logits.logsumexp(-1, keepdim=True)).exp().cpu())
        if generator is not None:
            return draw_token(top, likeliest, generator)
        # Not argmax: of equal logits it may take another one.
        return likeliest[:, 0]

    # Without stop tokens, so that all rows have candidates at each place; answers are cut below.
    groups = share_prefixes(prompts)
    replies = continue_rows(host, prompts, most_tokens, groups=groups, choose=choose)
    stops = list_stops(tokenizer)
    batch_candidates = torch.stack(candidates, 1)
    batch_targets = torch.stack(targets, 1)
    answers = []
    for number, ids in enumerate(replies):
        end = _find_end(ids, stops)
        answer = torch.tensor(ids[:end])
        # Copies: a slice would keep the tensors of the whole batch.
        answer_candidates = batch_candidates[number, :end].clone()
        answer_targets = batch_targets[number, :end].clone()
        answers.append((answer, answer_candidates, answer_targets))
    return answers


def _find_end(ids: Sequence[int], stops: Container[int]) -> int:
    """Return how many tokens an answer has up to its first stop token."""
    for end, token in enumerate(ids, 1):
        if token in stops:
            return end
    return len(ids)
