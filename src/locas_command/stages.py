"""`locas read` and `locas study`: make a memory of a text, or one of each text of a table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

from cyclopts import Parameter

from locas_settings import ReadSettings, StageSettings
from locas_settings.adapter import SHAPE, GivenName
from locas_settings.reading import LEARNED_BY

from . import options
from .console import open_consoles, write_result
from .options import BaseOptions, PlaceOptions, TableOptions

FEW_CHUNKS = 4
"""Of fewer chunks, a reading is too short to be noticed in what the model writes."""


def read(
    text: options.Text | None = None,
    /,
    *,
    unwrap: options.Unwrap = None,
    compiled: options.Compiled = False,
    json_file: options.JsonFile = None,
    place: options.PlaceGroup = options.PLACE,
    table: options.TableGroup = options.TABLE,
    settings: options.ReadGroup = options.READ,
    base: options.BaseGroup = options.BASE,
) -> int | None:
    """Read a text (test-time training) and save what was learned as a memory; or a table of texts.

    Args:
        text: a UTF-8 text file, or - for stdin.
    """
    job = _Job(settings, place, base, unwrap, json_file, compiled)
    if table.manifest or text is None:
        return _teach_table(text, table, job)
    _check_one_text(table)
    _run_stage(text, job, None)
    return None


def study(
    text: options.Text | None = None,
    /,
    *,
    exchanges_file: options.NamedPath | None = None,
    unwrap: options.Unwrap = None,
    compiled: options.Compiled = False,
    json_file: options.JsonFile = None,
    place: options.PlaceGroup = options.PLACE,
    table: options.TableGroup = options.TABLE,
    settings: options.StudyGroup = options.STUDY,
    base: options.BaseGroup = options.BASE,
) -> int | None:
    """Study a text: the model asks itself about it, and a memory learns the answers.

    Args:
        text: a UTF-8 text file, or - for stdin.
        exchanges_file: JSON Lines with question and answer, studied in place of exchanges that the
            model writes; for instance an edited exchanges.jsonl of a memory.
    """
    job = _Job(settings, place, base, unwrap, json_file, compiled)
    if table.manifest or text is None:
        if exchanges_file is not None:
            raise ValueError("--exchanges-file is for one text, got --manifest too: leave one out")
        return _teach_table(text, table, job)
    _check_one_text(table)
    _run_stage(text, job, exchanges_file)
    return None


def memorize(
    *arguments: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
) -> NoReturn:
    """Say which verbs have taken the place of `locas memorize`."""
    verb = "study" if "--study" in arguments else "read"
    remedy = "locas read TEXT reads a text, locas study TEXT studies it (--from goes on with one)"
    raise ValueError(f"locas memorize is now locas {verb}: {remedy}")


@dataclass(frozen=True)
class _Job:
    """What a stage is told by the command line."""

    settings: StageSettings
    place: PlaceOptions
    base: BaseOptions
    unwrap: bool | None
    json_file: Path | None
    compiled: bool = False

    @property
    def is_reading(self) -> bool:
        return isinstance(self.settings, ReadSettings)

    @property
    def saves(self) -> bool:
        """Whether the stage makes a memory."""
        return self.settings.method != "none"


def _check_one_text(table: TableOptions) -> None:
    if table.ray or table.actors > 1:
        raise ValueError("--ray and --actors need --manifest, got one text: leave them out")


def _teach_table(text: str | None, table: TableOptions, job: _Job) -> int:
    if (text is None) == (not table.manifest):
        raise ValueError("give either a TEXT or --manifest, one of the two: see --help")
    if job.compiled:
        raise ValueError("--compile is for one text, got --manifest too: leave one out")
    place = job.place
    if table.actors > 1 and not table.ray:
        raise ValueError(f"--actors is of Ray's, got {table.actors} without --ray: add --ray")
    if place.library is None or place.out or place.name or place.start or not job.saves:
        rule = "--manifest needs --library and a method that learns"
        raise ValueError(f"{rule}, and no --out, --name or --from: leave these out")
    from .table import teach_manifest

    return teach_manifest(table, job.place, job.unwrap, job.json_file, job.settings, job.base)


def _run_stage(text: str, job: _Job, exchanges_file: Path | None) -> None:
    """Run one stage on one text, and print what it made."""
    from locas_peft.exchanges import load_exchanges
    from locas_peft.files import check_output_directory, is_same_folder
    from locas_peft.memories import check_vacant
    from locas_peft.stages import choose_values
    from locas_peft.text import load_text

    from .running import load

    stdout, stderr = open_consoles(job.json_file)
    if job.place.resume and job.place.overwrite:
        raise ValueError("--resume and --overwrite exclude each other: continue, or start afresh")
    if exchanges_file is not None and getattr(job.settings, "exchanges", None) is not None:
        rule = "--exchanges is the number of questions that are written"
        raise ValueError(f"{rule}, got --exchanges-file too: leave one of them out")
    exchanges = None if exchanges_file is None else load_exchanges(exchanges_file)
    content = load_text(text)
    job, library = _choose_place(text, job)
    job = _keep_shape(job)
    # Values that contradict each other are refused before the base is loaded.
    choose_values(job.settings)
    out = job.place.out
    if not job.saves and out is not None:
        raise ValueError("--method none learns nothing, got --out too: leave one of them out")
    if job.saves:
        if out is None:
            what = f"--out must name a folder for what {job.settings.method} learns"
            raise ValueError(f"{what}, got none: add --out DIR")
        check_output_directory("--out", out)
        if not job.place.resume:
            goes_on = job.place.start is not None and is_same_folder(out, job.place.start)
            check_vacant(out, overwrite=job.place.overwrite, goes_on=goes_on)
    loaded = load(job.base)
    if library is not None:
        library.check_base(loaded.name)
    # The text's folder need not be known to those who read the record.
    title = None if text == "-" else Path(text).name
    record = _take_steps(job, loaded, content, title, exchanges, library is not None, stderr)
    _show_record(record, title or "standard input", stdout, stderr)
    write_result(job.json_file, record.to_json())
    if job.saves:
        _show_next(job, loaded, stdout)


def _choose_place(text: str, job: _Job) -> tuple[_Job, Any]:
    """Return the job with the folder of its memory, and the library where there is one."""
    place = job.place
    if place.library is None:
        if place.name is not None:
            raise ValueError(
                f"--name names a memory of a library, got {place.name!r} without one: "
                "add --library DIR"
            )
        if place.out is None and place.start is not None:
            place = replace(place, out=place.start)
        return replace(job, place=place), None
    if place.out is not None or not job.saves:
        other = "--out" if place.out is not None else "--method none"
        rule = f"--library saves the memory itself, got {other} too"
        raise ValueError(f"{rule}: leave one of them out")
    from locas_peft.files import check_output_directory, is_same_folder
    from locas_peft.library import Library

    check_output_directory("--library", place.library)
    library = Library(place.library)
    name = place.name
    start = place.start
    if start is not None:
        is_inside = is_same_folder(start.parent, place.library)
        former = start.name if is_inside else str(start)
        if former in library or not start.is_dir():
            start = library.find(former)
            name = name or former
    out = library.choose_folder(name or Path(text).stem)
    base = replace(job.base, model=job.base.model or library.name_base())
    return replace(job, place=replace(place, out=out, start=start), base=base), library


def _keep_shape(job: _Job) -> _Job:
    """Return the job with the shape and the base of the memory that it goes on with.

    A reading keeps the preset and the rule of the memory's last reading too.
    """
    if job.place.start is None:
        return job
    from locas_peft.stages import check_continuation, load_records

    records = load_records(job.place.start)
    former = records[-1].settings
    fields = _list_kept(job.settings, former, SHAPE)
    readings = [record.settings for record in records if record.kind == "read"]
    if job.is_reading and readings:
        fields |= _list_kept(job.settings, readings[-1], LEARNED_BY)
    method = fields.get("method", job.settings.method)
    if method != former.method:
        fields = {}
    settings = replace(job.settings, **fields)
    check_continuation(settings, records, job.place.start)
    base = replace(job.base, model=job.base.model or former.model)
    return replace(job, settings=settings, base=base)


def _list_kept(settings: Any, former: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the values of former settings that the command line did not give."""
    default = type(settings)()
    kept = {}
    for name in names:
        value = getattr(settings, name)
        # The default method may be given too.
        if value == getattr(default, name) and not isinstance(value, GivenName):
            kept[name] = getattr(former, name)
    return kept


