"""Replay: the base's own answers to questions about other subjects, which a self-study leaves as they are.

Without this limit, the model would answer every question in the study's forms of prompts about the text's subject.

Axes: B rows of a batch, T tokens of an answer, K candidates for a token, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..asking import continue_rows, encode_question, find_pad_token, share_prefixes
from ..asking.prompts import list_stops
from ..model import CausalLM
from ..tuner import adapters_disabled, evaluating
from .lessons import FORMS, Lesson
from .writing import write_replies

__all__ = ["write_replay_lessons"]

TOPICS = (
    *("history", "geography", "science", "sports", "music", "food", "animals", "travel", "work", "family"),
    *("health", "books", "films", "weather", "money", "school", "computers", "art", "nature", "language"),
)
BEGINNINGS = ("What", "Who", "When", "Where")
ANSWER_TOKENS = 32
CANDIDATES = 64
"""K: the likeliest tokens, whose probabilities are kept."""


@torch.no_grad()
def write_replay_lessons(model: nn.Module, tokenizer, seed: int = 0) -> list[Lesson]:
    """Let the base write questions about `TOPICS` and answer them greedily; its distributions are the targets.

    The wordings of the prompts are those in `lessons.FORMS`, in turns; each lesson has one. The model's memory is
    disabled meanwhile. `seed` is that of the questions.
    """
    host, asked = CausalLM(model), [(topic, begin) for topic in TOPICS for begin in BEGINNINGS]
    generator = torch.Generator(host.device).manual_seed(seed)
    with evaluating(model), adapters_disabled(model):
        requests = [(f"Write a question about {topic}.", begin) for topic, begin in asked]
        lines = [reply.split("\n")[0] for reply in write_replies(host, tokenizer, requests, generator)]
        questions = [line[: line.find("?") + 1] or line for line in lines]
        forms = [FORMS[number % len(FORMS)] for number in range(len(questions))]
        prompts = [encode_question(tokenizer, *each) for each in zip(questions, forms, strict=True)]
        answers = _answer(host, tokenizer, prompts)
    of_each = zip(questions, forms, answers, strict=True)
    return [Lesson(question, "", *answer, (form,)) for question, form, answer in of_each]


def _answer(host: CausalLM, tokenizer, prompts: list[list[int]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return greedy answers, LongTensor [T], their candidates [T, K], and the probabilities of these, [T, K]."""
    candidates, targets = [], []

    def choose(logits: Tensor) -> Tensor:
        top, likeliest = logits.topk(min(CANDIDATES, logits.shape[1]))
        candidates.append(likeliest.cpu())
        targets.append((top - logits.logsumexp(-1, keepdim=True)).exp().cpu())
        return likeliest[:, 0]  # not argmax: of equal logits it may take another one

    options = {"pad": find_pad_token(tokenizer), "stops": list_stops(tokenizer), "choose": choose}
    answers = continue_rows(host, prompts, ANSWER_TOKENS, groups=share_prefixes(prompts), **options)
    rows = zip(answers, torch.stack(candidates, 1), torch.stack(targets, 1), strict=True)
    return [(torch.tensor(ids), of[: len(ids)].clone(), shares[: len(ids)].clone()) for ids, of, shares in rows]
