"""`locas demo`, `memorize` and `compare`: texts read with one method or with several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .job import Job, load, make_settings
from .options import (
    BaseOptions,
    Device,
    JsonFile,
    MaxTokens,
    MethodOptions,
    Overwrite,
    Preset,
    Seed,
    Text,
    TextOptions,
    Width,
)
from .progress import show_progress
from .shell import check_json_file, command, make_consoles, write_result

if TYPE_CHECKING:
    import torch

    from ..methods import Reading, Settings

DEMO_JSON, DEMO_PLOT = "demo.json", "perplexity.png"
DEMO_METHODS = "none,lora,locas-glu"
DEMO_PROMPT = "See also:"
PASSAGE_TOKENS = 20_000


@command()
def demo(
    out: Annotated[Path, typer.Option(help="Where plot, JSON and memories go.", metavar="DIR")] = Path("locas-demo"),
    preset: Preset = "tuned",
    r: Width = None,
    max_tokens: MaxTokens = 100_000,
    seed: Seed = 0,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Watch a small model learn the Python language reference: with no memory, with LoRA, with Locas."""
    from .. import loading, methods, text
    from ..files import check_output_directory, write_json

    stdout, stderr = make_consoles(json_file)
    names = _split_methods(DEMO_METHODS)
    check_output_directory("--out", out)
    check_json_file(json_file)
    if not (out / DEMO_JSON).exists():
        _check_vacant(out, names, overwrite=False)
    stderr.print(
        "The embedded backbone, trained on English books alone, reads the Python language reference. Each chunk is\n"
        "scored first and learned second, so that the perplexity says how well the text was foretold."
    )
    job = load(BaseOptions(device=device))
    input_ids = job.encode(text.python_reference(), TextOptions(max_tokens=max_tokens))
    settings = make_settings(names, job, MethodOptions(preset=preset, r=r, seed=seed), max_tokens=max_tokens)
    readings = _read_all(job, input_ids, settings, stderr, out)
    write_json(out / DEMO_JSON, [reading.to_json() for reading in readings])
    _show(readings, stdout, stderr, json_file, out / DEMO_PLOT, "the Python language reference")

    memory = out / "locas-glu"
    passage = input_ids[:PASSAGE_TOKENS]
    model = loading.load_memory(job.base, memory)
    with_memory = methods.score(model, passage, settings[-1])
    with model.disable_adapter():
        without = methods.score(model, passage, settings[-1])
    stdout.print(
        f"\nThe Locas memory, loaded from {memory} and frozen, on the first {len(passage):,} tokens once more: "
        f"perplexity {with_memory:.2f}; without it {without:.2f}."
    )
    stdout.print(f"Written: {', '.join(str(out / name) for name in sorted(os.listdir(out)))}")
    stdout.print(
        f'Next: locas generate "{DEMO_PROMPT}" --memory {memory}   or, on a text of yours: '
        "locas memorize TEXT --out my-memory"
    )


@command()
def memorize(
    text: Text,
    how: MethodOptions,
    base: BaseOptions,
    content: TextOptions,
    out: Annotated[
        Path | None, typer.Option(help="Where the memory goes. Needed unless --method none.", metavar="DIR")
    ] = None,
    method: Annotated[str, typer.Option(help="locas-glu, locas-mlp (two-layer FFNs), lora or none.")] = "locas-glu",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out, if any.")] = False,
    overwrite: Overwrite = False,
    checkpoint_seconds: Annotated[float, typer.Option(help="Time between two checkpoints.", min=0.0)] = 30.0,
    json_file: JsonFile = None,
) -> None:
    """Read a text once and save what was learned as a memory."""
    from .. import methods
    from ..files import check_output_directory
    from ..text import read_text

    stdout, stderr = make_consoles(json_file)
    _split_methods(method)
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other: go on, or start afresh")
    check_json_file(json_file)
    if method != "none":
        if out is None:
            raise ValueError(f"--out must name a folder for what {method} learns, got none: add --out DIR")
        check_output_directory("--out", out)
        if not resume:
            _check_vacant(out, ["."], overwrite)
    words = read_text(text)
    job = load(base)
    input_ids = job.encode(words, content)
    (settings,) = make_settings([method], job, how, max_tokens=content.max_tokens)
    finished = methods.find_finished(out, settings, input_ids) if resume and method != "none" else None
    if finished is not None:
        stderr.print(f"{out} holds the finished memory of this very reading: nothing is left to do")
        readings = [finished]
    else:
        try:
            readings = _read_all(
                job, input_ids, [settings], stderr, out,
                single=True, resume=resume, checkpoint_seconds=checkpoint_seconds,
            )  # fmt: skip
        except KeyboardInterrupt:
            if out is not None and methods.has_checkpoint(out):
                stderr.print(f"{out} holds a checkpoint: the same command with --resume goes on from there")
            raise
    _show(readings, stdout, stderr, json_file, None, "standard input" if text == "-" else text, as_list=False)
    if readings[0].memory_dir is not None:
        stdout.print(f"The memory is in {out}. Next: locas generate PROMPT --memory {out}, or locas inspect {out}")


