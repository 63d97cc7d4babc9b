"""The study beside context distillation at the same processor time, on passages that choose settings.

    python benchmarks/context_distillation.py MODEL --folder DATA --passages 9,34,102 --out OUT
    python benchmarks/context_distillation.py MODEL --folder DATA --passages 9,34,102 --out OUT --collect

In context distillation the teacher is the base with the text in its context, and the student is the
model with the memory and without the text. What the student is asked is called material here; its
lines are `LINES`. The base answers it with the whole passage before it. The student learns the
teacher's distributions: the `CANDIDATES` likeliest tokens and the rest. It has the package's
anchor, schedule, rate and width. Each lesson has one wording, where the package's have three, and
only the rows `passages` and `short` have discriminants. The time of a row ends where that of the
package's study of the same passage ended; writing counts in both. Each row and passage has a JSON
file in OUT/HOST.
"""

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from knowledge_tables.asked import ask
from knowledge_tables.bench import KnowledgeBench, Options
from knowledge_tables.documents import CHOOSING, Document, parse_passage
from knowledge_tables.grading import METRICS
from knowledge_tables.memories import SideEffects
from knowledge_tables.rows import IN_CONTEXT, NONE
from knowledge_tables.scales import FULL
from measuring import make_table
from paper_tables.choices import load_lines
from paper_tables.command import add_run_options, running
from torch import Tensor, nn

from locas_peft.asking import encode_question
from locas_peft.asking.prompts import SHORT_PROMPT
from locas_peft.evaluation.intervals import mean_interval
from locas_peft.exchanges import PER_PASSAGE, Exchange, write_exchanges, write_replies
from locas_peft.exchanges.question_words import ENGLISH
from locas_peft.exchanges.writing import find_question, list_phrases
from locas_peft.files import load_json, write_json
from locas_peft.model import CausalLM
from locas_peft.selfstudy import SelfStudy, split_passages
from locas_peft.selfstudy.distillation import BATCH as LESSONS
from locas_peft.selfstudy.distillation import Distillation
from locas_peft.selfstudy.lessons import FORMS, Lesson, make_lesson, write_answers
from locas_peft.selfstudy.schedule import Schedule
from locas_peft.slots.discriminants import can_tell_apart, lift_norm_clip
from locas_peft.stages import StudySettings, attached, complete
from locas_peft.tables import format_figure, format_mean, format_percent
from locas_peft.text import tokenize
from locas_peft.ttt.active import calibrate_empty
from locas_peft.tuner import evaluating

PACKAGE = "passages"
"""The row of the package's study: the answer to each question is its passage."""
SHORT = "short"
"""The row of the package's lessons, and beside each written question one that asks for a few words.
Its answer is the teacher's, where that costs it at most `MOST_NATS`; else there is none."""
RESTATEMENTS = (
    'Summarize the text "{}".',
    'List the facts of the text "{}".',
    'Tell the text "{}" in other words.',
    'Explain the text "{}" to a friend.',
    'What is the text "{}" about?',
    'Write a quiz with answers about the text "{}".',
)
JOIN = "{}\n{}\n\nWrite a question that joins these two facts."
BLANK = "Complete the sentence: {} ..."
ANSWER_TOKENS = 40
SHORT_TOKENS = 16
RESTATEMENT_TOKENS = 96
BATCH = 64
# Of an answer whose tokens cost the teacher more, in nats a token, the passage is the target.
MOST_NATS = 0.2
LINES = ("questions", "phrases", "restatements", "blanks", "joined")
"""The questions that the package's study writes; those that it makes of phrases; prompts that ask
for the text in other words; sentences to be completed; questions that join two sentences."""
QUESTIONS = LINES[:2]


@dataclass(frozen=True)
class Row:
    """What is taught.

    Args:
        lines: of the material.
        chosen: whether the passage is the target where the teacher's answer costs it much.
        with_passages: whether the package's lessons are taught, and the lines beside them.
    """

    lines: tuple[str, ...]
    chosen: bool = False
    with_passages: bool = False


