"""`benchmarks/correction.py --pairs`: the statements, and how answers are sorted."""

import sys
from types import SimpleNamespace

import pytest

from locas_peft import stages
from locas_peft.asking import Answer, is_right
from locas_peft.bases import loading
from locas_peft.selfstudy import Exchange
from locas_peft.stages import StudySettings


@pytest.fixture
def correction(load_benchmark):
    module = load_benchmark("correction")
    yield module
    for name in ("biographies", "measuring"):
        sys.modules.pop(name, None)


def test_the_values_tell_the_statements_apart(correction):
    pairs = correction.load_corrections()
    assert len({pair.question for pair in pairs}) == len(pairs) == 20
    for pair in pairs:
        texts = (pair.earlier, pair.later, pair.question)
        assert [is_right(text, pair.old) for text in texts] == [True, False, False]
        assert [is_right(text, pair.new) for text in texts] == [False, True, False]


def test_an_answer_has_the_later_value_the_old_one_or_neither(correction, monkeypatch):
    first, second, third, *_ = correction.load_corrections()
    replies = [f"No more at {first.old}, but at {first.new}.", f"In {second.old}.", "Nobody knows."]
    answerer = SimpleNamespace(answer=lambda _: [Answer("", reply) for reply in replies])
    monkeypatch.setattr(correction, "Answerer", lambda *_: answerer)
    row = correction.sort_answers(None, None, [first, second, third])
    assert row == {"later": 1, "old": 1, "neither": 1, "asked": 3, "answers": replies}


def test_the_memory_of_the_facts_goes_on_with_the_later_ones(correction, monkeypatch, tmp_path):
    studied = []

    def quick(base, tokenizer, ids, settings, place, *, start):
        studied.append((tokenizer.decode(ids), start))
        given = [Exchange("Who keeps the light?", f"It is keeper number {len(studied)}.")]
        return stages.study(base, tokenizer, ids, settings, place, start=start, exchanges=given)

    monkeypatch.setattr(correction, "study", quick)
    base, tokenizer = loading.load_base(device="cpu")
    first, second = pairs = correction.load_corrections()[:2]
    settings = StudySettings(method="locas-glu", r=4, passes=1, anchor=0)
    rows = correction.measure_pairs(base, tokenizer, pairs, settings, tmp_path)
    assert list(rows) == ["the base", "before", "goes on"]
    assert all(row["later"] + row["old"] + row["neither"] == 2 for row in rows.values())
    assert studied == [
        (f"{first.earlier}\n{second.earlier}", None),
        (f"{first.later}\n{second.later}", tmp_path / "earlier"),
    ]
    assert "goes on" in correction.tabulate_pairs(rows)
