"""LoCoMo conversations and their questions, from the release's JSON, and as text."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checks import check_choice, invalid
from ..files import fold_name, is_reserved, load_json, normalize_name
from .f1 import ADVERSARIAL, CATEGORIES

__all__ = [
    "Conversation",
    "LocomoQuestion",
    "Session",
    "Turn",
    "choose_conversations",
    "dialogue_lines",
    "keep_evidence",
    "keep_sessions",
    "load_locomo",
]


# It is part of files' names.
_SAMPLE_ID = re.compile(r"[\w\[\]-][\w.\[\]-]*")


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
    """A question of category 1 to 5; for 5 the answer is the trap.

    `evidence` names the turns with the answer.
    """

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
    lines: list[str] = []
    for session in conversation.sessions:
        if lines:
            lines.append("")
        date = f", {session.date_time}" if session.date_time else ""
        lines.append(f"Session {session.number}{date}")
        for turn in session.turns:
            photo = f" [photo: {turn.caption}]" if turn.caption else ""
            lines.append(f"{turn.speaker}: {' '.join(turn.text.split())}{photo}")
    return lines


def keep_evidence(conversation: Conversation, question: LocomoQuestion) -> Conversation:
    """Return a conversation with no turns but those that a question names as its evidence."""
    sessions = []
    for session in conversation.sessions:
        turns = tuple(turn for turn in session.turns if turn.dia_id in question.evidence)
        if turns:
            sessions.append(replace(session, turns=turns))
    return replace(conversation, sessions=tuple(sessions))


def keep_sessions(conversation: Conversation, sessions: int) -> Conversation:
    """Return a conversation's first sessions, with the questions whose evidence lies in them."""
    beginning = replace(conversation, sessions=conversation.sessions[:sessions])
    questions = []
    for question in conversation.questions:
        if question.evidence and beginning.turns.keys() >= set(question.evidence):
            questions.append(question)
    return replace(beginning, questions=tuple(questions))


def load_locomo(path: str | Path) -> tuple[list[Conversation], list[str]]:
    """Load a LoCoMo file: JSON in the release's form.

    Args:
        path: a list of samples with `sample_id`, `conversation` and `qa`.

    Returns:
        The conversations that can be used, and one line for each record that cannot, with its index
        in the file.

    Raises:
        ValueError: the file does not exist, is not LoCoMo, or holds nothing that can be used.
    """
    samples = load_json(path)
    if not isinstance(samples, list):
        samples = [samples]
    problems: list[str] = []
    known: set[str] = set()

    def parse(sample: Any, name: str) -> Conversation:
        conversation = _parse_sample(sample, name, problems, known)
        known.add(fold_name(conversation.sample_id))
        return conversation

    conversations = _parse_each(parse, samples, Path(path).name, problems)
    if not conversations:
        reason = f" ({problems[0]})" if problems else ""
        remedy = "give the release's locomo10.json, or a file of the same form"
        raise ValueError(
            f"LoCoMo data must hold a conversation, got none in {str(path)!r}{reason}: {remedy}"
        )
    return conversations, problems


def choose_conversations(
    conversations: Sequence[Conversation], names: Sequence[str] | None
) -> list[Conversation]:
    """Choose conversations by their ids, in the order of the file; all if `names` is None."""
    if names is None:
        return list(conversations)
    known = [conversation.sample_id for conversation in conversations]
    for name in names:
        check_choice("conversation", name, known)
    return [conversation for conversation in conversations if conversation.sample_id in names]


def _parse_each(
    parse: Callable[[Any, str], Any], records: list[Any], name: str, problems: list[str]
) -> list[Any]:
    """Parse a list's records; one that is a `ValueError` is left out and named in `problems`."""
    parsed = []
    for number, record in enumerate(records):
        try:
            parsed.append(parse(record, f"{name}[{number}]"))
        except ValueError as error:
            problems.append(str(error))
    return parsed


