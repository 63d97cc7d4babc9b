from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from locas_peft import checkpoint

STATE = {"position": 3, "loss": 0.1 + 0.2, "none": None, "name": "naïve"}


def make_program(text: str) -> list[str]:
    """A Python command line; `checkpoint` is loaded from its file, as the package itself takes seconds to import."""
    loading = f"""
        import importlib.util
        spec = importlib.util.spec_from_file_location("checkpoint", {checkpoint.__file__!r})
        checkpoint = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(checkpoint)
    """
    return [sys.executable, "-c", textwrap.dedent(loading) + textwrap.dedent(text)]


def make_tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "a": torch.full((2, 3), value),
        "b": torch.tensor([value], dtype=torch.bfloat16),
        "c": torch.arange(6).reshape(2, 3).T,
        "scalar": torch.tensor(value),
        "none": torch.empty(0),
    }


def assert_holds(directory, tensors, state):
    found_tensors, found_state = checkpoint.read(directory)
    assert found_state == state
    assert found_tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found_tensors[name].dtype == tensor.dtype and torch.equal(found_tensors[name], tensor)


def test_what_is_written_is_read_bit_for_bit(tmp_path):
    path = checkpoint.write(tmp_path / "new" / "folder", make_tensors(), STATE)
    assert path == tmp_path / "new" / "folder" / "checkpoint.safetensors"
    assert_holds(path.parent, make_tensors(), STATE)


def test_a_second_write_replaces_the_first_and_leaves_one_file(tmp_path):
    checkpoint.write(tmp_path, make_tensors(1.0), STATE)
    former, _ = checkpoint.read(tmp_path)
    checkpoint.write(tmp_path, make_tensors(2.0), {**STATE, "position": 4})
    assert_holds(tmp_path, make_tensors(2.0), {**STATE, "position": 4})
    assert torch.equal(former["a"], make_tensors(1.0)["a"])
    assert os.listdir(tmp_path) == ["checkpoint.safetensors"]


def test_no_checkpoint_reads_as_none(tmp_path):
    assert checkpoint.read(tmp_path) is None
    assert checkpoint.read(tmp_path / "missing") is None


@pytest.mark.parametrize("moment", ["save_file", "_bring_to_disk", "replace"])
@pytest.mark.parametrize(
    "failure",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")],
    ids=["OSError", "SafetensorError"],
)
def test_a_full_disk_leaves_the_former_checkpoint_and_nothing_else(tmp_path, monkeypatch, moment, failure):
    checkpoint.write(tmp_path, make_tensors(1.0), STATE)

    def fail(*args, **kwargs):
        if moment == "save_file":
            args[1].write_bytes(b"half")
        raise failure

    monkeypatch.setattr(checkpoint.os if moment == "replace" else checkpoint, moment, fail)
    with pytest.raises(OSError) as caught:
        checkpoint.write(tmp_path, make_tensors(2.0), STATE)
    reason = getattr(failure, "strerror", None) or str(failure)
    assert str(caught.value) == (
        f"checkpoint folder must be writable, got {str(tmp_path)!r} ({reason}): "
        "free some space or choose another folder; a former checkpoint stands as it was"
    )
    assert caught.value.errno == getattr(failure, "errno", None)
    monkeypatch.undo()
    assert_holds(tmp_path, make_tensors(1.0), STATE)
    assert os.listdir(tmp_path) == ["checkpoint.safetensors"]


@pytest.mark.skipif(
    os.name != "posix", reason="a process's file size is limited by the operating system on POSIX only"
)
def test_a_limit_of_the_operating_system_leaves_the_former_checkpoint(tmp_path):
    """The real thing: the system refuses to write more in the middle of the file."""
    checkpoint.write(tmp_path, make_tensors(1.0), STATE)
    program = f"""
        import resource, sys, torch
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            checkpoint.write({str(tmp_path)!r}, {{"a": torch.zeros(100_000)}}, {{}})
        except OSError as error:
            sys.exit(0 if str(error).startswith("checkpoint folder must be writable") else str(error))
        sys.exit("written")
    """
    subprocess.run(make_program(program), check=True, timeout=120)
    assert_holds(tmp_path, make_tensors(1.0), STATE)
    assert os.listdir(tmp_path) == ["checkpoint.safetensors"]