def _take_steps(
    job: _Job,
    loaded: Any,
    content: str,
    title: str | None,
    exchanges: Any,
    in_library: bool,
    stderr: Any,
) -> Any:
    """Run the stage with progress; return its record."""
    from locas_peft.library import join_texts, make_sample
    from locas_peft.memories.checkpoint import CHECKPOINT_FOLDER, has_checkpoint
    from locas_peft.memories.folder import SAMPLE
    from locas_peft.stages import Place, complete, open_reading, open_study

    from .running import follow_run

    place = job.place
    settings = replace(job.settings, model=loaded.name)
    settings = complete(settings, loaded.model)
    input_ids = loaded.encode(content, settings.max_tokens, job.unwrap)
    folder = None
    sample = None
    kept_text = None
    if not place.keep_text:
        # A former one is removed.
        sample = kept_text = ""
    if job.saves and place.out is not None:
        folder = place.out / CHECKPOINT_FOLDER
    if job.saves and place.keep_text:
        content = loaded.cut(content, settings.max_tokens, job.unwrap)
        kept_text = join_texts(content, place.start)
        is_sampled = place.start is not None and (place.start / SAMPLE).is_file()
        if in_library or is_sampled:
            sample = make_sample(content, place.start)
    where = Place(
        out=place.out if job.saves else None,
        checkpoint_dir=folder,
        checkpoint_seconds=place.checkpoint_seconds,
        resume=place.resume,
        overwrite=place.overwrite,
        title=title,
        sample=sample,
        kept_text=kept_text,
    )
    if isinstance(settings, ReadSettings):
        opened = open_reading(
            loaded.model,
            input_ids,
            settings,
            where,
            tokenizer=loaded.tokenizer,
            start=place.start,
            compiled=job.compiled,
        )
    else:
        opened = open_study(
            loaded.model,
            loaded.tokenizer,
            input_ids,
            settings,
            where,
            start=place.start,
            exchanges=exchanges,
            compiled=job.compiled,
        )
    try:
        with opened as run:
            was_finished = run.record is not None
            if was_finished:
                stderr.print(f"{place.out} holds this finished memory: nothing is left to do")
            follow_run(run, settings, len(input_ids), stderr)
            record = run.finish()
    except KeyboardInterrupt:
        if folder is not None and has_checkpoint(folder):
            remedy = "the same command with --resume continues from there"
            stderr.print(f"{place.out} holds a checkpoint: {remedy}")
        raise
    if job.is_reading and job.saves and not was_finished:
        _warn_of_few_chunks(len(input_ids), settings, stderr)
    return record


def _warn_of_few_chunks(tokens: int, settings: Any, stderr: Any) -> None:
    chunks = math.ceil(tokens / settings.stride) * settings.readings
    if chunks >= FEW_CHUNKS:
        return
    count = "1 chunk" if chunks == 1 else f"{chunks} chunks"
    remedy = "For questions about a short text, there is locas study"
    more = "to learn its words, --readings and a shorter --window and --stride"
    stderr.print(f"learned from {count} alone: the memory is nearly empty. {remedy}; {more}")


def _show_record(record: Any, title: str, stdout: Any, stderr: Any) -> None:
    from .running import show_readings, show_study

    if record.kind == "read":
        show_readings([record], stdout, stderr, title)
    else:
        show_study(record, stdout)


def _show_next(job: _Job, loaded: Any, stdout: Any) -> None:
    """Print where the memory is, and a command that uses it."""
    from locas_peft.asking import can_chat

    out = job.place.out
    in_library = job.place.library is not None
    answers = in_library or can_chat(loaded.tokenizer)
    command = "locas ask QUESTION" if answers else "locas generate PROMPT"
    where = f"--library {job.place.library}" if in_library else f"--memory {out}"
    stdout.print(f"The memory is in {out}. Next: {command} {where}, or locas inspect {out}")
