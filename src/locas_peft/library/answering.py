"""Answer questions with the memories of a library."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from ..asking.answers import Answer, Answerer, Question, Turns
from .library import Library

__all__ = ["LibraryAnswerer"]


class LibraryAnswerer:
    """Answers each question with the memory of a library that it is about, or with the base.

    An answer's `memories` name the memory; they are empty where the base answered.

    Args:
        library: where the memories are found (see `Library.route`).
        base: of the memories, without adapters, in evaluation mode; it is mutated while it answers,
            and then restored.
        tokenizer: of the base.
        options: of `Answerer`.
    """

    def __init__(self, library: Library, base: PreTrainedModel, tokenizer: Any, **options: Any):
        self._library = library
        self._base = base
        self._tokenizer = tokenizer
        self._options = options

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Answer each question in one sentence. Errors are those of `Answerer.answer`."""
        texts = [question.question for question in questions]
        return self._ask(texts, questions, Answerer.answer)

    def reply(self, conversations: Sequence[Turns], **options: Any) -> list[Answer]:
        """Reply to each conversation. Options and errors are those of `Answerer.reply`."""
        texts = [turns[-1]["content"] for turns in conversations]
        return self._ask(texts, conversations, partial(Answerer.reply, **options))

    def _ask(
        self, texts: Sequence[str], inputs: Sequence[Any], ask: Callable[..., list[Answer]]
    ) -> list[Answer]:
        """Let each memory answer the inputs whose texts are about it; keep their order."""
        answers: dict[int, Answer] = {}
        for name, numbers in self._route(texts):
            group = [inputs[number] for number in numbers]
            with self._library.attach(self._base, name) as model:
                group_answers = ask(Answerer(model, self._tokenizer, **self._options), group)
            answers.update(zip(numbers, _name_memory(group_answers, name), strict=True))
        return [answers[number] for number in range(len(inputs))]

    def _route(self, texts: Sequence[str]) -> Iterator[tuple[str | None, list[int]]]:
        """Yield for each memory its name, None for the base, and the numbers of its texts."""
        routed = self._library.route(texts)
        for name in dict.fromkeys(routed):
            yield name, [number for number, other in enumerate(routed) if other == name]


def _name_memory(answers: Sequence[Answer], name: str | None) -> list[Answer]:
    memories = () if name is None else (name,)
    return [replace(answer, memories=memories) for answer in answers]
