"""A table of documents: each is taught once, by any number of processes; what fails is listed; the rest goes on."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import locas_peft.library.library as library_module
from locas_command import program as cli
from locas_peft import backbone
from locas_peft.library import Library
from locas_peft.library.table import FAILURES, LOCK, RETRIES, load_table, teach_on_ray, teach_table
from locas_peft.memories.checkpoint import CHECKPOINT_FOLDER, InUse, held, locked
from locas_peft.stages import ReadSettings, StudySettings

SETTINGS = ReadSettings(r=4, window=32, stride=16, anchor=0.0)
FAST = ["--r", "4", "--window", "32", "--stride", "16", "--anchor", "0", "--device", "cpu"]
TIMES = {"seconds", "tokens_per_second", "peak_bytes", "memory_dir"}
BROKEN_PATH = {"name": "x", "path": "x.txt"}


@pytest.fixture(scope="module")
def base():
    return backbone.load()


@pytest.fixture
def made(tmp_path):
    return tmp_path / "made"


@pytest.fixture
def teach(base, tmp_path):
    """Return a function that teaches a table into a library of a name; it returns what failed."""

    def teach(documents, name="made", **options) -> list[dict]:
        return teach_table(Library(tmp_path / name), *base, documents, **options)

    return teach


@pytest.fixture
def fail_at_note_1(monkeypatch):
    """Return a function that lets the reading of the second document raise an error."""
    read = library_module.read

    def fail(error):
        def read_or_raise(model, ids, settings, place, **options):
            if place.title == "note 1":
                raise error
            return read(model, ids, settings, place, **options)

        monkeypatch.setattr(library_module, "read", read_or_raise)

    return fail


def interrupt(chunk):
    if chunk.index == 5:
        raise KeyboardInterrupt


def text_of(number: int, sentences: int = 2) -> str:
    return (
        f"The lamp of house {number} was lit by Old Peder, and nobody else went there in winter. "
        * sentences
    )


def write_rows(path: Path, rows) -> Path:
    """Write rows, which are objects or lines as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def write(folder: Path, *rows, count: int = 0, sentences: int = 2) -> Path:
    """Write a manifest: `count` notes with texts, then the rows."""
    notes = [{"name": f"note {each}", "text": text_of(each, sentences)} for each in range(count)]
    return write_rows(folder / "d.jsonl", [*notes, *rows])


def load(folder: Path, *rows, settings=SETTINGS, **options) -> list:
    return load_table(str(write(folder, *rows, **options)), settings)


def list_failures(folder: Path) -> list[dict]:
    file = folder / FAILURES
    return list(map(json.loads, file.read_text().splitlines())) if file.exists() else []


def content(folder: Path) -> dict:
    """The files of a library, without times, failures and the folder where it was made."""
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.name == "record.json":
            (stage,) = json.loads(path.read_text())["stages"]
            found[name] = {key: stage[key] for key in stage.keys() - TIMES}
        elif path.is_file() and path.name not in ("README.md", FAILURES):
            found[name] = path.read_bytes()
    return found


# ---------------------------------------------------------------------- the table


