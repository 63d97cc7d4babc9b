"""LoCoMo conversations and their questions, from the release's JSON, and as text."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..checks import check_choice
from ..files import load_json
from .f1 import ADVERSARIAL, CATEGORIES

__all__ = [
    "Conversation",
    "LocomoQuestion",
    "Session",
    "Turn",
    "choose_conversations",
    "dialogue_lines",
]
__all__ += ["keep_evidence", "keep_sessions", "load_locomo"]


@dataclass(frozen=True)
class Turn:
    """One message; `caption` describes a photo that was sent with it."""

    dia_id: str
    speaker: str
    text: str
    caption: str | None = None


@dataclass(frozen=True)
class Session:
    """The messages of one sitting, and its date."""

    number: int
    date_time: str | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class LocomoQuestion:
    """A question of category 1 to 5 (for 5 the answer is the trap); `evidence` names the turns with the answer."""

    index: int
    question: str
    category: int
    answer: str
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Conversation:
    """One conversation with its questions."""

    sample_id: str
    speakers: tuple[str, str]
    sessions: tuple[Session, ...]
    questions: tuple[LocomoQuestion, ...]

    @property
    def turns(self) -> dict[str, Turn]:
        """All turns by their ids, in order."""
        return {turn.dia_id: turn for session in self.sessions for turn in session.turns}


def dialogue_lines(conversation: Conversation) -> list[str]:
    """Return a conversation as lines of text: a session's date, then its turns, "Speaker: text".

    A photo follows its text in square brackets. An empty line separates two sessions.
    """
    lines = []
    for session in conversation.sessions:
        lines += [""] if lines else []
        lines.append(
            f"Session {session.number}" + (f", {session.date_time}" if session.date_time else "")
        )
        for turn in session.turns:
            photo = f" [photo: {turn.caption}]" if turn.caption else ""
            lines.append(f"{turn.speaker}: {' '.join(turn.text.split())}{photo}")
    return lines


def keep_evidence(conversation: Conversation, question: LocomoQuestion) -> Conversation:
    """Return a conversation with no turns but those that a question names as its evidence."""
    named = {
        s: tuple(turn for turn in s.turns if turn.dia_id in question.evidence)
        for s in conversation.sessions
    }
    sessions = tuple(replace(session, turns=turns) for session, turns in named.items() if turns)
    return replace(conversation, sessions=sessions)


def keep_sessions(conversation: Conversation, sessions: int) -> Conversation:
    """Return the first sessions of a conversation, with the questions whose evidence lies in them."""
    kept = replace(conversation, sessions=conversation.sessions[:sessions])
    turns = kept.turns
    questions = (
        q
        for q in conversation.questions
        if q.evidence and all(turn in turns for turn in q.evidence)
    )
    return replace(kept, questions=tuple(questions))


def load_locomo(path: str | Path) -> tuple[list[Conversation], list[str]]:
    """Load a LoCoMo file: JSON in the release's form, a list of samples with `sample_id`, `conversation` and `qa`.

    Return the conversations that can be used, and one line for each record that cannot, with its index in the file. A
    file that does not exist, is not LoCoMo, or holds nothing that can be used is a `ValueError`.
    """
    samples, problems = load_json(path), []
    samples = samples if isinstance(samples, list) else [samples]
    parse = partial(_parse_sample, problems=problems, known=set())
    conversations = _parse_each(parse, samples, Path(path).name, problems)
    if not conversations:
        got = f"none in {str(path)!r}" + (f" ({problems[0]})" if problems else "")
        remedy = "give the release's locomo10.json, or a file of the same form"
        raise ValueError(f"LoCoMo data must hold a conversation, got {got}: {remedy}")
    return conversations, problems


def choose_conversations(
    conversations: Sequence[Conversation], names: Sequence[str] | None
) -> list[Conversation]:
    """Choose conversations by their ids, in the order of the file; all of them if `names` is None."""
    known = [conversation.sample_id for conversation in conversations]
    for name in names or ():
        check_choice("conversation", name, known)
    return [
        conversation
        for conversation in conversations
        if names is None or conversation.sample_id in names
    ]


def _parse_each(
    parse: Callable[[Any, str], Any], records: list[Any], name: str, problems: list[str]
) -> list[Any]:
    """Parse the records of a list; one that raises a `ValueError` is left out, and its message kept in `problems`."""
    parsed = []
    for number, record in enumerate(records):
        try:
            parsed.append(parse(record, f"{name}[{number}]"))
        except ValueError as error:
            problems.append(str(error))
    return parsed


def _require(holds: object, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _parse_sample(sample: Any, name: str, problems: list[str], known: set[str]) -> Conversation:
    talk = sample.get("conversation") if isinstance(sample, dict) else None
    _require(
        isinstance(talk, dict), f"{name} must have a 'conversation', got none: sample left out"
    )
    sample_id = str(sample.get("sample_id") or name)
    rule = f"{name}.sample_id must be letters, digits, - and _, got {sample_id!r}: sample left out, rename it"
    _require(re.fullmatch(r"[\w\[\]-][\w.\[\]-]*", sample_id), rule)
    _require(
        sample_id not in known,
        f"{name}.sample_id must be unique, got {sample_id!r} again: sample left out",
    )
    sessions = []
    for number in sorted(int(key[8:]) for key in talk if re.fullmatch(r"session_\d+", key)):
        key = f"session_{number}"
        turns, date_time, path = (
            talk[key],
            talk.get(f"{key}_date_time"),
            f"{name}.conversation.{key}",
        )
        if not isinstance(turns, list):
            problems.append(
                f"{path} must be a list of turns, got {type(turns).__name__}: session left out"
            )
        elif parsed := _parse_each(_parse_turn, turns, path, problems):
            sessions.append(
                Session(number, date_time if isinstance(date_time, str) else None, tuple(parsed))
            )
    rule = f"{name}.conversation must have a session with turns, got none in {sample_id!r}: sample left out"
    _require(sessions, rule)
    found = list(dict.fromkeys(turn.speaker for session in sessions for turn in session.turns))
    speakers = str(talk.get("speaker_a") or found[0]), str(talk.get("speaker_b") or found[-1])
    entries = sample.get("qa")
    if not isinstance(entries, list):
        problems.append(
            f"{name}.qa must be a list of questions, got none in {sample_id!r}: no question is asked"
        )
        entries = []
    questions = _parse_each(_parse_question, list(enumerate(entries)), f"{name}.qa", problems)
    known.add(sample_id)
    return Conversation(sample_id, speakers, tuple(sessions), tuple(questions))


def _parse_turn(turn: Any, name: str) -> Turn:
    fields = (
        [turn.get(key) for key in ("dia_id", "speaker", "text")]
        if isinstance(turn, dict)
        else [None]
    )
    rule = f"{name} must have dia_id, speaker and text, got {turn!r:.60}: turn left out"
    _require(all(isinstance(field, str) for field in fields), rule)
    caption = turn.get("blip_caption")
    return Turn(*fields, caption if isinstance(caption, str) and caption.strip() else None)


def _parse_question(numbered: tuple[int, Any], name: str) -> LocomoQuestion:
    index, entry = numbered
    asked = str(entry.get("question") or "").strip() if isinstance(entry, dict) else ""
    _require(asked, f"{name} must have a 'question', got {entry!r:.60}: left out")
    category = entry.get("category")
    known = type(category) is int and category in CATEGORIES
    _require(known, f"{name}.category must be 1 to 5, got {category!r}: question left out")
    key = "adversarial_answer" if category == ADVERSARIAL else "answer"
    gold = entry.get(key)
    has_answer = isinstance(gold, (str, int, float)) and str(gold).strip()
    _require(
        has_answer,
        f"{name} must have an {key!r} (category {category}), got {gold!r}: question left out",
    )
    # Some of the release's entries hold two ids, or a colon or a zero too many.
    found = re.findall(r"D:?(\d+):(\d+)", str(entry.get("evidence")))
    evidence = tuple(dict.fromkeys(f"D{int(session)}:{int(turn)}" for session, turn in found))
    return LocomoQuestion(index, asked, category, str(gold).strip(), evidence)
