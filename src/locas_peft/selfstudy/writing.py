"""The model writes questions about passages, and poor ones are dropped; the passage is the answer.

The first are asked with the passage's subject above it: then they name it, as a user's questions do. Further questions
are made from phrases of the passage, without the model, for users who word a question otherwise.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn

from ..asking import continue_rows, encode_prompt, find_pad_token, share_prefixes
from ..asking.prompts import WRITE_PROMPT, decode_after, list_stops
from ..model.causal_lm import CausalLM
from ..tuner import adapters_disabled, evaluating
from .exchanges import LONGEST_PASSAGE, REPORTED, Exchange, Passage

__all__ = ["BLOCK", "WrittenBlock", "check_window", "write_exchanges", "write_replies"]

BLOCK = 8  # passages whose exchanges are written together
ROUNDS = 4
_TEMPERATURE = 0.7
_CANDIDATES = 64  # a question's next token is drawn from so many: from the whole vocabulary takes as long as the model
_QUESTION_TOKENS, _ROWS = 24, 128
_DUPLICATE = 0.8
_MARGIN_TOKENS = 128
_BEGINNINGS = ("Who", "What", "When", "Where", "How many", "Which", "Why")
_ABOUT = (
    "Can you tell me about {}?",
    "What does the text say about {}?",
    "What do you know about {}?",
)
_PHRASE_WORDS = 3
_WORD = re.compile(r"\w(?:[\w'’.,-]*\w)?")
_CLAUSE_END = re.compile(r"[,;:.!?\"“”…。，！？]")
KINDS = [
    (request, begin)
    for request in ("{subject}\n\n" + WRITE_PROMPT, WRITE_PROMPT)
    for begin in _BEGINNINGS
]
"""The kinds of exchanges: the request, and the first words of the model's reply."""


@dataclass
class WrittenBlock:
    """What was written about a block of passages: how many questions were asked, what was kept and what was not."""

    passages: int
    asked: int = 0
    exchanges: list[Exchange] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


