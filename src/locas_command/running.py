"""What commands that run a model share: the base that the options name, progress, tables.

Importing this module imports torch and PEFT: a command does it when it runs.
"""

import atexit
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import PeftModel
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from locas_peft import backbone, memories, text
from locas_peft.bases import loading as base_models
from locas_peft.bases.gguf import PACKAGES
from locas_peft.library import Library
from locas_peft.processes import join_processes
from locas_peft.progress import follow_steps
from locas_peft.stages import ReadRecord, StageRun, StudyRecord
from locas_peft.tables import Sheet, format_count, format_figure
from locas_settings import AdapterSettings

from .console import deferring_signals, show_own_remarks, show_progress, warnings_as_lines
from .options import BaseOptions


@dataclass(frozen=True)
class Base:
    """A base model with its tokenizer, under its recorded name."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def encode(self, content: str, max_tokens: int | None, unwrap: bool | None) -> torch.LongTensor:
        """Return a text's token ids, LongTensor [T] on the CPU.

        With `unwrap` None, the text is unwrapped for an embedded backbone.
        """
        if self._unwraps(unwrap):
            content = text.unwrap(content)
        return text.tokenize(self.tokenizer, content, max_tokens)

    def cut(self, content: str, max_tokens: int | None, unwrap: bool | None) -> str:
        """Return the beginning of a text whose tokens `encode` returns."""
        return text.cut_text(self.tokenizer, content, max_tokens, self._unwraps(unwrap))

    def _unwraps(self, unwrap: bool | None) -> bool:
        return backbone.is_embedded(self.name) if unwrap is None else unwrap


def _prepare() -> None:
    """Set up what loading a model needs."""
    show_own_remarks()
    join_processes()
    # The accelerator takes over what a launcher has set.
    atexit.register(Accelerator().end_training)


def load(options: BaseOptions) -> Base:
    """Load the base model that the options name."""
    _prepare()
    name = options.model or backbone.NAME
    model, tokenizer = base_models.load_base(name, options.dtype, options.device, options.quantize)
    return Base(find_recorded_name(name), model, tokenizer)


def find_recorded_name(name: str) -> str:
    """Return the name of a base as a memory records it: the whole path of a folder or file."""
    path = Path(name).expanduser()
    if backbone.is_embedded(name) or name in PACKAGES or not path.exists():
        return backbone.name_of(name)
    return str(path.resolve())


def load_base_of(memory: Path, options: BaseOptions) -> Base:
    """Load the base model that the options name, or else the memory."""
    config = memories.load_memory_config(memory)
    name = options.model or config.get("base_model_name_or_path")
    if not name:
        raise ValueError(f"memory {str(memory)!r} does not name its base: give it with --model")
    return load(replace(options, model=name))


def open_with_base(memory: Path, options: BaseOptions) -> tuple[Base, PeftModel]:
    """Load a memory on the base model that the options name, or else the memory."""
    _prepare()
    with warnings_as_lines():
        base, tokenizer, model = memories.open_memory(
            memory,
            options.model,
            dtype=options.dtype,
            device=options.device,
            quantize=options.quantize,
        )
    name = options.model or model.peft_config["default"].base_model_name_or_path
    return Base(find_recorded_name(name), base, tokenizer), model


def open_library(folder: Path, options: BaseOptions) -> tuple[Library, Base]:
    """Open a library that exists, and load the base that the options name, or its memories."""
    if not folder.is_dir():
        remedy = "make one with locas read TEXT --library"
        raise ValueError(f"--library must name a folder, got {str(folder)!r}: {remedy}")
    library = Library(folder)
    name = options.model or library.name_base()
    if not name:
        what = f"library {str(folder)!r} holds no memory that names its base"
        raise ValueError(f"{what}: add one, or give --model")
    return library, load(replace(options, model=name))


def follow_run(run: StageRun, settings: AdapterSettings, tokens: int, stderr: Console) -> None:
    """Take the steps of a stage with progress; Ctrl-C and SIGTERM end it between two steps."""
    total = tokens * getattr(settings, "readings", 1)
    with show_progress(stderr) as progress, deferring_signals(stderr) as check:
        show = follow_steps(progress, settings.method, total)
        for step in run:
            show(step)
            check()


def show_study(record: StudyRecord, stdout: Console) -> None:
    """Print how a study went."""
    exchanges = "1 exchange" if record.kept == 1 else f"{record.kept} exchanges"
    times = f"wrote {record.writing_seconds:.0f} s, learned {record.learning_seconds:.0f} s"
    stdout.print(f"asked {record.asked}, kept {exchanges}; {times}")


def show_readings(
    readings: Sequence[ReadRecord], stdout: Console, stderr: Console, title: str
) -> None:
    """Print a table of readings of one text, and remarks on them."""
    stdout.print(tabulate_readings(readings, title).to_rich())
    skipped = sum(reading.skipped_chunks for reading in readings)
    if skipped:
        reason = "their loss or gradient was not finite"
        stderr.print(f"{skipped} chunks were scored but not learned: {reason}")


def tabulate_readings(readings: Sequence[ReadRecord], title: str = "") -> Sheet:
    """Return the readings of one text, at least one, side by side, a row each.

    Time is relative to the reading with the method "none", where there are others.
    """
    end = min(reading.curve[-1][0] for reading in readings)
    marks: set[str] = set()
    for reading in readings:
        marks |= {mark for mark in reading.perplexity_at if int(mark) < end}
    shown_marks = sorted(marks, key=int)
    alone = 0.0
    if len(readings) > 1:
        alone = next((one.seconds for one in readings if one.method == "none"), 0.0)
    best = min(range(len(readings)), key=lambda row: readings[row].perplexity)
    rows = [_make_row(reading, shown_marks, alone) for reading in readings]
    columns = [f"ppl at {format_count(int(mark))}" for mark in shown_marks]
    headers = ["method", "r", "parameters", *columns, "perplexity", "time", "tokens/s"]
    if len(readings) == 1:
        return Sheet(title, headers, rows)
    return Sheet(title, headers, rows, (best, headers.index("perplexity")))


def _make_row(reading: ReadRecord, marks: Sequence[str], alone: float) -> list[str]:
    """Return the cells of a reading; `alone` are the seconds of the method "none", 0 for none."""
    width = "-" if reading.settings.r is None else str(reading.settings.r)
    time = f"{reading.seconds:.1f} s"
    if alone:
        time = f"{reading.seconds / alone:.2f}x"
    return [
        reading.method,
        width,
        f"{reading.extra_parameters:,}",
        *(format_figure(reading.perplexity_at.get(mark)) for mark in marks),
        f"{reading.perplexity:.2f}",
        time,
        f"{reading.tokens_per_second:,.0f}",
    ]
