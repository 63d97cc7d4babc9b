"""`locas demo` and `locas app`, which need nothing to be brought.

A small model learns while the user watches.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console

from locas_settings import ReadSettings, StudySettings

from .console import open_consoles, printable, show_progress, write_result
from .options import AtLeastTwo, BaseOptions, Count, JsonFile, NamedPath, Seed

DEMO_JSON = "demo.json"
METHODS = ("locas-glu", "locas-mlp", "lora")
"""The methods whose memories have folders: one of the first two, by the base's FFNs, and LoRA."""
STUDIED = "studied"
"""The folder of the memory of the page."""
FULL = "full"
"""The folder of the results of `--full`."""
READ_TOKENS = 4_096


def demo(
    *,
    out: NamedPath = Path("locas-demo"),
    full: bool = False,
    model: str | None = None,
    r: Annotated[Count | None, Parameter(alias="--width")] = None,
    max_tokens: AtLeastTwo = READ_TOKENS,
    seed: Seed = 0,
    device: str = "auto",
    json_file: JsonFile = None,
) -> None:
    """Watch a small model learn, with Locas and with LoRA.

    It reads short pages with each method. Then it studies a page with Locas and is asked about it.

    Args:
        out: folder for JSON and memories.
        full: compare studies by Locas and LoRA instead: five pages, three seeds. This takes about
            two hours on two cores. The same command goes on where it was stopped.
        model: as for the other commands; where not given, smollm2 if it is installed, else the
            embedded one.
        r: memory width, or LoRA rank.
        max_tokens: tokens to read; not for --full, which has whole pages.
        seed: set before each method; not for --full, which has seeds of its own.
        device: cpu, cuda, cuda:1, ... or auto.
    """
    from locas_peft import demo as page
    from locas_peft.asking import can_chat
    from locas_peft.files import check_output_directory, write_json
    from locas_peft.memories import check_vacant
    from locas_peft.stages import choose_memory

    from .running import load

    stdout, stderr = open_consoles(json_file)
    if full and (seed or max_tokens != READ_TOKENS):
        option = "--seed" if seed else "--max-tokens"
        raise ValueError(f"--full has its own seeds and whole pages, got {option}: leave it out")
    reading = ReadSettings(r=r, seed=seed, max_tokens=max_tokens)
    check_output_directory("--out", out)
    is_demo_folder = (out / DEMO_JSON).exists()
    for name in (*METHODS, STUDIED):
        check_vacant(out / name, overwrite=is_demo_folder)
    base = load(BaseOptions(model=model or page.choose_model(), device=device))
    can_answer = can_chat(base.tokenizer)
    if full and not can_answer:
        problem = f"--full asks questions, got {base.name}, which has no chat template"
        raise ValueError(
            f"{problem}: choose a model that chats. For {page.CHAT_MODEL}: {page.INSTALL}"
        )
    if not is_demo_folder:
        # After an interruption the same command may replace what this one wrote.
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / DEMO_JSON, [])
    if full:
        rows = _compare_studies(base, StudySettings(r=r), out / FULL, stdout, stderr)
        write_result(json_file, rows)
        return
    rows = _read_pages(base, reading, out, stdout, stderr)
    memory = out / choose_memory(base.model)
    following = f'locas generate "The bridge" --memory {memory}'
    if can_answer:
        study = StudySettings(r=r, seed=seed)
        studied, question = _study_page(base, study, out / STUDIED, stdout, stderr)
        rows.append(studied)
        following = f'locas ask "{question}" --memory {out / STUDIED}'
    else:
        reason = f"{base.name} has no chat template, so it cannot answer questions"
        remedy = f"{page.CHAT_MODEL} studies a page and is asked about it: {page.INSTALL}"
        stderr.print(f"{reason}. {remedy}")
    write_json(out / DEMO_JSON, rows)
    write_result(json_file, rows)
    files = [str(out / name) for name in sorted(os.listdir(out))]
    stdout.print(f"Written: {', '.join(files)}")
    stdout.print(f"Next: {following}")
    stdout.print("Or, on a text of yours: locas read TEXT --out my-memory")


