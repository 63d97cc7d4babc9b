"""A library: a folder whose subfolders are memories of one base, each under the name of its subfolder.

The folder is the index: no other file lists the memories. Opening, listing and routing read no tensor. Names may come
from strangers: no path is made of anything but a name that `check_name` accepts, and links are not followed.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..asking import Question, ask, encode_question
from ..asking.answers import answer_all, measure_gain
from ..files import finish_replacement, staged
from ..memories import (
    FILES,
    MEMORY_CONFIG,
    READING,
    check_vacant,
    load_memory_config,
    memory_attached,
)
from ..memories.checkpoint import CHECKPOINT_FOLDER, locked
from ..memories.folder import unpack
from ..reading import Reading, memorize
from ..reading.record import load_reading
from ..reading.settings import AnySettings
from ..selfstudy.exchanges import EXCHANGES, Exchange, correct, load_exchanges
from ..selfstudy.finding import Finder, has_learned, load_finder, score_by_words
from ..text import tokenize
from .routing import LEAST_GAIN, LEAST_SHARE, MOST_SEARCHED, list_passages, make_sample

__all__ = ["Library", "RoutedAnswer", "check_name"]

_NAME = re.compile(r"[^\W_][\w .()-]{0,58}[\w)]|[^\W_]")
_FORGOTTEN, FAILURES, ADAPTERS = ".forgotten", "failures.jsonl", ".adapters"
"""A folder that is being deleted; a table's failures (`table.py`); adapters of the memories (`adapters.py`)."""


@dataclass(frozen=True)
class RoutedAnswer:
    """An answer, the memories that gave it, by name, and what was found in them; no memory where the base gave it."""

    question: Question
    answer: str
    memories: tuple[str, ...]
    recited: tuple[str, ...] = ()


def check_name(name: str) -> str:
    """Return a memory's name, without the space around it; a `ValueError` where it cannot name a folder everywhere."""
    name = name.strip()
    if not _NAME.fullmatch(name) or name.casefold() == FAILURES:
        rule = "be at most 60 letters, digits, spaces or any of . ( ) _ - and begin with a letter or digit"
        raise ValueError(f"name must {rule}, got {name[:60]!r}: choose another")
    return name


