"""Perplexity as a metric of `evaluate`: it is that of all tokens."""

import math

import pytest

from locas_peft.evaluation.metrics import Perplexity


def test_perplexity_is_that_of_all_tokens():
    metric = Perplexity()
    metric.add(predictions=6.0, references=2)
    metric.add_batch(predictions=[4.0, 2.0], references=[1, 3])
    assert metric.compute() == {"perplexity": pytest.approx(math.exp(2.0)), "scored_tokens": 6}