def _parse_sample(sample: Any, name: str, problems: list[str], known: set[str]) -> Conversation:
    talk = sample.get("conversation") if isinstance(sample, dict) else None
    if not isinstance(talk, dict):
        raise invalid(name, "have a 'conversation'", "none", "sample left out")
    sample_id = normalize_name(str(sample.get("sample_id") or name))
    field = f"{name}.sample_id"
    if not _SAMPLE_ID.fullmatch(sample_id) or is_reserved(sample_id):
        remedy = "sample left out, rename it"
        raise invalid(field, "be letters, digits, - and _", repr(sample_id), remedy)
    if fold_name(sample_id) in known:
        raise invalid(field, "be unique", f"{sample_id!r} again", "sample left out")
    field = f"{name}.conversation"
    sessions = _parse_sessions(talk, field, problems)
    if not sessions:
        got = f"none in {sample_id!r}"
        raise invalid(field, "have a session with turns", got, "sample left out")
    in_order = list(dict.fromkeys(turn.speaker for session in sessions for turn in session.turns))
    speakers = (
        str(talk.get("speaker_a") or in_order[0]),
        str(talk.get("speaker_b") or in_order[-1]),
    )
    entries = sample.get("qa")
    field = f"{name}.qa"
    if not isinstance(entries, list):
        got = f"none in {sample_id!r}"
        problem = invalid(field, "be a list of questions", got, "no question is asked")
        problems.append(str(problem))
        entries = []
    questions = _parse_each(_parse_question, list(enumerate(entries)), field, problems)
    return Conversation(sample_id, speakers, tuple(sessions), tuple(questions))


def _parse_sessions(talk: dict[str, Any], name: str, problems: list[str]) -> list[Session]:
    """Return the sessions that have turns, in the order of their numbers."""
    numbers = []
    for key in talk:
        match = re.fullmatch(r"session_(\d+)", key)
        if match:
            numbers.append(int(match[1]))
    sessions = []
    for number in sorted(numbers):
        key = f"session_{number}"
        records = talk[key]
        if not isinstance(records, list):
            kind = type(records).__name__
            problem = invalid(f"{name}.{key}", "be a list of turns", kind, "session left out")
            problems.append(str(problem))
            continue
        turns = _parse_each(_parse_turn, records, f"{name}.{key}", problems)
        date_time = talk.get(f"{key}_date_time")
        if not isinstance(date_time, str):
            date_time = None
        if turns:
            sessions.append(Session(number, date_time, tuple(turns)))
    return sessions


def _parse_turn(turn: Any, name: str) -> Turn:
    fields: list[Any] = [None, None, None]
    if isinstance(turn, dict):
        fields = [turn.get("dia_id"), turn.get("speaker"), turn.get("text")]
    if not all(isinstance(field, str) for field in fields):
        raise invalid(name, "have dia_id, speaker and text", f"{turn!r:.60}", "turn left out")
    caption = turn.get("blip_caption")
    if not isinstance(caption, str) or not caption.strip():
        caption = None
    dia_id, speaker, text = fields
    return Turn(dia_id, speaker, text, caption)


def _parse_question(numbered: tuple[int, Any], name: str) -> LocomoQuestion:
    index, entry = numbered
    asked = ""
    if isinstance(entry, dict):
        asked = str(entry.get("question") or "").strip()
    if not asked:
        raise invalid(name, "have a 'question'", f"{entry!r:.60}", "left out")
    category = entry.get("category")
    if type(category) is not int or category not in CATEGORIES:
        raise invalid(f"{name}.category", "be 1 to 5", repr(category), "question left out")
    key = "adversarial_answer" if category == ADVERSARIAL else "answer"
    gold = entry.get(key)
    if not isinstance(gold, (str, int, float)) or not str(gold).strip():
        rule = f"have an {key!r} (category {category})"
        raise invalid(name, rule, repr(gold), "question left out")
    # Some of the release's entries hold two ids, or a colon or a zero too many.
    named = re.findall(r"D:?(\d+):(\d+)", str(entry.get("evidence")))
    evidence = dict.fromkeys(f"D{int(session)}:{int(turn)}" for session, turn in named)
    return LocomoQuestion(index, asked, category, str(gold).strip(), tuple(evidence))
