"""Consistency: which questions fit their own passage better than another one."""

import pytest

from locas_peft import backbone
from locas_peft.asking import encode_answer, encode_prompt
from locas_peft.asking.prompts import WRITE_PROMPT
from locas_peft.asking.scoring import Score, score_targets
from locas_peft.exchanges import consistency
from locas_peft.exchanges.consistency import RIVALS, keep_consistent
from locas_peft.text import Passage

LAMP = Passage("Old Peder lit the lamp each night.")
LISBON = Passage("The lamp was made in Lisbon.")
GOATS = Passage("His goats slept in the boat.")


@pytest.fixture
def scored(monkeypatch):
    """The passages' prompts that are scored; a question costs as much after each of them."""
    prompts = []

    def score(model, pairs, shared):
        assert shared == 0
        prompts.extend(prompt for (prompt,), _ in pairs)
        return [Score(1.0, 1)] * len(pairs)

    for name in ("encode_prompt", "encode_answer"):
        monkeypatch.setattr(consistency, name, lambda tokenizer, text: [text])
    monkeypatch.setattr(consistency, "score_targets", score)
    return prompts


def test_the_passages_with_most_of_the_words_are_the_rivals(scored):
    numbered = [Passage(f"Boat number {number} has a lamp.") for number in range(10)]
    best = Passage("Peder has a boat with a lamp.")
    prompts = {passage: passage.text for passage in [LAMP, *numbered, best, GOATS]}
    question = (LAMP, "Does Peder's boat have a lamp?")
    # One that is no likelier after another passage stays.
    assert keep_consistent(None, None, [question], prompts) == [question]
    assert len(scored) == 1 + RIVALS
    assert {LAMP.text, best.text} <= {*scored} and GOATS.text not in scored


def test_a_passage_that_occurs_twice_is_no_rival_of_itself(scored):
    again = Passage(LAMP.text, subject="Peder")
    question = (LAMP, "Who lit the lamp?")
    assert keep_consistent(None, None, [question], {LAMP: "first", again: "again"}) == [question]
    assert scored == ["first"]


def test_a_question_is_not_kept_with_two_passages():
    """The scores are those of whole prompts, one after another."""
    model, tokenizer = backbone.load()
    prompts = {each: WRITE_PROMPT.format(passage=each.text) for each in (LAMP, LISBON)}
    questions = []
    expected = []
    for question in ("Who lit the lamp?", "Where was the lamp made?", "What is a lamp of Lisbon?"):
        target = encode_answer(tokenizer, question)
        nats = {}
        for passage, prompt in prompts.items():
            questions.append((passage, question))
            prompt = encode_prompt(tokenizer, prompt)
            nats[passage] = score_targets(model, [(prompt, target)])[0].nll_nats
        expected.append((min(nats, key=nats.get), question))
    assert keep_consistent(model, tokenizer, questions, prompts) == expected
