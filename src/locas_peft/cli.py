"""The `locas` command: read a text into a memory, compare methods, generate, merge, inspect.

Bad input ends with one line on stderr and exit code 2; an interruption with 130; what nobody foresaw with its
traceback and 1. What a command has to say goes to stdout, progress and remarks to stderr.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .methods import Reading, Settings
    from .ttt import Chunk

DEMO_JSON, DEMO_PLOT = "demo.json", "perplexity.png"
DEMO_METHODS = "none,lora,locas-glu"
DEMO_PROMPT = "See also:"
PASSAGE_TOKENS = 20_000

app = typer.Typer(
    name="locas",
    help="A memory made of weights for language models: read a text, keep what was learned in a small file.",
    epilog="LOCAS_TRACEBACK=1 shows the traceback behind an error's one line.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str | None,
    typer.Option(help="A causal LM: folder or hub name. Default: the embedded backbone.", metavar="NAME"),
]
Preset = Annotated[str, typer.Option(help="Where the defaults come from: tuned or paper.")]
Width = Annotated[int | None, typer.Option("--r", help="Memory width, LoRA rank.", min=1)]
Init = Annotated[str | None, typer.Option(help="How a memory begins: topk, bottomk, random, gaussian or activation.")]
LearningRate = Annotated[float | None, typer.Option("--lr", help="Learning rate. Default: the preset's.")]
Scaling = Annotated[
    float | None, typer.Option(help="Multiplies tau, the memory's output scale. Default: the preset's.")
]
Window = Annotated[
    int | None,
    typer.Option(help="Tokens the model sees at once. Default: 512; with --model up to 2048.", min=1),
]
Stride = Annotated[int | None, typer.Option(help="Tokens between two learning steps. Default: window / 2.", min=1)]
Context = Annotated[
    str | None,
    typer.Option(help="cache keeps the context's keys and values, recompute reads it again (default with --model)."),
]
Epochs = Annotated[int, typer.Option(help="Learning passes over each chunk.", min=1)]
MaxTokens = Annotated[int | None, typer.Option(help="Read so many tokens at most.", min=2)]
Seed = Annotated[int, typer.Option(help="Set before each method.")]
Dtype = Annotated[str, typer.Option(help="Of the base: auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")]
Unwrap = Annotated[
    bool | None,
    typer.Option(
        "--unwrap/--no-unwrap",
        help="Join hard-wrapped lines to paragraphs first. Default: for the embedded backbone only.",
        show_default=False,
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write JSON; - for stdout.", metavar="FILE", allow_dash=True),
]
Text = Annotated[str, typer.Argument(help="A UTF-8 text file, or - for stdin.", metavar="TEXT")]
Memory = Annotated[Path, typer.Argument(help="A memory's folder.", metavar="MEMORY")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run left in --out.")]


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and leaves the process with its exit code.

    Args:
        args: the arguments; the process's own where None.
    """
    from . import cli_eval  # noqa: F401 (adds `locas eval` to `app`)

    given = list(sys.argv[1:] if args is None else args)
    usage_error = typer.BadParameter.__base__
    try:
        code = app(args=given or ["--help"], prog_name="locas", standalone_mode=False)
    except usage_error as error:
        place = "locas" if error.ctx is None else error.ctx.command_path
        print(f"error: {_one_line(error.format_message()).rstrip('.')}: see {place} --help", file=sys.stderr)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)


