"""Questions about a text: loading them, asking them, and grading the answers."""

from __future__ import annotations

import pytest

from locas_peft import backbone, demo
from locas_peft.asking import (
    SHORT_PROMPT,
    Question,
    ask,
    ask_by_reciting,
    encode_question,
    is_right,
    load_questions,
)
from locas_peft.asking import answer as answer_all
from locas_peft.asking.answers import answer_from
from locas_peft.memories import memory_attached
from locas_peft.reading.settings import ReadingSettings
from locas_peft.reading.teaching import memorize
from locas_peft.selfstudy import Exchange, load_finder
from locas_peft.selfstudy.learning import BATCH, LEAST_STEPS
from locas_peft.text import tokenize


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
    path.write_text('\ufeff{"question": "Who\u2028came?"}\n')
    assert load_questions(path) == [Question("Who\u2028came?")]
    lines = [
        "{",
        '{"question": "Who?"}',
        '{"answer": "x"}',
        '{"question": 3}',
        "[]",
        '{"question": "", "answer": 1}',
    ]
    path.write_text("\n".join(lines))
    with pytest.raises(
        ValueError,
        match=r"with `question` and maybe `answer`, .* in line 1, 3, 4, 5, 6: correct or",
    ):
        load_questions(path)
    path.write_bytes(b'{"question": "Qui \xe9tait-ce ?"}')
    with pytest.raises(
        ValueError, match=r"^questions must be UTF-8 text, got .* \(invalid .*\): convert it$"
    ):
        load_questions(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="^questions must be one a line, got none in"):
        load_questions(path)


def test_answers_come_in_the_order_of_the_questions():
    model, tokenizer = backbone.load()
    questions = [
        Question("Who?"),
        Question("What is the name of the keeper of the house?"),
        Question("When?"),
    ]
    together = ask(model, tokenizer, questions, max_new_tokens=4)
    assert together == [
        ask(model, tokenizer, [question], max_new_tokens=4)[0] for question in questions
    ]
    assert (
        ask(model, tokenizer, questions, context="The keeper was Anna.", max_new_tokens=4)
        != together
    )


def test_answers_are_the_likeliest_tokens_whatever_the_models_own_settings_say():
    model, tokenizer = backbone.load()
    questions = [Question("He said that he said that he said")]
    expected = ask(model, tokenizer, questions, max_new_tokens=12)
    model.generation_config.update(
        repetition_penalty=3.0, no_repeat_ngram_size=1, do_sample=True, temperature=9.0
    )
    assert ask(model, tokenizer, questions, max_new_tokens=12) == expected


def test_the_base_answers_from_what_its_memory_recites(tmp_path):
    base, tokenizer = backbone.load()
    passage = "The keeper of the old house was Anna."
    settings = ReadingSettings(
        r=16, anchor=0.0, study=True, passes=60, learning_rate=1e-2
    ).complete(base)
    given = [Exchange("Who was the keeper?", passage)]
    questions = [Question("Who was the keeper?")]
    memorize(
        base,
        tokenize(tokenizer, passage),
        settings,
        out=tmp_path / "m",
        tokenizer=tokenizer,
        exchanges=given,
    )
    with memory_attached(base, tmp_path / "m") as model:
        find = load_finder(tmp_path / "m", model, tokenizer)
        (answer,), (recited,) = ask_by_reciting(model, tokenizer, questions, find, max_new_tokens=8)
    assert recited == [passage]
    prompts = [encode_question(tokenizer, questions[0].question, SHORT_PROMPT, "\n".join(recited))]
    assert [answer] == [
        text
        for _, texts in answer_all(base, tokenizer, prompts, max_new_tokens=8)
        for text in texts
    ]


def test_the_questions_about_the_page_are_answered_by_it_and_not_by_themselves():
    page, questions = demo.load_page(), demo.load_page_questions()
    assert len(questions) == len({question.question for question in questions}) == 20
    for question in questions:
        assert is_right(page, question.answer) and not is_right(
            question.question, question.answer
        ), question


def test_the_page_is_read_whole_and_studied_and_the_base_is_as_before(tmp_path):
    model, tokenizer = backbone.load()
    settings = ReadingSettings(r=4, max_tokens=50, anchor=0.0).complete(model)
    lines = []

    def progress(description, total):
        lines.append([description, total, 0])

        def advance(steps, note=""):
            lines[-1][2] += steps

        return advance

    names = [name for name, _ in model.named_modules()]
    given = [Exchange("Who?", "Elias Thorne")]
    reading = demo.teach_page(
        model, tokenizer, settings, given, tmp_path / "memory", progress=progress
    )
    assert reading.curve[-1][0] == len(tokenize(tokenizer, demo.load_page())) > 128
    assert reading.studied["kept"] == 1 and reading.studied["steps"] <= 2 * LEAST_STEPS * BATCH
    tokens = reading.curve[-1][0]
    # One lesson fills no batch: it is learned as often as fills the least number of steps.
    assert lines == [["locas-glu", tokens, tokens], ["learn", 2 * LEAST_STEPS, 2 * LEAST_STEPS]]
    assert names == [name for name, _ in model.named_modules()]
    assert (tmp_path / "memory" / "exchanges.jsonl").exists()


def test_each_method_of_the_demo_has_a_line_and_a_row():
    recalls = [demo.Recall("none", ["a", "b"], 0), demo.Recall(demo.IN_CONTEXT, ["a", "b"], 1)]
    recalls.append(demo.Recall(demo.FOUND, ["a", "b"], 2, seconds=1.0))
    assert [demo.describe_recall(each) for each in recalls] == [
        "none (no memory): 0 of 2 right",
        "in-context (the page before each question): 1 of 2 right",
        "found (a sentence of the page; nothing is learned, prepared in 1 s): 2 of 2 right",
    ]
    assert demo.describe(recalls[1]) == {
        "method": "in-context",
        "recall_right": 1,
        "recall_asked": 2,
    }
    assert demo.describe(recalls[2]) == {
        "method": "found",
        "seconds": 1.0,
        "recall_right": 2,
        "recall_asked": 2,
    }


def test_answers_come_from_the_passages_that_are_found():
    model, tokenizer = backbone.load()
    found = {
        "The garden of the old house was small.": 0.4,
        "The keeper of the old house was Anna.": 0.1,
        "No.": -1.0,
    }
    asked = [
        Question("What was small?"),
        Question("Who was the keeper?"),
        Question("Who wrote Hamlet?"),
    ]

    def find(questions):
        assert list(questions) == [each.question for each in asked]
        return [found, {"No.": 0.0}, {}]

    best, passages = ask_by_reciting(model, tokenizer, asked, find, passage=True, max_new_tokens=8)
    short, again = ask_by_reciting(model, tokenizer, asked, find, max_new_tokens=8)
    assert passages == again == [list(found), ["No."], []]
    assert short == answer_from(model, tokenizer, asked, passages, 8)
    (alone,) = answer_from(model, tokenizer, asked[2:], [[]], 8)
    assert best == ["The garden of the old house was small.", "No.", alone], (
        "where nothing is found the base answers"
    )
