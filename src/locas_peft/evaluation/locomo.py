"""LoCoMo in the release's own JSON: conversations, questions by category, prompts, and the paper's dialogue protocol.

The paper's section on long-context dialogue. A memory reads the conversation; questions are then answered with no
context or with the whole dialogue. What cannot be used is named with its place in the file and left out; the rest is
kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
"""The release's category numbers."""
ADVERSARIAL = 5

PROMPTS: dict[str, str] = {
    "no-context": (
        "{speaker_a} and {speaker_b} have been writing to each other.{hint} Answer the question with a short "
        "phrase.\n\nQuestion: {question}\nAnswer:"
    ),
    "full-context": (
        "Here are the messages between {speaker_a} and {speaker_b}. A line with a date opens each session.\n\n"
        "{dialogue}\n\nAnswer the question with a short phrase, in the words of the messages where they have them; "
        'where the messages do not say, answer "Not mentioned".{hint}\n\nQuestion: {question}\nAnswer:'
    ),
    "hint-2": " Work out dates from the dates of the sessions.",
}
"""The prompts, by setting, and hints by category number (`hint-1` to `hint-5`) that take the place of `{hint}`."""
SETTINGS = ("no-context", "full-context")


@dataclass(frozen=True)
class Turn:
    """One message; `caption` describes a photo that went with it."""

    dia_id: str
    speaker: str
    text: str
    caption: str | None = None