def _command(function: Callable[..., None], to: typer.Typer = app) -> Callable[..., None]:
    """Makes a function a command of `to` whose foreseeable errors end with one line and exit code 2."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> None:
        try:
            function(*args, **options)
            sys.stdout.flush()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from None
        except Exception as error:
            line = _explain(error)
            if line is None or os.environ.get("LOCAS_TRACEBACK"):
                raise
            print(f"error: {line}", file=sys.stderr)
            if isinstance(error, OSError):
                _give_up_stdout()
            raise typer.Exit(2) from None

    return to.command()(run)


@_command
def demo(
    out: Annotated[Path, typer.Option(help="Where plot, JSON and memories go.", metavar="DIR")] = Path("locas-demo"),
    preset: Preset = "tuned",
    r: Width = None,
    max_tokens: Annotated[int, typer.Option(help="Read so many tokens at most.", min=2)] = 100_000,
    seed: Seed = 0,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Watch a small model learn the Python language reference: with no memory, with LoRA, with Locas."""
    from . import loading, methods, text
    from .files import check_output_directory, write_json

    stdout, stderr = _make_consoles(json_file)
    names = _split_methods(DEMO_METHODS)
    check_output_directory("--out", out)
    _check_json_file(json_file)
    if not (out / DEMO_JSON).exists():
        _check_vacant(out, names, overwrite=False)
    stderr.print(
        "The embedded backbone, trained on English books alone, reads the Python language reference. Each chunk is\n"
        "scored first and learned second, so that the perplexity says how well the text was foretold."
    )
    job = _prepare(text.python_reference(), None, "auto", device, None, max_tokens)
    settings = _make_settings(names, job, preset=preset, r=r, max_tokens=max_tokens, seed=seed)
    readings = _read_all(job, settings, stderr, out)
    write_json(out / DEMO_JSON, [reading.to_json() for reading in readings])
    _show(readings, stdout, stderr, json_file, out / DEMO_PLOT, "the Python language reference")

    memory = out / "locas-glu"
    passage = job.input_ids[:PASSAGE_TOKENS]
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


@_command
def memorize(
    text: Text,
    out: Annotated[
        Path | None, typer.Option(help="Where the memory goes. Needed unless --method none.", metavar="DIR")
    ] = None,
    method: Annotated[str, typer.Option(help="locas-glu, locas-mlp (two-layer FFNs), lora or none.")] = "locas-glu",
    model: Model = None,
    preset: Preset = "tuned",
    r: Width = None,
    init: Init = None,
    lr: LearningRate = None,
    scaling: Scaling = None,
    window: Window = None,
    stride: Stride = None,
    context: Context = None,
    epochs: Epochs = 1,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    unwrap: Unwrap = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out, if any.")] = False,
    overwrite: Overwrite = False,
    checkpoint_seconds: Annotated[float, typer.Option(help="Time between two checkpoints.", min=0.0)] = 30.0,
    json_file: JsonFile = None,
) -> None:
    """Read a text once and save what was learned as a memory."""
    from . import methods
    from .files import check_output_directory
    from .text import read_text

    stdout, stderr = _make_consoles(json_file)
    _split_methods(method)
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other: go on, or start afresh")
    _check_json_file(json_file)
    if method != "none":
        if out is None:
            raise ValueError(f"--out must name a folder for what {method} learns, got none: add --out DIR")
        check_output_directory("--out", out)
        if not resume:
            _check_vacant(out, ["."], overwrite)
    job = _prepare(read_text(text), model, dtype, device, unwrap, max_tokens)
    (settings,) = _make_settings(
        [method],
        job,
        preset=preset,
        r=r,
        init=init,
        learning_rate=lr,
        scaling=scaling,
        window=window,
        stride=stride,
        context=context,
        epochs=epochs,
        max_tokens=max_tokens,
        seed=seed,
    )
    finished = methods.find_finished(out, settings, job.input_ids) if resume and method != "none" else None
    if finished is not None:
        stderr.print(f"{out} holds the finished memory of this very reading: nothing is left to do")
        readings = [finished]
    else:
        try:
            readings = _read_all(
                job, [settings], stderr, out, single=True, resume=resume, checkpoint_seconds=checkpoint_seconds
            )
        except KeyboardInterrupt:
            if out is not None and methods.has_checkpoint(out):
                stderr.print(f"{out} holds a checkpoint: the same command with --resume goes on from there")
            raise
    _show(readings, stdout, stderr, json_file, None, "standard input" if text == "-" else text, as_list=False)
    if readings[0].memory_dir is not None:
        stdout.print(f"The memory is in {out}. Next: locas generate PROMPT --memory {out}, or locas inspect {out}")


