"""A library: memories are added, found, asked and forgotten; names and files cannot leave it."""

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from hashlib import sha256
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import locas_peft.library.library as module
from locas_command.memories import library as list_memories
from locas_peft import backbone
from locas_peft.asking import Question, ask_by_reciting, encode_answer, encode_question
from locas_peft.asking.answers import measure_gain
from locas_peft.library import Library, make_sample, score_by_words
from locas_peft.library.routing import list_passages
from locas_peft.memories.checkpoint import CHECKPOINT_FOLDER, InUse, locked
from locas_peft.model import CausalLM
from locas_peft.reading import ReadingSettings, teaching
from locas_peft.selfstudy import Exchange, load_exchanges, save_exchanges
from locas_peft.tuner import adapters_disabled

TEXTS = {
    "lamp": "The lamp on the rock at Skarn was lit by Old Peder, and nobody else went there in winter. "
    * 6,
    "bread": "The bakery in Dunmarrow belongs to Hilda Brass, who bakes rye bread on Tuesdays. "
    * 6,
}
SETTINGS = ReadingSettings(r=4, window=64, stride=32, anchor=0.0)


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
    ]
    answers = library.ask(*base, asked, max_new_tokens=8)
    assert [each.memories for each in answers] == [("lamp",), (), ("bread",)]
    assert [each.question for each in answers] == asked
    with library.attach(base[0], ["lamp"]) as model:
        (with_lamp,) = module.ask(model, base[1], asked[:1], max_new_tokens=8)
    (alone,) = module.ask(*base, asked[1:2], max_new_tokens=8)
    assert (answers[0].answer, answers[1].answer) == (with_lamp, alone)
    (recited,) = library.ask(*base, asked[:1], by=ask_by_reciting, max_new_tokens=8)
    assert recited == answers[0], "it has not studied: it has nothing to recite"


def test_a_studied_memory_that_says_what_the_base_would_say_leaves_the_question_to_it(
    library, base, monkeypatch
):
    asked = [Question("Who lit the lamp at Skarn?"), Question("Where is the bakery?")]
    gains = []

    def measure(*args):
        gains.extend(measure_gain(*args))
        return [0.5 for _ in args[-1]]

    monkeypatch.setattr(module, "measure_gain", measure)
    answers = library.ask(*base, asked, max_new_tokens=8)
    assert [each.memories for each in answers] == [
        ("lamp",),
        ("bread",),
    ]  # not studied: they have no exchanges
    save_exchanges(
        library.folder / "lamp" / "exchanges.jsonl", [Exchange(asked[0].question, "Old Peder")]
    )
    answers = library.ask(*base, asked, max_new_tokens=8)
    assert [each.memories for each in answers] == [(), ("bread",)] and len(gains) == 1
    assert answers[0].answer == module.ask(*base, asked[:1], max_new_tokens=8)[0]
    (recited,) = library.ask(*base, asked[:1], by=ask_by_reciting, max_new_tokens=8)
    assert (recited.memories, recited.recited, recited.answer) == ((), (), answers[0].answer)
    monkeypatch.setattr(module, "LEAST_GAIN", 0.4)
    assert library.ask(*base, asked[:1], max_new_tokens=8)[0].memories == ("lamp",)
    (recited,) = library.ask(*base, asked[:1], by=ask_by_reciting, max_new_tokens=8)
    assert recited.recited == ("Old Peder",), "what it has studied, word for word"
    monkeypatch.setattr(
        module, "measure_gain", lambda *args: said.append(args[-1]) or measure_gain(*args)
    )
    said = []
    library.ask(*base, asked[:1], by=ask_by_reciting, max_new_tokens=8)
    assert said[0] != ["Old Peder"], (
        "its own answer is measured, since it recites its passages whatever is asked"
    )


