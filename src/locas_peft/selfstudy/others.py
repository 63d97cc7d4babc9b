"""The base's own answers to questions about other things, which a self-study shall leave as they are.

A study teaches answers about one text in a few forms of prompts. Without a limit, the model would answer every
question in these forms as it was taught: about the text's subject, in the wording of its passages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..text import encode_prompt
from ..ttt.host import Host
from ..tuner.passes import adapters_disabled, evaluating
from .decoding import decode, encode_question
from .exchanges import Exchange
from .writing import ANSWER_TOKENS, QUESTION_TOKENS, TEMPERATURE, Lesson

__all__ = ["write_other_lessons"]

TOPICS = (
    *("history", "geography", "science", "sports", "music", "food", "animals", "travel", "work", "family"),
    *("health", "books", "films", "weather", "money", "school", "computers", "art", "nature", "language"),
)
BEGINNINGS = ("What", "Who", "When", "Where")
_REQUEST = "Write a question about {}."


@torch.no_grad()
def write_other_lessons(model: nn.Module, tokenizer, forms: Sequence[str], seed: int = 0) -> list[Lesson]:
    """Let the base write questions about `TOPICS` and answer them greedily; its distributions are the targets.

    Args:
        model: a causal LM, with or without a memory, which is disabled meanwhile.
        tokenizer: its tokenizer.
        forms: wordings of the prompts (see `encode_question`), in turns; the lessons' questions are whole prompts.
        seed: of the questions.
    """
    host, asked = Host(model), [(topic, begin) for topic in TOPICS for begin in BEGINNINGS]
    requests = [encode_prompt(tokenizer, _REQUEST.format(topic), begin) for topic, begin in asked]
    generator = torch.Generator(host.device).manual_seed(seed)
    with evaluating(model), adapters_disabled(model):
        options = {"temperature": TEMPERATURE, "generator": generator}
        replies = decode(host, tokenizer, requests, QUESTION_TOKENS, **options)
        prompts = []
        for number, ((_, begin), reply) in enumerate(zip(asked, replies, strict=True)):
            line = (begin + tokenizer.decode(reply.ids, skip_special_tokens=True)).split("\n")[0]
            question = line[: line.find("?") + 1] or line
            prompts.append(forms[number % len(forms)].format(question=question, context=""))
        encoded = [encode_question(tokenizer, prompt, "{question}") for prompt in prompts]
        answers = decode(host, tokenizer, encoded, ANSWER_TOKENS)
    return [
        Lesson(Exchange(prompt, tokenizer.decode(answer.ids)), answer.ids, answer.candidates, answer.targets)
        for prompt, answer in zip(prompts, answers, strict=True)
        if len(answer.ids)
    ]
