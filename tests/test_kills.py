"""A stage that is killed, at any file operation or moment, and resumed gives the memory of one that was not.

    pytest tests/test_kills.py                              # 10 kills
    LOCAS_KILLS=1000 pytest tests/test_kills.py -m slow     # ten minutes; 300 where the variable is not set

Each reading is a process of its own. All are forked from one that has imported everything, so that a kill takes a
fraction of a second. A case is a seed: `run_case(campaign, 17, folder)` repeats the case 17 alone.
"""

import copy
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from families import FAMILIES, same, snapshot
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from locas_peft import backbone, stages, text
from locas_peft.memories.checkpoint import CHECKPOINT_FOLDER
from locas_peft.memories.loading import describe_memory
from locas_peft.selfstudy import Exchange
from locas_peft.stages import AdapterSettings, Place, ReadSettings, StudySettings

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "SIGKILL"), reason="this system cannot kill a process outright"
)

KILLS = 10
FOLDER = "memory"
TEXT = "The old man built a house of stone on the hill, and the river took it. " * 3
GIVEN = [Exchange("Who built the house?", "The old man."), Exchange("What took it?", "The river.")]
READING = ReadSettings(window=16, stride=8, max_tokens=40, r=4)
STUDY = StudySettings(window=64, max_tokens=40, r=4, passes=2)
# "overwrite" replaces the memory of "earlier", which has a file more; "after" goes on with it.
VARIANTS: dict[str, AdapterSettings] = {
    "earlier": dataclasses.replace(STUDY, r=2),
    "new": READING,
    "overwrite": READING,
    "study": STUDY,
    "after": ReadSettings(window=16, stride=8, max_tokens=40, r=2),
    "without checkpoints": READING,
}
HAVE_EARLIER = ("overwrite", "after")
TIMES = {"seconds", "tokens_per_second", "peak_bytes", "memory_dir"}
TIMES |= {"writing_seconds", "learning_seconds"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


# ------------------------------------------------------------------------------------------- in a process to be killed


@functools.cache
def load_tokenizer():
    return AutoTokenizer.from_pretrained(backbone.path())


@functools.cache
def load_base():
    config = copy.deepcopy(FAMILIES["llama"])
    config.vocab_size = load_tokenizer().vocab_size
    config.max_position_embeddings = 256
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()


def learn(variant: str, folder: Path) -> None:
    """Do what a command does with --resume, and with --overwrite where the folder holds another memory."""
    base, tokenizer, settings = load_base(), load_tokenizer(), VARIANTS[variant]
    before = snapshot(base)
    place = Place(out=folder, checkpoint_seconds=0, resume=True, overwrite=variant == "overwrite")
    if variant != "without checkpoints":
        place = dataclasses.replace(place, checkpoint_dir=folder / CHECKPOINT_FOLDER)
    input_ids = text.tokenize(tokenizer, TEXT)
    start = folder if variant == "after" else None
    if isinstance(settings, StudySettings):
        stages.study(base, tokenizer, input_ids, settings, place, exchanges=GIVEN)
    else:
        stages.read(base, input_ids, settings, place, tokenizer=tokenizer, start=start)
    assert same(base, before)


def count_operations(root: Path, die_at: int | None) -> Iterator[int]:
    """Return a counter of the changes of files below a folder. It kills the process before the one of a number."""
    operations = itertools.count(1)

    def count(event: str, arguments: tuple) -> None:
        if event == "open":
            changes = arguments[2] & WRITES
        else:
            changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "fsync")
        if not changes:
            return
        # `shutil.rmtree` names files relative to an open folder.
        is_relative = arguments[-1] not in (-1, arguments[0])
        is_ours = str(arguments[0]).startswith(str(root)) or is_relative
        if is_ours and next(operations) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def flush(file: int) -> None:
        count("fsync", (root, file))  # no audit event tells of it
        fsync(file)

    fsync, os.fsync = os.fsync, flush
    sys.addaudithook(count)
    return operations


def serve(
    connection: Connection, act: Callable[[str, Path], None] = learn, first: str = "earlier"
) -> None:
    """Fork a reading, or another act, for each request; answer with its exit status and its changes of files."""
    torch.set_num_threads(1)  # a process with more of them cannot be forked
    warnings.simplefilter("ignore")
    tqdm.set_lock(
        threading.RLock()
    )  # its own lock is shared by all forks, and stays locked if its holder is killed
    with tempfile.TemporaryDirectory() as folder:
        act(first, Path(folder) / FOLDER)  # what is imported at first use is imported here
    while (request := connection.recv()) is not None:
        variant, folder, die_at, die_after = request
        result, answer = os.pipe()
        child = os.fork()
        if not child:
            status = 1
            try:
                operations = count_operations(folder.parent, die_at)
                act(variant, folder)
                os.write(answer, str(next(operations) - 1).encode())
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(answer)
        if die_after is not None:
            time.sleep(die_after)
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with open(result) as file:
            connection.send((status, int(file.read() or 0)))


# ------------------------------------------------------------------------------------------------- the campaign


