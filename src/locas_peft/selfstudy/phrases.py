"""Short answers in a passage's own words: of all its phrases the one that the model gives most probably.

A small model that answers freely invents things, and repeats the passage. It chooses better than it writes.

Axes: B rows of a batch, T tokens of a phrase, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from ..text import find_pad_token
from ..ttt.host import Host
from .decoding import begin_answer, begin_rows, encode_question, list_stops, share_prefixes

__all__ = ["Phrase", "find_phrases", "list_phrases"]

BEGINNINGS = 4
"""Only phrases are compared that begin with one of the so many words with which the model begins its answer."""
MOST_WORDS = 8
ROWS = 16
_READ = "Read this text.\n\n{}\n\n"
_WORD = re.compile(r"\w(?:[\w'’.,-]*\w)?")
_CLAUSE_END = re.compile(r"[,;:.!?\"“”…。，！？]")


@dataclass(frozen=True)
class Phrase:
    """A phrase as the answer to a question.

    Args:
        text: words of the passage.
        nats: the negative log-likelihood of the answer and its end, with the passage in context.
        gain_nats: how much lower that is than without the passage.
    """

    text: str
    nats: float
    gain_nats: float


class _Phrases(NamedTuple):
    """The phrases that begin with one word: the tokens of the longest, and each one's text by its number of tokens."""

    ids: list[int]
    texts: dict[int, str]


@torch.no_grad()
def find_phrases(host: Host, tokenizer, asked: Sequence[tuple[str, str]]) -> list[Phrase]:
    """Answer questions, each with a phrase of its passage, of up to `MOST_WORDS` words within one clause.

    Args:
        host: the model, with the adapters that are to take part.
        tokenizer: its tokenizer.
        asked: passages, each with at least one word, and a question about each. To keep questions about one passage
            together saves time.
    """
    phrases = {passage: _encode_phrases(tokenizer, passage) for passage, _ in asked}
    found = []
    for first in range(0, len(asked), ROWS):
        part = asked[first : first + ROWS]
        within = [encode_question(tokenizer, question, context=_READ.format(passage)) for passage, question in part]
        without = [encode_question(tokenizer, question) for _, question in part]
        begun = _choose_beginnings(host, tokenizer, within, [phrases[passage] for passage, _ in part])
        best = [min(scored) for scored in _score(host, tokenizer, within, begun)]
        again = [[_Phrases(ids, {len(ids): text})] for _, text, ids in best]
        plain = [min(scored) for scored in _score(host, tokenizer, without, again)]
        found += [Phrase(text, nats, alone[0] - nats) for (nats, text, _), alone in zip(best, plain, strict=True)]
    return found


def list_phrases(passage: str) -> list[list[str]]:
    """Return the phrases of a passage, by the word that they begin with, the shortest first."""
    words = list(_WORD.finditer(passage))
    gaps = (passage[one.end() : two.start()] for one, two in pairwise(words))
    ends = [number for number, gap in enumerate(gaps) if _CLAUSE_END.search(gap)] + [len(words) - 1]
    phrases = []
    for number, word in enumerate(words):
        last = min(number + MOST_WORDS - 1, next(end for end in ends if end >= number))
        phrases.append([passage[word.start() : each.end()] for each in words[number : last + 1]])
    return phrases


def _encode_phrases(tokenizer, passage: str) -> list[_Phrases]:
    encoded, before = [], begin_answer(tokenizer, " ")
    for texts in list_phrases(passage):
        ids = tokenizer([before + text for text in texts], add_special_tokens=False, verbose=False)["input_ids"]
        # A phrase whose tokens do not begin the longest one's is left out.
        own = {len(each): text for each, text in zip(ids, texts, strict=True) if each == ids[-1][: len(each)]}
        encoded.append(_Phrases(ids[-1], own))
    return encoded


def _choose_beginnings(
    host: Host, tokenizer, prompts: Sequence[list[int]], phrases: Sequence[list[_Phrases]]
) -> list[list[_Phrases]]:
    """Return for each prompt the phrases that begin with the `BEGINNINGS` likeliest first tokens."""
    inputs = begin_rows(host, prompts, share_prefixes(prompts), find_pad_token(tokenizer))
    logits = host.logits(count=1, **inputs)[:, -1]
    return [
        sorted(own, key=lambda each: row[each.ids[0]].item(), reverse=True)[:BEGINNINGS]
        for own, row in zip(phrases, logits.cpu(), strict=True)
    ]


def _score(
    host: Host, tokenizer, prompts: Sequence[list[int]], phrases: Sequence[list[_Phrases]]
) -> list[list[tuple[float, str, list[int]]]]:
    """Return for each prompt its phrases as (nats of the phrase and the answer's end, text, token ids)."""
    rows, groups = [], []
    for prompt, own in zip(prompts, phrases, strict=True):
        groups.append((len(prompt) - 1, range(len(rows), len(rows) + len(own))))
        rows += [[*prompt, *each.ids] for each in own]
    count = max(len(each.ids) for own in phrases for each in own) + 1
    logits = host.logits(count=count, **begin_rows(host, rows, groups, find_pad_token(tokenizer)))
    stops = torch.tensor(list_stops(tokenizer), device=logits.device)
    scored = []
    for own, (_, numbers) in zip(phrases, groups, strict=True):
        found = []
        for each, row in zip(own, logits[numbers.start : numbers.stop], strict=True):
            logs = row[-len(each.ids) - 1 :].float().log_softmax(-1)  # [T + 1, V]
            begun = logs[:-1].gather(1, torch.tensor(each.ids, device=logs.device)[:, None]).cumsum(0)[:, 0]
            nats = -(begun + logs[1:, stops].logsumexp(-1)) if len(stops) else -begun
            found += [(nats[length - 1].item(), text, each.ids[:length]) for length, text in each.texts.items()]
        scored.append(found)
    return scored
