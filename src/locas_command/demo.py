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
    """Watch a small model learn, with Locas and with LoRA.

    It learns a page that it is asked about; a model that answers no questions reads a text.

    Args:
        out: folder for JSON and memories.
        model: as for the other commands; where not given, smollm2 if it is installed, else the
            embedded one.
        preset: where the settings of a reading come from: tuned or paper.
        r: memory width, or LoRA rank.
        max_tokens: tokens to read, for a model that answers no questions; 6,000 where not given,
            100,000 if embedded.
        seed: set before each method.
        device: cpu, cuda, cuda:1, ... or auto.
    """
    from locas_peft import backbone
    from locas_peft import demo as page
    from locas_peft.asking import can_chat
    from locas_peft.files import check_output_directory, write_json
    from locas_peft.memories import check_vacant

    from .running import load

    stdout, stderr = open_consoles(json_file)
    name = model or page.choose_model()
    if max_tokens is None:
        # Either takes some minutes.
        max_tokens = 100_000 if backbone.is_embedded(name) else 6_000
    reading = ReadSettings(preset=preset, r=r, seed=seed, max_tokens=max_tokens)
    check_output_directory("--out", out)
    is_demo_folder = (out / DEMO_JSON).exists()
    for method in METHODS[1:]:
        check_vacant(out / method, overwrite=is_demo_folder)
    base = load(BaseOptions(model=name, device=device))
    if not is_demo_folder:
        # After an interruption the same command may replace what this one wrote.
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / DEMO_JSON, [])
    if can_chat(base.tokenizer):
        rows, following = _learn_page(base, StudySettings(r=r, seed=seed), out, stdout, stderr)
    else:
        rows, following = _read_reference(base, reading, out, stdout, stderr)
    write_json(out / DEMO_JSON, rows)
    write_result(json_file, rows)
    files = [str(out / name) for name in sorted(os.listdir(out))]
    stdout.print(f"Written: {', '.join(files)}")
    stdout.print(f"Next: {following} --memory {out / METHODS[1]}")
    stdout.print("Or, on a text of yours: locas read TEXT --out my-memory")


def _learn_page(
    base: Any, settings: StudySettings, out: Path, stdout: Console, stderr: Console
) -> tuple[list[dict[str, Any]], str]:
    """Let a model learn the page and answer; return the rows, and a command that asks it."""
    from locas_peft import demo as page
    from locas_peft.stages import complete_all

    methods = complete_all(replace(settings, model=base.name), METHODS[1:], base.model)
    stderr.print(f"{base.name} is asked about a page on a lighthouse that does not exist.")
    stderr.print("It writes questions on the page and learns their answers, with locas-glu and")
    stderr.print("with lora. Then it answers without the page.")
    rows = []
    with show_progress(stderr) as progress:
        recalls = page.recall(base.model, base.tokenizer, methods, out, progress=progress)
        for recalled in recalls:
            progress.close()
            rows.append(page.describe(recalled))
            stdout.print(page.describe_recall(recalled), style="bold")
            for index in page.SHOWN:
                answer = recalled.answers[index]
                stdout.print(f"  {answer.question.question}   ({answer.question.answer})")
                stdout.print(f"    {printable(answer.text)}")
            stdout.print()
    question = page.load_page_questions()[page.SHOWN[0]].question
    return rows, f'locas ask "{question}"'


def _read_reference(
    base: Any, settings: ReadSettings, out: Path, stdout: Console, stderr: Console
) -> tuple[list[dict[str, Any]], str]:
    """Let a model read a text by each method; return the rows, and a command that continues it."""
    from locas_peft import backbone
    from locas_peft import demo as page
    from locas_peft.model import count_positions
    from locas_peft.stages import Place, ReadRecord, complete_all, open_reading
    from locas_peft.text import python_reference

    from .running import follow_run, show_readings

    window = min(512, count_positions(base.model) or 512)
    settings = replace(settings, model=base.name, window=window, context="cache")
    methods = complete_all(settings, METHODS, base.model)

    reason = f"{base.name} has no chat template, so it cannot answer questions"
    stderr.print(f"{reason}. {page.CHAT_MODEL} learns a page and is asked about it: {page.INSTALL}")
    trained = ""
    if backbone.is_embedded(base.name):
        trained = "It was trained on English books alone. "
    stderr.print(f"{trained}{base.name} now reads the Python language reference.")
    stderr.print("Each chunk is scored before it is learned. A lower perplexity is better.")
    input_ids = base.encode(python_reference(), settings.max_tokens, unwrap=None)
    readings = []
    for method, method_settings in methods.items():
        place = Place(out=out / method, overwrite=True, title=REFERENCE)
        opened = open_reading(
            base.model, input_ids, method_settings, place, tokenizer=base.tokenizer
        )
        with opened as run:
            follow_run(run, method_settings, len(input_ids), stderr)
            reading = run.finish()
        assert isinstance(reading, ReadRecord)
        readings.append(reading)
        stdout.print(f"{method}: perplexity {reading.perplexity:.2f}, {reading.seconds:.0f} s")
    show_readings(readings, stdout, stderr, REFERENCE)
    return [reading.to_json() for reading in readings], 'locas generate "See also:"'


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
        model: as for the other commands; where not given, smollm2 if it is installed, else the
            embedded one.
        device: cpu, cuda, cuda:1, ... or auto.
        source: show below each answer the sentence of the memory's text that supports it.
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
    shared = SharedModel(base.name, base.model, base.tokenizer, shows_source=source)

    def announce(address: str) -> None:
        stdout.print(f"The page is at {address} (Ctrl-C ends it)")

    serve(shared, Visitors(shelf), host, port, not no_browser, announce)