def test_passages_are_found_in_all_memories_that_fit_nearly_as_well(library, base, monkeypatch):
    held = {
        "lamp": "Peder sold eels at the fair in Skarn.",
        "bread": "Hilda sang at the fair in Skarn.",
    }
    for name, passage in held.items():
        asked = passage.replace("Peder", "Who").replace("Hilda", "Who").replace(".", "?")
        save_exchanges(library.folder / name / "exchanges.jsonl", [Exchange(asked, passage)])
    both, one = "What was done at the fair in Skarn?", "Who sold eels at the fair in Skarn?"
    assert [set(each) for each in library.route([both, one, "Who wrote Hamlet?"], 5)] == [
        {*held},
        {"lamp"},
        set(),
    ]
    assert [len(each) for each in library.route([both, one], 1)] == [1, 1]
    monkeypatch.setattr(module, "measure_gain", lambda *args: [2.0 for _ in args[-1]])
    by = partial(ask_by_reciting, passage=True)
    answers = library.ask(*base, [Question(both), Question(one)], by=by, max_new_tokens=8)
    for answer in answers:
        assert answer.answer == answer.recited[0]
        assert answer.memories == tuple(
            name for each in answer.recited for name in held if held[name] == each
        )
    assert [len(each.recited) for each in answers] == [2, 1] and answers[1].answer == held["lamp"]


def test_a_memory_that_was_taught_nothing_answers_by_what_is_found_in_it(base, tmp_path):
    library, text = Library(tmp_path), "Old Peder lit the lamp at Skarn. Nobody else went there."
    study = replace(SETTINGS, study=True, passes=0)
    exchanges = [Exchange("Who lit the lamp at Skarn?", "Old Peder lit the lamp at Skarn.")]
    library.add(*base, text, "lamp", study, exchanges=exchanges)
    asked = [Question("Who lit the lamp in winter?"), Question("Who lit the lamp at Dunmarrow?")]
    direct = library.ask(*base, asked[:1], max_new_tokens=8)
    assert [each.memories for each in direct] == [()], "its own answer is the base's"
    by = partial(ask_by_reciting, passage=True)
    found, other = library.ask(*base, asked, by=by, max_new_tokens=8)
    assert (found.answer, found.memories) == (exchanges[0].answer, ("lamp",))
    assert (other.recited, other.memories) == ((), ()), "its text has no Dunmarrow"


def test_a_taught_memory_that_goes_on_without_passes_is_still_asked_what_it_would_say(
    library, base, monkeypatch
):
    exchanges, asked = (
        [Exchange("Who lit the lamp at Skarn?", "Old Peder lit it.")],
        [Question("Who lit the lamp at Skarn?")],
    )
    more = replace(SETTINGS, study=True, passes=0)
    library.add(*base, TEXTS["lamp"], "lamp", more, start=library.find("lamp"), exchanges=exchanges)
    monkeypatch.setattr(module, "measure_gain", lambda *args: [0.5 for _ in args[-1]])
    (answer,) = library.ask(*base, asked, by=ask_by_reciting, max_new_tokens=8)
    assert answer.memories == (), "its weights are those of its reading, which has taught it"


def test_the_gain_is_that_of_the_memory_over_the_base_in_nats_a_token(library, base):
    question, given = "Who lit the lamp?", "Old Peder lit the lamp at Skarn."
    prompt, answer = encode_question(base[1], question), encode_answer(base[1], given)
    ids = torch.tensor([[*prompt, *answer]])

    def nats(model):
        logs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        return -logs.gather(1, ids[0, 1:, None])[-len(answer) :].mean().item()

    with torch.no_grad(), library.attach(base[0], ["lamp"]) as model:
        (gain, empty) = measure_gain(model, base[1], [prompt] * 2, [given, ""])
        with model.disable_adapter():
            alone = nats(model)
        assert gain == pytest.approx(alone - nats(model), rel=1e-4) and gain > 0.1 and empty == 0
    assert measure_gain(*base, [prompt], [given]) == [0.0]


def test_a_memory_is_no_library_and_no_memory_has_the_name_of_the_list_of_failures(library):
    with pytest.raises(
        ValueError,
        match="^a library must be a folder of memories, got a memory, '.*lamp': take its",
    ):
        Library(library.find("lamp"))
    with pytest.raises(
        ValueError, match="^name must be at most 60 .*, got 'Failures.jsonl': choose another$"
    ):
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
        assert Library(tmp_path).route(["When was the mill at Dravik built?"]) == [(latest,)]
        os.utime(tmp_path / latest / "adapter_config.json", (1e9, 1e9))


