"""Run a stage: attach its adapter, take its steps with checkpoints, save what was learned.

settings -> adapter -> stage -> steps -> memory's folder
"""

import copy
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from locas_settings import AdapterSettings, ReadSettings, StudySettings
from locas_settings.adapter import SHAPE

from ..checks import describe_difference
from ..exchanges import EXCHANGES, Exchange, correct, digest_exchanges, load_exchanges
from ..files import is_out_of_memory, is_same_folder
from ..memories import checkpoint
from ..memories.folder import SAMPLE, TEXT, check_vacant
from ..memories.loading import load_memory
from ..model import fingerprint
from ..selfstudy import Former
from ..text import digest_ids, digest_tokenizer, load_text
from ..ttt import TestTimeTrainer
from ..ttt.model_state import active_configs
from ..tuner.modules import remember_modules, unmerged_at_end
from .complete import complete, for_base, training_settings
from .methods import METHODS
from .peak import PeakMemory
from .record import (
    ReadRecord,
    Record,
    StudyRecord,
    describe_origin,
    load_records,
    parse_record,
)
from .saving import find_finished, save_stages
from .stage import Reading, Stage, Study

__all__ = ["Place", "StageRun", "attached", "open_reading", "open_study", "read", "score", "study"]

_logger = logging.getLogger(__name__)
# The adapter's name beside the one that goes on: the memory as it was, which stays frozen.
REFERENCE = "reference"
# "record" describes the base, which is compared by its fingerprint, and what calibration chose.
_NO_ARITHMETIC = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_version",
    "record",
    "revision",
    "task_type",
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a stage puts what it learns.

    Args:
        out: the memory's folder, written whole or not at all; None to save nothing.
        checkpoint_dir: a folder for the unfinished state, removed after the memory was saved;
            without `out` the caller removes it. It is locked for the whole stage. Where it cannot
            be written, a warning is logged and the stage goes on.
        checkpoint_seconds: time between two checkpoints.
        resume: take the finished memory of `out`, if it is this one; else go on from the
            checkpoint; from the start where there is none.
        overwrite: replace the memory in `out`, and a checkpoint; with `resume`, only those of
            other stages.
        title: of the text, for the record and the model card.
        sample: of the text, saved beside the memory: a `Library` finds it by this.
        kept_text: saved beside the memory: its sentences are the sources of answers. Where the
            memory in `out` goes on, its former sample and text stay if none is given. An empty
            one removes them, also from a finished memory that is taken.
    """

    out: str | Path | None = None
    checkpoint_dir: str | Path | None = None
    checkpoint_seconds: float = 30.0
    resume: bool = False
    overwrite: bool = False
    title: str | None = None
    sample: str | None = None
    kept_text: str | None = None


class StageRun:
    """A stage that is under way. Iterate over it, then call `finish`.

    The iterator yields the record of each step, those of a checkpoint first. Leaving the loop
    early stops the stage: `finish` then saves what was learned so far. An exception in the loop's
    body saves a checkpoint.
    """

    def __init__(
        self,
        stage: Stage,
        place: Place,
        folder: Path | None,
        shared: dict[str, Any],
        former: Sequence[Record] = (),
    ):
        self.stage = stage
        # The records of the memory that the stage goes on with. A checkpoint has them too: the
        # folder may hold the stage's own record already, where a kill left the checkpoint.
        self.former = list(former)
        self._place = place
        self._folder = folder
        self._shared = shared
        self._saved_at = time.monotonic()
        self._failed = False
        # A state that is saved between two steps is whole; within a step it is not.
        self.is_between_steps = True
        self.is_complete = False
        self.record: Record | None = None
        self._save: Callable[[StageRun], Record] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.record is not None:
            return
        yield from self.stage.earlier_steps()
        self.is_between_steps = False
        for step in self.stage.steps():
            self.is_between_steps = True
            yield step
            if self._is_due(step):
                self.save_checkpoint()
            self.is_between_steps = False
        self.is_between_steps = True
        self.is_complete = True

    def finish(self) -> Record:
        """Save what was learned; return the record of the stage."""
        if self.record is None:
            # A run without a record was given it by `_open`.
            assert self._save is not None
            self.record = self._save(self)
        return self.record

    def _is_due(self, step: Any) -> bool:
        # The exchanges of a block of passages take long to write.
        written = getattr(step, "phase", None) == "write"
        return written or time.monotonic() - self._saved_at >= self._place.checkpoint_seconds

    def save_checkpoint(self) -> None:
        """Save the state of the stage, where there is a folder for it."""
        if self._folder is None:
            return
        former = [record.to_json() for record in self.former]
        state = {
            "run": self._shared,
            "stage": self.stage.kind,
            "former": former,
            **self.stage.state_dict(),
        }
        try:
            checkpoint.save(self._folder, state)
        except OSError as failure:
            if not self._failed:
                reason = failure.strerror or failure
                _logger.warning("no checkpoint can be saved (%s); the stage goes on", reason)
            self._failed = True
        self._saved_at = time.monotonic()

    def drop_checkpoint(self) -> None:
        """Remove the checkpoint, if any, and save no other."""
        if self._folder is not None:
            checkpoint.remove(self._folder)
        self._folder = None

    def resume(self, state: dict[str, Any]) -> None:
        """Load a checkpoint's state.

        A checkpoint that is damaged, or of another stage, model, adapter, setting or text, is a
        `ValueError`; the stage, its model and torch's random state are then as before.
        """
        # The state was loaded from it.
        assert self._folder is not None
        try:
            difference = self._find_difference(state)
            if difference is None:
                former = [parse_record(record) for record in state["former"]]
                self.stage.load_state_dict(state)
                self.former = former
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # Entries of another kind or shape than we write.
            raise checkpoint.damaged(self._folder, error) from None
        if difference is not None:
            raise ValueError(difference)

    def _find_difference(self, state: dict[str, Any]) -> str | None:
        """Return the message for the first difference between this run and a checkpoint's."""
        where = f"the checkpoint in {str(self._folder)!r}"
        kind = self.stage.kind
        if state["stage"] != kind:
            got = f"got one of the stage {state['stage']!r}"
            remedy = "finish that one, or choose another folder"
            return f"{where} must be of the stage {kind!r}, {got}: {remedy}"
        remedy = "give the former value, or choose another folder"
        ours = self._shared
        theirs = state["run"]
        for part in ("settings", "trainer"):
            difference = describe_difference(ours[part], theirs[part], where, remedy)
            if difference is not None:
                return difference
        recorded = theirs["adapters"]
        for name, config in ours["adapters"].items():
            other = recorded.get(name, config)
            prefix = f"adapter {name!r}: "
            difference = describe_difference(config, other, where, remedy, prefix)
            if difference is not None:
                return difference
        if ours["adapters"].keys() != recorded.keys():
            names = f"{sorted(recorded)} as in {where}, got {sorted(ours['adapters'])}"
            return f"active adapters must be {names}: activate those, or choose another folder"
        if ours["base"] != theirs["base"]:
            problem = f"model must be the one of {where}, got other base weights"
            return f"{problem}: load that model in the same dtype, or choose another folder"
        begun = state["text"]
        if begun not in (None, self.stage.text_sha256):
            rule = f"the text must be the one begun in {where} (sha256 {begun[:12]})"
            got = f"got another one ({self.stage.text_sha256[:12]})"
            return f"{rule}, {got}: give that text, or choose another folder"
        return self.stage.find_difference(state)


