"""Files: written whole or not at all."""

import errno
import json
import os
import shutil
import subprocess
import sys
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
    paths = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.relative_to(folder).as_posix(): path.read_text() for path in paths}
    return {name: text for name, text in names.items() if not name.startswith(".")}


def test_a_staged_folder_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "a" / "b"
    with staged(target) as folder:
        (folder / "file").write_text("whole")
        assert not target.exists()
        assert folder.parent == target.parent
    assert (target / "file").read_text() == "whole"
    assert [path.name for path in target.parent.iterdir()] == ["b"]


def fill(folder, text: str) -> None:
    for name in ("a", "b", "c/d"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_staging_keeps_other_files_and_replaces_its_own(tmp_path):
    fill(tmp_path, "old")
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "c" / "old").write_text("old")
    with staged(tmp_path) as folder:
        fill(folder, "new")
    assert contents(tmp_path) == {"a": "new", "b": "new", "c/d": "new", "notes": "mine"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "notes"]


def test_an_existing_folder_is_staged_inside_itself(tmp_path):
    volume = tmp_path / "volume"  # its parent may be another disk, or not writable
    volume.mkdir()
    with staged(volume) as folder:
        assert folder.parent == volume
        (folder / "file").write_text("whole")
    assert [path.name for path in volume.iterdir()] == ["file"]


RENAMES = 8  # one in, three old entries out, one to the next state, three new entries up


@pytest.mark.parametrize("last", range(RENAMES + 1))
def test_a_replacement_that_is_killed_leaves_old_or_new_and_is_finished_later(
    tmp_path, monkeypatch, last
):
    fill(tmp_path, "old")
    (tmp_path / "notes").write_text("mine")
    replace, count = os.replace, 0

    class Killed(BaseException):
        pass

    def count_down(source, target):
        nonlocal count
        count += os.path.lexists(source)
        if count > last:
            raise Killed
        replace(source, target)

    def interrupted():
        with staged(tmp_path) as folder:
            fill(folder, "new")

    monkeypatch.setattr(os, "replace", count_down)
    monkeypatch.setattr(
        shutil, "rmtree", lambda *args, **kwargs: None
    )  # a killed process cleans nothing up
    if last < RENAMES:
        with pytest.raises(Killed):
            interrupted()
    else:
        interrupted()
    monkeypatch.undo()
    found = contents(tmp_path)
    assert found.pop("notes") == "mine"
    assert len(set(found.values())) <= 1, "never both"
    finish_replacement(tmp_path)
    expected = "old" if last == 0 else "new"
    assert contents(tmp_path) == {"a": expected, "b": expected, "c/d": expected, "notes": "mine"}
    with staged(tmp_path) as folder:
        fill(folder, "newer")
    assert contents(tmp_path) == {"a": "newer", "b": "newer", "c/d": "newer", "notes": "mine"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_former_files_leave_with_the_replacement(tmp_path, monkeypatch):
    folder = tmp_path / "memory"
    for number, names in enumerate((["a", "b"], ["c"]), 1):
        with staged(folder) as new:
            for name in names:
                (new / name).write_text(f"{number}")
            drop_former(new, ["b", "none"] if number > 1 else ["none"])
    assert contents(folder) == {"a": "1", "c": "2"}
    assert sorted(os.listdir(folder)) == ["a", "c"]
    moves, replace = [], os.replace

    def stop(*paths):
        moves.append(paths)
        if len(moves) == 2:
            raise KeyboardInterrupt
        replace(*paths)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt), staged(folder) as new:
        (new / "a").write_text("3")
        drop_former(new, ["c"])
    finish_replacement(folder)
    assert contents(folder) == {"a": "3"}