def test_rows_have_texts_or_paths_and_settings_of_their_own(tmp_path):
    (tmp_path / "one.txt").write_text("A text of its own.")
    rows = [
        {"name": "ann", "text": "Some text.", "r": 8, "lr": 1e-3, "readings": 2},
        {"name": " bob ", "path": "one.txt", "max_tokens": None},
    ]
    ann, bob = load(tmp_path, *rows)
    assert (ann.line, ann.name, ann.load()) == (1, "ann", "Some text.")
    assert ann.settings == replace(SETTINGS, r=8, learning_rate=1e-3, readings=2)
    assert (bob.name, bob.load(), bob.settings) == ("bob", "A text of its own.", SETTINGS)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{broken", "each row must be an object with name and either path or text, not empty: "),
        ("[1, 2]", "each row must be an object with name"),
        ({"text": "a b"}, "each row must be an object with name"),
        ({"name": "x"}, "each row must be an object with name"),
        ({"name": "x", "text": "a b", "path": "one.txt"}, "and either path or text, not empty"),
        ({"name": "x", "text": ""}, "and either path or text, not empty"),
        ({"name": "x", "text": 5}, "and either path or text, not empty"),
        ({"name": "x", "path": "-"}, "path must be a file, got standard input: "),
        ({"name": "../x", "text": "a b"}, "name must be at most 60 letters"),
        ({"name": "x", "text": "a b", "model": "m"}, "settings must be those of the command, got "),
        ({"name": "x", "text": "a b", "r": "8"}, "r must be an int, got str"),
        ({"name": "x", "text": "a b", "passes": 2}, "settings must be those of the command, got "),
        ({"name": "x", "text": "a b", "method": "none"}, "method must be one that learns, got "),
        ({"name": "NOTE 0", "text": "a b"}, "name must be that of one row alone, whatever its "),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_its_line(row, message, tmp_path):
    documents = load(tmp_path, row, count=2)
    assert [each.line for each in documents] == [1, 2, 3]
    assert message in documents[2].error and "\n" not in documents[2].error
    assert not documents[1].error
    assert bool(documents[0].error) == ("one row" in message), "neither row of a name can be meant"


def test_a_row_of_a_study_has_the_settings_of_a_study(tmp_path):
    studied = StudySettings(r=4)
    own = [{"passes": 2, "lr": 1e-3}, {"stride": 8}]
    rows = [{"name": f"n{number}", "text": "a b", **each} for number, each in enumerate(own)]
    first, second = load(tmp_path, *rows, settings=studied)
    assert first.settings == replace(studied, passes=2, learning_rate=1e-3)
    assert second.error.startswith("settings must be those of the command, got 'stride': ")


def test_settings_may_have_the_names_of_the_commands_options(tmp_path):
    row = {"name": "ann", "text": "a b", "max-tokens": 9, "layers": "0,1"}
    (document,) = load(tmp_path, row)
    assert document.settings == replace(SETTINGS, max_tokens=9, layers_to_transform=[0, 1])
    pytest.importorskip("datasets")
    path = tmp_path / "d.csv"
    path.write_text('name,text,max-tokens,layers\nann,a b,9,"0,1"\nbob,a b,,1\n')
    ann, bob = load_table(str(path), SETTINGS)
    assert ann.settings == document.settings
    assert bob.settings == replace(SETTINGS, layers_to_transform=[1])
    (wrong,) = load(tmp_path, {**row, "layers": "lower"})
    assert (
        wrong.error
        == "must be upper, or indices separated by commas, got 'lower': write 3,4,5, say"
    )


def test_the_text_of_a_row_is_checked_as_that_of_a_file_is(tmp_path):
    texts = ("one\r\ntwo", "one\0two", " \n\n ")
    rows = [{"name": f"n{number}", "text": text} for number, text in enumerate(texts)]
    windows, zero, white = load(tmp_path, *rows)
    assert windows.load() == "one\ntwo"
    with pytest.raises(ValueError, match="^text must be plain text, got zero bytes in row 2: "):
        zero.load()
    with pytest.raises(ValueError, match="^text must not be empty, got nothing but .* in row 3: "):
        white.load()


def test_a_table_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "empty.json").touch()
    for name, message in (
        ("none.jsonl", "text must be an existing file"),
        ("none.parquet", "dataset '.*none.parquet' cannot be read"),
        ("empty.json", "dataset '.*empty.json' is empty: add a document a row$"),
    ):
        with pytest.raises(ValueError, match=message):
            load_table(str(tmp_path / name), SETTINGS)


