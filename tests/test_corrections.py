"""`benchmarks/correction.py --pairs`: the statements, and how answers are sorted."""

import sys

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
    assert len(pairs) == len({pair.question for pair in pairs}) == 20
    for pair in pairs:
        assert is_right(pair.earlier, pair.old) and not is_right(pair.earlier, pair.new)
        assert is_right(pair.later, pair.new) and not is_right(pair.later, pair.old)
        assert not is_right(pair.question, pair.old) and not is_right(pair.question, pair.new)


def test_an_answer_has_the_later_value_the_old_one_or_neither(correction, monkeypatch):
    first, second, third, *_ = correction.load_corrections()
    replies = [f"No more at {first.old}, but at {first.new}.", f"In {second.old}.", "Nobody knows."]

    class Fixed:
        def __init__(self, *_):
            pass

        def answer(self, questions):
            return [Answer(*pair) for pair in zip(questions, replies, strict=True)]

    monkeypatch.setattr(correction, "Answerer", Fixed)
    row = correction.sort_answers(None, None, [first, second, third])
    assert row == {"later": 1, "old": 1, "neither": 1, "asked": 3, "answers": replies}


def test_the_memory_of_the_facts_goes_on_with_the_later_ones(correction, monkeypatch, tmp_path):
    texts = []

    def quick(base, tokenizer, ids, settings, place, *, start):
        texts.append((tokenizer.decode(ids), start))
        given = [Exchange("Who keeps the light?", f"It is keeper number {len(texts)}.")]
        return stages.study(base, tokenizer, ids, settings, place, start=start, exchanges=given)

    monkeypatch.setattr(correction, "study", quick)
    base, tokenizer = loading.load_base(device="cpu")
    pairs = correction.load_corrections()[:2]
    settings = StudySettings(method="locas-glu", r=4, passes=1, anchor=0)
    rows = correction.measure_pairs(base, tokenizer, pairs, settings, tmp_path)
    assert list(rows) == ["the base", "before", "goes on"]
    assert all(row["later"] + row["old"] + row["neither"] == 2 for row in rows.values())
    (earlier, start), (later, memory) = texts
    assert earlier == "\n".join(pair.earlier for pair in pairs) and start is None
    assert later == "\n".join(pair.later for pair in pairs) and memory == tmp_path / "earlier"
    assert "goes on" in correction.tabulate_pairs(rows)
