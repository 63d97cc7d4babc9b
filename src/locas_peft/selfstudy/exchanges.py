"""Exchanges of a question and its answer, the file that holds them, and the passages of a text."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..files import load_json_lines, staged_file
from ..text import NAME, encode_text, split_sentences, split_words

__all__ = [
    "EXCHANGES",
    "LONGEST_PASSAGE",
    "PASSAGES",
    "REPORTED",
    "Exchange",
    "Passage",
    "correct",
    "digest_exchanges",
    "join_exchanges",
    "load_exchanges",
    "save_exchanges",
    "split_passages",
]

EXCHANGES = "exchanges.jsonl"
"""The file in a memory's folder with the exchanges that it has learned."""
PASSAGES = "passages.safetensors"
"""A file in the folder of a memory that version 0.2.0 wrote. It is not used."""
LONGEST_PASSAGE = 64
"""The most tokens of a passage: a memory learns passages as answers."""
REPORTED = "said"
"""The word after the speaker in a turn that is put as reported speech."""

_FEWEST_WORDS = 5
_MOST_SUBJECT_WORDS = 8
_TURN = re.compile(r"([^\W\d_][^:]{0,39}): (\S.*)")
_DATE = re.compile(r"\d{1,2} [^\W\d_]{3,9},? \d{4}|[^\W\d_]{3,9} \d{1,2},? \d{4}|\d{4}-\d\d-\d\d")


@dataclass(frozen=True)
class Exchange:
    """A question and its answer: a passage, or what a user gives. For the subject see `Passage`."""

    question: str
    answer: str
    subject: str = ""


@dataclass(frozen=True)
class Passage:
    """A piece of a text that answers questions by itself.

    Attributes:
        text: the passage.
        subject: what it is about, where it does not say so itself. For a turn of a dialogue this is
            the speaker. Else it is the beginning of the text up to the end of its first name, such
            as "The tower of Skarn Point". It is empty where the first sentence has no name, or has
            it late.
        introduces: whether the passage is the one to ask about the subject alone.
    """

    text: str
    subject: str = ""
    introduces: bool = False


def split_passages(tokenizer: Any, text: str, most_tokens: int = LONGEST_PASSAGE) -> list[Passage]:
    """Split a text into passages of one sentence each, and a dialogue into passages of one turn.

    A small model writes far better questions about a short passage than about a page. Sentences and
    turns of a few words join the one before them. A sentence of more than `most_tokens` is cut, at
    a space where it has one.

    A text is a dialogue where half of its lines have the form "Name: words" and some name occurs
    twice. A turn is put as reported speech, with the date where a line above has one: Ann said: "I
    moved to Bergen." on 8 May, 2023. A small model then asks about facts, and not as one of the
    speakers. The date comes last, because a question seldom names it. A long turn is split into its
    sentences.

    Raises:
        ValueError: for a text of fewer than five words.
    """
    turns = _list_turns(text)
    is_dialogue = bool(turns)
    if not is_dialogue:
        turns = [(text, "{}", _find_subject(text))]
    passages: list[Passage] = []
    for said, form, subject in turns:
        for sentence in _split_turn(tokenizer, said, form, most_tokens):
            statement = form.replace("{}", sentence)
            if passages and _count_words(sentence) < _FEWEST_WORDS:
                joined = f"{passages[-1].text} {statement}"
                if _count_tokens(tokenizer, joined) <= most_tokens:
                    passages[-1] = replace(passages[-1], text=joined)
                    continue
            for piece in _cut(tokenizer, statement, most_tokens):
                introduces = not is_dialogue and bool(subject) and subject in piece
                passages.append(Passage(piece, subject, introduces))
    if all(_count_words(passage.text) < _FEWEST_WORDS for passage in passages):
        rule = f"text must hold a passage of at least {_FEWEST_WORDS} words to be studied"
        raise ValueError(f"{rule}, got {text.strip()[:60]!r}: give more text, or read it instead")
    return passages


def _find_subject(text: str) -> str:
    """Return the beginning of a text up to its first name; "" for no name, or a late one."""
    sentences = _list_sentences(text)
    name = NAME.search(sentences[0]) if sentences else None
    if name is None:
        return ""
    subject = sentences[0][: name.end()]
    return subject if len(subject.split()) <= _MOST_SUBJECT_WORDS else ""