def read(
    base: PreTrainedModel,
    input_ids: torch.LongTensor,
    settings: ReadSettings,
    place: Place | None = None,
    *,
    tokenizer: Any = None,
    start: str | Path | None = None,
    compiled: bool = False,
    on_step: Callable[[Any], None] | None = None,
) -> ReadRecord:
    """Read a text with one method, from a fresh adapter to the figures and the saved memory.

    `base` is mutated while this runs and restored at the end (see `attached`).

    Args:
        base: a causal LM without adapters.
        input_ids: LongTensor [T], T >= 2; the first `settings.max_tokens` are read.
        settings: completed here, where they are not.
        place: where the memory goes; None to save nothing. The method "none" saves nothing.
        tokenizer: of the base, for the record.
        start: a saved memory to go on with, in place of a fresh adapter: its slots and a fresh
            optimizer. `place.out` may be its folder.
        compiled: whether the model's passes go through `torch.compile` (see `TestTimeTrainer`).
        on_step: called with the record of each chunk; a checkpoint is saved where it raises.

    A text that is too short, a method or a memory that does not fit the base, an `out` that is not
    vacant, and a checkpoint of another stage or in use (`InUse`) are `ValueError`s; a folder that
    cannot be written is an `OSError`.
    """
    opened = open_reading(
        base, input_ids, settings, place, tokenizer=tokenizer, start=start, compiled=compiled
    )
    with opened as run:
        return _run_to_the_end(run, on_step)