def test_a_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    message = (
        f"checkpoint folder must be writable, got {str(tmp_path / 'file')!r} (File exists): "
        "free some space or choose another folder; a former checkpoint stands as it was"
    )
    for use in (lambda folder: checkpoint.write(folder, {}, {}), checkpoint.Lock):
        with pytest.raises(OSError) as caught:
            use(tmp_path / "file")
        assert str(caught.value) == message


def test_what_is_no_file_is_named(tmp_path):
    (tmp_path / checkpoint.CHECKPOINT).mkdir()
    with pytest.raises(ValueError, match="^checkpoint must be a file, got .*: remove it, or choose another folder$"):
        checkpoint.read(tmp_path)


def test_damaged_and_foreign_files_are_named(tmp_path):
    def error() -> str:
        with pytest.raises(ValueError) as caught:
            checkpoint.read(tmp_path)
        return str(caught.value)

    path = checkpoint.write(tmp_path, make_tensors(), STATE)
    path.write_bytes(path.read_bytes()[:-10])
    assert error().startswith(f"checkpoint must be whole, got the damaged file {str(path)!r} (")
    assert error().endswith("): delete it to start afresh")
    path.write_bytes(b"")
    assert error().startswith(f"checkpoint must be whole, got the damaged file {str(path)!r} (")

    save_file(make_tensors() | {"c": torch.zeros(1)}, path)
    assert error() == f"checkpoint must be written by locas_peft, got {str(path)!r}: choose another folder"
    metadata = {"kind": "locas-checkpoint", "version": "3", "state": json.dumps(STATE)}
    save_file({"a": torch.zeros(1)}, path, metadata=metadata)
    assert error() == (
        f"checkpoint must be of version 2, got 3 in {str(path)!r}: "
        "read it with the locas_peft that wrote it, or delete it to start afresh"
    )


needs_locks = pytest.mark.skipif(checkpoint.fcntl is None, reason="this system has no flock")


@needs_locks
def test_a_lock_keeps_a_second_writer_out_until_it_is_released(tmp_path):
    lock = checkpoint.Lock(tmp_path / "new")
    with pytest.raises(ValueError) as caught:
        checkpoint.Lock(tmp_path / "new")
    assert str(caught.value) == (
        f"checkpoint folder must have one writer, got {str(tmp_path / 'new')!r} which process {os.getpid()} is using: "
        "wait for it, or choose another folder"
    )
    lock.release()
    lock.release()
    assert os.listdir(tmp_path / "new") == []
    checkpoint.Lock(tmp_path / "new").release()


@needs_locks
def test_a_holder_whose_folder_was_taken_away_leaves_the_next_ones_lock_alone(tmp_path):
    former = checkpoint.Lock(tmp_path / "new")
    (tmp_path / "new" / "checkpoint.lock").unlink()
    later = checkpoint.Lock(tmp_path / "new")
    former.release()
    with pytest.raises(checkpoint.InUse):
        checkpoint.Lock(tmp_path / "new")
    later.release()
    assert os.listdir(tmp_path / "new") == []


@needs_locks
def test_a_lock_needs_no_room_on_the_disk(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    lock = checkpoint.Lock(tmp_path)
    with pytest.raises(checkpoint.InUse, match="which process of unknown number is using"):
        checkpoint.Lock(tmp_path)
    lock.release()
    assert os.listdir(tmp_path) == []


def test_what_a_killed_writer_left_is_removed_with_the_checkpoint(tmp_path):
    checkpoint.write(tmp_path, make_tensors(), STATE)
    (tmp_path / checkpoint.UNFINISHED).write_bytes(b"half")
    checkpoint.remove(tmp_path)
    checkpoint.remove(tmp_path)
    assert os.listdir(tmp_path) == []


@needs_locks
def test_a_lock_dies_with_its_process(tmp_path):
    program = f"""
        import time
        lock = checkpoint.Lock({str(tmp_path)!r})
        print("locked", flush=True)
        time.sleep(600)
    """
    with subprocess.Popen(make_program(program), stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"locked\n"
            with pytest.raises(ValueError, match=f"which process {holder.pid} is using"):
                checkpoint.Lock(tmp_path)
        finally:
            holder.send_signal(signal.SIGKILL)
    assert os.listdir(tmp_path) == ["checkpoint.lock"]
    checkpoint.Lock(tmp_path).release()
    assert os.listdir(tmp_path) == []
