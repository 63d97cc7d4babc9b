"""Sources: the sentence of a memory's stored text that supports an answer."""

from types import SimpleNamespace

import pytest
import torch
from families import logits, teach
from peft import get_peft_model

from locas_peft import LocasConfig, backbone, calibrate
from locas_peft.asking import Answer, Question, encode_answer, encode_prompt
from locas_peft.asking.prompts import WRITE_PROMPT
from locas_peft.asking.scoring import score_targets
from locas_peft.library import Library, add_sources, check_text, find_source, join_texts
from locas_peft.library import source as module
from locas_peft.library.source import CANDIDATES, score_question
from locas_peft.memories.folder import TEXT
from locas_peft.stages import ReadSettings

SENTENCES = [
    "The lighthouse of Skarn stands on a rock.",
    "Old Peder lit the lamp each night.",
    "The lamp was made in Lisbon.",
    "His goats slept in the boat.",
]
TALE = " ".join(SENTENCES)


@pytest.fixture(scope="module")
def base():
    return backbone.load()


@pytest.fixture
def prompts(monkeypatch):
    """The prompts that are scored; the likeliest one is the one with the word that a test sets."""
    seen = SimpleNamespace(texts=[], likeliest="")

    def score(model, tokenizer, question, sentences, beginning):
        seen.texts.append(list(sentences))
        return [0.0 if seen.likeliest in sentence else 1.0 for sentence in sentences]

    monkeypatch.setattr(module, "score_question", score)
    return seen


@pytest.mark.parametrize("sentence", SENTENCES[1:])
def test_the_source_is_the_sentence_after_which_the_question_is_likeliest(prompts, sentence):
    prompts.likeliest = sentence
    assert find_source(None, None, SENTENCES, "Who lit the lamp?") == sentence
    # Both sentences with the word come first: of equal scores the earlier one.
    assert {*prompts.texts[0][:2]} == {SENTENCES[1], SENTENCES[2]}


def test_the_base_compares_the_twenty_best_by_words_alone(prompts):
    others = [f"Boat number {number} has a red sail." for number in range(100)]
    find_source(None, None, [*others, *SENTENCES], "Who lit the lamp in the boat of Peder?")
    (compared,) = prompts.texts
    assert len(compared) == CANDIDATES and {*SENTENCES[1:]} <= {*compared}


@pytest.mark.parametrize("question", ["Welches Brot backt Hilda?", "?!", "李明什么时候开了书店？"])
def test_a_question_without_a_word_of_the_text_has_no_source(prompts, question):
    assert find_source(None, None, SENTENCES, question) is None
    assert find_source(None, None, [], question) is None
    assert prompts.texts == []


def test_a_chinese_question_finds_its_sentence(prompts):
    prompts.likeliest = "书店"
    sentences = ["李明在一九九九年开了一家书店。", "今天下雨。"]
    assert find_source(None, None, sentences, "李明什么时候开了书店？") == sentences[0]


def test_the_question_is_scored_by_the_base_after_the_beginning_and_the_sentence(base):
    model, tokenizer = base
    beginning, *others = SENTENCES
    target = encode_answer(tokenizer, "Who lit the lamp?")
    expected = []
    for passage in (beginning, *(f"{beginning}\n{other}" for other in others)):
        prompt = encode_prompt(tokenizer, WRITE_PROMPT.format(passage=passage))
        expected += score_targets(model, [(prompt, target)])
    nats = score_question(model, tokenizer, "Who lit the lamp?", SENTENCES, beginning)
    assert nats == pytest.approx([score.nll_nats for score in expected], rel=1e-4)


def test_a_memory_in_the_model_changes_no_score_and_stays_active():
    model, tokenizer = backbone.load()
    arguments = (tokenizer, "Who lit the lamp?", SENTENCES, SENTENCES[0])
    expected = score_question(model, *arguments)
    ids = tokenizer(TALE, return_tensors="pt").input_ids
    adapted = get_peft_model(model, LocasConfig(r=2, seed=1)).eval()
    calibrate(adapted, [ids])
    teach(adapted)
    before = logits(adapted, ids)
    with adapted.disable_adapter():
        assert not torch.equal(logits(adapted, ids), before)
    assert score_question(model, *arguments) == expected
    assert torch.equal(logits(adapted, ids), before)


def test_sentences_longer_than_the_model_are_cut(base):
    sentences = [SENTENCES[0], "lamp " * 3000, "word" * 3000 + " lamp"]
    assert find_source(*base, sentences, "Who lit the lamp?" + " Who?" * 100) in sentences


def test_answers_get_the_source_of_their_memory(prompts, tmp_path, caplog):
    prompts.likeliest = "Peder"
    lamp, bread = tmp_path / "lamp", tmp_path / "bread"
    for folder in (lamp, bread):
        folder.mkdir()
    (lamp / TEXT).write_text("\n".join(SENTENCES), encoding="utf-8")
    answer = Answer(Question("Who lit the lamp?"), "Peder.")
    sourced = add_sources(None, None, [answer] * 4, [lamp, None, bread, str(lamp)])
    assert [one.source for one in sourced] == [SENTENCES[1], None, None, SENTENCES[1]]
    assert all(one.text == answer.text for one in sourced)
    (bread / TEXT).write_bytes(b"\xff")
    sourced = add_sources(None, None, [answer] * 2, [bread, lamp])
    assert [one.source for one in sourced] == [None, SENTENCES[1]]
    assert "memory 'bread' has no source: text must be UTF-8" in caplog.text


def test_a_memory_without_its_text_is_refused_in_one_line(tmp_path):
    line = r"^memory must hold its text for a source, got no text\.txt in '.*': make .* ask alone$"
    with pytest.raises(ValueError, match=line):
        check_text(tmp_path)
    (tmp_path / TEXT).write_text("The lamp.", encoding="utf-8")
    check_text(tmp_path)


def test_a_memory_that_goes_on_stores_both_texts_and_none_twice(tmp_path):
    assert join_texts("The lamp.", tmp_path) == "The lamp."
    (tmp_path / TEXT).write_text("The lamp.", encoding="utf-8")
    assert join_texts("The bread.", tmp_path) == "The lamp.\n\nThe bread."
    assert join_texts("The lamp.", tmp_path) == "The lamp."


def test_a_library_stores_the_text_unless_it_is_refused(base, tmp_path):
    library = Library(tmp_path / "library")
    settings = ReadSettings(r=4, window=64, stride=32, anchor=0.0)
    library.add(*base, TALE, "lamp", settings)
    folder = library.find("lamp")
    assert (folder / TEXT).read_text(encoding="utf-8") == TALE
    library.add(*base, TALE, "lamp", settings, start=folder, overwrite=True, kept_text=None)
    assert not (folder / TEXT).exists()