def study(
    base: PreTrainedModel,
    tokenizer: Any,
    input_ids: torch.LongTensor,
    settings: StudySettings,
    place: Place | None = None,
    *,
    start: str | Path | None = None,
    exchanges: Sequence[Exchange] | None = None,
    compiled: bool = False,
    on_step: Callable[[Any], None] | None = None,
) -> StudyRecord:
    """Study a text: the model asks itself about it, and the adapter learns the answers.

    Args:
        base, input_ids, place, compiled, on_step: as for `read`.
        tokenizer: of the base.
        settings: completed here, where they are not.
        start: a saved memory to go on with. It is loaded twice: the study is pulled to the memory
            as it was. The exchanges that it has learned before are learned again as far as they are
            lost.
        exchanges: studied in place of those that the model would write.

    Errors are those of `read`; a study that keeps no exchange is a `ValueError`, and nothing is
    saved.
    """
    opened = open_study(
        base,
        tokenizer,
        input_ids,
        settings,
        place,
        start=start,
        exchanges=exchanges,
        compiled=compiled,
    )
    with opened as run:
        return _run_to_the_end(run, on_step)


def _run_to_the_end(run: StageRun, on_step: Callable[[Any], None] | None) -> Any:
    for step in run:
        if on_step is not None:
            on_step(step)
    return run.finish()


@contextmanager
def open_reading(
    base: PreTrainedModel,
    input_ids: torch.LongTensor,
    settings: ReadSettings,
    place: Place | None = None,
    *,
    tokenizer: Any = None,
    start: str | Path | None = None,
    compiled: bool = False,
) -> Iterator[StageRun]:
    """Open a reading for the duration of the context; arguments and errors are those of `read`."""
    settings = complete(settings, base)
    place = place or Place()
    if settings.method == "none":
        place = Place(title=place.title)
    input_ids = _check_text(input_ids, settings)
    expected = _describe_expected("read", settings, input_ids)

    def make_stage(model: nn.Module, earlier: list[Exchange]) -> Reading:
        return Reading(model, input_ids, settings, compiled)

    setup = _Setup(base, settings, place, start, tokenizer)
    with _open(setup, expected, make_stage) as run:
        yield run


@contextmanager
def open_study(
    base: PreTrainedModel,
    tokenizer: Any,
    input_ids: torch.LongTensor,
    settings: StudySettings,
    place: Place | None = None,
    *,
    start: str | Path | None = None,
    exchanges: Sequence[Exchange] | None = None,
    compiled: bool = False,
) -> Iterator[StageRun]:
    """Open a study for the duration of the context; arguments and errors are those of `study`."""
    settings = complete(settings, base)
    if settings.writer is not None and exchanges is not None:
        rule = "writer writes questions about the text, got exchanges too"
        raise ValueError(f"{rule}: leave one of them out")
    input_ids = _check_text(input_ids, settings)
    expected = _describe_expected("study", settings, input_ids)
    expected["given"] = exchanges is not None
    if exchanges is not None:
        expected["exchanges_sha256"] = digest_exchanges(exchanges)

    def make_stage(model: nn.Module, earlier: list[Exchange]) -> Study:
        former = None
        if start is not None:
            former = Former(REFERENCE, tuple(earlier), _load_kept_text(start))
        return Study(
            model,
            tokenizer,
            input_ids,
            settings,
            given=exchanges,
            former=former,
            compiled=compiled,
        )

    setup = _Setup(base, settings, place or Place(), start, tokenizer)
    with _open(setup, expected, make_stage) as run:
        yield run


