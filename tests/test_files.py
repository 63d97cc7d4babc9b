"""Files: written whole or not at all."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from safetensors import SafetensorError

from locas_peft import files
from locas_peft.files import (
    check_output_directory,
    check_output_file,
    drop_former,
    finish_replacement,
    format_json,
    is_disk_full,
    load_json,
    staged,
    write_json,
)


def contents(folder) -> dict[str, str]:
    """The visible files of a folder, subfolders included."""
    visible = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith("."):
            visible[name] = path.read_text()
    return visible


def test_a_staged_folder_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "a" / "b"
    with staged(target) as folder:
        (folder / "file").write_text("whole")
        assert not target.exists()
        assert folder.parent == target.parent
    assert (target / "file").read_text() == "whole"
    assert os.listdir(target.parent) == ["b"]


def fill(folder, text: str) -> None:
    for name in ("a", "b", "c/d"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def filled(text: str) -> dict[str, str]:
    return dict.fromkeys(("a", "b", "c/d"), text)


def test_staging_keeps_other_files_and_replaces_its_own(tmp_path):
    fill(tmp_path, "old")
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "c" / "old").write_text("old")
    with staged(tmp_path) as folder:
        # The folder's parent may be another disk, or not writable.
        assert folder.parent == tmp_path
        fill(folder, "new")
    assert contents(tmp_path) == {**filled("new"), "notes": "mine"}
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c", "notes"]


RENAMES = 8  # one in, three old entries out, one to the next state, three new entries up


class Killed(BaseException):
    pass


def killed_at(number: int):
    """Return an `os.replace` that ends the process before the rename of a number."""
    replace, count = os.replace, 0

    def count_down(source, target):
        nonlocal count
        count += os.path.lexists(source)
        if count >= number:
            raise Killed
        replace(source, target)

    return count_down


@pytest.mark.parametrize("last", range(RENAMES + 1))
def test_a_replacement_that_is_killed_leaves_old_or_new_and_is_finished_later(
    tmp_path, monkeypatch, last
):
    fill(tmp_path, "old")
    (tmp_path / "notes").write_text("mine")
    expectation = pytest.raises(Killed) if last < RENAMES else nullcontext()
    with monkeypatch.context() as patched, expectation:
        patched.setattr(os, "replace", killed_at(last + 1))
        # A killed process cleans nothing up.
        patched.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
        with staged(tmp_path) as folder:
            fill(folder, "new")
    found = contents(tmp_path)
    assert found.pop("notes") == "mine"
    assert len(set(found.values())) <= 1, "never both"
    finish_replacement(tmp_path)
    expected = filled("old" if last == 0 else "new")
    assert contents(tmp_path) == {**expected, "notes": "mine"}
    with staged(tmp_path) as folder:
        fill(folder, "newer")
    assert contents(tmp_path) == {**filled("newer"), "notes": "mine"}
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c", "notes"]


def test_former_files_leave_with_the_replacement(tmp_path, monkeypatch):
    folder = tmp_path / "memory"
    with staged(folder) as new:
        fill(new, "old")
        drop_former(new, ["none"])
    with staged(folder) as new:
        (new / "e").write_text("new")
        drop_former(new, ["b", "none"])
    assert contents(folder) == {"a": "old", "c/d": "old", "e": "new"}
    assert sorted(os.listdir(folder)) == ["a", "c", "e"]
    monkeypatch.setattr(os, "replace", killed_at(2))
    with pytest.raises(Killed), staged(folder) as new:
        (new / "a").write_text("newer")
        drop_former(new, ["e"])
    monkeypatch.undo()
    finish_replacement(folder)
    assert contents(folder) == {"a": "newer", "c/d": "old"}


@pytest.mark.parametrize("before", range(1, RENAMES))
def test_two_processes_can_finish_a_replacement(tmp_path, monkeypatch, before):
    """Another process finishes everything just before a rename of this one."""
    fill(tmp_path, "old")
    replace, count = os.replace, 0

    def race(source, target):
        nonlocal count
        count += 1
        if count == before + 1:
            with monkeypatch.context() as other:
                other.setattr(os, "replace", replace)
                finish_replacement(tmp_path)
        replace(source, target)

    with staged(tmp_path) as folder:
        fill(folder, "new")
        monkeypatch.setattr(os, "replace", race)
    assert contents(tmp_path) == filled("new")


def test_a_killed_process_leaves_a_folder_that_the_next_one_sweeps(tmp_path):
    script = (
        "import os, sys; from files import staged\n"
        "with staged(sys.argv[1]) as folder:\n"
        "    (folder / 'half').write_text('half'); os._exit(9)\n"
    )
    # The module alone, in a process that starts at once.
    environment = {"PYTHONPATH": str(Path(files.__file__).parent)}
    for target in (tmp_path / "new", tmp_path):
        command = [sys.executable, "-c", script, str(target)]
        assert subprocess.run(command, env=environment).returncode == 9
    # Of a process that is alive.
    mine = tmp_path / f".{os.getppid()}.partial"
    mine.mkdir()
    assert len(os.listdir(tmp_path)) == 3
    for target in (tmp_path / "new", tmp_path):
        with staged(target) as folder:
            (folder / "file").write_text("whole")
    assert sorted(os.listdir(tmp_path)) == [mine.name, "file", "new"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_failure_leaves_what_was_there(tmp_path, error):
    (tmp_path / "file").write_text("old")
    for target in (tmp_path, tmp_path / "a" / "b" / "c"):
        with pytest.raises(type(error)), staged(target) as folder:
            (folder / "file").write_text("new")
            raise error
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_errors_of_the_disk_in_safetensors_are_os_errors(tmp_path):
    with pytest.raises(OSError) as raised, staged(tmp_path / "memory"):
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == str(tmp_path / "memory")
    assert is_disk_full(raised.value)


def test_a_file_of_the_longest_name_is_written(tmp_path):
    path = tmp_path / f"{'j' * 250}.json"
    write_json(path, {"a": 1})
    assert load_json(path) == {"a": 1}
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "nowhere" / "x.json")
    with pytest.raises(ValueError, match="^--json must lie in an existing folder, got "):
        check_output_file("--json", link)


def test_json_is_written_in_one_step(tmp_path, monkeypatch):
    path = tmp_path / "value.json"
    write_json(path, {"a": [1, 2], "b": float("nan"), 3: float("inf"), "c": "[\n1]"})
    assert load_json(path) == {"a": [1, 2], "b": None, "3": None, "c": "[\n1]"}

    def fill(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fill)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {})
    assert os.listdir(tmp_path) == ["value.json"]
    assert load_json(path)["a"] == [1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "must be an existing JSON file, got none: check the path"),
        (
            "{",
            r"must be JSON \(Expecting property name enclosed in double quotes: line 1 column 2 ",
        ),
        ("[" * 100_000, "must be JSON of ordinary depth, got deeper nesting: write it again"),
    ],
)
def test_what_is_no_json_is_one_line(tmp_path, content, message):
    path = tmp_path / "value.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=f"^'{path}' {message}"):
        load_json(path)


def test_lists_of_numbers_take_one_line():
    formatted = format_json({"a": [[1, 2.5], [3, 4]]})
    assert formatted == '{\n  "a": [\n    [1, 2.5],\n    [3, 4]\n  ]\n}'
    assert json.loads(format_json([["[\n1]"]])) == [["[\n1]"]]


def test_a_drive_that_does_not_exist_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    with pytest.raises(ValueError, match="^--out must be on an existing drive, got '.*': choose"):
        check_output_directory("--out", tmp_path)


def test_outputs_are_checked_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    check_output_file("--x", tmp_path / "new.json")
    check_output_directory("--x", tmp_path / "new" / "deep")
    for check, path, rule, remedy in (
        (check_output_file, "", "be a file, got the folder", ": name a file inside it"),
        (check_output_file, "no/f", "lie in an existing folder, got", ": make its folder first"),
        (check_output_directory, "file", "be a folder, got", " (file is a file): choose another"),
        (check_output_directory, "file/a", "be a folder, got", " (file is a file): choose another"),
        (check_output_directory, "link", "be a folder, got", " (link is a broken link): choose "),
    ):
        path = str(tmp_path / path)
        with pytest.raises(ValueError, match=re.escape(f"--x must {rule} {path!r}{remedy}")):
            check("--x", path)


def test_a_replacement_follows_no_link_out_of_its_folder(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "keys").write_text("mine")
    memory = tmp_path / "memory"
    complete = memory / ".locas-staged"
    complete.mkdir(parents=True)
    (memory / "keys").write_text("theirs")
    (complete / "keys").write_text("new")
    (complete / ".old").symlink_to(tmp_path / "home")
    finish_replacement(memory)
    assert (tmp_path / "home" / "keys").read_text() == "mine"
    assert (memory / "keys").read_text() == "theirs"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
def test_a_link_to_a_result_stays_and_a_device_is_refused(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "there" / "result.json")
    write_json(tmp_path / "link.json", [1])
    write_json(tmp_path / "link.json", [2])
    assert (tmp_path / "link.json").is_symlink()
    assert load_json(tmp_path / "there" / "result.json") == [2]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="^--json must be a plain file, got the device '.*': name"):
        check_output_file("--json", tmp_path / "pipe")
