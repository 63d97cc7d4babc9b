import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import locas_peft
from locas_peft.text import (
    cut_text,
    digest_tokenizer,
    find_start_token,
    load_text,
    python_reference,
    tokenize,
    unwrap,
)

BACKBONE = Path(locas_peft.__file__).parent / "backbone"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BACKBONE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\n\nthree", "one two\n\nthree"),
        ("\ufeffone\r\ntwo\r\n\r\nthree\r\n", "one two\n\nthree"),
        ("one\rtwo\r\rthree", "one two\n\nthree"),
        ("one\n \t\n\n\n  two  three  ", "one\n\ntwo three"),
        (" \n\n ", ""),
        ("", ""),
    ],
)
def test_unwrap_puts_each_paragraph_on_one_line(text, expected):
    assert unwrap(text) == expected


def test_unwrap_leaves_unwrapped_text_alone():
    once = unwrap(python_reference())
    assert unwrap(once) == once


def test_load_text_drops_bom_and_carriage_returns(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes("\ufeffnaïve\r\ntext".encode())
    assert load_text(path) == load_text(str(path)) == "naïve\ntext"


def test_load_text_takes_standard_input_for_a_dash(monkeypatch):
    monkeypatch.setattr(
        "sys.stdin", SimpleNamespace(buffer=io.BytesIO("from a pipe, naïve".encode()))
    )
    assert load_text("-") == "from a pipe, naïve"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"^text must be an existing file, got '.*book\.txt': .* give - to read stdin$"),
        (b" \n", r"^text must not be empty, got nothing but whitespace in '.*book\.txt': give"),
        (b"a\0b", r"^text must be plain text, got zero bytes in '.*book\.txt': export it as UTF-8"),
        (
            b"caf\xe9 ",
            r"^text must be UTF-8, got byte 0xe9 at offset 3 of '.*': convert it, .* iconv",
        ),
    ],
)
def test_load_text_names_the_fault_of_a_file(content, message, tmp_path):
    path = tmp_path / "book.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_text(path)


def test_a_folder_is_no_text(tmp_path):
    with pytest.raises(
        ValueError, match="^text must be a file, got the folder '.*': name one file"
    ):
        load_text(tmp_path)


def test_python_reference_is_long_and_ordered():
    text = python_reference()
    assert len(text) > 100_000 and text.startswith('The "assert" statement')


def test_tokenize_gives_one_sequence_without_special_tokens_of_its_own(tokenizer):
    ids = tokenize(tokenizer, "Call me Ishmael.")
    assert ids.dtype == torch.int64 and ids.ndim == 1
    assert tokenizer.decode(ids) == "Call me Ishmael."


# OPT has one token for the start of a text, its end and what is unknown.
@pytest.mark.parametrize("unknown", [{}, {"unk_token": "<start>"}])
def test_a_text_keeps_the_start_token_of_its_tokenizer(unknown):
    tokenizer = AutoTokenizer.from_pretrained(
        BACKBONE, bos_token="<start>", eos_token="<end>", **unknown
    )
    ends = [("<start>", tokenizer.bos_token_id), ("<end>", tokenizer.eos_token_id)]
    template = TemplateProcessing(single="<start> $A <end>", special_tokens=ends)
    tokenizer.backend_tokenizer.post_processor = template
    assert find_start_token(tokenizer) == tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    ids = tokenize(tokenizer, "Call me Ishmael.")
    # Without the token at the end.
    assert ids.tolist() == tokenizer("Call me Ishmael.")["input_ids"][:-1]
    assert torch.equal(tokenize(tokenizer, "Call me Ishmael.", max_tokens=3), ids[:3])
    with pytest.raises(ValueError, match="^text must have at least 2 tokens, got 1"):
        tokenize(tokenizer, "a")


SAMPLES = {
    "prose": unwrap(python_reference())[:60_000],
    "hard-wrapped": python_reference()[:60_000],
    "no spaces": "".join(python_reference()[:60_000].split()),
    "one letter": "a" * 60_000,
    "spaces": "end" + " " * 60_000 + "start",
    "two scripts": "naïve 東京 😀\u200d❤️ e\u0301 " * 3_000,
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_prefix_gives_the_tokens_of_the_whole_text(tokenizer, sample):
    whole = tokenize(tokenizer, SAMPLES[sample])
    counts = {2, 3, 100, 101, 1_000, len(whole) - 1, len(whole), len(whole) + 1}
    for count in counts - {0, 1}:
        ids = tokenize(tokenizer, SAMPLES[sample], max_tokens=count)
        assert torch.equal(ids, whole[:count])


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("count", [2, 3, 100, 101])
def test_a_text_is_cut_after_its_first_tokens(tokenizer, monkeypatch, sample, is_fast, count):
    monkeypatch.setattr(type(tokenizer), "is_fast", is_fast)
    text = SAMPLES[sample]
    cut = cut_text(tokenizer, text, count)
    read = tokenizer.decode(tokenize(tokenizer, text, count)).rstrip("\ufffd")
    assert text.startswith(cut)
    assert cut.split() == read.split() or cut.rstrip("\ufffd")[:-1].split() == read.split()
    unwrapped = cut_text(tokenizer, text, count, unwrapped=True)
    assert text.startswith(unwrapped)
    assert unwrap(unwrapped).split() == cut_text(tokenizer, unwrap(text), count).split()


@pytest.mark.parametrize("tokens", [None, 10**6])
def test_a_short_text_is_not_cut(tokenizer, tokens):
    assert cut_text(tokenizer, SAMPLES["prose"], tokens) == SAMPLES["prose"]


def test_a_few_tokens_need_a_short_part_of_a_long_text(tokenizer):
    lengths = []

    def count(text, **options):
        lengths.append(len(text))
        return tokenizer(text, **options)

    count.all_special_ids = []
    assert len(tokenize(count, "Call me Ishmael. " * 1_000_000, max_tokens=600)) == 600
    assert sum(lengths) < 50_000


def test_tokenize_does_not_warn_of_long_texts(tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(tokenizer, "model_max_length", 4)
    assert len(tokenize(tokenizer, "Call me Ishmael. Some years ago, never mind how long.")) > 4
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "tokens", "message"),
    [
        ("a", None, "^text must have at least 2 tokens, got 1: give a longer text$"),
        ("", None, "^text must have at least 2 tokens, got 0: give a longer text$"),
        (
            "Call me Ishmael.",
            1,
            "^max_tokens must be at least 2, got 1: raise it, or leave it out$",
        ),
    ],
)
def test_tokenize_refuses_what_cannot_be_scored(text, tokens, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        tokenize(tokenizer, text, tokens)


def test_the_digest_of_a_tokenizer_is_that_of_its_file_whatever_was_called_last(tokenizer):
    other = AutoTokenizer.from_pretrained(BACKBONE)
    other.pad_token = other.eos_token or other.unk_token
    expected = digest_tokenizer(other)
    other(["one", "two three four"], padding=True, truncation=True, max_length=2)
    assert digest_tokenizer(other) == expected
    assert digest_tokenizer(AutoTokenizer.from_pretrained(BACKBONE)) == digest_tokenizer(tokenizer)
    other.chat_template = "{{ messages }}"
    assert digest_tokenizer(other) != expected
    assert digest_tokenizer(SimpleNamespace()) is None