def test_two_processes_can_finish_a_replacement(tmp_path, monkeypatch):
    """Another process finishes everything just before each rename of this one."""
    replace = os.replace
    for before in range(1, RENAMES):
        shutil.rmtree(tmp_path)
        fill(tmp_path, "old")
        count = 0

        def race(source, target, before=before):
            nonlocal count
            count += 1
            if count == before + 1:
                with monkeypatch.context() as other:
                    other.setattr(os, "replace", replace)
                    finish_replacement(tmp_path)
            replace(source, target)

        with monkeypatch.context() as patched, staged(tmp_path) as folder:
            fill(folder, "new")
            patched.setattr(os, "replace", race)
        monkeypatch.setattr(os, "replace", replace)
        assert contents(tmp_path) == {"a": "new", "b": "new", "c/d": "new"}, before


def test_a_killed_process_leaves_a_folder_that_the_next_one_sweeps(tmp_path):
    script = (
        "import os, sys; from files import staged\n"
        "with staged(sys.argv[1]) as folder:\n"
        "    (folder / 'half').write_text('half'); os._exit(9)\n"
    )
    package = Path(files.__file__).parent  # the module alone, in a process that starts at once
    for target in (tmp_path / "new", tmp_path):
        process = subprocess.run(
            [sys.executable, "-c", script, str(target)], env={"PYTHONPATH": str(package)}
        )
        assert process.returncode == 9
    mine = tmp_path / f".{os.getppid()}.partial"  # of a process that is alive
    mine.mkdir()
    assert len(list(tmp_path.glob(".*.partial"))) == 3
    for target in (tmp_path / "new", tmp_path):
        with staged(target) as folder:
            (folder / "file").write_text("whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [mine.name, "file", "new"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(tmp_path, error):
    with pytest.raises(type(error)), staged(tmp_path / "a" / "b" / "c") as folder:
        (folder / "half").write_text("half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_the_former_files(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(ValueError, match="no"), staged(tmp_path) as folder:
        (folder / "file").write_text("new")
        raise ValueError("no")
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


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
    assert [file.name for file in tmp_path.iterdir()] == ["value.json"]
    assert load_json(path)["a"] == [1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "must be an existing JSON file, got none: check the path"),
        ("{", "must be JSON (Expecting property name enclosed in double quotes: line 1 column 2 "),
        ("[" * 100_000, "must be JSON of ordinary depth, got deeper nesting: write it again"),
    ],
)
def test_what_is_no_json_is_one_line(tmp_path, content, message):
    path = tmp_path / "value.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError) as raised:
        load_json(path)
    assert str(raised.value).startswith(f"{str(path)!r} {message}")


def test_lists_of_numbers_take_one_line():
    assert (
        format_json({"a": [[1, 2.5], [3, 4]]}) == '{\n  "a": [\n    [1, 2.5],\n    [3, 4]\n  ]\n}'
    )
    assert json.loads(format_json([["[\n1]"]])) == [["[\n1]"]]


def test_a_drive_that_does_not_exist_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    with pytest.raises(ValueError, match="^--out must be on an existing drive, got '.*': choose"):
        check_output_directory("--out", tmp_path)


def test_outputs_are_checked_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    check_output_file("--json", tmp_path / "new.json")
    check_output_directory("--out", tmp_path / "new" / "deep")
    cases = [
        (check_output_file, "", "be a file, got the folder {}: name a file inside it"),
        (check_output_file, "no/f", "lie in an existing folder, got {}: make its folder first"),
        (check_output_directory, "file", "be a folder, got {} (file is a file): choose another"),
        (check_output_directory, "file/a", "be a folder, got {} (file is a file): choose another"),
        (
            check_output_directory,
            "link",
            "be a folder, got {} (link is a broken link): choose another",
        ),
    ]
    for check, path, message in cases:
        with pytest.raises(ValueError) as raised:
            check("--x", tmp_path / path)
        assert str(raised.value) == f"--x must {message}".format(repr(str(tmp_path / path)))


def test_a_replacement_follows_no_link_out_of_its_folder(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "keys").write_text("mine")
    memory = tmp_path / "memory"
    (memory / ".locas-staged").mkdir(parents=True)
    (memory / "keys").write_text("theirs")
    (memory / ".locas-staged" / "keys").write_text("new")
    (memory / ".locas-staged" / ".old").symlink_to(tmp_path / "home")
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
