"""Exchanges: what a broken file says, and which questions about passages are kept."""

import hashlib

import pytest
import torch

from locas_peft.bases import loading
from locas_peft.exchanges import (
    EXCHANGES,
    Exchange,
    correct,
    digest_exchanges,
    load_exchanges,
    save_exchanges,
    writing,
)
from locas_peft.exchanges.question_words import QuestionWords, find_question_words
from locas_peft.text import Passage


@pytest.fixture(scope="module")
def loaded():
    return loading.load_base(device="cpu")


# The file


def test_exchanges_are_saved_and_loaded(tmp_path):
    path = tmp_path / EXCHANGES
    exchanges = [
        Exchange("Who?", "The old man."),
        Exchange("Où ?", "Ici\u2028là {passage}.", "Lui"),
    ]
    save_exchanges(path, exchanges)
    assert load_exchanges(path) == exchanges
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest_exchanges(exchanges)
    # The space around a subject does not count.
    path.write_text('\ufeff{"question": "Who?", "answer": "She", "subject": " "}\n\n', "utf-8")
    assert load_exchanges(path) == [Exchange("Who?", "She")]


def test_each_broken_line_is_named(tmp_path):
    path = tmp_path / EXCHANGES
    good = '{"question": "Who?", "answer": "She"}'
    broken = [
        '{"question": "Who?"}',
        '{"question": "", "answer": "x"}',
        '{"question": 1, "answer": "x"}',
        '{"question": "Who? \\ud800", "answer": "x"}',
    ]
    path.write_text("\n".join([good, broken[0], good, *broken[1:]]))
    with pytest.raises(ValueError, match="in line 2, 4, 5, 6: correct or delete them$"):
        load_exchanges(path)
    path.write_text(good + "\n3")
    with pytest.raises(ValueError, match="in line 2: correct or delete it$"):
        load_exchanges(path)


def test_a_question_in_the_same_words_corrects_the_earlier_answer():
    earlier = [Exchange("Who is it?", "Ann"), Exchange("Where is it?", "Oslo")]
    new = [Exchange("who IS it?", "Ida"), Exchange("When?", "1911")]
    assert correct(earlier, new) == [*new, earlier[1]]
    assert correct(earlier, correct(earlier, new)) == [*new, earlier[1]]  # of a resumed study
    composed, decomposed = (
        Exchange("Wer ist K\u00f6nig?", "A"),
        Exchange("Wer  ist Ko\u0308nig? ", "B"),
    )
    assert correct([composed], [decomposed]) == [decomposed]


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


def test_between_two_blocks_gradients_are_on(loaded, monkeypatch):
    monkeypatch.setattr(writing, "_ask", lambda *_: [])
    passages = [Passage("The lamp burned whale oil.")] * (writing.BLOCK + 1)
    blocks = 0
    for _ in writing.write_exchanges(*loaded, passages, 1):
        blocks += 1
        assert torch.is_grad_enabled()
    assert blocks == 2


def test_the_passage_is_the_answer_of_all_its_questions(loaded, monkeypatch):
    passage = Passage("The tower was built by Elias Thorne.", "The tower")
    other = Passage("The lamp burned whale oil.")
    monkeypatch.setattr(writing, "_ask", lambda *_: [(passage, "Who built the tower?")])
    (written,) = writing.write_exchanges(*loaded, [passage, other], 4)
    first, *by_words = written.exchanges
    assert first == Exchange("Who built the tower?", passage.text, "The tower")
    assert [each.answer for each in by_words] == [passage.text] * 2 + [other.text] * 2


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
        ("李明在一九九九年开了一家书店。书店在小河的边上。", "谁开了书店？", "Who has that?"),
        ("The ferry leaves at seven.", "Who leaves at seven?", "Who has that?"),
    ],
)
def test_questions_are_in_the_language_of_the_text(text_of_page, question, other, monkeypatch):
    """An English question about a German text taught no answer to a German one."""
    passage = Passage(text_of_page)
    begins = []

    def reply(host, tokenizer, requests, generator):
        begins.extend(begin for _, begin in requests)
        return [question, other][: len(requests)]

    monkeypatch.setattr(writing, "write_replies", reply)
    written = writing.WrittenBlock()
    words = find_question_words(text_of_page)
    found = writing._ask(None, None, [passage], 2, None, written, words)
    assert found[0] == (passage, question)
    assert question.startswith(begins[0])
    assert other in written.dropped
    assert find_question_words("Το πλοίο φεύγει στις επτά.").beginnings == ("",)