@_command
def compare(
    text: Text,
    methods: Annotated[
        str, typer.Option(help="Which, separated by commas: none, lora, locas-glu, locas-mlp.")
    ] = DEMO_METHODS,
    out: Annotated[
        Path | None, typer.Option(help="Also write plot, JSON and a folder for each memory there.", metavar="DIR")
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
    epochs: Epochs = 1,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    unwrap: Unwrap = None,
    overwrite: Overwrite = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the perplexity so far (PNG).", metavar="FILE")] = None,
    json_file: JsonFile = None,
) -> None:
    """Read one text with several methods, one after the other, and put them side by side."""
    from .files import check_output_directory, check_output_file, write_json
    from .text import read_text

    stdout, stderr = _make_consoles(json_file)
    names = _split_methods(methods)
    _check_json_file(json_file)
    if plot is not None:
        check_output_file("--plot", plot)
    if out is not None:
        check_output_directory("--out", out)
        _check_vacant(out, names, overwrite)
    job = _prepare(read_text(text), model, dtype, device, unwrap, max_tokens)
    settings = _make_settings(
        names,
        job,
        preset=preset,
        r=r,
        init=init,
        learning_rate=lr,
        scaling=scaling,
        window=window,
        stride=stride,
        context=context,
        epochs=epochs,
        max_tokens=max_tokens,
        seed=seed,
    )
    readings = _read_all(job, settings, stderr, out)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "readings.json", [reading.to_json() for reading in readings])
        plot = plot or out / DEMO_PLOT
    _show(readings, stdout, stderr, json_file, plot, "standard input" if text == "-" else text, as_list=True)