@dataclass(frozen=True)
class Session:
    """Messages of one sitting, and when it was."""

    number: int
    date_time: str | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Question:
    """A question of category 1 to 5. `answer` is the gold answer, for category 5 the trap.

    `index` is its place in the conversation's list, `evidence` the ids of the turns that it rests on.
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
    questions: tuple[Question, ...]

    @property
    def turns(self) -> dict[str, Turn]:
        """All turns by their ids, in order."""
        return {turn.dia_id: turn for session in self.sessions for turn in session.turns}


def read_locomo(path: str | Path) -> tuple[list[Conversation], list[str]]:
    """Reads a LoCoMo file.

    Args:
        path: JSON as the release has it: a list of samples with `sample_id`, `conversation` and `qa`.

    Returns:
        The conversations that can be used, and one line for each record that cannot, with its place in the file.

    Raises:
        ValueError: there is no such file, it is no LoCoMo, or nothing in it can be used.
    """
    path = Path(path)
    remedy = "give the release's locomo10.json, or a file of the same form"
    try:
        samples = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"LoCoMo data must be an existing file, got {str(path)!r}: check the path") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"LoCoMo data must be readable as JSON, got {str(path)!r} ({error}): {remedy}") from None
    if isinstance(samples, dict):
        samples = [samples]
    known = [s for s in samples if isinstance(s, dict) and "conversation" in s] if isinstance(samples, list) else []
    if not known:
        raise ValueError(
            f"LoCoMo data must be a list of samples with 'conversation' and 'qa', got {str(path)!r} without any: "
            f"{remedy}"
        )
    conversations, problems = [], []
    for number, sample in enumerate(samples):
        place = f"{path.name}[{number}]"
        try:
            conversation = _read_sample(sample, place, problems)
        except ValueError as error:
            problems.append(str(error))
            continue
        if any(conversation.sample_id == other.sample_id for other in conversations):
            problems.append(f"{place}.sample_id must be unique, got {conversation.sample_id!r} again: sample left out")
            continue
        conversations.append(conversation)
    if not conversations:
        raise ValueError(f"LoCoMo data must hold a conversation, got none in {str(path)!r} ({problems[0]}): {remedy}")
    return conversations, problems


def _read_sample(sample: Any, place: str, problems: list[str]) -> Conversation:
    if not isinstance(sample, dict) or not isinstance(sample.get("conversation"), dict):
        raise ValueError(f"{place} must have a 'conversation', got none: sample left out")
    talk = sample["conversation"]
    sample_id = str(sample.get("sample_id") or place)
    if not re.fullmatch(r"[\w.\[\]-]+", sample_id) or sample_id.startswith("."):
        raise ValueError(
            f"{place}.sample_id must be letters, digits, - and _, got {sample_id!r}: sample left out, rename it"
        )
    sessions = []
    numbers = sorted(int(key[8:]) for key in talk if re.fullmatch(r"session_\d+", key))
    for number in numbers:
        turns = list(_read_turns(talk[f"session_{number}"], f"{place}.conversation.session_{number}", problems))
        if turns:
            date_time = talk.get(f"session_{number}_date_time")
            sessions.append(Session(number, date_time if isinstance(date_time, str) else None, tuple(turns)))
    if not sessions:
        raise ValueError(
            f"{place}.conversation must have a session with turns, got none in {sample_id!r}: sample left out"
        )
    met = list(dict.fromkeys(turn.speaker for session in sessions for turn in session.turns))
    speakers = tuple(str(talk.get(key) or "") for key in ("speaker_a", "speaker_b"))
    if not all(speakers):
        speakers = (met[0], met[1] if len(met) > 1 else met[0])
    questions = sample.get("qa")
    if not isinstance(questions, list):
        problems.append(f"{place}.qa must be a list of questions, got none in {sample_id!r}: nothing is asked there")
        questions = []
    read = []
    for index, question in enumerate(questions):
        try:
            read.append(_read_question(question, index, f"{place}.qa[{index}]"))
        except ValueError as error:
            problems.append(str(error))
    return Conversation(sample_id, speakers, tuple(sessions), tuple(read))


def _read_turns(turns: Any, place: str, problems: list[str]) -> Iterator[Turn]:
    if not isinstance(turns, list):
        problems.append(f"{place} must be a list of turns, got {type(turns).__name__}: session left out")
        return
    for number, turn in enumerate(turns):
        fields = [turn.get(key) for key in ("dia_id", "speaker", "text")] if isinstance(turn, dict) else [None]
        if not all(isinstance(field, str) for field in fields):
            problems.append(f"{place}[{number}] must have dia_id, speaker and text, got {_short(turn)}: turn left out")
            continue
        caption = turn.get("blip_caption")
        yield Turn(*fields, caption if isinstance(caption, str) and caption.strip() else None)


def _read_question(question: Any, index: int, place: str) -> Question:
    if not isinstance(question, dict) or not str(question.get("question") or "").strip():
        raise ValueError(f"{place} must have a 'question', got {_short(question)}: left out")
    category = question.get("category")
    if category not in CATEGORIES or isinstance(category, bool):
        raise ValueError(f"{place}.category must be 1 to 5, got {category!r}: question left out")
    key = "adversarial_answer" if category == ADVERSARIAL else "answer"
    answer = question.get(key)
    if not isinstance(answer, (str, int, float)) or not str(answer).strip():
        raise ValueError(f"{place} must have an {key!r} (category {category}), got {answer!r}: question left out")
    evidence = question.get("evidence") or []
    # Some of the release's entries hold two ids, or a colon or a zero too many.
    found = [
        f"D{int(session)}:{int(turn)}"
        for item in (evidence if isinstance(evidence, list) else [evidence])
        for session, turn in re.findall(r"D:?(\d+):(\d+)", str(item))
    ]
    return Question(
        index, str(question["question"]).strip(), int(category), str(answer).strip(), tuple(dict.fromkeys(found))
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def dialogue_lines(conversation: Conversation) -> list[str]:
    """Gives a conversation as text, line by line: a session's date, then its turns, "Speaker: text".

    A photo stands after the text in square brackets. An empty line parts two sessions.
    """
    lines = []
    for session in conversation.sessions:
        if lines:
            lines.append("")
        lines.append(f"Session {session.number}" + (f", {session.date_time}" if session.date_time else ""))
        for turn in session.turns:
            text = " ".join(turn.text.split())
            lines.append(f"{turn.speaker}: {text}" + (f" [photo: {turn.caption}]" if turn.caption else ""))
    return lines


def dialogue(conversation: Conversation) -> str:
    """Gives a whole conversation as text: what a memory reads, and what stands in context (see `dialogue_lines`)."""
    return "\n".join(dialogue_lines(conversation))


def make_prompt(
    conversation: Conversation,
    question: Question,
    setting: str,
    *,
    text: str | None = None,
    prompts: dict[str, str] = PROMPTS,
) -> str:
    """Makes a question's prompt.

    Args:
        conversation: where the question belongs.
        question: one of its questions.
        setting: "no-context" or "full-context".
        text: the dialogue as it shall stand in context; the whole one where None.
        prompts: see `PROMPTS`.

    Raises:
        ValueError: there is no such setting.
    """
    if setting not in SETTINGS:
        raise ValueError(f"setting must be one of {', '.join(SETTINGS)}, got {setting!r}")
    fields = {
        "speaker_a": conversation.speakers[0],
        "speaker_b": conversation.speakers[1],
        "question": question.question,
        "hint": prompts.get(f"hint-{question.category}", ""),
    }
    if setting == "full-context":
        fields["dialogue"] = dialogue(conversation) if text is None else text
    return prompts[setting].format(**fields)


def read_prompts(path: str | Path) -> dict[str, str]:
    """Reads prompts from a JSON file; what it leaves out is as in `PROMPTS`.

    Raises:
        ValueError: it is no JSON object of texts, or names a prompt or a placeholder that there is not.
    """
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"prompts must be a JSON file, got {str(path)!r} ({error}): check it") from None
    names = [*SETTINGS, *(f"hint-{category}" for category in CATEGORIES)]
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise ValueError(f"prompts must be an object of texts, got {str(path)!r}: name {', '.join(names)}")
    for name, value in given.items():
        if name not in names:
            raise ValueError(f"prompts must be named {', '.join(names)}, got {name!r} in {str(path)!r}: rename it")
        allowed = {"speaker_a", "speaker_b", "question", "hint"} | ({"dialogue"} if name == "full-context" else set())
        needed = {"question"} | (allowed & {"dialogue"}) if name in SETTINGS else set()
        found = set(re.findall(r"{(\w*)}", value))
        if found - allowed or needed - found:
            raise ValueError(
                f"prompt {name!r} must have {_braced(needed)} and may have {_braced(allowed)}, got {_braced(found)}: "
                "correct the placeholders"
            )
    return {**PROMPTS, **given}


def _braced(names: set[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in sorted(names)) or "no placeholders"


def choose_conversations(conversations: Sequence[Conversation], names: Sequence[str] | None) -> list[Conversation]:
    """Picks conversations by their ids, in the order of the file.

    Raises:
        ValueError: an id is not in the file.
    """
    if names is None:
        return list(conversations)
    known = [conversation.sample_id for conversation in conversations]
    for name in names:
        if name not in known:
            raise ValueError(f"conversation must be one of {', '.join(known)}, got {name!r}: choose one of them")
    return [conversation for conversation in conversations if conversation.sample_id in names]
