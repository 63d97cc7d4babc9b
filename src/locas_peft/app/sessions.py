"""Visitors of the page, and the one model that they share.

Whoever holds the lock may use the model; a reading leaves it after each step to the questions that
wait. Each piece of work has its own modules around the same weights, so that no question meets an
adapter that is being trained.
"""

import logging
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import backbone
from ..asking import Answer, Answerer, can_chat
from ..asking.answers import Turns
from ..checks import hide_folder
from ..exchanges import Exchange
from ..files import is_same_folder
from ..library import Library, add_sources, check_name, make_sample
from ..library.routing import list_passages
from ..library.source import holds_text
from ..memories import (
    CHECKPOINT_FOLDER,
    describe_memory,
    load_memory,
    load_memory_config,
    share_weights,
)
from ..memories.checkpoint import locked
from ..memories.folder import TEXT, set_base
from ..model import count_positions
from ..selfstudy import StudyStep
from ..stages import (
    Place,
    ReadSettings,
    StageRun,
    StudySettings,
    choose_memory,
    complete,
    for_base,
    make_trainer,
    open_reading,
    open_study,
)
from ..text import load_text, tokenize, unwrap
from ..ttt import Chunk, cumulative

__all__ = [
    "MOST_CHARACTERS",
    "MOST_QUESTIONS",
    "ROUTED",
    "Job",
    "SharedModel",
    "Visitor",
    "Visitors",
    "explain",
]

ANSWER_TOKENS = 96
WINDOW = 512
LEAST_CHUNKS = 12
"""Chunks of a text: a short one has a shorter stride, so that its perplexity falls visibly."""
MOST_CHARACTERS = 2_000_000
MOST_QUESTIONS = 32
MOST_WAITING = 32
MOST_VISITORS = 200
MOST_MEMORIES = 100
"""The most memories on a shelf."""
ROUTED = "?"
"""In place of a name: the memory that the question is about."""
_KEY_BYTES = 32
_KEY = r"[A-Za-z0-9_-]{43}"
"""The form of a visitor's key, which has `_KEY_BYTES` at random."""
_logger = logging.getLogger(__name__)


class _Stopped(Exception):  # noqa: N818
    """Raised to end a job after its step."""


def explain(error: BaseException, *folders: Path) -> str:
    """Return one line for an error that a visitor can cause; it names no folder of the server.

    Args:
        error: what was raised.
        folders: absolute ones, inner ones first, that are left out of the paths in a message.
    """
    if isinstance(error, ValueError):
        line = str(error)
        for folder in folders:
            line = hide_folder(line, folder)
        return line
    if isinstance(error, OSError):
        return error.strerror or "a file cannot be read or written"
    return "the program has an error (see the server's log)"


@dataclass(eq=False)
class Job:
    """A reading as the page shows it, written by the model's thread.

    A name, a text or a number of questions that cannot be used is a `ValueError`.

    Attributes:
        questions: how many the model asks itself about each sentence; 0 for no self-study.
        phase: waiting, score, read, write or learn, with `done` of `total` tokens, passages or
            steps.
        memory: the name under which the memory was saved.
        folder: of the shelf that the memory is put on.
        stop: set to end the job after its next step; the result of `stopped` is whether it ended
            before its end.
    """

    name: str
    text: str
    questions: int
    phase: str = "waiting"
    done: int = 0
    total: int = 0
    chunks: dict[str, list[Chunk]] = field(default_factory=lambda: {"score": [], "read": []})
    exchanges: list[Exchange] = field(default_factory=list)
    memory: str | None = None
    folder: Path | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    stopped: Future[bool] = field(default_factory=Future)
    began: float = 0.0

    def __post_init__(self) -> None:
        self.name = check_name(self.name)
        if not self.text.strip():
            raise ValueError("text must not be empty: paste one, or take one below")
        if len(self.text) > MOST_CHARACTERS:
            raise ValueError(
                f"text must have at most {MOST_CHARACTERS:,} characters, "
                f"got {len(self.text):,}: cut it"
            )
        if not 0 <= self.questions <= MOST_QUESTIONS:
            raise ValueError(
                f"questions must be from 0 to {MOST_QUESTIONS}, "
                f"got {self.questions}: move the slider"
            )

    @property
    def ended(self) -> bool:
        return self.stopped.done()

    @property
    def outcome(self) -> str:
        """Return one line on an ended job: "Done", "Stopped", or what failed and why."""
        error = self.stopped.exception()
        if error is None:
            return "Stopped" if self.stopped.result() else "Done"
        if isinstance(error, _Stopped):
            return "Stopped"
        folders = [] if self.folder is None else [self.folder]
        # The memory is saved after the reading, and again after the study.
        failed = "Not read" if self.memory is None else "Read, but not studied"
        return f"{failed}: {explain(error, *folders)}"

    @property
    def curves(self) -> list[list[tuple[int, float]]]:
        """Return the points (tokens read, perplexity so far), without a memory and with it."""
        return [cumulative(chunks) for chunks in self.chunks.values()]

    @property
    def seconds_left(self) -> float | None:
        """Return how long the rest of this phase will take; None before its first step."""
        if not self.done:
            return None
        elapsed = time.monotonic() - self.began
        return elapsed * (self.total - self.done) / self.done

    def advance(self, phase: str, done: int, total: int) -> None:
        """Record a step; raise `_Stopped` if the job shall stop."""
        if phase != self.phase:
            self.began = time.monotonic()
        self.phase = phase
        self.done = done
        self.total = total
        if self.stop.is_set():
            raise _Stopped


