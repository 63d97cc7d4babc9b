"""The page: a shelf that no name and no archive leaves, one model that many use at once, and the page in a browser."""

import asyncio
import copy
import gc
import hashlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PureWindowsPath

import pytest
import torch
from families import change_config, make_host, same, snapshot
from peft import PeftModel, get_peft_model
from torch.nn.functional import scaled_dot_product_attention

from locas_command import program as cli
from locas_peft import LocasConfig, backbone, calibrate
from locas_peft.app import sessions
from locas_peft.app.requests import OwnPageAlone
from locas_peft.app.sessions import ROUTED, Job, SharedModel, Visitors
from locas_peft.checks import hide_folder
from locas_peft.exchanges import EXCHANGES, writing
from locas_peft.library import Library
from locas_peft.memories import describe_memory
from locas_peft.memories import folder as archives
from locas_peft.memories.folder import pack
from locas_peft.stages import load_records
from locas_peft.text import load_text

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TEXT = " ".join(
    f"The keeper of house {number} lit {number} lamps and walked down the stairs."
    for number in range(14)
)
BASE = "locas_peft/tinybook-glu"


@pytest.fixture(scope="module")
def loaded():
    return backbone.load(name=BASE)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A memory of the embedded model that changes its output."""
    folder = tmp_path_factory.mktemp("made") / "memory"
    base, tokenizer = backbone.load(name=BASE)
    model = make_memory(base, tokenizer(TEXT, return_tensors="pt").input_ids)
    for name, parameter in model.named_parameters():
        if "locas_down" in name:
            torch.nn.init.normal_(parameter.data, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def make_memory(base, input_ids: torch.Tensor) -> PeftModel:
    model = get_peft_model(base, LocasConfig(r=2, seed=1))
    calibrate(model, [input_ids])
    return model


def pack_memory_of(base, archive: Path, save_embedding_layers: bool = False) -> None:
    """Write the archive of a memory that was made for a base."""
    folder = archive.with_suffix("")
    model = make_memory(base, torch.arange(3, 30)[None])
    model.save_pretrained(str(folder), save_embedding_layers=save_embedding_layers)
    pack(folder, archive)


@pytest.fixture
def no_anchor(monkeypatch):
    """Writing the anchor's text would take longer than these readings."""
    choose, choose_study = SharedModel._choose_settings, SharedModel._choose_study

    def choose_without(*given):
        return replace(choose(*given), anchor=0.0, anchor_every=None)

    def choose_study_without(*given):
        return replace(choose_study(*given), anchor=0.0, passes=1)

    monkeypatch.setattr(SharedModel, "_choose_settings", choose_without)
    monkeypatch.setattr(SharedModel, "_choose_study", choose_study_without)


@pytest.fixture
def model(loaded, no_anchor):
    shared = SharedModel(BASE, *loaded)
    yield shared
    shared.close()


@pytest.fixture
def visitors():
    found = Visitors()
    yield found
    found.close()


@pytest.fixture
def shelf(tmp_path):
    return Library(tmp_path / "shelf")


def put(shelf: Library, made: Path, name: str) -> Path:
    with shelf.new(name) as target:
        shutil.copytree(made, target)
    return target


def start(model: SharedModel, shelf: Library, name: str, text: str, questions: int = 0) -> Job:
    job = Job(name, text, questions)
    model.read(job, shelf)
    return job


def wait(job: Job) -> Job:
    deadline = time.monotonic() + 60
    while not job.ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert job.ended, job.phase
    return job


