"""Questions about a text: loading them, asking them, and grading the answers."""

from __future__ import annotations

import pytest

from locas_peft import backbone, demo
from locas_peft.asking import (
    SHORT_PROMPT,
    Question,
    ask,
    ask_by_reciting,
    encode_answer,
    encode_prompt,
    encode_question,
    is_right,
    load_questions,
)
from locas_peft.asking import answer as answer_all
from locas_peft.asking.answers import MOST_RECITED, answer_from, rank_recited
from locas_peft.asking.continuation import continue_rows, recite
from locas_peft.asking.scoring import score_targets
from locas_peft.memories import memory_attached
from locas_peft.model import CausalLM
from locas_peft.reading.settings import ReadingSettings
from locas_peft.reading.teaching import memorize
from locas_peft.selfstudy import Exchange
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
    lines = ["{", '{"question": "Who?"}', '{"answer": "x"}', '{"question": 3}', "[]", '{"question": "", "answer": 1}']
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"with `question` and maybe `answer`, .* in line 1, 3, 4, 5, 6: correct or"):
        load_questions(path)
    path.write_bytes(b'{"question": "Qui \xe9tait-ce ?"}')
    with pytest.raises(ValueError, match=r"^questions must be UTF-8 text, got .* \(invalid .*\): convert it$"):
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


def test_answers_are_the_likeliest_tokens_whatever_the_models_own_settings_say():
    model, tokenizer = backbone.load()
    questions = [Question("He said that he said that he said")]
    expected = ask(model, tokenizer, questions, max_new_tokens=12)
    model.generation_config.update(repetition_penalty=3.0, no_repeat_ngram_size=1, do_sample=True, temperature=9.0)
    assert ask(model, tokenizer, questions, max_new_tokens=12) == expected


def test_the_base_answers_from_what_its_memory_recites(tmp_path):
    base, tokenizer = backbone.load()
    passage = "The keeper of the old house was Anna."
    settings = ReadingSettings(r=16, anchor=0.0, study=True, passes=60, learning_rate=1e-2).complete(base)
    given = [Exchange("Who was the keeper?", passage)]
    questions = [Question("Who was the keeper?")]
    memorize(base, tokenize(tokenizer, passage), settings, out=tmp_path / "m", tokenizer=tokenizer, exchanges=given)
    with memory_attached(base, tmp_path / "m") as model:
        (answer,), (recited,) = ask_by_reciting(model, tokenizer, questions, max_new_tokens=8)
    assert recited[0] == passage and len(recited) == len(set(recited)) <= MOST_RECITED
    prompts = [encode_question(tokenizer, questions[0].question, SHORT_PROMPT, "\n".join(recited))]
    assert [answer] == [text for _, texts in answer_all(base, tokenizer, prompts, max_new_tokens=8) for text in texts]


def test_the_questions_about_the_page_are_answered_by_it_and_not_by_themselves():
    page, questions = demo.load_page(), demo.load_page_questions()
    assert len(questions) == len({question.question for question in questions}) == 20
    for question in questions:
        assert is_right(page, question.answer) and not is_right(question.question, question.answer), question


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
    reading = demo.teach_page(model, tokenizer, settings, given, tmp_path / "memory", progress=progress)
    assert reading.curve[-1][0] == len(tokenize(tokenizer, demo.load_page())) > 128
    assert reading.studied["kept"] == 1 and reading.studied["steps"] <= 2 * LEAST_STEPS * BATCH
    tokens = reading.curve[-1][0]
    # One lesson fills no batch: it is learned as often as fills the least number of steps.
    assert lines == [["locas-glu", tokens, tokens], ["learn", 2 * LEAST_STEPS, 2 * LEAST_STEPS]]
    assert names == [name for name, _ in model.named_modules()]
    assert (tmp_path / "memory" / "exchanges.jsonl").exists()


def test_each_method_of_the_demo_has_a_line_and_a_row():
    recalls = [demo.Recall("none", ["a", "b"], 0), demo.Recall(demo.IN_CONTEXT, ["a", "b"], 1)]
    assert [demo.describe_recall(each) for each in recalls] == [
        "none (no memory): 0 of 2 right",
        "in-context (the page before each question): 1 of 2 right",
    ]
    assert demo.describe(recalls[1]) == {"method": "in-context", "recall_right": 1, "recall_asked": 2}