ROWS = {
    PACKAGE: None,
    "teacher": Row(QUESTIONS),
    "chosen": Row(QUESTIONS, chosen=True),
    "material": Row(LINES),
    "material-chosen": Row(LINES, chosen=True),
    SHORT: Row((SHORT,), with_passages=True),
    **{line: Row((line,)) for line in LINES},
}


@dataclass(frozen=True)
class Prompt:
    """What the student is asked, in which form, and the passage that answers it, where one does."""

    question: str
    form: str = "{question}"
    passage: str = ""
    most_tokens: int = ANSWER_TOKENS


class TimedDistillation(Distillation):
    """A distillation of ready lessons that ends with a budget of processor seconds.

    Args:
        lessons, texts: what is learned, and for each lesson its answer, or the passage that has it.
        parts: of each lesson, what it shares with others how far it is learned.
        tells_apart: as for `Distillation`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        lessons: Sequence[Lesson],
        texts: Sequence[str],
        settings: StudySettings,
        budget: float,
        parts: Sequence[str] | None = None,
        tells_apart: bool = False,
    ):
        exchanges = []
        for lesson, text in zip(lessons, texts, strict=True):
            exchanges.append(Exchange(lesson.question, text))
        super().__init__(model, tokenizer, exchanges, settings, tells_apart=tells_apart)
        self._lessons = list(lessons)
        if parts is not None:
            passes = self._schedule.total // len(lessons)
            self._schedule = Schedule(
                parts, wordings=len(FORMS), passes=passes, batch=LESSONS, seed=settings.seed
            )
        self._budget = budget
        self._began = time.process_time()

    def _measure_done(self) -> float:
        """Return the share of the study that is over, by time or by lessons."""
        elapsed = (time.process_time() - self._began) / self._budget
        return min(1.0, max(elapsed, super()._measure_done()))


class Teacher:
    """The base with a text before it: it writes material about the text and answers it."""

    def __init__(self, bench: KnowledgeBench, document: Document):
        self._tokenizer = bench.tokenizer
        self._base = bench.base
        self._host = CausalLM(bench.base)
        self._document = document
        self._generator = torch.Generator(self._host.device)
        self._random = random.Random()
        ids = tokenize(self._tokenizer, document.text)
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        self._passages = split_passages(self._tokenizer, text)
        # Of each line: lessons, their answers and teacher's losses, and processor seconds.
        self._lines: dict[str, tuple[list[Lesson], list[str], list[float], float]] = {}
        self._exchanges: list[Exchange] = []
        self._exchange_seconds = 0.0

    def make(self, row: Row) -> tuple[list[Lesson], list[str], float]:
        """Return the lessons of a row with their answers, and the seconds of their writing."""
        lessons: list[Lesson] = []
        texts: list[str] = []
        seconds = 0.0
        for line in row.lines:
            line_lessons, answers, losses, line_seconds = self._find_line(line)
            for lesson, text, nats in zip(line_lessons, answers, losses, strict=True):
                if row.chosen and nats > MOST_NATS and lesson.subject:
                    exchange = Exchange(lesson.question, lesson.subject)
                    lessons.append(make_lesson(exchange, self._tokenizer))
                    texts.append(lesson.subject)
                else:
                    lessons.append(replace(lesson, subject=""))
                    texts.append(text)
            seconds += line_seconds
        if set(row.lines) & set(QUESTIONS):
            seconds += self._exchange_seconds
        return lessons, texts, seconds

    def make_short(self) -> tuple[list[Lesson], list[str], list[str], float]:
        """Return the lessons of `SHORT`, their passages, their parts, and the seconds of writing."""
        short_lessons, _, losses, seconds = self._find_line(SHORT)
        lessons = [make_lesson(exchange, self._tokenizer) for exchange in self._exchanges]
        texts = [exchange.answer for exchange in self._exchanges]
        parts = list(texts)
        for lesson, nats in zip(short_lessons, losses, strict=True):
            if nats <= MOST_NATS:
                lessons.append(replace(lesson, subject=""))
                texts.append(lesson.subject)
                parts.append(f"in a few words: {lesson.question}")
        return lessons, texts, parts, seconds + self._exchange_seconds

    def _find_line(self, line: str) -> tuple[list[Lesson], list[str], list[float], float]:
        """Return the lessons of a line, their answers and losses, and seconds; written once."""
        if line not in self._lines:
            self._lines[line] = self._write_line(line)
        return self._lines[line]

    def _write_line(self, line: str) -> tuple[list[Lesson], list[str], list[float], float]:
        if line in (*QUESTIONS, SHORT) and not self._exchanges:
            began = time.process_time()
            for block in write_exchanges(self._base, self._tokenizer, self._passages, PER_PASSAGE):
                self._exchanges += block.exchanges
            self._exchange_seconds = time.process_time() - began
        self._generator.manual_seed(0)
        self._random.seed(0)
        began = time.process_time()
        with torch.no_grad(), evaluating(self._base):
            prompts = list(getattr(self, f"_list_{line}")())
            answers = self._answer(prompts, sampled=line == "restatements")
        lessons = []
        texts = []
        losses = []
        for prompt, (ids, candidates, targets, nats) in zip(prompts, answers, strict=True):
            # The subject keeps the passage until the target is chosen.
            lessons.append(
                Lesson(prompt.question, prompt.passage, ids, candidates, targets, (prompt.form,))
            )
            texts.append(self._tokenizer.decode(ids, skip_special_tokens=True))
            losses.append(nats)
        return lessons, texts, losses, time.process_time() - began

    def _list_questions(self) -> Iterator[Prompt]:
        yield from self._list_exchanges(phrases=False)

    def _list_phrases(self) -> Iterator[Prompt]:
        yield from self._list_exchanges(phrases=True)

    def _list_exchanges(self, phrases: bool) -> Iterator[Prompt]:
        beginnings = tuple(form.split("{}")[0] for form in ENGLISH.about)
        for number, exchange in enumerate(self._exchanges):
            if exchange.question.startswith(beginnings) == phrases:
                yield Prompt(exchange.question, FORMS[number % len(FORMS)], exchange.answer)

    def _list_short(self) -> Iterator[Prompt]:
        for prompt in self._list_questions():
            yield replace(prompt, form=SHORT_PROMPT, most_tokens=SHORT_TOKENS)

    def _list_restatements(self) -> Iterator[Prompt]:
        for number in range(2 * len(self._passages) + len(RESTATEMENTS)):
            form = RESTATEMENTS[number % len(RESTATEMENTS)]
            question = form.format(self._document.title)
            yield Prompt(question, most_tokens=RESTATEMENT_TOKENS)

    def _list_blanks(self) -> Iterator[Prompt]:
        """Cut each sentence before some of its phrases."""
        for passage in self._passages:
            places = []
            for phrase in dict.fromkeys(list_phrases(passage.text)):
                place = passage.text.find(phrase)
                if place > 0:
                    places.append(place)
            for place in sorted(self._random.sample(places, min(4, len(places)))):
                yield Prompt(BLANK.format(passage.text[:place].strip()))

    def _list_joined(self) -> Iterator[Prompt]:
        requests = []
        if len(self._passages) < 2:
            return
        for number in range(4 * len(self._passages)):
            first, second = self._random.sample(self._passages, 2)
            begin = ENGLISH.beginnings[number % len(ENGLISH.beginnings)]
            requests.append((JOIN.format(first.text, second.text), begin))
        replies = write_replies(self._host, self._tokenizer, requests, self._generator)
        for number, reply in enumerate(replies):
            line = reply.strip().split("\n")[0]
            yield Prompt(find_question(line) or line, FORMS[number % len(FORMS)])

    def _answer(
        self, prompts: Sequence[Prompt], sampled: bool
    ) -> list[tuple[Tensor, Tensor, Tensor, float]]:
        """Return each answer [T], its candidates and their probabilities [T, K], and its loss."""
        answers = []
        for first in range(0, len(prompts), BATCH):
            answers += self._answer_batch(prompts[first : first + BATCH], sampled)
        return answers

    def _answer_batch(
        self, prompts: Sequence[Prompt], sampled: bool
    ) -> list[tuple[Tensor, Tensor, Tensor, float]]:
        rows = []
        for prompt in prompts:
            form = "{context}" + prompt.form.replace("{context}", "")
            context = self._document.text
            rows.append(encode_question(self._tokenizer, prompt.question, form, context))
        most = max(prompt.most_tokens for prompt in prompts)
        generator = self._generator if sampled else None
        answers = []
        for ids, candidates, targets in write_answers(
            self._host, self._tokenizer, rows, most, generator
        ):
            chances = (targets * (candidates == ids[:, None])).sum(1)
            answers.append((ids, candidates, targets, -chances.log().mean().item()))
        return answers


def measure_package(bench: KnowledgeBench, document: Document, rate: float | None) -> dict:
    """Study a passage as the package does; return the figures."""
    settings = make_settings(bench, rate)
    effects = SideEffects(bench)
    with attached(bench.base, settings) as model:
        began = time.process_time()
        ids = tokenize(bench.tokenizer, document.text)
        study = SelfStudy(model, bench.tokenizer, ids, settings)
        list(study.run())
        figures = {"seconds": time.process_time() - began, "steps": study.figures["steps"]}
        figures["lessons"] = study.kept
        model.requires_grad_(False)
        return {**figures, **ask_all(bench, model, document), **effects.measure(model)}


def measure_teacher(
    bench: KnowledgeBench,
    document: Document,
    teacher: Teacher,
    row: Row,
    budget: float,
    rate: float | None,
) -> dict[str, Any]:
    """Distil a row's material into a memory; return the figures."""
    settings = make_settings(bench, rate)
    effects = SideEffects(bench)
    parts = None
    if row.with_passages:
        lessons, texts, parts, writing = teacher.make_short()
    else:
        lessons, texts, writing = teacher.make(row)
    with attached(bench.base, settings) as model:
        began = time.process_time()
        ids = tokenize(bench.tokenizer, document.text)
        calibrate_empty(model, ids[None])
        left = max(1.0, budget - writing)
        tells_apart = parts is not None and can_tell_apart(model, len(set(texts)))
        if tells_apart:
            lift_norm_clip(model)
        learned = TimedDistillation(
            model, bench.tokenizer, lessons, texts, settings, left, parts, tells_apart
        )
        learned.begin()
        while not learned.is_done:
            learned.step()
        figures = {"seconds": writing + time.process_time() - began, "writing": writing}
        figures |= {"steps": learned.steps, "lessons": len(lessons)}
        figures["kl_nats"] = learned.mean_losses
        model.requires_grad_(False)
        return {**figures, **ask_all(bench, model, document), **effects.measure(model)}