@pytest.mark.parametrize("kind", ["csv", "parquet", "json"])
def test_tables_of_datasets_are_read_and_other_columns_left_out(kind, tmp_path):
    datasets = pytest.importorskip("datasets")
    columns = {"name": ["ann", "bob"], "text": ["Some text.", "Other text."], "url": ["u", "v"]}
    columns |= {"lr": [0.5, None], "r": [2, None]}
    path = tmp_path / f"d.{kind}"
    getattr(datasets.Dataset.from_dict(columns), f"to_{kind}")(path)
    ann, bob = load_table(str(path), SETTINGS)
    assert (ann.name, ann.text, ann.error) == ("ann", "Some text.", "")
    assert (bob.name, bob.text, bob.settings) == ("bob", "Other text.", SETTINGS)
    assert ann.settings == replace(SETTINGS, learning_rate=0.5, r=2)


def test_the_path_of_a_table_is_no_pattern(tmp_path):
    pytest.importorskip("datasets")
    for name in ("t[1].csv", "t1.csv"):
        (tmp_path / name).write_text(f"name,text\n{name[:2]},Some text.\n")
    (document,) = load_table(str(tmp_path / "t[1].csv"), SETTINGS)
    assert document.name == "t["


def test_names_in_a_csv_file_stay_as_they_are(tmp_path):
    pytest.importorskip("datasets")
    path = tmp_path / "T.CSV"
    path.write_text("name,text,r\n001,One text.,2\n1,Two text.,\nNA,Three text.,\n")
    documents = load_table(str(path), SETTINGS)
    assert [document.name for document in documents] == ["001", "1", "NA"]
    assert [document.settings.r for document in documents] == [2, 4, 4]


# ---------------------------------------------------------------------- teaching


def test_each_document_gets_the_memory_that_the_library_would_add(teach, base, made, tmp_path):
    (tmp_path / "latin.txt").write_bytes("Grün".encode("latin1"))
    rows = [
        {"name": "own", "text": text_of(7), "r": 2},
        {"name": "gone", "path": "none.txt"},
        {"name": "latin", "path": "latin.txt"},
        {"name": "short", "text": "a"},
        "{broken",
    ]
    notes = []
    failures = teach(
        load(tmp_path, *rows, count=1),
        progress=lambda *_: lambda steps, note: notes.append(note),
    )
    named = [(each["line"], each["name"]) for each in failures]
    assert named == [(3, "gone"), (4, "latin"), (5, "short"), (6, None)]
    for failure, message in zip(
        failures,
        (
            "text must be an existing file, got ",
            "text must be UTF-8, got byte 0xfc at offset 2 of ",
            "text must have at least 2 tokens, got 1: give a longer text",
            "each row must be ",
        ),
        strict=True,
    ):
        assert failure["error"].startswith(message)
    assert list_failures(made) == failures
    assert re.fullmatch(r"2 done, 4 failed, [\d,]+ an hour, 0.0 hours left", notes[-1])

    alone = Library(tmp_path / "alone")
    alone.add(*base, text_of(0), "note 0", SETTINGS)
    alone.add(*base, text_of(7), "own", replace(SETTINGS, r=2))
    assert content(made) == content(tmp_path / "alone")


def test_what_is_finished_is_skipped_and_what_failed_is_tried_again(teach, made, tmp_path):
    documents = load(tmp_path, BROKEN_PATH, count=2)
    assert len(teach(documents)) == 1
    before = {path: path.stat().st_mtime_ns for path in made.glob("note*/*")}
    (tmp_path / "x.txt").write_text(text_of(9))
    read = []
    assert teach(documents, on_step=read.append) == []
    assert not (made / FAILURES).exists() and read[0].start == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert teach(documents, on_step=pytest.fail) == []


