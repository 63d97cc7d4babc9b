"""Means by category, gains, shares and accuracies, with intervals around them."""

import math

import numpy as np
import pytest

from locas_peft.evaluation.f1 import abstains, answer_f1
from locas_peft.evaluation.intervals import mean_interval, rise_interval
from locas_peft.evaluation.locomo import f1_by_category


def make_records(*rows: tuple[str, str, int]) -> list[dict]:
    records = []
    for prediction, gold, category in rows:
        f1 = answer_f1(prediction, gold, category)
        records.append({"category": category, "f1": f1, "abstains": abstains(prediction)})
    return records


def test_f1_by_category():
    records = make_records(
        ("grey parrot, cage", "grey parrot, cage", 1),
        ("May 2023", "7 May 2023", 2),
        ("blue", "Blue; a colour", 3),
        ("Lisbon", "Oslo", 4),
        ("not mentioned", "grey parrot", 5),
        ("a parrot", "grey parrot", 5),
    )
    found = f1_by_category(records)
    *answerable, first_trap, second_trap = [record["f1"] for record in records]
    assert found["multi-hop"]["mean"] == answerable[0] == 1
    assert found["temporal"]["mean"] == pytest.approx(0.8)
    assert found["adversarial"]["mean"] == pytest.approx((first_trap + second_trap) / 2)
    assert -1 <= found["adversarial"]["mean"] < 0
    margin = pytest.approx(12.706 * 0.5)
    low, high = found["abstention"]["low"], found["abstention"]["high"]
    assert found["abstention"]["mean"] == 0.5 and found["abstention"]["n"] == 2
    assert 0.5 - low == margin and high - 0.5 == margin
    assert found["answerable"]["n"] == 4
    assert found["answerable"]["mean"] == pytest.approx(sum(answerable) / 4)


def test_categories_without_questions_are_left_out():
    assert f1_by_category(make_records(("x", "x", 4))).keys() == {"single-hop", "answerable"}


def test_intervals_leave_numpys_random_state_alone():
    np.random.seed(3)
    expected = np.random.rand(2)
    np.random.seed(3)
    first = np.random.rand()
    mean_interval([1.0, 0.0] * 5)
    assert [first, np.random.rand()] == expected.tolist()


def test_intervals_of_nothing_of_one_and_of_the_same():
    assert math.isnan(mean_interval([])["mean"]) and mean_interval([])["n"] == 0
    assert mean_interval([2.0])["mean"] == 2.0 and math.isnan(mean_interval([2.0])["low"])
    assert mean_interval([3.0] * 4) == {"mean": 3.0, "low": 3.0, "high": 3.0, "n": 4}


@pytest.mark.parametrize("count", range(2, 10))
def test_intervals_of_few_values_are_students(count):
    student = pytest.importorskip("scipy.stats").t
    values = np.random.default_rng(count).normal(3, 2, count)
    error = values.std(ddof=1) / math.sqrt(count)
    low, high = student.interval(0.95, count - 1, values.mean(), error)
    found = mean_interval(values)
    assert (found["low"], found["high"]) == pytest.approx((low, high), abs=1e-3)


def test_intervals_are_those_of_scipy():
    bootstrap = pytest.importorskip("scipy.stats").bootstrap
    random = np.random.default_rng(7)
    before = random.normal(50, 9, 37)
    after, tokens = before + random.normal(1, 1, 37), np.full(37, 16.0)

    def rise(before, after, tokens, axis=-1):
        total = tokens.sum(axis)
        return np.exp(after.sum(axis) / total) - np.exp(before.sum(axis) / total)

    def estimate(data, statistic, batch, **more):
        options = {"n_resamples": 9_999, "confidence_level": 0.95, "method": "percentile", **more}
        random = np.random.default_rng(0)
        found = bootstrap(data, statistic, batch=batch, rng=random, **options).confidence_interval
        return pytest.approx((found.low, found.high), rel=1e-12)

    mean, rises = mean_interval(before), rise_interval(before, after, tokens)
    assert rises["mean"] == pytest.approx(rise(before, after, tokens))
    assert (mean["low"], mean["high"]) == estimate((before,), np.mean, 1_000)
    paired = estimate((before, after, tokens), rise, 500, paired=True, vectorized=True)
    assert (rises["low"], rises["high"]) == paired
