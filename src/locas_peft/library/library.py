"""A library: a folder whose subfolders are memories of one base, under their folders' names.

The folder is the index: no other file lists the memories. Opening, listing and routing read no
tensor. Names may come from strangers: no path is made of anything but a name that `is_name`
accepts, and links are not followed. Names are normalized, whatever form a system gives them.
"""

from __future__ import annotations

import builtins
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from locas_settings import StageSettings

from ..checks import first_line, hide_folder
from ..exchanges import Exchange
from ..files import (
    finish_replacement,
    fold_name,
    is_same_folder,
    normalize_name,
    remove_unfinished,
    staged,
)
from ..memories import FILES, MEMORY_CONFIG, load_memory_config, memory_attached
from ..memories.checkpoint import CHECKPOINT_FOLDER, LOCK, InUse, held, locked
from ..memories.folder import unpack
from ..stages import Place, ReadSettings, Record, complete, read, study
from ..text import cut_text, tokenize
from .names import check_name, is_name
from .routing import list_passages, make_sample, route
from .source import join_texts

__all__ = ["Library"]

_FORGOTTEN = ".forgotten"
"""The ending of a folder that is being deleted."""
_RESERVED = ".reserved"
"""The ending of the lock file of a name, before which it has the folded name."""
_logger = logging.getLogger(__name__)


