"""Exchanges: a question about a passage with its answer; their file; and the passages of a text."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..files import load_json_lines, staged_file
from ..text import NAME

__all__ = ["EXCHANGES", "LONGEST_PASSAGE", "PASSAGES", "REPORTED", "Exchange", "Passage", "correct"]
__all__ += [
    "digest_exchanges",
    "join_exchanges",
    "load_exchanges",
    "save_exchanges",
    "split_passages",
]

EXCHANGES = "exchanges.jsonl"  # in a memory's folder: what was learned
PASSAGES = "passages.safetensors"  # in the folder of a memory that version 0.2.0 wrote; not used
LONGEST_PASSAGE = 64  # tokens: a memory learns passages as answers
REPORTED = "said"  # the word after the speaker in a turn that is put as reported speech
_FEWEST_WORDS = 5
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+"
)  # a word, or a CJK character
_LONGEST_SUBJECT = 8
_TURN = re.compile(r"([^\W\d_][^:]{0,39}): (\S.*)")
_DATE = re.compile(r"\d{1,2} [^\W\d_]{3,9},? \d{4}|[^\W\d_]{3,9} \d{1,2},? \d{4}|\d{4}-\d\d-\d\d")
_ABBREVIATION = "".join(
    rf"(?<!\b{each}\.)" for each in ("[A-Z]", "Dr", "Mr", "Mrs", "Ms", "St", "Prof", "vs")
)
_SENTENCE = re.compile(rf"\n+|(?<=[.!?…]){_ABBREVIATION}[\"')\]»”’]*\s+|(?<=[。！？])")


@dataclass(frozen=True)
class Exchange:
    """A question and its answer: a passage, or what a user gives. For the subject see `Passage`."""

    question: str
    answer: str
    subject: str = ""


@dataclass(frozen=True)
class Passage:
    """A piece of a text that answers questions by itself.

    The subject is what it is about, where it does not say so itself: of a dialogue's turn the speaker; else the text's
    first words up to the end of its first name, such as "The tower of Skarn Point". Empty where the first sentence has
    no name, or it comes late. `introduces` tells whether the passage is the one to ask about the subject alone.
    """

    text: str
    subject: str = ""
    introduces: bool = False


def split_passages(tokenizer, text: str, most_tokens: int = LONGEST_PASSAGE) -> list[Passage]:
    """Split a text into passages of one sentence each, and a dialogue into passages of one turn each.

    A small model writes far better questions about a short passage than about a page. Sentences and turns of a few
    words join the one before them; a sentence of more than `most_tokens` is cut, at a space where it has one.

    A text is a dialogue where half of its lines have the form "Name: words" and some name occurs twice. A turn is put
    as reported speech, with the date where a line above has one, since a small model asks about facts then and not as
    one of the speakers: Ann said: "I moved to Bergen." on 8 May, 2023. The date comes last, because a question seldom
    names it. A long turn is split into its sentences. A text of fewer than five words is a `ValueError`.
    """
    passages: list[Passage] = []
    turns = _list_turns(text)
    for said, form, subject in turns or [(text, "{}", _find_subject(text))]:
        whole = " ".join(said.split())
        fits = form != "{}" and _count(tokenizer, form.replace("{}", whole)) <= most_tokens
        for sentence in [whole] if fits else _list_sentences(said):
            statement = form.replace("{}", sentence)
            if passages and len(_WORD.findall(sentence)) < _FEWEST_WORDS:
                joined = f"{passages[-1].text} {statement}"
                if _count(tokenizer, joined) <= most_tokens:
                    passages[-1] = replace(passages[-1], text=joined)
                    continue
            pieces = _cut(tokenizer, statement, most_tokens)
            passages += [
                Passage(piece, subject, not turns and bool(subject) and subject in piece)
                for piece in pieces
            ]
    if not any(len(_WORD.findall(passage.text)) >= _FEWEST_WORDS for passage in passages):
        rule = f"text must hold a passage of at least {_FEWEST_WORDS} words to be studied"
        raise ValueError(f"{rule}, got {text.strip()[:60]!r}: give more text, or leave --study out")
    return passages


def _find_subject(text: str) -> str:
    first = next(iter(_list_sentences(text)), "")
    name = NAME.search(first)
    return (
        first[: name.end()] if name and len(first[: name.end()].split()) <= _LONGEST_SUBJECT else ""
    )


def _list_sentences(text: str) -> list[str]:
    return [
        sentence for part in _SENTENCE.split(text) if (sentence := " ".join((part or "").split()))
    ]


def _list_turns(text: str) -> list[tuple[str, str, str]]:
    """Return of each turn of a dialogue what is said, its form as reported speech, and the speaker.

    A line of no turn is a form without a speaker, unless it is a heading with a date. Another text has no turns.
    """
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    speakers = Counter(match[1] for match in map(_TURN.fullmatch, lines) if match)
    if 2 * speakers.total() < len(lines) or max(speakers.values(), default=0) < 2:
        return []
    turns, date = [], ""
    for line in lines:
        match, found = _TURN.fullmatch(line), _DATE.search(line)
        if match is not None:
            turns.append((match[2], f'{match[1]} {REPORTED}: "{{}}"{date}', match[1]))
            continue
        if found is not None:
            date = f" on {found[0]}."
        if found is None or line[-1] in ".!?…":
            turns.append((line, "{}", ""))
    return turns


def _count(tokenizer, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _cut(tokenizer, sentence: str, most_tokens: int) -> list[str]:
    """Halve a sentence until each piece has at most `most_tokens` tokens."""
    if len(sentence) < 2 or _count(tokenizer, sentence) <= most_tokens:
        return [sentence]
    middle = len(sentence) // 2
    space = sentence.rfind(" ", 1, middle + 1)
    middle = space if space > 0 else middle
    parts = (sentence[:middle].strip(), sentence[middle:].strip())
    return [piece for part in parts if part for piece in _cut(tokenizer, part, most_tokens)]


def correct(earlier: Sequence[Exchange], exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Return exchanges, and after them those of the earlier ones that ask something else, in other words."""
    asked = {each.question.casefold() for each in exchanges}
    return [*exchanges, *(each for each in earlier if each.question.casefold() not in asked)]