def test_a_memory_of_another_text_or_setting_is_replaced_only_if_wanted(teach, made, tmp_path):
    first, second = load(tmp_path, count=2)
    teach([first, second])
    before = content(made)
    documents = [first, replace(second, text=text_of(5))]
    (failure,) = teach(documents)
    assert failure["name"] == "note 1" and "holds the memory of another text" in failure["error"]
    assert content(made) == before
    read = []
    assert teach(documents, overwrite=True, on_step=read.append) == []
    assert [chunk.index for chunk in read].count(0) == 1, "what is the same is skipped"
    after, weights = content(made), "adapter_model.safetensors"
    assert after[f"note 0/{weights}"] == before[f"note 0/{weights}"]
    assert after[f"note 1/{weights}"] != before[f"note 1/{weights}"]
    assert teach([replace(first, settings=replace(SETTINGS, r=2))])[0]["error"]


def test_an_interrupted_document_goes_on(teach, made, tmp_path):
    documents = load(tmp_path, count=2, sentences=6)
    with pytest.raises(KeyboardInterrupt):
        teach(documents, on_step=interrupt)
    assert os.listdir(made / "note 0") == [CHECKPOINT_FOLDER]
    seen = []
    assert teach(documents, on_step=seen.append) == []
    assert [chunk.index for chunk in seen][:7] == [0, 1, 2, 3, 4, 5, 6]
    teach(documents, "whole")
    assert content(made) == content(tmp_path / "whole")


def test_with_overwrite_the_checkpoint_of_another_reading_is_replaced(teach, made, tmp_path):
    (document,) = load(tmp_path, count=1, sentences=6)
    with pytest.raises(KeyboardInterrupt):
        teach([document], on_step=interrupt)
    other = replace(document, text=text_of(3))
    (failure,) = teach([other])
    assert failure["error"].startswith("the text must be the one begun in the checkpoint in ")
    assert teach([other], overwrite=True) == []
    teach([other], "whole")
    assert content(made) == content(tmp_path / "whole")


def test_a_document_that_another_process_holds_is_listed_and_made_the_next_time(
    teach, made, tmp_path
):
    documents = load(tmp_path, count=2)
    with locked(made / "note 0" / CHECKPOINT_FOLDER):
        (failure,) = teach(documents)
    assert failure["name"] == "note 0"
    assert failure["error"].startswith("checkpoint folder must have one writer, got ")
    assert Library(made).list() == ["note 1"]
    assert teach(documents) == []
    assert sorted(Library(made).list()) == ["note 0", "note 1"]


def test_a_second_command_in_the_library_is_refused(teach, made, tmp_path):
    documents = load(tmp_path, count=1)
    made.mkdir()
    with held(made / LOCK), pytest.raises(InUse, match="must have one holder"):
        teach(documents)
    assert teach(documents) == []
    assert os.listdir(made) == ["note 0"]


def test_a_full_disk_ends_the_work_and_the_next_run_finishes_it(
    teach, made, tmp_path, monkeypatch, fail_at_note_1
):
    documents = load(tmp_path, count=3)
    fail_at_note_1(OSError(errno.ENOSPC, "No space left on device", str(tmp_path)))
    with pytest.raises(OSError, match="No space left"):
        teach(documents)
    assert Library(made).list() == ["note 0"] and not (made / FAILURES).exists()
    monkeypatch.undo()
    assert teach(documents) == []
    assert len(Library(made).list()) == 3


def test_a_defect_of_one_document_is_listed_and_the_rest_goes_on(
    teach, made, tmp_path, fail_at_note_1
):
    fail_at_note_1(RuntimeError("no such kernel"))
    (failure,) = teach(load(tmp_path, count=3))
    assert failure == {"line": 2, "name": "note 1", "error": "RuntimeError('no such kernel')"}
    assert sorted(Library(made).list()) == ["note 0", "note 2"]


