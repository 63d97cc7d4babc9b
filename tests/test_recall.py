"""Questions about a text: loading them, asking them, and grading the answers."""

from __future__ import annotations

import pytest

from locas_peft import backbone
from locas_peft.evaluation.recall import Question, ask, is_right, load_questions


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("It was Elias Thorne.", "Elias Thorne", True),
        ("it was ELIAS  thorne", "Elias Thorne", True),
        ("A silver compass, I think", "the silver compass", True),
        ("In 1868", "1868", True),
        ("In 18680", "1868", False),
        ("Ninety sailors", "nine", False),
        ("", "nine", False),
    ],
)
def test_an_answer_is_right_where_the_gold_phrase_occurs_in_it(answer, gold, right):
    assert is_right(answer, gold) is right


def test_questions_are_loaded_and_bad_lines_are_named(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "Who?", "answer": "She"}\n\n{"question": "When?"}\n')
    assert load_questions(path) == [Question("Who?", "She"), Question("When?")]
    for line in ("{", '{"answer": "x"}', '{"question": 3}', "[]"):
        path.write_text(f'{{"question": "Who?"}}\n{line}\n')
        with pytest.raises(ValueError, match=r"^line 2 of .* must be a JSON object with `question`"):
            load_questions(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="^questions must be one a line, got none in"):
        load_questions(path)


def test_answers_come_in_the_order_of_the_questions():
    model, tokenizer = backbone.load()
    questions = [Question("Who?"), Question("What is the name of the keeper of the house?"), Question("When?")]
    together = ask(model, tokenizer, questions, max_new_tokens=4)
    assert together == [ask(model, tokenizer, [question], max_new_tokens=4)[0] for question in questions]
    assert ask(model, tokenizer, questions, context="The keeper was Anna.", max_new_tokens=4) != together