def _read_pages(
    base: Any, settings: ReadSettings, out: Path, stdout: Console, stderr: Console
) -> list[dict[str, Any]]:
    """Let a model read the pages by each method; print the table, and return its rows."""
    from locas_peft import demo as page
    from locas_peft.tables import Sheet, format_figure

    methods = page.list_methods(base.model, replace(settings, model=base.name))
    stderr.print(f"{base.name} reads short pages about things that do not exist.")
    stderr.print("Each chunk is scored before it is learned. A lower perplexity is better.")
    rows = []
    lines = []
    with show_progress(stderr) as progress:
        for read in page.read_pages(base.model, base.tokenizer, methods, out, progress):
            rows.append(read.to_json())
            record = read.record
            lines.append(
                [
                    record.method,
                    f"{record.extra_parameters:,}",
                    f"{record.perplexity:.2f}",
                    f"{record.seconds:.0f}",
                    format_figure(read.change_nats, 3),
                ]
            )
    changes = "KL on own answers, nats a token"
    headers = ["method", "parameters", "perplexity", "seconds", changes]
    stdout.print(Sheet("", headers, lines).to_rich())
    return rows


def _study_page(
    base: Any, settings: StudySettings, memory: Path, stdout: Console, stderr: Console
) -> tuple[dict[str, Any], str]:
    """Let a model study a page and answer; return the row, and a question about the page."""
    from locas_peft import demo as page
    from locas_peft.stages import choose_memory, complete

    method = choose_memory(base.model)
    settings = complete(replace(settings, method=method, model=base.name), base.model)
    stderr.print("Now it studies eight sentences about a lighthouse that does not exist: it writes")
    stderr.print("questions about them and learns the answers. It is asked without the page.")
    with show_progress(stderr) as progress:
        studied = page.study_page(base.model, base.tokenizer, settings, memory, progress)
    for asked in studied.asked:
        stdout.print(asked.question, style="bold")
        stdout.print(f"  before: {printable(asked.before)}")
        stdout.print(f"  after:  {printable(asked.after)}")
        stdout.print(f"  page:   {asked.sentence}")
    record = studied.record
    seconds = record.writing_seconds + record.learning_seconds
    stdout.print(f"{record.extra_parameters:,} parameters, studied in {seconds:.0f} s")
    return studied.to_json(), studied.asked[0].question


def _compare_studies(
    base: Any, settings: StudySettings, out: Path, stdout: Console, stderr: Console
) -> list[dict[str, str]]:
    """Compare studies of pages by Locas and LoRA; print the table, and return its rows."""
    from locas_peft import demo as page
    from locas_peft.stages import choose_memory, complete_all

    names = (choose_memory(base.model), "lora")
    methods = complete_all(replace(settings, model=base.name), names, base.model)
    with show_progress(stderr) as progress:
        table = page.Comparison(base.model, base.tokenizer, methods, out).run(progress)
    stdout.print(table.to_rich())
    stdout.print(f"Single results: {out}")
    keys = ["method", *table.headers[1:]]
    return [dict(zip(keys, row, strict=True)) for row in table.rows]


def app(
    *,
    shelf: NamedPath | None = None,
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 7860,
    no_browser: bool = False,
    model: str | None = None,
    device: str = "auto",
    source: bool = False,
) -> None:
    """Open a web page: read a text, ask with and without the memory, keep memories on a shelf.

    Args:
        shelf: a folder of memories that all visitors share; else each browser has its own until the
            command ends.
        host: the address to listen on. Others than 127.0.0.1 open the page, which has no password,
            to their network.
        port: of the address; 0 for any free one.
        no_browser: only print the page's address.
        model: as for the other commands; where not given, that of the shelf's memories, else
            smollm2 if it is installed, else the embedded one.
        device: cpu, cuda, cuda:1, ... or auto.
        source: show below each answer the sentence of the text that fits the question best.
    """
    from locas_peft import demo
    from locas_peft.checks import import_extra
    from locas_peft.files import check_output_directory

    from .running import load

    if shelf is not None:
        check_output_directory("--shelf", shelf)
    stdout, stderr = open_consoles()
    import_extra("gradio", "app", "the page")
    from locas_peft.app.page import serve
    from locas_peft.app.sessions import SharedModel, Visitors
    from locas_peft.library import Library

    library = None if shelf is None else Library(shelf)
    if model is None and library is not None:
        model = library.name_base()
    name = model or demo.choose_model()
    stderr.print(f"loading {name}")
    base = load(BaseOptions(model=name, device=device))
    if library is not None:
        library.check_base(base.name)
    shared = SharedModel(base.name, base.model, base.tokenizer, shows_source=source)

    def announce(address: str) -> None:
        stdout.print(f"The page is at {address} (Ctrl-C ends it)")

    serve(shared, Visitors(shelf), host, port, not no_browser, announce)
