"""Several processes on one run: tasks are shared out, failures are told once, and the figures stay the same."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from torch.distributed import HashStore

from locas_peft import cli
from locas_peft.studies.run import ALONE, Task, do_tasks
from locas_peft.studies.sharing import Processes, join, share_out

TEXTS = {
    "long": "The door of the house was old, and nobody went there. " * 12,
    "short": "He came from the sea and said nothing of it to her.",
}
FAST = ["--window", "32", "--stride", "16", "--width", "4", "--device", "cpu"]
TIMES = ("seconds", "tokens_per_second", "peak_bytes")


def run_threads(work, count: int = 2) -> list:
    """Runs `work(processes)` in threads that stand for processes; gives what each returned or raised."""
    store, results = HashStore(), [None] * count

    def run(index: int) -> None:
        try:
            results[index] = work(Processes(index, count, store=store))
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "a process was left hanging"
    return results


def test_shares_hold_each_task_once_and_weigh_about_the_same():
    costs = [3.0, 1.0, 9.0, 4.0, 4.0, 2.0, 5.0]
    for count in (1, 2, 3, 10):
        shares = share_out(costs, count)
        assert sorted(task for share in shares for task in share) == list(range(len(costs)))
        loads = [sum(costs[task] for task in share) for share in shares]
        assert max(loads) - min(loads) <= max(costs)
        assert shares == share_out(costs, count)
    assert share_out(costs, 1) == [list(range(len(costs)))]
    assert share_out(costs, 2) == [[1, 2, 4], [0, 3, 5, 6]], "the dearest first: 9 + 4 + 1 and 5 + 4 + 3 + 2"
    assert share_out([], 2) == [[], []]


def test_a_process_on_its_own_needs_nobody():
    assert ALONE.share([1, 1]) == [0, 1]
    assert ALONE.from_main(lambda: "value") == "value"
    ALONE.wait()
    with pytest.raises(ValueError, match="no"), ALONE.together():
        raise ValueError("no")


def test_what_the_main_process_finds_goes_to_all():
    asked = []

    def work(processes):
        first = processes.from_main(lambda: (asked.append(processes.index), [1, "two"])[1])
        second = processes.from_main(lambda: None)
        processes.wait()
        return first, second

    assert run_threads(work, 3) == [([1, "two"], None)] * 3
    assert asked == [0]


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}])
def test_a_failure_is_told_once_and_ends_all(failing):
    def work(processes):
        with processes.together():
            if processes.index in failing:
                raise ValueError(f"of process {processes.index}")

    results = run_threads(work)
    first = min(failing)
    assert str(results[first]) == f"of process {first}" and isinstance(results[first], ValueError)
    assert isinstance(results[1 - first], SystemExit) and results[1 - first].code == 2


def test_a_failure_in_the_main_process_alone_ends_all():
    def work(processes):
        return processes.from_main(lambda: {}["missing"])

    results = run_threads(work)
    assert isinstance(results[0], KeyError) and isinstance(results[1], SystemExit)


def make_tasks(folder, number: int, do=lambda path: path.write_text("done")) -> list[Task]:
    paths = [folder / str(n) for n in range(number)]
    return [Task(path.exists, lambda path=path: do(path)) for path in paths]


def test_tasks_are_done_once_each_and_what_is_done_is_left(tmp_path):
    (tmp_path / "2").write_text("before")
    begun, done = [], []

    def work(processes):
        def do(path):
            done.append((processes.index, path.name))
            path.write_text("done")

        do_tasks(make_tasks(tmp_path, 5, do), lambda: begun.append(processes.index), processes)
        return sorted(path.name for path in tmp_path.iterdir())

    assert run_threads(work) == [list("01234")] * 2, "none returns before all is done"
    assert begun == [0]
    assert sorted(name for _, name in done) == list("0134")
    assert {index for index, _ in done} == {0, 1}
    assert (tmp_path / "2").read_text() == "before"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_fails_leaves_nobody_waiting_and_what_was_done(tmp_path, failing):
    def work(processes):
        def do(path):
            if processes.index == failing:
                raise OSError("the disk is full")
            path.write_text("done")

        do_tasks(make_tasks(tmp_path, 4, do), lambda: None, processes)

    results = run_threads(work)
    assert isinstance(results[failing], OSError)
    assert isinstance(results[1 - failing], SystemExit) and results[1 - failing].code == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_the_main_process_shows_how_far_all_are(tmp_path):
    shown = []

    def work(processes):
        def start(description, total):
            return lambda steps, note="": shown.append((processes.index, description, total, steps, note))

        def do(path):
            time.sleep(1.1 * processes.index)
            path.write_text("done")

        do_tasks(make_tasks(tmp_path, 2, do), lambda: None, processes, start)

    run_threads(work)
    assert {(index, description, total) for index, description, total, _, _ in shown} == {(0, "2 processes", 2)}
    assert sum(steps for *_, steps, _ in shown) == 2 and shown[-1][-1] == "0 tasks left"


# ---------------------------------------------------------------------- commands


def test_nothing_launched_is_a_process_on_its_own(monkeypatch):
    for name in [name for name in os.environ if name.startswith("ACCELERATE_") or name == "LOCAL_RANK"]:
        monkeypatch.delenv(name)
    assert join() == Processes()


@pytest.mark.parametrize("index", [0, 1])
def test_commands_that_cannot_share_refuse_in_one_line(index, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(index))
    with pytest.raises(SystemExit) as ended:
        cli.main(["memorize", "text.txt", "--out", "memory"])
    line = (
        "error: this command must run in one process, got 2: start it without a launcher; "
        "what several can share is locas eval\n"
    )
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "" if index else line)


def test_accelerate_that_started_one_process_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    with pytest.raises(SystemExit):
        cli.main(["eval", "perplexity", "none.txt", "--device", "cpu"])
    remark, error = capsys.readouterr().err.splitlines()
    assert remark.startswith("accelerate launch --cpu has started one process: ")
    assert error.startswith("error: text must be an existing file, got 'none.txt'")


def launch(*args, folder) -> list[tuple[int, str, str]]:
    """Runs `locas eval` in two processes, with what `torchrun` sets; gives code, stdout and stderr of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "locas_peft", "eval", *map(str, args)],
            cwd=folder,
            env={**os.environ, **shared, "OMP_NUM_THREADS": "1", "RANK": str(index), "LOCAL_RANK": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        return [(*process.communicate(timeout=600), process.returncode)[::-1] for process in processes]
    finally:
        for process in processes:
            process.kill()


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return value


def test_two_processes_give_the_figures_of_one_bit_for_bit(tmp_path, monkeypatch, capsys):
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    arguments = ["perplexity", "long.txt", "short.txt", "--method", "none,lora,locas-glu", *FAST]
    (code, err, out), (other_code, other_err, other_out) = launch(*arguments, "--out", "two", folder=tmp_path)
    assert (code, other_code) == (0, 0), (err, other_err)
    assert (other_err, other_out) == ("", ""), "one table, one display"
    assert out.count("all tokens") == 1 and "2 processes" in err

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", *arguments, "--out", "one"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == out.replace("two", "one")
    one, two = (json.loads((tmp_path / name / "perplexity.json").read_text()) for name in ("one", "two"))
    assert without_times(one) == without_times(two)
    assert one["readings"]["locas-glu"]["long"]["nll_nats"] > 0


@pytest.mark.slow
def test_bad_input_of_two_processes_is_one_line(tmp_path):
    (code, err, out), other = launch("perplexity", "none.txt", folder=tmp_path)
    assert (code, out) == (2, "") and other == (2, "", "")
    assert err == ("error: text must be an existing file, got 'none.txt': check the path, or give - to read stdin\n")
    assert list(tmp_path.iterdir()) == []
