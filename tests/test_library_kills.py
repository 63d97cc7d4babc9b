"""A library in which adding, forgetting or consolidating is killed, at any file operation or moment, stays whole.

    LOCAS_KILLS=400 pytest tests/test_library_kills.py -m slow

The processes are those of `test_kills.py`. After each kill the library is opened: each memory that it lists is whole,
as before or as it shall be, and the others are unchanged byte for byte. Then the act is done again, and the folder is,
hidden files too, as without a kill.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from test_kills import Campaign, contents, list_differences, serve

from locas_peft import backbone
from locas_peft.library import Library
from locas_peft.memories import FILES, describe_memory
from locas_peft.reading import ReadingSettings
from locas_peft.selfstudy import Exchange

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system cannot kill a process outright")

SHORT = {"r": 2, "window": 64, "stride": 16, "max_tokens": 40, "anchor": 0.0}
SETTINGS = ReadingSettings(**SHORT, study=True, passes=1)
NAMES = ("one", "two", "three")
CHANGED = {"add": "four", "beside": "five", "go on": "one", "forget": "two", "consolidate": "all"}
"""What is done, and the memory that it makes, replaces or deletes."""
FOLDER = "library"


@functools.cache
def load():
    return backbone.load()


def act(variant: str, folder: Path) -> None:
    """Do one of `CHANGED`, or what is left of it."""
    (base, tokenizer), library = load(), Library(folder)

    def add(name: str, **options) -> None:
        exchanges = [Exchange(f"Who built house {name}?", f"The old man built house {name} on the hill.")]
        options |= {"exchanges": exchanges, "resume": True, "checkpoint_seconds": 0}
        text = f"The old man built house {name} on the hill, and the river took it. " * 3
        library.add(base, tokenizer, text, options.pop("into", name), SETTINGS, **options)

    if variant == "build":
        for name in NAMES:
            add(name)
    elif variant == "add":
        add("four")
    elif variant == "beside":
        add("five", beside=["one"])
    elif variant == "go on":
        add("six", into="one", start=folder / "one")
    elif variant == "forget" and "two" in library.list():
        library.forget("two")
    elif variant == "consolidate" and "all" not in library.list():
        library.consolidate(base, tokenizer, NAMES, "all")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    folder, context = tmp_path_factory.mktemp("whole"), multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        server = context.Process(target=serve, args=(there, act, "build"))
        server.start()
    there.close()
    campaign = Campaign(here, folder / "build" / FOLDER)
    for variant in ("build", *CHANGED):
        library = prepare(campaign, folder / variant)
        began = time.monotonic()
        operations = campaign.run(variant, library)
        campaign.seconds[variant], campaign.whole[variant] = time.monotonic() - began, contents(library)
        if variant in CHANGED:
            campaign.operations += [(variant, number) for number in range(1, operations + 1)]
    random.Random(0).shuffle(campaign.operations)
    yield campaign
    here.send(None)
    server.join(60)
    server.kill()  # where it hangs


def prepare(campaign: Campaign, parent: Path) -> Path:
    parent.mkdir()
    if campaign.earlier.exists():
        shutil.copytree(campaign.earlier, parent / FOLDER)
    return parent / FOLDER


def files_of(whole: dict[str, object], name: str) -> dict[str, object]:
    return {file: whole[f"{name}/{file}"] for file in FILES if f"{name}/{file}" in whole}


def check_between(campaign: Campaign, variant: str, folder: Path) -> None:
    """Check a library after a kill."""
    listed, changed = set(Library(folder).list()), CHANGED[variant]
    assert {*NAMES} - {changed} <= listed <= {*NAMES, changed}, f"{variant}: {sorted(listed)}"
    before, after, found = campaign.whole["build"], campaign.whole[variant], contents(folder)
    for name in listed:
        describe_memory(folder / name)
        wholes = [files_of(before, name)] + [files_of(after, name)] * (name == changed)
        assert files_of(found, name) in [each for each in wholes if each], f"{variant}: {name} is neither old nor new"


def run_case(campaign: Campaign, seed: int, parent: Path) -> int:
    """Kill an act one to three times, do it to its end, and return the number of kills."""
    rng, at_operation = random.Random(f"kill {seed}"), seed % 2 == 0
    variant, operation = campaign.operations[seed // 2 % len(campaign.operations)]
    folder, kills = prepare(campaign, parent), 0
    for attempt in range(rng.choice([1, 1, 2, 3])):
        if at_operation:
            moment = {"die_at": operation if attempt == 0 else rng.randint(1, operation)}
        else:
            moment = {"die_after": rng.random() * campaign.seconds[variant]}
        if campaign.run(variant, folder, **moment) is not None:
            break
        kills += 1
        check_between(campaign, variant, folder)
    assert kills or not at_operation
    assert campaign.run(variant, folder) is not None
    found, whole = contents(folder), campaign.whole[variant]
    assert found == whole, f"{variant}: other than without a kill: {list_differences(found, whole)}"
    return kills


def run_kills(campaign: Campaign, kills: int, seed: int, folder: Path) -> None:
    done, failures = Counter(), []
    while done["kills"] < kills:
        try:
            done["kills"] += run_case(campaign, seed, folder / str(seed))
        except (AssertionError, ValueError) as error:
            failures.append(f"case {seed}: {str(error)[:600]}")
            done["kills"] += 1
        shutil.rmtree(folder / str(seed), ignore_errors=True)
        seed += 1
        done["cases"] += 1
    print(dict(done), f"{len(campaign.operations)} operations, {len(failures)} failures")
    assert not failures, "\n".join(failures[:40])


@pytest.mark.slow
def test_a_library_stays_whole_whatever_is_killed(campaign, tmp_path):
    run_kills(campaign, int(os.environ.get("LOCAS_KILLS", 100)), 0, tmp_path)


@pytest.mark.slow
def test_the_kills_reach_every_act(campaign):
    assert {variant for variant, _ in campaign.operations} == {*CHANGED}
    assert len(campaign.operations) > 100
