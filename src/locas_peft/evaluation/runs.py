"""Runs of the protocols: where a run's results are, and which run they are of."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from locas_settings import StageSettings

from ..asking import current_day, dated
from ..checks import describe_difference
from ..files import load_json, write_json
from ..memories.checkpoint import held
from ..memories.folder import FILES
from ..processes import in_first_process
from ..progress import Progress, follow_steps, silent
from ..stages import (
    Place,
    ReadRecord,
    ReadSettings,
    Record,
    StudyRecord,
    complete,
    parse_record,
    read,
    study,
)
from ..text import digest_ids
from .units import Unit, add_needed, remove_unit, run_units

__all__ = ["Run", "describe_text", "summarize_stage"]

LOCK = "run.lock"


@dataclass
class Run:
    """What a protocol runs on and where its results go.

    The same arguments continue an interrupted run.

    Args:
        base: a causal LM without adapters; mutated while a unit is made, and restored.
        tokenizer: of the base.
        methods: each method's settings, by its name in tables; completed for the base.
        out: the folder; made if it does not exist. It may hold runs of several protocols.
        common: more fields for the record of the run, as JSON values.
        overwrite: remove the results of an earlier run, and no other file.
        progress: opens lines of progress.
    """

    base: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    methods: dict[str, StageSettings]
    out: Path
    common: dict[str, Any] = field(default_factory=dict)
    overwrite: bool = False
    progress: Progress = silent

    def __post_init__(self) -> None:
        completed: dict[str, StageSettings] = {}
        for name, settings in self.methods.items():
            completed[name] = complete(settings, self.base)
        self.methods = completed

    def make(self, name: str, units: Sequence[Unit], **shared: Any) -> dict[str, Any]:
        """Make a protocol's results, and record in `out/NAME/run.json` which run they are of.

        Args:
            name: of the protocol.
            units: what is made, with paths in `out / name`.
            shared: fields that are the same for all of the protocol's runs in one folder, as JSON
                values.

        Returns:
            The fields that the protocol's figures begin with.

        Raises:
            ValueError: the folder has results of a different run, or another command is at work in
                it (`InUse`). A later run may add methods. The fields in `common` and `shared` must
                stay the same. A record without results, of a run that failed at once, is replaced.
        """
        folder = self.out / name
        folder.mkdir(parents=True, exist_ok=True)
        common = {**self.common, **shared}
        methods = {method: vars(settings) for method, settings in self.methods.items()}
        files = [unit.path.relative_to(folder).as_posix() for unit in add_needed(units)]
        record = {
            "study": name,
            "date": current_day(),
            "common": common,
            "methods": methods,
            "files": files,
        }
        with ExitStack() as stack:

            def begin() -> None:
                stack.enter_context(held(folder / LOCK))
                self._write_record(folder, json.loads(json.dumps(record)))

            in_first_process(begin)
            # A chat template that prints the date prints that of the run's first day.
            with dated(load_json(folder / "run.json")["date"]):
                run_units(units, self.progress)
        return {"study": name, **common, "methods": methods}

    def save(self, name: str, figures: dict[str, Any]) -> None:
        """Write a protocol's figures into `out/NAME.json`, in the first process."""
        in_first_process(lambda: write_json(self.out / f"{name}.json", figures))

    def learning(
        self,
        input_ids: Tensor,
        settings: StageSettings,
        path: Path,
        label: str = "",
        *,
        keep_memory: bool = True,
    ) -> Unit:
        """Return the unit of one reading or study, whose result is its record as JSON.

        A stage that was interrupted goes on inside its text.

        Args:
            input_ids: LongTensor [T].
            settings: complete ones; their class says whether the text is read or studied.
            path: the file of the result.
            label: of the line of progress.
            keep_memory: whether the memory is saved in the unit's `memory`.
        """
        tokens = len(input_ids) * getattr(settings, "readings", 1)

        def make() -> dict[str, Any]:
            place = Place(
                out=unit.memory if keep_memory else None,
                checkpoint_dir=unit.checkpoint,
                resume=True,
            )
            show = follow_steps(self.progress, label, tokens)
            record: Record
            if isinstance(settings, ReadSettings):
                record = read(
                    self.base, input_ids, settings, place, tokenizer=self.tokenizer, on_step=show
                )
            else:
                record = study(self.base, self.tokenizer, input_ids, settings, place, on_step=show)
            return record.to_json()

        unit = Unit(path, make, size=tokens)
        return unit

    def _write_record(self, folder: Path, record: dict[str, Any]) -> None:
        """Write a run's record; check it against the earlier one, or remove the earlier results."""
        path = folder / "run.json"
        earlier = load_json(path) if path.exists() else {}
        files = {*record["files"]}
        for file in map(Path, earlier.get("files", ())):
            # The record may come from strangers: no file outside the folder is touched.
            if not file.is_absolute() and ".." not in file.parts:
                files.add(file.as_posix())
        units = [Unit(folder / file, dict) for file in sorted(files)]
        if self.overwrite:
            for unit in units:
                remove_unit(unit, folder, FILES)
        elif any(unit.has_begun for unit in units):
            _check_same_run(record, earlier, self.out)
            methods = {**earlier.get("methods", {}), **record["methods"]}
            day = earlier.get("date", record["date"])
            record = {**record, "date": day, "methods": methods, "files": sorted(files)}
        write_json(path, record)


def _check_same_run(record: dict[str, Any], earlier: dict[str, Any], out: Path) -> None:
    """Raise a `ValueError` where a run's record differs from that of the folder's results."""
    where = f"the results in {str(out)!r}"
    remedy = "choose another folder, or give --overwrite"
    compared = [(record["common"], earlier.get("common", {}), "")]
    earlier_methods = earlier.get("methods", {})
    for name, settings in record["methods"].items():
        if name in earlier_methods:
            compared.append((settings, earlier_methods[name], f"{name}: "))
    for ours, theirs, prefix in compared:
        difference = describe_difference(ours, theirs, where, remedy, prefix)
        if difference is not None:
            raise ValueError(difference)


def describe_text(input_ids: Tensor) -> dict[str, Any]:
    """Return what names a text [T] in a record: its number of tokens and their SHA-256."""
    return {"tokens": len(input_ids), "sha256": digest_ids(input_ids)}


def summarize_stage(record: dict[str, Any]) -> dict[str, Any]:
    """Return figures of a stage's record, as JSON; `perplexity` has a value for each pass."""
    stage = parse_record(record)
    summary = {"parameters": stage.extra_parameters, "seconds": stage.seconds}
    if isinstance(stage, StudyRecord):
        return {**summary, "kept": stage.kept, "asked": stage.asked}
    assert isinstance(stage, ReadRecord)
    return {
        **summary,
        "perplexity": stage.perplexities,
        "scored_tokens": stage.count_scored_tokens(),
        "skipped_chunks": stage.skipped_chunks,
    }
