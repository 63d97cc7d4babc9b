"""LoCoMo conversations and their questions, from the release's JSON, and as text.

A record that cannot be used is reported with its index in the file and left out; the rest is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checks import check_choice
from .f1 import ADVERSARIAL, CATEGORIES

__all__ = ["Conversation", "LocomoQuestion", "Session", "Turn", "choose_conversations", "dialogue", "dialogue_lines"]
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


def dialogue(conversation: Conversation) -> str:
    """Return a whole conversation as text: what a memory reads, and what a prompt has in context."""
    return "\n".join(dialogue_lines(conversation))


def dialogue_lines(conversation: Conversation) -> list[str]:
    """Return a conversation as lines of text: a session's date, then its turns, "Speaker: text".

    A photo follows its text in square brackets. An empty line separates two sessions.
    """
    lines = []
    for session in conversation.sessions:
        lines += [""] if lines else []
        lines.append(f"Session {session.number}" + (f", {session.date_time}" if session.date_time else ""))
        for turn in session.turns:
            photo = f" [photo: {turn.caption}]" if turn.caption else ""
            lines.append(f"{turn.speaker}: {' '.join(turn.text.split())}{photo}")
    return lines


def keep_evidence(conversation: Conversation, question: LocomoQuestion) -> Conversation:
    """Return a conversation with no turns but those that a question names as its evidence."""
    sessions = (
        replace(session, turns=tuple(turn for turn in session.turns if turn.dia_id in question.evidence))
        for session in conversation.sessions
    )
    return replace(conversation, sessions=tuple(session for session in sessions if session.turns))


def keep_sessions(conversation: Conversation, sessions: int) -> Conversation:
    """Return the first sessions of a conversation, with the questions whose evidence lies in them."""
    kept = replace(conversation, sessions=conversation.sessions[:sessions])
    turns = kept.turns
    questions = (q for q in conversation.questions if q.evidence and all(turn in turns for turn in q.evidence))
    return replace(kept, questions=tuple(questions))


def load_locomo(path: str | Path) -> tuple[list[Conversation], list[str]]:
    """Load a LoCoMo file: JSON in the release's form, a list of samples with `sample_id`, `conversation` and `qa`.

    Returns:
        The conversations that can be used, and one line for each record that cannot, with its index in the file.

    Raises:
        ValueError: the file does not exist, is not LoCoMo, or holds nothing that can be used.
    """
    path = Path(path)
    remedy = "give the release's locomo10.json, or a file of the same form"
    try:
        samples = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"LoCoMo data must be an existing file, got {str(path)!r}: check the path") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"LoCoMo data must be readable as JSON, got {str(path)!r} ({error}): {remedy}") from None
    samples = [samples] if isinstance(samples, dict) else samples
    if not isinstance(samples, list) or not any(isinstance(one, dict) and "conversation" in one for one in samples):
        rule = "must be a list of samples with 'conversation' and 'qa'"
        raise ValueError(f"LoCoMo data {rule}, got {str(path)!r} without any: {remedy}")
    conversations: dict[str, Conversation] = {}
    problems: list[str] = []
    for number, sample in enumerate(samples):
        name = f"{path.name}[{number}]"
        try:
            one = _parse_sample(sample, name, problems)
            if one.sample_id in conversations:
                raise ValueError(f"{name}.sample_id must be unique, got {one.sample_id!r} again: sample left out")
            conversations[one.sample_id] = one
        except ValueError as error:
            problems.append(str(error))
    if not conversations:
        raise ValueError(f"LoCoMo data must hold a conversation, got none in {str(path)!r} ({problems[0]}): {remedy}")
    return list(conversations.values()), problems


def choose_conversations(conversations: Sequence[Conversation], names: Sequence[str] | None) -> list[Conversation]:
    """Choose conversations by their ids, in the order of the file; all of them if `names` is None.

    Raises:
        ValueError: an id is not in the file.
    """
    known = [conversation.sample_id for conversation in conversations]
    for name in names or ():
        check_choice("conversation", name, known)
    return [conversation for conversation in conversations if names is None or conversation.sample_id in names]


def _parse_sample(sample: Any, name: str, problems: list[str]) -> Conversation:
    if not isinstance(sample, dict) or not isinstance(sample.get("conversation"), dict):
        raise ValueError(f"{name} must have a 'conversation', got none: sample left out")
    talk = sample["conversation"]
    sample_id = str(sample.get("sample_id") or name)
    if not re.fullmatch(r"[\w.\[\]-]+", sample_id) or sample_id.startswith("."):
        rule = "must be letters, digits, - and _"
        raise ValueError(f"{name}.sample_id {rule}, got {sample_id!r}: sample left out, rename it")
    sessions = []
    for number in sorted(int(key[8:]) for key in talk if re.fullmatch(r"session_\d+", key)):
        turns = tuple(_parse_turns(talk[f"session_{number}"], f"{name}.conversation.session_{number}", problems))
        date_time = talk.get(f"session_{number}_date_time")
        sessions += [Session(number, date_time if isinstance(date_time, str) else None, turns)] if turns else []
    if not sessions:
        rule = "must have a session with turns"
        raise ValueError(f"{name}.conversation {rule}, got none in {sample_id!r}: sample left out")
    speakers = [str(talk.get(key) or "") for key in ("speaker_a", "speaker_b")]
    if not all(speakers):
        found = list(dict.fromkeys(turn.speaker for session in sessions for turn in session.turns))
        speakers = [found[0], found[min(1, len(found) - 1)]]
    entries = sample.get("qa")
    if not isinstance(entries, list):
        problems.append(f"{name}.qa must be a list of questions, got none in {sample_id!r}: no question is asked")
        entries = []
    questions = []
    for index, entry in enumerate(entries):
        try:
            questions.append(_parse_question(entry, index, f"{name}.qa[{index}]"))
        except ValueError as error:
            problems.append(str(error))
    return Conversation(sample_id, tuple(speakers), tuple(sessions), tuple(questions))


def _parse_turns(turns: Any, name: str, problems: list[str]) -> Iterator[Turn]:
    if not isinstance(turns, list):
        problems.append(f"{name} must be a list of turns, got {type(turns).__name__}: session left out")
        return
    for number, turn in enumerate(turns):
        fields = [turn.get(key) for key in ("dia_id", "speaker", "text")] if isinstance(turn, dict) else [None]
        if not all(isinstance(field, str) for field in fields):
            problems.append(f"{name}[{number}] must have dia_id, speaker and text, got {turn!r:.60}: turn left out")
            continue
        caption = turn.get("blip_caption")
        yield Turn(*fields, caption if isinstance(caption, str) and caption.strip() else None)


def _parse_question(entry: Any, index: int, name: str) -> LocomoQuestion:
    if not isinstance(entry, dict) or not str(entry.get("question") or "").strip():
        raise ValueError(f"{name} must have a 'question', got {entry!r:.60}: left out")
    category = entry.get("category")
    if category not in CATEGORIES or isinstance(category, bool):
        raise ValueError(f"{name}.category must be 1 to 5, got {category!r}: question left out")
    key = "adversarial_answer" if category == ADVERSARIAL else "answer"
    gold = entry.get(key)
    if not isinstance(gold, (str, int, float)) or not str(gold).strip():
        raise ValueError(f"{name} must have an {key!r} (category {category}), got {gold!r}: question left out")
    evidence = entry.get("evidence") or []
    # Some of the release's entries hold two ids, or a colon or a zero too many.
    ids = [
        f"D{int(session)}:{int(turn)}"
        for item in (evidence if isinstance(evidence, list) else [evidence])
        for session, turn in re.findall(r"D:?(\d+):(\d+)", str(item))
    ]
    return LocomoQuestion(
        index, str(entry["question"]).strip(), int(category), str(gold).strip(), tuple(dict.fromkeys(ids))
    )
