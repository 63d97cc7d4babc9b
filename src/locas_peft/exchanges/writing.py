"""Write questions about passages and drop poor ones; the answer of each is its passage.

The model writes the first questions with the passage's subject above the passage, so that they name
the subject as a user's questions do. Further questions are made from phrases of the passage,
without the model, for users who word a question otherwise. Those that fit another passage better
are dropped (see `consistency`).
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..asking import continue_rows, encode_prompt, share_prefixes
from ..asking.prompts import decode_after, list_stops
from ..model.causal_lm import CausalLM
from ..text import (
    LONGEST_PASSAGE,
    REPORTED,
    Passage,
    guess_language,
    list_content_words,
    split_words,
)
from ..tuner import adapters_disabled, evaluating
from .consistency import keep_consistent
from .file import Exchange
from .question_words import BY_SUBJECT, ENGLISH, QuestionWords, find_question_words

__all__ = [
    "BLOCK",
    "PER_PASSAGE",
    "WrittenBlock",
    "check_window",
    "draw_token",
    "find_question",
    "list_phrases",
    "write_exchanges",
    "write_replies",
]

BLOCK = 32
"""How many passages' exchanges are written together. A batch of more rows costs little more."""
PER_PASSAGE = 12
"""Questions that are wanted about a passage where no number is given."""
ROUNDS = 4
_TEMPERATURE = 0.7
# A question's next token is drawn from so many: from the whole vocabulary takes as long as the
# model.
_CANDIDATES = 64
_QUESTION_TOKENS = 24
_QUESTIONS_AT_ONCE = 128
# Two questions with such a share of common words are near-duplicates.
_DUPLICATE = 0.8
_MARGIN_TOKENS = 128
# Of fewer passages, most have a word in common, also where each says something else.
_FEWEST_WITH_SHARED_WORDS = 4
_MOST_PHRASE_WORDS = 3
_PHRASE_WORD = re.compile(r"\w(?:[\w'’.,-]*\w)?")
_CLAUSE_END = re.compile(r"[,;:.!?\"“”…。，！？]")
_QUESTION = re.compile(r"[^?？؟]*[?？؟]")
# A Greek question ends with a semicolon, or with a character that looks like one.
_GREEK_QUESTION = re.compile(r"[^?;\u037e]*[?;\u037e]")


@dataclass
class WrittenBlock:
    """What was written about a block of passages.

    Attributes:
        asked: how many questions were asked.
        exchanges: those that are learned.
        dropped: replies that are no question about their passage.
    """

    asked: int = 0
    exchanges: list[Exchange] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


