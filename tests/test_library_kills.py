"""A library in which adding or forgetting is killed, at any file operation or moment, stays whole.

    LOCAS_KILLS=400 pytest tests/test_library_kills.py -m slow

The processes are those of `test_kills.py`. After each kill the library is opened: each memory that it lists is whole,
as before or as it shall be, and the others are unchanged byte for byte. Then the act is done again, and the folder is,
hidden files too, as without a kill.
"""

import functools
import os
import shutil
import signal
from pathlib import Path

import pytest
from test_kills import FOLDER, Campaign, contents, run_kills, started

from locas_peft import backbone
from locas_peft.library import Library
from locas_peft.memories import FILES, describe_memory
from locas_peft.selfstudy import Exchange
from locas_peft.stages import StudySettings

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "SIGKILL"), reason="this system cannot kill a process outright"
)

SETTINGS = StudySettings(r=2, window=64, max_tokens=40, anchor=0.0, passes=1)
NAMES = ("one", "two", "three")
CHANGED = {"add": "four", "go on": "one", "forget": "two"}
"""What is done, and the memory that it makes, replaces or deletes."""


@functools.cache
def load():
    return backbone.load()


def act(variant: str, folder: Path) -> None:
    """Do one of `CHANGED`, or what is left of it."""
    (base, tokenizer), library = load(), Library(folder)

    def add(name: str, **options) -> None:
        exchanges = [
            Exchange(f"Who built house {name}?", f"The old man built house {name} on the hill.")
        ]
        options |= {"exchanges": exchanges, "resume": True, "checkpoint_seconds": 0}
        text = f"The old man built house {name} on the hill, and the river took it. " * 3
        library.add(base, tokenizer, text, options.pop("into", name), SETTINGS, **options)

    if variant == "build":
        for name in NAMES:
            add(name)
    elif variant == "add":
        add("four")
    elif variant == "go on":
        add("six", into="one", start=folder / "one")
    elif variant == "forget" and "two" in library.list():
        library.forget("two")


class LibraryCampaign(Campaign):
    """Acts on a library of `NAMES`."""

    def prepare(self, variant: str, parent: Path) -> Path:
        parent.mkdir()
        if self.earlier.exists():
            shutil.copytree(self.earlier, parent / FOLDER)
        return parent / FOLDER

    def check(self, variant: str, folder: Path) -> None:
        """Check a library after a kill."""
        listed, changed = set(Library(folder).list()), CHANGED[variant]
        assert {*NAMES} - {changed} <= listed <= {*NAMES, changed}, f"{variant}: {sorted(listed)}"
        before, after, found = (
            self.contents_after("build"),
            self.contents_after(variant),
            contents(folder),
        )
        for name in listed:
            describe_memory(folder / name)
            wholes = [files_of(before, name)] + [files_of(after, name)] * (name == changed)
            mixed = f"{variant}: {name} is neither old nor new"
            assert files_of(found, name) in [each for each in wholes if each], mixed


def files_of(whole: dict[str, object], name: str) -> dict[str, object]:
    return {file: whole[f"{name}/{file}"] for file in FILES if f"{name}/{file}" in whole}


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    with started(LibraryCampaign, act, ["build", *CHANGED], tmp_path_factory) as campaign:
        yield campaign


@pytest.mark.slow
def test_a_library_stays_whole_whatever_is_killed(campaign, tmp_path):
    run_kills(campaign, int(os.environ.get("LOCAS_KILLS", 100)), 0, tmp_path)


@pytest.mark.slow
def test_the_kills_reach_every_act(campaign):
    assert {variant for variant, _ in campaign.operations} == {*CHANGED}
    assert len(campaign.operations) > 100
