"""`locas eval`: the protocols on the command line. What is found goes to --out as JSON; a broken run goes on there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .job import Job, count_positions, make_settings
from .options import (
    Context,
    Device,
    Dtype,
    Init,
    LearningRate,
    MaxTokens,
    Model,
    Overwrite,
    Preset,
    Scaling,
    Seed,
    Stride,
    Unwrap,
    Width,
    Window,
)
from .shell import make_consoles, one_line_errors, quieten

if TYPE_CHECKING:
    from ..methods import Settings
    from ..studies.run import Recipe, Start

eval_app = typer.Typer(
    name="eval", help="Measure what memories hold and what they cost: the protocols, resumable.", no_args_is_help=True
)

Out = Annotated[Path, typer.Option(help="Where JSON and memories go; a broken run goes on there.", metavar="DIR")]
Methods = Annotated[
    str,
    typer.Option(
        "--method",
        help="Separated by commas: none, lora, locas-glu, locas-mlp; each also as NAME@WIDTH, NAME:RATE or both.",
        metavar="LIST",
    ),
]
Readings = Annotated[int, typer.Option(help="How often a text is read.", min=1)]
ObjectiveName = Annotated[str, typer.Option("--objective", help="nll, or distill: learn from a longer window.")]
TeacherWindow = Annotated[int | None, typer.Option(help="Tokens that the teacher sees, for distill.", min=1)]
TokenWeighting = Annotated[str, typer.Option(help="uniform, or loss: a token counts by its own loss.")]
BatchTokens = Annotated[int, typer.Option(help="Tokens scored at once, padding included.", min=1)]
BatchSize = Annotated[int, typer.Option(help="Questions or documents at once.", min=1)]


@one_line_errors
def perplexity(
    texts: Annotated[
        list[str] | None, typer.Argument(help="UTF-8 text files, or folders of .txt files.", metavar="[TEXT]...")
    ] = None,
    out: Out = Path("locas-eval"),
    dataset: Annotated[
        str | None, typer.Option(help="Read a dataset instead: hub name or folder.", metavar="NAME")
    ] = None,
    split: Annotated[str, typer.Option(help="Of the dataset.")] = "test",
    column: Annotated[str, typer.Option(help="Of the dataset: where the texts are.")] = "text",
    limit_documents: Annotated[int | None, typer.Option(help="The first so many documents.", min=1)] = None,
    method: Methods = "none,lora,locas-glu",
    long_window: Annotated[
        int | None, typer.Option(help="Add the row `long`: no memory, but so long a window.", min=2)
    ] = None,
    model: Model = None,
    preset: Preset = "tuned",
    r: Width = None,
    init: Init = None,
    lr: LearningRate = None,
    scaling: Scaling = None,
    window: Window = None,
    stride: Stride = None,
    context: Context = None,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    unwrap: Unwrap = None,
    overwrite: Overwrite = False,
) -> None:
    """Online perplexity: each token scored before it is learned, a fresh memory for each document."""
    import dataclasses

    from ..studies.documents import load_column, read_documents
    from ..studies.perplexity import run_perplexity
    from ..studies.report import print_perplexity
    from ..studies.run import without_memory
    from ..text import tokenize
    from ..text import unwrap as unwrap_text

    stdout, stderr = _begin(out)
    if bool(texts) == (dataset is not None):
        raise ValueError("give either TEXT files or --dataset NAME, one of the two")
    documents = (
        read_documents(texts, limit_documents) if texts else load_column(dataset, split, column, limit_documents)
    )
    job = _load(model, dtype, device)
    methods = _settings_of(
        method, job, preset, r=r, init=init, learning_rate=lr, scaling=scaling, window=window, stride=stride,
        context=context, max_tokens=max_tokens, seed=seed,
    )  # fmt: skip
    if long_window is not None:
        limit = count_positions(job.base)
        if limit is not None and long_window > limit:
            raise ValueError(
                f"--long-window must be within the model's {limit} positions, got {long_window}: lower it"
            )
        methods["long"] = dataclasses.replace(without_memory(next(iter(methods.values()))), window=long_window)
    wanted = unwrap if unwrap is not None else job.embedded
    ids = {
        name: tokenize(job.tokenizer, unwrap_text(text) if wanted else text, max_tokens)
        for name, text in documents.items()
    }
    with _progress(stderr) as start:
        figures = run_perplexity(job.base, ids, methods, out, common=_describe(job), overwrite=overwrite, start=start)
    print_perplexity(figures, stdout)
    _point_to(stdout, out, "perplexity")


@one_line_errors
def locomo(
    data: Annotated[Path, typer.Argument(help="LoCoMo's JSON.", metavar="DATA.json")],
    out: Out = Path("locas-eval"),
    setting: Annotated[
        str, typer.Option(help="no-context, full-context, cloze; separated by commas.", metavar="LIST")
    ] = "no-context,full-context,cloze",
    method: Methods = "none,lora,locas-glu",
    conversations: Annotated[
        str | None, typer.Option(help="Only these, by sample_id, separated by commas.", metavar="LIST")
    ] = None,
    limit_conversations: Annotated[int | None, typer.Option(help="The first so many.", min=1)] = None,
    limit_questions: Annotated[int | None, typer.Option(help="The first so many of each.", min=1)] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON with prompts in place of the built-in ones.", metavar="FILE")
    ] = None,
    wrong_memory: Annotated[bool, typer.Option(help="Also ask each conversation with another one's memory.")] = True,
    readings: Readings = 1,
    objective: ObjectiveName = "nll",
    teacher_window: TeacherWindow = None,
    token_weighting: TokenWeighting = "uniform",
    max_new_tokens: Annotated[int, typer.Option(help="An answer's length at most.", min=1)] = 32,
    batch_size: BatchSize = 16,
    batch_tokens: BatchTokens = 4096,
    model: Model = None,
    preset: Preset = "tuned",
    r: Width = None,
    init: Init = None,
    lr: LearningRate = None,
    scaling: Scaling = None,
    window: Window = None,
    stride: Stride = None,
    context: Context = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    overwrite: Overwrite = False,
) -> None:
    """LoCoMo: what a memory of a dialogue knows, against the base, TempLoRA and the memory of another dialogue."""
    import dataclasses

    from ..evaluation.locomo import PROMPTS, choose_conversations, read_locomo, read_prompts
    from ..studies.locomo import Plan, run_locomo
    from ..studies.report import print_locomo
    from ..studies.run import digest_file

    stdout, stderr = _begin(out)
    plan = Plan(
        settings=_split(setting, "--setting"),
        prompts=dict(PROMPTS) if prompts is None else read_prompts(prompts),
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        seed=seed,
        wrong_memory=wrong_memory,
    )
    recipe = _recipe(readings, objective, teacher_window, token_weighting)
    found, problems = read_locomo(data)
    for line in problems:
        stderr.print(line, markup=False)
    chosen = choose_conversations(found, None if conversations is None else _split(conversations, "--conversations"))
    chosen = chosen[:limit_conversations]
    if limit_questions is not None:
        chosen = [dataclasses.replace(one, questions=one.questions[:limit_questions]) for one in chosen]
    if wrong_memory and len(chosen) < 2:
        stderr.print("one conversation alone has no other one's memory to be asked with: no wrong-memory control")
    job = _load(model, dtype, device)
    methods = _settings_of(
        method, job, preset, r=r, init=init, learning_rate=lr, scaling=scaling, window=window, stride=stride,
        context=context, seed=seed,
    )  # fmt: skip
    common = {
        **_describe(job),
        "data": data.name,
        "data_sha256": digest_file(data),
        "limit_questions": limit_questions,
        "left_out": problems,
    }
    with _progress(stderr) as start:
        figures = run_locomo(
            job.base, job.tokenizer, chosen, methods, out,
            recipe=recipe, plan=plan, common=common, overwrite=overwrite, start=start,
        )  # fmt: skip
    print_locomo(figures, stdout)
    _point_to(stdout, out, "locomo")


@one_line_errors
def forgetting(
    book: Annotated[str, typer.Argument(help="What the memory reads: a UTF-8 text file.", metavar="BOOK")],
    out: Out = Path("locas-eval"),
    unread: Annotated[
        list[str] | None, typer.Option(help="A text that it does not read; may be given again.", metavar="TEXT")
    ] = None,
    unread_tokens: Annotated[int, typer.Option(help="The first so many tokens of each.", min=2)] = 50_000,
    blimp: Annotated[
        Path | None, typer.Option(help="BLiMP's zip file, or a folder with its .jsonl files.", metavar="PATH")
    ] = None,
    limit_pairs: Annotated[int | None, typer.Option(help="The first so many of each paradigm.", min=1)] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-evaluation-harness, separated by commas: mmlu.", metavar="LIST")
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="A folder with task files of your own.", metavar="DIR")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="The first so many documents of each task.", min=1)] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples before each question.", min=0)] = None,
    method: Methods = "lora,locas-glu",
    readings: Readings = 1,
    objective: ObjectiveName = "nll",
    teacher_window: TeacherWindow = None,
    token_weighting: TokenWeighting = "uniform",
    batch_size: BatchSize = 8,
    batch_tokens: BatchTokens = 4096,
    model: Model = None,
    preset: Preset = "tuned",
    r: Width = None,
    init: Init = None,
    lr: LearningRate = None,
    scaling: Scaling = None,
    window: Window = None,
    stride: Stride = None,
    context: Context = None,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    unwrap: Unwrap = None,
    overwrite: Overwrite = False,
) -> None:
    """Forgetting: grammar, unread text and drift from the base, before and after a book, and with the memory off."""
    from ..evaluation.forgetting import read_blimp
    from ..evaluation.harness import find_tasks
    from ..studies.documents import read_documents
    from ..studies.forgetting import Plan, run_forgetting
    from ..studies.report import print_forgetting
    from ..text import read_text, tokenize
    from ..text import unwrap as unwrap_text

    stdout, stderr = _begin(out)
    recipe = _recipe(readings, objective, teacher_window, token_weighting)
    if not (unread or blimp or tasks):
        raise ValueError("something must be measured: give --unread TEXT, --blimp PATH or --tasks LIST")
    names = () if tasks is None else _split(tasks, "--tasks")
    if names:
        if importlib.util.find_spec("lm_eval") is None:
            raise ValueError("--tasks needs lm-evaluation-harness: install the extra 'eval' of locas_peft")
        find_tasks(names, include_path)
    pairs, problems = ([], []) if blimp is None else read_blimp(blimp, limit_pairs)
    for line in problems:
        stderr.print(line, markup=False)
    content, others = read_text(book), read_documents(unread or [])
    job = _load(model, dtype, device)
    wanted = unwrap if unwrap is not None else job.embedded

    def encode(text: str, limit: int | None) -> Any:
        return tokenize(job.tokenizer, unwrap_text(text) if wanted else text, limit)

    methods = _settings_of(
        method, job, preset, r=r, init=init, learning_rate=lr, scaling=scaling, window=window, stride=stride,
        context=context, seed=seed,
    )  # fmt: skip
    plan = Plan(
        pairs=pairs,
        unread={name: encode(text, unread_tokens) for name, text in others.items()},
        tasks=names,
        include_path=include_path,
        limit=limit,
        num_fewshot=num_fewshot,
        batch_tokens=batch_tokens,
        batch_size=batch_size,
        seed=seed,
    )
    with _progress(stderr) as start:
        figures = run_forgetting(
            job.base, job.tokenizer, encode(content, max_tokens), methods, out, plan,
            recipe=recipe, common=_describe(job), overwrite=overwrite, start=start,
        )  # fmt: skip
    print_forgetting(figures, stdout)
    _point_to(stdout, out, "forgetting")


@one_line_errors
def report(
    folders: Annotated[list[Path], typer.Argument(help="What the other commands wrote with --out.", metavar="DIR...")],
    out: Annotated[Path, typer.Option(help="The Markdown file; plots lie beside it.", metavar="FILE")] = Path(
        "report.md"
    ),
) -> None:
    """One Markdown file with tables and plots from the JSON of one or more runs."""
    from ..files import check_output_file
    from ..studies.report import write_report

    stdout, stderr = make_consoles(None)
    check_output_file("--out", out)
    written = write_report(folders, out, remark=stderr.print)
    stdout.print(f"Written: {', '.join(str(path) for path in written)}", markup=False)


# ---------------------------------------------------------------------- shared work


def _begin(out: Path) -> tuple[Console, Console]:
    from ..files import check_output_directory

    for name in ("datasets", "evaluate", "nltk", "scipy"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"locas eval needs {name}: install the extra 'eval' of locas_peft")
    check_output_directory("--out", out)
    quieten()
    return make_consoles(None)


def _load(model: str | None, dtype: str, device: str) -> Job:
    import torch

    from .. import backbone, loading

    name = model or backbone.NAME
    embedded = backbone.is_embedded(name)
    base, tokenizer = loading.load_base(name, dtype, device)
    return Job(backbone.name_of(name), base, tokenizer, torch.empty(0, dtype=torch.long), embedded)


def _describe(job: Job) -> dict[str, Any]:
    return {"model": job.name, "dtype": str(job.base.dtype).removeprefix("torch.")}


def _settings_of(specs: str, job: Job, preset: str, **given: Any) -> dict[str, Settings]:
    """Makes the settings of each method in the list; what a method does not have is not given to it."""
    from ..methods import METHOD_FIELDS, METHODS, PRESETS
    from ..studies.run import name_method, split_method

    methods: dict[str, Settings] = {}
    for spec in _split(specs, "--method"):
        name, width, rate = split_method(spec)
        if name not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
        own = {"r": width, "learning_rate": rate}
        fields = {**given, **{field: value for field, value in own.items() if value is not None}}
        known = PRESETS.get(preset, {}).get(name, {})
        kept = {f: v for f, v in fields.items() if f not in METHOD_FIELDS or f in known or own.get(f) is not None}
        (methods[name_method(spec)],) = make_settings([name], job, preset=preset, **kept)
    return methods


def _recipe(readings: int, objective: str, teacher_window: int | None, token_weighting: str) -> Recipe:
    from ..studies.run import Recipe

    return Recipe(readings, objective, teacher_window, token_weighting)


def _split(names: str, option: str) -> tuple[str, ...]:
    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    if not chosen:
        raise ValueError(f"{option} must name something, got {names!r}: separate names by commas")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"{option} must name each once, got {names!r}: drop the second mention")
    return chosen


@contextmanager
def _progress(stderr: Console) -> Iterator[Start]:
    """Gives a function that opens a line of progress and returns what to call with the steps that were done."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=stderr)

    def start(description: str, total: int) -> Callable[[int], None]:
        progress.start()  # not before: an error that comes first needs no empty line above
        task = progress.add_task(description, total=total)
        return lambda steps: progress.advance(task, steps)

    try:
        yield start
    finally:
        if progress.tasks:
            progress.stop()


def _point_to(stdout: Console, out: Path, study: str) -> None:
    stdout.print(
        f"Figures: {out / study}.json; single results below {out / study}. Next: locas eval report {out}", markup=False
    )
