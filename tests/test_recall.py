"""Questions about a text: loading them, asking them, and grading the answers."""

import pytest

from locas_peft import backbone
from locas_peft.asking import (
    Answer,
    Answerer,
    Question,
    continue_texts,
    count_right,
    load_questions,
)


def test_questions_are_loaded_and_bad_lines_are_named(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "Who?", "answer": "She"}\n\n{"question": "When?"}\n')
    assert load_questions(path) == [Question("Who?", "She"), Question("When?")]
    path.write_text('\ufeff{"question": "Who\u2028came?"}\n')
    assert load_questions(path) == [Question("Who\u2028came?")]
    lines = ["{", '{"question": "Who?"}', '{"answer": "x"}', '{"question": 3}', "[]"]
    lines += ['{"question": "", "answer": 1}', '{"question": "Who?", "answer": " "}']
    for content, message in (
        ("\n".join(lines).encode(), r"maybe `answer`, .* in line 1, 3, 4, 5, 6, 7: correct or"),
        (b'{"question": "Qui \xe9tait-ce ?"}', r"^questions must be UTF-8 text, .*: convert it$"),
        (b"\n", "^questions must be one a line, got none in"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_questions(path)


def test_answers_come_in_the_order_of_the_questions():
    model, tokenizer = backbone.load()
    texts = ["Who?", "What is the name of the keeper of the house?", "When?"]
    questions = [Question(each) for each in texts]
    answerer = Answerer(model, tokenizer, max_new_tokens=4)
    together = answerer.answer(questions)
    assert [answer.question for answer in together] == questions
    assert together == [answerer.answer([question])[0] for question in questions]
    informed = Answerer(model, tokenizer, context="The keeper was Anna.", max_new_tokens=4)
    assert informed.answer(questions) != together


def test_answers_are_counted_where_a_gold_answer_is_known():
    known, unknown = Question("Who?", "the keeper"), Question("Who?")
    answers = [Answer(known, text) for text in ("A keeper.", "It was the keeper", "")]
    answers.append(Answer(unknown, "A keeper."))
    assert [answer.right for answer in answers] == [True, True, False, None]
    assert count_right(answers) == 2


def test_answers_are_the_likeliest_tokens_whatever_the_models_own_settings_say():
    model, tokenizer = backbone.load()
    answerer = Answerer(model, tokenizer, max_new_tokens=12)
    questions = [Question("He said that he said that he said")]
    expected = answerer.answer(questions)
    model.generation_config.update(
        repetition_penalty=3.0, no_repeat_ngram_size=1, do_sample=True, temperature=9.0
    )
    assert answerer.answer(questions) == expected


@pytest.fixture
def chat_base():
    """The embedded model with a chat template."""
    model, tokenizer = backbone.load()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    )
    return model, tokenizer


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def test_a_conversation_is_continued_as_its_prompt_and_shown_while_it_is_written(chat_base):
    model, tokenizer = chat_base
    reply = {"role": "assistant", "content": "there was a king."}
    turns = [user("Once upon a time"), reply, user("And then?")]
    shown = []
    answerer = Answerer(model, tokenizer, max_new_tokens=5)
    one, other = answerer.reply([turns, turns[:1]], on_text=shown.append)
    prompt = "user: Once upon a time\nassistant: there was a king.\nuser: And then?\nassistant:"
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert one.text == continue_texts(model, tokenizer, [ids], 5)[0].strip()
    assert (one.question, other.question) == (Question("And then?"), Question("Once upon a time"))
    assert [text.strip() for text in shown[-1]] == [one.text, other.text]
    assert answerer.reply([turns[:1]]) == [other]


def test_the_context_stands_before_the_last_message(chat_base):
    answerer = Answerer(*chat_base, context="Peder lit it.")
    prompt = answerer._encode([user("Hello?"), user("Who lit it?")])
    expected = "user: Hello?\nuser: Read this text.\n\nPeder lit it.\n\nWho lit it?\nassistant:"
    assert chat_base[1].decode(prompt) == expected


def test_the_oldest_turns_are_left_out_and_a_message_that_does_not_fit_is_refused(chat_base):
    long = user("word " * 900)
    turns = [long, {"role": "assistant", "content": "Fine."}, long]
    answerer = Answerer(*chat_base, max_new_tokens=300)
    assert answerer._encode(turns) == answerer._encode([long])
    message = "^message and max_new_tokens must fit the model's 2048 positions, got "
    with pytest.raises(ValueError, match=message):
        answerer.reply([[user("word " * 2000)]])