def test_an_empty_library_answers_with_the_base(base, tmp_path):
    library = Library(tmp_path / "new")
    assert (library.list(), library.name_base(), library.route(["Who?"])) == ([], None, [()])
    assert library.ask(*base, [Question("Who?")], max_new_tokens=2)[0].memories == ()


def test_a_memory_goes_on_under_its_name_and_is_found_by_both_texts(library, base):
    before = load_file(library.folder / "lamp" / "adapter_model.safetensors")
    library.add(*base, TEXTS["bread"], "lamp", SETTINGS, start=library.find("lamp"))
    after = load_file(library.folder / "lamp" / "adapter_model.safetensors")
    assert before.keys() == after.keys() and any(
        not np.array_equal(before[name], after[name]) for name in before
    )
    library.forget("bread")
    asked = ["Who lit the lamp at Skarn?", "Where is the bakery?"]
    assert library.list() == ["lamp"] and library.route(asked) == [("lamp",), ("lamp",)]


def test_what_is_left_after_forgetting_is_a_library_that_never_held_the_memory(
    library, made, base, tmp_path
):
    shutil.copytree(made / "bread", tmp_path / "other" / "bread")
    library.forget("lamp")
    assert content(library.folder) == content(tmp_path / "other")
    assert library.route(["Who lit the lamp at Skarn?"]) == [()]
    with pytest.raises(
        ValueError, match="there is no memory 'lamp' in this library: choose one of the list"
    ):
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


def test_a_memory_that_is_being_read_is_not_forgotten(library):
    with (
        locked(library.folder / "lamp" / CHECKPOINT_FOLDER),
        pytest.raises(InUse, match="another reading is using"),
    ):
        library.forget("lamp")
    library.forget("lamp")


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
    assert held.route(["Where is the bakery of Hilda Brass?"]) == [("bread",)]


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
    def interrupt(chunk):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        library.add(*base, TEXTS["lamp"], "half", SETTINGS, on_chunk=interrupt)
    assert library.list_unfinished() == ["half"] and "half" not in library.list()
    list_memories(library.folder)
    assert capsys.readouterr().out.splitlines()[-1] == "half   unfinished"
    with locked(library.folder / "half" / CHECKPOINT_FOLDER), pytest.raises(InUse):
        library.forget("half")
    library.forget("half")
    assert library.list_unfinished() == [] and not (library.folder / "half").exists()


def test_a_memory_is_added_as_memorize_writes_it(library, base, made, tmp_path):
    library.add(*base, TEXTS["lamp"], "again", SETTINGS)
    one, two = (
        load_file(library.find(name) / "adapter_model.safetensors") for name in ("lamp", "again")
    )
    assert one.keys() == two.keys() and all((one[key] == two[key]).all() for key in one)
    assert (library.find("again") / "sample.txt").read_text() == make_sample(TEXTS["lamp"])
    with pytest.raises(
        ValueError, match="holds a memory: choose another folder, or give --overwrite"
    ):
        library.add(*base, TEXTS["lamp"], "again", SETTINGS)
    library.add(*base, TEXTS["bread"], "again", SETTINGS, overwrite=True)
    assert library.route(["Who bakes rye bread?"])[0] in {("again",), ("bread",)}


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "LAMP"])
def test_a_name_that_cannot_be_a_folder_of_its_own_is_refused(library, base, name):
    before = content(library.folder)
    with pytest.raises(ValueError, match="name must"):
        library.add(*base, TEXTS["lamp"], name, SETTINGS)
    assert content(library.folder) == before


def test_memories_of_two_bases_are_refused(library, base):
    other = SimpleNamespace(complete=lambda *_: SimpleNamespace(model="another", max_tokens=None))
    with pytest.raises(
        ValueError, match="of one base, got 'another' beside 'locas_peft/tinybook-glu': use another"
    ):
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
    assert library.route(["Who lit the lamp at Skarn?"]) == [("lamp",)]


def test_a_thousand_memories_are_listed_and_routed(tmp_path):
    for number in range(1000):
        write(
            tmp_path / f"m{number}",
            Exchange(f"Where is the key number{number}?", f"The key number{number} is here."),
        )
    library = Library(tmp_path)
    assert len(library.list()) == 1000
    assert library.route(["Where is the key number77?"]) == [("m77",)]


