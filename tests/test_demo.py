"""The demo's pages, and that its figures hardly depend on the machine."""

import pytest
import torch

from locas_peft import demo
from locas_peft.asking.answers import is_right
from locas_peft.bases import load_base
from locas_peft.bases.gguf import is_installed
from locas_peft.demo.pages import find_sentence
from locas_peft.demo.studying import ASKED, SENTENCES
from locas_peft.progress import silent
from locas_peft.text import split_sentences
from locas_settings import ReadSettings


@pytest.mark.parametrize("name", (demo.PAGE, *demo.COMPARED))
def test_questions_about_a_page_are_answered_by_it_and_not_by_themselves(name):
    page = demo.load_page(name)
    questions = demo.load_page_questions(name)
    assert len(questions) == len({question.question for question in questions}) == 20
    for question in questions:
        assert is_right(page, question.answer), question
        assert not is_right(question.question, question.answer), question


def test_the_questions_that_are_asked_have_their_sentence_in_what_is_studied():
    page = demo.load_page(sentences=SENTENCES)
    assert len(split_sentences(page)) == SENTENCES
    questions = demo.load_page_questions()
    sentences = {find_sentence(page, questions[number].answer) for number in ASKED}
    assert len(sentences) == len(ASKED)
    assert "" not in sentences
    assert find_sentence(page, "no such answer") == ""


def test_the_page_that_is_studied_is_not_read():
    pages = demo.join_pages()
    assert "Skarn Point" not in pages
    for name in demo.COMPARED:
        assert demo.load_page(name).strip() in pages


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("smollm2"), reason="SmolLM2 is not installed")
def test_perplexities_hardly_depend_on_threads_and_dtype(tmp_path):
    """Within 1%: the README states them so."""
    threads = torch.get_num_threads()
    perplexities = []
    try:
        for count, dtype in ((1, "bfloat16"), (2, "float32")):
            torch.set_num_threads(count)
            base, tokenizer = load_base("smollm2", dtype, device="cpu")
            methods = demo.list_methods(base, ReadSettings(max_tokens=4_096))
            out = tmp_path / dtype
            readings = demo.read_pages(base, tokenizer, methods, out, silent)
            perplexities.append([reading.record.perplexity for reading in readings])
    finally:
        torch.set_num_threads(threads)
    assert perplexities[0] == pytest.approx(perplexities[1], rel=0.01)
    none, locas, lora = perplexities[0]
    assert max(locas, lora) < 0.9 * none
