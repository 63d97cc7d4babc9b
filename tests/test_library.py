"""A library: memories are added, found, asked and forgotten; names and files cannot leave it."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

import locas_peft.library.library as module
from locas_command.memories import library as list_memories
from locas_peft import backbone
from locas_peft.asking import Answerer, Question
from locas_peft.library import Library, LibraryAnswerer, make_sample, score_by_words
from locas_peft.library.routing import list_passages
from locas_peft.memories.checkpoint import CHECKPOINT_FOLDER, InUse, locked
from locas_peft.memories.folder import pack
from locas_peft.selfstudy import Exchange, load_exchanges, save_exchanges
from locas_peft.stages import ReadSettings, load_records

FIXTURES = Path(__file__).parent / "fixtures" / "0.2.0"

TEXTS = {
    "lamp": "The lamp on the rock at Skarn was lit by Old Peder, and nobody else went there in winter. "
    * 6,
    "bread": "The bakery in Dunmarrow belongs to Hilda Brass, who bakes rye bread on Tuesdays. "
    * 6,
}
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


def interrupt(chunk):
    raise KeyboardInterrupt


def write(folder, *exchanges):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LOCAS", "base_model_name_or_path": "b"})
    )
    save_exchanges(folder / "exchanges.jsonl", exchanges)


def test_a_question_is_answered_with_the_memory_that_it_is_about(library, base):
    asked = [
        Question("Who lit the lamp at Skarn?"),
        Question("Who wrote Hamlet?"),
        Question("Where is the bakery?"),
        Question("Who lit the lamp?"),
    ]
    answers = LibraryAnswerer(library, *base, max_new_tokens=8).answer(asked)
    assert [answer.memories for answer in answers] == [("lamp",), (), ("bread",), ("lamp",)]
    assert [answer.question for answer in answers] == asked
    with library.attach(base[0], "lamp") as model:
        with_lamp = Answerer(model, base[1], max_new_tokens=8).answer([asked[0], asked[3]])
    (alone,) = Answerer(*base, max_new_tokens=8).answer(asked[1:2])
    assert [answers[0].text, answers[3].text] == [answer.text for answer in with_lamp]
    assert answers[1] == alone
    assert not any("locas" in name for name, _ in base[0].named_modules())


def test_a_conversation_is_continued_with_the_memory_that_its_last_message_is_about(library, base):
    turns = [[{"role": "user", "content": text}] for text in ("Where is the bakery?", "Who?")]
    shown = []
    answers = LibraryAnswerer(library, *base, max_new_tokens=4).reply(turns, on_text=shown.append)
    assert [answer.memories for answer in answers] == [("bread",), ()]
    with library.attach(base[0], "bread") as model:
        (with_bread,) = Answerer(model, base[1], max_new_tokens=4).reply(turns[:1])
    assert answers[0].text == with_bread.text and len(shown) == 8


def test_a_question_that_is_too_long_leaves_the_base_as_it_was(library, base):
    long = Question("Who lit the lamp at Skarn? " * 400)
    with pytest.raises(ValueError, match="^prompt 0 and max_new_tokens must fit the model's"):
        LibraryAnswerer(library, *base).answer([long])
    assert not any("locas" in name for name, _ in base[0].named_modules())


def test_a_memory_is_no_library_and_no_memory_has_the_name_of_the_list_of_failures(library):
    message = "^a library must be a folder of memories, got a memory, '.*lamp': take its"
    with pytest.raises(ValueError, match=message):
        Library(library.find("lamp"))
    message = "^name must be at most 60 .*, got 'Failures.jsonl': choose another$"
    with pytest.raises(ValueError, match=message):
        library.choose_folder("Failures.jsonl")


def test_of_two_memories_that_fit_as_well_the_later_one_is_asked(tmp_path):
    for name, year in (("one", 1901), ("other", 1902)):
        write(
            tmp_path / name,
            Exchange(
                "When was the mill at Dravik built?", f"The mill at Dravik was built in {year}."
            ),
        )
    for latest in ("one", "other"):
        os.utime(tmp_path / latest / "adapter_config.json", (2e9, 2e9))
        assert Library(tmp_path).route(["When was the mill at Dravik built?"]) == [latest]
        os.utime(tmp_path / latest / "adapter_config.json", (1e9, 1e9))


def test_an_empty_library_answers_with_the_base(base, tmp_path):
    library = Library(tmp_path / "new")
    assert (library.list(), library.name_base(), library.route(["Who?"])) == ([], None, [None])
    (answer,) = LibraryAnswerer(library, *base, max_new_tokens=2).answer([Question("Who?")])
    assert answer.memories == ()


def test_a_memory_goes_on_under_its_name_and_is_found_by_both_texts(library, base):
    before = load_file(library.folder / "lamp" / "adapter_model.safetensors")
    library.add(*base, TEXTS["bread"], "lamp", SETTINGS, start=library.find("lamp"))
    after = load_file(library.folder / "lamp" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert any(not np.array_equal(before[name], after[name]) for name in before)
    library.forget("bread")
    asked = ["Who lit the lamp at Skarn?", "Where is the bakery?"]
    assert library.list() == ["lamp"] and library.route(asked) == ["lamp", "lamp"]


def test_what_is_left_after_forgetting_is_a_library_that_never_held_the_memory(
    library, made, tmp_path
):
    shutil.copytree(made / "bread", tmp_path / "other" / "bread")
    library.forget("lamp")
    assert content(library.folder) == content(tmp_path / "other")
    assert library.route(["Who lit the lamp at Skarn?"]) == [None]
    message = "there is no memory 'lamp' in this library: choose one of the list"
    with pytest.raises(ValueError, match=message):
        library.forget("lamp")


def test_a_kill_while_replacing_loses_no_memory(library):
    moving = library.folder / "lamp" / ".locas-moving"
    moving.mkdir()
    os.rename(library.folder / "lamp" / "adapter_config.json", moving / "adapter_config.json")
    assert library.list() == ["bread"]
    assert set(Library(library.folder).list()) == {"bread", "lamp"}


def test_a_kill_while_forgetting_leaves_nothing_after_the_next_opening(library, monkeypatch):
    def killed(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        library.forget("lamp")
    assert library.list() == ["bread"]
    monkeypatch.undo()
    assert Library(library.folder).list() == ["bread"] and os.listdir(library.folder) == ["bread"]


def test_a_memory_is_forgotten_with_what_killed_processes_left_in_it(library):
    folder = library.find("lamp")
    for left in (".locas-staged", ".999999999.partial"):
        (folder / left).mkdir()
        (folder / left / "README.md").write_text("")
    (folder / ".README.md.999999999.partial").write_text("")
    (folder / ".999999999.partial.txt").write_text("not ours")
    with pytest.raises(ValueError, match="got '.999999999.partial.txt' too: move it away"):
        library.forget("lamp")
    (folder / ".999999999.partial.txt").unlink()
    library.forget("lamp")
    assert os.listdir(library.folder) == ["bread"]


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
    library.forget("light")
    assert os.listdir(library.folder) == ["bread"]


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
    assert held.route(["Where is the bakery of Hilda Brass?"]) == ["bread"]


def test_a_memory_is_forgotten_while_another_process_opens_the_library(library, monkeypatch):
    delete = shutil.rmtree

    def delete_too(folder, *args, **kwargs):
        if files := [file for file in folder.glob("*") if file.is_file()]:
            files[0].unlink()  # by the other process
            raise FileNotFoundError(files[0])
        delete(folder, *args, **kwargs)

    monkeypatch.setattr(module.shutil, "rmtree", delete_too)
    library.forget("lamp")
    assert os.listdir(library.folder) == ["bread"]


def test_an_unfinished_memory_is_listed_and_forgotten(library, base, capsys):
    with pytest.raises(KeyboardInterrupt):
        library.add(*base, TEXTS["lamp"], "half", SETTINGS, on_step=interrupt)
    assert library.list_unfinished() == ["half"] and "half" not in library.list()
    list_memories(library.folder)
    assert capsys.readouterr().out.splitlines()[-1] == "half   unfinished"
    with locked(library.folder / "half" / CHECKPOINT_FOLDER), pytest.raises(InUse):
        library.forget("half")
    library.forget("half")
    assert library.list_unfinished() == [] and not (library.folder / "half").exists()


def test_a_memory_is_added_whole_or_refused(library, base):
    library.add(*base, TEXTS["lamp"], "again", SETTINGS)
    one, two = (
        load_file(library.find(name) / "adapter_model.safetensors") for name in ("lamp", "again")
    )
    assert one.keys() == two.keys() and all((one[key] == two[key]).all() for key in one)
    assert (library.find("again") / "sample.txt").read_text() == make_sample(TEXTS["lamp"])
    message = "holds a memory: choose another folder, or give --overwrite"
    with pytest.raises(ValueError, match=message):
        library.add(*base, TEXTS["lamp"], "again", SETTINGS)
    library.add(*base, TEXTS["bread"], "again", SETTINGS, overwrite=True)
    assert library.route(["Who bakes rye bread?"])[0] in {"again", "bread"}


def test_of_two_processes_that_want_a_name_the_second_gets_the_next_one(library, tmp_path):
    pack(library.find("lamp"), tmp_path / "lamp.zip")
    pack(library.find("bread"), tmp_path / "bread.zip")
    # Another process has another instance.
    other, names = Library(library.folder), []

    def unpack_other(_):
        names.append(other.unpack(tmp_path / "bread.zip", "Notes", lambda _: None))
        with other.new("notes") as third:
            names.append(third.name)

    names.append(library.unpack(tmp_path / "lamp.zip", "notes", unpack_other))
    assert names == ["Notes 2", "notes 3", "notes"]
    for name, source in (("notes", "lamp"), ("Notes 2", "bread")):
        assert content(library.find(name)) == content(library.find(source))
    assert sorted(os.listdir(library.folder)) == ["Notes 2", "bread", "lamp", "notes"]


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
    with (
        held.new("third"),
        pytest.raises(ValueError, match="at most 3 memories: forget some first"),
    ):
        held.choose_folder("fourth")
    assert held.choose_folder("third") == library.folder / "third"
    with pytest.raises(KeyboardInterrupt):
        held.add(*base, TEXTS["lamp"], "half", SETTINGS, on_step=interrupt)
    with pytest.raises(ValueError, match="at most 3 memories: forget some first"):
        held.choose_folder("third")


def test_a_memory_is_renamed_in_a_full_library_and_to_another_case(library):
    before = content(library.find("lamp"))
    full = Library(library.folder, most=2)
    assert full.rename("lamp", "ferry") == "ferry"
    assert full.rename("ferry", "Ferry") == "Ferry"
    assert content(full.folder / "Ferry") == before
    assert sorted(os.listdir(full.folder)) == ["Ferry", "bread"]
    assert full.rename("bread", "ferry") == "ferry 2"


def test_a_change_of_case_replaces_no_other_memory(library):
    if (library.folder / "LAMP").exists():
        pytest.skip("this system ignores case")
    os.rename(library.find("bread"), library.folder / "LAMP")
    assert library.rename("lamp", "LAMP") == "LAMP 2"
    assert sorted(library.list()) == ["LAMP", "LAMP 2"]


def test_memories_of_two_bases_are_refused(library, base):
    other = replace(SETTINGS, model="another")
    message = "of one base, got 'another' beside 'locas_peft/tinybook-glu': use another"
    with pytest.raises(ValueError, match=message):
        library.add(*base, TEXTS["lamp"], "third", other)
    config = library.find("lamp") / "adapter_config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "another"})
    )
    with pytest.raises(ValueError, match="a library must hold memories of one base, got "):
        library.name_base()


def test_routing_reads_no_tensor(library):
    for name in library.list():
        (library.find(name) / "adapter_model.safetensors").write_bytes(b"")
    assert library.route(["Who lit the lamp at Skarn?"]) == ["lamp"]


def test_a_thousand_memories_are_listed_and_routed(tmp_path):
    for number in range(1000):
        write(
            tmp_path / f"m{number}",
            Exchange(f"Where is the key number{number}?", f"The key number{number} is here."),
        )
    library = Library(tmp_path)
    assert len(library.list()) == 1000
    assert library.route(["Where is the key number77?"]) == ["m77"]


def test_scores_of_nothing_are_zero():
    assert score_by_words([], ["Who?"]).shape == (1, 0)
    assert np.array_equal(score_by_words([[], []], ["Who?"]), np.zeros((1, 2)))
    assert np.array_equal(score_by_words([["a lamp"]], ["?", "the"]), np.zeros((2, 1)))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bm25s", None)
    message = r"^what is found by words needs bm25s: install the extra with pip install 'locas_peft\[library\]'$"
    with pytest.raises(ValueError, match=message):
        score_by_words([["a lamp"]], ["Who?"])


def test_a_reading_is_finished_only_from_the_same_memory(library, base):
    library.add(*base, TEXTS["bread"], "scratch", SETTINGS)
    message = "^origin must be None as in the memory in '.*scratch', got '.*': choose"
    with pytest.raises(ValueError, match=message):
        library.add(
            *base, TEXTS["bread"], "scratch", SETTINGS, start=library.find("lamp"), resume=True
        )


@pytest.fixture
def former(tmp_path):
    """A library that version 0.2.0 wrote."""
    return Library(shutil.copytree(FIXTURES / "library", tmp_path / "former"))


def test_a_studied_memory_of_a_former_version_is_asked_packed_and_forgotten(former, base, tmp_path):
    folder = former.find("notes")
    assert (folder / "passages.safetensors").is_file()
    # The file is not read.
    (folder / "passages.safetensors").write_bytes(b"damaged")
    question = load_exchanges(folder / "exchanges.jsonl")[0].question
    (answer,) = LibraryAnswerer(former, *base, max_new_tokens=4).answer([Question(question)])
    assert answer.memories == ("notes",)
    pack(folder, tmp_path / "notes.zip")
    assert former.unpack(tmp_path / "notes.zip", "again", lambda _: None) == "again"
    assert (former.find("again") / "passages.safetensors").read_bytes() == b"damaged"
    for name in ("notes", "again", "plain"):
        former.forget(name)
    assert os.listdir(former.folder) == []


def test_what_a_former_version_made_to_find_passages_leaves_with_the_next_reading(former, base):
    settings = load_records(former.find("notes"))[-1].settings
    former.add(*base, TEXTS["bread"], "notes", settings, start=former.find("notes"))
    assert not (former.find("notes") / "passages.safetensors").exists()
    assert former.route(["Who bakes rye bread on Tuesdays?"]) == ["notes"]


def test_what_was_not_read_is_not_kept_and_not_found(base, tmp_path):
    library = Library(tmp_path)
    text = f"{TEXTS['lamp']}\n\nGeneral Zorblat conquered Quixotania in the winter."
    library.add(*base, text, "lamp", replace(SETTINGS, max_tokens=64))
    assert library.route(["Did General Zorblat conquer Quixotania?", "Who lit the lamp?"]) == [
        None,
        "lamp",
    ]
    for file in ("text.txt", "sample.txt"):
        kept = (tmp_path / "lamp" / file).read_text(encoding="utf-8")
        assert "Peder" in kept and "Zorblat" not in kept


def test_a_sample_that_was_added_before_a_kill_is_not_added_again(tmp_path):
    (tmp_path / "sample.txt").write_text(make_sample("one", None))
    once = make_sample("two", tmp_path)
    (tmp_path / "sample.txt").write_text(once)
    assert once == "one\ntwo\n" == make_sample("two", tmp_path)


def test_a_memory_is_found_by_its_name_its_exchanges_and_its_sample(tmp_path):
    write(
        tmp_path / "one_day",
        Exchange("Who?", "Peder did.", "The lamp"),
        Exchange("When?", "Peder did.", "The lamp"),
    )
    (tmp_path / "one_day" / "sample.txt").write_text("other\n")
    found = list_passages(tmp_path / "one_day")
    assert found == ["one day", "The lamp Peder did. Who? When?", "other"]
    assert list_passages(tmp_path / "none") == ["none"]


def test_a_memory_is_found_by_its_name_alone(tmp_path):
    long = "The old man went down to the river in May and came back with nine silver eels."
    write(tmp_path / "dunmarrow-bakery", Exchange("Who?", long))
    write(tmp_path / "skarn", Exchange("When?", long))
    found = Library(tmp_path).route(["Who owns the bakery at Dunmarrow?", "Who wrote Hamlet?"])
    assert found == ["dunmarrow-bakery", None]


def test_a_damaged_memory_does_not_stop_the_others(library, caplog):
    (library.find("bread") / "exchanges.jsonl").write_text("{}\n")
    asked = ["Who lit the lamp at Skarn?", "Where is the bakery of Hilda Brass?"]
    assert library.route(asked) == ["lamp", None]
    assert caplog.messages[0].startswith("memory 'bread' is not found by questions: each line of ")
    (library.find("bread") / "exchanges.jsonl").unlink()
    with (library.find("bread") / "sample.txt").open("ab") as sample:
        sample.write(b"\xff")
    assert library.route(asked) == ["lamp", "bread"]
    assert make_sample("more", library.find("bread")).endswith("\ufffdmore\n")


def test_a_sample_is_spread_over_the_text():
    words = " ".join(f"word{number}" for number in range(40_000))
    sample = make_sample(words)
    assert len(sample) < 50_000 and "word1 " in sample and "word399" in sample
    assert make_sample("one two") == "one two\n"


def test_a_memory_is_forgotten_where_a_killed_process_left_one_of_its_name(library):
    left = library.folder / ".lamp.1.forgotten"
    left.mkdir()
    (left / "adapter_config.json").write_text("{}")
    library.forget("lamp")
    assert library.list() == ["bread"]
    Library(library.folder)
    assert os.listdir(library.folder) == ["bread"]