def make_settings(bench: KnowledgeBench, rate: float | None) -> StudySettings:
    given = {} if rate is None else {"learning_rate": rate}
    return complete(StudySettings(method=bench.locas, **given), bench.base)


def ask_all(
    bench: KnowledgeBench, model: nn.Module, document: Document, row: Any = NONE
) -> dict[str, Any]:
    """Return the grades and answers; the answers are for reading, not for a repository."""
    with torch.no_grad(), evaluating(model):
        return ask(bench, [], model, document, row)


def load_document(data: Path, number: int) -> Document:
    records = load_lines(data / "knowledge" / "squad.jsonl")
    if number >= CHOOSING["squad"]:
        raise ValueError(f"--passages must be below {CHOOSING['squad']}, got {number}")
    return parse_passage(number, records[number])


def fill(bench: KnowledgeBench, arguments: argparse.Namespace, folder: Path) -> None:
    """Make the results that do not exist, passage by passage."""
    for number in arguments.passages:
        document = load_document(bench.data, number)
        teacher = Teacher(bench, document)
        for key in arguments.rows:
            file = name_file(folder, document, key, arguments.rate)
            if file.exists():
                continue
            if key in ("none", "context"):
                row = NONE if key == "none" else IN_CONTEXT
                figures = ask_all(bench, bench.base, document, row)
            elif key == PACKAGE:
                figures = measure_package(bench, document, arguments.rate)
            else:
                package = name_file(folder, document, PACKAGE, None)
                if not package.exists():
                    raise ValueError(f"--rows must have {PACKAGE!r} first: it sets the time")
                budget = load_json(package)["seconds"]
                figures = measure_teacher(
                    bench, document, teacher, ROWS[key], budget, arguments.rate
                )
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {**figures, "row": key, "document": document.name})
            cells = [format_figure(figures.get("seconds", 0.0), 1)]
            cells.append(f"{sum(figures['within'])} of {len(figures['within'])}")
            cells.append(f"F1 {100 * sum(figures['f1']) / len(figures['f1']):.1f}")
            print(document.name, file.stem, *cells, flush=True)


