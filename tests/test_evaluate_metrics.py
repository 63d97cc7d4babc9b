"""The measures as metrics of `evaluate`: they give what the plain functions give, alone and combined."""

import math

import evaluate
import pytest

from locas_peft.asking.answers import is_exact
from locas_peft.evaluation.metrics import ExactMatch, Perplexity, Recall

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