def chat(words: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": words}]


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()


# ------------------------------------------------------------------------------------------------------------ shelf


@pytest.mark.parametrize("name", ["..", "../x", "/etc", "a\0"])
def test_a_name_that_could_leave_the_shelf_is_refused(name, shelf, tmp_path, made):
    put(shelf, made, "one")
    with pytest.raises(ValueError, match="name must be at most 60"):
        shelf.rename("one", name)
    for use in (shelf.find, shelf.forget, shelf.bytes_of):
        with pytest.raises(ValueError, match="there is no memory"):
            use(name)
    assert shelf.list() == ["one"] and os.listdir(tmp_path) == ["shelf"]


def test_links_are_not_followed(shelf, tmp_path, made):
    (shelf.folder / "link").symlink_to(made, target_is_directory=True)
    assert shelf.list() == []
    with pytest.raises(ValueError, match="there is no memory 'link'"):
        shelf.forget("link")
    card, secret = put(shelf, made, "one") / "README.md", tmp_path / "secret"
    secret.write_text("secret")
    card.unlink()
    card.symlink_to(secret)
    pack(shelf.find("one"), tmp_path / "one.zip")
    assert "one/README.md" not in zipfile.ZipFile(tmp_path / "one.zip").namelist()
    shelf.forget("one")
    assert secret.read_text() == "secret" and describe_memory(made)


LINK = zipfile.ZipInfo(CONFIG)
LINK.external_attr = (stat.S_IFLNK | 0o777) << 16
FOREIGN = "the archive must hold the files of one memory .*, no links and one folder at most, got "


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["../adapter_config.json"], FOREIGN),
        (["/adapter_config.json", "adapter_model.safetensors"], FOREIGN),
        (["a/../../adapter_config.json"], FOREIGN),
        (["a\\..\\adapter_config.json"], FOREIGN),
        ([CONFIG, "adapter_model.bin"], f"{FOREIGN}'adapter_model.bin': pack one memory"),
        ([LINK], FOREIGN),
        ([f"a/{CONFIG}", f"b/{WEIGHTS}"], FOREIGN),
        ([CONFIG, CONFIG], "the archive must be a sound zip of a memory"),
        ([], "memory must be a folder that holds a memory"),
        ([f"{'x' * 65_000}{number}" for number in range(17)], "the archive must list few files"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_hostile_archive_is_refused_and_nothing_is_left_of_it(entries, message, tmp_path):
    archive = tmp_path / "hostile.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for each in entries:
            packed.writestr(each, "{}")
    folder = Library(tmp_path / "in" / "shelf")
    with pytest.raises(ValueError, match=message):
        folder.unpack(archive, "hostile", describe_memory)
    assert list((tmp_path / "in").rglob("*")) == [tmp_path / "in" / "shelf"]


def test_an_archive_that_unpacks_to_too_much_or_is_damaged_is_refused(
    shelf, tmp_path, made, monkeypatch
):
    archive = tmp_path / "x.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(CONFIG, bytes(5_000_000))
    monkeypatch.setattr(archives, "MOST_BYTES", 3_000_000)
    message = "a memory must have at most 3,000,000 bytes, got more: upload less"
    with pytest.raises(ValueError, match=message):
        shelf.unpack(archive, "x", lambda memory: None)
    claims_less = archive.read_bytes().replace(
        (5_000_000).to_bytes(4, "little"), (9).to_bytes(4, "little")
    )
    pack(made, archive)
    sound = archive.read_bytes()
    renamed = sound.replace(b"locas_", b"LOCAS_", 1)
    for broken in (claims_less, b"", b"PK", sound[:-30], renamed, b"x" * 99):
        archive.write_bytes(broken)
        with pytest.raises(ValueError, match="the archive must be a sound zip of a memory"):
            shelf.unpack(archive, "x", lambda memory: None)
    assert os.listdir(shelf.folder) == []


def test_an_uploaded_memory_must_fit_and_the_refusal_names_no_folder_of_the_server(
    shelf, tmp_path, made, model
):
    shutil.copytree(made, tmp_path / "one")
    change_config(tmp_path / "one", r=10**9)
    pack(tmp_path / "one", tmp_path / "one.zip")
    with pytest.raises(ValueError) as refusal:
        shelf.unpack(tmp_path / "one.zip", "two", model.adopt)
    assert str(tmp_path) not in str(refusal.value) and "\n" not in str(refusal.value)
    pack_memory_of(make_host("llama"), tmp_path / "other.zip")
    with pytest.raises(ValueError, match="this memory was made for another base"):
        shelf.unpack(tmp_path / "other.zip", "two", model.adopt)
    assert os.listdir(shelf.folder) == []


def test_an_uploaded_memory_gets_the_name_of_the_pages_base(shelf, tmp_path, made, model):
    own = tmp_path / "own"
    shutil.copytree(made, own)
    change_config(own, base_model_name_or_path=BASE)
    put(shelf, own, "one")
    for name, base in (("two", "someone/else"), ("three", None)):
        shutil.copytree(made, tmp_path / name)
        change_config(tmp_path / name, base_model_name_or_path=base)
        (tmp_path / name / "model.sig").touch()
        pack(tmp_path / name, tmp_path / f"{name}.zip")
        folder = shelf.folder / shelf.unpack(tmp_path / f"{name}.zip", name, model.adopt)
        # The signature was that of another config.
        assert not (folder / "model.sig").exists()
    assert shelf.name_base() == BASE
    pack(own, tmp_path / "own.zip")
    folder = shelf.folder / shelf.unpack(tmp_path / "own.zip", "four", model.adopt)
    for file in os.listdir(folder):
        assert (folder / file).read_bytes() == (own / file).read_bytes()


def test_a_memory_without_its_tensors_is_not_packed(tmp_path, made):
    shutil.copytree(made, tmp_path / "one")
    (tmp_path / "one" / "adapter_model.safetensors").rename(tmp_path / "one" / "adapter_model.bin")
    with pytest.raises(
        ValueError, match="^memory 'one' must have a file adapter_model.safetensors"
    ):
        pack(tmp_path / "one", tmp_path / "one.zip")
    assert not (tmp_path / "one.zip").exists()


def test_the_path_of_a_folder_is_hidden_as_it_is_and_as_windows_messages_quote_it():
    folder = PureWindowsPath(r"C:\shelf\two")
    message = f"got {str(folder / 'text.txt')!r} in {str(folder)!r}, {folder}"
    assert hide_folder(message, folder, "two") == r"got 'two\\text.txt' in 'two', two"
    assert hide_folder(message, folder) == "got 'text.txt' in '', "


def test_a_message_names_no_folder_of_the_server(tmp_path, made, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    visitors = Visitors(Path("shelf"))
    try:
        shelf = visitors.find(None).shelf
        text = put(shelf, made, "one") / "text.txt"
        text.write_bytes(b"\xff")
        monkeypatch.setattr(model, "_read", lambda *_: load_text(text))
        outcome = wait(start(model, shelf, "two", TEXT)).outcome
        assert str(tmp_path) in str(text) and str(tmp_path) not in outcome
        assert "0 of 'one/text.txt': convert" in outcome
    finally:
        visitors.close()


@pytest.mark.parametrize(
    ("file", "damaged", "message"),
    [
        (EXCHANGES, b"{}\n", "each line of 'two/exchanges.jsonl' must be a JSON object"),
        ("record.json", b"nonsense", "'two/record.json' must be JSON"),
        ("text.txt", b"\xff", "text must be UTF-8, got .* of 'two/text.txt'"),
    ],
)
def test_an_uploaded_memory_must_be_sound_beside_its_tensors(
    file, damaged, message, shelf, tmp_path, made, model
):
    shutil.copytree(made, tmp_path / "one")
    (tmp_path / "one" / file).write_bytes(damaged)
    pack(tmp_path / "one", tmp_path / "one.zip")
    with pytest.raises(ValueError, match=f"^{message}"):
        shelf.unpack(tmp_path / "one.zip", "two", model.adopt)
    assert os.listdir(shelf.folder) == []


def test_embeddings_of_an_uploaded_memory_do_not_reach_other_visitors(
    loaded, shelf, tmp_path, model
):
    base = copy.deepcopy(loaded[0])
    with torch.no_grad():
        base.get_input_embeddings().weight.mul_(3)
    pack_memory_of(base, tmp_path / "other.zip", save_embedding_layers=True)
    before = snapshot(loaded[0])
    assert shelf.unpack(tmp_path / "other.zip", "two", model.adopt) == "two"
    assert same(loaded[0], before)


# --------------------------------------------------------------------------------------------------------- sessions


def test_a_reading_is_the_same_while_others_ask_and_their_answers_too(
    model, visitors, made, monkeypatch
):
    one, two = visitors.find(None).shelf, visitors.find(None).shelf
    put(two, made, "made")
    monkeypatch.setattr(sessions, "ANSWER_TOKENS", 6)
    words = [chat("Once upon a time"), chat("Once upon a time")]
    expected = model.ask(two, "made", words).result()
    assert expected[0].text != expected[1].text
    assert [answer.memories for answer in expected] == [(), ("made",)]
    quiet = wait(start(model, one, "quiet", TEXT[:450]))
    assert (one.find("quiet") / "text.txt").read_text() == TEXT[:450]
    busy = start(model, one, "busy", TEXT[:450])
    asked = 0
    while asked < 3:
        assert not busy.ended, "nobody was answered"
        assert model.ask(two, "made", words).result() == expected
        asked += busy.phase == "read" and not busy.ended
    wait(busy)
    assert (quiet.outcome, busy.outcome, busy.memory) == ("Done", "Done", "busy")
    assert digest(one.find("quiet")) == digest(one.find("busy"))
    assert busy.curves == quiet.curves and len(busy.curves[0]) > 2
    assert [tokens for tokens, _ in busy.curves[0]] == [tokens for tokens, _ in busy.curves[1]]


# By its name a library finds it.
QUAY = "brine quay"
ABOUT_QUAY = [chat("Who swept the quay at Brine?")] * 2


def test_the_memory_that_a_question_is_about_answers_and_is_named(model, shelf, made, monkeypatch):
    monkeypatch.setattr(sessions, "ANSWER_TOKENS", 6)
    put(shelf, made, QUAY)
    shown = []
    answers = model.ask(shelf, ROUTED, ABOUT_QUAY, shown.append).result()
    assert answers == model.ask(shelf, QUAY, ABOUT_QUAY).result()
    assert [answer.memories for answer in answers] == [(), (QUAY,)]
    texts = [answer.text for answer in answers]
    assert [text.strip() for text in shown[-1]] == texts and texts[0] != texts[1]
    assert model.ask(shelf, None, ABOUT_QUAY).result() == answers[:1]
    others = model.ask(shelf, ROUTED, [chat("Who wrote Hamlet?")] * 2).result()
    assert [answer.memories for answer in others] == [(), ()]
    assert others[0].text == others[1].text


def test_the_answer_of_a_memory_has_its_source(loaded, shelf, made, monkeypatch):
    pytest.importorskip("gradio")
    from locas_peft.app.page import _show_chat

    monkeypatch.setattr(sessions, "ANSWER_TOKENS", 2)
    shared = SharedModel(BASE, *loaded, shows_source=True)
    (put(shelf, made, QUAY) / "text.txt").write_text("Peder swept the quay.")
    answers = shared.ask(shelf, ROUTED, ABOUT_QUAY).result()
    shared.close()
    assert [answer.source for answer in answers] == [None, "Peder swept the quay."]
    turn = {"role": "assistant", "content": "Peder.", "head": "[lamp]\n", "foot": "\n\nSource: x"}
    assert _show_chat([turn])[0]["content"] == "[lamp]\nPeder.\n\nSource: x"


def test_an_answer_is_no_part_of_the_reading_that_it_interrupts(
    loaded, no_anchor, shelf, monkeypatch
):
    base, tokenizer = loaded
    model = SharedModel(BASE, copy.deepcopy(base).bfloat16(), tokenizer)
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 40, 8, generator=generator).bfloat16()
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    clock, outputs, phases = [0.0], [], set()

    def answer(*_) -> None:
        phases.add(job.phase)
        clock[0] += 1.0
        outputs.append(scaled_dot_product_attention(query, key, value, attn_mask=mask))
        assert torch.is_grad_enabled()

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(model, "_answer", answer)
    # Each reply is a usable question.
    monkeypatch.setattr(writing, "is_about", lambda *_: True)
    job = Job("busy", TEXT[:450], 1)
    model.read(job, shelf)
    while not job.ended:
        model.ask(shelf, None, [chat("Who?")]).result()
    model.close()
    assert job.outcome == "Done" and phases >= {"read", "write"}
    read, studied = load_records(shelf.find("busy"))
    assert read.seconds == studied.writing_seconds == studied.learning_seconds == 0
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert all(torch.equal(output, expected) for output in outputs)


def test_the_time_left_is_counted_from_the_beginning_of_the_phase(monkeypatch):
    now, job = 13_511.0, Job("one", TEXT, 0)
    monkeypatch.setattr(sessions.time, "monotonic", lambda: now)
    for phase in ("score", "read"):
        job.advance(phase, 0, 100)
        assert job.seconds_left is None
        now += 1.8
        job.advance(phase, 50, 100)
        assert job.seconds_left == pytest.approx(1.8)
        now += 60


def test_stop_keeps_what_was_learned_and_a_reading_that_waits_is_stopped_before_it_learns(
    model, shelf
):
    long, waiting = start(model, shelf, "long", TEXT * 3), start(model, shelf, "waiting", TEXT)
    while len(long.chunks["read"]) < 2:
        assert not long.ended, long.outcome
        assert waiting.phase == "waiting"
        assert (model.jobs_before(long), model.jobs_before(waiting)) == (0, 1)
        time.sleep(0.001)
    waiting.stop.set()
    long.stop.set()
    assert (wait(long).outcome, wait(waiting).outcome) == ("Stopped", "Stopped")
    assert 0 < len(long.chunks["read"]) < len(long.chunks["score"])
    assert load_records(shelf.find("long"))[-1].stopped is True
    assert describe_memory(shelf.find("long"))["learned"] is True
    assert waiting.memory is None and shelf.list() == ["long"] and waiting.chunks["read"] == []


def test_closing_keeps_what_was_learned(model, shelf):
    job = start(model, shelf, "long", TEXT * 3)
    while not job.chunks["read"]:
        time.sleep(0.01)
    model.close()
    assert job.outcome == "Stopped" and shelf.list() == ["long"]


@pytest.mark.parametrize("last_phase", ["write", "learn"])
def test_a_memory_that_is_being_made_is_neither_deleted_nor_renamed_and_stop_ends_its_study(
    last_phase, model, shelf, monkeypatch
):
    monkeypatch.setattr(writing, "is_about", lambda *_: True)
    job, phases = Job("secret", TEXT[:225], 1), []
    advance = job.advance
    message = "^memory 'secret' is being made: wait for its end, or stop its reading first$"

    def refuse_and_advance(phase: str, *numbers: int) -> None:
        # The second one acts as another process.
        libraries = [shelf, Library(shelf.folder)]
        if phase not in ("write", "learn"):
            libraries = []
        for library in libraries:
            with pytest.raises(ValueError, match=message):
                library.forget("secret")
            with pytest.raises(ValueError, match=message):
                library.rename("secret", "x")
        phases.append(phase)
        advance(phase, *numbers)
        if phase == last_phase:
            # The next forward pass ends the study.
            job.stop.set()

    monkeypatch.setattr(job, "advance", refuse_and_advance)
    model.read(job, shelf)
    assert (wait(job).outcome, job.memory) == ("Stopped", "secret")
    assert phases[-1] == last_phase
    assert os.listdir(shelf.folder) == ["secret"]
    assert [record.kind for record in load_records(shelf.find("secret"))] == ["read", "study"]
    shelf.forget("secret")


def test_a_model_that_asks_itself_nothing_usable_has_read_all_the_same(model, shelf, monkeypatch):
    monkeypatch.setattr(writing, "is_about", lambda *_: False)
    monkeypatch.setattr(writing, "_ask_by_words", lambda *_: [])
    job = wait(start(model, shelf, "asked", TEXT[:225], 1))
    assert (job.outcome, job.memory, job.exchanges) == ("Done", "asked", [])
    assert [record.kind for record in load_records(shelf.find("asked"))] == ["read"]


def test_a_text_that_is_too_short_is_a_message(model, shelf):
    outcome = wait(start(model, shelf, "short", "x")).outcome
    assert outcome.startswith("Not read: text must have at least 2 tokens")


@pytest.mark.parametrize(
    ("name", "text", "questions", "message"),
    [
        ("long", "x" * 2_000_001, 0, "text must have at most 2,000,000 .*, got 2,000,001: cut it"),
        ("empty", " ", 0, "text must not be empty"),
        ("slow", TEXT, 10**9, "questions must be from 0 to 32, got 1000000000: move the slider"),
        (" ../up", TEXT, 0, "name must be at most 60 .*, got '../up': choose another"),
    ],
    ids=["text", "no text", "questions", "name"],
)
def test_what_cannot_be_read_is_refused_before_it_waits(name, text, questions, message):
    with pytest.raises(ValueError, match=message):
        Job(name, text, questions)


def test_a_study_that_fails_after_its_reading_says_that_the_text_was_read(
    model, shelf, monkeypatch
):
    def fail(*_) -> None:
        raise ValueError("the study must work: try again")

    monkeypatch.setattr(model, "_choose_study", fail)
    job = wait(start(model, shelf, "lamp", TEXT[:225], 1))
    failed = "Read, but not studied: the study must work: try again"
    assert (job.outcome, job.memory, shelf.list()) == (failed, "lamp", ["lamp"])


def test_a_full_shelf_is_refused_before_the_text_is_scored(model, made, tmp_path):
    shelf = Library(tmp_path, most=1)
    put(shelf, made, "one")
    job = wait(start(model, shelf, "two", TEXT))
    assert job.outcome.startswith("Not read: this library must hold at most 1 memories")
    assert job.chunks["score"] == [] and os.listdir(tmp_path) == ["one"]


def test_questions_that_are_too_long_or_too_many_are_refused(model, monkeypatch):
    message = "question and answer must fit the model's .* positions, got .*: shorten one of them"
    with pytest.raises(ValueError, match=message):
        model.ask(None, None, [chat("word " * 3000)]).result()
    monkeypatch.setattr(sessions, "MOST_WAITING", 0)
    message = "at most 0 readings and questions can wait: try again later"
    with pytest.raises(ValueError, match=message):
        model.ask(None, None, [chat("Who?")])


def test_visitors_have_shelves_of_their_own_unless_they_share_one(visitors, tmp_path, made):
    one, two = visitors.find(None), visitors.find("made up")
    assert one.key != two.key != "made up" and visitors.find(one.key) is one
    put(one.shelf, made, "one")
    assert two.shelf.list() == [] and visitors.find([1]).shelf.list() == []
    shared = Visitors(tmp_path)
    put(shared.find(None).shelf, made, "one")
    assert shared.find(None).shelf.list() == ["one"]
    shared.close()
    assert (tmp_path / "one").exists()
    visitors.close()
    assert not one.downloads.exists()


def test_the_visitor_who_was_longest_away_is_forgotten_unless_it_reads(visitors, monkeypatch):
    monkeypatch.setattr(sessions, "MOST_VISITORS", 3)
    reads, away, here = (visitors.find(None) for _ in range(3))
    reads.job = Job("busy", TEXT, 0, phase="read")
    visitors.find(None)
    assert visitors.find(reads.key) is reads and visitors.find(here.key) is here
    assert not away.downloads.exists() and visitors.find(away.key) is not away


def test_a_new_visit_does_not_empty_the_shelf_of_another_one(visitors, made, monkeypatch):
    monkeypatch.setattr(sessions, "MOST_VISITORS", 3)
    keeper = visitors.find(None)
    put(keeper.shelf, made, "one")
    for _ in range(5):
        visitors.find(None)
    assert visitors.find(keeper.key).shelf.list() == ["one"]


@pytest.mark.parametrize(
    ("listened", "host", "origin", "forwarded_host", "status"),
    [
        ("127.0.0.1", "127.0.0.1:7860", None, None, 200),
        ("127.0.0.1", "localhost:7860", "http://localhost:7860", None, 200),
        ("::1", "[::1]:7860", None, None, 200),
        ("127.0.0.1", "evil.example:7860", None, None, 403),
        ("127.0.0.1", "127.0.0.1:7860", "http://evil.example", None, 403),
        ("127.0.0.1", "127.0.0.1:7860", "null", None, 403),
        ("0.0.0.0", "machine.example:7860", None, None, 200),
        ("0.0.0.0", "machine.example:7860", "http://evil.example", None, 403),
        ("0.0.0.0", "10.0.0.3:7860", "https://page.example", "page.example", 200),
    ],
)
def test_requests_of_foreign_pages_are_refused(listened, host, origin, forwarded_host, status):
    sent = []

    async def answer(scope, receive, send):
        await send({"status": 200})

    async def send(message):
        sent.append(message)

    named = {b"host": host, b"origin": origin, b"x-forwarded-host": forwarded_host}
    headers = [(name, value.encode()) for name, value in named.items() if value is not None]
    scope = {"type": "http", "headers": headers}
    asyncio.run(OwnPageAlone(answer, host=listened)(scope, None, send))
    assert sent[0]["status"] == status


def test_a_page_that_is_still_open_is_one_visitor_after_it_was_forgotten(visitors, monkeypatch):
    monkeypatch.setattr(sessions, "MOST_VISITORS", 2)
    stale, other = "x-_4" * 10 + "key", visitors.find(None)
    again = [visitors.find(stale) for _ in range(3)]
    assert again[0] is again[1] is again[2] and again[0].key == stale
    assert visitors.find(other.key) is other and visitors.find(f"{stale}y").key != f"{stale}y"


def test_of_two_clicks_at_once_one_begins_a_reading(visitors):
    visitor, begun = visitors.find(None), []

    class Slow:
        def read(self, job: Job, shelf: Library) -> None:
            time.sleep(0.1)
            begun.append(job)

    def click(name: str) -> str | None:
        try:
            return visitor.begin(Job(name, TEXT, 0), Slow())
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(2) as clicks:
        shown = set(clicks.map(click, ["one", "two"]))
    assert shown == {None, "a reading of yours is under way: stop it first, or wait for its end"}
    assert begun == [visitor.job]


def test_without_gradio_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["app", "--no-browser"])
    line = "error: the page needs gradio: install the extra with pip install 'locas_peft[app]'\n"
    assert capsys.readouterr().err == line