def name_file(folder: Path, document: Document, key: str, rate: float | None) -> Path:
    slug = key if rate is None else f"{key}-rate{rate:g}"
    return folder / document.name / f"{slug}.json"


def tabulate(folder: Path, passages: Sequence[int]) -> str:
    """Return the table of the rows that have all passages, changes paired by questions."""
    names = [f"squad-{number:04d}" for number in passages]
    rows: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("squad-*/*.json")):
        if file.parent.name in names:
            rows.setdefault(file.stem, []).append(load_json(file))
    lines = []
    for slug, results in rows.items():
        if len(results) < len(names) or len(rows.get(PACKAGE, ())) < len(names):
            continue
        cells = [slug]
        for metric in METRICS:
            cells.append(format_percent(mean_interval(_join(results, metric))))
        for metric in ("within", "f1"):
            base = _join(rows[PACKAGE], metric)
            pairs = zip(_join(results, metric), base, strict=True)
            cells.append(format_percent(mean_interval([value - other for value, other in pairs])))
        for name in ("seconds", "lessons", "steps"):
            values = [result[name] for result in results if name in result]
            cells.append(format_figure(sum(values) / len(values), 0) if values else "-")
        kls = [sum(r["own_answers_kl"]) / len(r["own_answers_kl"]) for r in results if "steps" in r]
        cells.append(format_mean(mean_interval(kls), 3) if kls else "-")
        rises = []
        for result in results:
            if "steps" in result:
                rises.append(result["unread_perplexity"] / result["unread_base_perplexity"] - 1)
        cells.append(format_percent(mean_interval(rises), 1) if rises else "-")
        cells.append(str(len(_join(results, "f1"))))
        lines.append(cells)
    head = ["", "gold within", "exact match", "F1", "gold within, to the study's"]
    head += ["F1, to the study's", "processor time, s", "lessons", "steps"]
    head += ["KL on own answers", "unread perplexity, change", "n"]
    return make_table(head, lines)


def _join(results: Sequence[dict[str, Any]], metric: str) -> list[float]:
    return [value for result in results for value in result[metric]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="a folder, a name on the hub, a GGUF file, or smollm2")
    add("--folder", type=Path, required=True, help="the folder of the data sets")
    add("--out", type=Path, required=True)
    add("--passages", required=True, help="numbers of squad.jsonl below 200, with commas")
    add("--rows", default=f"none,context,{','.join(ROWS)}")
    add("--rate", type=float, help="the learning rate; the method's by default")
    add_run_options(parser)
    arguments = parser.parse_args()
    arguments.passages = [int(number) for number in arguments.passages.split(",")]
    arguments.rows = arguments.rows.split(",")
    with running("context_distillation", arguments):
        bench = KnowledgeBench(
            arguments.model,
            arguments.folder,
            arguments.out,
            FULL,
            Options(choose=True),
            arguments.device,
            arguments.dtype,
        )
        folder = arguments.out / bench.host
        if not arguments.collect:
            fill(bench, arguments, folder)
        print(tabulate(folder, arguments.passages))


if __name__ == "__main__":
    main()