class Library:
    """The memories in a folder, which is made where it does not exist; at most `most`, where that is given.

    With `require_signature`, the file of a key, memories that its owner has not signed are refused (see
    `memories.load_memory`). Threads and processes may share the folder.
    """

    def __init__(
        self,
        folder: str | Path,
        most: int | None = None,
        require_signature: str | Path | None = None,
    ):
        self.folder, self._most, self.key = Path(folder), most, require_signature
        if (self.folder / MEMORY_CONFIG).is_file():
            raise ValueError(
                f"a library must be a folder of memories, got a memory, {str(folder)!r}: take its parent"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(
            f".*{_FORGOTTEN}"
        ):  # by a process that was killed while it forgot a memory
            shutil.rmtree(left, ignore_errors=True)
        for name in filter(
            _NAME.fullmatch, os.listdir(self.folder)
        ):  # killed while it replaced a memory
            finish_replacement(self.folder / name)
        self._lock = threading.Lock()
        self._reserved: set[str] = set()  # of memories that are being made

    def __contains__(self, name: str) -> bool:
        """Return whether a text is the name of a memory: a folder here, not a link, with a config in it."""
        folder = self.folder / name
        return (
            bool(_NAME.fullmatch(name))
            and not folder.is_symlink()
            and (folder / MEMORY_CONFIG).is_file()
        )

    def list(self) -> list[str]:
        """Return the memories' names, the latest first."""
        times = dict[str, float]()
        for name in filter(self.__contains__, os.listdir(self.folder)):
            with suppress(FileNotFoundError):  # another process forgot it meanwhile
                times[name] = (self.folder / name / MEMORY_CONFIG).stat().st_mtime
        return sorted(times, key=times.get, reverse=True)

    def list_unfinished(self) -> list[str]:
        """Return the names of memories whose first reading was interrupted, or is still going on."""
        begun = (path.parent.name for path in self.folder.glob(f"*/{CHECKPOINT_FOLDER}"))
        return sorted(name for name in begun if _NAME.fullmatch(name) and name not in self)

    def find(self, name: str | None) -> Path:
        """Return the folder of a memory; a `ValueError` where there is none of that name."""
        if (name or "") not in self:
            raise ValueError(
                f"there is no memory {name or ''!r} in this library: choose one of the list"
            )
        return self.folder / name

    def choose_folder(self, name: str) -> Path:
        """Return the folder for a memory of a name, which may exist; a `ValueError` for a name that cannot be."""
        name, others = check_name(name), {entry.name for entry in os.scandir(self.folder)}
        alike = [other for other in others if other.casefold() == name.casefold() and other != name]
        if alike:
            raise ValueError(
                f"name must differ from {alike[0]!r} by more than its case, got {name!r}: choose another"
            )
        if name not in others:
            self._check_room(others)
        return self.folder / name

    @contextmanager
    def new(self, name: str) -> Iterator[Path]:
        """Yield the folder for a new memory, under a name that is free, "name 2", say; a `ValueError` where full."""
        name = check_name(name)
        with self._lock:
            taken = self._reserved | {entry.name.casefold() for entry in os.scandir(self.folder)}
            self._check_room(taken)
            numbered = (f"{name[:50].rstrip()} {number}" for number in count(2))
            free = next(each for each in chain([name], numbered) if each.casefold() not in taken)
            self._reserved.add(free.casefold())
        try:
            yield self.folder / free
        finally:
            with self._lock:
                self._reserved.discard(free.casefold())

    def bytes_of(self, name: str) -> int:
        """Return how many bytes the files of a memory have."""
        return sum(
            file.stat().st_size for file in map(self.find(name).joinpath, FILES) if file.is_file()
        )

    def rename(self, name: str, new_name: str) -> str:
        """Give a memory another name, which is returned: the next free one where it is taken."""
        source = self.find(name)
        if check_name(new_name) == name:
            return name
        with self.new(new_name) as target:
            os.rename(source, target)
        return target.name

    def forget(self, name: str) -> None:
        """Delete a memory, finished or not, whole or not at all; a `ValueError` for one in use or with other files."""
        folder = self.folder / name if name in self.list_unfinished() else self.find(name)
        foreign = sorted(set(os.listdir(folder)) - {*FILES, CHECKPOINT_FOLDER})
        if foreign:
            raise ValueError(
                f"memory {name!r} must hold its own files alone, got {foreign[0]!r} too: move it away"
            )
        gone = self.folder / f".{name}.{os.getpid()}{_FORGOTTEN}"
        with locked(folder / CHECKPOINT_FOLDER):
            os.rename(folder, gone)
        while gone.exists():
            with suppress(FileNotFoundError):  # a process that opens the library deletes it too
                shutil.rmtree(gone)
        shutil.rmtree(self.folder / ADAPTERS / name, ignore_errors=True)

    def unpack(self, archive: Path, name: str, check: Callable[[Path], None]) -> str:
        """Add a memory out of a zip archive (see `memories.folder.unpack`) and return its name.

        `check` is called with the unpacked folder, and raises a `ValueError` for one of which nothing shall be left.
        """
        with self.new(name) as folder:
            with staged(folder) as unpacked:
                unpack(archive, unpacked)
                try:
                    check(unpacked)
                except ValueError as error:  # visitors need not know where the library is
                    raise ValueError(str(error).replace(str(unpacked), name)) from None
            return folder.name

    def add(
        self,
        base: PreTrainedModel,
        tokenizer,
        text: str,
        name: str,
        settings: AnySettings,
        **options,
    ) -> Reading:
        """Read a text into a memory of a name; settings, options and errors are those of `reading.memorize`.

        `start` may be the folder of a memory here, whose name may stay the same; `beside` has names of memories here.
        """
        folder = self.choose_folder(name)
        settings = settings.complete(base)
        self.check_base(settings.model)
        input_ids = tokenize(tokenizer, text, settings.max_tokens)
        sample = make_sample(text, options.get("start"))
        options["beside"] = [self.find(other) for other in options.get("beside", ())]
        options = {"title": name, "tokenizer": tokenizer, "sample": sample, **options}
        return memorize(
            base,
            input_ids,
            settings,
            out=folder,
            checkpoint_dir=folder / CHECKPOINT_FOLDER,
            **options,
        )

    def consolidate(
        self, base: PreTrainedModel, tokenizer, names: Sequence[str], out: str, **options: Any
    ) -> Reading:
        """Make one memory of several, as wide as the widest, which studies all their exchanges.

        It is written whole or not at all, and the others stay. Of two that ask the same question, the later one's
        answer is studied. `base` is mutated meanwhile. Options and errors are those of `reading.memorize`.
        """
        memories, exchanges = {name: self.find(name) for name in names}, list[Exchange]()
        if len(memories) < 2 or not all(map(self.has_studied, memories)):
            raise ValueError(
                f"names must be of two or more studied memories, got {', '.join(names)}: choose others"
            )
        check_vacant(target := self.choose_folder(out))
        for name in filter(memories.get, self.list()):  # the latest first
            exchanges = correct(load_exchanges(memories[name] / EXCHANGES), exchanges)
        made = [load_reading(folder).settings for folder in memories.values()]
        settings = replace(
            max(made, key=lambda each: (each.teaches, each.method.r)), max_tokens=None
        )
        text = "\n".join(dict.fromkeys(each.answer for each in exchanges))
        options = {
            "title": " and ".join(names),
            "tokenizer": tokenizer,
            "sample": make_sample(text),
            **options,
        }
        return memorize(
            base, tokenize(tokenizer, text), settings, out=target, exchanges=exchanges, **options
        )

    def list_taught_beside(self, name: str) -> dict[str, Reading]:
        """Return the records of the memories that were taught beside one, by name, the latest first."""
        made = {
            each: load_reading(self.find(each))
            for each in self.list()
            if (self.find(each) / READING).is_file()
        }
        return {
            other: each
            for other, each in made.items()
            if name in ((each.origin or {}).get("beside") or ())
        }

    def name_base(self) -> str | None:
        """Return the name of the base of all memories, None in an empty library; a `ValueError` for two bases."""
        configs = {name: load_memory_config(self.folder / name, self.key) for name in self.list()}
        found = {config.get("base_model_name_or_path"): name for name, config in configs.items()}
        if len(found) > 1:
            (one, first), (other, second) = list(found.items())[:2]
            found = f"{first!r} of {one!r} and {second!r} of {other!r}"
            raise ValueError(
                f"a library must hold memories of one base, got {found}: keep them in two libraries"
            )
        return next(iter(found), None)

    def check_base(self, name: str) -> None:
        """Raise a `ValueError` where a base is not that of a memory here."""
        some = next(filter(self.__contains__, os.listdir(self.folder)), None)
        held = (
            None
            if some is None
            else load_memory_config(self.folder / some).get("base_model_name_or_path")
        )
        if held is not None and held != name:
            raise ValueError(
                f"a library must hold memories of one base, got {name!r} beside {held!r}: use another"
            )

    def has_studied(self, name: str) -> bool:
        """Return whether a memory has exchanges."""
        return (self.find(name) / EXCHANGES).is_file()

    def attach(
        self, base: PreTrainedModel, names: Sequence[str]
    ) -> AbstractContextManager[nn.Module]:
        """Return a context of the base with memories attached (see `memories.memory_attached`), or alone for none."""
        folders = [self.find(name) for name in names]
        return (
            memory_attached(base, folders[0], self.key, folders[1:])
            if folders
            else nullcontext(base)
        )

    def route(self, questions: Sequence[str], most: int = 1) -> list[tuple[str, ...]]:
        """Return for each question the names of the memories that it is about, the best first; () for none.

        With `most` above 1 there may be so many: those that fit nearly as well as the best one
        (`routing.LEAST_SHARE`). Of two memories that fit as well, the later one comes first.
        """
        names = self.list()
        scores = score_by_words([list_passages(self.folder / name) for name in names], questions)
        both = zip(scores, (-scores).argsort(1, kind="stable")[:, :most], strict=True)
        return [
            tuple(names[n] for n in order if row[n] >= max(1, LEAST_SHARE * row.max()))
            for row, order in both
        ]

    def load_finder(self, names: Sequence[str], model: nn.Module, tokenizer) -> Finder:
        """Return what finds passages in those memories that have studied; a later one corrects an earlier one."""
        folders = [
            self.find(name) for name in self.list() if name in names and self.has_studied(name)
        ]
        for folder in folders:
            load_memory_config(folder, self.key)  # it refuses one that its owner has not signed
        return load_finder(folders, model, tokenizer)

    def ask(
        self,
        base: PreTrainedModel,
        tokenizer,
        questions: Sequence[Question],
        *,
        by: Callable = ask,
        **options: Any,
    ) -> list[RoutedAnswer]:
        """Answer each question in one sentence (see `answer`), a memory `by` a function like `asking.ask_by_reciting`.

        Such a function gets what finds passages in all memories that the question may be about. With a `context` the
        memory's answer is taken as it is. Options and errors are those of `asking.ask`.
        """

        def write(model: nn.Module, names: tuple[str, ...], numbers: list[int]) -> Iterable:
            group, recited = [questions[number] for number in numbers], [[] for _ in numbers]
            if names and by is not ask and self.has_studied(names[0]):
                given, recited = by(
                    model, tokenizer, group, self.load_finder(names, model, tokenizer), **options
                )
            else:
                given = ask(model, tokenizer, group, **options)
            prompts = [
                None if options.get("context") else encode_question(tokenizer, each.question)
                for each in group
            ]
            return zip(prompts, given, recited, strict=True)

        return self.answer(base, tokenizer, questions, write, several=by is not ask)

    def answer(
        self,
        base: PreTrainedModel,
        tokenizer,
        questions: Sequence[Question],
        write,
        several: bool = False,
    ) -> list[RoutedAnswer]:
        """Answer each question with the memory that it is about, and with the base alone where it is about none.

        Where a studied memory says what the base would say too (`routing.LEAST_GAIN`), the base answers; one that has
        learned nothing answers where passages are found. `base` is mutated meanwhile. `write` gets the base, the names
        of memories (one, or `several`), the first of which is attached, and the numbers of questions. It returns for
        each the token ids of the memory's prompt (None: its answer is taken as it is), the answer, and the passages.
        """
        routed = self.route([each.question for each in questions], MOST_SEARCHED if several else 1)
        answers: dict[int, RoutedAnswer] = {}
        for names in [*dict.fromkeys(filter(None, routed)), ()]:
            numbers = [number for number, each in enumerate(routed) if each == names]
            if not numbers:
                continue
            with self.attach(base, names[:1]) as model:
                prompts, given, recited = zip(*write(model, names, numbers), strict=True)
                if not names or not self.has_studied(names[0]) or None in prompts:
                    gains = [LEAST_GAIN] * len(numbers)
                elif any(recited) and not has_learned(model):
                    gains = [LEAST_GAIN * bool(passages) for passages in recited]
                else:  # A studied memory recites its passages whatever is asked: there its own answer is measured.
                    said = answer_all(model, tokenizer, prompts) if any(recited) else given
                    gains = measure_gain(model, tokenizer, prompts, said)
            searched = [
                self.find(name) for name in names[::-1] if any(recited) and self.has_studied(name)
            ]
            owners = {
                each.answer: path.name
                for path in searched
                for each in load_exchanges(path / EXCHANGES)
            }
            for number, answer, passages, gain in zip(numbers, given, recited, gains, strict=True):
                found = (
                    tuple(dict.fromkeys(owners[each] for each in passages if each in owners))
                    or names[:1]
                )
                answers[number] = RoutedAnswer(questions[number], answer, found, tuple(passages))
                if gain < LEAST_GAIN:
                    routed[number] = ()  # the last group
        return [answers[number] for number in range(len(questions))]

    def _check_room(self, taken: set[str]) -> None:
        if self._most is not None and len(taken) >= self._most:
            raise ValueError(
                f"this library must hold at most {self._most} memories: forget some first"
            )
