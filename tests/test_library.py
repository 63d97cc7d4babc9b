"""A library: memories are added, found, asked and forgotten; names and files cannot leave it."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from families import change_config
from safetensors.torch import load_file
from training import assert_same

import locas_peft.library.library as module
from locas_command.memories import library as list_memories
from locas_peft import backbone
from locas_peft.asking import Answerer, Question
from locas_peft.files import write_json
from locas_peft.library import Library, LibraryAnswerer, make_sample, score_by_words
from locas_peft.library.routing import list_passages
from locas_peft.memories.checkpoint import CHECKPOINT_FOLDER, InUse, locked
from locas_peft.memories.folder import check_vacant, pack
from locas_peft.selfstudy import Exchange, load_exchanges, save_exchanges
from locas_peft.stages import ReadSettings, load_records

FIXTURES = Path(__file__).parent / "fixtures" / "0.2.0"

TEXTS = {
    "lamp": "The lamp on the rock at Skarn was lit by Old Peder, and nobody else went there. " * 6,
    "bread": "The bakery in Dunmarrow belongs to Hilda Brass, who bakes rye bread on Tuesdays. "
    * 6,
}
LAMP, BREAD = "Who lit the lamp at Skarn?", "Where is the bakery of Hilda Brass?"
SETTINGS = ReadSettings(r=4, window=64, stride=32, anchor=0.0)


@pytest.fixture(scope="module")
def base():
    return backbone.load()


@pytest.fixture(scope="module")
def made(base, tmp_path_factory):
    library = Library(tmp_path_factory.mktemp("made"))
    for name, text in TEXTS.items():
        library.add(*base, text, name, SETTINGS)
    return library.folder


@pytest.fixture
def library(made, tmp_path):
    shutil.copytree(made, tmp_path / "library")
    return Library(tmp_path / "library")


def content(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def interrupt(*_):
    raise KeyboardInterrupt


def entries(library):
    return sorted(os.listdir(library.folder))


def weights(library, name):
    return load_file(library.find(name) / "adapter_model.safetensors")


def add_half(library, base, name):
    """Let a process be stopped at the first step of a reading."""
    with pytest.raises(KeyboardInterrupt):
        library.add(*base, TEXTS["lamp"], name, SETTINGS, on_step=interrupt)


def write(folder, *exchanges):
    folder.mkdir(parents=True)
    config = {"peft_type": "LOCAS", "base_model_name_or_path": "b"}
    write_json(folder / "adapter_config.json", config)
    save_exchanges(folder / "exchanges.jsonl", exchanges)


def has_memory(base):
    return any("locas" in name for name, _ in base[0].named_modules())


def test_a_question_is_answered_with_the_memory_that_it_is_about(library, base):
    texts = [LAMP, "Who wrote Hamlet?", "Where is the bakery?", "Who lit the lamp?"]
    asked = [Question(each) for each in texts]
    answers = LibraryAnswerer(library, *base, max_new_tokens=8).answer(asked)
    assert [answer.memories for answer in answers] == [("lamp",), (), ("bread",), ("lamp",)]
    assert [answer.question for answer in answers] == asked
    with library.attach(base[0], "lamp") as model:
        with_lamp = Answerer(model, base[1], max_new_tokens=8).answer([asked[0], asked[3]])
    (alone,) = Answerer(*base, max_new_tokens=8).answer(asked[1:2])
    assert [answers[0].text, answers[3].text] == [answer.text for answer in with_lamp]
    assert answers[1] == alone
    assert not has_memory(base)


def test_a_conversation_is_continued_with_the_memory_that_its_last_message_is_about(library, base):
    # So that the memory's answer is another one than the base's.
    change_config(library.find("bread"), scaling=50.0)
    turns = [[{"role": "user", "content": content}] for content in (BREAD, "Who?")]
    shown = []
    answers = LibraryAnswerer(library, *base, max_new_tokens=4).reply(turns, on_text=shown.append)
    assert [answer.memories for answer in answers] == [("bread",), ()]
    assert len(shown) == 8
    with library.attach(base[0], "bread") as model:
        (with_memory,) = Answerer(model, base[1], max_new_tokens=4).reply(turns[:1])
    alone = Answerer(*base, max_new_tokens=4).reply(turns)
    assert answers[0].text == with_memory.text != alone[0].text
    assert answers[1].text == alone[1].text


def test_a_question_that_is_too_long_leaves_the_base_as_it_was(library, base):
    long = Question(f"{LAMP} " * 400)
    with pytest.raises(ValueError, match="^prompt 0 and max_new_tokens must fit the model's"):
        LibraryAnswerer(library, *base).answer([long])
    assert not has_memory(base)


def test_a_memory_is_no_library(library):
    with pytest.raises(ValueError, match="^a library must be a folder of memories, got a memory"):
        Library(library.find("lamp"))


def test_of_two_memories_that_fit_as_well_the_later_one_is_asked(tmp_path):
    question = "When was the mill at Dravik built?"
    for name, year in (("one", 1901), ("other", 1902)):
        write(tmp_path / name, Exchange(question, f"The mill at Dravik was built in {year}."))
    for latest, seconds in (("one", 2e9), ("other", 3e9)):
        os.utime(tmp_path / latest / "adapter_config.json", (seconds, seconds))
        assert Library(tmp_path).route([question]) == [latest]


def test_an_empty_library_answers_with_the_base(base, tmp_path):
    library = Library(tmp_path / "new")
    assert (library.list(), library.name_base(), library.route(["Who?"])) == ([], None, [None])
    (answer,) = LibraryAnswerer(library, *base, max_new_tokens=2).answer([Question("Who?")])
    assert answer.memories == ()


def test_what_is_left_after_forgetting_is_a_library_that_never_held_the_memory(library, made):
    library.forget("lamp")
    assert entries(library) == ["bread"]
    assert content(library.find("bread")) == content(made / "bread")
    assert library.route([LAMP]) == [None]
    with pytest.raises(ValueError, match="there is no memory 'lamp' in this library: choose one"):
        library.forget("lamp")


def test_a_kill_while_replacing_loses_no_memory(library):
    folder = library.find("lamp")
    (folder / ".locas-moving").mkdir()
    os.rename(folder / "adapter_config.json", folder / ".locas-moving" / "adapter_config.json")
    assert set(Library(library.folder).list()) == {"bread", "lamp"}


def test_a_kill_while_forgetting_leaves_nothing_after_the_next_opening(library, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            library.forget("lamp")
        assert library.list() == ["bread"]
    assert entries(Library(library.folder)) == ["bread"]


def test_a_memory_is_forgotten_with_what_killed_processes_left_in_it(library):
    folder = library.find("lamp")
    for left in (".locas-staged", ".999999999.partial"):
        (folder / left).mkdir()
        (folder / left / "README.md").write_text("")
    (folder / ".README.md.999999999.partial").write_text("")
    foreign = folder / ".999999999.partial.txt"
    foreign.write_text("not ours")
    with pytest.raises(ValueError, match="got '.999999999.partial.txt' too: move it away"):
        library.forget("lamp")
    foreign.unlink()
    library.forget("lamp")
    assert entries(library) == ["bread"]


def test_a_memory_that_is_being_read_is_neither_forgotten_nor_renamed(library):
    with locked(library.folder / "lamp" / CHECKPOINT_FOLDER):
        with pytest.raises(InUse, match="another reading or study is using"):
            library.forget("lamp")
        with pytest.raises(InUse, match="another reading or study is using"):
            library.rename("lamp", "light")
    before = content(library.find("lamp"))
    assert library.rename("lamp", "light") == "light"
    assert content(library.find("light")) == before
    assert CHECKPOINT_FOLDER not in os.listdir(library.find("light"))


def test_a_memory_that_another_process_forgets_meanwhile_is_left_out(library, monkeypatch):
    class Forgetting(Library):
        def __contains__(self, name):
            held = super().__contains__(name)
            shutil.rmtree(self.folder / "lamp", ignore_errors=True)
            return held

    held = Forgetting(library.folder)
    monkeypatch.setattr(module.os, "listdir", lambda _: ["lamp", "bread"])
    assert held.list() == ["bread"]
    monkeypatch.setattr(held, "list", lambda: ["lamp", "bread"])
    assert held.route([BREAD]) == ["bread"]


def test_a_memory_is_forgotten_while_another_process_opens_the_library(library, monkeypatch):
    delete = shutil.rmtree

    def delete_too(folder, *args, **kwargs):
        # The other process deletes a file.
        files = [file for file in folder.glob("*") if file.is_file()]
        if files:
            files[0].unlink()
            raise FileNotFoundError(files[0])
        delete(folder, *args, **kwargs)

    monkeypatch.setattr(module.shutil, "rmtree", delete_too)
    library.forget("lamp")
    assert entries(library) == ["bread"]


def test_an_unfinished_memory_is_listed_and_forgotten(library, base, capsys):
    add_half(library, base, "half")
    assert library.list_unfinished() == ["half"] and "half" not in library.list()
    list_memories(library.folder)
    assert capsys.readouterr().out.splitlines()[-1] == "half   unfinished"
    library.forget("half")
    assert library.list_unfinished() == [] and not (library.folder / "half").exists()


def test_a_memory_is_added_whole_or_refused(library, base):
    library.add(*base, TEXTS["lamp"], "again", SETTINGS)
    assert_same(weights(library, "lamp"), weights(library, "again"))
    assert (library.find("again") / "sample.txt").read_text() == make_sample(TEXTS["lamp"])
    with pytest.raises(ValueError, match="holds a memory: choose another folder, or give --over"):
        library.add(*base, TEXTS["lamp"], "again", SETTINGS)
    library.add(*base, TEXTS["bread"], "again", SETTINGS, overwrite=True)
    library.forget("bread")
    assert library.route([BREAD]) == ["again"]


def test_of_two_processes_that_want_a_name_the_second_gets_the_next_one(library, tmp_path):
    for name in ("lamp", "bread"):
        pack(library.find(name), tmp_path / f"{name}.zip")
    # Another process has another instance.
    other = Library(library.folder)
    names = []

    def unpack_other(_):
        names.append(other.unpack(tmp_path / "bread.zip", "Notes", lambda _: None))
        with other.new("notes") as third:
            names.append(third.name)

    names.append(library.unpack(tmp_path / "lamp.zip", "notes", unpack_other))
    assert names == ["Notes 2", "notes 3", "notes"]
    for name, source in (("notes", "lamp"), ("Notes 2", "bread")):
        assert content(library.find(name)) == content(library.find(source))
    assert entries(library) == ["Notes 2", "bread", "lamp", "notes"]


def test_a_name_that_a_killed_process_reserved_is_free(library):
    left = library.folder / ".notes.reserved"
    left.write_text("")
    with Library(library.folder, most=3).new("notes") as folder:
        assert folder.name == "notes" and left.exists()
        Library(library.folder)
        assert left.exists()
    left.write_text("")
    Library(library.folder)
    assert not left.exists()


def test_only_memories_fill_a_library(library, base):
    (library.folder / "failures.jsonl").write_text("")
    (library.folder / ".failures.jsonl.lock").write_text("")
    held = Library(library.folder, most=3)
    full = "at most 3 memories: forget some first"
    with held.new("third"), pytest.raises(ValueError, match=full):
        held.choose_folder("fourth")
    assert held.choose_folder("third") == library.folder / "third"
    add_half(held, base, "half")
    with pytest.raises(ValueError, match=full):
        held.choose_folder("third")


def test_a_memory_is_renamed_in_a_full_library_and_to_another_case(library):
    before = content(library.find("lamp"))
    full = Library(library.folder, most=2)
    assert full.rename("lamp", "ferry") == "ferry"
    assert full.rename("ferry", "Ferry") == "Ferry"
    assert content(full.folder / "Ferry") == before
    assert entries(full) == ["Ferry", "bread"]
    assert full.rename("bread", "ferry") == "ferry 2"


def test_a_change_of_case_replaces_no_other_memory(library):
    if (library.folder / "LAMP").exists():
        pytest.skip("this system ignores case")
    os.rename(library.find("bread"), library.folder / "LAMP")
    assert library.rename("lamp", "LAMP") == "LAMP 2"
    assert sorted(library.list()) == ["LAMP", "LAMP 2"]


def test_memories_of_two_bases_are_refused(library, base):
    message = "of one base, got 'another' beside 'locas_peft/tinybook-glu': use another"
    with pytest.raises(ValueError, match=message):
        library.add(*base, TEXTS["lamp"], "third", replace(SETTINGS, model="another"))
    change_config(library.find("lamp"), base_model_name_or_path="another")
    with pytest.raises(ValueError, match="a library must hold memories of one base, got "):
        library.name_base()


def test_one_base_may_be_named_by_several_paths_and_by_none(library, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {"base_model_name_or_path": str(tmp_path / "base")}
    change_config(library.find("lamp"), **config)
    change_config(library.find("bread"), base_model_name_or_path="base")
    assert library.name_base() in ("base", str(tmp_path / "base"))
    change_config(library.find("bread"), base_model_name_or_path=None)
    assert library.name_base() == str(tmp_path / "base")
    change_config(library.find("lamp"), base_model_name_or_path=None)
    assert library.name_base() is None


def test_a_library_is_no_place_for_a_single_memory(library, tmp_path):
    with pytest.raises(ValueError, match="^--out .* holds a library: give --library, or choose "):
        check_vacant(library.folder)
    check_vacant(library.find("lamp"), overwrite=True)
    check_vacant(tmp_path)


def test_a_memory_that_goes_on_is_found_by_both_texts(library, base):
    library.add(*base, TEXTS["bread"], "lamp", SETTINGS, start=library.find("lamp"))
    library.forget("bread")
    assert library.route([LAMP, BREAD]) == ["lamp", "lamp"]
    kept = (library.find("lamp") / "text.txt").read_text(encoding="utf-8")
    assert "Peder" in kept and "Hilda" in kept


def test_routing_reads_no_tensor(library):
    for name in library.list():
        (library.find(name) / "adapter_model.safetensors").write_bytes(b"")
    assert library.route([LAMP]) == ["lamp"]


def test_scores_of_nothing_are_zero():
    for memories, question in (([[], []], "Who?"), ([["a lamp"]], "?"), ([["a lamp"]], "the")):
        assert score_by_words(memories, [question]).tolist() == [[0.0] * len(memories)]
    assert score_by_words([], ["Who?"]).shape == (1, 0)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ValueError, match=r"needs bm25s: .* pip install 'locas_peft\[library\]'$"):
        score_by_words([["a lamp"]], ["Who?"])


def test_a_reading_is_finished_only_from_the_same_memory(library, base):
    options = {"start": library.find("lamp"), "resume": True}
    with pytest.raises(ValueError, match="^origin must be None as in the memory in '.*bread', got"):
        library.add(*base, TEXTS["bread"], "bread", SETTINGS, **options)


@pytest.fixture
def former(tmp_path):
    """A library that version 0.2.0 wrote."""
    return Library(shutil.copytree(FIXTURES / "library", tmp_path / "former"))


def test_a_studied_memory_of_a_former_version_is_asked_packed_and_forgotten(former, base, tmp_path):
    folder = former.find("notes")
    found = folder / "passages.safetensors"
    assert found.is_file()
    # The file is not read.
    found.write_bytes(b"damaged")
    question = load_exchanges(folder / "exchanges.jsonl")[0].question
    (answer,) = LibraryAnswerer(former, *base, max_new_tokens=4).answer([Question(question)])
    assert answer.memories == ("notes",)
    pack(folder, tmp_path / "notes.zip")
    assert former.unpack(tmp_path / "notes.zip", "again", lambda _: None) == "again"
    assert (former.find("again") / found.name).read_bytes() == b"damaged"
    for name in ("notes", "again", "plain"):
        former.forget(name)
    assert entries(former) == []


def test_what_a_former_version_made_to_find_passages_leaves_with_the_next_reading(former, base):
    settings = load_records(former.find("notes"))[-1].settings
    former.add(*base, TEXTS["bread"], "notes", settings, start=former.find("notes"))
    assert not (former.find("notes") / "passages.safetensors").exists()
    assert former.route(["Who bakes rye bread on Tuesdays?"]) == ["notes"]


def test_what_was_not_read_is_not_kept_and_not_found(base, tmp_path):
    library = Library(tmp_path)
    text = f"{TEXTS['lamp']}\n\nGeneral Zorblat conquered Quixotania in the winter."
    library.add(*base, text, "lamp", replace(SETTINGS, max_tokens=64))
    asked = ["Did General Zorblat conquer Quixotania?", LAMP]
    assert library.route(asked) == [None, "lamp"]
    for file in ("text.txt", "sample.txt"):
        kept = (tmp_path / "lamp" / file).read_text(encoding="utf-8")
        assert "Peder" in kept and "Zorblat" not in kept


def test_a_sample_that_was_added_before_a_kill_is_not_added_again(tmp_path):
    sample = tmp_path / "sample.txt"
    sample.write_text(make_sample("one", None))
    once = make_sample("two", tmp_path)
    sample.write_text(once)
    assert once == "one\ntwo\n" == make_sample("two", tmp_path)


def test_a_memory_is_found_by_its_name_its_exchanges_and_its_sample(tmp_path):
    memory = tmp_path / "one_day"
    asked = [Exchange(question, "Peder did.", "The lamp") for question in ("Who?", "When?")]
    write(memory, *asked)
    (memory / "sample.txt").write_text("other\n")
    assert list_passages(memory) == ["one day", "The lamp Peder did. Who? When?", "other"]
    assert list_passages(tmp_path / "none") == ["none"]


def test_a_memory_is_found_by_its_name_alone(tmp_path):
    long = "The old man went down to the river in May and came back with nine silver eels."
    write(tmp_path / "dunmarrow-bakery", Exchange("Who?", long))
    write(tmp_path / "skarn", Exchange("When?", long))
    found = Library(tmp_path).route(["Who owns the bakery at Dunmarrow?", "Who wrote Hamlet?"])
    assert found == ["dunmarrow-bakery", None]


def test_a_damaged_memory_does_not_stop_the_others(library, caplog):
    folder = library.find("bread")
    exchanges = folder / "exchanges.jsonl"
    exchanges.write_text("{}\n")
    assert library.route([LAMP, BREAD]) == ["lamp", None]
    assert caplog.messages[0].startswith("memory 'bread' is not found by questions: each line of ")
    exchanges.unlink()
    caplog.clear()
    config = folder / "adapter_config.json"
    sound = config.read_bytes()
    config.write_text("{")
    assert library.name_base() == "locas_peft/tinybook-glu"
    assert caplog.messages[0].startswith("memory 'bread' cannot be opened: ")
    library.check_base("locas_peft/tinybook-glu")
    with pytest.raises(ValueError, match="memories of one base, got 'another' beside "):
        library.check_base("another")
    config.write_bytes(sound)
    with (folder / "sample.txt").open("ab") as sample:
        sample.write(b"\xff")
    assert library.route([LAMP, BREAD]) == ["lamp", "bread"]
    assert make_sample("more", folder).endswith("\ufffdmore\n")


def test_a_memory_that_another_process_replaces_is_found(library):
    folder = library.find("lamp")
    expected = list_passages(folder)
    assert len(expected) > 1
    for look in (library.list, lambda: list_passages(folder)):
        # What is there between two steps of a replacement.
        (folder / ".locas-moving").mkdir()
        for name in ("adapter_config.json", "sample.txt"):
            (folder / name).rename(folder / ".locas-moving" / name)
        look()
        assert "lamp" in library and list_passages(folder) == expected


def test_the_pieces_of_a_sample_end_before_white_space():
    text = f"{'and the ' * 24}the Havorn was lost.\n\n{'x' * 450} end"
    pieces = make_sample(text).splitlines()
    assert "Havorn was lost." in pieces
    assert "".join(pieces).replace(" ", "") == "".join(text.split())
    assert max(map(len, pieces)) == 200


def test_a_sample_is_spread_over_the_text():
    words = " ".join(f"word{number}" for number in range(40_000))
    sample = make_sample(words)
    assert len(sample) < 50_000 and "word1 " in sample and "word398" in sample
    assert make_sample("one two") == "one two\n"