def test_people_who_share_a_name_are_told_apart():
    def tell(*names):
        return [[f"{name} was born in Brenmouth. Where was {name} born?"] for name in names]

    passages = tell("Anselm Dunmere", "Anselm Corrow", "Brida Corrow")
    scores = score_by_words(
        passages, ["Where was Anselm Corrow born?", "Where was Brida Dunmere born?"]
    )
    assert scores[0].argmax() == 1 and scores[0].max() > 1
    assert scores[1].max() < scores[0].max() / 1.5


def test_scores_of_nothing_are_zero():
    assert score_by_words([], ["Who?"]).shape == (1, 0)
    assert np.array_equal(score_by_words([[], []], ["Who?"]), np.zeros((1, 2)))
    assert np.array_equal(score_by_words([["a lamp"]], ["?", "the"]), np.zeros((2, 1)))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bm25s", None)
    message = r"^what is found by words needs bm25s: install the extra with pip install 'locas_peft\[library\]'$"
    with pytest.raises(ValueError, match=message):
        score_by_words([["a lamp"]], ["Who?"])


def test_a_memory_is_taught_beside_others_which_stay_as_they_are_and_is_saved_alone(
    library, base, monkeypatch
):
    frozen, before = [], content(library.find("lamp"))
    tensors = library.find("lamp") / "adapter_model.safetensors"
    compared = teaching.Anchor.losses

    def losses(anchor, host, text, *args):
        with torch.no_grad(), adapters_disabled(host.model):
            without = host.logits(text[:, :-1], 1)
        with library_of_lamp.attach(backbone.load()[0], ["lamp"]) as lamp, torch.no_grad():
            frozen.append(torch.equal(without, CausalLM(lamp).logits(text[:, :-1], 1)))
        return compared(anchor, host, text, *args)

    library_of_lamp = library
    monkeypatch.setattr(teaching.Anchor, "losses", losses)
    settings = ReadingSettings(
        r=4, window=64, stride=32, anchor=0.3, anchor_every=1, max_tokens=100
    )
    reading = library.add(*base, TEXTS["bread"], "more", settings, beside=["lamp"])
    assert frozen and all(frozen), "the anchor compares with the base and the memory beside"
    assert content(library.find("lamp")) == before and reading.extra_parameters == 6 * 3 * 4 * 256
    assert reading.origin == {
        "start": None,
        "beside": {"lamp": sha256(tensors.read_bytes()).hexdigest()},
    }
    saved = load_file(library.find("more") / "adapter_model.safetensors")
    assert saved.keys() == load_file(library.find("lamp") / "adapter_model.safetensors").keys()
    alone = library.add(*base, TEXTS["bread"], "alone", settings)
    assert alone.nll_nats != reading.nll_nats and alone.origin is None
    assert (
        list(library.list_taught_beside("lamp")) == ["more"]
        and library.list_taught_beside("more") == {}
    )
    with library.attach(base[0], ["lamp", "more"]) as both:
        assert not any(parameter.requires_grad for parameter in both.parameters())
        assert set(both.active_adapters) == {"beside 1", "default"}
    assert not any("locas" in name for name, _ in base[0].named_modules())


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        (["jam"], "^there is no memory 'jam' in this library: choose one of the list$"),
        (
            ["bread"],
            "^beside must be other memories than '.*bread', which is written: leave it out$",
        ),
    ],
)
def test_memories_that_cannot_stand_beside_another_are_refused(library, base, beside, message):
    before = content(library.folder)
    with pytest.raises(ValueError, match=message):
        library.add(*base, TEXTS["bread"], "bread", SETTINGS, beside=beside, overwrite=True)
    assert content(library.folder) == before


