"""The model writes questions about passages and answers them with the passage in its context; poor ones are dropped.

The answers come from the contrastive distribution of `decoding`. The same distribution is what the memory learns.

Axes: T tokens of an answer, K candidates for a token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

import torch
from torch import Tensor, nn

from ..text import encode_prompt
from ..ttt.host import Host
from ..tuner.passes import adapters_disabled, evaluating
from .decoding import begin_answer, decode, encode_question, list_stops, score_answers
from .exchanges import Exchange

__all__ = [
    "ANSWER_TOKENS",
    "BLOCK",
    "QUESTION_TOKENS",
    "TEMPERATURE",
    "Lesson",
    "Written",
    "is_poor",
    "longest_passage",
    "write_lessons",
]

BLOCK = 8
"""Passages whose exchanges are written together."""
TEMPERATURE = 0.7
"""Of the questions."""
QUESTION_TOKENS, ANSWER_TOKENS = 24, 32
ROWS = 64
_DUPLICATE = 0.8
_LEAST_GAIN_NATS = 3.0
_SECOND_NATS = 2.0
_MARGIN_TOKENS = 128
_CONTEXT = "Read this text.\n\n{}\n\n"
_SECOND_PROMPT = "{context}\n\nQuestion: {question}\n\nAnswer in one short sentence."
_ASK = "{passage}\n\nWrite a question about this text."
_NAME = "{passage}\n\nWhat is this text about? Answer with a name."
KINDS: tuple[tuple[str, str, str], ...] = (
    (_ASK, "Who", "{}"),
    (_ASK, "What", "{}"),
    (_ASK, "When", "{}"),
    (_ASK, "Where", "{}"),
    (_ASK, "How many", "{}"),
    (_ASK, "Which", "{}"),
    (_ASK, "Why", "{}"),
    (_NAME, "", "Can you tell me about {}?"),
)
"""The kinds of exchanges: the request, the first words of the model's reply, and the question made of the reply.

The last kind makes the model restate or summarise the passage.
"""


@dataclass(frozen=True, eq=False)
class Lesson:
    """An exchange in the form in which it is learned.

    Args:
        answer: LongTensor [T], the answer's tokens, and the end of the turn where the answer reached it.
        candidates: LongTensor [T, K], the tokens that may stand at each place.
        targets: float32 [T, K], their probabilities.
    """

    exchange: Exchange
    answer: Tensor
    candidates: Tensor
    targets: Tensor

    @classmethod
    def of(cls, given: Exchange | Lesson, tokenizer) -> Lesson:
        """Return a lesson as it is; make one of an exchange, whose targets are the tokens of its own answer."""
        if isinstance(given, Lesson):
            return given
        exchange = given
        ids = tokenizer(begin_answer(tokenizer, " ") + exchange.answer, add_special_tokens=False, verbose=False)
        ids = torch.tensor([*ids["input_ids"], *list_stops(tokenizer)[:1]])
        return cls(exchange, ids, ids[:, None], torch.ones(len(ids), 1))


@dataclass
class Written:
    """What was written about a block of passages: the lessons, how many questions were asked, and what was dropped."""

    asked: int
    lessons: list[Lesson] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


def write_lessons(
    model: nn.Module, tokenizer, passages: Sequence[str], per_passage: int, *, seed: int = 0, first: int = 0
) -> Iterator[Written]:
    """Write exchanges about passages, block by block of `BLOCK` passages; each block depends on itself and the seed.

    Args:
        model: a causal LM, with or without a memory, which is disabled meanwhile.
        tokenizer: its tokenizer. Its chat template is used where it has one.
        passages: see `split_passages`.
        per_passage: how many questions are asked about each passage, in turns of the kinds in `KINDS`.
        seed: of the questions' sampling. Torch's own random state is not used.
        first: the block to begin with.
    """
    host, subject = Host(model), None
    for block in range(first, math.ceil(len(passages) / BLOCK)):
        generator = torch.Generator(host.device).manual_seed((seed * 1_000_003 + block) % 2**63)
        with torch.no_grad(), evaluating(model), adapters_disabled(model):
            if subject is None:
                subject = _name_subject(host, tokenizer, passages[0])
            written = _write(host, tokenizer, passages[block * BLOCK :][:BLOCK], per_passage, generator, subject)
        yield written


def is_poor(exchange: Exchange, gain_nats: float, second_nats: float) -> bool:
    """Return whether an exchange teaches nothing about its passage.

    Args:
        gain_nats: how much the passage raises the answer's log-probability: near 0 where the model gives the answer
            without the passage too.
        second_nats: a token's mean negative log-likelihood in a second reading, where the request is worded
            differently: high where that reading contradicts the answer.
    """
    asked, known = _list_words(exchange.question), _list_words(exchange.passage)
    answer = _list_words(exchange.answer)
    repeats = "?" in exchange.answer or not (answer & known) - asked
    # Models also talk about the request itself: "The answer to the question is".
    talks = bool((answer & {"question", "answer", "text"}) - known)
    source = f"{exchange.passage} {exchange.subject}"
    invents = bool(_list_names(f"{exchange.question}\n{exchange.answer}") - _list_names(source) - known)
    return repeats or talks or invents or gain_nats < _LEAST_GAIN_NATS or second_nats > _SECOND_NATS


def _list_names(text: str) -> frozenset[str]:
    """Return a text's numbers and its capitalised words but those that begin a sentence or a line, case-folded."""
    words = re.findall(r"\d+|(?<![.?!:\"“\n])(?<![.?!:] )\b[A-Z]\w+", f"\n{text}")
    return frozenset(word.casefold() for word in words) - {"the"}


