"""`locas eval`: the protocols on the command line. What is found goes to --out as JSON; a broken run goes on there."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .job import Job, check_window, load, make_settings
from .options import BaseOptions, MethodOptions, Overwrite, TeachingOptions, TextOptions
from .progress import show_progress
from .shell import command, make_consoles, quieten

if TYPE_CHECKING:
    from ..methods import Settings
    from ..studies.sharing import Processes

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
BatchTokens = Annotated[int, typer.Option(help="Tokens scored at once, padding included.", min=1)]
BatchSize = Annotated[int, typer.Option(help="Questions or documents at once.", min=1)]


@command(several=True)
def perplexity(
    how: MethodOptions,
    base: BaseOptions,
    content: TextOptions,
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
    overwrite: Overwrite = False,
) -> None:
    """Online perplexity: each token scored before it is learned, a fresh memory for each document."""
    from ..studies.documents import load_column, read_documents
    from ..studies.perplexity import run_perplexity
    from ..studies.report import print_perplexity
    from ..studies.run import without_memory

    stdout, stderr = make_consoles(None)
    processes = _join(base, stderr)
    with processes.together():
        _check_place(out)
        if bool(texts) == (dataset is not None):
            raise ValueError("give either TEXT files or --dataset NAME, one of the two")
        documents = (
            read_documents(texts, limit_documents) if texts else load_column(dataset, split, column, limit_documents)
        )
        job = load(base, processes)
        methods = _settings_of(method, job, how, max_tokens=content.max_tokens)
        if long_window is not None:
            check_window("--long-window", long_window, job)
            methods["long"] = dataclasses.replace(without_memory(next(iter(methods.values()))), window=long_window)
        ids = {name: job.encode(text, content) for name, text in documents.items()}
    with show_progress(stderr) as start:
        figures = run_perplexity(
            job.base, ids, methods, out,
            common=_describe(job), overwrite=overwrite, start=start, processes=processes,
        )  # fmt: skip
    print_perplexity(figures, stdout)
    _point_to(stdout, out, "perplexity")


@command(several=True)
def locomo(
    data: Annotated[Path, typer.Argument(help="LoCoMo's JSON.", metavar="DATA.json")],
    how: MethodOptions,
    base: BaseOptions,
    teaching: TeachingOptions,
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
    max_new_tokens: Annotated[int, typer.Option(help="An answer's length at most.", min=1)] = 32,
    batch_size: BatchSize = 16,
    batch_tokens: BatchTokens = 4096,
    overwrite: Overwrite = False,
) -> None:
    """LoCoMo: what a memory of a dialogue knows, against the base, TempLoRA and the memory of another dialogue."""
    from ..evaluation.locomo import PROMPTS, choose_conversations, read_locomo, read_prompts
    from ..studies.locomo import Plan, run_locomo
    from ..studies.report import print_locomo
    from ..studies.run import digest_file

    stdout, stderr = make_consoles(None)
    processes = _join(base, stderr)
    with processes.together():
        _check_place(out)
        plan = Plan(
            settings=_split(setting, "--setting"),
            prompts=dict(PROMPTS) if prompts is None else read_prompts(prompts),
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            seed=how.seed,
            wrong_memory=wrong_memory,
        )
        recipe = teaching.to_recipe()
        found, problems = read_locomo(data)
        for line in problems:
            stderr.print(line, markup=False)
        names = None if conversations is None else _split(conversations, "--conversations")
        chosen = choose_conversations(found, names)[:limit_conversations]
        if limit_questions is not None:
            chosen = [dataclasses.replace(one, questions=one.questions[:limit_questions]) for one in chosen]
        if wrong_memory and len(chosen) < 2:
            stderr.print("one conversation alone has no other one's memory to be asked with: no wrong-memory control")
        job = load(base, processes)
        methods = _settings_of(method, job, how)
        common = {
            **_describe(job),
            "data": data.name,
            "data_sha256": digest_file(data),
            "limit_questions": limit_questions,
            "left_out": problems,
        }
    with show_progress(stderr) as start:
        figures = run_locomo(
            job.base, job.tokenizer, chosen, methods, out,
            recipe=recipe, plan=plan, common=common, overwrite=overwrite, start=start, processes=processes,
        )  # fmt: skip
    print_locomo(figures, stdout)
    _point_to(stdout, out, "locomo")


@command(several=True)
def forgetting(
    book: Annotated[str, typer.Argument(help="What the memory reads: a UTF-8 text file.", metavar="BOOK")],
    how: MethodOptions,
    base: BaseOptions,
    content: TextOptions,
    teaching: TeachingOptions,
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
    batch_size: BatchSize = 8,
    batch_tokens: BatchTokens = 4096,
    overwrite: Overwrite = False,
) -> None:
    """Forgetting: grammar, unread text and drift from the base, before and after a book, and with the memory off."""
    from ..evaluation.forgetting import read_blimp
    from ..evaluation.harness import find_tasks
    from ..studies.documents import read_documents
    from ..studies.forgetting import Plan, run_forgetting
    from ..studies.report import print_forgetting
    from ..text import read_text

    stdout, stderr = make_consoles(None)
    processes = _join(base, stderr)
    with processes.together():
        _check_place(out)
        recipe = teaching.to_recipe()
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
        words, others = read_text(book), read_documents(unread or [])
        job = load(base, processes)
        methods = _settings_of(method, job, how)
        elsewhere = dataclasses.replace(content, max_tokens=unread_tokens)
        plan = Plan(
            pairs=pairs,
            unread={name: job.encode(text, elsewhere) for name, text in others.items()},
            tasks=names,
            include_path=include_path,
            limit=limit,
            num_fewshot=num_fewshot,
            batch_tokens=batch_tokens,
            batch_size=batch_size,
            seed=how.seed,
        )
        ids = job.encode(words, content)
    with show_progress(stderr) as start:
        figures = run_forgetting(
            job.base, job.tokenizer, ids, methods, out, plan,
            recipe=recipe, common=_describe(job), overwrite=overwrite, start=start, processes=processes,
        )  # fmt: skip
    print_forgetting(figures, stdout)
    _point_to(stdout, out, "forgetting")


@command()
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


def _join(base: BaseOptions, stderr: Console) -> Processes:
    """Finds the other processes, if any; from here on an error of all of them is told once."""
    from .. import loading
    from ..studies.sharing import join

    quieten()
    processes = join(cpu=base.device == "cpu" or loading.choose_device("auto").type == "cpu")
    # A place to meet and nobody to be met: Accelerate's --cpu leaves the starting of processes to mpirun.
    if processes.count == 1 and "MASTER_PORT" in os.environ and os.environ.get("ACCELERATE_USE_CPU") == "True":
        stderr.print("accelerate launch --cpu has started one process: with --multi_gpu, or torchrun, it is several")
    return processes


def _check_place(out: Path) -> None:
    """Checks that the study can be run and its results be written, before the work begins."""
    from ..files import check_output_directory

    for name in ("datasets", "evaluate", "nltk", "scipy"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"locas eval needs {name}: install the extra 'eval' of locas_peft")
    check_output_directory("--out", out)


def _describe(job: Job) -> dict[str, Any]:
    return {"model": job.name, "dtype": job.dtype}


def _settings_of(specs: str, job: Job, how: MethodOptions, **given: Any) -> dict[str, Settings]:
    """Makes the settings of each method in the list, by the name that it has in tables."""
    from ..studies.run import name_method, split_method

    chosen = _split(specs, "--method")
    parts = [split_method(spec) for spec in chosen]
    own = [
        {field: value for field, value in (("r", width), ("learning_rate", rate)) if value is not None}
        for _, width, rate in parts
    ]
    settings = make_settings([name for name, _, _ in parts], job, how, own, strict=False, **given)
    return dict(zip(map(name_method, chosen), settings, strict=True))


def _split(names: str, option: str) -> tuple[str, ...]:
    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    if not chosen:
        raise ValueError(f"{option} must name something, got {names!r}: separate names by commas")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"{option} must name each once, got {names!r}: drop the second mention")
    return chosen


def _point_to(stdout: Console, out: Path, study: str) -> None:
    stdout.print(
        f"Figures: {out / study}.json; single results below {out / study}. Next: locas eval report {out}", markup=False
    )
