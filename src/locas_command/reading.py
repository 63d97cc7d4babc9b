"""`locas memorize`: read a text, or a table of texts."""

import math
from dataclasses import replace
from pathlib import Path

from . import options
from .console import open_consoles, write_result

FEW_CHUNKS = 4  # below, a reading is too short to be noticed in what the model writes


def memorize(
    text: options.Text | None = None,
    /,
    *,
    manifest: str | None = None,
    ray: bool | str = False,
    out: options.NamedPath | None = None,
    library: options.NamedPath | None = None,
    name: str | None = None,
    start: options.Start | None = None,
    resume: bool = False,
    overwrite: options.Overwrite = False,
    checkpoint_seconds: options.AtLeastZero = 30.0,
    exchanges_file: options.NamedPath | None = None,
    unwrap: options.Unwrap = None,
    json_file: options.JsonFile = None,
    settings: options.OneMethod = options.READING,
    base: options.BaseGroup = options.BASE,
) -> int | None:
    """Read a text and save what was learned as a memory; or a table of texts, a memory for each.

    Args:
        text: a UTF-8 text file, or - for stdin.
        manifest: a table in place of the text, for --library: JSON Lines with name, text or path, and settings of the
            line's own; or a .csv or .parquet file, or a dataset's name. The same command goes on with what is left.
        ray: teach the table on a Ray cluster: its address, auto, or nothing for one on this machine.
        out: the memory's folder; this or --library is needed unless the method is none.
        library: a folder of memories that gets one more; its base is the model where none is given.
        name: of the memory in the library; the text's file name where not given.
        start: a memory that goes on with this text, by its folder, or its name in the library. It is replaced where
            neither --out nor --name is given.
        resume: continue from the checkpoint in --out, if there is one.
        checkpoint_seconds: time between two checkpoints.
        exchanges_file: JSON Lines with question and answer, studied in place of exchanges that the model writes; for
            instance an edited exchanges.jsonl of a memory.
    """
    from locas_peft.asking import can_chat
    from locas_peft.files import check_output_directory
    from locas_peft.library import Library, make_sample
    from locas_peft.memories import check_vacant
    from locas_peft.memories.checkpoint import CHECKPOINT_FOLDER, has_checkpoint
    from locas_peft.memories.folder import SAMPLE
    from locas_peft.reading.methods import SHAPE
    from locas_peft.reading.record import describe_origin, find_finished, load_reading
    from locas_peft.selfstudy import load_exchanges
    from locas_peft.text import load_text

    from .running import load, make_settings, read, show_readings, show_study

    if (text is None) == (not manifest):
        raise ValueError(
            "give either a TEXT or --manifest, one of the two: see locas memorize --help"
        )
    if ray and not manifest:
        raise ValueError("--ray needs --manifest, got one text: leave it out")
    if manifest:
        if library is None or out or name or start or exchanges_file or settings.method == "none":
            rule = "--manifest needs --library and a method that learns"
            raise ValueError(
                f"{rule}, and no --out, --name, --from or --exchanges-file: leave these out"
            )
        from .table import teach_manifest

        given = {"overwrite": overwrite, "checkpoint_seconds": checkpoint_seconds}
        return teach_manifest(manifest, library, ray, unwrap, json_file, settings, base, **given)
    stdout, stderr = open_consoles(json_file)
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other: continue, or start afresh")
    if exchanges_file is not None and not settings.study:
        raise ValueError(
            f"--exchanges-file needs --study, got {str(exchanges_file)!r} without it: add --study"
        )
    exchanges = None if exchanges_file is None else load_exchanges(exchanges_file)
    saves = settings.method != "none"
    if library is None and name is not None:
        raise ValueError(
            f"--name names a memory of a library, got {name!r} without one: add --library DIR"
        )
    content = load_text(text)
    if library is not None:
        if out is not None or not saves:
            other = "--out" if out is not None else "--method none"
            raise ValueError(
                f"--library saves the memory itself, got {other} too: leave one of them out"
            )
        check_output_directory("--library", library)
        shelf = Library(library)
        if start is not None:
            found = start.name if start.parent == library else str(start)
            if found in shelf.list() or not start.is_dir():
                start, name = shelf.find(found), name or found
        out = shelf.choose_folder(name or Path(text).stem)
        base = replace(base, model=base.model or shelf.name_base())
    if start is not None:
        out, former = out or start, load_reading(start).settings
        method = (
            former.method.name if settings.method == options.READING.method else settings.method
        )
        kept = vars(former.method).items() if method == former.method.name else ()
        kept = {
            field: value
            for field, value in kept
            if field in SHAPE and getattr(settings, field) is None
        }
        settings = replace(settings, method=method, **kept)
        base = replace(base, model=base.model or former.model)
    folder = out and out / CHECKPOINT_FOLDER
    if saves:
        if out is None:
            raise ValueError(
                f"--out must name a folder for what {settings.method} learns, got none: add --out DIR"
            )
        check_output_directory("--out", out)
        if not resume:
            check_vacant(out, overwrite=overwrite, goes_on=out == start)
    title = (
        None if text == "-" else Path(text).name
    )  # its folder need not be known to who reads the record
    sampled = library is not None or (start is not None and (start / SAMPLE).is_file())
    options.check_settings(settings)
    loaded = load(base)
    if library is not None:
        shelf.check_base(loaded.name)
    input_ids = loaded.encode(content, settings.max_tokens, unwrap)
    complete = make_settings(settings, loaded).complete(loaded.model)
    result = None
    if resume and saves and out != start:
        result = find_finished(out, complete, input_ids, exchanges, describe_origin(start))
    if result is not None:
        stderr.print(f"{out} holds the finished memory of this very reading: nothing is left to do")
    else:
        try:
            result = read(
                loaded, input_ids, complete, stderr, out=out,
                checkpoint_dir=folder, checkpoint_seconds=checkpoint_seconds, resume=resume, overwrite=overwrite,
                exchanges=exchanges, title=title, sample=make_sample(content, start) if sampled else None,
                start=start,
            )  # fmt: skip
        except KeyboardInterrupt:
            if saves and has_checkpoint(folder):
                stderr.print(
                    f"{out} holds a checkpoint: the same command with --resume continues from there"
                )
            raise
        chunks = math.ceil(len(input_ids) / complete.training.stride) * complete.training.readings
        if saves and complete.study is None and chunks < FEW_CHUNKS:
            what = (
                f"learned from {chunks} chunk{'s' * (chunks > 1)} alone: the memory is nearly empty"
            )
            remedy = "Add --study for questions about a short text, or --readings and a shorter --window and --stride"
            stderr.print(f"{what}. {remedy}")
    show_readings([result], stdout, stderr, title or "standard input")
    show_study(result.studied, stdout, stderr)
    write_result(json_file, result.to_json())
    if saves:
        asks = library is not None or can_chat(loaded.tokenizer)
        then = "locas ask QUESTION" if asks else "locas generate PROMPT"
        where = f"--memory {out}" if library is None else f"--library {library}"
        stdout.print(f"The memory is in {out}. Next: {then} {where}, or locas inspect {out}")