def test_recitations_go_on_greedily_after_the_search(monkeypatch):
    base, tokenizer = backbone.load()
    asked = ["Who lit the lamp of the tower?", "Where?"]
    prompts = [encode_question(tokenizer, question) for question in asked]
    generate, searched = base.generate, []

    def search(input_ids, **options):
        output = generate(input_ids=input_ids, **options)
        searched.extend(output[:, input_ids.shape[1] :].tolist())
        return output

    monkeypatch.setattr(base, "generate", search)
    monkeypatch.setattr("locas_peft.asking.continuation.first_line", lambda text: text)
    assert max(map(len, recite(base, tokenizer, asked, 3, 5))) <= 3 and {len(ids) for ids in searched} == {5}
    searched.clear()
    recited = recite(base, tokenizer, asked, 3, 40)
    assert {len(ids) for ids in searched} == {16}
    for number, prompt in enumerate(prompts):
        begun = searched[3 * number :][:3]  # no row ends: the embedded model's texts have no end token
        rest = continue_rows(CausalLM(base, cpu_attention=False), [prompt + ids for ids in begun], 24, pad=0)
        whole = [ids + more for ids, more in zip(begun, rest, strict=True)]
        assert recited[number] == list(dict.fromkeys(tokenizer.batch_decode(whole, skip_special_tokens=True)))


def test_recitations_are_among_the_passages_that_are_given():
    base, tokenizer = backbone.load()
    long = "The keeper of the old house was Anna, who had been a sailor for eleven years before she came to the coast."
    passages = [long, "The garden was small.", "The garden was small. It had a wall.", "Sí: ¿quién?"]
    asked = ["Who was the keeper?", "What of the garden was small?"]
    recited = recite(base, tokenizer, asked, 4, among=passages)
    assert [sorted(each) for each in recited] == [sorted(passages)] * 2, "whole, each once, whatever the model prefers"
    ids = [encode_answer(tokenizer, passage)[:16] for passage in passages]
    prompts = [encode_question(tokenizer, question) for question in asked]
    for prompt, found in zip(prompts, recited, strict=True):
        scores = score_targets(base, [(prompt, each) for each in ids[:1] + ids[3:]])
        means = dict(zip([long, passages[3]], (score.per_token for score in scores), strict=True))
        assert [each for each in found if each in means] == sorted(means, key=means.get), "the likeliest first"
    assert len(recite(base, tokenizer, asked[:1], 2, among=passages)[0]) == 2
    assert recite(base, tokenizer, asked, 4, among=passages[:1]) == [[long]] * 2


def test_the_best_recited_passage_explains_the_question_too(tmp_path, monkeypatch):
    base, tokenizer = backbone.load()
    passages = ["The keeper of the old house was Anna.", "The garden of the old house was small."]
    given = [Exchange("Who was the keeper?", passages[0]), Exchange("What was small?", passages[1])]
    settings = ReadingSettings(r=16, anchor=0.0, study=True, passes=40, learning_rate=1e-2).complete(base)
    text = tokenize(tokenizer, " ".join(passages))
    memorize(base, text, settings, out=tmp_path / "m", tokenizer=tokenizer, exchanges=given)
    asked = [Question("What of the Old House was small?")]
    prompt = encode_question(tokenizer, asked[0].question)
    with memory_attached(base, tmp_path / "m") as model:
        recited = recite(model, tokenizer, [asked[0].question])
        with monkeypatch.context() as patched:
            patched.setattr(CausalLM, "can_cache", lambda host: False)
            assert recite(model, tokenizer, [asked[0].question]) == recited
        (answer,), (ranked,) = ask_by_reciting(model, tokenizer, asked, rerank=True)
        (scored,) = rank_recited(model, tokenizer, [asked[0].question])
        (short,), again = ask_by_reciting(model, tokenizer, asked, max_new_tokens=8)
        after_question = [(prompt, encode_answer(tokenizer, passage)) for passage in ranked]
        nats = [score.nll_nats for score in score_targets(model, after_question)]
    target = encode_answer(tokenizer, asked[0].question)
    requests = [f"Old House\n\n{passage}\n\nWrite a question about this text." for passage in ranked]
    channel = score_targets(base, [(encode_prompt(tokenizer, request), target) for request in requests])
    sums = [own / 2 + other.nll_nats for own, other in zip(nats, channel, strict=True)]
    assert list(scored) == ranked and list(scored.values()) == pytest.approx(sums, rel=1e-4)
    assert sums == sorted(sums) and answer == ranked[0] and sorted(ranked) == sorted(recited[0]) and len(ranked) > 1
    assert again[0] and answer_from(base, tokenizer, asked, again, 8) == [short], "the base answers from the passages"
