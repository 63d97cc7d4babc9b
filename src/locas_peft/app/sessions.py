"""Visitors of the page, and the one model that they share.

Whoever holds the lock may use the model; a reading leaves it after each step to the questions that wait. Each piece of
work has its own modules around the same weights, so that no question meets an adapter that is being trained.
"""

import logging
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import backbone
from ..asking import Question, can_chat, check_room, continue_texts, fit_turns
from ..library import Library
from ..library.routing import make_sample
from ..memories import load_memory, load_memory_config, share_weights
from ..model import count_positions
from ..reading import CompleteSettings, ReadingSettings, StopReading, memorize
from ..selfstudy import Exchange, StudyStep
from ..selfstudy.exchanges import PASSAGES
from ..text import tokenize, unwrap
from ..ttt import Chunk, TestTimeTrainer, cumulative
from ..tuner import find_ffns

__all__ = [
    "MOST_CHARACTERS",
    "MOST_QUESTIONS",
    "Job",
    "SharedModel",
    "Visitor",
    "Visitors",
    "explain",
]

ANSWER_TOKENS, WINDOW = 96, 512
LEAST_CHUNKS = 12  # of a text: the stride is shorter for a short one, so that the perplexity can be seen to fall
MOST_CHARACTERS, MOST_QUESTIONS, MOST_WAITING, MOST_VISITORS = 2_000_000, 32, 32, 200
MOST_MEMORIES = 100  # on a shelf
ROUTED = "?"  # in place of a name: the memory that the question is about
_logger = logging.getLogger(__name__)


def explain(error: ValueError | OSError) -> str:
    """Return one line for an error; it names no folder of the server."""
    return (
        str(error)
        if isinstance(error, ValueError)
        else error.strerror or "a file cannot be read or written"
    )