@_command
def generate(
    prompt: Annotated[str, typer.Argument(help="What the text begins with.", metavar="PROMPT")],
    memory: Annotated[Path, typer.Option(help="A memory's folder.", metavar="DIR")],
    model: Annotated[
        str | None, typer.Option(help="The base. Default: the one the memory names.", metavar="NAME")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Write so many tokens at most.", min=1)] = 64,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; above, tokens are drawn.", min=0.0)
    ] = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Continue a prompt without and with a memory."""
    from . import loading

    stdout, stderr = _make_consoles(json_file)
    _check_json_file(json_file)
    if not prompt.strip():
        raise ValueError("PROMPT must not be empty: give the beginning of a text")
    base, tokenizer = _load_base_of(memory, model, dtype, device)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=True).to(base.device)
    limit = _positions(base)
    if limit is not None and inputs["input_ids"].shape[1] + max_new_tokens > limit:
        raise ValueError(
            f"prompt and --max-new-tokens must fit the model's {limit} positions, got "
            f"{inputs['input_ids'].shape[1]} + {max_new_tokens}: shorten one of them"
        )
    adapted = loading.load_memory(base, memory)
    with adapted.disable_adapter():
        without = _continue(adapted, tokenizer, inputs, max_new_tokens, temperature, seed)
    with_memory = _continue(adapted, tokenizer, inputs, max_new_tokens, temperature, seed)
    for title, continuation in (("without the memory", without), ("with the memory", with_memory)):
        stdout.print(f"[bold]{title}[/bold]")
        stdout.print(prompt + continuation + "\n", markup=False)
    _write_result(
        json_file, {"prompt": prompt, "memory_dir": str(memory), "without": without, "with": with_memory}, stderr
    )


@_command
def merge(
    memory: Memory,
    out: Annotated[Path, typer.Option(help="Where the checkpoint goes: a new or empty folder.", metavar="DIR")],
    model: Annotated[
        str | None, typer.Option(help="The base. Default: the one the memory names.", metavar="NAME")
    ] = None,
    pad_to_multiple_of: Annotated[
        int | None, typer.Option(help="Pad the merged FFNs' width with zeros to a multiple of this.", min=1)
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
) -> None:
    """Make a memory part of its base for good: a checkpoint that stock transformers loads."""
    from . import loading
    from .files import check_output_directory, staged

    stdout, _ = _make_consoles(None)
    check_output_directory("--out", out)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out must be a new or empty folder, got {str(out)!r} with files in it: choose another")
    base, tokenizer = _load_base_of(memory, model, dtype, device)
    fields = {} if pad_to_multiple_of is None else {"pad_to_multiple_of": pad_to_multiple_of}
    merged = loading.load_memory(base, memory, **fields).merge_and_unload()
    with staged(out, last="config.json") as folder:
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    width = getattr(merged.config, "intermediate_size", None)
    stdout.print(
        f"The merged model ({sum(p.numel() for p in merged.parameters()):,} parameters"
        f"{f', FFNs {width:,} wide' if isinstance(width, int) else ''}) is in {out}: "
        f"AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it"
    )


@_command
def inspect(memory: Memory, json_file: JsonFile = None) -> None:
    """Say what is in a memory: base, layers, width, bytes, norms, slots. Loads no base."""
    from .loading import describe_memory
    from .report import make_memory_table

    stdout, stderr = _make_consoles(json_file)
    _check_json_file(json_file)
    found = describe_memory(memory)
    for name in ("base", "peft_type", "r", "init", "scaling", "dtype"):
        if found[name] is not None:
            stdout.print(f"{name:11}{found[name]}", markup=False)
    stdout.print(f"{'size':11}{found['parameters']:,} parameters, {found['bytes']:,} bytes")
    if found["layers"]:
        stdout.print(make_memory_table(found))
    _write_result(json_file, found, stderr)


# ---------------------------------------------------------------------- shared work


@dataclass(frozen=True)
class _Job:
    """A base and a text for it: `input_ids` LongTensor [T], on the CPU."""

    name: str
    base: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    input_ids: torch.LongTensor
    embedded: bool


def _prepare(
    content: str, model: str | None, dtype: str, device: str, unwrap: bool | None, max_tokens: int | None
) -> _Job:
    from . import backbone, loading, text

    _quieten()
    name = model or backbone.NAME
    embedded = backbone.is_embedded(name)
    base, tokenizer = loading.load_base(name, dtype, device)
    if unwrap if unwrap is not None else embedded:
        content = text.unwrap(content)
    input_ids = text.tokenize(tokenizer, content, max_tokens)
    return _Job(backbone.name_of(name), base, tokenizer, input_ids, embedded)


def _make_settings(names: Sequence[str], job: _Job, *, preset: str, **given: Any) -> list[Settings]:
    """Makes the settings of each method: what was given, the backbone's defaults, the preset's."""
    from .methods import METHOD_FIELDS, PRESETS, Settings

    window, stride, context = (given.pop(name, None) for name in ("window", "stride", "context"))
    if window is None:
        window = 512 if job.embedded else min(2048, _positions(job.base) or 2048)
    common = {
        "model": job.name,
        "dtype": str(job.base.dtype).removeprefix("torch."),
        "window": window,
        "stride": stride or max(1, window // 2),
        "context": context or ("cache" if job.embedded else "recompute"),
    }
    if len(names) == 1:
        return [Settings.from_preset(names[0], preset, **common, **given)]
    # Side by side an option is for those methods that have it; one that none has is a mistake.
    if preset in PRESETS:
        for field in METHOD_FIELDS:
            if given.get(field) is not None and not any(field in PRESETS[preset][name] for name in names):
                raise ValueError(f"{field} has no meaning for the methods {', '.join(names)}: leave it out")
    return [
        Settings.from_preset(
            name,
            preset,
            **common,
            **{f: v for f, v in given.items() if f not in METHOD_FIELDS or f in PRESETS.get(preset, {}).get(name, ())},
        )
        for name in names
    ]


def _read_all(
    job: _Job,
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
    from .methods import CHECKPOINT_FOLDER, read_with

    readings = []
    with _progress(stderr) as start:
        for each in settings:
            memory_dir = out if single or out is None else out / each.method
            checkpoints = {}
            if checkpoint_seconds is not None and memory_dir is not None:
                checkpoints = {
                    "checkpoint_dir": memory_dir / CHECKPOINT_FOLDER,
                    "checkpoint_seconds": checkpoint_seconds,
                    "resume": resume,
                }
            on_chunk = start(each.method, len(job.input_ids))
            readings.append(
                read_with(job.base, job.input_ids, each, on_chunk=on_chunk, memory_dir=memory_dir, **checkpoints)
            )
    return readings


@contextmanager
def _progress(stderr: Console) -> Iterator[Callable[[str, int], Callable[[Chunk], None]]]:
    """Gives a function that adds a bar (method, tokens in all) and returns what to call after each chunk."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from .evaluation.perplexity import perplexity

    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("perplexity {task.fields[perplexity]}"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
    )

    def start(method: str, total: int) -> Callable[[Chunk], None]:
        task = progress.add_task(method, total=total, visible=False, perplexity="-", speed="-")
        nll_nats, tokens, seconds = 0.0, 0, 0.0

        def update(chunk: Chunk) -> None:
            nonlocal nll_nats, tokens, seconds
            nll_nats += chunk.nll_nats
            tokens += chunk.tokens
            seconds += chunk.seconds
            if tokens and seconds:
                fields = {"perplexity": f"{perplexity(nll_nats, tokens):.2f}", "speed": f"{tokens / seconds:,.0f}"}
                progress.start()
                progress.update(task, completed=chunk.stop, visible=True, **fields)

        return update

    # Begun with the first chunk: an error before it needs no empty bar above.
    progress = Progress(*columns, console=stderr)
    try:
        yield start
    finally:
        if progress.live.is_started:
            progress.stop()


