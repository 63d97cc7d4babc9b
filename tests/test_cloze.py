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
    for span in spans:
        turn = conversations[0].turns[span.dia_id]
        assert f"{turn.speaker}: {' '.join(turn.text.split())}".startswith(span.prompt + span.text)


def test_a_span_counts_once_and_traps_never(cloze, tmp_path):
    sample = make_sample()
    sample["qa"].append(
        {"question": "Which city?", "answer": "Lisbon", "evidence": ["D2:1"], "category": 4}
    )
    sample["qa"].append(
        {"question": "Again?", "answer": "arrot", "evidence": ["D1:1"], "category": 4}
    )
    spans = cloze.find_spans(load_locomo(write_samples(tmp_path, [sample]))[0][0])
    assert [span.text for span in spans] == ["grey parrot", "cage", "Lisbon"]


def test_the_others_come_from_the_seed_and_are_never_the_span_itself(cloze, tmp_path):
    sample = make_sample()
    words = ["bread", "kitchen", "everybody", "Paint", "calms", "baked"]
    turns = {word: "D1:2" if word in ("bread", "baked") else "D2:2" for word in words}
    sample["qa"] += [
        {"question": "?", "answer": w, "evidence": [turns[w]], "category": 4} for w in words
    ]
    conversation = load_locomo(write_samples(tmp_path, [sample]))[0][0]
    spans = cloze.find_spans(conversation, seed=1)
    assert spans == cloze.find_spans(conversation, seed=1)
    assert spans != cloze.find_spans(conversation, seed=2)
    for span in spans:
        assert len(set(span.others)) == cloze.OTHERS and span.text not in span.others


def test_spans_are_scored_in_their_prompts_alone(cloze, embedded):
    model, tokenizer = embedded
    turns = (Turn("D1:1", "Ida", "We saw the sea, the church and a garden."),)
    asked = [
        LocomoQuestion(n, "?", 4, text, ("D1:1",))
        for n, text in enumerate(["the sea", "the church", "a garden", "saw"])
    ]
    spans = cloze.find_spans(
        Conversation("talk", ("Ida", "Ben"), (Session(1, None, turns),), tuple(asked))
    )
    scores = cloze.score_spans(model, tokenizer, spans)
    expected = score_targets(model, [cloze.encode_pair(tokenizer, "Ida: We saw ", "the sea")])[
        0
    ].nll_nats
    first = scores[0]
    assert first["nll_per_token"] * first["tokens"] == pytest.approx(expected, rel=1e-4)
    assert len(first["others_nll_per_token"]) == 3
    assert first["first"] == (first["nll_per_token"] < min(first["others_nll_per_token"]))
    assert (first["text"], first["prompt"]) == ("the sea", "Ida: We saw ")


def test_losses_to_gains_and_shares(cloze):
    new, old = (
        [{"nll_per_token": value} for value in values] for values in ((1.0, 2.0), (2.0, 4.0))
    )
    assert cloze.gains(new, old) == [1.0, 2.0]
    records = [
        {"first": True, "others": ["x"]},
        {"first": False, "others": ["x"]},
        {"first": True, "others": []},
    ]
    assert cloze.firsts(records) == [1.0, 0.0], "a span without others has no rank"


def test_right_minus_wrong_is_what_the_files_say(cloze, tmp_path, monkeypatch, capsys):
    data = write_samples(tmp_path, make_samples())
    options = "--methods lora,locas-glu --set window=128 stride=64 max_tokens=300 anchor=0"
    monkeypatch.setattr(
        sys, "argv", ["cloze.py", str(data), *options.split(), "--out", str(tmp_path / "out")]
    )
    cloze.main()
    assert "right - wrong" in capsys.readouterr().out
    figures = json.loads((tmp_path / "out" / "cloze.json").read_text())
    assert figures["spans"] == 6 and figures["differences"][0]["method"] == "locas-glu"
    differences = []
    for own, other in (("talk-1", "talk-2"), ("talk-2", "talk-1")):
        files = (
            tmp_path / "out" / "cloze" / "lora" / f"{own}.memory-{name}.json"
            for name in (own, other)
        )
        right, wrong = (json.loads(file.read_text()) for file in files)
        differences += [
            w["nll_per_token"] - r["nll_per_token"] for r, w in zip(right, wrong, strict=True)
        ]
    mean = figures["methods"]["lora"]["right_minus_wrong"]["mean"]
    assert mean == pytest.approx(sum(differences) / len(differences))


def test_a_target_is_tokenised_as_in_its_text(cloze, embedded):
    _, tokenizer = embedded
    prompt, target = cloze.encode_pair(tokenizer, "She went to the ", "old town")
    assert tokenizer.decode(prompt[1:]) == "She went to the"
    assert tokenizer.decode(target) == " old town"
    assert prompt[0] == tokenizer.eos_token_id, (
        "stands for the first special token that this tokenizer lacks"
    )
    assert prompt[1:] + target == tokenizer("She went to the old town")["input_ids"]
    assert cloze.encode_pair(tokenizer, "", "Old town")[0] == [tokenizer.eos_token_id]
    message = r"^target must not be empty: give the text that is to be scored$"
    with pytest.raises(ValueError, match=message):
        cloze.encode_pair(tokenizer, "She", "")
