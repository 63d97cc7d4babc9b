"""The cloze of LoCoMo (`benchmarks/cloze.py`): which spans are scored, their scores, and the figures of a run."""

import json
import sys

import pytest
from locomo_data import make_sample, make_samples, write_samples

from locas_peft import backbone
from locas_peft.asking.scoring import score_targets
from locas_peft.evaluation.conversations import (
    Conversation,
    LocomoQuestion,
    Session,
    Turn,
    load_locomo,
)


@pytest.fixture(scope="module")
def cloze(load_benchmark):
    return load_benchmark("cloze")


@pytest.fixture(scope="module")
def embedded():
    return backbone.load()


@pytest.fixture
def conversations(tmp_path):
    return load_locomo(write_samples(tmp_path, make_samples()))[0]


def test_spans_stand_word_for_word_in_their_turns(cloze, conversations):
    spans = cloze.find_spans(conversations[0])
    found = [(span.prompt, span.text, span.category) for span in spans]
    assert found == [
        ("Ida: I bought a ", "grey parrot", 1),
        ("Ida: I bought a grey parrot yesterday, and a ", "cage", 1),
        ("Ben: We moved to ", "Lisbon", 4),
    ]


def load_with_questions(folder, *questions: tuple[str, str]) -> Conversation:
    """Load a conversation that has more questions: each one's answer and the turn that has it."""
    sample = make_sample()
    for answer, turn in questions:
        question = {"question": "?", "answer": answer, "evidence": [turn], "category": 4}
        sample["qa"].append(question)
    return load_locomo(write_samples(folder, [sample]))[0][0]


def test_a_span_counts_once_and_traps_never(cloze, tmp_path):
    spans = cloze.find_spans(load_with_questions(tmp_path, ("Lisbon", "D2:1"), ("arrot", "D1:1")))
    assert [span.text for span in spans] == ["grey parrot", "cage", "Lisbon"]


def test_the_others_come_from_the_seed_and_are_never_the_span_itself(cloze, tmp_path):
    questions = [(word, "D2:2") for word in ("kitchen", "everybody", "Paint", "calms")]
    questions += [("bread", "D1:2"), ("baked", "D1:2")]
    conversation = load_with_questions(tmp_path, *questions)
    spans = cloze.find_spans(conversation, seed=1)
    assert spans == cloze.find_spans(conversation, seed=1)
    assert spans != cloze.find_spans(conversation, seed=2)
    for span in spans:
        assert len(set(span.others)) == cloze.OTHERS and span.text not in span.others


def test_spans_are_scored_in_their_prompts_alone(cloze, embedded):
    model, tokenizer = embedded
    turns = (Turn("D1:1", "Ida", "We saw the sea, the church and a garden."),)
    answers = ("the sea", "the church", "a garden", "saw")
    asked = tuple(
        LocomoQuestion(number, "?", 4, answer, ("D1:1",)) for number, answer in enumerate(answers)
    )
    talk = Conversation("talk", ("Ida", "Ben"), (Session(1, None, turns),), asked)
    first = cloze.score_spans(model, tokenizer, cloze.find_spans(talk))[0]
    pair = cloze.encode_pair(tokenizer, "Ida: We saw ", "the sea")
    expected = score_targets(model, [pair])[0].nll_nats
    assert first["nll_per_token"] * first["tokens"] == pytest.approx(expected, rel=1e-4)
    assert len(first["others_nll_per_token"]) == 3
    assert first["first"] == (first["nll_per_token"] < min(first["others_nll_per_token"]))
    assert (first["text"], first["prompt"]) == ("the sea", "Ida: We saw ")


def test_a_span_without_others_has_no_rank(cloze):
    records = [{"first": first, "others": ["x"]} for first in (True, False)]
    assert cloze.firsts([*records, {"first": True, "others": []}]) == [1.0, 0.0]


def test_right_minus_wrong_is_what_the_files_say(cloze, tmp_path, monkeypatch, capsys):
    data, out = write_samples(tmp_path, make_samples()), tmp_path / "out"
    options = "--methods lora,locas-glu --set window=128 stride=64 max_tokens=300 anchor=0"
    command = ["cloze.py", str(data), *options.split(), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    cloze.main()
    assert "right - wrong" in capsys.readouterr().out
    figures = json.loads((out / "cloze.json").read_text())
    assert figures["spans"] == 6 and figures["differences"][0]["method"] == "locas-glu"

    def list_nats(talk, memory):
        file = out / "cloze" / "lora" / f"{talk}.memory-{memory}.json"
        return [record["nll_per_token"] for record in json.loads(file.read_text())]

    right = list_nats("talk-1", "talk-1") + list_nats("talk-2", "talk-2")
    wrong = list_nats("talk-1", "talk-2") + list_nats("talk-2", "talk-1")
    mean = figures["methods"]["lora"]["right_minus_wrong"]["mean"]
    assert mean == pytest.approx((sum(wrong) - sum(right)) / len(right))


def test_a_target_is_tokenised_as_in_its_text(cloze, embedded):
    _, tokenizer = embedded
    prompt, target = cloze.encode_pair(tokenizer, "She went to the ", "old town")
    assert tokenizer.decode(prompt[1:]) == "She went to the"
    assert tokenizer.decode(target) == " old town"
    # Stands for the first special token that this tokenizer lacks.
    assert prompt[0] == tokenizer.eos_token_id
    assert prompt[1:] + target == tokenizer("She went to the old town")["input_ids"]
    assert cloze.encode_pair(tokenizer, "", "Old town")[0] == [tokenizer.eos_token_id]
    with pytest.raises(ValueError, match="^target must not be empty: give the text"):
        cloze.encode_pair(tokenizer, "She", "")