def _show(
    readings: Sequence[Reading],
    stdout: Console,
    stderr: Console,
    json_file: Path | None,
    plot_file: Path | None,
    title: str,
    as_list: bool = True,
) -> None:
    from . import report

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
    _write_result(json_file, values if as_list else values[0], stderr)


def _write_result(json_file: Path | None, value: Any, stderr: Console) -> None:
    from .files import format_json, write_json

    if json_file is None:
        return
    if str(json_file) == "-":
        print(format_json(value))
    else:
        write_json(json_file, value)


def _load_base_of(
    memory: Path, model: str | None, dtype: str, device: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from . import loading

    _quieten()
    name = model or loading.read_memory_config(memory).get("base_model_name_or_path")
    if not name:
        raise ValueError(f"memory {str(memory)!r} does not name its base: give it with --model")
    return loading.load_base(name, dtype, device)


def _continue(
    model: Any, tokenizer: PreTrainedTokenizerBase, inputs: Any, max_new_tokens: int, temperature: float, seed: int
) -> str:
    import torch

    torch.manual_seed(seed)
    drawing = {"do_sample": True, "temperature": temperature}
    likeliest = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.inference_mode():
        output = model.generate(
            **inputs, max_new_tokens=max_new_tokens, pad_token_id=pad, **(drawing if temperature else likeliest)
        )
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def _positions(base: PreTrainedModel) -> int | None:
    config = base.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)


def _split_methods(names: str) -> list[str]:
    from .methods import METHODS

    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"--methods must name each method once, got {names!r}: drop the second mention")
    return chosen


def _check_vacant(out: Path, folders: Sequence[str], overwrite: bool) -> None:
    """Refuses to write over a memory, or over a reading that could be resumed."""
    from .loading import MEMORY_CONFIG
    from .methods import has_checkpoint

    if overwrite:
        return
    for folder in (out / name for name in folders):
        if has_checkpoint(folder):
            raise ValueError(
                f"--out {str(folder)!r} holds an unfinished reading: go on with --resume, or give --overwrite"
            )
        if (folder / MEMORY_CONFIG).exists():
            raise ValueError(f"--out {str(folder)!r} holds a memory: choose another folder, or give --overwrite")


def _check_json_file(json_file: Path | None) -> None:
    from .files import check_output_file

    if json_file is not None and str(json_file) != "-":
        check_output_file("--json", json_file)


def _make_consoles(json_file: Path | None) -> tuple[Console, Console]:
    """Gives the consoles of results and of remarks; both are stderr where stdout is for JSON."""

    def make(stream: Any) -> Console:
        # A pipe or a file has no width: 80 columns would cut tables off.
        return Console(file=stream, width=None if stream.isatty() else 120, highlight=False, soft_wrap=True)

    stderr = make(sys.stderr)
    return (stderr if str(json_file) == "-" else make(sys.stdout)), stderr


def _quieten() -> None:
    """Silences transformers' own bars and remarks: the command has its own."""
    from transformers.utils import logging

    # Announcements between libraries are nothing that the user of a command can act on.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _explain(error: Exception) -> str | None:
    """Gives the one line for an error that input or machine can cause, or None for one that nobody foresaw."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return "the device is out of memory: lower --window, or choose another --dtype or --device"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        return "the machine is out of memory: lower --r or --window, or choose another --dtype"
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        from .files import is_disk_full

        if is_disk_full(error) and error.strerror:
            where = f" while writing {error.filename}" if error.filename else ""
            return f"the disk is full{where}: free some space or choose another folder; nothing was left half-written"
        return _one_line(str(error))
    if isinstance(error, ValueError) or (isinstance(error, TypeError) and _is_ours(error)):
        return _one_line(str(error)) or type(error).__name__
    return None


def _give_up_stdout() -> None:
    """Sends what is left in stdout's buffer to nowhere where it cannot be written: Python would try once more."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_ours(error: Exception) -> bool:
    """Says whether an error was raised in this package: a TypeError from elsewhere is a defect, not an input."""
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    return Path(frame.tb_frame.f_code.co_filename).is_relative_to(Path(__file__).parent)


def _one_line(message: str) -> str:
    return " ".join(message.split())