def test_what_failed_in_another_process_stays_listed_until_it_is_made(
    teach, made, tmp_path, monkeypatch, fail_at_note_1
):
    documents = load(tmp_path, BROKEN_PATH, count=2)
    others = [
        {"line": 1, "name": "note 0", "error": "there"},
        {"line": 3, "name": "x", "error": "there"},
    ]
    listed = []

    def look(steps, note):
        listed.append([(each["line"], each["error"][:5]) for each in list_failures(made)])
        if len(listed) == 1:
            write_rows(made / FAILURES, others)

    fail_at_note_1(ValueError("here"))
    assert len(teach(documents, progress=lambda *_: look)) == 2
    after_note_1 = [(2, "here"), (3, "there")]
    assert listed == [[], after_note_1, [(2, "here"), (3, "text ")]], "note 0 is made"
    monkeypatch.undo()
    (tmp_path / "x.txt").write_text(text_of(9))
    assert teach(documents) == [] and not (made / FAILURES).exists()


def test_failures_of_a_former_table_are_forgotten(teach, made, tmp_path):
    made.mkdir()
    old = {"line": 9, "name": "old", "error": "e"}
    write_rows(made / FAILURES, [old, {**old, "line": 1}, "{half"])
    assert teach(load(tmp_path, count=1)) == []
    assert os.listdir(made) == ["note 0"]


def test_what_was_not_read_is_not_kept(teach, made, tmp_path):
    row = {"name": "ann", "text": "One\ntwo three. " * 40 + "Zorblat.", "max_tokens": 60}
    assert teach(load(tmp_path, row), unwrapped=True) == []
    text, sample = ((made / "ann" / file).read_text() for file in ("text.txt", "sample.txt"))
    assert text.startswith("One\ntwo three. One\n"), "as it was written"
    assert "Zorblat" not in text + sample


# ---------------------------------------------------------------------- the command


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*args) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["read", *args])
        return ended.value.code, *capsys.readouterr()

    return run


