"""`locas demo`, `memorize` and `compare`: read a text with one method or several."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from rich.console import Console

from locas_peft import backbone
from locas_peft import demo as acts
from locas_peft import text as texts
from locas_peft.asking.prompts import can_chat
from locas_peft.bases import loading
from locas_peft.files import check_output_directory, check_output_file, write_json
from locas_peft.model import count_positions
from locas_peft.progress import follow, follow_study
from locas_peft.reading import teaching as reading
from locas_peft.reading.comparison import plot_readings, tabulate_readings
from locas_peft.reading.record import CHECKPOINT_FOLDER, Reading, check_vacant, find_finished
from locas_peft.reading.settings import ReadingSettings, complete_all, label_method
from locas_peft.selfstudy import load_exchanges
from locas_peft.ttt.checkpoint import has_checkpoint

from .console import deferring_signals, open_consoles, printable, show_progress, write_result
from .options import (
    BASE,
    READING,
    AtLeastTwo,
    AtLeastZero,
    Base,
    BaseGroup,
    BaseOptions,
    Count,
    JsonFile,
    ManyScored,
    NamedPath,
    OneMethod,
    Overwrite,
    ReadingOptions,
    Seed,
    Text,
    Unwrap,
    load,
    split_names,
)

DEMO_JSON, COMPARE_JSON, PLOT = "demo.json", "readings.json", "perplexity.png"
DEMO_METHODS = "none,lora,locas-glu"
REFERENCE = "the Python language reference"
DEMO_PROMPT = "See also:"
FEW_CHUNKS = 4
"""Below, a reading is too short to be noticed in what the model writes."""


def demo(
    *,
    out: NamedPath = Path("locas-demo"),
    model: str | None = None,
    preset: str = "tuned",
    r: Annotated[Count | None, Parameter(alias="--width")] = None,
    max_tokens: AtLeastTwo | None = None,
    seed: Seed = 0,
    device: str = "auto",
    json_file: JsonFile = None,
) -> None:
    """Watch a small model learn: a page that it is asked about, and a text that it reads; with LoRA and with Locas.

    Args:
        out: folder for the plot, JSON and memories.
        model: as for the other commands; where not given, smollm2 if it is installed, else the embedded one.
        preset: where the settings come from: tuned or paper.
        r: memory width, or LoRA rank.
        max_tokens: tokens to read in act 2; where not given, 100,000 for an embedded model, else 6,000.
        seed: set before each method.
        device: cpu, cuda, cuda:1, ... or auto.
    """
    stdout, stderr = open_consoles(json_file)
    name = model or acts.choose_model()
    default_tokens, again = acts.choose_tokens(name)
    max_tokens = max_tokens or default_tokens
    options = ReadingOptions(preset=preset, r=r, seed=seed, max_tokens=max_tokens)
    methods = split_names(DEMO_METHODS, "--methods")
    check_output_directory("--out", out)
    own = (out / DEMO_JSON).exists()  # an earlier demo's folder
    memories = [method for method in methods if method != "none"]
    _check_vacant(out, [*memories, *(f"{acts.RECALL}/{method}" for method in memories)], [PLOT], overwrite=own)
    base = load(BaseOptions(model=name, device=device))
    options = replace(options, window=min(512, count_positions(base.model) or 512), context="cache")
    settings = complete_all(options.of(base), methods, base.model)
    if not own:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / DEMO_JSON, [])  # after an interruption the same command may replace what this one wrote

    recalls = []
    if can_chat(base.tokenizer):
        stderr.print(
            f"Act 1, recall. {base.name} learns a page about a lighthouse that does not exist, and answers questions "
            "about it.\nThe methods lora and locas-glu no longer see the page then."
        )
        with show_progress(stderr) as progress:
            recalls = acts.recall(
                base.model, base.tokenizer, settings, out / acts.RECALL, progress=progress, overwrite=True
            )
        _show_recall(recalls, stdout, out / acts.RECALL)
    else:
        stderr.print(
            f"Act 1, recall, is left out: {base.name} has no chat template, so it cannot answer questions. With "
            f"{acts.CHAT_MODEL} it is shown: {acts.INSTALL}"
        )
    trained = "The embedded model was trained on English books alone. " if backbone.is_embedded(base.name) else ""
    stderr.print(
        f"Act 2, perplexity. {trained}{base.name} now reads the Python language reference.\nEach chunk is scored "
        "before it is learned: the lower the perplexity, the better the prediction."
    )
    input_ids = base.encode(texts.python_reference(), max_tokens, unwrap=None)
    readings = _read_each(base, input_ids, settings, stderr, out, overwrite=True, title=REFERENCE)
    rows = acts.describe(readings, recalls)
    write_json(out / DEMO_JSON, rows)
    _show(readings, stdout, stderr, out / PLOT, REFERENCE)
    write_result(json_file, rows)

    memory = out / "locas-glu"
    passage = input_ids[:again]
    adapted = loading.load_memory(base.model, memory)
    with_memory = reading.score(adapted, passage, settings["locas-glu"])
    with adapted.disable_adapter():
        without = reading.score(adapted, passage, settings["locas-glu"])
    stdout.print(
        f"\nThe Locas memory, loaded from {memory} and frozen, on the first {len(passage):,} tokens once more: "
        f"perplexity {with_memory:.2f}; without it {without:.2f}."
    )
    stdout.print(f"Written: {', '.join(str(out / name) for name in sorted(os.listdir(out)))}")
    stdout.print(
        f'Next: locas generate "{DEMO_PROMPT}" --memory {memory}   or, on a text of yours: '
        "locas memorize TEXT --out my-memory"
    )


def _show_recall(recalls: Sequence[acts.Recall], stdout: Console, folder: Path) -> None:
    """Print the counts of act 1, some answers without a memory and with the last method's, and the next command."""
    questions, before, after = acts.load_page_questions(), recalls[0], recalls[-1]
    stdout.print(acts.tabulate_recall(recalls).to_rich())
    for index in acts.SHOWN:
        stdout.print(f"\n{questions[index].question}   ({questions[index].answer})", style="bold")
        stdout.print(f"  before: {printable(before.answers[index])}")
        stdout.print(f"  after, with {after.method}: {printable(after.answers[index])}")
    question = questions[acts.SHOWN[0]].question
    stdout.print(f'\nNext: locas ask "{question}" --memory {folder / after.method}\n')


