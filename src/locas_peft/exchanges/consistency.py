"""Drop the questions that fit another passage better than their own.

A small model also writes questions that its passage does not answer, such as one about the whole
text. The likelihood of a question after a passage tells which passage it is about: query likelihood
(Sachan et al., 2022, arXiv:2204.07496), used here as round-trip consistency (Alberti et al., 2019,
arXiv:1906.05416). A question is then seldom learned with two passages.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

from torch import nn

from ..asking import encode_answer, encode_prompt
from ..asking.scoring import score_targets
from ..text import Passage, list_content_words

__all__ = ["keep_consistent"]

RIVALS = 3
"""The other passages that a question is compared with: those that have the most of its words."""


def keep_consistent(
    model: nn.Module,
    tokenizer: Any,
    questions: Sequence[tuple[Passage, str]],
    prompts: Mapping[Passage, str],
) -> list[tuple[Passage, str]]:
    """Return the questions, each with its passage, that no other passage makes likelier.

    Args:
        model, tokenizer: a causal LM in evaluation mode, without a memory, and its tokenizer.
        prompts: of each passage, the prompt that asks the model for a question about it.
    """
    words = {passage: list_content_words(passage.text) for passage in prompts}
    targets = [encode_answer(tokenizer, question) for _, question in questions]
    # The numbers of the questions that are scored after each passage.
    numbers: dict[Passage, list[int]] = {passage: [] for passage in prompts}
    for number, (own, question) in enumerate(questions):
        for passage in (own, *_find_rivals(own, question, words)):
            numbers[passage].append(number)
    own_nats = [0.0] * len(questions)
    rival_nats = [math.inf] * len(questions)
    for passage, asked in numbers.items():
        prompt = encode_prompt(tokenizer, prompts[passage])
        pairs = [(prompt, targets[number]) for number in asked]
        scores = score_targets(model, pairs, shared=len(prompt) - 1)
        for number, score in zip(asked, scores, strict=True):
            if questions[number][0] == passage:
                own_nats[number] = score.nll_nats
            else:
                rival_nats[number] = min(rival_nats[number], score.nll_nats)
    is_kept = [own <= rival for own, rival in zip(own_nats, rival_nats, strict=True)]
    return list(compress(questions, is_kept))


def _find_rivals(
    own: Passage, question: str, words: Mapping[Passage, frozenset[str]]
) -> list[Passage]:
    """Return the other passages with the most words of a question, at most `RIVALS`."""
    question_words = list_content_words(question)
    shared = {}
    for passage, passage_words in words.items():
        count = len(question_words & passage_words)
        if count and passage.text != own.text:
            shared[passage] = count
    return sorted(shared, key=lambda passage: -shared[passage])[:RIVALS]