@dataclass(frozen=True)
class _Setup:
    """What both stages need to be opened."""

    base: PreTrainedModel
    settings: AdapterSettings
    place: Place
    start: str | Path | None
    tokenizer: Any

    @property
    def goes_on_in_place(self) -> bool:
        """Whether the memory that the stage goes on with is replaced."""
        out = self.place.out
        return out is not None and self.start is not None and is_same_folder(out, self.start)


@contextmanager
def _open(
    setup: _Setup,
    expected: dict[str, Any],
    make_stage: Callable[[nn.Module, list[Exchange]], Stage],
) -> Iterator[StageRun]:
    place = setup.place
    with ExitStack() as stack:
        folder = None
        if place.checkpoint_dir is not None:
            folder = stack.enter_context(checkpoint.locked(place.checkpoint_dir))
        origin = describe_origin(None if setup.goes_on_in_place else setup.start)
        finished = _find_saved(setup, folder, expected)
        if finished is None:
            finished = _check_out(setup, {**expected, "origin": origin})
        if finished is not None:
            _remove_unwanted(place)
            run = StageRun(Stage(), place, folder, {})
            run.record = finished
            yield run
            return
        # What the memory has learned before stays with it, whatever stage goes on.
        former = _load_former(setup)
        earlier = _load_earlier(setup.start)
        base_sha256 = fingerprint(setup.base)
        digests = {
            "base_sha256": base_sha256,
            "tokenizer_sha256": digest_tokenizer(setup.tokenizer),
        }
        model = stack.enter_context(attached(setup.base, setup.settings, setup.start))
        peak = PeakMemory(setup.base.device)
        stage = make_stage(model, earlier)
        shared = _describe_run(model, stage, setup.settings, origin, base_sha256)
        run = StageRun(stage, place, folder, shared, former)

        def save(run: StageRun) -> Record:
            figures = {"origin": origin, "peak_bytes": peak.read(), **digests}
            return _save(run, setup, model, earlier, figures)

        run._save = save
        _resume(run, setup)
        try:
            yield run
        except BaseException:
            # After the last step it is the memory that could not be saved.
            if run.is_between_steps and not run.is_complete:
                run.save_checkpoint()
            raise


def _find_saved(setup: _Setup, folder: Path | None, expected: dict[str, Any]) -> Record | None:
    """Return the record of a stage in place that was killed after its memory was saved, or None.

    Its checkpoint, which the kill has left, is removed. With it the stage would go on from the
    memory that it has made. A stage of another text goes on with that memory.
    """
    if folder is None or not (setup.place.resume and setup.goes_on_in_place):
        return None
    try:
        state = checkpoint.load(folder)
        records = load_records(str(setup.place.out))
    except ValueError:
        # The stage's own checks say what is wrong.
        return None
    if state is None or len(records) <= len(state["former"]) or records[-1].kind != state["stage"]:
        return None
    checkpoint.remove(folder)
    saved = records[-1]
    return saved if saved.text_sha256 == expected["text_sha256"] else None


def _remove_unwanted(place: Place) -> None:
    """Remove what a finished memory has of its text and shall not have."""
    assert place.out is not None  # the memory was found there
    for name, text in ((SAMPLE, place.sample), (TEXT, place.kept_text)):
        if text == "":
            Path(place.out, name).unlink(missing_ok=True)


def _check_out(setup: _Setup, expected: dict[str, Any]) -> Record | None:
    """Return the finished memory to be taken, if any; refuse an `out` that is not vacant."""
    place = setup.place
    if place.out is None:
        return None
    replaces = place.overwrite or setup.goes_on_in_place
    # With one record, the memory in `out` is the one to go on with, and no result of this stage.
    is_start = place.resume and setup.goes_on_in_place and len(load_records(place.out)) < 2
    if place.resume and not is_start:
        try:
            finished = find_finished(place.out, expected)
        except ValueError:
            if not replaces:
                raise
            finished = None
        if finished is not None:
            return finished
    check_vacant(place.out, resume=place.resume, overwrite=place.overwrite, goes_on=replaces)
    return None