@dataclass
class Campaign:
    """The process that all readings are forked from, and what readings leave that are not killed."""

    connection: Connection
    earlier: Path
    whole: dict[str, dict[str, object]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    operations: list[tuple[str, int]] = field(default_factory=list)

    def run(
        self, variant: str, folder: Path, die_at: int | None = None, die_after: float | None = None
    ) -> int | None:
        """Read in a new process; return the number of changes of files, or None where the process was killed."""
        self.connection.send((variant, folder, die_at, die_after))
        assert self.connection.poll(300), "the act hangs"
        status, operations = self.connection.recv()
        if status == -signal.SIGKILL:
            return None
        assert status == 0, f"the act ended with the status {status}"
        return operations

    def prepare(self, variant: str, parent: Path) -> Path:
        """Return the path of the memory's folder, which may hold an earlier memory and another file."""
        parent.mkdir()
        if variant in HAVE_EARLIER:
            shutil.copytree(self.earlier, parent / FOLDER)
            (parent / FOLDER / "notes.txt").write_text("mine")
        return parent / FOLDER

    def check(self, variant: str, memory: Path) -> None:
        """Check that a folder after a kill holds no memory, the earlier one or the new one."""
        try:
            describe_memory(memory)
        except ValueError as error:
            assert str(error).startswith("memory must be a folder that holds a memory"), error
            assert variant not in HAVE_EARLIER, "the earlier memory is lost"
            return
        wholes = [self.contents_after(variant)]
        if variant in HAVE_EARLIER:
            wholes.append(contents(self.earlier))
        files = ("adapter_config.json", "adapter_model.safetensors", "README.md", "record.json")

        def list_files(whole: dict[str, object]) -> list[object]:
            return [whole.get(name) for name in files]

        allowed = [list_files(whole) for whole in wholes]
        assert list_files(contents(memory)) in allowed, f"{variant}: the memory is mixed"

    def contents_after(self, variant: str) -> dict[str, object]:
        """Return what the folder holds after a variant that is not killed (see `contents`)."""
        return {
            name.removeprefix(f"{FOLDER}/"): value for name, value in self.whole[variant].items()
        }


@contextmanager
def started(
    kind: type[Campaign],
    act: Callable[[str, Path], None],
    variants: Sequence[str],
    factory: pytest.TempPathFactory,
) -> Iterator[Campaign]:
    """Yield a campaign; the first of its variants makes what is there earlier, and is not killed."""
    folder, context = factory.mktemp("whole"), multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TMPDIR", str(factory.mktemp("temporary")))
        server = context.Process(target=serve, args=(there, act, variants[0]))
        server.start()
    there.close()
    campaign = kind(here, folder / variants[0] / FOLDER)
    for variant in variants:
        path = campaign.prepare(variant, folder / variant)
        began = time.monotonic()
        operations = campaign.run(variant, path)
        campaign.seconds[variant] = time.monotonic() - began
        campaign.whole[variant] = contents(path.parent)
        if variant != variants[0]:
            campaign.operations += [(variant, number) for number in range(1, operations + 1)]
    random.Random(0).shuffle(campaign.operations)
    yield campaign
    here.send(None)
    server.join(60)
    server.kill()  # where an act hangs


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    with started(Campaign, learn, list(VARIANTS), tmp_path_factory) as campaign:
        yield campaign


def contents(folder: Path) -> dict[str, object]:
    """Return all files and folders below a folder, hidden ones too, without the times that a reading took."""
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else None
        if path.name == "record.json":
            content = without_times(json.loads(content))
        elif path.name == "README.md":
            content = [line for line in content.splitlines() if not line.endswith(b" s |")]
        found[path.relative_to(folder).as_posix()] = content
    return found


def without_times(value: object) -> object:
    if isinstance(value, dict):
        return {name: without_times(item) for name, item in value.items() if name not in TIMES}
    if isinstance(value, list):
        return [without_times(item) for item in value]
    return value


def run_case(campaign: Campaign, seed: int, parent: Path) -> int:
    """Kill an act one to three times, do it to its end, and return the number of kills."""
    rng = random.Random(f"kill {seed}")
    variant, operation = campaign.operations[seed // 2 % len(campaign.operations)]
    memory, kills = campaign.prepare(variant, parent), 0
    for attempt in range(rng.choice([1, 1, 2, 3])):
        if seed % 2 == 0:
            moment = {"die_at": operation if attempt == 0 else rng.randint(1, operation)}
        else:
            moment = {"die_after": rng.random() * campaign.seconds[variant]}
        if campaign.run(variant, memory, **moment) is not None:
            break
        kills += 1
        checked = memory
        if rng.random() < 0.5 and memory.exists():
            # Loading the folder itself may mend it.
            checked = shutil.copytree(memory, parent / "copy")
        campaign.check(variant, checked)
        shutil.rmtree(parent / "copy", ignore_errors=True)
    assert kills or seed % 2
    assert campaign.run(variant, memory) is not None
    found, whole = contents(parent), campaign.whole[variant]
    changed = [name for name in {**whole, **found} if found.get(name, 0) != whole.get(name, 0)]
    assert not changed, f"{variant}: other than without a kill: {changed}"
    return kills


def run_kills(campaign: Campaign, kills: int, seed: int, folder: Path) -> None:
    done, failures = 0, []
    while done < kills:
        try:
            done += run_case(campaign, seed, folder / str(seed))
        except (AssertionError, ValueError) as error:
            failures.append(f"case {seed}: {error}")
            done += 1
        shutil.rmtree(folder / str(seed), ignore_errors=True)
        seed += 1
    assert not failures, "\n".join(failures)


def test_a_killed_reading_is_resumed_to_the_same_bytes(campaign, tmp_path):
    run_kills(campaign, KILLS, 0, tmp_path)


@pytest.mark.slow
def test_more_killed_readings_are_resumed_to_the_same_bytes(campaign, tmp_path):
    run_kills(campaign, int(os.environ.get("LOCAS_KILLS", 300)), KILLS, tmp_path)


def test_the_kills_reach_every_kind_of_file(campaign):
    """A campaign without file operations would find nothing."""
    assert {variant for variant, _ in campaign.operations} == {*VARIANTS} - {"earlier"}
    assert len(campaign.operations) > 80
    exchanges = f"{FOLDER}/exchanges.jsonl"
    found = {variant for variant, whole in campaign.whole.items() if exchanges in whole}
    assert found == {"earlier", "study", "after"}
