"""Output to any terminal or pipe: a character that its encoding lacks is replaced."""

import io
import json
import os
import shutil
import subprocess
import sys

import pytest

from locas_command import program
from locas_command.console import open_consoles, show_progress
from locas_peft import backbone
from locas_peft.library import Library
from locas_peft.stages import ReadSettings

ENCODINGS = ["ascii", "cp1252", "utf-8"]
NAMES = ["Jos\u00e9", "\u674e\u660e", "plain"]
SETTINGS = ReadSettings(r=4, window=64, stride=32, anchor=0.0)
TEXT = "The lamp on the rock at Skarn was lit by Old Peder, the keeper. " * 4


class Stream(io.TextIOWrapper):
    """A stream of an encoding that raises an error for a character that it lacks."""

    def __init__(self, encoding: str, is_terminal: bool = False):
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    @property
    def text(self) -> str:
        return self.buffer.getvalue().decode(self.encoding)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    library = Library(tmp_path_factory.mktemp("shelf"))
    library.add(*backbone.load(), TEXT, "plain", SETTINGS)
    for name in NAMES[:2]:
        shutil.copytree(library.find("plain"), library.folder / name)
    return library.folder


@pytest.fixture(params=ENCODINGS)
def encoding(request):
    return request.param


@pytest.fixture
def run(encoding, monkeypatch, tmp_path):
    """Run the command with streams of an encoding; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*args, is_terminal=False) -> tuple[int, str, str]:
        stdout, stderr = (Stream(encoding, is_terminal) for _ in range(2))
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", stderr)
        with pytest.raises(SystemExit) as ended:
            program.main([str(arg) for arg in args])
        monkeypatch.undo()
        return ended.value.code, stdout.text, stderr.text

    return call


def as_shown(text: str, encoding: str) -> str:
    return text.encode(encoding, "replace").decode(encoding)


def test_texts_are_printed_and_json_loses_no_character(run, encoding, shelf):
    prompt = "\u2014 \U0001f426 \u674e\u660e caf\u00e9"
    shown = as_shown(prompt, encoding)
    options = ("--max-new-tokens", 2)
    code, stdout, stderr = run("generate", prompt, "--raw", "--memory", shelf / NAMES[0], *options)
    assert (code, stdout.count(shown)) == (0, 2), stderr
    code, stdout, stderr = run("ask", prompt, "--library", shelf, "--json", "-", *options)
    assert code == 0 and shown in stderr.splitlines()
    assert json.loads(stdout)[0]["question"] == prompt


def test_a_list_is_whole(run, encoding, shelf):
    code, stdout, _ = run("library", shelf)
    assert code == 0 and all(as_shown(name, encoding) in stdout for name in NAMES)
    code, stdout, _ = run("inspect", shelf / NAMES[0])
    assert code == 0 and stdout


def test_a_reading_is_shown(run, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    options = ("--window", 64, "--stride", 32, "--r", 4, "--anchor", 0, "--device", "cpu")
    where = ("--library", tmp_path / "new", "--name", NAMES[1])
    code, stdout, stderr = run("read", tmp_path / "a.txt", *where, *options, is_terminal=True)
    assert code == 0 and "locas-glu" in stdout and "Traceback" not in stderr, stderr


def test_an_error_names_what_it_can(run, tmp_path):
    code, stdout, stderr = run("inspect", tmp_path / NAMES[1])
    assert (code, stdout) == (2, "") and stderr.startswith("error: ") and stderr.count("\n") == 1
    code, _, stderr = run("read", "\udcff\u674e.txt", "--out", tmp_path / "out")
    assert code == 2 and stderr.startswith("error: ")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_shown(encoding, is_terminal, monkeypatch):
    stderr = Stream(encoding, is_terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    program.replace_unknown_characters()
    _, console = open_consoles()
    with show_progress(console) as progress:
        progress("\u674e\u660e \u2014", 2)(2, "Jos\u00e9")
    assert as_shown("\u674e\u660e \u2014", encoding) in stderr.text


def test_help_is_printed(run):
    code, stdout, _ = run("read", "--help")
    assert code == 0 and "Usage: locas read" in stdout


@pytest.mark.parametrize("encoding", ["cp1252", pytest.param("ascii", marks=pytest.mark.slow)])
def test_the_process_itself_replaces(encoding):
    environment = {"PYTHONIOENCODING": encoding, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = os.environ | environment
    script = "from locas_command.console import replace_unknown_characters as replace\n"
    script += f"replace()\nprint({NAMES[1]!r})"
    process = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True)
    assert process.returncode == 0, process.stderr.decode()
    assert process.stdout.decode(encoding).startswith("??")