def test_a_reading_is_finished_only_beside_the_same_memories_and_from_the_same_one(library, base):
    made = library.add(*base, TEXTS["bread"], "new", SETTINGS, beside=["lamp"])
    assert library.add(*base, TEXTS["bread"], "new", SETTINGS, beside=["lamp"], resume=True) == made
    with pytest.raises(
        ValueError,
        match="^beside must be {'lamp': .* as in the memory in '.*new', got None: choose",
    ):
        library.add(*base, TEXTS["bread"], "new", SETTINGS, resume=True)
    library.add(*base, TEXTS["bread"], "scratch", SETTINGS)
    with pytest.raises(
        ValueError, match="^start must be None as in the memory in '.*scratch', got '.*': choose"
    ):
        library.add(
            *base, TEXTS["bread"], "scratch", SETTINGS, start=library.find("lamp"), resume=True
        )

    def stop(chunk):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        library.add(*base, TEXTS["bread"], "cut", SETTINGS, beside=["lamp"], on_chunk=stop)
    with pytest.raises(
        ValueError, match="^beside must be {'lamp': .* as in the checkpoint in '.*', got None"
    ):
        library.add(*base, TEXTS["bread"], "cut", SETTINGS, resume=True)
    library.add(*base, TEXTS["bread"], "cut", SETTINGS, beside=["lamp"], resume=True)
    one, two = (
        load_file(library.find(name) / "adapter_model.safetensors") for name in ("new", "cut")
    )
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_several_memories_become_one_that_has_studied_all_their_exchanges(library, base):
    settings = ReadingSettings(r=4, window=64, stride=32, anchor=0.0, study=True, passes=1)
    asked = {
        "lamp": "Who lit the lamp at Skarn?",
        "bread": "Who bakes rye bread?",
        "later": "Who lit the lamp at Skarn?",
    }
    for name, question in asked.items():
        exchanges = [Exchange(question, f"{name.title()} did that at the house.")]
        text = TEXTS.get(name, TEXTS["lamp"])
        library.add(*base, text, name, settings, exchanges=exchanges, overwrite=True)
        os.utime(library.find(name) / "adapter_config.json", (1e9 + len(library.list()),) * 2)
    before = content(library.folder)
    reading = library.consolidate(*base, list(asked), "all")
    made = library.find("all")
    assert {
        name: each for name, each in content(library.folder).items() if not name.startswith("all/")
    } == before
    assert [(each.question, each.answer) for each in load_exchanges(made / "exchanges.jsonl")] == [
        ("Who lit the lamp at Skarn?", "Later did that at the house."),
        ("Who bakes rye bread?", "Bread did that at the house."),
    ]
    tensors = load_file(made / "adapter_model.safetensors")
    assert {len(each) for name, each in tensors.items() if "locas_up" in name} == {4}, (
        "as many slots as the widest"
    )
    assert (
        reading.studied["kept"] == 2
        and reading.title == "lamp and bread and later"
        and reading.settings.study
    )
    assert library.route(["Who bakes rye bread?"]) == [("all",)]
    with pytest.raises(
        ValueError, match="holds a memory: choose another folder, or give --overwrite"
    ):
        library.consolidate(*base, ["lamp", "bread"], "all")
    for names in (["lamp"], ["lamp", "lamp"]):
        with pytest.raises(
            ValueError, match="^names must be of two or more studied memories, got lamp.*: choose"
        ):
            library.consolidate(*base, names, "other")
    (library.find("bread") / "exchanges.jsonl").unlink()
    with pytest.raises(
        ValueError, match="^names must be of two or more studied memories, got lamp, bread"
    ):
        library.consolidate(*base, ["lamp", "bread"], "other")
    assert "other" not in os.listdir(library.folder)


def test_a_sample_that_was_added_before_a_kill_is_not_added_again(tmp_path):
    (tmp_path / "sample.txt").write_text(make_sample("one", None))
    once = make_sample("two", tmp_path)
    (tmp_path / "sample.txt").write_text(once)
    assert once == "one\ntwo\n" == make_sample("two", tmp_path)


def test_a_memory_is_found_by_its_exchanges_before_its_sample(tmp_path):
    write(
        tmp_path / "one",
        Exchange("Who?", "Peder did.", "The lamp"),
        Exchange("When?", "Peder did.", "The lamp"),
    )
    (tmp_path / "one" / "sample.txt").write_text("other\n")
    assert list_passages(tmp_path / "one") == ["The lamp Peder did. Who? When?"]
    assert list_passages(tmp_path) == []


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
