"""What commands that run a model share: the base that the options name, and readings with progress and tables.

Importing this module imports torch and PEFT: a command does it when it runs.
"""

import atexit
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import PeftModel
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from locas_peft import backbone, memories, text
from locas_peft.bases import loading as base_models
from locas_peft.library import Library
from locas_peft.processes import join_processes
from locas_peft.progress import follow, follow_study
from locas_peft.reading import teaching
from locas_peft.reading.record import Reading
from locas_peft.reading.settings import CompleteSettings, ReadingSettings
from locas_peft.tables import Sheet, format_count, format_figure

from .console import (
    deferring_signals,
    printable,
    show_own_remarks,
    show_progress,
    warnings_as_lines,
)
from .options import BaseOptions, ReadingOptions


@dataclass(frozen=True)
class Base:
    """A base model with its tokenizer, under its recorded name."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def encode(self, content: str, max_tokens: int | None, unwrap: bool | None) -> torch.LongTensor:
        """Return a text's token ids, LongTensor [T] on the CPU; unwrap None: unwrapped for an embedded backbone."""
        if backbone.is_embedded(self.name) if unwrap is None else unwrap:
            content = text.unwrap(content)
        return text.tokenize(self.tokenizer, content, max_tokens)


def _prepare() -> None:
    """Set up what loading a model needs."""
    show_own_remarks()
    join_processes()
    atexit.register(Accelerator().end_training)  # it takes over what a launcher has set


def load(options: BaseOptions) -> Base:
    """Load the base model that the options name."""
    _prepare()
    name = options.model or backbone.NAME
    model, tokenizer = base_models.load_base(name, options.dtype, options.device, options.quantize)
    return Base(backbone.name_of(name), model, tokenizer)


def load_base_of(memory: Path, options: BaseOptions) -> Base:
    """Load the base model that the options name, or else the memory."""
    config = memories.load_memory_config(memory)
    name = options.model or config.get("base_model_name_or_path")
    if not name:
        raise ValueError(f"memory {str(memory)!r} does not name its base: give it with --model")
    return load(replace(options, model=name))


def open_with_base(memory: Path, options: BaseOptions) -> tuple[Base, PeftModel]:
    """Load a memory on the base model that the options name, or else the memory (see `memories.open_memory`)."""
    _prepare()
    placing = {name: value for name, value in vars(options).items() if name != "model"}
    with warnings_as_lines():
        base, tokenizer, model = memories.open_memory(memory, options.model, **placing)
    name = options.model or model.peft_config["default"].base_model_name_or_path
    return Base(backbone.name_of(name), base, tokenizer), model


def open_library(folder: Path, options: BaseOptions) -> tuple[Library, Base]:
    """Open a library that exists, and load the base model that the options name, or else its memories."""
    if not folder.is_dir():
        raise ValueError(
            f"--library must name a folder, got {str(folder)!r}: make one with memorize --library"
        )
    library = Library(folder)
    name = options.model or library.name_base()
    if not name:
        raise ValueError(
            f"library {str(folder)!r} holds no memory that names its base: add one, or give --model"
        )
    return library, load(replace(options, model=name))


def make_settings(options: ReadingOptions, base: Base) -> ReadingSettings:
    """Return the settings of a reading, with the base's name for its record."""
    return ReadingSettings(**vars(options), model=base.name)


def read(
    base: Base, input_ids: torch.LongTensor, settings: CompleteSettings, stderr: Console, **options
) -> Reading:
    """Read a text, LongTensor [T], with a progress bar (see `teaching.memorize`)."""
    with show_progress(stderr) as progress, deferring_signals(stderr) as check:

        def then_check(show: Callable[[Any], None]) -> Callable[[Any], None]:
            return lambda step: (show(step), check())

        advance = progress(settings.method.name, len(input_ids) * settings.training.readings)
        options["tokenizer"] = base.tokenizer
        if settings.study is not None:
            options["on_study"] = then_check(follow_study(progress))
        return teaching.memorize(
            base.model, input_ids, settings, on_chunk=then_check(follow(advance)), **options
        )


def show_study(studied: dict[str, Any] | None, stdout: Console, stderr: Console) -> None:
    """Print how a self-study went, if there was one."""
    if studied is None:
        return
    kept = "1 exchange" if studied["kept"] == 1 else f"{studied['kept']} exchanges"
    wrote, learned = (f"{studied[name]:.0f} s" for name in ("writing_seconds", "learning_seconds"))
    stdout.print(f"asked {studied['asked']}, kept {kept}; wrote {wrote}, learned {learned}")
    if not studied["kept"]:
        samples = " | ".join(printable(sample) for sample in studied["samples"])
        what = (
            f"the model wrote no usable exchange. Samples: {samples or 'none'}. The text was read"
        )
        remedy = "choose a larger model, one with a chat template, or give --exchanges-file"
        stderr.print(f"nothing was studied: {what}; {remedy}")


def show_readings(
    readings: Sequence[Reading], stdout: Console, stderr: Console, title: str
) -> None:
    """Print a table of readings of one text, and remarks on them."""
    stdout.print(tabulate_readings(readings, title).to_rich())
    skipped = sum(each.skipped_chunks for each in readings)
    if skipped:
        stderr.print(
            f"{skipped} chunks were scored but not learned: their loss or gradient was not finite"
        )


def tabulate_readings(readings: Sequence[Reading], title: str = "") -> Sheet:
    """Return the readings of one text, at least one, side by side, a row each.

    Time is relative to the reading with the method "none", where there are others to compare it with.
    """
    end = min(reading.curve[-1][0] for reading in readings)
    marks = sorted(
        {mark for reading in readings for mark in reading.perplexity_at if int(mark) < end}, key=int
    )
    alone = next(
        (each.seconds for each in readings if each.method == "none" and len(readings) > 1), 0.0
    )
    best = min(range(len(readings)), key=lambda row: readings[row].perplexity)
    rows = [
        [
            reading.method,
            "-" if reading.settings.method.r is None else str(reading.settings.method.r),
            f"{reading.extra_parameters:,}",
            *(format_figure(reading.perplexity_at.get(mark)) for mark in marks),
            f"{reading.perplexity:.2f}",
            f"{reading.seconds / alone:.2f}x" if alone else f"{reading.seconds:.1f} s",
            f"{reading.tokens_per_second:,.0f}",
        ]
        for reading in readings
    ]
    at_marks = [f"ppl at {format_count(int(mark))}" for mark in marks]
    headers = ["method", "r", "parameters", *at_marks, "perplexity", "time", "tokens/s"]
    return Sheet(
        title, headers, rows, (best, headers.index("perplexity")) if len(readings) > 1 else None
    )
