"""The cloze: how well a model predicts the gold answers inside their own turns, with nothing else in context.

Two measures, also for models too small to answer questions: the nats a token that a memory saves on these spans, and
the share of spans with a lower nll a token than three other spans of the same conversation.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from ..asking.scoring import OnBatch, encode_pair, score_targets
from .conversations import Conversation
from .f1 import ADVERSARIAL

__all__ = ["OTHERS", "AnswerSpan", "find_spans", "firsts", "gains", "score_spans"]

OTHERS = 3
"""So many other spans are compared with each one: a quarter of all spans come first by chance."""


@dataclass(frozen=True)
class AnswerSpan:
    """A gold answer in its turn, of a question's `index` and `category` (the first one, if several have this answer).

    `prompt` is "Speaker: " and the turn's text up to the span, `text` the span as written there; `others` are at most
    three other spans of the conversation.
    """

    sample_id: str
    dia_id: str
    index: int
    category: int
    prompt: str
    text: str
    others: tuple[str, ...] = ()


def find_spans(conversation: Conversation, seed: int = 0) -> list[AnswerSpan]:
    """Find the gold answers that occur word for word in their evidence turns, in any case.

    For category 1 each item of the comma-separated list is searched. Category 5 is left out: its answers are traps. A
    place in a turn counts once, even if it answers several questions. The other spans are drawn by `seed`.
    """
    found: dict[tuple[str, int, int], AnswerSpan] = {}
    turns, sample_id = conversation.turns, conversation.sample_id
    for question in conversation.questions:
        if question.category == ADVERSARIAL:
            continue
        for turn in (turns[dia_id] for dia_id in question.evidence if dia_id in turns):
            text = " ".join(turn.text.split())
            items = question.answer.split(",") if question.category == 1 else [question.answer]
            for item in filter(None, (" ".join(item.split()).rstrip(".") for item in items)):
                if match := re.search(rf"(?<!\w){re.escape(item)}(?!\w)", text, re.IGNORECASE):
                    prompt = f"{turn.speaker}: {text[: match.start()]}"
                    span = AnswerSpan(sample_id, turn.dia_id, question.index, question.category, prompt, match[0])
                    found.setdefault((turn.dia_id, *match.span()), span)
    texts = sorted({span.text for span in found.values()})
    spans = []
    for key, span in found.items():
        others = [text for text in texts if text.casefold() != span.text.casefold()]
        draw = random.Random(f"{seed}/{sample_id}/{key}")
        spans.append(replace(span, others=tuple(draw.sample(others, min(OTHERS, len(others))))))
    return spans


def score_spans(
    model: nn.Module, tokenizer, spans: Sequence[AnswerSpan], *, batch_tokens: int = 4096, on_batch: OnBatch = None
) -> list[dict[str, Any]]:
    """Score spans, and the other spans of each one after the same prompt; return one record a span.

    It has the span's fields, `nll_per_token` and `others_nll_per_token` in nats, the number of its `tokens`, and
    whether it is `first`: below all the others.
    """
    pairs = [encode_pair(tokenizer, span.prompt, text) for span in spans for text in (span.text, *span.others)]
    scores = iter(score_targets(model, pairs, batch_tokens=batch_tokens, on_batch=on_batch))
    records = []
    for span in spans:
        own, *others = (next(scores) for _ in (span.text, *span.others))
        nats = [other.per_token for other in others]
        scored = {"nll_per_token": own.per_token, "others_nll_per_token": nats, "tokens": own.tokens}
        records.append({**asdict(span), **scored, "first": all(own.per_token < other for other in nats)})
    return records


def gains(records: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> list[float]:
    """Return the nats a token that each span costs less than in records of the same spans by another model."""
    return [old["nll_per_token"] - new["nll_per_token"] for new, old in zip(records, reference, strict=True)]


def firsts(records: Sequence[dict[str, Any]]) -> list[float]:
    """Return 1 for each span that comes first, 0 for each that does not; spans without others are left out."""
    return [float(record["first"]) for record in records if record["others"]]
