"""Visitors of the page, and the one model that they share.

One thread owns the model. It does one reading at a time; after each chunk and each step of a reading it answers the
questions that wait. Each piece of work has its own modules around the same weights (`share_weights`), so that a
memory, read, asked or merged, touches no other, and a question never meets an adapter that is being trained.
"""

from __future__ import annotations

import itertools
import logging
import queue
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import backbone
from ..asking import can_chat, continue_texts, fit_turns
from ..memories.conversion import combine_memories, export_memory, merge_memory, share_weights
from ..memories.loading import memory_attached
from ..model import count_positions
from ..reading.settings import CompleteSettings, ReadingSettings
from ..reading.teaching import StopReading, memorize
from ..selfstudy import Exchange, StudyStep
from ..text import tokenize, unwrap
from ..ttt import Chunk, TestTimeTrainer, cumulative
from ..tuner import find_ffns
from .shelf import Shelf, pack

__all__ = [
    "MOST_CHARACTERS",
    "MOST_QUESTIONS",
    "Answer",
    "Job",
    "SharedModel",
    "Visitor",
    "Visitors",
    "describe_refusal",
]

ANSWER_TOKENS = 96
LEAST_CHUNKS = 12
"""Of a text: the stride is shorter for a short one, so that the perplexity can be seen to fall."""
MOST_CHARACTERS = 2_000_000
MOST_QUESTIONS = 32
MOST_WAITING = 32
MOST_VISITORS = 200
_ANSWER, _READING, _END = range(3)
"""Kinds of work, the most urgent first."""
_logger = logging.getLogger(__name__)


def describe_refusal(error: ValueError | OSError) -> str:
    """Return one line for an error that a visitor or the machine can cause; it names no folder of the server."""
    return str(error) if isinstance(error, ValueError) else error.strerror or "a file cannot be read or written"


@dataclass
class Job:
    """A reading as the page shows it. The model's thread writes it.

    Args:
        name: of the memory.
        text: what is read.
        questions: that the model asks itself about each sentence; 0 for no self-study.

    Attributes:
        phase: waiting, scoring, reading, writing or learning.
        done, total: tokens, passages or steps of this phase.
        without, with_memory: (tokens read, perplexity so far) without and with the memory.
        exchanges: what the model has asked itself and answered.
        outcome: done, stopped or failed; empty before.
        message: why it failed.
        memory: the name under which the memory was saved.
        stop: set to end the job after its next step.
    """

    name: str
    text: str
    questions: int
    phase: str = "waiting"
    done: int = 0
    total: int = 0
    without: list[tuple[int, float]] = field(default_factory=list)
    with_memory: list[tuple[int, float]] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    outcome: str = ""
    message: str = ""
    memory: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    _began: float = 0.0

    @property
    def ended(self) -> bool:
        return bool(self.outcome)

    @property
    def seconds_left(self) -> float | None:
        """Return how long this phase will take, as far as it has gone; None before its first step."""
        return (time.monotonic() - self._began) * (self.total - self.done) / self.done if self.done else None

    def advance(self, phase: str, done: int, total: int) -> None:
        """Record a step; raise `StopReading` if the job shall stop."""
        if phase != self.phase:
            self._began = time.monotonic()
        self.phase, self.done, self.total = phase, done, total
        if self.stop.is_set():
            raise StopReading


@dataclass
class Answer:
    """Answers to one question, as far as they are written: without a memory and, if there is one, with it."""

    texts: list[str]
    begun: bool = False
    finished: Future | None = None