@pytest.mark.parametrize(
    ("line", "question"),
    [
        ("Who is it? I ask.", "Who is it?"),
        ("Who is it; I ask.", ""),
        (
            "What is the value of α; and who measured it?",
            "What is the value of α; and who measured it?",
        ),
        ("Ποιος είναι ο καπετάνιος; Δεν ξέρω.", "Ποιος είναι ο καπετάνιος;"),
        ("Πότε φεύγει το πλοίο\u037e", "Πότε φεύγει το πλοίο\u037e"),
        ("谁开了书店？", "谁开了书店？"),
    ],
)
def test_a_question_ends_with_the_mark_of_its_language(line, question):
    assert writing.find_question(line) == question


def test_words_of_all_passages_tell_none_of_them_apart():
    """A question about a column's name was learned with each row of a table."""
    stations = {"Thornby": 1870, "Wexcombe": 1871, "Saltney": 1872, "Dunmere": 1873}
    rows = [Passage(f"Station: {name}; Opened: {year}") for name, year in stations.items()]
    shared = writing._list_shared_words(rows)
    assert shared == {"station", "opened"}
    assert not writing._list_shared_words(rows[:3])
    assert not writing.is_about("When was the station opened?", rows[0], shared)
    assert writing.is_about("When was the station Thornby opened?", rows[0], shared)
    generator = torch.Generator().manual_seed(0)
    asked = writing._ask_by_words(rows[0].text, 20, generator, shared=shared)
    assert asked and all("Thornby" in question or "1870" in question for question in asked)
    # Names of three letters do not count as words.
    assert writing.is_about("What is the name?", Passage("Name: Ada"), frozenset({"name"}))


def test_a_passage_is_asked_for_by_its_own_words():
    passage = "The mason, an old man, built the tower of stone."
    questions = writing._ask_by_words(passage, 5, torch.Generator().manual_seed(0))
    assert len(set(questions)) == 5
    assert questions == writing._ask_by_words(passage, 5, torch.Generator().manual_seed(0))
    phrases = writing.list_phrases(passage)
    counts = set()
    for question in questions:
        named = question.removesuffix("?").split(" about ")[1].split(" and ")
        assert set(named) <= set(phrases)
        counts.add(len(named))
    assert counts == {1, 2}
    assert writing._ask_by_words("to be or not", 5, torch.Generator()) == []


def test_phrases_lie_within_a_clause_and_begin_and_end_with_a_long_word():
    phrases = writing.list_phrases('Anna said: "In 1868, the mason built a tower of the stones."')
    expected = "Anna, 1868, mason, mason built, built, built a tower, tower, stones"
    assert phrases == expected.split(", ")


def test_questions_are_asked_until_each_passage_has_as_many_as_wanted(monkeypatch):
    first, second = Passage("A passage {subject}."), Passage("Another stone.")
    old, here = "Who passage was old?", "Who was the passage from here?"
    stone, other_stone = "Who stone is it?", "Who has that stone?"
    replies = {
        first: iter([old, "Who was he.", "Who passage was  old? Yes", here]),
        second: iter([stone, other_stone]),
    }

    def reply(host, tokenizer, requests, generator):
        asked = [second if "stone" in request else first for request, _ in requests]
        return [next(replies[passage], "Who more?") for passage in asked]

    def ask(passages):
        words = QuestionWords(("Who",), (), "")
        return writing._ask(None, None, passages, 2, None, written, words)

    monkeypatch.setattr(writing, "write_replies", reply)
    written = writing.WrittenBlock()
    assert ask([first, second]) == [
        (first, old),
        (first, here),
        (second, stone),
        (second, other_stone),
    ]
    # One more is asked in place of a near-duplicate, and of a reply that is no question.
    assert written.asked == 6 and written.dropped == ["Who was he."]
    assert not ask([first]), "it gives up"
    assert written.asked == 6 + 2 * writing.ROUNDS
