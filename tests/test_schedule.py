"""The schedule of a study: what is known is learned less often, and passages only as far as they are unknown."""

import math

import pytest
import torch

from locas_peft.selfstudy import schedule
from locas_peft.selfstudy.schedule import KNOWN_NATS, MARGIN, WHOLE_EVERY, Schedule


def make(passages=("a",), *, passes=50, batch=8) -> Schedule:
    return Schedule(passages, wordings=3, passes=passes, batch=batch, seed=0)


def losses(*nats: float) -> torch.Tensor:
    return torch.tensor(nats)


def learn_all(plan: Schedule, nats: float = 1.0, resumed: bool = False) -> list[list[int]]:
    """Return the lessons of each step until none is left, each with this loss.

    A resumed plan is replaced by another one with its state after each step.
    """
    steps = []
    while plan.count_done() < plan.total:
        steps.append(plan.choose(lambda _: 1))
        plan.note(steps[-1], [losses(nats)] * len(steps[-1]))
        if resumed:
            state = plan.state_dict()
            plan = make(plan._passages, passes=plan._passes, batch=plan._batch)
            plan.load_state_dict(state)
    return steps


def due_after(plan: Schedule, nats: float) -> int:
    """Return the pass in which the one lesson is due, after a step in which it had this loss."""
    assert plan.choose(lambda _: 1) == [0]
    plan.note([0], [losses(0.0, nats)])
    return plan.state_dict()["progress"][0][0]


def test_a_known_lesson_is_learned_less_often_and_leaves_when_it_is_known_in_each_wording():
    plan = make()
    assert due_after(plan, KNOWN_NATS) == 1
    assert due_after(plan, 0.0) == 3, "known once: one pass is left out"
    assert due_after(plan, 0.0) == 6
    assert due_after(plan, math.nan) == 7, "lost again"
    assert [due_after(plan, 0.0), due_after(plan, 0.0)] == [9, 12]
    assert due_after(plan, 0.0) == plan.total == 50
    assert due_after(make(passes=2), 0.0) == 2
    assert due_after(make(passes=2), 1.0) == 1


def test_the_known_end_of_a_passage_is_left_out_but_now_and_then():
    plan = make(["a", "a", "b"])
    assert plan.reach_of(1) is None
    known, unknown = [0.0] * 8, KNOWN_NATS
    plan.note([1, 1], [losses(*known), losses(0, unknown, 0)])
    assert plan.reach_of(1) == 2 + MARGIN, "the longest of a batch"
    assert plan.reach_of(2) is None, "another passage"
    plan.note([1], [losses(*known, unknown)])
    assert plan.reach_of(1) == 9 + MARGIN
    plan.note([1], [losses(0, math.nan)])
    assert plan.turn_of(1) == WHOLE_EVERY and plan.reach_of(1) is None
    plan.note([1], [losses(0, math.nan)])
    assert plan.reach_of(1) == 2 + MARGIN


def test_each_pass_has_each_lesson_once_in_an_order_of_its_own():
    steps = learn_all(make([str(number) for number in range(6)], passes=3, batch=1))
    orders = [tuple(step[0] for step in steps[first : first + 6]) for first in (0, 6, 12)]
    assert [sorted(order) for order in orders] == [list(range(6))] * 3
    assert len(set(orders)) == 3


def test_the_lessons_of_a_pass_are_put_in_order_once(monkeypatch):
    """Shuffled at each step, 50,000 lessons took more time than learning them."""
    shuffled = []
    monkeypatch.setattr(schedule.random.Random, "shuffle", lambda _, order: shuffled.append(order))
    learn_all(make([str(number) for number in range(6)], passes=3, batch=1))
    assert len(shuffled) == 3


def test_a_batch_has_lessons_of_about_one_length():
    lengths = [0, 10, 20, 1, 11, 21, 2, 12, 22]
    plan = make(list(map(str, lengths)), passes=1, batch=3)
    while plan.count_done() < plan.total:
        chosen = plan.choose(lengths.__getitem__)
        plan.note(chosen, [losses(1.0)] * 3)
        spread = [lengths[number] for number in chosen]
        assert max(spread) - min(spread) < 10


@pytest.mark.parametrize("nats", [1.0, 0.0])
def test_a_continued_schedule_is_that_of_an_uninterrupted_one(nats):
    passages = [str(number // 2) for number in range(7)]
    whole, resumed = (make(passages, passes=4, batch=2) for _ in range(2))
    assert learn_all(resumed, nats, resumed=True) == learn_all(whole, nats)
