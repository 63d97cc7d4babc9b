"""LoCoMo's data: the release's form is read, what is no LoCoMo is named with its place, the rest is kept."""

import re

import pytest
from locomo_data import make_sample, make_samples, write_samples

from locas_peft.evaluation.conversations import (
    choose_conversations,
    dialogue_lines,
    keep_evidence,
    keep_sessions,
    load_locomo,
)
from locas_peft.evaluation.prompts import PROMPTS, make_prompt


def dialogue(conversation) -> str:
    return "\n".join(dialogue_lines(conversation))


@pytest.fixture
def conversations(tmp_path):
    return load_locomo(write_samples(tmp_path, make_samples()))[0]


def test_the_releases_form_is_read_whole(tmp_path):
    conversations, problems = load_locomo(write_samples(tmp_path, make_samples()))
    assert not problems
    assert [conversation.sample_id for conversation in conversations] == ["talk-1", "talk-2"]
    first = conversations[0]
    assert first.speakers == ("Ida", "Ben")
    assert list(first.turns) == ["D1:1", "D1:2", "D2:1", "D2:2"]
    assert [question.category for question in first.questions] == [1, 2, 3, 4, 4, 5]
    *_, city, number, trap = first.questions
    assert city.evidence == ("D2:1", "D1:2"), "two ids in one entry"
    assert number.answer == "1", "numbers are answers too"
    assert trap.answer == "grey parrot", "of category 5 the trap"


def test_a_dialogue_has_its_dates_speakers_and_photos(conversations):
    assert dialogue(conversations[0]).splitlines() == [
        "Session 1, 9:00 am on 1 March, 2023",
        "Ida: I bought a grey parrot yesterday, and a cage.",
        "Ben: Lovely! I baked bread. [photo: a loaf]",
        "",
        "Session 2, 8:30 pm on 4 April, 2023",
        "Ben: We moved to Lisbon last week.",
        "Ida: Paint the kitchen blue, it calms everybody.",
    ]


def test_sessions_come_in_their_numbers_order(tmp_path):
    sample = make_sample()
    sample["conversation"]["session_10"] = [{"speaker": "Ida", "dia_id": "D10:1", "text": "Bye."}]
    conversation = load_locomo(write_samples(tmp_path, [sample]))[0][0]
    assert dialogue_lines(conversation)[-2:] == ["Session 10", "Ida: Bye."]


def load_with_problem(folder, samples: list):
    """Load samples, one of which has one problem; return the conversations and the problem."""
    conversations, problems = load_locomo(write_samples(folder, samples))
    (problem,) = problems
    return conversations, problem


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("text", r"^talks\.json\[1\] must have a 'conversation', got none: sample left out$"),
        ({"conversation": {"speaker_a": "Ida"}}, r"\[1\]\.conversation must have a session with"),
        ({"conversation": {"session_1": []}}, r"\[1\]\.conversation must have a session with"),
        ({"sample_id": "../up"}, r"\[1\]\.sample_id must be letters, .*, got '\.\./up'"),
        ({"sample_id": "talk-1"}, r"^talks\.json\[1\]\.sample_id must be unique, got 'talk-1'"),
    ],
)
def test_a_conversation_that_cannot_be_used_is_left_out_with_its_place(tmp_path, changed, message):
    sample = changed if isinstance(changed, str) else make_sample("talk-3") | changed
    conversations, problem = load_with_problem(tmp_path, [make_sample(), sample])
    assert [conversation.sample_id for conversation in conversations] == ["talk-1"]
    assert re.search(message, problem)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"question": "Who?", "category": 4}, r"\[1\] must have an 'answer' \(category 4\), got"),
        ({"question": "Who?", "category": 5, "answer": "No"}, r"must have an 'adversarial_answer'"),
        ({"question": "Who?", "category": 4, "answer": " "}, "must have an 'answer' .*, got ' '"),
        ({"question": "Who?", "category": 6, "answer": "x"}, r"\.category must be 1 to 5, got 6: "),
        ({"question": "", "category": 4, "answer": "x"}, r"\[1\] must have a 'question', got"),
        ("Who?", r"\.qa\[1\] must have a 'question', got 'Who\?'"),
    ],
)
def test_a_question_that_cannot_be_asked_is_left_out_with_its_place(tmp_path, question, message):
    sample = make_sample()
    sample["qa"][1] = question
    conversations, problem = load_with_problem(tmp_path, [sample])
    assert [found.index for found in conversations[0].questions] == [0, 2, 3, 4, 5]
    assert re.search(message, problem)


def test_a_broken_turn_costs_that_turn_alone(tmp_path):
    sample = make_sample()
    del sample["conversation"]["session_1"][0]["text"]
    conversations, problem = load_with_problem(tmp_path, [sample])
    assert list(conversations[0].turns) == ["D1:2", "D2:1", "D2:2"]
    place = "talks.json[0].conversation.session_1[0]"
    assert problem.startswith(f"{place} must have dia_id, speaker and text")


@pytest.mark.parametrize("content", ["[]", '{"a": 1}', "[1, 2]", "3", '[{"conversation": {}}]'])
def test_a_file_that_is_no_locomo_is_one_line(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content, encoding="utf-8")
    message = r"^LoCoMo data must .* give the release's locomo10\.json"
    with pytest.raises(ValueError, match=message) as caught:
        load_locomo(path)
    assert "\n" not in str(caught.value)


def test_conversations_are_chosen_by_name(conversations):
    assert [c.sample_id for c in choose_conversations(conversations, ["talk-2"])] == ["talk-2"]
    assert choose_conversations(conversations, None) == conversations
    with pytest.raises(
        ValueError, match="^conversation must be one of talk-1, talk-2, got 'talk-9'"
    ):
        choose_conversations(conversations, ["talk-9"])


def test_prompts_hold_the_question_and_with_context_the_dialogue(conversations):
    talk = conversations[0]
    general, temporal = talk.questions[:2]
    bare = make_prompt(talk, temporal, "no-context", dialogue(talk))
    assert temporal.question in bare and "Lisbon" not in bare
    full = make_prompt(talk, temporal, "full-context", "The dialogue.")
    assert temporal.question in full and "The dialogue." in full
    assert PROMPTS["hint-2"] in full
    assert PROMPTS["hint-2"] not in make_prompt(talk, general, "full-context", "")
    with pytest.raises(ValueError, match="^setting must be one of no-context, .*, got 'half': cho"):
        make_prompt(talk, temporal, "half", "")


def test_evidence_is_the_turns_that_the_question_names_with_their_dates(conversations):
    first = conversations[0]
    kept = keep_evidence(first, first.questions[3])
    assert dialogue(kept).splitlines() == [
        "Session 1, 9:00 am on 1 March, 2023",
        "Ben: Lovely! I baked bread. [photo: a loaf]",
        "",
        "Session 2, 8:30 pm on 4 April, 2023",
        "Ben: We moved to Lisbon last week.",
    ]
    assert "grey parrot" not in make_prompt(first, first.questions[3], "evidence", dialogue(kept))


def test_the_first_sessions_keep_the_questions_that_they_answer(conversations):
    kept = keep_sessions(conversations[0], 1)
    assert [session.number for session in kept.sessions] == [1]
    assert [question.index for question in kept.questions] == [0, 4, 5]
    assert keep_sessions(conversations[0], 2) == conversations[0]
