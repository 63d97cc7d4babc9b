"""A table of documents: each is taught into a memory of its own in a library, by any number of processes or by Ray.

What is finished is skipped, what was interrupted goes on, and what fails is listed while the rest goes on.
"""

import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..bases import load_base
from ..checks import first_line, import_extra
from ..files import is_disk_full, parse_json_lines, staged_file
from ..memories.checkpoint import InUse, held
from ..progress import Progress, silent
from ..reading import ReadingSettings
from ..text import load_text, unwrap
from ..units import POLL_SECONDS, share
from .library import FAILURES, Library, check_name
from .routing import make_sample

__all__ = ["FAILURES", "Document", "load_rows", "load_table", "teach_on_ray", "teach_table"]

SETTINGS = tuple(name for name in vars(ReadingSettings()) if name not in ("model", "dtype"))
_OPTIONS = {"lr": "learning_rate", "layers": "layers_to_transform", "width": "r"}
_FORMATS = {".csv": "csv", ".json": "json", ".parquet": "parquet"}
RETRIES = 3  # of a document whose actor ended: one that needs too much memory would end all of them


@dataclass(frozen=True)
class Document:
    """A row of a table: its line, from 1, the memory's name, the text or its file, how that is read, or an error."""

    line: int
    name: str | None
    text: str | Path = ""
    settings: ReadingSettings = ReadingSettings()
    error: str = ""

    def load(self) -> str:
        """Return the text; a row or a file that cannot be used is a `ValueError`."""
        if self.error:
            raise ValueError(self.error)
        return self.text if isinstance(self.text, str) else load_text(self.text)


def load_table(source: str, settings: ReadingSettings) -> list[Document]:
    """Load a table of documents; one that cannot be read, or has no rows, is a `ValueError`.

    Args:
        source: a JSON Lines file (.jsonl), or another table (see `load_rows`). A row has `name`, and `text` or `path`,
            which is relative to the table's folder. Its other values are its own settings, by the names of
            `ReadingSettings` or of the command's options. In other tables than JSON Lines, other columns are ignored.
        settings: for what a row does not set.
    """
    folder, documents, known = (
        Path(source).parent,
        [],
        {"name", "text", "path", *SETTINGS, *_OPTIONS},
    )
    lines = Path(source).suffix == ".jsonl"
    rows = (
        parse_json_lines(load_text(source).split("\n"), dict)
        if lines
        else enumerate(load_rows(source), 1)
    )
    for line, row in rows:
        try:
            given = {key: value for key, value in (row or {}).items() if lines or key in known}
            given = {
                _OPTIONS.get(key, key): value for key, value in given.items() if value is not None
            }
            name, text, file = (given.pop(key, None) for key in ("name", "text", "path"))
            if (
                name is None
                or not isinstance(text or file, str)
                or (text is None) == (file is None)
            ):
                raise ValueError(
                    "each row must be an object with name and either path or text, not empty: correct it"
                )
            if unknown := sorted(given.keys() - set(SETTINGS)):
                raise ValueError(
                    f"settings must be those of locas memorize, got {unknown[0]!r}: see its --help"
                )
            if given.get("method") == "none":
                raise ValueError("method must be one that learns, got 'none': choose another")
            documents.append(
                Document(
                    line, check_name(str(name)), text or folder / file, replace(settings, **given)
                )
            )
        except (ValueError, TypeError) as error:
            documents.append(
                Document(
                    line, row and row.get("name") and str(row["name"]), error=first_line(error)
                )
            )
    if not documents:
        raise ValueError(f"table must have a document a row, got none in {source!r}: add one")
    counts = Counter((each.name or "").casefold() for each in documents if not each.error)
    twice = "name must be that of one row alone, whatever its case, got it twice: rename one"
    return [
        replace(each, error=twice) if counts[(each.name or "").casefold()] > 1 else each
        for each in documents
    ]


def load_rows(source: str, split: str = "train") -> Iterator[dict[str, Any]]:
    """Yield the rows of a .csv, .json or .parquet file, or of a dataset in a folder or on the hub, as they are needed.

    A `ValueError` if there is none, or if `datasets` is not installed.
    """
    datasets, kind = import_extra("datasets", what="a table"), _FORMATS.get(Path(source).suffix)
    found = (
        {"path": source, "split": split} if kind is None else {"path": kind, "data_files": source}
    )
    try:
        yield from datasets.load_dataset(**{"split": "train", "streaming": True, **found})
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"dataset {source!r} cannot be read ({first_line(error)}): check name and split"
        ) from error


