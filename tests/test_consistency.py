"""Consistency: which questions fit their own passage better than another one."""

import pytest

from locas_peft import backbone
from locas_peft.asking import encode_answer, encode_prompt
from locas_peft.asking.prompts import WRITE_PROMPT
from locas_peft.asking.scoring import Score, score_targets
from locas_peft.selfstudy import Passage, consistency
from locas_peft.selfstudy.consistency import RIVALS, keep_consistent

LAMP = Passage("Old Peder lit the lamp each night.")
LISBON = Passage("The lamp was made in Lisbon.")
GOATS = Passage("His goats slept in the boat.")
PASSAGES = [LAMP, LISBON, GOATS]
PROMPTS = {passage: WRITE_PROMPT.format(passage=passage.text) for passage in PASSAGES}


@pytest.fixture
def scored(monkeypatch):
    """The passages' prompts that are scored; a question costs 1 nat after the ones in `likely`."""
    seen = {"prompts": [], "likely": set()}
    monkeypatch.setattr(consistency, "encode_prompt", lambda tokenizer, prompt: [prompt])
    monkeypatch.setattr(consistency, "encode_answer", lambda tokenizer, question: [question])

    def score(model, pairs, shared):
        assert shared == 0
        nats = []
        for (prompt,), _ in pairs:
            seen["prompts"].append(prompt)
            nats.append(Score(1.0 if prompt in seen["likely"] else 2.0, 1))
        return nats

    monkeypatch.setattr(consistency, "score_targets", score)
    return seen


@pytest.mark.parametrize(
    ("likely", "is_kept"), [({LAMP}, True), ({LISBON}, False), ({LAMP, LISBON}, True)]
)
def test_a_question_stays_where_no_other_passage_makes_it_likelier(scored, likely, is_kept):
    scored["likely"] = {PROMPTS[passage] for passage in likely}
    kept = keep_consistent(None, None, [(LAMP, "Who lit the lamp?")], PROMPTS)
    assert kept == [(LAMP, "Who lit the lamp?")] * is_kept


def test_the_passages_with_most_of_the_words_are_the_rivals(scored):
    numbered = [Passage(f"Boat number {number} has a lamp.") for number in range(10)]
    best = Passage("Peder has a boat with a lamp.")
    prompts = {passage: passage.text for passage in [LAMP, *numbered, best, GOATS]}
    keep_consistent(None, None, [(LAMP, "Does Peder's boat have a lamp?")], prompts)
    assert len(scored["prompts"]) == 1 + RIVALS
    assert {LAMP.text, best.text} <= {*scored["prompts"]}
    assert GOATS.text not in scored["prompts"]


def test_a_passage_that_occurs_twice_is_no_rival_of_itself(scored):
    again = Passage(LAMP.text, subject="Peder")
    scored["likely"] = {"again"}
    question = (LAMP, "Who lit the lamp?")
    prompts = {LAMP: "first", again: "again"}
    assert keep_consistent(None, None, [question], prompts) == [question]
    assert scored["prompts"] == ["first"]


def test_a_question_is_not_kept_with_two_passages():
    """The scores are those of whole prompts, one after another."""
    model, tokenizer = backbone.load()
    model.eval()
    questions = []
    expected = []
    for question in ("Who lit the lamp?", "Where was the lamp made?", "What is a lamp of Lisbon?"):
        nats = {}
        for passage in (LAMP, LISBON):
            questions.append((passage, question))
            prompt = encode_prompt(tokenizer, PROMPTS[passage])
            (score,) = score_targets(model, [(prompt, encode_answer(tokenizer, question))])
            nats[passage] = score.nll_nats
        expected.append((min(nats, key=nats.get), question))
    assert keep_consistent(model, tokenizer, questions, PROMPTS) == expected
