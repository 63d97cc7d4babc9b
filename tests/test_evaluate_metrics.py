"""The measures as metrics of `evaluate`: they give what the plain functions give, alone and combined."""

import math

import evaluate
import pytest

from locas_peft.asking.answers import is_exact
from locas_peft.evaluation.f1 import answer_f1
from locas_peft.evaluation.metrics import ExactMatch, LocomoF1, Perplexity, Recall

ANSWERS = ["The mason Elias Thorne built it.", "Elias Thorne.", "in 1868"]
GOLD = ["Elias Thorne", "Elias Thorne", "1923"]


def test_perplexity_is_that_of_all_tokens():
    metric = Perplexity()
    metric.add(predictions=6.0, references=2)
    metric.add_batch(predictions=[4.0, 2.0], references=[1, 3])
    assert metric.compute() == {"perplexity": pytest.approx(math.exp(2.0)), "scored_tokens": 6}


def test_answers_are_measured_together():
    combined = evaluate.combine([Recall(), ExactMatch()])
    assert combined.compute(predictions=ANSWERS, references=GOLD) == {
        "recall": pytest.approx(2 / 3),
        "exact_match": pytest.approx(1 / 3),
    }


def test_f1_is_the_mean_by_the_rules_of_each_category():
    found = LocomoF1().compute(predictions=ANSWERS, references=GOLD, categories=[4, 4, 2])
    singles = [answer_f1(*pair) for pair in zip(ANSWERS, GOLD, [4, 4, 2], strict=True)]
    assert found["f1"] == pytest.approx(sum(singles) / 3)
    assert found["f1_single-hop"] == pytest.approx(sum(singles[:2]) / 2) and found["f1_temporal"] == singles[2]
    assert "f1_adversarial" not in found


@pytest.mark.parametrize(
    ("given", "gold", "exact"),
    [
        ("The lighthouse.", "a lighthouse", True),
        ("elias  Thorne", "Elias Thorne", True),
        ("Elias Thorne built it", "Elias Thorne", False),
    ],
)
def test_exact(given, gold, exact):
    assert is_exact(given, gold) is exact