class Library:
    """The memories in a folder. Threads and processes may share it.

    Args:
        folder: made where it does not exist.
        most: the most memories that it may hold; None for any number.
    """

    def __init__(self, folder: str | Path, most: int | None = None):
        self.folder = Path(folder)
        self._most = most
        # Held by the thread that looks for room and takes it.
        self._lock = threading.Lock()
        if (self.folder / MEMORY_CONFIG).is_file():
            raise ValueError(
                "a library must be a folder of memories, "
                f"got a memory, {str(folder)!r}: take its parent"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        # A process may have been killed while it forgot a memory, or while it replaced one.
        for forgotten in self.folder.glob(f".*{_FORGOTTEN}"):
            shutil.rmtree(forgotten, ignore_errors=True)
        for name in self._list_names():
            finish_replacement(self._locate(name))
        self._list_reserved()

    def __contains__(self, name: str) -> bool:
        """Return whether a memory has this name: a folder here, not a link, with a config in it."""
        name = normalize_name(name)
        if not is_name(name):
            return False
        folder = self._locate(name)
        if folder.is_symlink():
            return False
        if not (folder / MEMORY_CONFIG).is_file():
            # Another process may be replacing the memory.
            finish_replacement(folder)
        return (folder / MEMORY_CONFIG).is_file()

    def _list_names(self) -> builtins.list[str]:
        """Return the names of the folder's entries, as far as they may be a memory's."""
        names = {normalize_name(entry) for entry in os.listdir(self.folder)}
        return [name for name in names if is_name(name)]

    def _locate(self, name: str) -> Path:
        """Return the folder of a normalized name, which may exist in another form."""
        folder = self.folder / name
        if name.isascii() or folder.exists():
            return folder
        for other in os.listdir(self.folder):
            if normalize_name(other) == name:
                return self.folder / other
        return folder

    def list(self) -> list[str]:
        """Return the memories' names, the latest first."""
        times: dict[str, float] = {}
        for name in filter(self.__contains__, self._list_names()):
            # Another process may forget the memory meanwhile.
            with suppress(FileNotFoundError):
                times[name] = (self._locate(name) / MEMORY_CONFIG).stat().st_mtime
        return sorted(times, key=times.__getitem__, reverse=True)

    def list_unfinished(self) -> builtins.list[str]:
        """Return the names of memories whose first reading was interrupted, or goes on."""
        checkpoints = self.folder.glob(f"*/{CHECKPOINT_FOLDER}")
        # A linked folder is no memory of the library.
        folders = [each.parent for each in checkpoints if not each.parent.is_symlink()]
        names = sorted(normalize_name(folder.name) for folder in folders)
        return [name for name in names if is_name(name) and name not in self]

    def find(self, name: str | None) -> Path:
        """Return the folder of a memory; a `ValueError` where there is none of that name."""
        name = normalize_name(name or "")
        if name not in self:
            raise ValueError(f"there is no memory {name!r} in this library: choose one of the list")
        return self._locate(name)

    def bytes_of(self, name: str) -> int:
        """Return how many bytes the files of a memory have."""
        folder = self.find(name)
        files = [folder / file for file in FILES]
        return sum(file.stat().st_size for file in files if file.is_file())

    def choose_folder(self, name: str) -> Path:
        """Return the folder for a memory of a name, which may exist; check the name."""
        name = check_name(name)
        others = {normalize_name(entry) for entry in os.listdir(self.folder)}
        for other in others:
            if other != name and fold_name(other) == fold_name(name):
                raise ValueError(
                    f"name must differ from {other!r} by more than its case, "
                    f"got {name!r}: choose another"
                )
        if name not in others:
            self._check_room()
        return self._locate(name)

    @contextmanager
    def new(self, name: str) -> Iterator[Path]:
        """Yield the folder for a new memory, under a free name, such as "name 2".

        Within the context no other memory gets the name, in this process or another one, and what
        is made under it is neither renamed nor forgotten.
        """
        name = check_name(name)
        with ExitStack() as stack:
            with self._lock:
                self._check_room()
                free_name = self._reserve_free(name, stack)
            yield self.folder / free_name

    def _reserve_free(self, name: str, stack: ExitStack) -> str:
        """Return a name that no other memory here gets before the stack is closed, and no file has.

        It is the name itself, or the name with the next free number.
        """
        free_name = name
        number = 1
        while not self._try_to_reserve(free_name, stack):
            number += 1
            free_name = f"{name[:50].rstrip()} {number}"
        return free_name

    def _try_to_reserve(self, name: str, stack: ExitStack) -> bool:
        """Reserve a name until the stack is closed; return whether it was free."""
        with ExitStack() as tried:
            try:
                tried.enter_context(self._reserved(name))
            except InUse:
                return False
            # Another process may have finished a memory of this name before the lock was free.
            if fold_name(name) in {fold_name(entry) for entry in os.listdir(self.folder)}:
                return False
            stack.enter_context(tried.pop_all())
            return True

    def _reserved(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which a name is reserved, for all processes.

        Entering it raises `InUse` where the name is reserved already.
        """
        return held(self.folder / f".{fold_name(name)}{_RESERVED}")

    def _list_reserved(self) -> set[str]:
        """Return the folded names that are reserved, and remove the locks of killed processes."""
        names = set()
        for lock in self.folder.glob(f".*{_RESERVED}"):
            try:
                with held(lock):
                    pass
            # The folder may belong to another user.
            except (InUse, OSError):
                names.add(lock.name[1:].removesuffix(_RESERVED))
        return names

    def _check_room(self) -> None:
        """Raise a `ValueError` where no other memory may be added; other files do not count."""
        if self._most is None:
            return
        memories = {fold_name(name) for name in [*self.list(), *self.list_unfinished()]}
        if len(memories | self._list_reserved()) >= self._most:
            raise ValueError(
                f"this library must hold at most {self._most} memories: forget some first"
            )

    def add(
        self,
        base: PreTrainedModel,
        tokenizer: Any,
        text: str,
        name: str,
        settings: StageSettings,
        *,
        start: str | Path | None = None,
        exchanges: Sequence[Exchange] | None = None,
        on_step: Callable[[Any], None] | None = None,
        **place: Any,
    ) -> Record:
        """Read or study a text into a memory; errors are those of `stages.read` and `stages.study`.

        Args:
            base: a causal LM without adapters; mutated meanwhile.
            tokenizer: of the base.
            text: what is learned.
            name: of the memory.
            settings: of a reading or of a study.
            start: the folder of a memory that goes on; one of this library may keep its name.
            exchanges: what a study learns, in place of exchanges that the model would write.
            on_step: called after each step.
            place: fields of `stages.Place`, in place of those that the library chooses. With None
                as the sample or the kept text, none is stored, nor is a former one kept.
        """
        folder = self.choose_folder(name)
        settings = complete(settings, base)
        self.check_base(settings.base_name)
        input_ids = tokenize(tokenizer, text, settings.max_tokens)
        learned = cut_text(tokenizer, text, settings.max_tokens)
        fields = {
            "title": name,
            "sample": make_sample(learned, start),
            "kept_text": join_texts(learned, start),
            "checkpoint_dir": folder / CHECKPOINT_FOLDER,
            **place,
        }
        for refusable in ("sample", "kept_text"):
            fields[refusable] = fields[refusable] or ""
        where = Place(out=folder, **fields)
        if isinstance(settings, ReadSettings):
            return read(
                base,
                input_ids,
                settings,
                where,
                tokenizer=tokenizer,
                start=start,
                on_step=on_step,
            )
        return study(
            base,
            tokenizer,
            input_ids,
            settings,
            where,
            start=start,
            exchanges=exchanges,
            on_step=on_step,
        )

    def rename(self, name: str, new_name: str) -> str:
        """Give a memory another name, which is returned: the next free one where it is taken.

        A memory that is being made, or is in use, is a `ValueError`.
        """
        source = self.find(name)
        name = normalize_name(name)
        new_name = check_name(new_name)
        if new_name == name:
            return name
        with self._claimed(name), ExitStack() as stack:
            target = self.folder / new_name
            # A change of case. Some systems have one folder under both names.
            is_free = fold_name(new_name) == fold_name(name) and (
                not target.exists() or target.samefile(source)
            )
            if not is_free:
                target = self.folder / self._reserve_free(new_name, stack)
            _move(source, target)
        return target.name

    def forget(self, name: str) -> None:
        """Delete a memory, finished or not, whole or not at all.

        One that is being made, is in use, or has other files, is a `ValueError`.
        """
        name = normalize_name(name)
        folder = self._locate(name) if name in self.list_unfinished() else self.find(name)
        with self._claimed(name):
            self._forget(name, folder)

    @contextmanager
    def _claimed(self, name: str) -> Iterator[None]:
        """Reserve the name of a memory within the context; `InUse` while it is being made."""
        with ExitStack() as stack:
            try:
                stack.enter_context(self._reserved(name))
            except InUse:
                remedy = "wait for its end, or stop its reading first"
                raise InUse(f"memory {name!r} is being made: {remedy}") from None
            yield

    def _forget(self, name: str, folder: Path) -> None:
        with locked(folder / CHECKPOINT_FOLDER):
            # A process may have been killed while it wrote the memory.
            finish_replacement(folder)
            remove_unfinished(folder)
            foreign = sorted(set(os.listdir(folder)) - {*FILES, CHECKPOINT_FOLDER})
        if foreign:
            raise ValueError(
                f"memory {name!r} must hold its own files alone, "
                f"got {foreign[0]!r} too: move it away"
            )
        forgotten = self.folder / f".{name}.{os.getpid()}{_FORGOTTEN}"
        _move(folder, forgotten)
        while forgotten.exists():
            # A process that opens the library deletes it too.
            with suppress(FileNotFoundError):
                shutil.rmtree(forgotten)

    def unpack(self, archive: Path, name: str, adopt: Callable[[Path], None]) -> str:
        """Add a memory out of a zip archive (see `memories.folder.unpack`) and return its name.

        `adopt` is called with the unpacked folder, which it may change. It raises a `ValueError`
        for one of which nothing shall be left.
        """
        with self.new(name) as folder:
            with staged(folder) as unpacked:
                unpack(archive, unpacked)
                try:
                    adopt(unpacked)
                except ValueError as error:
                    # Visitors need not know where the library is.
                    raise ValueError(hide_folder(str(error), unpacked, name)) from None
            return folder.name

    def name_base(self) -> str | None:
        """Return the base's name, None where no memory has one; a `ValueError` for two bases.

        A damaged memory is left out, and a warning is logged.
        """
        first: tuple[str, str] | None = None
        for name, base in self._find_bases(self.list()):
            if first is None:
                first = name, base
            elif not is_same_folder(base, first[1]):
                raise ValueError(
                    "a library must hold memories of one base, "
                    f"got {base!r} of {name!r} and {first[1]!r} of {first[0]!r}: "
                    "keep them in two libraries"
                )
        return None if first is None else first[1]

    def _find_bases(self, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield the name of each memory and that of its base, where a sound config has one."""
        for name in names:
            try:
                config = load_memory_config(self._locate(name))
            except ValueError as error:
                _logger.warning("memory %r cannot be opened: %s", name, first_line(error))
                continue
            base = config.get("base_model_name_or_path")
            if base is not None:
                yield name, base

    def check_base(self, name: str) -> None:
        """Raise a `ValueError` where a base is not that of a memory here."""
        names = filter(self.__contains__, self._list_names())
        _, base = next(self._find_bases(names), (None, None))
        if base is not None and not is_same_folder(base, name):
            raise ValueError(
                "a library must hold memories of one base, "
                f"got {name!r} beside {base!r}: use another"
            )

    def attach(self, base: PreTrainedModel, name: str | None) -> AbstractContextManager[nn.Module]:
        """Return a context of the base with a memory attached; of the base alone for None."""
        if name is None:
            return nullcontext(base)
        return memory_attached(base, self.find(name))

    def route(self, questions: Sequence[str]) -> builtins.list[str | None]:
        """Return for each question the name of the memory that it is about; None for none.

        Of two memories that fit as well, the later one is taken. A damaged one is left out, and a
        warning is logged. See `routing`.
        """
        memories = {}
        for name in self.list():
            try:
                memories[name] = list_passages(self._locate(name))
            except (ValueError, OSError) as error:
                _logger.warning("memory %r is not found by questions: %s", name, first_line(error))
        return route(memories, questions)


def _move(folder: Path, target: Path) -> None:
    """Rename the folder of a memory, unless a reading is using it (`InUse`)."""
    with locked(folder / CHECKPOINT_FOLDER):
        if os.name != "nt":
            os.rename(folder, target)
            # The lock has moved too. It is removed while it is held, as `held` does.
            (target / CHECKPOINT_FOLDER / LOCK).unlink()
            with suppress(OSError):
                (target / CHECKPOINT_FOLDER).rmdir()
    # Windows renames no folder in which a file, such as the lock, is open. It therefore also
    # refuses a folder that another process has begun to use since.
    if os.name == "nt":
        os.rename(folder, target)
