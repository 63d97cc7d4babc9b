"""The demo's second part: a model studies a short page, and is asked about it before and after."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..asking import Answer, Answerer, Question
from ..memories.loading import memory_attached
from ..progress import Progress, follow_steps
from ..stages import Place, StudyRecord, StudySettings, study
from ..text import tokenize
from .pages import find_sentence, load_page, load_page_questions

__all__ = ["ASKED", "Asked", "PageStudied", "study_and_ask", "study_page"]

SENTENCES = 8
"""How many sentences of the page are studied."""
ASKED = (0, 9, 15)
"""The questions that are asked."""


@dataclass(frozen=True)
class Asked:
    """A question about the page.

    Attributes:
        question: it.
        sentence: the page's sentence that answers it.
        before, after: what the model answers without the page, before and after the study.
    """

    question: str
    sentence: str
    before: str
    after: str


@dataclass(frozen=True)
class PageStudied:
    """A study of the page, and the questions about it."""

    record: StudyRecord
    asked: list[Asked]

    def to_json(self) -> dict[str, Any]:
        """Return the row of `demo.json`."""
        return {**self.record.to_json(), "asked": [vars(asked) for asked in self.asked]}


def study_page(
    base: PreTrainedModel,
    tokenizer: Any,
    settings: StudySettings,
    out: Path,
    progress: Progress,
) -> PageStudied:
    """Study the page's first sentences; ask about them before and after.

    Args:
        base, tokenizer: a causal LM that answers questions, and its tokenizer; restored at the end.
        settings: complete ones.
        out: the memory's folder; a memory there is replaced.
    """
    base.eval()
    page = load_page(sentences=SENTENCES)
    all_questions = load_page_questions()
    questions = [all_questions[number] for number in ASKED]
    before = Answerer(base, tokenizer).answer(questions)
    place = Place(out=out, overwrite=True, title="lighthouse.txt", kept_text=page)
    # A study has lines of its own for its two phases.
    show = follow_steps(progress, settings.method, 0)
    record, after = study_and_ask(base, tokenizer, page, settings, place, questions, on_step=show)
    asked = []
    for question, old, new in zip(questions, before, after, strict=True):
        sentence = find_sentence(page, question.answer or "")
        asked.append(Asked(question.question, sentence, old.text, new.text))
    return PageStudied(record, asked)


def study_and_ask(
    base: PreTrainedModel,
    tokenizer: Any,
    text: str,
    settings: StudySettings,
    place: Place,
    questions: Sequence[Question],
    **options: Any,
) -> tuple[StudyRecord, list[Answer]]:
    """Study a text, and ask the memory about it; return the study's record and the answers.

    Args:
        base, tokenizer: a causal LM that answers questions, and its tokenizer; restored at the end.
        place: names the memory's folder.
        options: of `stages.study`, such as `exchanges`.
    """
    assert place.out is not None
    record = study(base, tokenizer, tokenize(tokenizer, text), settings, place, **options)
    with memory_attached(base, place.out) as model:
        return record, Answerer(model, tokenizer).answer(questions)