@command()
def compare(
    text: Text,
    how: MethodOptions,
    base: BaseOptions,
    content: TextOptions,
    methods: Annotated[
        str, typer.Option(help="Which, separated by commas: none, lora, locas-glu, locas-mlp.")
    ] = DEMO_METHODS,
    out: Annotated[
        Path | None, typer.Option(help="Also write plot, JSON and a folder for each memory there.", metavar="DIR")
    ] = None,
    overwrite: Overwrite = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the perplexity so far (PNG).", metavar="FILE")] = None,
    json_file: JsonFile = None,
) -> None:
    """Read one text with several methods, one after the other, and put them side by side."""
    from ..files import check_output_directory, check_output_file, write_json
    from ..text import read_text

    stdout, stderr = make_consoles(json_file)
    names = _split_methods(methods)
    check_json_file(json_file)
    if plot is not None:
        check_output_file("--plot", plot)
    if out is not None:
        check_output_directory("--out", out)
        _check_vacant(out, names, overwrite)
    words = read_text(text)
    job = load(base)
    input_ids = job.encode(words, content)
    settings = make_settings(names, job, how, max_tokens=content.max_tokens)
    readings = _read_all(job, input_ids, settings, stderr, out)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "readings.json", [reading.to_json() for reading in readings])
        plot = plot or out / DEMO_PLOT
    _show(readings, stdout, stderr, json_file, plot, "standard input" if text == "-" else text, as_list=True)


def _read_all(
    job: Job,
    input_ids: torch.LongTensor,
    settings: Sequence[Settings],
    stderr: Console,
    out: Path | None,
    *,
    single: bool = False,
    resume: bool = False,
    checkpoint_seconds: float | None = None,
) -> list[Reading]:
    """Reads the text with each method in turn, with a progress bar each.

    Memories go to `out` itself where there is a `single` one, else each to a folder in `out` named after its method.
    """
    from ..methods import CHECKPOINT_FOLDER, read_with
    from ..studies.progress import follow

    readings = []
    with show_progress(stderr) as start:
        for each in settings:
            memory_dir = out if single or out is None else out / each.method
            checkpoints = {}
            if checkpoint_seconds is not None and memory_dir is not None:
                checkpoints = {
                    "checkpoint_dir": memory_dir / CHECKPOINT_FOLDER,
                    "checkpoint_seconds": checkpoint_seconds,
                    "resume": resume,
                }
            on_chunk = follow(start(each.method, len(input_ids)))
            readings.append(
                read_with(job.base, input_ids, each, on_chunk=on_chunk, memory_dir=memory_dir, **checkpoints)
            )
    return readings


def _show(
    readings: Sequence[Reading],
    stdout: Console,
    stderr: Console,
    json_file: Path | None,
    plot_file: Path | None,
    title: str,
    as_list: bool = True,
) -> None:
    from .. import report

    stdout.print(report.make_table(readings, title=title))
    skipped = sum(reading.skipped_chunks for reading in readings)
    if skipped:
        stderr.print(f"{skipped} chunks were scored but not learned: their loss or gradient was not finite")
    if plot_file is not None:
        try:
            report.plot(readings, plot_file, title=title)
        except ModuleNotFoundError as error:
            stderr.print(f"no plot: {error}")
    values = [reading.to_json() for reading in readings]
    write_result(json_file, values if as_list else values[0], stderr)


def _split_methods(names: str) -> list[str]:
    from ..methods import METHODS

    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"--methods must name each method once, got {names!r}: drop the second mention")
    return chosen


def _check_vacant(out: Path, folders: Sequence[str], overwrite: bool) -> None:
    """Refuses to write over a memory, or over a reading that could be resumed."""
    from ..loading import MEMORY_CONFIG
    from ..methods import has_checkpoint

    if overwrite:
        return
    for folder in (out / name for name in folders):
        if has_checkpoint(folder):
            raise ValueError(
                f"--out {str(folder)!r} holds an unfinished reading: go on with --resume, or give --overwrite"
            )
        if (folder / MEMORY_CONFIG).exists():
            raise ValueError(f"--out {str(folder)!r} holds a memory: choose another folder, or give --overwrite")