def memorize(
    text: Text,
    /,
    *,
    out: NamedPath | None = None,
    resume: bool = False,
    overwrite: Overwrite = False,
    checkpoint_seconds: AtLeastZero = 30.0,
    exchanges_file: NamedPath | None = None,
    unwrap: Unwrap = None,
    json_file: JsonFile = None,
    settings: OneMethod = READING,
    base: BaseGroup = BASE,
) -> None:
    """Read a text and save what was learned as a memory.

    Args:
        text: a UTF-8 text file, or - for stdin.
        out: the memory's folder; needed unless the method is none.
        resume: continue from the checkpoint in --out, if there is one.
        checkpoint_seconds: time between two checkpoints.
        exchanges_file: JSON Lines with question and answer, studied in place of exchanges that the model writes; for
            instance an edited exchanges.jsonl of a memory.
    """
    stdout, stderr = open_consoles(json_file)
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other: continue, or start afresh")
    if exchanges_file is not None and not settings.study:
        raise ValueError(f"--exchanges-file needs --study, got {str(exchanges_file)!r} without it: add --study")
    exchanges = None if exchanges_file is None else load_exchanges(exchanges_file)
    saves = settings.method != "none"
    if saves:
        if out is None:
            raise ValueError(f"--out must name a folder for what {settings.method} learns, got none: add --out DIR")
        check_output_directory("--out", out)
        if not resume:
            check_vacant(out, overwrite=overwrite)
    content = texts.load_text(text)
    loaded = load(base)
    input_ids = loaded.encode(content, settings.max_tokens, unwrap)
    complete = settings.of(loaded).complete(loaded.model)
    result = find_finished(out, complete, input_ids, exchanges) if resume and saves else None
    if result is not None:
        stderr.print(f"{out} holds the finished memory of this very reading: nothing is left to do")
    else:
        try:
            (result,) = _read_each(
                loaded, input_ids, {"": complete}, stderr, out,
                checkpoint_seconds=checkpoint_seconds, resume=resume, overwrite=overwrite,
                exchanges=exchanges, title=_title(text),
            )  # fmt: skip
        except KeyboardInterrupt:
            if saves and has_checkpoint(out / CHECKPOINT_FOLDER):
                stderr.print(f"{out} holds a checkpoint: the same command with --resume continues from there")
            raise
        chunks = math.ceil(len(input_ids) / complete.stride) * complete.readings
        if saves and not complete.study and chunks < FEW_CHUNKS:
            stderr.print(
                f"learned from {chunks} chunk{'s' * (chunks > 1)} alone: the memory is nearly empty. Add --study for "
                "questions about a short text, or --readings and a shorter --window and --stride"
            )
    _show([result], stdout, stderr, None, _name_text(text))
    _show_study(result.studied, stdout, stderr)
    write_result(json_file, result.to_json())
    if saves:
        then = "locas ask QUESTION" if can_chat(loaded.tokenizer) else "locas generate PROMPT"
        stdout.print(f"The memory is in {out}. Next: {then} --memory {out}, or locas inspect {out}")


