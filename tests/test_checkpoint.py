"""A checkpoint is whole or not there, runs no code, and its folder has one writer."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from locas_peft.memories import checkpoint

STATE = {
    "position": 3,
    "loss": 0.1 + 0.2,
    "nan": [float("inf"), None, True],
    "name": "naïve",
    3: (torch.arange(6).reshape(2, 3).T, torch.tensor([1.0], dtype=torch.bfloat16), torch.empty(0)),
}


def make_program(text: str) -> list[str]:
    """A Python command line; `checkpoint` is loaded from its file, as the package itself takes seconds to import."""
    loading = f"""
        import importlib.util
        spec = importlib.util.spec_from_file_location("checkpoint", {checkpoint.__file__!r})
        checkpoint = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(checkpoint)
    """
    return [sys.executable, "-c", textwrap.dedent(loading) + textwrap.dedent(text)]


def assert_holds(directory, state: dict) -> None:
    def to_plain(state: dict) -> dict:
        return {**state, 3: [(tensor.dtype, tensor.tolist()) for tensor in state[3]]}

    assert to_plain(checkpoint.load(directory)) == to_plain(state)
    assert os.listdir(directory) == [checkpoint.CHECKPOINT]


def raise_full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_is_saved_is_loaded_bit_for_bit_and_replaced_as_a_whole(tmp_path):
    folder = tmp_path / "new" / "folder"
    assert checkpoint.save(folder, STATE) == folder / "checkpoint.pt"
    assert_holds(folder, STATE)
    checkpoint.save(folder, {**STATE, "position": 4})
    assert_holds(folder, {**STATE, "position": 4})


def test_no_checkpoint_is_none(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        assert checkpoint.load(folder) is None and not checkpoint.has_checkpoint(folder)


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_full_disk_leaves_the_former_checkpoint_and_nothing_else(tmp_path, monkeypatch, moment):
    checkpoint.save(tmp_path, STATE)
    monkeypatch.setattr(checkpoint.os, moment, raise_full_disk)
    message = (
        r"^checkpoint folder must be writable, got '.*' \(No space left on device\): free some"
    )
    with pytest.raises(OSError, match=message) as caught:
        checkpoint.save(tmp_path, {})
    assert caught.value.errno == errno.ENOSPC
    assert_holds(tmp_path, STATE)


@pytest.mark.skipif(os.name != "posix", reason="only POSIX limits the size of a process's files")
def test_a_limit_of_the_operating_system_leaves_the_former_checkpoint(tmp_path):
    """The real thing: the system refuses to write more in the middle of the file."""
    checkpoint.save(tmp_path, STATE)
    program = f"""
        import resource, sys, torch
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            checkpoint.save({str(tmp_path)!r}, {{"a": torch.zeros(100_000)}})
        except OSError as error:
            sys.exit(0 if str(error).startswith("checkpoint folder must be writable") else str(error))
        sys.exit("written")
    """
    subprocess.run(make_program(program), check=True, timeout=120)
    assert_holds(tmp_path, STATE)


@pytest.mark.parametrize(
    "use",
    [lambda folder: checkpoint.save(folder, {}), lambda folder: enter(checkpoint.locked(folder))],
)
def test_a_folder_that_is_a_file_is_named(tmp_path, use):
    (tmp_path / "file").write_text("")
    message = r"^checkpoint folder must be writable, got '.*file' \(File exists\): free some"
    with pytest.raises(OSError, match=message):
        use(tmp_path / "file")


def test_objects_are_refused(tmp_path):
    message = "^checkpoint must hold tensors and plain values, got a set in the optimizer's state: "
    with pytest.raises(ValueError, match=message):
        checkpoint.save(tmp_path, {"state": [{"value": {1}}]})
    assert os.listdir(tmp_path) == []


class Malicious:
    def __reduce__(self):
        return print, ("this code ran",)


def write(**content):
    """A change that writes another file of torch's."""
    return lambda path: torch.save(content, path)


KIND = {"kind": "locas-checkpoint"}
DAMAGED = "be whole, got the damaged file '{}' ("
TAMPERED = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-10]), DAMAGED),
    "empty": (lambda path: path.write_bytes(b""), DAMAGED),
    "code": (write(**KIND, version=10, state=Malicious()), DAMAGED),
    "foreign": (write(c=1), "be written by locas_peft, got '{}': choose another folder"),
    "version": (write(**KIND, version=2), "be of version 10, got 2 in '{}': load it with the loc"),
    "folder": (
        lambda path: (path.unlink(), path.mkdir()),
        "be a file, got '{}': remove it, or choose another folder",
    ),
}


