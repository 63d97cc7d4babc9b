"""Units and their sharing: each result is made once, by the processes of a launcher, of which any may be killed."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from test_kills import without_times

from locas_command import program as cli
from locas_peft import processes
from locas_peft.evaluation import Run, Unit, run_units, runs
from locas_peft.memories.checkpoint import InUse
from locas_peft.stages import ReadSettings

TEXTS = {
    "long": "The door of the house was old, and nobody went there. " * 12,
    "short": "He came from the sea and said nothing of it to her.",
}
FAST = ["--window", "32", "--stride", "16", "--r", "4", "--device", "cpu"]


def make_units(folder, count: int, made: list) -> list[Unit]:
    def make(number: int) -> dict:
        made.append(number)
        return {"number": number}

    return [Unit(folder / f"{number}.json", partial(make, number)) for number in range(count)]


def test_each_result_is_made_once_and_what_exists_is_left(tmp_path):
    (tmp_path / "2.json").write_text("{}")
    made, shown = [], []

    def progress(description: str, total: int):
        shown.append((description, total))
        return lambda steps, note="": shown.append((steps, note))

    run_units(make_units(tmp_path, 4, made), progress)
    run_units(make_units(tmp_path, 4, made))
    assert made == [0, 1, 3] and (tmp_path / "2.json").read_text() == "{}"
    assert shown == [("3 results", 3), (1, "2 left"), (1, "1 left"), (1, "0 left")]
    names = ["0.json", "1.json", "2.json", "3.json"]
    assert sorted(os.listdir(tmp_path)) == names, "no lock is left"


def test_a_unit_waits_for_the_one_that_it_needs_also_if_the_table_lacks_it(tmp_path):
    made = []
    first, second, third = make_units(tmp_path, 3, made)
    second = dataclasses.replace(second, needs=third)
    run_units([dataclasses.replace(first, needs=second), second])
    assert made == [2, 1, 0]


def test_an_error_frees_the_unit_and_leaves_what_was_made(tmp_path):
    made = []
    units = make_units(tmp_path, 3, made)

    def fail() -> dict:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="^the disk is full$"):
        run_units([units[0], Unit(units[1].path, fail), units[2]])
    assert os.listdir(tmp_path) == ["0.json"]
    run_units(units)
    assert made == [0, 1, 2]


@pytest.fixture
def as_process(monkeypatch):
    """Lets this process be one of several, which decide alike what each of them makes."""

    def set_process(index: int, count: int) -> None:
        state = SimpleNamespace(is_main_process=True, num_processes=count, process_index=index)
        state.wait_for_everyone = lambda: None
        monkeypatch.setattr(processes, "join_processes", lambda: state)
        monkeypatch.setattr(processes, "broadcast_object_list", lambda values: values)

    return set_process


def test_shares_are_whole_and_of_nearly_the_same_size(as_process):
    sizes = [1, 9, 3, 1, 8, 2, 7]
    pieces, sums = [], []
    for index in range(3):
        as_process(index, 3)
        share = processes.take_share(range(7), lambda piece: sizes[piece])
        assert share == sorted(share)
        pieces += share
        sums.append(sum(sizes[piece] for piece in share))
    assert sorted(pieces) == list(range(7))
    assert sorted(sums) == [8, 10, 13]
    as_process(4, 5)
    assert processes.take_share([1, 2], lambda piece: piece) == []


def test_a_unit_is_made_by_the_process_that_makes_what_it_needs(tmp_path, as_process):
    shares = []
    for index in range(2):
        made = []
        units = make_units(tmp_path / str(index), 6, made)
        for number in range(3):
            units[number + 3] = dataclasses.replace(units[number + 3], needs=units[number])
        as_process(index, 2)
        run_units(units)
        shares.append(sorted(made))
    assert sorted(shares) == [[0, 2, 3, 5], [1, 4]]


def test_an_error_of_the_first_process_is_raised_in_all(as_process):
    def fail() -> None:
        raise InUse("in use")

    as_process(1, 2)
    with pytest.raises(InUse, match="^in use$"):
        processes.in_first_process(fail)
    assert processes.in_first_process(lambda: 5) == 5


def test_a_unit_of_another_command_is_refused_and_what_a_killed_one_left_is_removed(tmp_path):
    made = []
    (unit,) = make_units(tmp_path, 1, made)
    with FileLock(unit.lock), pytest.raises(InUse, match="must have one holder"):
        run_units([unit])
    for _ in ("before its result", "after its result"):
        unit.checkpoint.mkdir(parents=True)
        for file in (unit.lock, unit.unfinished, unit.checkpoint / "checkpoint.pt"):
            file.touch()
        run_units([unit])
        assert made == [0] and os.listdir(tmp_path) == ["0.json"]


# ---------------------------------------------------------------------- the record of a run


def open_as(folder, units, overwrite=False, methods=None, common=None, **settings) -> dict:
    """Open a run, and return its record; the tests make the results themselves."""
    methods = methods or {"lora": ReadSettings(method="lora", **settings)}
    run = Run(None, None, methods, folder, {"model": "m", **(common or {})}, overwrite)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "run_units", lambda units, progress: None)
        run.make("work", units)
    return json.loads((folder / "work" / "run.json").read_text())


def test_a_folder_of_another_run_is_refused(tmp_path):
    units = make_units(tmp_path / "work", 2, [])
    open_as(tmp_path, units)
    open_as(tmp_path, units, r=8)  # without a result a record binds nobody
    run_units(units)
    open_as(tmp_path, units, r=8)
    for changed, message in (
        ({"r": 16}, "lora: r must be 8 as in the results in '.*', got 16: choose another folder"),
        (
            {"r": 8, "common": {"data": {"sha": "1"}}},
            "data must be None as in .*, got {'sha': '1'}",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}.*, or give --overwrite$"):
            open_as(tmp_path, units, **changed)
    more = [Unit(tmp_path / "work" / "3.json", dict)]
    run = open_as(tmp_path, more, methods={"other": ReadSettings(method="none")})
    assert run["methods"].keys() == {"lora", "other"}, "methods may be added"
    assert run["files"] == ["0.json", "1.json", "3.json"]


def test_a_checkpoint_binds_and_a_stale_lock_does_not(tmp_path):
    unit = Unit(tmp_path / "work" / "lora" / "book.json", dict)
    folder = unit.checkpoint
    open_as(tmp_path, [unit])
    folder.mkdir(parents=True)
    (folder / "checkpoint.lock").touch()
    (unit.path.parent / "book.json.lock").touch()
    open_as(tmp_path, [unit], r=8)
    (folder / "checkpoint.pt").touch()
    with pytest.raises(ValueError, match="^lora: r must be 8 as in the results in"):
        open_as(tmp_path, [unit], r=16)


def test_overwrite_removes_the_results_of_the_run_and_no_other_file(tmp_path):
    folder = tmp_path / "work"
    units = [Unit(folder / "lora" / f"{name}.json", dict) for name in ("book", "other")]
    open_as(tmp_path, units)
    run_units(units)
    ours = ("lora/book/adapter_config.json", "lora/book/record.json")
    foreign = ("notes.json", "lora/book/notes.txt", "lora/2/x.json")
    unfinished = units[1].checkpoint / "checkpoint.pt"
    for file in (*(folder / name for name in ours + foreign), unfinished):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("something")
    run = open_as(tmp_path, units[:1], overwrite=True, r=16)
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {folder / name for name in ("run.json", *foreign)}
    assert run["files"] == ["lora/book.json"] and run["methods"]["lora"]["r"] == 16


def test_a_record_cannot_name_files_outside_its_folder(tmp_path):
    units = make_units(tmp_path / "work", 1, [])
    run = open_as(tmp_path, units)
    outside = [tmp_path / "mine.json", tmp_path / "work.json"]
    for file in outside:
        file.write_text("{}")
    run["files"] = ["../mine.json", str(outside[1])]
    (tmp_path / "work" / "run.json").write_text(json.dumps(run))
    open_as(tmp_path, units, overwrite=True)
    assert all(file.exists() for file in outside)


@pytest.mark.parametrize("lock", ["run.lock", "1.json.lock"])
def test_a_second_run_in_the_folder_is_refused(lock, tmp_path):
    units = make_units(tmp_path / "work", 2, [])
    open_as(tmp_path, units)
    run_units(units)
    with FileLock(tmp_path / "work" / lock), pytest.raises(InUse, match="must have one holder"):
        open_as(tmp_path, units, overwrite=True)
    assert units[1].path.exists()
    open_as(tmp_path, units, overwrite=True)
    assert not units[1].path.exists()


# ---------------------------------------------------------------------- commands


def find_free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.slow
def test_two_processes_give_the_figures_of_one_bit_for_bit(tmp_path, monkeypatch, capsys):
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    arguments = ["perplexity", "long.txt", "short.txt", "--method", "none,lora,locas-glu", *FAST]
    monkeypatch.chdir(tmp_path)
    # Sums depend on the number of threads: as many as in this process.
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launcher += ["--main_process_port", str(find_free_port()), "-m", "locas_peft", "eval"]
    command = [sys.executable, *launcher, *arguments, "--out", "two", "--overwrite"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.count("all tokens") == 1, done.stderr

    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", *arguments, "--out", "one"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == done.stdout.replace("two", "one")
    one, two = (
        json.loads((tmp_path / name / "perplexity.json").read_text()) for name in ("one", "two")
    )
    assert without_times(one) == without_times(two)
    assert one["readings"]["locas-glu"]["long"]["nll_nats"] > 0
    assert not list((tmp_path / "two").rglob("*.lock"))
    assert not list((tmp_path / "two").rglob("checkpoint"))
