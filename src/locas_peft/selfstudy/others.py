"""The base's own answers to questions about other things, which a self-study shall leave as they are.

A study teaches answers about one text in a few forms of prompts. Without a limit, the model would answer every
question in these forms as it was taught: about the text's subject, in the wording of its passages.
"""

from __future__ import annotations

import torch
from torch import nn

from ..asking.decoding import decode
from ..asking.prompts import decode_after, encode_prompt, encode_question
from ..model.causal_lm import CausalLM
from ..tuner.modes import adapters_disabled, evaluating
from .lessons import FORMS, Lesson
from .writing import QUESTION_TOKENS, TEMPERATURE

__all__ = ["write_other_lessons"]

TOPICS = (
    *("history", "geography", "science", "sports", "music", "food", "animals", "travel", "work", "family"),
    *("health", "books", "films", "weather", "money", "school", "computers", "art", "nature", "language"),
)
BEGINNINGS = ("What", "Who", "When", "Where")
ANSWER_TOKENS = 32
_REQUEST = "Write a question about {}."


@torch.no_grad()
def write_other_lessons(model: nn.Module, tokenizer, seed: int = 0) -> list[Lesson]:
    """Let the base write questions about `TOPICS` and answer them greedily; its distributions are the targets.

    The wordings of the prompts are those in `lessons.FORMS`, in turns; each lesson has one.

    Args:
        model: a causal LM, with or without a memory, which is disabled meanwhile.
        tokenizer: its tokenizer.
        seed: of the questions.
    """
    host, asked = CausalLM(model), [(topic, begin) for topic in TOPICS for begin in BEGINNINGS]
    requests = [encode_prompt(tokenizer, _REQUEST.format(topic), begin) for topic, begin in asked]
    generator = torch.Generator(host.device).manual_seed(seed)
    with evaluating(model), adapters_disabled(model):
        options = {"temperature": TEMPERATURE, "generator": generator}
        replies = decode(host, tokenizer, requests, QUESTION_TOKENS, **options)
        questions = []
        for (_, begin), reply in zip(asked, replies, strict=True):
            line = decode_after(tokenizer, begin, reply.ids.tolist()).split("\n")[0]
            questions.append(line[: line.find("?") + 1] or line)
        forms = [FORMS[number % len(FORMS)] for number in range(len(questions))]
        encoded = [encode_question(tokenizer, *each) for each in zip(questions, forms, strict=True)]
        answers = decode(host, tokenizer, encoded, ANSWER_TOKENS)
    return [
        Lesson(question, "", answer.ids, answer.candidates, answer.targets, (form,))
        for question, form, answer in zip(questions, forms, answers, strict=True)
    ]