def test_the_command_teaches_a_table(run, tmp_path):
    hostile = {"name": "x\x1b[2J", "text": "a b"}
    write(tmp_path, "{broken", {"name": "x", "path": "none.txt"}, hostile, count=1)
    code, out, err = run("--manifest=d.jsonl", "--library", "made", *FAST, "--json", "r.json")
    assert code == 3 and out == "1 of 4 are in made. Next: locas ask QUESTION --library made\n"
    lines = err.splitlines()
    for line, message in zip(
        lines,
        (
            "4 documents 100% 1 done, 3 failed, ",
            "line 2: each row must be an object with name",
            "line 3, x: text must be an existing file, got 'none.txt'",
            "line 4, x\\x1b[2J: name must be at most 60 letters",
            "3 failed: made/failures.jsonl lists them. The same command tries them again",
        ),
        strict=True,
    ):
        assert line.startswith(message)
    assert "\x1b" not in err
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["documents"] == 4 and [each["line"] for each in result["failures"]] == [2, 3, 4]
    (record,) = json.loads((tmp_path / "made" / "note 0" / "record.json").read_text())["stages"]
    assert (record["model"], record["r"], record["title"]) == (backbone.NAME, 4, "note 0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("text.txt --ray --out made", "--ray and --actors need --manifest, got one text: leave"),
        ("text.txt --actors 2 --out made", "--ray and --actors need --manifest, got one text: "),
        ("text.txt --manifest d.jsonl --library made", "give either a TEXT or --manifest, one of"),
        ("--manifest d.jsonl", "--manifest needs --library and a method that learns"),
        ("--manifest d.jsonl --library made --name x", "--manifest needs --library"),
        ("--manifest d.jsonl --library made --from x", "--manifest needs --library"),
        ("--manifest d.jsonl --library made --method none", "--manifest needs --library"),
        ("--manifest d.jsonl --library d.jsonl", "--library must be a folder, got "),
        ("none.txt --library made", "text must be an existing file"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(arguments, message, run, tmp_path):
    write(tmp_path, count=1)
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "") and err.startswith(f"error: {message}") and err.count("\n") == 1
    assert os.listdir(tmp_path) == ["d.jsonl"]


def launch(*args, folder: Path, processes: int = 1) -> subprocess.Popen:
    """Start `locas read --manifest`, with `accelerate launch` where there are several processes."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "accelerate.commands.launch", "--multi_gpu"]
        command += ["--num_processes", str(processes), "--main_process_port", str(find_free_port())]
    command += ["-m", "locas_peft", "read", "--manifest", "d.jsonl", "--library", "made"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, *FAST, *args], cwd=folder, env=environment, **pipes)


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def find_workers(process: subprocess.Popen) -> list[psutil.Process]:
    """The processes of the command that a launcher has started."""
    children = psutil.Process(process.pid).children()
    return [child for child in children if "locas_peft" in child.cmdline()]


def wait_for(condition, process: subprocess.Popen | None = None) -> None:
    ended = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < ended and (process is None or process.poll() is None)
        time.sleep(0.02)


linux = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="processes are found in /proc"
)


@pytest.mark.slow
def test_processes_of_a_launcher_share_a_table(tmp_path, teach, made):
    rows = [{"name": "broken", "path": "none.txt"}, "{broken"]
    documents = load(tmp_path, *rows, count=3)
    process = launch(folder=tmp_path, processes=2)
    out, err = process.communicate(timeout=200)
    # The launcher has its own exit code for processes that end with 3.
    assert process.returncode == 1 and out.startswith("3 of 5 are in made"), err
    assert err.count("2 failed: made/failures.jsonl lists them") == 1
    teach(documents, "alone", unwrapped=True)
    for folder in (made, tmp_path / "alone"):
        found = [(row["line"], row["name"]) for row in list_failures(folder)]
        assert found == [(4, "broken"), (5, None)]
    assert content(made) == content(tmp_path / "alone")


@linux
@pytest.mark.slow
@pytest.mark.parametrize("killed", ["one", "all"])
def test_after_a_kill_the_same_command_finishes(killed, tmp_path, teach, made):
    documents = load(tmp_path, count=4, sentences=80)
    process = launch(folder=tmp_path, processes=2)
    try:
        # Each process has the lock of its own document.
        wait_for(lambda: len(list(made.glob("*/checkpoint/checkpoint.lock"))) == 2, process)
        workers = find_workers(process)
        assert len(workers) == 2
        if killed == "all":
            os.kill(process.pid, signal.SIGKILL)
            workers[1].kill()
        workers[0].kill()
        process.communicate(timeout=200)
        psutil.wait_procs(workers)
    finally:
        process.kill()
    assert process.returncode != 0
    assert len(Library(made).list()) < 4
    again = launch(folder=tmp_path, processes=2 if killed == "one" else 1)
    out, err = again.communicate(timeout=200)
    assert again.returncode == 0 and out.startswith("4 of 4 are in made"), err
    assert not list(made.rglob("*.lock")) and not list(made.rglob(CHECKPOINT_FOLDER))
    teach(documents[:1], "alone", unwrapped=True)
    assert content(tmp_path / "alone").items() <= content(made).items()


# ---------------------------------------------------------------------- the recipes


CLUSTER = Path(__file__).parents[1] / "examples" / "cluster"


def check_command(words: list[str]) -> None:
    """Check that the module, which a launcher starts, takes a command's options."""
    start = words.index("locas_peft")
    assert words[:2] == ["accelerate", "launch"] and words[start - 1] == "-m"
    check_options(words[start + 1 :])


def check_options(words: list[str]) -> None:
    assert words[0] == "study"
    _, bound, _ = cli.app.parse_args(words, exit_on_error=False, print_error=False)
    assert bound.arguments["table"].manifest and bound.arguments["place"].library


def test_the_recipes_for_clusters_call_the_command():
    """They are parsed alone: there is no cluster here."""
    yaml = pytest.importorskip("yaml")
    script = CLUSTER / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    assert '-m locas_peft study --manifest "$2" --library "$3" "${@:4}"' in script.read_text()
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    assert job["apiVersion"] == "batch/v1" and job["kind"] == "Job"
    assert job["spec"]["completionMode"] == "Indexed"
    pods = job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pods["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (container,) = pods["containers"]
    check_command([*container["command"], *container["args"]])
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pods["volumes"]}
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    assert task["num_nodes"] > 1 and list(task["volumes"]) == ["/shared"]
    command = task["run"].partition("accelerate launch")[2].replace("\\\n", " ")
    check_command(["accelerate", "launch", *command.split()])


def test_the_uv_script_calls_the_command(monkeypatch):
    tomllib = pytest.importorskip("tomllib")
    source = (CLUSTER / "teach.py").read_text()
    block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", source)[1]
    header = tomllib.loads(re.sub("(?m)^# ?", "", block))
    assert header["dependencies"][0] == "locas_peft[library,gguf]"
    assert header["requires-python"] == ">=3.10"
    package = header["tool"]["uv"]["sources"]["locas_peft"]["path"]
    assert (CLUSTER / package / "pyproject.toml").exists()
    monkeypatch.setattr(sys, "argv", ["teach.py", "d.jsonl", "made", "--r", "4"])
    called = []
    monkeypatch.setattr("locas_command.main", lambda: called.append(sys.argv[1:]))
    exec(compile(source, "teach.py", "exec"), {"__name__": "__main__"})
    check_options(called[0])


# ---------------------------------------------------------------------- on a Ray cluster


class ActorError(Exception):
    """What Ray raises for a document whose actor ended too often."""


class NoActorError(ActorError):
    """What Ray raises for an actor that could not be made."""


class DocumentError(Exception):
    def __init__(self, cause: Exception):
        self.cause = cause


class FakeRay:
    """Ray's functions without a cluster; `teach` is called with an actor's number and a document's name.

    The name is None where the call only waits until the actor is ready.
    """

    exceptions = SimpleNamespace(
        RayActorError=ActorError, ActorDiedError=NoActorError, RayTaskError=DocumentError
    )

    def __init__(self, nodes: list[dict], teach):
        self._nodes, self._teach, self.shares, self.ended = nodes, teach, [], False

    def init(self, *args, **options):
        pass

    def shutdown(self):
        self.ended = True

    def nodes(self):
        return [{"Alive": True, "Resources": each} for each in self._nodes]

    def remote(self, max_restarts):
        assert max_restarts == -1
        return lambda kind: self

    def options(self, num_cpus, num_gpus):
        self.shares.append((num_cpus, num_gpus))
        return SimpleNamespace(remote=self._start)

    def _start(self, *arguments):
        actor = len(self.shares) - 1
        # A new object for each call, as Ray's references are.
        teach = SimpleNamespace(remote=lambda document: (actor, document.name, object()))
        ready = SimpleNamespace(remote=lambda: (actor, None, object()))
        return SimpleNamespace(teach=teach, __ray_ready__=ready)

    def wait(self, running):
        return running[:1], running[1:]

    def get(self, result):
        return self._teach(*result[:2])


@pytest.fixture
def on_ray(tmp_path, monkeypatch):
    def teach_three(teach, nodes, **options) -> tuple[FakeRay, list[dict]]:
        ray = FakeRay(nodes, teach)
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setattr("locas_peft.library.table.POLL_SECONDS", 0.0)
        documents = load(tmp_path, count=3)
        try:
            return ray, teach_on_ray(Library(tmp_path / "made"), {}, documents, **options)
        finally:
            assert ray.ended

    return teach_three


def test_each_gpu_has_an_actor_and_each_other_node_as_many_as_are_asked_for(on_ray):
    nodes = [{}, {"CPU": 8.0, "GPU": 2.0}, {"CPU": 5.0}, {"CPU": 1.0}]
    ray, failures = on_ray(lambda actor, name: None, nodes, actors_per_node=2)
    assert ray.shares == [(4, 1), (4, 1), (2, 0), (2, 0), (0.5, 0), (0.5, 0)] and failures == []


def test_a_document_that_ends_its_actors_is_listed_and_an_actor_that_cannot_be_made_is_left_out(
    on_ray,
):
    taught = set()
    reason = "ModuleNotFoundError: No module named 'locas_peft'"

    def teach(actor, name):
        if actor == 1:
            raise NoActorError(f"it died because of an error\n\n{reason}")
        if name == "note 1":
            raise ActorError("the actor is unavailable\nand more")
        taught.add(name)

    _, (failure,) = on_ray(teach, [{"CPU": 2.0}], actors_per_node=2)
    ended = f"its actor ended {RETRIES + 1} times: the actor is unavailable"
    assert failure == {"line": 2, "name": "note 1", "error": ended}
    assert taught == {"note 0", "note 2", None}
    with pytest.raises(ValueError, match=f"^no actor can be made: {reason}$"):
        on_ray(lambda actor, name: teach(1, name), [{"CPU": 2.0}], actors_per_node=2)


def test_documents_of_a_lost_node_are_taught_by_the_others(on_ray):
    """Ray notices a lost node late, and until then each call of its actor fails at once."""
    calls = Counter()

    def teach(actor, name):
        calls[actor, bool(name)] += 1
        if actor == 1:
            raise ActorError("the actor is temporarily unavailable")

    _, failures = on_ray(teach, [{"CPU": 1.0}, {"CPU": 1.0}])
    assert failures == [] and calls[0, True] == 3 and calls[1, True] == 1 and calls[1, False] >= 1


def test_a_full_disk_of_a_node_ends_the_table(on_ray):
    def fill(actor, name):
        raise DocumentError(OSError(errno.ENOSPC, "No space left on device"))

    with pytest.raises(OSError, match="No space left"):
        on_ray(fill, [{"CPU": 1.0}])


def find_teaching_actors(process: subprocess.Popen) -> list[psutil.Process]:
    """The processes of a local Ray's actors: each bears the name of the method that it runs."""
    found = []
    for each in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            found += [each] if " ".join(each.cmdline()).startswith("ray::_Teacher.teach") else []
    return found


@linux
@pytest.mark.slow
def test_on_ray_a_killed_actor_is_started_again_and_all_is_as_made_by_one_process(
    teach, made, tmp_path
):
    pytest.importorskip("ray")
    gone = {"name": "x", "path": "none.txt"}
    documents = load(tmp_path, gone, count=5, sentences=40)
    process = launch("--ray", folder=tmp_path)
    try:
        wait_for(lambda: list(made.glob("*/checkpoint/checkpoint.lock")), process)
        (actor,) = find_teaching_actors(process)
        actor.kill()
        out, err = process.communicate(timeout=400)
    finally:
        process.terminate()  # ends its Ray too
        process.communicate()
    assert process.returncode == 3 and out.startswith("5 of 6 are in made"), err
    assert "6 documents 100% 5 done, 1 failed" in err
    assert "line 6, x: text must be an existing file" in err
    assert not list(made.rglob("*.lock"))
    (failure,) = list_failures(made)
    assert teach(documents, "alone", unwrapped=True)[0].keys() == failure.keys()
    assert content(made) == content(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize(
    "address", ["auto", "127.0.0.1:9", "ray://127.0.0.1:9", "nowhere", ":6379", "a:b", "other"]
)
def test_a_ray_cluster_that_cannot_be_reached_is_one_line(address, run, tmp_path):
    pytest.importorskip("ray")
    write(tmp_path, count=1)
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as other:  # a server that never answers
        address = address.replace("other", f"127.0.0.1:{other.getsockname()[1]}")
        code, out, err = run("--manifest", "d.jsonl", "--library", "made", "--ray", address, *FAST)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: --ray must be a cluster that can be reached, got '{address}' (")
    assert err.count("\n") == 1 and not os.listdir(tmp_path / "made")
    assert time.monotonic() < began + 15
