"""`locas demo` and `locas app`, which need nothing to be brought: a small model learns before your eyes."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from .console import open_consoles, printable, show_progress, write_result
from .options import AtLeastTwo, BaseOptions, Count, JsonFile, NamedPath, ReadingOptions, Seed

DEMO_JSON = "demo.json"
METHODS = ("none", "locas-glu", "lora")
REFERENCE = "the Python language reference"


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
    """Watch a small model learn a page that it is asked about, or a text that it reads, with Locas and with LoRA.

    Args:
        out: folder for JSON and memories.
        model: as for the other commands; where not given, smollm2 if it is installed, else the embedded one.
        preset: where the settings come from: tuned or paper.
        r: memory width, or LoRA rank.
        max_tokens: tokens to read, for a model that answers no questions; 6,000 where not given, 100,000 if embedded.
        seed: set before each method.
        device: cpu, cuda, cuda:1, ... or auto.
    """
    from locas_peft import backbone
    from locas_peft import demo as page
    from locas_peft.asking import can_chat
    from locas_peft.checks import import_extra
    from locas_peft.files import check_output_directory, write_json
    from locas_peft.memories import check_vacant
    from locas_peft.model import count_positions
    from locas_peft.reading.settings import ReadingSettings, complete_all
    from locas_peft.text import python_reference

    from .running import load, make_settings, read, show_readings

    stdout, stderr = open_consoles(json_file)
    name = model or page.choose_model()
    default_tokens = 100_000 if backbone.is_embedded(name) else 6_000  # some minutes
    options = ReadingOptions(preset=preset, r=r, seed=seed, max_tokens=max_tokens or default_tokens)
    ReadingSettings(**vars(options))  # for its checks
    check_output_directory("--out", out)
    own = (out / DEMO_JSON).exists()  # an earlier demo's folder
    for method in METHODS[1:]:
        check_vacant(out / method, overwrite=own)
    base = load(BaseOptions(model=name, device=device))
    options = replace(options, window=min(512, count_positions(base.model) or 512), context="cache")
    settings = complete_all(make_settings(options, base), METHODS, base.model)
    if can_chat(base.tokenizer):
        import_extra("bm25s", "library", "what is found by words")  # before anything is written
    if not own:
        out.mkdir(parents=True, exist_ok=True)
        write_json(
            out / DEMO_JSON, []
        )  # after an interruption the same command may replace what this one wrote

    rows: list[dict] = []
    if can_chat(base.tokenizer):
        stderr.print(f"{base.name} is asked about a page on a lighthouse that does not exist.")
        stderr.print(
            "It writes questions on the page, by which it finds a sentence for each one that it is asked."
        )
        stderr.print(
            "Then it learns their answers, with locas-glu and with lora, and answers without the page."
        )
        questions = page.load_page_questions()
        with show_progress(stderr) as progress:
            for recalled in page.recall(
                base.model, base.tokenizer, settings, out, progress=progress
            ):
                progress.close()
                rows.append(page.describe(recalled))
                stdout.print(page.describe_recall(recalled), style="bold")
                for index in page.SHOWN:
                    shown = f"  {questions[index].question}   ({questions[index].answer})"
                    stdout.print(f"{shown}\n    {printable(recalled.answers[index])}")
                stdout.print()
        following = f'locas ask "{questions[page.SHOWN[0]].question}"'
    else:
        reason = f"{base.name} has no chat template, so it cannot answer questions"
        stderr.print(
            f"{reason}. {page.CHAT_MODEL} learns a page and is asked about it: {page.INSTALL}"
        )
        trained = (
            "It was trained on English books alone. " if backbone.is_embedded(base.name) else ""
        )
        stderr.print(f"{trained}{base.name} now reads the Python language reference.")
        stderr.print(
            "Each chunk is scored before it is learned: the lower the perplexity, the better the prediction."
        )
        input_ids, readings = base.encode(python_reference(), options.max_tokens, unwrap=None), []
        for method, each in settings.items():
            readings.append(
                read(
                    base, input_ids, each, stderr, out=out / method, overwrite=True, title=REFERENCE
                )
            )
            stdout.print(
                f"{method}: perplexity {readings[-1].perplexity:.2f}, {readings[-1].seconds:.0f} s"
            )
        rows, following = [reading.to_json() for reading in readings], 'locas generate "See also:"'
        show_readings(readings, stdout, stderr, REFERENCE)
    write_json(out / DEMO_JSON, rows)
    write_result(json_file, rows)
    stdout.print(f"Written: {', '.join(str(out / name) for name in sorted(os.listdir(out)))}")
    stdout.print(f"Next: {following} --memory {out / METHODS[1]}")
    stdout.print("Or, on a text of yours: locas memorize TEXT --out my-memory")


def app(
    *,
    shelf: NamedPath | None = None,
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 7860,
    no_browser: bool = False,
    model: str | None = None,
    device: str = "auto",
) -> None:
    """Open a web page: read a text, ask with and without the memory, keep memories on a shelf.

    Args:
        shelf: a folder of memories that all visitors share; else each browser has its own until the command ends.
        host: the address to listen on. Others than 127.0.0.1 open the page, which has no password, to their network.
        port: of the address; 0 for any free one.
        no_browser: only print the page's address.
        model: as for the other commands; where not given, smollm2 if it is installed, else the embedded one.
        device: cpu, cuda, cuda:1, ... or auto.
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

    name = model or demo.choose_model()
    stderr.print(f"loading {name}")
    base = load(BaseOptions(model=name, device=device))
    shared = SharedModel(base.name, base.model, base.tokenizer)
    line = "The page is at {} (Ctrl-C ends it)"
    serve(
        shared,
        Visitors(shelf),
        host,
        port,
        not no_browser,
        lambda at: stdout.print(line.format(at)),
    )