@dataclass(eq=False)
class Job:
    """A reading as the page shows it, written by the model's thread.

    Attributes:
        questions: how many the model asks itself about each sentence; 0 for no self-study.
        phase: waiting, score, read, write or learn, with `done` of `total` tokens, passages or steps.
        memory: the name under which the memory was saved.
        stop: set to end the job after its next step; the result of `stopped` is whether it ended before its end.
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
    stop: threading.Event = field(default_factory=threading.Event)
    stopped: Future[bool] = field(default_factory=Future)
    began: float = 0.0

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError("text must not be empty: paste one, or take one below")
        if len(self.text) > MOST_CHARACTERS:
            raise ValueError(
                f"text must have at most {MOST_CHARACTERS:,} characters, got {len(self.text):,}: cut it"
            )
        if not 0 <= self.questions <= MOST_QUESTIONS:
            raise ValueError(
                f"questions must be from 0 to {MOST_QUESTIONS}, got {self.questions}: move the slider"
            )

    @property
    def ended(self) -> bool:
        return self.stopped.done()

    @property
    def outcome(self) -> str:
        """Return one line on an ended job: "Done", "Stopped", or why it failed."""
        error = self.stopped.exception()
        if error is None or isinstance(error, StopReading):
            return "Stopped" if error or self.stopped.result() else "Done"
        known = isinstance(error, ValueError | OSError)
        return "Not read: " + (
            explain(error) if known else "the program has an error (see the server's log)"
        )

    @property
    def curves(self) -> list[list[tuple[int, float]]]:
        """Return the points (tokens read, perplexity so far), without a memory and with the one that grows."""
        return [cumulative(chunks) for chunks in self.chunks.values()]

    @property
    def seconds_left(self) -> float | None:
        """Return how long the rest of this phase will take; None before its first step."""
        return (
            (time.monotonic() - self.began) * (self.total - self.done) / self.done
            if self.done
            else None
        )

    def advance(self, phase: str, done: int, total: int) -> None:
        """Record a step; raise `StopReading` if the job shall stop."""
        if phase != self.phase:
            self.began = time.monotonic()
        self.phase, self.done, self.total = phase, done, total
        if self.stop.is_set():
            raise StopReading


class SharedModel:
    """A frozen base that does what visitors ask for: readings in one thread, one after the other, the rest in another.

    Its name is for the records of readings.
    """

    def __init__(self, name: str, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.name, self._base, self._tokenizer = name, base, tokenizer
        self.can_chat = can_chat(tokenizer)
        self._readings, self._answers = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._in_use = threading.Lock()  # the model
        self._waiting: list[Future] = []
        self._jobs: list[Job] = []
        self._lock = threading.Lock()  # of the lists

    def read(self, job: Job, shelf: Library) -> None:
        """Begin a job, or let it wait for those before it: the memory is put on the shelf, also of a stopped job."""
        job.stopped = self._submit(self._readings, lambda: self._read(job, shelf))
        with self._lock:
            self._jobs = [*(other for other in self._jobs if not other.ended), job]

    def jobs_before(self, job: Job) -> int:
        """Return how many jobs a waiting one waits for."""
        jobs = [other for other in self._jobs if not other.ended]
        return jobs.index(job) if job in jobs else 0

    def ask(
        self,
        shelf: Library,
        name: str | None,
        chats: Sequence[list],
        on_text: Callable | None = None,
    ) -> Future:
        """Answer a question without a memory and, unless its name is None, with it.

        Return the answers, the memories' names, and the passage that is found for the question, if any. `ROUTED` is
        the memory that the question is about, if any (see `Library.answer`). `chats` has the turns of both
        conversations, the question last. `on_text` is given the answers so far, a list of texts, after each token.
        """
        return self._submit(self._answers, lambda: self._answer(shelf, name, chats, on_text))

    def check(self, memory: Path) -> None:
        """Raise a `ValueError` unless a folder holds a LOCAS memory for this base."""
        kind = load_memory_config(memory)["peft_type"]
        if kind != "LOCAS":
            raise ValueError(
                f"memory must be of type LOCAS, got {kind!r}: upload one that locas has made"
            )
        self._submit(self._answers, lambda: load_memory(share_weights(self._base), memory)).result()

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
                    if not isinstance(error, ValueError | OSError | StopReading):
                        _logger.exception("the page's work failed")
                    raise error.with_traceback(None) from None  # its frames hold models

        with self._lock:
            self._waiting = [
                future for future in self._waiting if not future.running() and not future.done()
            ]
            if len(self._waiting) >= MOST_WAITING:
                raise ValueError(
                    f"at most {MOST_WAITING} readings and questions can wait: try again later"
                )
            self._waiting.append(executor.submit(run))
            return self._waiting[-1]

    def _answer_waiting(self) -> None:
        """Leave the model to the questions that wait now, between two steps of a reading, which are timed alone."""
        self._in_use.release()
        self._answers.submit(lambda: None).result()
        self._in_use.acquire()

    def _answer(
        self, shelf: Library, name: str | None, chats: Sequence[list], on_text: Callable | None
    ) -> tuple:
        """Continue chats in one batch, the likeliest token each."""
        base, rows, texts = share_weights(self._base), [], []
        positions = count_positions(base)
        for chat in chats[: 1 if name is None else 2]:
            most_tokens = None if positions is None else positions - ANSWER_TOKENS
            rows.append(fit_turns(self._tokenizer, list(chat), most_tokens))
            check_room(base, rows[-1], ANSWER_TOKENS, "question", "answer")

        def write(
            model: nn.Module, names: tuple[str, ...], numbers: Sequence[int] = (0,)
        ) -> list[tuple]:
            options = {"adapters": ["__base__", "default"] if names else None, "on_text": on_text}
            texts[:] = continue_texts(model, self._tokenizer, rows, ANSWER_TOKENS, **options)
            return [(rows[-1], texts[-1].strip(), ())]

        names, question, found = (
            () if name is None else (name,),
            chats[-1][-1]["content"],
            dict[str, float](),
        )
        if name == ROUTED:
            names = shelf.answer(base, self._tokenizer, [Question(question)], write)[0].memories
        else:
            with shelf.attach(base, names) as model:
                write(model, names)
        with suppress(ValueError, OSError):  # it may be damaged, or forgotten now
            if (
                names and (shelf.find(names[0]) / PASSAGES).is_file()
            ):  # without it, each question would take minutes
                with shelf.attach(base, names) as model:
                    (found,) = shelf.load_finder(names, model, self._tokenizer)([question])
        return texts, names, next(iter(found), "")

    def _read(self, job: Job, shelf: Library) -> bool:
        """Read a job's text without a memory and with one, which is saved; return whether the job was stopped."""
        base = share_weights(self._base)

        def stop_study(
            *_: Any,
        ) -> None:  # before each forward pass: a step of a study takes up to a minute
            if job.stop.is_set() and job.phase in ("write", "learn"):
                raise StopReading

        base.get_input_embeddings().register_forward_pre_hook(stop_study)
        text = unwrap(job.text) if backbone.is_embedded(self.name) else job.text
        ids = tokenize(self._tokenizer, text)
        settings = self._choose_settings(base, len(ids), job.questions)

        def follow(phase: str) -> Callable[[Chunk], None]:
            job.advance(phase, 0, len(ids))

            def on_chunk(chunk: Chunk) -> None:
                job.chunks[phase].append(chunk)
                job.advance(phase, chunk.stop, len(ids))
                if phase == "read" and job.questions and chunk.stop == len(ids):
                    job.advance("write", 0, 1)  # the first exchanges take long
                self._answer_waiting()

            return on_chunk

        def on_study(step: StudyStep) -> None:
            job.exchanges += step.written
            job.advance(step.phase, step.done, step.total)
            if step.phase == "write" and step.done == step.total:
                job.advance("learn", 0, 1)
            self._answer_waiting()

        on_chunk = follow("score")
        for chunk in TestTimeTrainer(base, settings.for_base().training).read(ids):
            on_chunk(chunk)
        options = {"on_chunk": follow("read"), "on_study": on_study, "sample": make_sample(text)}
        with shelf.new(job.name) as folder:
            reading = memorize(
                base, ids, settings, out=folder, tokenizer=self._tokenizer, **options
            )
            job.memory = folder.name
        return reading.stopped

    def _choose_settings(
        self, base: PreTrainedModel, tokens: int, questions: int
    ) -> CompleteSettings:
        method = "locas-glu" if all(ffn.gated for ffn in find_ffns(base).values()) else "locas-mlp"
        window = min(WINDOW, count_positions(base) or WINDOW)
        seen = {
            "window": window,
            "stride": max(min(tokens // LEAST_CHUNKS, window // 2), window // 16),
        }
        study = {"study": questions > 0, "exchanges": questions or None}
        return ReadingSettings(method=method, model=self.name, **seen, **study).complete(
            base, self._tokenizer
        )


@dataclass
class Visitor:
    """A browser: its shelf, the folder for what it downloads, and the reading that it began last."""

    key: str
    shelf: Library
    downloads: Path
    job: Job | None = None


class Visitors:
    """The browsers that use the page, by a secret key that each keeps; `shelf` is the folder that all share, if any.

    Beyond `MOST_VISITORS`, a new visitor replaces the one who was away longest and whose reading has ended.
    """

    def __init__(self, shelf: Path | None = None):
        self._shared = None if shelf is None else Library(shelf, MOST_MEMORIES)
        self.folder = Path(tempfile.mkdtemp(prefix="locas-app-"))
        self._visitors: dict[str, Visitor] = {}
        self._lock = threading.Lock()

    def find(self, key: Any) -> Visitor:
        """Return the visitor with a key; a new one, with another key, where there is none."""
        with self._lock:
            visitor = self._visitors.pop(str(key), None) or self._make()
            self._visitors[visitor.key] = visitor  # the last one used is the last
            return visitor

    def close(self) -> None:
        """Remove the temporary folders."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make(self) -> Visitor:
        idle = [other for other in self._visitors.values() if other.job is None or other.job.ended]
        if len(self._visitors) >= MOST_VISITORS and idle:
            shutil.rmtree(self._visitors.pop(idle[0].key).downloads.parent, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        (folder / "downloads").mkdir()
        shelf = self._shared or Library(folder / "shelf", MOST_MEMORIES)
        return Visitor(secrets.token_urlsafe(), shelf, folder / "downloads")