def _list_words(text: str) -> frozenset[str]:
    """Return a text's words, case-folded, without the short ones that every text has."""
    return frozenset(
        word for word in re.findall(r"\w+", text.casefold()) if len(word) > 3 or not word.isascii() or word.isdigit()
    )


def longest_passage(host: Host, window: int) -> int:
    """Return how many tokens a passage may have beside its prompt, within a window and the model's positions.

    Raises:
        ValueError: there is no room for a passage.
    """
    room = min(window, host.positions or window) - _MARGIN_TOKENS
    if room < 16:
        raise ValueError(
            f"window must be at least {_MARGIN_TOKENS + 16} tokens to study a text, got {window}: raise it, or leave "
            "--study out"
        )
    return room


def _name_subject(host: Host, tokenizer, passage: str) -> str:
    """Return what the model calls the subject of a passage, in the passage's own words; empty for none of them."""
    begin = begin_answer(tokenizer)
    prompts = [encode_prompt(tokenizer, _NAME.replace("{passage}", context), begin) for context in (passage, "")]
    (reply,) = decode(host, tokenizer, prompts[:1], ANSWER_TOKENS, without=prompts[1:])
    return find_common(tokenizer.decode(reply.ids, skip_special_tokens=True), passage)


def find_common(reply: str, passage: str) -> str:
    """Return the longest run of words of a passage that a reply has too; empty where it has a short word alone."""
    own, ours = (re.findall(r"\w+", text) for text in (reply, passage))
    match = SequenceMatcher(None, [word.casefold() for word in own], [word.casefold() for word in ours], False)
    match = match.find_longest_match()
    found = " ".join(ours[match.b : match.b + match.size])
    return found if _list_words(found) else ""


def _write(
    host: Host,
    tokenizer,
    passages: Sequence[str],
    per_passage: int,
    generator: torch.Generator,
    subject: str,
) -> Written:
    written = Written(asked=per_passage * len(passages))
    questions = _ask(host, tokenizer, passages, per_passage, generator, written.dropped)
    prompts = [encode_question(tokenizer, text, context=_CONTEXT.format(passage)) for passage, text in questions]
    without = [encode_question(tokenizer, text) for _, text in questions]
    second = [encode_question(tokenizer, text, _SECOND_PROMPT, passage) for passage, text in questions]
    for begin in range(0, len(questions), ROWS):
        rows = slice(begin, begin + ROWS)
        answers = decode(host, tokenizer, prompts[rows], ANSWER_TOKENS, without=without[rows])
        agreed = score_answers(host, tokenizer, second[rows], [answer.ids for answer in answers])
        for (passage, question), answer, nats in zip(questions[rows], answers, agreed, strict=True):
            text = " ".join(tokenizer.decode(answer.ids, skip_special_tokens=True).split())
            exchange = Exchange(question, text, subject, passage)
            if is_poor(exchange, answer.gain_nats, nats):
                written.dropped.append(f"{question} {text}")
            else:
                written.lessons.append(Lesson(exchange, answer.ids, answer.candidates, answer.targets))
    return written


def _ask(
    host: Host, tokenizer, passages: Sequence[str], per_passage: int, generator: torch.Generator, dropped: list[str]
) -> list[tuple[str, str]]:
    """Return passages and questions about them, without near-duplicates; add to `dropped` what is no question."""
    asked = [(passage, KINDS[number % len(KINDS)]) for passage in passages for number in range(per_passage)]
    prompts = [
        encode_prompt(tokenizer, request.replace("{passage}", passage), begin)
        for passage, (request, begin, _) in asked
    ]
    replies = []
    for first in range(0, len(prompts), 2 * ROWS):
        batch = prompts[first : first + 2 * ROWS]
        replies += decode(host, tokenizer, batch, QUESTION_TOKENS, temperature=TEMPERATURE, generator=generator)
    questions, seen = [], {}
    for (passage, (_, begin, form)), reply in zip(asked, replies, strict=True):
        line = (begin + tokenizer.decode(reply.ids, skip_special_tokens=True)).strip().split("\n")[0]
        question = line[: line.find("?") + 1].strip()
        if form != "{}":
            name = find_common(line, passage)
            question = form.format(name) if name else ""
        content = frozenset(re.findall(r"\w+", question.casefold()))
        if not question or len(content) < 3:
            dropped.append(line)
        elif all(len(content & other) < _DUPLICATE * len(content | other) for other in seen.setdefault(passage, [])):
            seen[passage].append(content)
            questions.append((passage, question))
    return questions
