"""Files: written whole or not at all."""

from __future__ import annotations

import errno
import json
import os

import pytest
from safetensors import SafetensorError

from locas_peft.files import check_output_directory, check_output_file, format_json, is_disk_full, staged, write_json


def test_a_staged_folder_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "a" / "b"
    with staged(target) as folder:
        (folder / "file").write_text("whole")
        assert not target.exists()
        assert folder.parent == target.parent
    assert (target / "file").read_text() == "whole"
    assert [path.name for path in target.parent.iterdir()] == ["b"]


def test_staging_keeps_other_files_and_replaces_its_own(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").write_text("old")
    with staged(tmp_path) as folder:
        (folder / "file").write_text("new")
        (folder / "folder").mkdir()
        (folder / "folder" / "new").write_text("new")
    assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "notes").read_text() == "mine"
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["new"]


def test_an_existing_folder_is_staged_inside_itself(tmp_path):
    volume = tmp_path / "volume"  # its parent may be another disk, or not writable
    volume.mkdir()
    with staged(volume) as folder:
        assert folder.parent == volume
        (folder / "file").write_text("whole")
    assert [path.name for path in volume.iterdir()] == ["file"]


def test_the_last_entry_moves_last(tmp_path, monkeypatch):
    moved = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: (moved.append(target.name), replace(source, target)))
    with staged(tmp_path, last="a") as folder:
        for name in "abc":
            (folder / name).write_text(name)
    assert moved == ["b", "c", "a"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(tmp_path, error):
    with pytest.raises(type(error)), staged(tmp_path / "a" / "b" / "c") as folder:
        (folder / "half").write_text("half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_what_was_there(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(ValueError, match="no"), staged(tmp_path) as folder:
        (folder / "file").write_text("new")
        raise ValueError("no")
    assert (tmp_path / "file").read_text() == "old"
    assert list(tmp_path.parent.glob(".*partial")) == []


def test_errors_of_the_disk_in_safetensors_are_os_errors(tmp_path):
    with pytest.raises(OSError) as raised, staged(tmp_path / "memory"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == str(tmp_path / "memory")
    assert is_disk_full(raised.value)


def test_json_is_written_in_one_step(tmp_path, monkeypatch):
    path = tmp_path / "value.json"
    write_json(path, {"a": [1, 2], "b": float("nan"), 3: float("inf"), "c": "[\n1]"})
    assert json.loads(path.read_text()) == {"a": [1, 2], "b": None, "3": None, "c": "[\n1]"}

    def fill(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fill)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {})
    assert [file.name for file in tmp_path.iterdir()] == ["value.json"]
    assert json.loads(path.read_text())["a"] == [1, 2]


def test_lists_of_numbers_take_one_line():
    assert format_json({"a": [[1, 2.5], [3, 4]]}) == '{\n  "a": [\n    [1, 2.5],\n    [3, 4]\n  ]\n}'


def test_places_are_checked_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    check_output_file("--json", tmp_path / "new.json")
    check_output_directory("--out", tmp_path / "new" / "deep")
    here, file_in_the_way = tmp_path, "--x must be a folder, got {} (file is a file): choose another"
    cases = [
        (check_output_file, here, "--x must be a file, got the folder {}: name a file inside it"),
        (
            check_output_file,
            here / "no" / "f",
            "--x must lie in an existing folder, got {}: make its folder first",
        ),
        (check_output_directory, here / "file", file_in_the_way),
        (
            check_output_directory,
            tmp_path / "file" / "a",
            "--x must be a folder, got {} (file is a file): choose another",
        ),
    ]
    for check, path, message in cases:
        with pytest.raises(ValueError) as raised:
            check("--x", path)
        assert str(raised.value) == message.format(repr(str(path)))