def teach_table(
    library: Library,
    base: PreTrainedModel,
    tokenizer: Any,
    documents: Sequence[Document],
    *,
    unwrapped: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> list[dict[str, Any]]:
    """Teach each document into a memory of its name; return the rows of `FAILURES`.

    Processes that do this with the same documents at once share them. A full disk ends it with its `OSError`. With
    `unwrapped`, hard-wrapped lines are joined to paragraphs first. The other options are those of `reading.memorize`;
    `overwrite` replaces what was made of other texts or settings.
    """
    tally = _Tally(library, documents)
    teach = partial(_teach, library, base, tokenizer, unwrapped=unwrapped, **options)
    share(documents, lambda document: tally.note(document, teach(document)), progress, "documents")
    return tally.save()


def teach_on_ray(
    library: Library,
    base: dict[str, Any],
    documents: Sequence[Document],
    *,
    address: str | None = None,
    workers: int = 1,
    progress: Progress = silent,
    **options: Any,
) -> list[dict[str, Any]]:
    """Teach a table as `teach_table` does, with an actor on each GPU, or `workers` on each node without one.

    All nodes have this package, and see the library's folder, with file locks, and the documents' files. A document
    whose actor ended `RETRIES + 1` times has failed. At the end, idle actors wait for the documents of others, whose
    locks are free where their node is lost. `base` has the arguments of `load_base`, `options` are `unwrapped`,
    `overwrite` and `checkpoint_seconds`. `address` is HOST:PORT or "auto"; None starts a Ray on this machine, which
    ends with the table. A cluster that cannot be reached, and a base that cannot be loaded, are `ValueError`s.
    """
    ray = import_extra("ray", "ray", "--ray")
    _connect(ray, address)
    try:
        tally, advance = (
            _Tally(library, documents),
            progress(f"{len(documents)} documents", len(documents)),
        )
        kind, idle, ends = ray.remote(max_restarts=-1)(_Teacher), [], Counter()
        for node in (
            each["Resources"]
            for each in ray.nodes()
            if each["Alive"] and "CPU" in each["Resources"]
        ):
            actors = (gpus := int(node.get("GPU", 0))) or workers
            part = {
                "num_cpus": node["CPU"] // actors or node["CPU"] / actors,
                "num_gpus": min(gpus, 1),
            }
            idle += [
                kind.options(**part).remote(library.folder.resolve(), base, options)
                for _ in range(actors)
            ]
        left, running = {each.line: each for each in documents}, {}
        offered = (each for _ in count() for each in list(left.values()) if each.line in left)
        while left:
            while idle:
                actor, document = idle.pop(), next(offered)
                text = document.text if isinstance(document.text, str) else document.text.resolve()
                running[actor.teach.remote(replace(document, text=text))] = actor, document.line
            (result,), _ = ray.wait(list(running))
            actor, line = running.pop(result)
            try:
                error = ray.get(result)
            except ray.exceptions.ActorDiedError as died:  # it could not be made
                if not running:
                    raise ValueError(
                        f"no actor can be made: {str(died).strip().splitlines()[-1]}"
                    ) from None
                continue
            except (
                ray.exceptions.RayActorError
            ) as ended:  # or its node: it gets no document before it is back
                time.sleep(POLL_SECONDS)
                running[actor.__ray_ready__.remote()] = actor, None
                ends[line] += 1
                if ends[line] <= RETRIES:
                    continue
                error = f"its actor ended {RETRIES + 1} times: {first_line(ended)}"
            except ray.exceptions.RayTaskError as raised:
                raise raised.cause from None
            else:
                idle.append(actor)
            if document := left.pop(line, None):
                advance(1, tally.note(document, error))
    finally:
        ray.shutdown()
    return tally.save()


class _Teacher:
    """An actor: a base, and the library that it writes memories into."""

    def __init__(self, folder: Path, base: dict[str, Any], options: dict[str, Any]):
        if not folder.is_dir():
            raise ValueError(
                f"library must be a folder that all nodes see, got {str(folder)!r}: share it"
            )
        self._library, self._base, self._options = Library(folder), load_base(**base), options

    def teach(self, document: Document) -> str | None:
        """Teach one document as soon as no other process holds it (see `_teach`)."""
        while True:
            with suppress(InUse):
                return _teach(self._library, *self._base, document, **self._options)
            time.sleep(POLL_SECONDS)


def _teach(
    library: Library,
    base: PreTrainedModel,
    tokenizer,
    document: Document,
    *,
    unwrapped: bool = False,
    **options: Any,
) -> str | None:
    """Teach one document, unless its memory is finished; return why that failed, in one line.

    Raises `InUse` where another process holds the document, and the `OSError` of a full disk.
    """
    try:
        content = document.load()
        text, given = (
            unwrap(content) if unwrapped else content,
            {"sample": make_sample(content), **options},
        )
        library.add(base, tokenizer, text, document.name, document.settings, resume=True, **given)
    except Exception as error:
        if isinstance(error, InUse) or (isinstance(error, OSError) and is_disk_full(error)):
            raise
        return (
            first_line(error)
            if isinstance(error, ValueError | TypeError | OSError)
            else repr(error)
        )
    return None


class _Tally:
    """What became of a table's documents in this process."""

    def __init__(self, library: Library, documents: Sequence[Document]):
        self._folder, self._began, self._done, self._taught = library.folder, time.monotonic(), 0, 0
        self._new = {each.name for each in documents if not each.error} - set(library.list())
        self._failures: dict[int, dict[str, Any]] = {}  # by line

    def note(self, document: Document, error: str | None) -> str:
        """Note how a document ended; return the note for the progress."""
        if error is None:
            self._done, self._taught = self._done + 1, self._taught + (document.name in self._new)
        else:
            self._failures[document.line] = {
                "line": document.line,
                "name": document.name,
                "error": error,
            }
            self.save()
        self._new.discard(document.name)
        hours, taught = (time.monotonic() - self._began) / 3600, self._taught
        speed = (
            f", {taught / hours:,.0f} an hour, {hours * len(self._new) / taught:.1f} hours left"
            if taught
            else ""
        )
        return f"{self._done} done, {len(self._failures)} failed{speed}"

    def save(self) -> list[dict[str, Any]]:
        """Write what failed here, and what failed in other processes and was not tried here yet; return it."""
        file = self._folder / FAILURES
        with held(self._folder / f".{FAILURES}.lock", wait=True):
            written = file.read_text(encoding="utf-8").split("\n") if file.is_file() else []
            there = [
                row
                for _, row in parse_json_lines(written, dict)
                if row and row.get("name") in self._new
            ]
            found = [
                each
                for _, each in sorted(
                    ({each["line"]: each for each in there} | self._failures).items()
                )
            ]
            with staged_file(file) as temporary:
                temporary.write_text(
                    "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in found), "utf-8"
                )
            if not found:
                file.unlink()
        return found


def _connect(ray: Any, address: str | None) -> None:
    """Connect to a cluster, or start one on this machine; one that does not answer in 10 s is a `ValueError`."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    own = {} if address else {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if colon:
            socket.create_connection((host, int(port)), 5.0).close()
        if address not in (
            None,
            "local",
        ):  # Ray prints, and tries for minutes, where another server listens
            probe = [sys.executable, "-c", "import sys, ray; ray.init(sys.argv[1])", address]
            asked = subprocess.run(probe, capture_output=True, text=True, timeout=10.0)
            if asked.returncode:
                raise ValueError(asked.stderr.strip().rpartition("\n")[2])
        ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **own)
        with suppress(ValueError):  # this is not the main thread
            signal.signal(
                signal.SIGTERM, handler
            )  # Ray's own one ends the process with another exit code
    except (OSError, ValueError, RuntimeError, subprocess.TimeoutExpired) as error:
        reason = (
            "no answer in 10 s"
            if isinstance(error, subprocess.TimeoutExpired)
            else first_line(error)
        )
        rule = f"--ray must be a cluster that can be reached, got {address or 'local'!r} ({reason})"
        raise ValueError(f"{rule}: correct the address, or start the cluster") from None