class SharedModel:
    """A base model in one thread of its own, which does what visitors ask for.

    Args:
        name: of the base, for the records of readings.
        base: a causal LM without adapters, frozen.
        tokenizer: its tokenizer.
    """

    def __init__(self, name: str, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.name, self._base, self._tokenizer = name, base, tokenizer
        self.can_chat = can_chat(tokenizer)
        self._work: queue.PriorityQueue = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._jobs: list[Job] = []
        self._lock = threading.Lock()  # of the jobs
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------- what visitors ask for

    def read(self, job: Job, shelf: Shelf) -> None:
        """Begin a job, or let it wait for those before it: the memory is put on the shelf, also of a stopped job.

        Raises:
            ValueError: the text is empty or too long, or too much waits already.
        """
        if not job.text.strip():
            raise ValueError("text must not be empty: paste one, or take one below")
        if len(job.text) > MOST_CHARACTERS:
            raise ValueError(f"text must have at most {MOST_CHARACTERS:,} characters, got {len(job.text):,}: cut it")
        if not 0 <= job.questions <= MOST_QUESTIONS:
            raise ValueError(f"questions must be from 0 to {MOST_QUESTIONS}, got {job.questions}: move the slider")
        with self._lock:
            self._submit(_READING, lambda: self._read(job, shelf))
            self._jobs = [*(other for other in self._jobs if not other.ended), job]

    def jobs_before(self, job: Job) -> int:
        """Return how many jobs a waiting one waits for."""
        jobs = [other for other in self._jobs if not other.ended]
        return jobs.index(job) if job in jobs else 0

    def ask(self, memory: Path | None, chats: Sequence[list[dict[str, str]]]) -> Answer:
        """Answer a question without a memory and, if there is one, with it.

        Args:
            memory: the memory's folder, or None.
            chats: the turns of the chat without the memory, and of the one with it; the user's last.
        """
        answer = Answer([""] * (1 if memory is None else 2))
        answer.finished = self._submit(_ANSWER, lambda: self._answer(answer, memory, chats))
        return answer

    def combine(self, memories: Sequence[Path], out: Path) -> None:
        """Save one memory that adds what the sum of others adds."""
        if len(memories) < 2:
            raise ValueError(f"two or more memories must be chosen to be combined, got {len(memories)}: choose more")
        self._wait(lambda base: combine_memories(base, self.name, memories, [1.0] * len(memories), out))

    def merge(self, memory: Path, archive: Path) -> None:
        """Write the checkpoint of a merged memory into a zip archive."""
        self._pack(archive, lambda base, out: merge_memory(base, self._tokenizer, memory, out))

    def export(self, memory: Path, archive: Path) -> None:
        """Write a memory as a LoRA adapter, and the base that it fits, into a zip archive."""
        self._pack(archive, lambda base, out: export_memory(base, self._tokenizer, memory, out, base_path="base"))

    def check(self, memory: Path) -> None:
        """Raise a `ValueError` unless a folder holds a LOCAS memory for this base."""

        def attach(base: PreTrainedModel) -> None:
            with memory_attached(base, memory) as model:
                kind = model.peft_config["default"].peft_type
                if kind != "LOCAS":
                    raise ValueError(f"memory must be of type LOCAS, got {kind!r}: upload one that locas has made")

        self._wait(attach)

    def close(self) -> None:
        """Stop all readings, keeping what was learned, and wait for their end."""
        for job in self._jobs:
            job.stop.set()
        self._submit(_END, lambda: None)
        self._thread.join()

    # ------------------------------------------------------------------ the model's thread

    def _submit(self, kind: int, work: Callable[[], Any]) -> Future:
        if self._work.qsize() >= MOST_WAITING and kind != _END:
            raise ValueError(f"at most {MOST_WAITING} readings and questions can wait: try again later")
        future: Future = Future()
        self._work.put((kind, next(self._numbers), future, work))
        return future

    def _wait(self, work: Callable[[PreTrainedModel], Any]) -> None:
        self._submit(_ANSWER, lambda: work(share_weights(self._base))).result()

    def _pack(self, archive: Path, write: Callable[[PreTrainedModel, Path], Any]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / archive.stem
            self._wait(lambda base: write(base, out))
            pack(out, archive)

    def _run(self) -> None:
        while self._do_next() != _END:
            pass

    def _do_next(self) -> int:
        kind, _, future, work = self._work.get()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return kind

    def _answer_waiting(self) -> None:
        """Answer the questions that wait now, between two steps of a reading, which does not count the time."""
        with torch.random.fork_rng():  # the reading draws what it would have drawn
            for kind, *_ in list(self._work.queue):  # others put work in, this thread alone takes it out
                if kind == _ANSWER:
                    self._do_next()

    def _stop_study(self, job: Job) -> None:
        """End a self-study before a forward pass: a step of it takes up to a minute."""
        if job.stop.is_set() and job.phase in ("writing", "learning"):
            raise StopReading

    def _read(self, job: Job, shelf: Shelf) -> None:
        try:
            base = share_weights(self._base)
            base.get_input_embeddings().register_forward_pre_hook(lambda *_: self._stop_study(job))
            text = unwrap(job.text) if backbone.is_embedded(self.name) else job.text
            ids = tokenize(self._tokenizer, text)
            settings = self._choose_settings(base, len(ids), job.questions)

            def follow(phase: str, points: list[tuple[int, float]]) -> Callable[[Chunk], None]:
                chunks: list[Chunk] = []

                def on_chunk(chunk: Chunk) -> None:
                    chunks.append(chunk)
                    points[:] = cumulative(chunks)
                    job.advance(phase, chunk.stop, len(ids))
                    if phase == "reading" and job.questions and chunk.stop == len(ids):
                        job.advance("writing", 0, 1)  # the first exchanges take long
                    self._answer_waiting()

                return on_chunk

            def on_study(step: StudyStep) -> None:
                job.exchanges += step.written
                job.advance("writing" if step.phase == "write" else "learning", step.done, step.total)
                if step.phase == "write" and step.done == step.total:
                    job.advance("learning", 0, 1)
                self._answer_waiting()

            job.advance("scoring", 0, len(ids))
            on_chunk = follow("scoring", job.without)
            for chunk in TestTimeTrainer(base, settings.for_base().training).read(ids):
                on_chunk(chunk)
            job.advance("reading", 0, len(ids))
            on_chunk = follow("reading", job.with_memory)
            with shelf.new(job.name) as folder:
                reading = memorize(
                    base, ids, settings, out=folder, on_chunk=on_chunk, on_study=on_study, tokenizer=self._tokenizer
                )
                job.memory = folder.name
            job.outcome = "stopped" if reading.stopped else "done"
        except StopReading:
            job.outcome = "stopped"
        except (ValueError, OSError) as error:
            job.message, job.outcome = describe_refusal(error), "failed"
        except Exception:
            _logger.exception("a reading failed")
            job.message, job.outcome = "the program has an error, which is in the server's log", "failed"

    def _choose_settings(self, base: PreTrainedModel, tokens: int, questions: int) -> CompleteSettings:
        gated = all(ffn.gated for ffn in find_ffns(base).values())
        window = min(512, count_positions(base) or 512)
        return ReadingSettings(
            method="locas-glu" if gated else "locas-mlp",
            window=window,
            stride=max(min(tokens // LEAST_CHUNKS, window // 2), window // 16),
            model=self.name,
            **({"study": True, "exchanges": questions} if questions else {}),
        ).complete(base, self._tokenizer)

    def _answer(self, answer: Answer, memory: Path | None, chats: Sequence[list[dict[str, str]]]) -> None:
        answer.begun = True
        base = share_weights(self._base)
        if memory is None:
            self._generate(base, answer, chats[:1])
            return
        with memory_attached(base, memory) as model:
            self._generate(model, answer, chats, adapters=["__base__", "default"])

    def _generate(self, model: Any, answer: Answer, chats: Sequence[list[dict[str, str]]], **options: Any) -> None:
        """Continue chats in one batch, the likeliest token each, and write the texts so far into the answer."""

        def show(texts: list[str]) -> None:
            answer.texts = [text.strip() for text in texts]

        rows = [self._encode(list(chat)) for chat in chats]
        continue_texts(model, self._tokenizer, rows, ANSWER_TOKENS, on_text=show, **options)

    def _encode(self, chat: list[dict[str, str]]) -> list[int]:
        """Return the ids of a chat, without its oldest turns where it is too long; a model without turns gets one."""
        positions = count_positions(self._base)
        most_tokens = None if positions is None else positions - ANSWER_TOKENS
        ids = fit_turns(self._tokenizer, chat, most_tokens)
        if most_tokens is not None and len(ids) > most_tokens:
            raise ValueError(f"question must have at most {most_tokens} tokens, got {len(ids)}: shorten it")
        return ids


@dataclass
class Visitor:
    """A browser: its shelf, the folder for what it downloads, and the reading that it began last."""

    key: str
    shelf: Shelf
    downloads: Path
    job: Job | None = None


class Visitors:
    """The browsers that use the page, by a secret key that each keeps.

    Args:
        shelf: the folder that all share; None for a temporary one each, which `close` removes. The visitor whom more
            than `MOST_VISITORS` others came after is forgotten.
    """

    def __init__(self, shelf: Path | None = None):
        self._shared = None if shelf is None else Shelf(shelf)
        self.folder = Path(tempfile.mkdtemp(prefix="locas-app-"))
        self._visitors: dict[str, Visitor] = {}
        self._lock = threading.Lock()

    def find(self, key: Any) -> Visitor:
        """Return the visitor with a key; a new one, with another key, where there is none."""
        with self._lock:
            visitor = (self._visitors.pop(key, None) if isinstance(key, str) else None) or self._make()
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
        return Visitor(secrets.token_urlsafe(), self._shared or Shelf(folder / "shelf"), folder / "downloads")
