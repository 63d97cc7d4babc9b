"""What all studies share: how a memory is made, kept and put to use, and a folder that a broken run goes on from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from .. import checkpoint
from ..evaluation.perplexity import perplexity
from ..files import staged, write_json
from ..loading import MEMORY_CONFIG, load_memory
from ..methods import METHOD_FIELDS, Settings, attached, make_trainer
from ..text import digest_ids
from ..ttt.losses import WEIGHTINGS
from .progress import Advance, Start, silent
from .sharing import Processes

TEACHING = "teaching.json"
"""What a memory's folder holds besides PEFT's files: how it was made, and what it cost."""

ALONE = Processes()
_LEARNING_COST = 3.0
"""What a reading costs that learns, in readings that do not: about what was measured."""


@dataclass(frozen=True)
class Recipe:
    """How a text is taught, beyond a method's settings: the paper's way is one plain reading.

    Args:
        readings: how often the text is read.
        objective: "nll" or "distill" (see `TestTimeTrainer`).
        teacher_window: of the teacher, for "distill".
        token_weighting: "uniform" or "loss".

    Raises:
        ValueError: a value that no teaching can have.
    """

    readings: int = 1
    objective: str = "nll"
    teacher_window: int | None = None
    token_weighting: str = "uniform"

    def __post_init__(self) -> None:
        if self.readings < 1:
            raise ValueError(f"readings must be at least 1, got {self.readings}: a text is read once or more")
        for field, choices in (("objective", ("nll", "distill")), ("token_weighting", tuple(WEIGHTINGS))):
            if getattr(self, field) not in choices:
                raise ValueError(f"{field} must be one of {', '.join(choices)}, got {getattr(self, field)!r}")


def memorize(
    model: nn.Module, input_ids: torch.Tensor, settings: Settings, recipe: Recipe, on_tokens: Advance | None = None
) -> dict[str, Any]:
    """Teaches the active adapter a text.

    Args:
        model: with its adapter, which is changed in place; without one, it only reads.
        input_ids: LongTensor [T].
        settings: of the loop.
        recipe: how it is taught.
        on_tokens: called with the number of tokens of each chunk.

    Returns:
        `perplexity`: one value a reading, each token scored before it was learned; `scored_tokens`, `seconds` and
        `skipped_chunks`, over all readings.
    """
    trainer = make_trainer(
        model,
        settings,
        objective=recipe.objective,
        teacher_window=recipe.teacher_window,
        token_weighting=recipe.token_weighting,
    )
    perplexities, tokens, seconds, skipped = [], 0, 0.0, 0
    for _ in range(recipe.readings):
        for chunk in trainer.read(input_ids):
            if on_tokens is not None:
                on_tokens(chunk.stop - chunk.start)
        nll_nats = sum(chunk.nll_nats for chunk in trainer.chunks)
        perplexities.append(perplexity(nll_nats, sum(chunk.tokens for chunk in trainer.chunks)))
        tokens += sum(chunk.tokens for chunk in trainer.chunks)
        seconds += sum(chunk.seconds for chunk in trainer.chunks)
        skipped += trainer.skipped_chunks
        trainer.rewind()
    return {"perplexity": perplexities, "scored_tokens": tokens, "seconds": seconds, "skipped_chunks": skipped}


def make_memory(
    base: PreTrainedModel,
    input_ids: torch.Tensor,
    settings: Settings,
    recipe: Recipe,
    directory: Path,
    start: Start = silent,
    title: str = "",
) -> dict[str, Any]:
    """Makes a memory of a text and saves it, whole or not at all; one that is there already is left as it is.

    Args:
        base: a causal LM without adapters; mutated while it runs, and left as it was.
        input_ids: LongTensor [T].
        settings: the method and its settings.
        recipe: how it is taught.
        directory: the memory's folder.
        start: shows progress, in tokens.
        title: what the progress is called.

    Returns:
        What `memorize` returns, with `parameters`: how many were trained.
    """
    if (directory / TEACHING).exists():
        return read_teaching(directory)
    with attached(base, settings) as model:
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        advance = start(title, len(input_ids) * recipe.readings)
        teaching = {"parameters": trained, **memorize(model, input_ids, settings, recipe, advance)}
        _save(model, directory, settings, teaching)
    return teaching


def read_teaching(directory: Path) -> dict[str, Any]:
    """Reads what `make_memory` returned when it made the memory in a folder."""
    return json.loads((directory / TEACHING).read_text(encoding="utf-8"))


def _save(model: PeftModel, directory: Path, settings: Settings, teaching: dict[str, Any]) -> None:
    config = model.peft_config[model.active_adapter]
    name = config.base_model_name_or_path
    try:
        config.base_model_name_or_path = settings.model
        with staged(directory, last=TEACHING) as folder:
            model.save_pretrained(str(folder), save_embedding_layers=False)
            write_json(folder / TEACHING, teaching)
    finally:
        config.base_model_name_or_path = name


@contextmanager
def with_memory(base: PreTrainedModel, directory: Path) -> Iterator[PeftModel]:
    """Gives the base with a saved memory, frozen and in evaluation mode, and takes the memory out again.

    Args:
        base: a causal LM without adapters; mutated in between.
        directory: the memory's folder.
    """
    model = load_memory(base, directory).requires_grad_(False).eval()
    try:
        yield model
    finally:
        model.unload()
        base.__dict__.pop("peft_config", None)


def has_memory(directory: Path) -> bool:
    """Says whether a folder holds a finished memory."""
    return (directory / TEACHING).exists() and (directory / MEMORY_CONFIG).exists()


def without_memory(settings: Settings) -> Settings:
    """Gives the settings of a reading with no memory that is like another one in all else."""
    return dataclasses.replace(settings, method="none", **dict.fromkeys(METHOD_FIELDS))


def split_method(spec: str) -> tuple[str, int | None, float | None]:
    """Splits NAME[@WIDTH][:RATE], such as "lora@16:2e-3", into a method, its width and its learning rate.

    Returns:
        Name, width and rate; None for what is not given.

    Raises:
        ValueError: the width is no whole number above 0, or the rate no number above 0.
    """
    found = re.fullmatch(r"([^@:]+)(?:@(\d+))?(?::(.+))?", spec)
    width = int(found[2]) if found and found[2] else None
    try:
        rate = float(found[3]) if found and found[3] else None
    except ValueError:
        rate = -1.0
    if not found or width == 0 or (rate is not None and not 0 < rate < float("inf")):
        raise ValueError(f"method must be NAME, NAME@WIDTH, NAME:RATE or both, got {spec!r}: write lora@16:2e-3, say")
    return found[1], width, rate


def name_method(spec: str) -> str:
    """Gives the name that a method of this spec has in tables and folders: "lora@16:2e-3" is "lora@16-lr2e-3"."""
    return spec.replace(":", "-lr")


def open_run(
    out: Path, study: str, common: dict[str, Any], methods: dict[str, Settings], overwrite: bool = False
) -> None:
    """Records in a folder what is run there, or checks that it is what was run there before.

    Methods may be added to a folder by later runs; what all of them share must stay the same. A record without a
    result beside it, of a run that failed at once, binds nobody.

    Args:
        out: the folder; made where it is missing.
        study: the study's name: other studies may use the same folder.
        common: what all methods share, as JSON values.
        methods: the settings of each.
        overwrite: replaces the record, and removes the study's results.

    Raises:
        ValueError: the folder holds results of another setting.
    """
    path = out / study / "run.json"
    methods_json = {name: dataclasses.asdict(settings) for name, settings in methods.items()}
    common = json.loads(json.dumps(common))
    if overwrite:
        shutil.rmtree(out / study, ignore_errors=True)
    unfinished = (checkpoint.LOCK, checkpoint.UNFINISHED)
    files = [file for file in path.parent.rglob("*") if file.is_file() and file.name not in unfinished]
    if path.exists() and files != [path]:
        before = json.loads(path.read_text(encoding="utf-8"))
        _check_same(before["common"], common, out, "")
        for name in methods_json.keys() & before["methods"].keys():
            _check_same(before["methods"][name], methods_json[name], out, f"{name}: ")
        methods_json = {**before["methods"], **methods_json}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"study": study, "common": common, "methods": methods_json})


@dataclass(frozen=True)
class Task:
    """A piece of a run that stands on its own: it leaves its result in the run's folder.

    Args:
        done: says whether its result lies there.
        do: does it, or what is left of it.
        cost: in any unit that all tasks of the run share.
    """

    done: Callable[[], bool]
    do: Callable[[], None]
    cost: float = 1.0


def reading_cost(tokens: int, settings: Settings, readings: int = 1) -> float:
    """Estimates what a reading costs, in tokens that are read without learning."""
    return readings * tokens * (1.0 if settings.method == "none" else _LEARNING_COST * settings.epochs)


def do_tasks(
    tasks: Sequence[Task],
    begin: Callable[[], None],
    processes: Processes = ALONE,
    start: Start = silent,
) -> None:
    """Does what is not done yet, shared out over the processes; returns in each of them once all of it is done.

    A process that fails ends at once; who waits for it ends too. What is finished lies in the folder.

    Args:
        tasks: the same ones in each process.
        begin: called first, in the main process alone: it opens the run's folder.
        processes: among whom.
        start: shows progress; of several processes, the main one also shows how far all of them are.

    Raises:
        ChildProcessError: the main process has ended before.
    """

    def list_missing() -> list[int]:
        begin()
        return [number for number, task in enumerate(tasks) if not task.done()]

    missing = [tasks[number] for number in processes.from_main(list_missing)]
    total = _Total(missing, processes, start)
    try:
        for number in processes.share([task.cost for task in missing]):
            missing[number].do()
            total.look()
    except BaseException:
        processes.give_up()
        raise
    processes.wait(meanwhile=total.look)
    total.look(now=True)


class _Total:
    """A line of progress for all processes, which know of each other by what lies in the folder."""

    def __init__(self, tasks: Sequence[Task], processes: Processes, start: Start):
        self._waiting = list(tasks) if processes.count > 1 and processes.is_main else []
        self._advance = start(f"{processes.count} processes", len(tasks)) if self._waiting else None
        self._looked = time.monotonic()

    def look(self, now: bool = False) -> None:
        if not self._waiting or (not now and time.monotonic() - self._looked < 1.0):
            return
        left = [task for task in self._waiting if not task.done()]
        self._advance(len(self._waiting) - len(left), f"{len(left)} tasks left")
        self._waiting, self._looked = left, time.monotonic()


def _check_same(before: dict[str, Any], now: dict[str, Any], out: Path, place: str) -> None:
    for field in sorted(before.keys() | now.keys()):
        there, here = before.get(field), now.get(field)
        if isinstance(there, dict) and isinstance(here, dict):
            _check_same(there, here, out, f"{place}{field}: ")
        elif there != here:
            raise ValueError(
                f"{place}{field} must be {_short(there)} as in the results in {str(out)!r}, got {_short(here)}: "
                "choose another folder, or give --overwrite"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def describe_text(input_ids: torch.Tensor) -> dict[str, Any]:
    """Gives what is recorded of a text that is read: how many tokens [T], and their SHA-256."""
    return {"tokens": len(input_ids), "sha256": digest_ids(input_ids)}


def digest_file(path: str | os.PathLike) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Reads a list of records; an empty list where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Writes a list of records, replacing the file in one step; its folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, list(records))
