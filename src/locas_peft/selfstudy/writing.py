"""The model writes questions about passages and answers them with the passage in its context; poor ones are dropped.

Small models often ignore a passage. The answers are therefore taken from a contrastive distribution (context-aware
decoding, arXiv:2305.14739): the next token's log-probabilities with the passage, pushed away from those without it.
The same distribution is what the memory learns.

Axes: B rows of a batch, L their length, T tokens of an answer, K candidates for a token, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor, nn

from ..text import QUESTION_PROMPT, encode_prompt, find_pad_token
from ..ttt.host import Host
from ..tuner.passes import adapters_disabled, evaluating
from .exchanges import Exchange

__all__ = [
    "BLOCK",
    "Lesson",
    "Written",
    "begin_answer",
    "begin_rows",
    "encode_question",
    "is_poor",
    "longest_passage",
    "share_prefixes",
    "write_lessons",
]

BLOCK = 8
"""Passages whose exchanges are written together."""
CONTRAST = 1.0
"""How far the answers are pushed away from those without the passage."""
TEMPERATURE = 0.7
"""Of the questions."""
QUESTION_TOKENS, ANSWER_TOKENS = 24, 32
CANDIDATES = 16
"""K: the contrast leaves few plausible tokens."""
DRAWN = 64
"""The likeliest tokens that a question's next token is drawn from."""
ROWS = 64
_PLAUSIBLE = math.log(0.1)  # of the likeliest token with the passage: below, the contrast is noise
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
        ids = torch.tensor([*ids["input_ids"], *_stops(tokenizer)[:1]])
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


def encode_question(tokenizer, question: str, form: str = QUESTION_PROMPT, context: str = "") -> list[int]:
    """Return the ids of a prompt that an answer follows; `form` has {question} and may have {context}."""
    return encode_prompt(tokenizer, form.format(question=question, context=context), begin_answer(tokenizer))


def begin_answer(tokenizer, after: str = "") -> str:
    """Return what a base model without turns needs before its answer, and `after`; the empty text for a chat model."""
    return "" if getattr(tokenizer, "chat_template", None) else after or "Answer:"


