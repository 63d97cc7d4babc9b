"""The base's own answers to questions about other things, which a self-study shall leave as they are.

A study of a text teaches answers in a few forms of prompts. Without a limit the model answers every question in these
forms as it was taught, about the text's subject and in the wording of its passages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..text import encode_prompt
from ..ttt.host import Host
from ..ttt.objectives import divergences
from ..tuner.passes import adapters_disabled, evaluating
from .decoding import decode, encode_question, pad_left
from .writing import ANSWER_TOKENS, QUESTION_TOKENS, TEMPERATURE

__all__ = ["OtherAnswers"]

TOPICS = (
    *("history", "geography", "science", "sports", "music", "food", "animals", "travel", "work", "family"),
    *("health", "books", "films", "weather", "money", "school", "computers", "art", "nature", "language"),
)
BEGINNINGS = ("What", "Who", "When", "Where")
_REQUEST = "Write a question about {}."
_BATCH = 8


class OtherAnswers:
    """Questions about other things and the base's answers, in the forms of a study; and the KL from the base on them.

    Args:
        model: a causal LM with an adapter.
        tokenizer: its tokenizer.
        forms: the wordings of the prompts, see `encode_question`.
        seed: of the questions.

    Attributes:
        rows: (prompt ids, answer ids), written at the first use.
    """

    def __init__(self, model: nn.Module, tokenizer, forms: Sequence[str], seed: int = 0):
        self._model, self._tokenizer, self._forms, self._seed = model, tokenizer, forms, seed
        self._host = Host(model)
        self.rows: list[tuple[list[int], list[int]]] = []

    def loss(self, number: int) -> Tensor:
        """Return KL(base || with the adapter) of batch `number` (from 0), the mean over its tokens, in nats."""
        if not self.rows:
            with torch.no_grad(), evaluating(self._model), adapters_disabled(self._model):
                self.rows = self._write()
        rows = [self.rows[(number * _BATCH + row) % len(self.rows)] for row in range(_BATCH)]
        inputs = pad_left([[*prompt, *answer[:-1]] for prompt, answer in rows], 0, self._host.device)
        count = max(len(answer) for _, answer in rows)
        with torch.no_grad(), adapters_disabled(self._model):
            base = self._host.logits(count=count, **inputs)
        logits = self._host.logits(count=count, **inputs)
        kls = [divergences(logits[n][-len(answer) :], base[n][-len(answer) :]) for n, (_, answer) in enumerate(rows)]
        return torch.cat(kls).mean()

    def _write(self) -> list[tuple[list[int], list[int]]]:
        """Let the base write the questions and answer them, greedily; a reply that is no question is kept too."""
        asked = [(topic, begin) for topic in TOPICS for begin in BEGINNINGS]
        requests = [encode_prompt(self._tokenizer, _REQUEST.format(topic), begin) for topic, begin in asked]
        generator = torch.Generator(self._host.device).manual_seed(self._seed)
        options: dict[str, Any] = {"temperature": TEMPERATURE, "generator": generator}
        replies = decode(self._host, self._tokenizer, requests, QUESTION_TOKENS, **options)
        prompts = []
        for number, ((_, begin), reply) in enumerate(zip(asked, replies, strict=True)):
            line = (begin + self._tokenizer.decode(reply.ids, skip_special_tokens=True)).split("\n")[0]
            question = line[: line.find("?") + 1] or line
            prompts.append(encode_question(self._tokenizer, question, self._forms[number % len(self._forms)]))
        answers = decode(self._host, self._tokenizer, prompts, ANSWER_TOKENS)
        return [(prompt, answer.ids.tolist()) for prompt, answer in zip(prompts, answers, strict=True)]
