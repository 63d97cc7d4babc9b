"""Dialogues: texts in which two or more speakers say lines in turns."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import regex

__all__ = ["Turn", "ends_sentence", "is_answer", "is_question", "list_turns", "split_label"]

_LABEL = regex.compile(r"([^\W\d_][^:：]{0,39})(?:: |：)\s*(\S.*)")
_DATE = re.compile(r"\d{1,2} [^\W\d_]{3,9},? \d{4}|[^\W\d_]{3,9} \d{1,2},? \d{4}|\d{4}-\d\d-\d\d")
# Thai and Lao put no mark at the end of a sentence.
_SENTENCE_END = regex.compile(
    r"(?:[\p{Sentence_Terminal}…\p{Extended_Pictographic}][\p{P}\p{S}\uFE0F]*|[\p{Thai}\p{Lao}])$"
)
# Of a longer line, its end alone is searched: the time would grow with the square of the length.
_LONGEST_END = 16
# The labels of questions and those of their answers, in several languages.
_PAIRS = {
    ("q", "a"),
    ("question", "answer"),
    ("f", "a"),
    ("frage", "antwort"),
    ("q", "r"),
    ("question", "réponse"),
    ("p", "r"),
    ("pregunta", "respuesta"),
    ("pergunta", "resposta"),
    ("d", "r"),
    ("domanda", "risposta"),
    ("v", "a"),
    ("vraag", "antwoord"),
    ("в", "о"),
    ("вопрос", "ответ"),
    ("问", "答"),
    ("問", "答"),
    ("質問", "回答"),
    ("질문", "답변"),
}
_QUESTIONS = frozenset(question for question, _ in _PAIRS)
_ANSWERS = frozenset(answer for _, answer in _PAIRS)
# Labels that are not speakers, by language. They may occur more than once, as speakers do.
_REMARKS_BY_LANGUAGE = {
    "en": "note notes nb tip hint info warning caution danger attention important remark example "
    "exercise step todo fixme update ps edit result debug trace warn error fatal critical notice "
    "problem solution cause reason fix input output before after pro pros con cons term "
    "definition ingredient ingredients",
    "de": "hinweis anmerkung achtung tipp beispiel schritt warnung fehler wichtig lösung",
    "es": "nota consejo aviso ejemplo paso atención advertencia problema solución",
    "fr": "remarque conseil exemple étape erreur avertissement",
    "it": "consiglio attenzione esempio passo avviso soluzione",
    "ja": "備考 ヒント 例",
    "nl": "opmerking voorbeeld stap waarschuwing",
    "pt": "dica atenção exemplo",
    "ru": "примечание внимание совет пример шаг ошибка",
    "zh": "注意 提示 备注 例如 步骤 警告",
}
_REMARKS = frozenset(" ".join(_REMARKS_BY_LANGUAGE.values()).split())


@dataclass(frozen=True)
class Turn:
    """A line of a dialogue.

    Attributes:
        said: the line without its speaker.
        speaker: empty for a line without one.
        date: of the last heading above that has one; empty for none.
    """

    said: str
    speaker: str = ""
    date: str = ""


def ends_sentence(line: str) -> bool:
    """Return whether a line ends with the mark of a sentence in any script, or with an emoji."""
    return _SENTENCE_END.search(line.rstrip()[-_LONGEST_END:]) is not None


def split_label(line: str) -> tuple[str, str] | None:
    """Return the label of a line "Label: words" and its words; None for another line."""
    match = _LABEL.fullmatch(" ".join(line.split()))
    return None if match is None else (match[1], match[2])


def is_question(line: str) -> bool:
    """Return whether a line has the label of a question, as "Q: ..." has."""
    return _find_name(line) in _QUESTIONS


def is_answer(line: str) -> bool:
    """Return whether a line has the label of an answer, as "A: ..." has."""
    return _find_name(line) in _ANSWERS


def list_turns(lines: Sequence[str]) -> list[Turn]:
    """Return the turns of a dialogue, and its other lines; nothing for lines that are no dialogue.

    Lines are a dialogue where at least half of them are turns, "Name: words", and the speakers take
    turns: half of the speakers speak more than once, mostly after somebody else, and mostly in
    whole sentences. Questions with answers, notes, and lines of a log are not said by a speaker.
    Neither are the fields of records, which are no sentences. A line with a date that does not end
    like a sentence is a heading, and left out.
    """
    lines = [" ".join(line.split()) for line in lines if line.strip()]
    labels = _list_speakers(lines)
    turns = []
    date = ""
    for line, label in zip(lines, labels, strict=True):
        if label is not None:
            speaker, said = label
            turns.append(Turn(said, speaker, date))
            continue
        dated = _DATE.search(line)
        if dated is None or ends_sentence(line):
            turns.append(Turn(line))
        else:
            date = dated[0]
    spoken = [turn for turn in turns if turn.speaker]
    is_dialogue = 2 * len(spoken) >= len(lines) and _take_turns(spoken)
    return turns if is_dialogue else []


def _list_speakers(lines: Sequence[str]) -> list[tuple[str, str] | None]:
    """Return for each line its speaker and what is said; None for a line without a speaker."""
    labels = [split_label(line) for line in lines]
    for number, line in enumerate(lines):
        if _find_name(line) in _REMARKS:
            labels[number] = None
    for number, (line, following) in enumerate(pairwise(lines)):
        if (_find_name(line), _find_name(following)) in _PAIRS:
            labels[number] = None
            labels[number + 1] = None
    return labels


def _find_name(line: str) -> str:
    """Return the label of a line, folded, without numbers and marks, as "step" of "Step 2:"."""
    label = split_label(line.lstrip("*_#>- ").replace("**", "").replace("__", ""))
    if label is None:
        return ""
    return regex.sub(r"[^\p{L}\p{M} ]", "", label[0]).strip().casefold()


def _take_turns(turns: Sequence[Turn]) -> bool:
    """Return whether two or more speakers say sentences in turns."""
    counts = Counter(turn.speaker for turn in turns)
    returning = sum(count > 1 for count in counts.values())
    changes = sum(turn.speaker != following.speaker for turn, following in pairwise(turns))
    sentences = sum(ends_sentence(turn.said) for turn in turns)
    return (
        len(counts) > 1
        and 2 * returning >= len(counts)
        and 2 * changes >= len(turns) - 1
        and 2 * sentences >= len(turns)
    )
