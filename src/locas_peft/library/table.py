"""A table of documents: each is taught into a memory of its own in a library.

The processes of a launcher share the documents, or Ray's actors do. What is finished is skipped,
what was interrupted goes on, and what fails is listed while the rest goes on.
"""

import glob
import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from locas_settings import StageSettings
from locas_settings.adapter import parse_layers

from ..bases import load_base
from ..checks import first_line, import_extra
from ..files import fold_name, is_disk_full, parse_json_lines, staged_file
from ..memories.checkpoint import InUse, held
from ..processes import in_first_process, take_share, wait_for_others
from ..progress import Progress, silent
from ..stages import ReadSettings, choose_values
from ..text import cut_text, load_text, normalize_text, unwrap
from .library import Library
from .names import FAILURES, check_name
from .routing import make_sample

__all__ = ["FAILURES", "Document", "load_rows", "load_table", "teach_on_ray", "teach_table"]

LOCK = ".table.lock"
POLL_SECONDS = 1.0
# Of a document whose actor ended: one that needs too much memory would end all of them.
RETRIES = 3
_OPTIONS = {"lr": "learning_rate", "layers": "layers_to_transform", "width": "r"}
_COLUMNS = ("name", "text", "path")
_OF_THE_BASE = ("model", "dtype")
_FORMATS = {".csv": "csv", ".json": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class Document:
    """A row of a table.

    Args:
        line: of the row, from 1.
        name: of the memory.
        text: what is read, or its file.
        settings: how it is read or studied.
        error: why the row cannot be used; empty for one that can.
    """

    line: int
    name: str | None
    text: str | Path = ""
    settings: StageSettings = ReadSettings()
    error: str = ""

    @property
    def memory_name(self) -> str:
        """The name of the memory, which a row without an error has."""
        assert self.name is not None
        return self.name

    def load(self) -> str:
        """Return the text; a row or a file that cannot be used is a `ValueError`."""
        if self.error:
            raise ValueError(self.error)
        if isinstance(self.text, str):
            return normalize_text(self.text, f"row {self.line}")
        return load_text(self.text)

    def measure(self) -> int:
        """Return the size of the text in characters or bytes; 0 for a file that cannot be read."""
        if isinstance(self.text, str):
            return len(self.text)
        with suppress(OSError):
            return self.text.stat().st_size
        return 0


def load_table(source: str, settings: StageSettings) -> list[Document]:
    """Load a table of documents; one that cannot be read, or has no rows, is a `ValueError`.

    Args:
        source: a JSON Lines file (.jsonl), or another table (see `load_rows`). A row has `name`,
            and `text` or `path`, which is relative to the table's folder. Its other values are its
            own settings, by the names of the settings' fields or of the command's options. In
            other tables than JSON Lines, other columns are ignored.
        settings: for what a row does not set.
    """
    if Path(source).suffix.lower() == ".jsonl":
        rows = parse_json_lines(load_text(source).split("\n"), dict)
    else:
        known = {*_COLUMNS, *_list_fields(settings)}
        rows = enumerate((_keep(row, known) for row in load_rows(source)), 1)
    documents = []
    for line, row in rows:
        try:
            documents.append(_parse_row(line, row, Path(source).parent, settings))
        except (ValueError, TypeError) as error:
            name = None
            if row and row.get("name"):
                name = str(row["name"])
            documents.append(Document(line, name, error=first_line(error)))
    if not documents:
        raise ValueError(f"table must have a document a row, got none in {source!r}: add one")
    return _refuse_repeated_names(documents)


def _keep(row: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Return a row's values of some names; a whole number in a column of floats is an int."""
    kept = {}
    for name, value in row.items():
        if _find_field(name) in names:
            # A CSV column of whole numbers is read as floats where a row has none.
            is_whole = isinstance(value, float) and value.is_integer()
            kept[name] = int(value) if is_whole else value
    return kept


def _parse_row(
    line: int, row: dict[str, Any] | None, folder: Path, settings: StageSettings
) -> Document:
    """Return the document of a row; one that cannot be used is a `ValueError` or `TypeError`."""
    values = {}
    for key, value in (row or {}).items():
        if value is not None:
            values[_find_field(key)] = value
    name, text, file = (values.pop(key, None) for key in _COLUMNS)
    has_one = (text is None) != (file is None)
    if name is None or not has_one or not isinstance(text or file, str):
        raise ValueError(
            "each row must be an object with name and either path or text, not empty: correct it"
        )
    unknown = sorted(values.keys() - _list_fields(settings))
    if unknown:
        raise ValueError(
            f"settings must be those of the command, got {unknown[0]!r}: see its --help"
        )
    if values.get("method") == "none":
        raise ValueError("method must be one that learns, got 'none': choose another")
    if file == "-":
        raise ValueError("path must be a file, got standard input: name one, or give text")
    layers = values.get("layers_to_transform")
    if isinstance(layers, str | int):
        values["layers_to_transform"] = parse_layers(str(layers))
    content = text or folder / file
    settings = replace(settings, **values)
    # Values that contradict each other are refused before the base is loaded.
    choose_values(settings)
    return Document(line, check_name(str(name)), content, settings)


def _find_field(name: str) -> str:
    """Return the field of the settings that a column or an option has the name of."""
    field = name.replace("-", "_")
    return _OPTIONS.get(field, field)


def _list_fields(settings: StageSettings) -> set[str]:
    """Return the settings that a row can have of its own."""
    return set(vars(settings)) - set(_OF_THE_BASE)


def _refuse_repeated_names(documents: list[Document]) -> list[Document]:
    """Return documents; those that share a name have an error: none of them can be meant."""
    names = [document.memory_name for document in documents if not document.error]
    counts = Counter(fold_name(name) for name in names)
    checked = []
    for document in documents:
        if not document.error and counts[fold_name(document.memory_name)] > 1:
            error = (
                "name must be that of one row alone, whatever its case, got it twice: rename one"
            )
            document = replace(document, error=error)
        checked.append(document)
    return checked


def _keep_text(value: str) -> str | None:
    return value or None


def load_rows(source: str, split: str = "train") -> Iterator[dict[str, Any]]:
    """Yield the rows of a .csv, .json or .parquet file, or of a dataset, as they are needed.

    A dataset is a folder or a name on the hub. A `ValueError` if there is none, or if `datasets` is
    not installed.
    """
    datasets = import_extra("datasets", what="a table")
    file_format = _FORMATS.get(Path(source).suffix.lower())
    arguments: dict[str, Any]
    if file_format is None:
        arguments = {"path": source, "split": split}
    else:
        # `datasets` would take the path of a file for a pattern.
        name = glob.escape(source) if Path(source).exists() else source
        arguments = {"path": file_format, "data_files": name, "split": "train"}
    if file_format == "csv":
        # Else the name "001" would be the number 1, and "NA" none.
        converters = dict.fromkeys(_COLUMNS, _keep_text)
        arguments |= {"converters": converters, "keep_default_na": False, "na_values": [""]}
    try:
        yield from datasets.load_dataset(**arguments, streaming=True)
    except StopIteration:
        raise ValueError(f"dataset {source!r} is empty: add a document a row") from None
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

    The processes of a launcher share the documents.

    Args:
        library: where the memories go.
        base: the model that reads; mutated meanwhile.
        tokenizer: of the base.
        documents: of `load_table`.
        unwrapped: whether hard-wrapped lines are joined to paragraphs first.
        progress: opens lines of progress.
        options: the others of `Library.add`; `overwrite` replaces what was made of other texts or
            settings.

    Raises:
        InUse: another command teaches a table into this library.
        OSError: the disk is full.
    """
    with ExitStack() as stack:
        in_first_process(lambda: stack.enter_context(held(library.folder / LOCK)))
        finished = set(library.list())

        def measure(document: Document) -> int:
            return 0 if document.name in finished else document.measure()

        share = take_share(documents, measure)
        tally = _Tally(library, documents, share)
        advance = progress(f"{len(share)} documents", len(share))
        for document in share:
            try:
                error = _teach(library, base, tokenizer, document, unwrapped, options)
            except InUse as in_use:
                error = first_line(in_use)
            advance(1, tally.note(document, error))
        tally.save()
        wait_for_others()
        return tally.save()


def teach_on_ray(
    library: Library,
    base: dict[str, Any],
    documents: Sequence[Document],
    *,
    address: str | None = None,
    actors_per_node: int = 1,
    progress: Progress = silent,
    **options: Any,
) -> list[dict[str, Any]]:
    """Teach a table as `teach_table` does, with Ray's actors, on nodes that may vanish.

    All nodes have this package, and see the library's folder, with file locks, and the documents'
    files. A document whose actor ended `RETRIES + 1` times has failed. At the end, idle actors wait
    for the documents of others, whose locks are free where their node is lost.

    Args:
        library: where the memories go.
        base: the arguments of `load_base`.
        documents: of `load_table`.
        address: HOST:PORT or "auto"; None starts a Ray on this machine, which ends with the table.
        actors_per_node: on nodes without a GPU; the others have one on each GPU.
        progress: opens lines of progress.
        options: `unwrapped`, `overwrite` and `checkpoint_seconds`.

    Raises:
        ValueError: a cluster that cannot be reached, or a base that cannot be loaded.
    """
    ray = import_extra("ray", "ray", "--ray")
    _connect(ray, address)
    try:
        with held(library.folder / LOCK):
            tally = _Tally(library, documents, documents)
            advance = progress(f"{len(documents)} documents", len(documents))
            idle = _start_actors(ray, actors_per_node, (library.folder.resolve(), base, options))
            for document, error in _teach_with_actors(ray, idle, documents):
                advance(1, tally.note(document, error))
            return tally.save()
    finally:
        ray.shutdown()


def _start_actors(ray: Any, per_node: int, arguments: tuple) -> list[Any]:
    """Start a `_Teacher` on each GPU of the cluster, and so many on each node without one."""
    kind = ray.remote(max_restarts=-1)(_Teacher)
    actors = []
    for node in ray.nodes():
        resources = node["Resources"]
        if not node["Alive"] or "CPU" not in resources:
            continue
        gpus = int(resources.get("GPU", 0))
        count = gpus or per_node
        # Ray takes whole cores, or less than one.
        cores = resources["CPU"] // count or resources["CPU"] / count
        for _ in range(count):
            options = kind.options(num_cpus=cores, num_gpus=min(gpus, 1))
            actors.append(options.remote(*arguments))
    return actors


def _teach_with_actors(
    ray: Any, idle: list[Any], documents: Sequence[Document]
) -> Iterator[tuple[Document, str | None]]:
    """Yield each document with its error, None for none, when an idle actor has taught it."""
    left = {document.line: document for document in documents}
    # An actor and the line that it works on, None for one that is being made again.
    running: dict[Any, tuple[Any, int | None]] = {}
    ends: Counter[int | None] = Counter()
    offered = cycle(documents)
    while left:
        while idle:
            document = next(document for document in offered if document.line in left)
            actor = idle.pop()
            running[actor.teach.remote(_with_full_path(document))] = actor, document.line
        (result,), _ = ray.wait(list(running))
        actor, line = running.pop(result)
        error = None
        try:
            error = ray.get(result)
            idle.append(actor)
        except ray.exceptions.ActorDiedError as died:
            # The actor could not be made.
            if not running:
                reason = str(died).strip().splitlines()[-1]
                raise ValueError(f"no actor can be made: {reason}") from None
            continue
        except ray.exceptions.RayActorError as ended:
            # It ended, or its node did: it gets no document before it is back.
            time.sleep(POLL_SECONDS)
            running[actor.__ray_ready__.remote()] = actor, None
            ends[line] += 1
            if ends[line] <= RETRIES:
                continue
            error = f"its actor ended {RETRIES + 1} times: {first_line(ended)}"
        except ray.exceptions.RayTaskError as raised:
            raise raised.cause from None
        # Nothing where the actor was only waited for, or another one has taught the document too.
        taught = None if line is None else left.pop(line, None)
        if taught is not None:
            yield taught, error


def _with_full_path(document: Document) -> Document:
    """Return a document for an actor, whose current folder is another one."""
    if isinstance(document.text, str):
        return document
    return replace(document, text=document.text.resolve())


class _Teacher:
    """An actor: a base, and the library that it writes memories into."""

    def __init__(self, folder: Path, base: dict[str, Any], options: dict[str, Any]):
        if not folder.is_dir():
            raise ValueError(
                f"library must be a folder that all nodes see, got {str(folder)!r}: share it"
            )
        self._library = Library(folder)
        self._base, self._tokenizer = load_base(**base)
        self._options = dict(options)
        self._unwrapped = self._options.pop("unwrapped", False)

    def teach(self, document: Document) -> str | None:
        """Teach one document as soon as no other process holds it (see `_teach`)."""
        while True:
            with suppress(InUse):
                return _teach(
                    self._library,
                    self._base,
                    self._tokenizer,
                    document,
                    self._unwrapped,
                    self._options,
                )
            time.sleep(POLL_SECONDS)


def _teach(
    library: Library,
    base: PreTrainedModel,
    tokenizer: Any,
    document: Document,
    unwrapped: bool,
    options: dict[str, Any],
) -> str | None:
    """Teach one document, unless its memory is finished; return why that failed, in one line.

    Raises `InUse` where another process holds the document, and the `OSError` of a full disk.
    """
    try:
        content = document.load()
        text = unwrap(content) if unwrapped else content
        # What is stored of the text is as it was written.
        kept_text = cut_text(tokenizer, content, document.settings.max_tokens, unwrapped)
        options = {"sample": make_sample(kept_text), "kept_text": kept_text, **options}
        name = document.memory_name
        library.add(base, tokenizer, text, name, document.settings, resume=True, **options)
    except InUse:
        raise
    except OSError as error:
        if is_disk_full(error):
            raise
        return first_line(error)
    except (ValueError, TypeError) as error:
        return first_line(error)
    except Exception as error:
        return repr(error)
    return None


class _Tally:
    """What became of a table's documents in this process, which works on a share of them."""

    def __init__(
        self, library: Library, documents: Sequence[Document], share: Sequence[Document]
    ) -> None:
        self._folder = library.folder
        self._began = time.monotonic()
        self._done = 0
        self._taught = 0
        self._untried = {(document.line, document.name) for document in documents}
        named = {document.name for document in share if not document.error}
        self._new = named - set(library.list())
        # By line.
        self._failures: dict[int, dict[str, Any]] = {}

    def note(self, document: Document, error: str | None) -> str:
        """Note how a document ended; return the note for the progress."""
        self._untried.discard((document.line, document.name))
        if error is None:
            self._done += 1
            self._taught += document.name in self._new
        self._new.discard(document.name)
        if error is not None:
            row = {"line": document.line, "name": document.name, "error": error}
            self._failures[document.line] = row
            self.save()
        note = f"{self._done} done, {len(self._failures)} failed"
        if self._taught:
            hours = (time.monotonic() - self._began) / 3600
            hours_left = hours * len(self._new) / self._taught
            note += f", {self._taught / hours:,.0f} an hour, {hours_left:.1f} hours left"
        return note

    def save(self) -> list[dict[str, Any]]:
        """Write what failed here, and in other processes without being tried here; return it."""
        file = self._folder / FAILURES
        with held(self._folder / f".{FAILURES}.lock", wait=True):
            failures = {}
            lines = file.read_text(encoding="utf-8").split("\n") if file.is_file() else []
            for _, row in parse_json_lines(lines, dict):
                if row is not None and (row.get("line"), row.get("name")) in self._untried:
                    failures[row["line"]] = row
            failures |= self._failures
            rows = [failures[line] for line in sorted(failures)]
            if rows:
                content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                with staged_file(file) as temporary:
                    temporary.write_text(content, encoding="utf-8", newline="\n")
            else:
                file.unlink(missing_ok=True)
        return rows


def _connect(ray: Any, address: str | None) -> None:
    """Connect to a cluster, or start one here; a `ValueError` where none answers in 10 s."""
    local = {} if address else {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if address not in (None, "local"):
            _probe(address)
        ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **local)
        # Ray's own handler ends the process with another exit code. Other threads have none.
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, handler)
    except subprocess.TimeoutExpired:
        raise _describe_unreached(address, "no answer in 10 s") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise _describe_unreached(address, first_line(error)) from None


def _probe(address: str) -> None:
    """Connect to a cluster in a process of its own.

    Where another server listens, Ray prints and tries for minutes.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host, int(port)), 5.0).close()
    code = "import sys, ray; ray.init(sys.argv[1])"
    command = [sys.executable, "-c", code, address]
    connected = subprocess.run(command, capture_output=True, text=True, timeout=10.0)
    if connected.returncode:
        raise ValueError(connected.stderr.strip().rpartition("\n")[2])


def _describe_unreached(address: str | None, reason: str) -> ValueError:
    """Return the error for a cluster that cannot be reached."""
    rule = f"--ray must be a cluster that can be reached, got {address or 'local'!r} ({reason})"
    return ValueError(f"{rule}: correct the address, or start the cluster")