def _resume(run: StageRun, setup: _Setup) -> None:
    """Load the checkpoint of a stage, where it is to be resumed and there is one."""
    if not setup.place.resume or run._folder is None:
        return
    try:
        state = checkpoint.load(run._folder)
        if state is not None:
            run.resume(state)
    except ValueError:
        if not setup.place.overwrite:
            raise


def _save(
    run: StageRun,
    setup: _Setup,
    model: nn.Module,
    earlier: Sequence[Exchange],
    figures: dict[str, Any],
) -> Record:
    """Save the memory of a stage; return the stage's record."""
    place = setup.place
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    common = {
        "settings": setup.settings,
        "text_sha256": run.stage.text_sha256,
        "extra_parameters": sum(weight.numel() for weight in parameters),
        "memory_dir": None if place.out is None else str(place.out),
        "title": place.title,
        "stopped": not run.is_complete,
        **figures,
        **run.stage.figures(),
    }
    exchanges = list(earlier)
    record: Record
    if isinstance(run.stage, Study):
        record = StudyRecord(**common)
        # Stopped before its first step, it has learned none.
        if record.steps:
            exchanges = correct(earlier, run.stage.study.exchanges)
        if not record.kept and run.is_complete:
            run.drop_checkpoint()
            raise ValueError(_explain_empty_study(record))
        # Those of a memory may quote the text, and its record is pushed.
        record = replace(record, samples=[])
    else:
        record = ReadRecord(**common)
    if place.out is not None:
        records = [*run.former, record]
        save_stages(
            model,
            place.out,
            records,
            exchanges,
            place.sample,
            place.kept_text,
            keeps_former=setup.goes_on_in_place,
        )
        run.drop_checkpoint()
    return record


def _explain_empty_study(record: StudyRecord) -> str:
    samples = " | ".join(" ".join(sample.split()) for sample in record.samples) or "none"
    problem = f"nothing was studied: the model wrote no usable exchange (samples: {samples})"
    return f"{problem}: choose a larger model, one with a chat template, or give exchanges"


@contextmanager
def attached(
    base: PreTrainedModel, settings: AdapterSettings, start: str | Path | None = None
) -> Iterator[nn.Module]:
    """Attach a method's fresh adapter, or a saved memory, to a base within the context.

    Torch's seed is set first. `base`, a causal LM without adapters, is mutated. Afterwards its
    modules, weights, `requires_grad` flags and mode are as before. A method that does not fit is a
    `ValueError`.
    """
    restore_modules = remember_modules(base)
    torch.manual_seed(settings.seed)
    try:
        model = _attach(base, settings, start)
        with unmerged_at_end(model):
            yield model
    finally:
        restore_modules()
        base.zero_grad(set_to_none=True)


def _attach(
    base: PreTrainedModel, settings: AdapterSettings, start: str | Path | None
) -> nn.Module:
    if start is not None:
        model = load_memory(base, start, trainable=True)
        if isinstance(settings, StudySettings):
            # With the checked config: PEFT would load that of the file again.
            config = copy.deepcopy(model.peft_config["default"])
            config.inference_mode = True
            model.add_adapter(REFERENCE, config)
            model.load_adapter(str(start), REFERENCE)
        return model
    config = METHODS[settings.method].make_config(settings, base)
    if config is None:
        return base.requires_grad_(False)
    return get_peft_model(base, config)


def score(model: nn.Module, input_ids: torch.LongTensor, settings: ReadSettings) -> float:
    """Return the perplexity of a text, LongTensor [T], under a frozen model.

    The windows are those of the settings, which are complete. A parameter that requires gradients
    is a `ValueError`.
    """
    learning = [name for name, weight in model.named_parameters() if weight.requires_grad]
    if learning:
        got = f"got {len(learning)} trainable parameters"
        raise ValueError(f"model must be frozen, {got}: freeze them first")
    trainer = TestTimeTrainer(model, training_settings(for_base(settings)))
    for _ in trainer.read(input_ids):
        pass
    return trainer.perplexity


