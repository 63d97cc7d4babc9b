"""The base's own answers to everyday questions: text on which a memory of something else should change nothing."""

from __future__ import annotations

import torch
from torch import nn

from ..asking import answer, encode_prompt

__all__ = ["NAME", "write_own_answers"]

NAME = "own answers"
"""In the figures of the forgetting protocol, beside the names of the unread texts."""
QUESTIONS = (
    "What is the capital of France?",
    "How do I boil an egg?",
    "Write a short poem about the sea.",
    "What is photosynthesis?",
    "Give me three tips for learning a language.",
    "Who wrote Romeo and Juliet?",
    "Explain what a computer program is.",
    "What should I pack for a week in the mountains?",
    "How does a bicycle stay upright?",
    "Translate 'good morning' into Spanish.",
    "What is 12 times 8?",
    "Why is the sky blue?",
    "Suggest a name for a cat.",
    "What is the difference between a lake and a river?",
    "How can I sleep better?",
    "Tell me a fact about elephants.",
)


def write_own_answers(base: nn.Module, tokenizer, max_new_tokens: int = 48) -> list[tuple[torch.Tensor, int]]:
    """Let a base answer `QUESTIONS` greedily, by its chat template where it has one.

    Returns:
        Of each answer that is not empty the token ids of question and answer, LongTensor [T], and how many of the last
        ones are the answer's: what `drift.measure_drift` scores.
    """
    prompts = [encode_prompt(tokenizer, question) for question in QUESTIONS]
    pieces = []
    for batch, texts in answer(base, tokenizer, prompts, max_new_tokens=max_new_tokens):
        for number, text in zip(batch, texts, strict=True):
            reply = tokenizer(text, add_special_tokens=False)["input_ids"]
            if reply:
                pieces.append((torch.tensor([*prompts[number], *reply]), len(reply)))
    return pieces
