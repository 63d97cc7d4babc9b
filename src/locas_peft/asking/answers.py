"""Ask a model: questions about a text, conversations, and how many answers are right."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..files import load_json_lines
from ..model import count_positions
from ..text import holds_phrase
from .continuation import answer_in_batches, check_room, continue_texts
from .prompts import encode_question, fit_turns, put_before

__all__ = ["Answer", "Answerer", "Question", "Turns", "count_right", "is_right", "load_questions"]

Turns = Sequence[dict[str, str]]
"""A conversation: dicts with `role` and `content`, the user's message last."""


@dataclass(frozen=True)
class Question:
    """A question and, where it is known, its gold answer."""

    question: str
    answer: str | None = None


@dataclass(frozen=True)
class Answer:
    """An answer to a question.

    Attributes:
        memories: the names of the library's memories that gave it; none where the base answered
            alone.
        source: the sentence of the memory's text that fits the question best; None where none was
            looked for or found.
    """

    question: Question
    text: str
    memories: tuple[str, ...] = ()
    source: str | None = None

    @property
    def right(self) -> bool | None:
        """Whether the gold answer occurs in the text; None where there is no gold answer."""
        if self.question.answer is None:
            return None
        return is_right(self.text, self.question.answer)


class Answerer:
    """Answers questions and continues conversations with one model, which is not changed.

    Args:
        model: a causal LM in evaluation mode, with or without a memory.
        tokenizer: of the model. Its chat template is used where it has one.
        context: a text that stands before each question or message; empty for none.
        max_new_tokens: the most tokens of an answer.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, *, context: str = "", max_new_tokens: int = 64
    ):
        self._model = model
        self._tokenizer = tokenizer
        self._context = context
        self._max_new_tokens = max_new_tokens

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Answer each question in one sentence; the likeliest tokens are taken.

        Raises:
            ValueError: a question with its context and its answer exceeds the model's positions.
        """
        prompts = [
            encode_question(self._tokenizer, question.question, context=self._context)
            for question in questions
        ]
        texts = [""] * len(prompts)
        batches = answer_in_batches(
            self._model, self._tokenizer, prompts, max_new_tokens=self._max_new_tokens
        )
        for numbers, batch_texts in batches:
            for number, text in zip(numbers, batch_texts, strict=True):
                texts[number] = text
        return [Answer(question, text) for question, text in zip(questions, texts, strict=True)]

    def reply(
        self,
        conversations: Sequence[Turns],
        *,
        temperature: float = 0.0,
        seed: int = 0,
        adapters: Sequence[str] | None = None,
        on_text: Callable[[list[str]], None] | None = None,
    ) -> list[Answer]:
        """Reply to the last message of each conversation, in one batch.

        The oldest messages are left out where a conversation exceeds the model's positions.

        Args:
            temperature: 0 takes the likeliest tokens; above 0, tokens are drawn.
            seed: of the tokens that are drawn.
            adapters: one adapter's name for each conversation (see `CausalLM.logits`).
            on_text: is shown the replies so far, after each token.

        Raises:
            ValueError: a last message with its reply exceeds the model's positions.
        """
        if not conversations:
            return []
        prompts = [self._encode(turns) for turns in conversations]
        texts = continue_texts(
            self._model,
            self._tokenizer,
            prompts,
            self._max_new_tokens,
            temperature=temperature,
            seed=seed,
            adapters=adapters,
            on_text=on_text,
        )
        replies = []
        for turns, text in zip(conversations, texts, strict=True):
            replies.append(Answer(Question(turns[-1]["content"]), text.strip()))
        return replies

    def _encode(self, turns: Turns) -> list[int]:
        message = {**turns[-1], "content": put_before(self._context) + turns[-1]["content"]}
        positions = count_positions(self._model)
        most_tokens = None if positions is None else positions - self._max_new_tokens
        prompt = fit_turns(self._tokenizer, [*turns[:-1], message], most_tokens)
        check_room(self._model, prompt, self._max_new_tokens, "message")
        return prompt


def load_questions(path: str | Path) -> list[Question]:
    """Load questions from JSON Lines: an object a line with `question` and maybe `answer`.

    Errors are those of `files.load_json_lines`.
    """
    return load_json_lines(
        path, _parse_question, "questions", "`question` and maybe `answer`, which are texts"
    )


def _parse_question(value: dict[str, Any]) -> Question:
    question = Question(value["question"], value.get("answer"))
    if not isinstance(question.question, str) or not isinstance(question.answer, str | None):
        raise TypeError
    # Every text has an empty gold answer within.
    if question.answer is not None and not question.answer.strip():
        raise TypeError
    return question


def count_right(answers: Sequence[Answer]) -> int:
    """Return how many answers are right; a question without a gold answer does not count."""
    return sum(answer.right is True for answer in answers)


def is_right(text: str, gold: str) -> bool:
    """Return whether the gold phrase occurs in an answer's text as whole words, in any script.

    Case, white space and the leading English article of the gold phrase do not matter.
    """
    phrase = re.sub(r"^(a|an|the)\s+", "", gold.strip(), flags=re.IGNORECASE)
    return holds_phrase(text, phrase)