def compare(
    text: Text,
    /,
    *,
    methods: str = DEMO_METHODS,
    out: NamedPath | None = None,
    overwrite: Overwrite = False,
    plot: NamedPath | None = None,
    unwrap: Unwrap = None,
    json_file: JsonFile = None,
    settings: ManyScored = READING,
    base: BaseGroup = BASE,
) -> None:
    """Read one text with several methods, one after the other, and put them side by side.

    Args:
        text: a UTF-8 text file, or - for stdin.
        methods: separated by commas: none, lora, locas-glu, locas-mlp; each also as NAME@WIDTH, NAME:RATE or both.
        out: also write a plot, JSON and a folder for each memory there.
        plot: draw the perplexity so far (PNG).
    """
    stdout, stderr = open_consoles(json_file)
    names = split_names(methods, "--methods")
    if plot is not None:
        check_output_file("--plot", plot)
    if out is not None:
        check_output_directory("--out", out)
        _check_vacant(out, map(label_method, names), [COMPARE_JSON, PLOT], overwrite)
    content = texts.load_text(text)
    loaded = load(base)
    input_ids = loaded.encode(content, settings.max_tokens, unwrap)
    readings = _read_each(
        loaded, input_ids, complete_all(settings.of(loaded), names, loaded.model), stderr, out,
        overwrite=overwrite, title=_title(text),
    )  # fmt: skip
    rows = [each.to_json() for each in readings]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / COMPARE_JSON, rows)
    _show(readings, stdout, stderr, plot or (out and out / PLOT), _name_text(text))
    write_result(json_file, rows)


def _check_vacant(out: Path, folders: Iterable[str], files: Sequence[str], overwrite: bool) -> None:
    """Refuse a folder in which memories or files would replace something."""
    for folder in folders:
        check_vacant(out / folder, overwrite=overwrite)
    for name in files if not overwrite else ():
        if os.path.lexists(out / name):
            raise ValueError(f"--out {str(out)!r} holds {name}: choose another folder, or give --overwrite")


def _read_each(
    base: Base,
    input_ids: torch.LongTensor,
    settings: dict[str, ReadingSettings],
    stderr: Console,
    out: Path | None,
    *,
    checkpoint_seconds: float | None = None,
    **options: Any,
) -> list[Reading]:
    """Read a text, LongTensor [T], with each method in turn, with a progress bar each.

    Args:
        settings: by the name of the memory's folder in `out`; "" stands for `out` itself.
        checkpoint_seconds: None for no checkpoints.
        options: of `reading.memorize`.
    """
    readings = []
    with show_progress(stderr) as progress, deferring_signals(stderr) as check:

        def then_check(follow: Callable[[Any], None]) -> Callable[[Any], None]:
            return lambda step: (follow(step), check())

        for name, each in settings.items():
            memory = None if out is None else out / name
            if checkpoint_seconds is not None and memory is not None:
                options |= {"checkpoint_dir": memory / CHECKPOINT_FOLDER, "checkpoint_seconds": checkpoint_seconds}
            on_chunk = then_check(follow(progress(name or each.method, len(input_ids) * each.readings)))
            if each.study:
                options |= {"on_study": then_check(follow_study(progress)), "tokenizer": base.tokenizer}
            readings.append(reading.memorize(base.model, input_ids, each, out=memory, on_chunk=on_chunk, **options))
    return readings


def _show_study(studied: dict[str, Any] | None, stdout: Console, stderr: Console) -> None:
    if studied is None:
        return
    kept = "1 exchange" if studied["kept"] == 1 else f"{studied['kept']} exchanges"
    wrote, learned = (f"{studied[name]:.0f} s" for name in ("writing_seconds", "learning_seconds"))
    stdout.print(f"asked {studied['asked']}, kept {kept}; wrote {wrote}, learned {learned}")
    if not studied["kept"]:
        samples = " | ".join(printable(sample) for sample in studied["samples"])
        stderr.print(
            f"nothing was studied: the model wrote no usable exchange. Samples: {samples or 'none'}. The text was "
            "read; choose a larger model, one with a chat template, or give --exchanges-file"
        )


def _show(readings: Sequence[Reading], stdout: Console, stderr: Console, plot: Path | None, title: str) -> None:
    stdout.print(tabulate_readings(readings, title).to_rich())
    skipped = sum(each.skipped_chunks for each in readings)
    if skipped:
        stderr.print(f"{skipped} chunks were scored but not learned: their loss or gradient was not finite")
    for each in readings:
        if each.taken_back:
            where = ", ".join(f"{tokens:,}" for tokens in each.taken_back)
            stderr.print(
                f"{each.method} made the text worse than no memory and was taken back to an earlier state, after "
                f"{where} tokens: a lower --lr may learn more"
            )
    if plot is not None:
        try:
            plot_readings(readings, plot, title)
        except ModuleNotFoundError as error:
            stderr.print(f"no plot: {error}")


def _title(path: str) -> str | None:
    """Return the file's name for the record, without its folders: a memory's files may be shared."""
    return None if path == "-" else Path(path).name


def _name_text(path: str) -> str:
    return "standard input" if path == "-" else path