# gradio leaves event loops open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_happens_at_the_events_of_the_page(model, visitors, monkeypatch):
    pytest.importorskip("gradio")
    from locas_peft.app.page import _Page

    monkeypatch.setattr(sessions, "ANSWER_TOKENS", 3)
    page, one = _Page(model, visitors), visitors.find(None)
    # A new chat, and another memory, end the answers to all questions.
    cancelled = [event.cancels for event in page.blocks.fns.values() if event.is_cancel_function]
    assert [len(events) for events in cancelled] == [1 + len(page._samples)] * 2
    assert len(page._open(one)) == 1 + len(page._shelf_view) + len(page._job_view)
    page._begin(one, TEXT[:450], "lamp", 0)
    wait(one.job)
    shown = page._tick(one, None, None, None)
    assert len(shown) == len(page._job_view) + len(page._shelf_view)
    assert "Done. The memory is on the shelf: lamp." in shown[4]
    texts = {}
    for name in (None, "lamp", ROUTED):
        steps = list(page._ask(one, name, "Who lit the lamps?", [[], []]))
        assert steps[0][0] == "" and len(steps[-1][3][0]) == 2
        texts[name] = [chat[-1]["content"] for chat in steps[-1][1:3]]
    assert texts[None][1] == "Choose a memory to see its answer."
    assert texts[ROUTED] == [texts["lamp"][0], f"[lamp]\n{texts['lamp'][1]}"]
    for question, message in (
        (" ", "question must not be empty: ask something"),
        ("x" * 4_001, "question must have at most 4,000 characters, got 4,001: shorten it"),
    ):
        with pytest.raises(ValueError, match=message):
            next(page._ask(one, None, question, [[], []]))
    steps = page._ask(one, "gone", "Who?", [[], []])
    with pytest.raises(ValueError, match="there is no memory 'gone'"):
        for step in steps:
            shown = step
    assert shown[0] == "Who?", "the question stays in its field"
    page._rename(one, "lamp", "light")
    assert one.shelf.list() == ["light"]
    page._pack(one, "light")
    assert [file.name for file in one.downloads.iterdir()] == ["light.zip"]
    page._forget(one, None, "light")
    assert one.shelf.list() == []
    del page, steps
    gc.collect()