def load_exchanges(path: str | Path) -> list[Exchange]:
    """Load exchanges from a JSON Lines file: an object a line with `question`, `answer` and maybe `subject`.

    Errors are those of `files.load_json_lines`.
    """
    return load_json_lines(path, _parse_exchange, "exchanges", "the texts `question` and `answer`")


def _parse_exchange(value: dict[str, Any]) -> Exchange:
    found = [value["question"], value["answer"], value.get("subject", "")]
    if not all(isinstance(part, str) for part in found) or not all(
        part.strip() for part in found[:2]
    ):
        raise TypeError
    return Exchange(*found[:2], found[2].strip())


def save_exchanges(path: str | Path, exchanges: Iterable[Exchange]) -> None:
    """Write exchanges as JSON Lines, whole or not at all."""
    with staged_file(path) as new:
        new.write_text(_format(exchanges), encoding="utf-8")


def join_exchanges(exchanges: Iterable[Exchange]) -> dict[str, str]:
    """Return each answer of some exchanges with its subject and its questions, by the answer."""
    found: dict[str, str] = {}
    for each in exchanges:
        found[each.answer] = (
            f"{found.get(each.answer, f'{each.subject} {each.answer}')} {each.question}"
        )
    return found


def digest_exchanges(exchanges: Sequence[Exchange]) -> str:
    """Return the SHA-256 of the exchanges' file."""
    return hashlib.sha256(_format(exchanges).encode("utf-8", "surrogatepass")).hexdigest()


def _format(exchanges: Iterable[Exchange]) -> str:
    return "".join(
        json.dumps(asdict(exchange), ensure_ascii=False) + "\n" for exchange in exchanges
    )