def _split_turn(tokenizer: Any, said: str, form: str, most_tokens: int) -> list[str]:
    """Return a reported turn whole where it is short, else the sentences of a turn or a text."""
    if form != "{}":
        whole = " ".join(said.split())
        if _count_tokens(tokenizer, form.replace("{}", whole)) <= most_tokens:
            return [whole]
    return _list_sentences(said)


def _list_sentences(text: str) -> list[str]:
    return [" ".join(sentence.split()) for sentence in split_sentences(text)]


def _list_turns(text: str) -> list[tuple[str, str, str]]:
    """Return of each turn of a dialogue what is said, its form as reported speech, and the speaker.

    A line that is no turn has the form "{}" and no speaker. A line with a date that does not end
    like a sentence is a heading, and left out. A text that is no dialogue has no turns.
    """
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    matches = [_TURN.fullmatch(line) for line in lines]
    speakers = Counter(match[1] for match in matches if match is not None)
    if 2 * speakers.total() < len(lines) or max(speakers.values(), default=0) < 2:
        return []
    turns = []
    date = ""
    for line, match in zip(lines, matches, strict=True):
        if match is not None:
            speaker, said = match.groups()
            turns.append((said, f'{speaker} {REPORTED}: "{{}}"{date}', speaker))
            continue
        dated = _DATE.search(line)
        if dated is not None:
            date = f" on {dated[0]}."
        if dated is None or line[-1] in ".!?…":
            turns.append((line, "{}", ""))
    return turns


def _count_words(text: str) -> int:
    return len(split_words(text))


def _count_tokens(tokenizer: Any, text: str) -> int:
    return len(encode_text(tokenizer, text))


def _cut(tokenizer: Any, sentence: str, most_tokens: int) -> list[str]:
    """Halve a sentence until each piece has at most `most_tokens` tokens."""
    if len(sentence) < 2 or _count_tokens(tokenizer, sentence) <= most_tokens:
        return [sentence]
    middle = len(sentence) // 2
    space = sentence.rfind(" ", 1, middle + 1)
    if space > 0:
        middle = space
    pieces = []
    for part in (sentence[:middle].strip(), sentence[middle:].strip()):
        if part:
            pieces += _cut(tokenizer, part, most_tokens)
    return pieces


def correct(earlier: Sequence[Exchange], exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Return exchanges, and after them the earlier ones whose questions they do not ask.

    Questions are compared word for word, whatever their case.
    """
    asked = {exchange.question.casefold() for exchange in exchanges}
    others = [exchange for exchange in earlier if exchange.question.casefold() not in asked]
    return [*exchanges, *others]


def load_exchanges(path: str | Path) -> list[Exchange]:
    """Load exchanges from a JSON Lines file.

    Each line is an object with `question`, `answer` and maybe `subject`. Errors are those of
    `files.load_json_lines`.
    """
    return load_json_lines(path, _parse_exchange, "exchanges", "the texts `question` and `answer`")


def _parse_exchange(value: dict[str, Any]) -> Exchange:
    question = value["question"]
    answer = value["answer"]
    subject = value.get("subject", "")
    if not all(isinstance(field, str) for field in (question, answer, subject)):
        raise TypeError
    if not question.strip() or not answer.strip():
        raise TypeError
    return Exchange(question, answer, subject.strip())


def save_exchanges(path: str | Path, exchanges: Iterable[Exchange]) -> None:
    """Write exchanges as JSON Lines, whole or not at all."""
    with staged_file(path) as new:
        new.write_text(_format(exchanges), encoding="utf-8")


def join_exchanges(exchanges: Iterable[Exchange]) -> dict[str, str]:
    """Return a text for each answer: its subject, the answer itself and its questions."""
    texts: dict[str, str] = {}
    for exchange in exchanges:
        if exchange.answer not in texts:
            texts[exchange.answer] = f"{exchange.subject} {exchange.answer}"
        texts[exchange.answer] += f" {exchange.question}"
    return texts


def digest_exchanges(exchanges: Sequence[Exchange]) -> str:
    """Return the SHA-256 of the exchanges' file."""
    return hashlib.sha256(_format(exchanges).encode("utf-8", "surrogatepass")).hexdigest()


def _format(exchanges: Iterable[Exchange]) -> str:
    lines = [json.dumps(asdict(exchange), ensure_ascii=False) for exchange in exchanges]
    return "".join(f"{line}\n" for line in lines)
