"""The cloze: what a memory knows of a conversation, for models that are too small to answer questions.

Where a gold answer stands word for word in one of its evidence turns, the turn up to that span is the prompt and the
span is the target; nothing else is in context. Two figures: how many nats a token the memory saves on the span, and
how often the span beats three other spans of the same conversation.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from torch import nn

from .locomo import ADVERSARIAL, Conversation, Question
from .scoring import encode_pair, score_targets

OTHERS = 3
"""How many other spans each span is ranked among: by chance a quarter of all spans come first."""


@dataclass(frozen=True)
class Span:
    """A gold answer in its turn.

    Attributes:
        sample_id: the conversation.
        dia_id: the turn.
        index: place of the question, the first one that this span answers.
        category: the question's.
        prompt: "Speaker: " and the turn's text up to the span.
        text: the span as it stands in the turn.
        others: three other spans of the conversation; fewer where it has no more.
    """

    sample_id: str
    dia_id: str
    index: int
    category: int
    prompt: str
    text: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class SpanScore:
    """A span under one model: nats a token of the span and of each of the others after the same prompt."""

    sample_id: str
    dia_id: str
    index: int
    category: int
    prompt: str
    text: str
    others: tuple[str, ...]
    nll_per_token: float
    others_nll_per_token: tuple[float, ...]
    tokens: int

    @property
    def first(self) -> bool:
        """Whether the span beats all the others; a draw is no win."""
        return all(self.nll_per_token < other for other in self.others_nll_per_token)

    def to_json(self) -> dict:
        return {**asdict(self), "first": self.first}

    @classmethod
    def from_json(cls, value: dict) -> SpanScore:
        value = {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
        value.pop("first", None)
        return cls(**value)


def find_spans(conversation: Conversation, seed: int = 0) -> list[Span]:
    """Finds the gold answers that stand word for word in their evidence turns, whatever their case.

    For category 1 each item of the comma-separated list is looked for; category 5, whose answers are traps, has none.
    A place in a turn counts once, however many questions it answers.

    Args:
        conversation: with its questions.
        seed: of the draw of the other spans, from the sorted list of the conversation's spans.
    """
    found: dict[tuple[str, int, int], Span] = {}
    turns = conversation.turns
    for question in conversation.questions:
        if question.category == ADVERSARIAL:
            continue
        for dia_id in question.evidence:
            turn = turns.get(dia_id)
            for item in _items(question) if turn is not None else ():
                text = " ".join(turn.text.split())
                match = re.search(rf"(?<!\w){re.escape(item)}(?!\w)", text, re.IGNORECASE)
                if match:
                    place = (dia_id, *match.span())
                    prompt = f"{turn.speaker}: {text[: match.start()]}"
                    span = Span(conversation.sample_id, dia_id, question.index, question.category, prompt, match[0])
                    found.setdefault(place, span)
    every = sorted({span.text for span in found.values()})
    return [
        Span(**{**asdict(span), "others": _draw(span, every, f"{seed}/{span.sample_id}/{place}")})
        for place, span in found.items()
    ]


def _items(question: Question) -> list[str]:
    items = question.answer.split(",") if question.category == 1 else [question.answer]
    return [item for item in (" ".join(item.split()).rstrip(".") for item in items) if item]


def _draw(span: Span, every: Sequence[str], seed: str) -> tuple[str, ...]:
    others = [text for text in every if text.casefold() != span.text.casefold()]
    return tuple(random.Random(seed).sample(others, min(OTHERS, len(others))))


def score_spans(
    model: nn.Module,
    tokenizer,
    spans: Sequence[Span],
    *,
    batch_tokens: int = 4096,
    on_batch: Callable[[int], None] | None = None,
) -> list[SpanScore]:
    """Scores spans, and for each the other spans in its place.

    Args:
        model: a causal language model in evaluation mode, with or without a memory; only read.
        tokenizer: its tokenizer.
        spans: see `find_spans`.
        batch_tokens: see `scoring.score_targets`.
        on_batch: called with the number of texts that were scored, 1 + `OTHERS` a span.
    """
    pairs = [encode_pair(tokenizer, span.prompt, text) for span in spans for text in (span.text, *span.others)]
    scores = iter(score_targets(model, pairs, batch_tokens=batch_tokens, on_batch=on_batch))
    results = []
    for span in spans:
        own = next(scores)
        others = tuple(next(scores).per_token for _ in span.others)
        results.append(
            SpanScore(**asdict(span), nll_per_token=own.per_token, others_nll_per_token=others, tokens=own.tokens)
        )
    return results