# ------------------------------------------------------------------------------------------------------ in a browser

CHROMIUM = shutil.which("chromium")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync"""


@pytest.fixture
def address():
    """The address of a server of the embedded model, ended by SIGTERM."""
    command = [sys.executable, "-m", "locas_peft", "app", "--no-browser"]
    command += ["--port", "0", "--model", BASE]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        lines = []
        for line in server.stdout:
            lines.append(line)
            if found := re.search(r"The page is at (http://127\.0\.0\.1:\d+/)", line):
                yield found[1]
                break
        else:
            pytest.fail("".join(lines))
        server.send_signal(signal.SIGTERM)
        # Windows has no such signal: it ends the process.
        if os.name == "posix":
            assert server.wait(60) == 143
            assert server.stdout.read().splitlines()[-1] == "terminated"


@pytest.fixture
def browser():
    """Chromium, each page of which sees no other's storage."""
    playwright = pytest.importorskip("playwright.sync_api")
    pytest.importorskip("gradio")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield chromium
        chromium.close()


@pytest.mark.slow
def test_the_page_in_a_browser(browser, address, tmp_path):
    visit = browser.new_page(viewport={"width": 1200, "height": 820})
    visit.set_default_timeout(120_000)
    requested = []
    visit.on("request", lambda request: requested.append(request.url))
    visit.goto(address)

    def press(name: str) -> None:
        visit.get_by_role("button", name=name, exact=True).click()

    def shows(text: str, count: int = 1) -> None:
        visit.get_by_text(text).nth(count - 1).wait_for()

    def open_tab(name: str) -> None:
        visit.get_by_role("tab", name=name).click()

    # Read; then read a long text and stop.
    press("The demo's page")
    visit.wait_for_function("document.querySelector('textarea').value.includes('Skarn Point')")
    press("Read")
    shows("Done. The memory is on the shelf: lighthouse")
    visit.locator(".vega-embed").wait_for()
    press("The Python reference")
    visit.wait_for_function("document.querySelector('textarea').value.length > 20000")
    press("Read")
    shows("Reading: ")
    press("Stop")
    shows("Stopped. The memory is on the shelf: python reference")

    # Ask with one memory, switch to the other.
    press("Ask about it")
    asked = visit.get_by_placeholder("Begin a text: both continue it")
    asked.fill("The lighthouse of Skarn Point was")
    asked.press("Enter")
    shows("The lighthouse of Skarn Point was", 2)
    visit.wait_for_function("document.querySelectorAll('[data-testid=bot]').length == 2")
    visit.get_by_label("Memory", exact=True).click()
    visit.get_by_role("option", name="lighthouse").click()
    visit.wait_for_function("document.querySelectorAll('[data-testid=bot]').length == 0")

    # Reload: the shelf is still there; another browser sees none of it.
    visit.reload()
    shows("Stopped. The memory is on the shelf: python reference")
    open_tab("Shelf")
    assert visit.get_by_role("checkbox", name="lighthouse").is_visible()
    other = browser.new_page()
    other.goto(address)
    other.get_by_role("tab", name="Shelf").click()
    other.get_by_text("Choose one memory").wait_for()
    assert other.get_by_role("checkbox").count() == 0

    # Download, delete after a question back, upload again.
    visit.get_by_role("checkbox", name="lighthouse").check()
    shows("64 slots beside each of 6 FFNs")
    press("Download")
    with visit.expect_download() as downloaded:
        visit.get_by_role("link", name="Download").or_(visit.locator("a[download]")).first.click()
    downloaded.value.save_as(tmp_path / "lighthouse.zip")
    press("Delete")
    shows("Delete lighthouse? It cannot be brought back.")
    press("Keep it")
    assert visit.get_by_role("checkbox", name="lighthouse").is_visible()
    press("Delete")
    press("Yes, delete it")
    visit.get_by_role("checkbox", name="lighthouse").wait_for(state="detached")
    visit.locator("input[type=file][accept='.zip']").set_input_files(tmp_path / "lighthouse.zip")
    visit.get_by_role("checkbox", name="lighthouse").wait_for()

    # Hostile uploads are refused with a message.
    with zipfile.ZipFile(tmp_path / "hostile.zip", "w") as packed:
        packed.writestr("../../adapter_config.json", "{}")
    visit.locator("input[type=file][accept='.zip']").set_input_files(tmp_path / "hostile.zip")
    shows("the archive must hold the files of one memory")
    assert visit.get_by_role("checkbox").count() == 2
    assert [url for url in requested if not url.startswith((address, "data:", "blob:"))] == []