@pytest.mark.parametrize(("tamper", "message"), TAMPERED.values(), ids=TAMPERED)
def test_damaged_and_foreign_files_are_named_and_run_no_code(tmp_path, capsys, tamper, message):
    path = checkpoint.save(tmp_path, STATE)
    tamper(path)
    with pytest.raises(ValueError) as caught:
        checkpoint.load(tmp_path)
    assert str(caught.value).startswith(f"checkpoint must {message.format(path)}")
    assert "\n" not in str(caught.value) and capsys.readouterr().out == ""


def test_links_are_not_followed(tmp_path):
    folder, names = tmp_path / "checkpoint", (checkpoint.UNFINISHED, checkpoint.CHECKPOINT)
    folder.mkdir()
    for name in names:
        (tmp_path / name).write_text("mine")
        (folder / name).symlink_to(tmp_path / name)
    checkpoint.save(folder, STATE)
    assert_holds(folder, STATE)
    assert [(tmp_path / name).read_text() for name in names] == ["mine", "mine"]


def test_what_a_killed_writer_left_is_removed_with_the_checkpoint(tmp_path):
    checkpoint.save(tmp_path, STATE)
    (tmp_path / checkpoint.UNFINISHED).write_bytes(b"half")
    checkpoint.remove(tmp_path)
    checkpoint.remove(tmp_path)
    assert os.listdir(tmp_path) == []


# Locks


def enter(lock):
    """Take a lock; return its holder, which frees it when it is dropped."""
    lock.__enter__()
    return lock


def is_locked(folder) -> bool:
    try:
        with checkpoint.locked(folder):
            return False
    except checkpoint.InUse:
        return True


def test_a_lock_keeps_a_second_writer_out_until_it_is_closed(tmp_path):
    folder = tmp_path / "new" / "folder"
    message = (
        "^checkpoint folder must have one writer, got .*folder', which another .*: wait for it"
    )
    with checkpoint.locked(folder) as held:
        assert held == folder
        with pytest.raises(checkpoint.InUse, match=message):
            enter(checkpoint.locked(folder))
    assert os.listdir(tmp_path) == [], "the folders that were made are removed"
    with checkpoint.locked(folder):
        checkpoint.save(folder, STATE)
    assert_holds(folder, STATE)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / checkpoint.LOCK).symlink_to(tmp_path / "precious.txt")
    with pytest.raises(OSError, match="^checkpoint folder must be writable, got "):
        enter(checkpoint.locked(tmp_path / "folder"))
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_holder_whose_folder_was_removed_leaves_the_next_ones_lock_alone(tmp_path):
    folder = tmp_path / "folder"
    former = enter(checkpoint.locked(folder))
    (folder / checkpoint.LOCK).unlink()
    later = enter(checkpoint.locked(folder))
    # A lock that is dropped is free.
    del former
    assert is_locked(folder)
    del later
    assert not is_locked(folder) and os.listdir(tmp_path) == []


def test_a_lock_needs_no_room_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", raise_full_disk)
    with checkpoint.locked(tmp_path / "folder") as folder:
        assert is_locked(folder)
    assert os.listdir(tmp_path) == []


def test_a_file_is_held_by_one_and_the_next_one_may_wait(tmp_path):
    path, order = tmp_path / "work.lock", []

    def wait() -> None:
        with checkpoint.held(path, wait=True):
            order.append("second")

    thread = threading.Thread(target=wait)
    with checkpoint.held(path):
        message = r"^'.*work\.lock' must have one holder, got another one: wait"
        with pytest.raises(checkpoint.InUse, match=message):
            enter(checkpoint.held(path))
        thread.start()
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"] and os.listdir(tmp_path) == []


@pytest.mark.skipif(
    not hasattr(signal, "SIGKILL"), reason="this system cannot kill a process outright"
)
def test_a_lock_dies_with_its_process(tmp_path):
    folder = tmp_path / "folder"
    program = f"""
        import time
        with checkpoint.locked({str(folder)!r}):
            print("locked", flush=True)
            time.sleep(600)
    """
    with subprocess.Popen(make_program(program), stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"locked\n"
            assert is_locked(folder)
        finally:
            holder.kill()
    assert os.listdir(folder) == [checkpoint.LOCK]
    assert not is_locked(folder) and os.listdir(tmp_path) == []