def _check_text(input_ids: Tensor, settings: AdapterSettings) -> Tensor:
    if input_ids.dim() != 1 or input_ids.numel() < 2:
        rule = "input_ids must be of shape [T] with T >= 2"
        raise ValueError(f"{rule}, got {list(input_ids.shape)}: give more text")
    return input_ids[: settings.max_tokens]


def _list_shared(settings: AdapterSettings) -> dict[str, Any]:
    """Return the settings as JSON values."""
    return json.loads(json.dumps(vars(settings)))


def _describe_expected(kind: str, settings: AdapterSettings, input_ids: Tensor) -> dict[str, Any]:
    """Return the fields that the record of a stage would have, as JSON values."""
    text = {"stage": kind, "text_sha256": digest_ids(input_ids)}
    return {**_list_shared(settings), **text}


def _load_former(setup: _Setup) -> list[Record]:
    """Return the records of the memory that a stage goes on with.

    A `ValueError` where it is of another method or width.
    """
    if setup.start is None:
        return []
    records = load_records(setup.start)
    check_continuation(setup.settings, records, setup.start)
    return records


def check_continuation(
    settings: AdapterSettings, records: Sequence[Record], start: str | Path
) -> None:
    """Raise a `ValueError` unless a stage can go on with a memory.

    The settings must have its shape. A linear map that was written in closed form can only be
    written further so: an optimizer would move all of its slots at once.

    Args:
        settings: of the stage.
        records: of the stages that made the memory, the last one last.
        start: the memory's folder.
    """
    wanted = {name: getattr(settings, name) for name in SHAPE}
    had = {name: getattr(records[-1].settings, name) for name in SHAPE}
    where = f"the memory {str(start)!r} to go on with"
    difference = describe_difference(wanted, had, where, "leave it out")
    if difference is not None:
        raise ValueError(difference)
    if _writes_map(settings) or not any(_writes_map(record.settings) for record in records):
        return
    rule = f"update must be 'ridge', which wrote {where}"
    if isinstance(settings, ReadSettings):
        got = f"got {settings.update!r}: give it, or start a fresh memory"
    else:
        got = "got a study: read further with it, or study into a fresh memory"
    raise ValueError(f"{rule}, {got}")


def _writes_map(settings: AdapterSettings) -> bool:
    """Return whether a stage writes a linear map into a memory's slots (see `RidgeWriter`)."""
    is_ridge = isinstance(settings, ReadSettings) and settings.update == "ridge"
    return is_ridge and settings.init == "write"


def _load_earlier(start: str | Path | None) -> list[Exchange]:
    """Return the exchanges that a memory has learned."""
    if start is None:
        return []
    with suppress(FileNotFoundError):
        return load_exchanges(os.path.join(start, EXCHANGES))
    return []


def _load_kept_text(start: str | Path) -> str:
    """Return the text that a memory keeps; "" for none."""
    path = Path(start) / TEXT
    return load_text(path) if path.is_file() else ""


def _describe_run(
    model: nn.Module,
    stage: Stage,
    settings: AdapterSettings,
    origin: str | None,
    base_sha256: str,
) -> dict[str, Any]:
    """Return what a checkpoint must share with the run that goes on from it, as plain values."""
    adapters = {}
    for name, config in active_configs(model).items():
        # In their order: the first field that differs is named, and others follow from the type.
        fields = config.to_dict()
        compared = {field: fields[field] for field in fields if field not in _NO_ARITHMETIC}
        adapters[name] = json.loads(json.dumps(compared, default=_to_plain))
    return {
        "settings": {**_list_shared(settings), "origin": origin},
        "trainer": stage.describe(),
        "adapters": adapters,
        "base": base_sha256,
    }


def _to_plain(value: Any) -> Any:
    if isinstance(value, set):
        return sorted(value)
    return str(value)
