"""Runs of the protocols: where a run's results are, which run they are of, and the unit of a reading."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checks import describe_difference
from ..files import load_json, write_json
from ..memories.checkpoint import has_checkpoint, held
from ..memories.folder import FILES
from ..progress import Progress, follow, follow_study, silent
from ..reading.record import Reading
from ..reading.settings import AnySettings, CompleteSettings
from ..reading.teaching import memorize
from ..text import digest_ids
from ..units import Unit, add_needed, is_locked, lock_path, remove_unit

__all__ = ["Run", "describe_text", "summarize_reading"]


@dataclass
class Run:
    """What a protocol runs on and where its results go; the same arguments continue an interrupted run.

    Args:
        base: a causal LM without adapters; mutated while a unit is made, and restored.
        methods: each method's settings, by its name in tables; completed for the base.
        out: the folder; made if it does not exist. It may hold runs of several protocols.
        common: more fields for the record of the run, as JSON values.
        overwrite: remove the results of an earlier run, and no other file. If another process is at work in the
            folder, its results stay, so that processes that are all started with `overwrite` share one run.
    """

    base: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    methods: dict[str, AnySettings]
    out: Path
    common: dict[str, Any] = field(default_factory=dict)
    overwrite: bool = False
    progress: Progress = silent

    def __post_init__(self) -> None:
        self.methods = {
            name: settings.complete(self.base)
            for name, settings in self.methods.items()
        }

    def open(self, name: str, units: Sequence[Unit], **shared: Any) -> dict[str, Any]:
        """Record in `out/NAME/run.json` which run its results are of; return the fields that its figures begin with.

        Results of a different run are a `ValueError`: later runs may add methods, and the fields in `common` and
        `shared`, JSON values, must stay the same. A record without results, of a run that failed at once, is replaced.
        `units` is the protocol's table, with paths in `out / name`.
        """
        folder = self.out / name
        folder.mkdir(parents=True, exist_ok=True)
        path, common = folder / "run.json", {**self.common, **shared}
        settings = {method: values.to_json() for method, values in self.methods.items()}
        files = [unit.path.relative_to(folder).as_posix() for unit in add_needed(units)]
        record = {"study": name, "common": common, "methods": settings, "files": files}
        with held(lock_path(path), wait=True):
            before = load_json(path) if path.exists() else {}
            write_json(path, _join(folder, before, json.loads(json.dumps(record)), self.overwrite))
        return {"study": name, **common, "methods": settings}

    def reading(
        self,
        input_ids: Tensor,
        settings: CompleteSettings,
        path: Path,
        label: str = "",
        *,
        keep_memory: bool = True,
    ) -> Unit:
        """Return the unit of one reading of a LongTensor [T], whose result is a `Reading` as JSON.

        If interrupted, it continues inside its text. With `keep_memory` the memory is saved in the unit's `memory`.
        """

        def make() -> dict[str, Any]:
            options = {
                "out": unit.memory if keep_memory else None,
                "checkpoint_dir": unit.checkpoint,
                "resume": True,
            }
            options["on_chunk"] = follow(
                self.progress(label, len(input_ids) * settings.training.readings)
            )
            options |= {"tokenizer": self.tokenizer, "on_study": follow_study(self.progress)}
            return memorize(self.base, input_ids, settings, **options).to_json()

        unit = Unit(path, make)
        return unit


def _join(
    folder: Path, before: dict[str, Any], record: dict[str, Any], overwrite: bool
) -> dict[str, Any]:
    """Return a run's record together with the one before it; check that they agree, or remove the earlier results."""
    own = [
        file
        for file in before.get("files", ())
        if not Path(file).is_absolute() and ".." not in Path(file).parts
    ]
    files = sorted({*own, *record["files"]})
    units = [Unit(folder / file, dict) for file in files]
    if overwrite and not any(map(is_locked, units)):
        for unit in units:
            remove_unit(unit, folder, FILES)
    elif any(unit.path.exists() or has_checkpoint(unit.checkpoint) for unit in units):
        ours, theirs = record["methods"], before.get("methods", {})
        pairs = [(record["common"], before.get("common", {}), "")]
        pairs += [(ours[name], theirs[name], f"{name}: ") for name in ours if name in theirs]
        where, remedy = (
            f"the results in {str(folder.parent)!r}",
            "choose another folder, or give --overwrite",
        )
        for here, there, prefix in pairs:
            if difference := describe_difference(here, there, where, remedy, prefix):
                raise ValueError(difference)
        return {**record, "methods": {**theirs, **ours}, "files": files}
    return record


def describe_text(input_ids: Tensor) -> dict[str, Any]:
    """Return the identity of a text [T] for the record of a run: its number of tokens and their SHA-256."""
    return {"tokens": len(input_ids), "sha256": digest_ids(input_ids)}


def summarize_reading(record: dict[str, Any]) -> dict[str, Any]:
    """Return figures of a `Reading`, as JSON, that taught a memory; `perplexity` has one value a reading."""
    reading = Reading.from_json(record)
    return {
        "parameters": reading.extra_parameters,
        "perplexity": reading.perplexities,
        "scored_tokens": reading.scored_tokens * reading.settings.training.readings,
        "seconds": reading.seconds,
        "skipped_chunks": reading.skipped_chunks,
        **({} if reading.studied is None else {"studied": reading.studied}),
    }