class SharedModel:
    """A frozen base that does what visitors ask for.

    Readings run in one thread, one after the other, the rest in another. The name is for the
    records of readings. With `shows_source`, answers have the sentence of the text that fits
    the question best.
    """

    def __init__(
        self,
        name: str,
        base: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        shows_source: bool = False,
    ):
        self.name = name
        self.can_chat = can_chat(tokenizer)
        self._base = base
        self._tokenizer = tokenizer
        self._shows_source = shows_source
        self._readings = ThreadPoolExecutor(1)
        self._answers = ThreadPoolExecutor(1)
        # Held by the thread that uses the model.
        self._in_use = threading.Lock()
        # Held by the thread that uses the two lists.
        self._lock = threading.Lock()
        self._waiting: list[Future] = []
        self._jobs: list[Job] = []

    def read(self, job: Job, shelf: Library) -> None:
        """Begin a job, or let it wait for those before it.

        The memory is put on the shelf, also that of a stopped job.
        """
        job.folder = shelf.folder
        job.stopped = self._submit(self._readings, lambda: self._read(job, shelf))
        with self._lock:
            self._jobs = [*self._list_jobs(), job]

    def jobs_before(self, job: Job) -> int:
        """Return how many jobs a waiting one waits for."""
        jobs = self._list_jobs()
        return jobs.index(job) if job in jobs else 0

    def _list_jobs(self) -> list[Job]:
        return [job for job in self._jobs if not job.ended]

    def ask(
        self,
        shelf: Library,
        name: str | None,
        chats: Sequence[Turns],
        on_text: Callable[[list[str]], None] | None = None,
    ) -> Future[list[Answer]]:
        """Answer a question without a memory and, unless its name is None, with it.

        Args:
            name: of the memory; `ROUTED` for the one that the question is about, if any.
            chats: the turns of both conversations, the question last.
            on_text: is given the answers so far, a list of texts, after each token.
        """
        return self._submit(self._answers, lambda: self._answer(shelf, name, chats, on_text))

    def adopt(self, memory: Path) -> None:
        """Check an uploaded memory; where it names another base, name this one in its config.

        Its base may have lain in another folder. A folder without a sound LOCAS memory for this
        base is a `ValueError`.
        """
        config = load_memory_config(memory)
        kind = config["peft_type"]
        if kind != "LOCAS":
            raise ValueError(
                f"memory must be of type LOCAS, got {kind!r}: upload one that locas has made"
            )
        self._submit(self._answers, lambda: load_memory(share_weights(self._base), memory)).result()
        # What is read later: where the memory is shown, at a question, and for its answer's source.
        describe_memory(memory)
        list_passages(memory)
        if holds_text(memory):
            load_text(memory / TEXT)
        base = config.get("base_model_name_or_path")
        if base is None or not is_same_folder(base, self.name):
            set_base(memory, self.name)

    def close(self) -> None:
        """Stop all readings, keeping what was learned, and wait for their end."""
        for job in self._jobs:
            job.stop.set()
        self._readings.shutdown()
        self._answers.shutdown()

    def _submit(self, executor: ThreadPoolExecutor, work: Callable[[], Any]) -> Future:
        def run() -> Any:
            # The random state is that of a reading, which an answer may interrupt.
            with self._in_use, torch.random.fork_rng():
                try:
                    return work()
                except Exception as error:
                    if not isinstance(error, ValueError | OSError | _Stopped):
                        _logger.exception("the page's work failed")
                    # Its frames hold models.
                    raise error.with_traceback(None) from None

        with self._lock:
            self._waiting = [
                future for future in self._waiting if not future.running() and not future.done()
            ]
            if len(self._waiting) >= MOST_WAITING:
                raise ValueError(
                    f"at most {MOST_WAITING} readings and questions can wait: try again later"
                )
            future = executor.submit(run)
            self._waiting.append(future)
            return future

    def _answer_waiting(self) -> None:
        """Leave the model to the questions that wait now, between two steps of a reading.

        The steps are timed alone.
        """
        self._in_use.release()
        self._answers.submit(lambda: None).result()
        self._in_use.acquire()

    def _answer(
        self,
        shelf: Library,
        name: str | None,
        chats: Sequence[Turns],
        on_text: Callable[[list[str]], None] | None,
    ) -> list[Answer]:
        """Continue chats in one batch, the likeliest token each."""
        base = share_weights(self._base)
        memory = name
        if name is None:
            chats = chats[:1]
        elif name == ROUTED:
            (memory,) = shelf.route([chats[-1][-1]["content"]])
        # Without a memory there may be no shelf.
        attached = nullcontext(base) if memory is None else shelf.attach(base, memory)
        with attached as model:
            answerer = Answerer(model, self._tokenizer, max_new_tokens=ANSWER_TOKENS)
            adapters = None if memory is None else ["__base__", "default"]
            try:
                answers = answerer.reply(chats, adapters=adapters, on_text=on_text)
            except ValueError as error:
                # Visitors do not know the names of arguments.
                line = str(error).replace("message and max_new_tokens", "question and answer")
                raise ValueError(line) from None
        if memory is not None:
            answers[-1] = replace(answers[-1], memories=(memory,))
        if memory is not None and self._shows_source:
            folder = shelf.find(memory)
            answers[1:] = add_sources(self._base, self._tokenizer, answers[1:], [folder])
        return answers

    def _read(self, job: Job, shelf: Library) -> bool:
        """Read a job's text without a memory and with one, and study it, if that is asked for.

        Return whether the job was stopped.
        """
        base = share_weights(self._base)

        def stop_study(*_: Any) -> None:
            if job.stop.is_set() and job.phase in ("write", "learn"):
                raise _Stopped

        # Called before each forward pass: a step of a study takes up to a minute.
        base.get_input_embeddings().register_forward_pre_hook(stop_study)
        text = unwrap(job.text) if backbone.is_embedded(self.name) else job.text
        input_ids = tokenize(self._tokenizer, text)
        reading = self._choose_settings(base, len(input_ids))
        # A full shelf is refused before the text is scored. The lock of the checkpoint keeps other
        # commands out. No checkpoint is saved: the page cannot go on with one.
        with shelf.new(job.name) as folder, locked(folder / CHECKPOINT_FOLDER):
            job.advance("score", 0, len(input_ids))
            for chunk in make_trainer(base, for_base(reading)).read(input_ids):
                self._note_chunk(job, "score", chunk, len(input_ids))
            place = Place(out=folder, sample=make_sample(text), kept_text=text)
            job.advance("read", 0, len(input_ids))
            opened = open_reading(base, input_ids, reading, place, tokenizer=self._tokenizer)
            with opened as run:
                self._take_steps(job, run, len(input_ids))
                record = run.finish()
            job.memory = folder.name
            if record.stopped or not job.questions:
                return record.stopped
            # The first exchanges take long: what was asked meanwhile is answered before.
            job.advance("write", 0, 1)
            self._answer_waiting()
            opened = open_study(
                base,
                self._tokenizer,
                input_ids,
                self._choose_study(reading, job.questions),
                replace(place, overwrite=True),
                start=folder,
            )
            with opened as run:
                self._take_steps(job, run, len(input_ids))
                if run.is_complete and not job.exchanges:
                    # The model found nothing to ask itself: the memory stays as it was read.
                    return False
                return run.finish().stopped

    def _take_steps(self, job: Job, run: StageRun, tokens: int) -> None:
        """Take the steps of a stage until its end, or until the job shall stop.

        Questions wait for one step.
        """
        try:
            for step in run:
                if isinstance(step, StudyStep):
                    self._note_study_step(job, step)
                else:
                    self._note_chunk(job, "read", step, tokens)
        except _Stopped:
            # What was learned so far is saved all the same.
            pass

    def _note_chunk(self, job: Job, phase: str, chunk: Chunk, tokens: int) -> None:
        job.chunks[phase].append(chunk)
        job.advance(phase, chunk.stop, tokens)
        self._answer_waiting()

    def _note_study_step(self, job: Job, step: StudyStep) -> None:
        job.exchanges += step.written
        job.advance(step.phase, step.done, step.total)
        if step.phase == "write" and step.done == step.total:
            job.advance("learn", 0, 1)
        self._answer_waiting()

    def _choose_settings(self, base: PreTrainedModel, tokens: int) -> ReadSettings:
        window = min(WINDOW, count_positions(base) or WINDOW)
        stride = min(tokens // LEAST_CHUNKS, window // 2)
        settings = ReadSettings(
            method=choose_memory(base),
            model=self.name,
            window=window,
            stride=max(stride, window // 16),
        )
        return complete(settings, base)

    def _choose_study(self, reading: ReadSettings, questions: int) -> StudySettings:
        return StudySettings(
            method=reading.method,
            model=self.name,
            dtype=reading.dtype,
            window=reading.window,
            exchanges=questions,
        )


@dataclass
class Visitor:
    """A browser: its shelf, the folder of its downloads, and the reading that it began last."""

    key: str
    shelf: Library
    downloads: Path
    job: Job | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_reading(self) -> bool:
        return self.job is not None and not self.job.ended

    def begin(self, job: Job, model: SharedModel) -> None:
        """Begin a reading; a `ValueError` where another one of this visitor goes on."""
        # Two clicks may come at once.
        with self._lock:
            if self.is_reading:
                raise ValueError(
                    "a reading of yours is under way: stop it first, or wait for its end"
                )
            model.read(job, self.shelf)
            self.job = job


class Visitors:
    """The browsers that use the page, by a secret key that each keeps.

    Beyond `MOST_VISITORS`, a new visitor replaces the one who was away longest among those with
    nothing on their shelf and no reading under way; then among those with a shelf.

    Args:
        shelf: the folder that all share; None for one of each visitor's own.
    """

    def __init__(self, shelf: Path | None = None):
        # Absolute, so that `explain` can leave it out of messages.
        self._shared = None if shelf is None else Library(shelf.absolute(), MOST_MEMORIES)
        self.folder = Path(tempfile.mkdtemp(prefix="locas-app-"))
        self._visitors: dict[str, Visitor] = {}
        self._lock = threading.Lock()

    def find(self, key: Any) -> Visitor:
        """Return the visitor with a key; a new one where there is none.

        The new visitor gets the key itself where it has the form of ours, since an open page sends
        that key again. A guessed key opens an empty shelf.
        """
        key = str(key)
        with self._lock:
            visitor = self._visitors.pop(key, None)
            if visitor is None:
                is_ours = re.fullmatch(_KEY, key) is not None
                visitor = self._make(key if is_ours else secrets.token_urlsafe(_KEY_BYTES))
            # The last one used is the last.
            self._visitors[visitor.key] = visitor
            return visitor

    def close(self) -> None:
        """Remove the temporary folders."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make(self, key: str) -> Visitor:
        if len(self._visitors) >= MOST_VISITORS:
            self._drop_one()
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        downloads = folder / "downloads"
        downloads.mkdir()
        shelf = self._shared or Library(folder / "shelf", MOST_MEMORIES)
        return Visitor(key, shelf, downloads)

    def _drop_one(self) -> None:
        idle = [visitor for visitor in self._visitors.values() if not visitor.is_reading]
        if not idle:
            return
        # Who has kept nothing loses nothing. Else anyone could empty all shelves with new visits.
        dropped = next((visitor for visitor in idle if not visitor.shelf.list()), idle[0])
        del self._visitors[dropped.key]
        shutil.rmtree(dropped.downloads.parent, ignore_errors=True)