def write_exchanges(
    model: nn.Module,
    tokenizer: Any,
    passages: Sequence[Passage],
    per_passage: int,
    *,
    seed: int = 0,
    first: int = 0,
) -> Iterator[WrittenBlock]:
    """Write exchanges about passages, and yield them block by block of `BLOCK` passages.

    What is written of a block depends on its passages and the seed alone.

    Args:
        model: a causal LM, with or without a memory, which is disabled meanwhile.
        per_passage: how many questions are wanted about each passage, of the kinds of the text's
            language in turns.
        seed: of the questions' sampling. Torch's own random state is not used.
        first: the block to begin with.
    """
    host = CausalLM(model)
    words = find_question_words("\n".join(passage.text for passage in passages))
    for number in range(first, math.ceil(len(passages) / BLOCK)):
        generator = torch.Generator(host.device).manual_seed((seed * 1_000_003 + number) % 2**63)
        block_passages = passages[number * BLOCK :][:BLOCK]
        block = WrittenBlock()
        shared = _list_shared_words(block_passages)
        with torch.no_grad(), evaluating(model), adapters_disabled(model):
            questions = _ask(
                host, tokenizer, block_passages, per_passage, generator, block, words, shared
            )
            prompts = {passage: _fill(BY_SUBJECT, passage) for passage in block_passages}
            if questions:
                phrased = _ask_all_by_words(prompts, per_passage // 2, generator, words, shared)
                block.asked += len(phrased)
                questions += phrased
            questions = keep_consistent(model, tokenizer, questions, prompts)
        for passage, question in questions:
            block.exchanges.append(Exchange(question, passage.text, passage.subject))
        yield block


def check_window(host: CausalLM, window: int) -> None:
    """Raise a `ValueError` where there is no room for a passage and its prompt.

    The room is that of the window, or of the model's positions.
    """
    least = LONGEST_PASSAGE + _MARGIN_TOKENS
    if min(window, host.positions or window) < least:
        rule = f"window must be at least {least} tokens to study a text"
        raise ValueError(f"{rule}, got {window}: raise it, or read the text instead")


def _ask_all_by_words(
    passages: Iterable[Passage],
    count: int,
    generator: torch.Generator,
    words: QuestionWords,
    shared: frozenset[str],
) -> list[tuple[Passage, str]]:
    """Return passages and at most `count` questions about each that name its phrases."""
    questions = []
    for passage in passages:
        for question in _ask_by_words(passage.text, count, generator, words, shared):
            questions.append((passage, question))
    return questions


def _ask_by_words(
    text: str,
    count: int,
    generator: torch.Generator,
    words: QuestionWords = ENGLISH,
    shared: frozenset[str] = frozenset(),
) -> list[str]:
    """Return at most `count` questions that name phrases of a text, drawn at random.

    They name one phrase and two in turns. No phrase consists of `shared` words alone, where the
    text has other phrases.
    """
    phrases = list_phrases(text)
    phrases = [phrase for phrase in phrases if not list_content_words(phrase) <= shared] or phrases
    if not phrases:
        return []
    questions: dict[str, None] = {}
    for number in range(count):
        order = torch.randperm(len(phrases), generator=generator, device=generator.device)
        indices = sorted(order[: 1 + number % 2].tolist())
        named = dict.fromkeys(phrases[index] for index in indices)
        form = words.about[number % len(words.about)]
        questions[form.format(words.conjunction.join(named))] = None
    return list(questions)


def list_phrases(text: str) -> list[str]:
    """Return a text's phrases of at most `_MOST_PHRASE_WORDS` words within a clause.

    Their first and last word are not short. Of "In 1868, the mason came." they are "1868", "mason",
    "mason came" and "came".
    """
    words = list(_PHRASE_WORD.finditer(text))
    is_bound = [bool(list_content_words(word[0])) and word[0] != REPORTED for word in words]
    phrases = []
    for first, word in enumerate(words):
        if not is_bound[first]:
            continue
        end = word.end()
        for last in range(first, min(first + _MOST_PHRASE_WORDS, len(words))):
            if _CLAUSE_END.search(text[end : words[last].start()]):
                break
            end = words[last].end()
            if is_bound[last]:
                phrases.append(text[word.start() : end])
    return phrases


def _ask(
    host: CausalLM,
    tokenizer: Any,
    passages: Sequence[Passage],
    count: int,
    generator: torch.Generator,
    block: WrittenBlock,
    words: QuestionWords,
    shared: frozenset[str] = frozenset(),
) -> list[tuple[Passage, str]]:
    """Return passages and `count` questions about each, without near-duplicates.

    As many questions are wanted about each passage: an answer that is learned more often is also
    given more often. What a round of asking leaves open is asked in the next one. The number of
    questions and poor replies are noted in `block`.
    """
    all_kinds = words.kinds
    # The words of each question by the question, for each passage.
    questions: dict[Passage, dict[str, frozenset[str]]] = {passage: {} for passage in passages}
    kinds = dict.fromkeys(passages, 0)
    for _ in range(ROUNDS):
        asked = []
        requests = []
        for passage, passage_questions in questions.items():
            for _ in range(count - len(passage_questions)):
                request, begin = all_kinds[kinds[passage] % len(all_kinds)]
                kinds[passage] += 1
                asked.append(passage)
                requests.append((_fill(request, passage), begin))
        block.asked += len(asked)
        replies = write_replies(host, tokenizer, requests, generator)
        for passage, reply in zip(asked, replies, strict=True):
            line = reply.strip().split("\n")[0]
            question = find_question(line)
            if not is_about(question, passage, shared):
                block.dropped.append(line)
                continue
            found = frozenset(split_words(question))
            if not any(_is_duplicate(found, other) for other in questions[passage].values()):
                questions[passage][question] = found
    return [(passage, question) for passage in questions for question in questions[passage]]


def _fill(request: str, passage: Passage) -> str:
    request = request.replace("{subject}", passage.subject)
    return request.replace("{passage}", passage.text).strip()


def find_question(line: str) -> str:
    """Return a line up to the end of its first question; "" for no question."""
    pattern = _GREEK_QUESTION if guess_language(line) == "el" else _QUESTION
    asks = pattern.match(line)
    return asks[0].strip() if asks else ""


def _is_duplicate(words: frozenset[str], other: frozenset[str]) -> bool:
    """Return whether two questions have nearly the same words."""
    return len(words & other) >= _DUPLICATE * len(words | other)


def write_replies(
    host: CausalLM,
    tokenizer: Any,
    requests: Sequence[tuple[str, str]],
    generator: torch.Generator,
) -> Iterator[str]:
    """Yield what the model replies to each request.

    Args:
        requests: each with the first words of its reply, which are part of the reply.
        generator: of the tokens that are drawn.
    """

    def choose(logits: Tensor) -> Tensor:
        top, candidates = logits.topk(min(_CANDIDATES, logits.shape[1]))
        return draw_token(top, candidates, generator)

    stops = list_stops(tokenizer)
    for first in range(0, len(requests), _QUESTIONS_AT_ONCE):
        batch = requests[first : first + _QUESTIONS_AT_ONCE]
        prompts = [encode_prompt(tokenizer, request, begin) for request, begin in batch]
        replies = continue_rows(
            host,
            prompts,
            _QUESTION_TOKENS,
            groups=share_prefixes(prompts),
            stops=stops,
            choose=choose,
        )
        for (_, begin), ids in zip(batch, replies, strict=True):
            yield decode_after(tokenizer, begin, ids)


def draw_token(logits: Tensor, candidates: Tensor, generator: torch.Generator) -> Tensor:
    """Draw the next token of each row, LongTensor [B], from its candidates.

    Args:
        logits, candidates: [B, K], the likeliest tokens and their logits.
    """
    probabilities = (logits / _TEMPERATURE).softmax(-1)
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return candidates.gather(1, drawn)[:, 0]


def is_about(question: str, passage: Passage, shared: frozenset[str] = frozenset()) -> bool:
    """Return whether a question has a word of its passage that is not `shared`.

    Of a passage that has `shared` words alone, any word counts. A word of the subject, which
    other passages share, counts only for the passage that introduces it.
    """
    words = list_content_words(passage.text)
    common = list_content_words(question) & (words - shared or words)
    if not passage.introduces:
        common -= list_content_words(passage.subject)
    return bool(common)


def _list_shared_words(passages: Sequence[Passage]) -> frozenset[str]:
    """Return the words that all passages have, such as the names of a table's columns.

    A question with no other word of its passage would be learned with several answers.
    """
    texts = {passage.text for passage in passages}
    if len(texts) < _FEWEST_WITH_SHARED_WORDS:
        return frozenset()
    return frozenset.intersection(*map(list_content_words, texts))