def pad_left(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> dict[str, Tensor]:
    """Return rows of token ids as the model's inputs, each LongTensor [B, L], so that all rows end together."""
    length = max(map(len, rows))
    ids = torch.tensor([[pad] * (length - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=device)
    return {"ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def share_prefixes(prompts: Sequence[Sequence[int]]) -> list[tuple[int, range]]:
    """Group prompts that follow each other and begin alike, such as questions about one passage.

    Returns:
        For each group how many tokens its prompts share, fewer than the shortest has, and the prompts' numbers. A
        prompt joins a group where it has at least half of what the group shares.
    """
    groups: list[tuple[list[int], int, int]] = []
    for number, prompt in enumerate(prompts):
        own, first = list(prompt[:-1]), number
        shared = commonprefix([groups[-1][0], own]) if groups else []
        if shared and 2 * len(shared) >= len(groups[-1][0]):
            own, first = shared, groups.pop()[1]
        groups.append((own, first, number + 1))
    return [(len(shared), range(first, stop)) for shared, first, stop in groups]


@torch.no_grad()
def begin_rows(
    host: Host, rows: Sequence[Sequence[int]], groups: Sequence[tuple[int, range]], pad: int
) -> dict[str, Any]:
    """Return rows as the model's inputs, as `pad_left` does, after the tokens that the rows of a group share.

    The keys and values of these tokens are computed once a group, without gradients. The inputs are whole rows where
    a group shares nothing, and for a model whose context is more than keys and values.

    Args:
        host: the model, with the adapter that is to take part.
        rows: token ids; at least one a row is not shared.
        groups: see `share_prefixes`.
        pad: any token.
    """
    if not host.can_cache() or not all(count for count, _ in groups):
        return pad_left(rows, pad, host.device)
    prefixes = pad_left([rows[numbers[0]][:count] for count, numbers in groups], pad, host.device)
    cache = host.outputs(count=1, use_cache=True, **prefixes).past_key_values
    owners = [group for group, (_, numbers) in enumerate(groups) for _ in numbers]
    cache.batch_select_indices(torch.tensor(owners, device=host.device))
    counts = [groups[owner][0] for owner in owners]
    inputs = pad_left([row[count:] for row, count in zip(rows, counts, strict=True)], pad, host.device)
    inputs["position_ids"] += torch.tensor(counts, device=host.device)[:, None]
    inputs["attention_mask"] = torch.cat([prefixes["attention_mask"][owners], inputs["attention_mask"]], 1)
    return {**inputs, "past_key_values": cache}


def _name_subject(host: Host, tokenizer, passage: str) -> str:
    """Return what the model calls the subject of a passage, in the passage's own words; empty for none of them."""
    begin = begin_answer(tokenizer)
    prompts = [encode_prompt(tokenizer, _NAME.replace("{passage}", context), begin) for context in (passage, "")]
    (reply,) = _decode(host, tokenizer, prompts[:1], ANSWER_TOKENS, without=prompts[1:])
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
        answers = _decode(host, tokenizer, prompts[rows], ANSWER_TOKENS, without=without[rows])
        agreed = _score(host, tokenizer, second[rows], [answer.ids for answer in answers])
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
        replies += _decode(host, tokenizer, batch, QUESTION_TOKENS, temperature=TEMPERATURE, generator=generator)
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


# ---------------------------------------------------------------------- decoding


@dataclass
class _Decoded:
    """Token ids LongTensor [T] with candidates and targets [T, K] on the CPU; the log-probability gained, in nats."""

    ids: Tensor
    candidates: Tensor
    targets: Tensor
    gain_nats: float


def _decode(
    host: Host,
    tokenizer,
    prompts: Sequence[Sequence[int]],
    most_tokens: int,
    *,
    without: Sequence[Sequence[int]] | None = None,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[_Decoded]:
    """Continue prompts in one batch, greedily or by sampling; with the contrast to the prompts `without`, if given."""
    stops, count = torch.tensor(_stops(tokenizer), dtype=torch.long, device=host.device), len(prompts)
    rows = [*prompts, *(without or ())]
    inputs = begin_rows(host, rows, share_prefixes(rows), find_pad_token(tokenizer))
    done, steps = torch.zeros(count, dtype=torch.bool, device=host.device), []
    for _ in range(most_tokens):
        outputs = host.outputs(count=1, use_cache=True, **inputs)
        cache = getattr(outputs, "past_key_values", None)
        if cache is None:
            raise ValueError(
                f"model must keep the keys and values of its context to write exchanges, got {host.kind}: give "
                "exchanges of your own"
            )
        logs = outputs.logits[:, -1].float().log_softmax(-1)
        scores, plain = logs[:count], logs[count:]
        if without is not None:
            peaks = scores.amax(-1, keepdim=True)
            scores = torch.where(scores < peaks + _PLAUSIBLE, -torch.inf, (1 + CONTRAST) * scores - CONTRAST * plain)
        top, candidates = scores.topk(min(DRAWN if temperature else CANDIDATES, scores.shape[1]))
        choice = torch.zeros(count, 1, dtype=torch.long, device=host.device)
        if temperature:  # among a few: over the whole vocabulary the drawing takes as long as the model
            choice = torch.multinomial((top / temperature).softmax(-1), 1, generator=generator)
        token = candidates.gather(1, choice)[:, 0]
        gain = (logs[:count] - plain).gather(1, token[:, None])[:, 0] if without is not None else torch.zeros(count)
        steps.append((token.cpu(), candidates.cpu(), top.softmax(-1).cpu(), gain.cpu(), done.cpu()))
        done = done | torch.isin(token, stops)
        if done.all():
            break
        mask = inputs["attention_mask"]
        inputs = {
            "ids": token.repeat(len(mask) // count)[:, None],
            "attention_mask": torch.cat([mask, mask.new_ones(len(mask), 1)], 1),
            "position_ids": inputs["position_ids"][:, -1:] + 1,
            "past_key_values": cache,
        }
    tokens, candidates, targets, gains, ended = (torch.stack(part, 1) for part in zip(*steps, strict=True))
    lengths = (~ended).sum(1).tolist()
    return [
        _Decoded(
            tokens[row, :n].clone(), candidates[row, :n].clone(), targets[row, :n].clone(), gains[row, :n].sum().item()
        )
        for row, n in enumerate(lengths)
    ]


def _score(host: Host, tokenizer, prompts: Sequence[Sequence[int]], answers: Sequence[Tensor]) -> list[float]:
    """Return the mean negative log-likelihood of each answer's tokens after a prompt, in nats."""
    rows = [[*prompt, *answer.tolist()] for prompt, answer in zip(prompts, answers, strict=True)]
    inputs = begin_rows(host, rows, share_prefixes(prompts), find_pad_token(tokenizer))
    logits = host.logits(count=max(map(len, answers)) + 1, **inputs)
    nats = []
    for row, answer in zip(logits, answers, strict=True):
        logs = row[-len(answer) - 1 : -1].float().log_softmax(-1)
        nats.append(-logs.gather(1, answer.to(logs.device)[:, None]).mean().item())
    return nats


def _stops(tokenizer) -> list[int]:
    """Return the tokens that end an answer; for a base model the tokens of a line's end as well."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if begin_answer(tokenizer):
        ends += [
            ids[0] for end in ("\n", "\n\n") if len(ids := tokenizer(end, add_special_tokens=False)["input_ids"]) == 1
        ]
    return ends