def write_exchanges(
    model: nn.Module,
    tokenizer,
    passages: Sequence[Passage],
    per_passage: int,
    *,
    seed: int = 0,
    first: int = 0,
) -> Iterator[WrittenBlock]:
    """Write exchanges about passages, block by block of `BLOCK` passages; each block depends on itself and the seed.

    Args:
        model: a causal LM, with or without a memory, which is disabled meanwhile.
        per_passage: how many questions are wanted about each passage, of the kinds in `KINDS` in turns.
        seed: of the questions' sampling. Torch's own random state is not used.
        first: the block to begin with.
    """
    host = CausalLM(model)
    for block in range(first, math.ceil(len(passages) / BLOCK)):
        generator = torch.Generator(host.device).manual_seed((seed * 1_000_003 + block) % 2**63)
        chosen = passages[block * BLOCK :][:BLOCK]
        written = WrittenBlock(len(chosen))
        with torch.no_grad(), evaluating(model), adapters_disabled(model):
            asked = _ask(host, tokenizer, chosen, per_passage, generator, written)
        for passage in dict.fromkeys(chosen if asked else ()):
            by_words = _ask_by_words(passage.text, per_passage // 2, generator)
            written.asked += len(by_words)
            asked += [(passage, question) for question in by_words]
        written.exchanges += [
            Exchange(question, passage.text, passage.subject) for passage, question in asked
        ]
        yield written


def check_window(host: CausalLM, window: int) -> None:
    """Raise a `ValueError` where a window, or the model's positions, leave no room for a passage and its prompt."""
    least = LONGEST_PASSAGE + _MARGIN_TOKENS
    if min(window, host.positions or window) < least:
        rule = f"window must be at least {least} tokens to study a text"
        raise ValueError(f"{rule}, got {window}: raise it, or leave --study out")


def _ask_by_words(text: str, count: int, generator: torch.Generator) -> list[str]:
    """Return at most so many questions that name phrases of a text, at random: one phrase and two in turns."""
    phrases, questions = list_phrases(text), {}
    for number in range(count if phrases else 0):
        order = torch.randperm(len(phrases), generator=generator, device=generator.device)
        named = dict.fromkeys(phrases[each] for each in sorted(order[: 1 + number % 2].tolist()))
        questions[_ABOUT[number % len(_ABOUT)].format(" and ".join(named))] = None
    return list(questions)


def list_phrases(text: str) -> list[str]:
    """Return a text's phrases of up to `_PHRASE_WORDS` words within a clause, whose first and last word are not short.

    Of "In 1868, the mason came." they are "1868", "mason", "mason came" and "came".
    """
    words = list(_WORD.finditer(text))
    gaps = (text[one.end() : two.start()] for one, two in pairwise(words))
    clauses = [number for number, gap in enumerate(gaps) if _CLAUSE_END.search(gap)] + [
        len(words) - 1
    ]
    bounds = [bool(_list_words(word[0])) and word[0] != REPORTED for word in words]
    phrases = []
    for number, word in enumerate(words):
        last = min(number + _PHRASE_WORDS - 1, next(end for end in clauses if end >= number))
        ends = (
            words[end].end() for end in range(number, last + 1) if bounds[number] and bounds[end]
        )
        phrases += [text[word.start() : end] for end in ends]
    return phrases


def _ask(
    host: CausalLM,
    tokenizer,
    passages: Sequence[Passage],
    count: int,
    generator: torch.Generator,
    block: WrittenBlock,
) -> list[tuple[Passage, str]]:
    """Return passages and `count` questions about each, without near-duplicates; note in `block` what is poor.

    As many questions are wanted about each passage: an answer that is learned more often is also given more often.
    What a round of asking leaves open is asked in the next one.
    """
    questions: dict[Passage, dict[str, frozenset[str]]] = {passage: {} for passage in passages}
    kinds = dict.fromkeys(passages, 0)
    for _ in range(ROUNDS):
        asked = []
        for passage, found in questions.items():
            for _ in range(count - len(found)):
                asked.append((passage, KINDS[kinds[passage] % len(KINDS)]))
                kinds[passage] += 1
        block.asked += len(asked)
        requests = [
            (request.replace("{subject}", of.subject).replace("{passage}", of.text).strip(), begin)
            for of, (request, begin) in asked
        ]
        replies = write_replies(host, tokenizer, requests, generator)
        for (passage, _), reply in zip(asked, replies, strict=True):
            line = reply.strip().split("\n")[0]
            question = line[: line.find("?") + 1].strip()
            words = frozenset(re.findall(r"\w+", question.casefold()))
            if not is_about(question, passage):
                block.dropped.append(line)
            elif all(
                len(words & other) < _DUPLICATE * len(words | other)
                for other in questions[passage].values()
            ):
                questions[passage][question] = words
    return [(passage, question) for passage, found in questions.items() for question in found]


def write_replies(
    host: CausalLM, tokenizer, requests: Sequence[tuple], generator: torch.Generator
) -> Iterator[str]:
    """Yield what the model replies to requests, each with the first words of its reply, which are part of it."""

    def choose(logits: torch.Tensor) -> torch.Tensor:
        top, candidates = logits.topk(min(_CANDIDATES, logits.shape[1]))
        return candidates.gather(
            1, torch.multinomial((top / _TEMPERATURE).softmax(-1), 1, generator=generator)
        )[:, 0]

    options = {"pad": find_pad_token(tokenizer), "stops": list_stops(tokenizer), "choose": choose}
    for first in range(0, len(requests), _ROWS):
        batch = requests[first : first + _ROWS]
        prompts = [encode_prompt(tokenizer, request, begin) for request, begin in batch]
        replies = continue_rows(
            host, prompts, _QUESTION_TOKENS, groups=share_prefixes(prompts), **options
        )
        for (_, begin), ids in zip(batch, replies, strict=True):
            yield decode_after(tokenizer, begin, ids)


def is_about(question: str, passage: Passage) -> bool:
    """Return whether a question has a word of its passage, which is more than a subject that others share."""
    own = _list_words(question) & _list_words(passage.text)
    return bool(own if passage.introduces else own - _list_words(passage.subject))


def _list_words(text: str) -> frozenset[str]:
    """Return a text's words, case-folded, without the short ones that every text has."""
    words = re.findall(r"\w+", text.casefold())
    return frozenset(
        word for word in words if len(word) > 3 or not word.isascii() or word.isdigit()
    )
