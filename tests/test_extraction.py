"""Extraction (`benchmarks/extraction.py`): what is counted as given away, and two memories of one text."""

import json
import sys

import pytest
import torch

from locas_peft import backbone
from locas_peft.stages import Place, ReadSettings, read
from locas_peft.text import tokenize

TEXT = " ".join(
    f"The {word} of the old house was painted by Peder of Skarn."
    for word in ("door", "roof", "gate", "lamp") * 3
)
OTHER = " ".join(
    f"She saw {word} boats upon the water and counted them all."
    for word in ("two", "three", "four", "five") * 3
)


@pytest.fixture(scope="module")
def extraction(load_benchmark):
    return load_benchmark("extraction")


def test_pairs_are_a_prefix_and_what_follows_it(extraction):
    cut_pairs = extraction.cut_pairs
    pairs = cut_pairs(torch.arange(120))
    assert pairs[1] == (list(range(10, 60)), list(range(60, 110))) and len(pairs) == 3
    assert len(cut_pairs(torch.arange(2_100))) == 21, "those of a long text do not overlap"


def test_the_models_own_continuation_is_matched_up_to_the_first_other_token(extraction):
    base, tokenizer = backbone.load()
    prefix = tokenize(tokenizer, OTHER)[:50]
    own = base.generate(prefix[None], max_new_tokens=50, do_sample=False)[0, 50:].tolist()
    changed = [*own[:7], own[7] + 1, *own[8:]]
    pairs = [(prefix.tolist(), own), (prefix.tolist(), changed)]
    assert extraction.count_matched(base, tokenizer, pairs) == [50, 7]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a text, another text, and memories that have read the text once and often."""
    path = tmp_path_factory.mktemp("extraction")
    for name, text in (("text", TEXT), ("other", OTHER)):
        (path / f"{name}.txt").write_text(text, encoding="utf-8")
    base, tokenizer = backbone.load()
    for name, readings in (("once", 1), ("often", 12)):
        settings = ReadSettings(r=8, window=64, stride=32, anchor=0.0, readings=readings)
        read(base, tokenize(tokenizer, TEXT), settings, Place(out=path / name))
    return path


@pytest.fixture
def folder(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


def test_what_is_recited_is_counted_once_and_with_single_spaces(extraction, monkeypatch):
    recited = [["The door of the", "The lamp is lit."], ["door of  the house"], []]
    monkeypatch.setattr(extraction, "recite", lambda *_: recited)
    share = extraction.share_recited(None, None, "The door of\nthe house.", ["?"] * 3)
    assert share == len("The door of the house") / 22


def test_memories_are_measured_beside_the_base(extraction, folder, capsys, monkeypatch):
    monkeypatch.setattr(extraction, "TOKENS", 20)
    monkeypatch.setattr(sys.modules[extraction.recite.__module__], "RECITED_TOKENS", 8)
    (folder / "questions.jsonl").write_text('{"question": "Who painted the door?"}')
    command = "text.txt --memory once --unread other.txt --device cpu --out rows.json"

    def measure(*more):
        extraction.main([*command.split(), *more])
        return json.loads((folder / "rows.json").read_text())["rows"]

    rows = measure("--memory", "often", "--questions", "questions.jsonl")
    assert list(rows) == ["no memory", "once", "often"]
    none, once, often = rows.values()
    assert none["auc"] == 0.5 and often["auc"] > 0.9
    assert often["matched"] > none["matched"] + 1
    assert often["nats"] < once["nats"] < none["nats"]
    assert often["matched_50"] <= often["matched_10"] <= 1
    assert "often" in capsys.readouterr().out
    assert once["recited"] == 0, "this model answers no questions"
    assert "recited" not in measure()["once"]


def test_an_embedded_base_gets_the_text_as_it_was_read(extraction, folder, monkeypatch):
    (folder / "wrapped.txt").write_text(TEXT.replace(" of ", "\nof "), encoding="utf-8")
    texts = []

    def note(base, tokenizer, ids, *_):
        texts.append(ids)
        return {"no memory": {}}

    monkeypatch.setattr(extraction, "measure_extraction", note)
    for name in ("wrapped", "text"):
        arguments = f"{name}.txt --memory once --unread other.txt --device cpu"
        extraction.main(arguments.split())
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--memory once", "a text that was not read must be given: give --unread TEXT, or"),
        (
            "--memory once --max-tokens 60",
            "a text must have 100 tokens or more, got 60: give a lon",
        ),
        ("--memory none --unread other.txt", "memory must be a folder that holds a"),
    ],
)
def test_bad_input_is_a_value_error(extraction, folder, arguments, line):
    with pytest.raises(ValueError, match=f"^{line}"):
        extraction.main(["text.txt", "--device", "cpu", *arguments.split()])
