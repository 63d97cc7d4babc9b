"""The measures as evaluate.Metrics: in batches or at once, without the hub, with intervals that hold their mean."""

from __future__ import annotations

import math

import numpy as np
import pytest

from locas_peft.evaluation.f1 import answer_f1
from locas_peft.evaluation.intervals import mean_interval
from locas_peft.evaluation.metrics import ClozeGain, LocomoF1, MinimalPairs, ShareFirst


def test_locomo_f1_by_category_in_batches():
    predictions = ["grey parrot, cage", "May 2023", "blue", "Lisbon", "not mentioned", "a parrot"]
    references = ["grey parrot, cage", "7 May 2023", "Blue; a colour", "Oslo", "grey parrot", "grey parrot"]
    categories = [1, 2, 3, 4, 5, 5]
    metric = LocomoF1()
    metric.add_batch(predictions=predictions[:2], references=references[:2], categories=categories[:2])
    metric.add_batch(predictions=predictions[2:], references=references[2:], categories=categories[2:])
    found = metric.compute()
    expected = [answer_f1(*row) for row in zip(predictions, references, categories, strict=True)]
    assert found["multi-hop"]["mean"] == expected[0] == 1
    assert found["temporal"]["mean"] == pytest.approx(0.8)
    assert found["adversarial"]["mean"] == pytest.approx((expected[4] + expected[5]) / 2)
    assert -1 <= found["adversarial"]["mean"] < 0
    assert found["abstention"] == {"mean": 0.5, "low": 0.0, "high": 1.0, "n": 2}
    assert found["answerable"]["n"] == 4
    again = LocomoF1().compute(predictions=predictions, references=references, categories=categories)
    assert str(again) == str(found)


def test_categories_without_questions_are_left_out():
    found = LocomoF1().compute(predictions=["x"], references=["x"], categories=[4])
    assert found.keys() == {"single-hop", "answerable"}


def test_losses_to_gains_shares_and_accuracies():
    assert ClozeGain().compute(predictions=[1.0, 2.0], references=[2.0, 4.0])["gain"]["mean"] == 1.5
    assert ShareFirst().compute(predictions=[1.0, 2.0], references=[2.0, 2.0])["first"]["mean"] == 0.5
    found = MinimalPairs().compute(predictions=[1.0, 3.0, 2.0, 2.0], references=[2.0, 2.0, 2.0, 5.0])
    assert found["accuracy"]["mean"] == 0.5, "a draw is no win"


def test_metrics_leave_numpys_random_state_alone():
    np.random.seed(3)
    expected = np.random.rand(2)
    np.random.seed(3)
    first = np.random.rand()
    MinimalPairs().compute(predictions=[1.0, 2.0], references=[2.0, 1.0])
    assert [first, np.random.rand()] == expected.tolist()


def test_an_interval_holds_its_mean_and_comes_from_the_seed():
    values = np.random.default_rng(0).normal(1.0, 2.0, 200).tolist()
    mean = mean_interval(values)
    assert mean.low < mean.mean < mean.high and mean.n == 200
    assert mean.mean == pytest.approx(sum(values) / 200)
    assert mean == mean_interval(values) != mean_interval(values, seed=1)
    # About the normal interval: 1.96 standard errors on either side.
    assert (mean.high - mean.low) / 2 == pytest.approx(1.96 * np.std(values) / math.sqrt(200), rel=0.1)


def test_intervals_of_nothing_of_one_and_of_the_same():
    assert math.isnan(mean_interval([]).mean) and mean_interval([]).n == 0
    assert mean_interval([2.0]).mean == 2.0 and math.isnan(mean_interval([2.0]).low)
    assert mean_interval([3.0] * 4).to_json() == {"mean": 3.0, "low": 3.0, "high": 3.0, "n": 4}


def test_many_values_take_little_time_and_memory():
    mean = mean_interval([float(number % 2) for number in range(20_000)])
    assert mean.low < 0.5 < mean.high and mean.high - mean.low < 0.02
