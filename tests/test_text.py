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
    ids=[
        "unix",
        "bom and windows",
        "old mac",
        "blank lines that are not empty",
        "nothing but space",
        "empty",
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


def test_load_text_names_the_fault_of_a_file(tmp_path):
    def error(path) -> str:
        with pytest.raises(ValueError) as caught:
            load_text(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    missing, empty, binary, latin = (
        tmp_path / name for name in ("missing", "empty", "binary", "latin")
    )
    empty.write_text(" \n")
    binary.write_bytes(b"a\0b")
    latin.write_bytes("caf\u00e9 ".encode("latin-1"))
    assert error(missing) == (
        f"text must be an existing file, got {str(missing)!r}: check the path, or give - to read stdin"
    )
    expected = f"text must be a file, got the folder {str(tmp_path)!r}: name one file inside it"
    assert error(tmp_path) == expected
    assert error(empty) == (
        f"text must not be empty, got nothing but whitespace in {str(empty)!r}: give a file with text in it"
    )
    assert error(binary) == (
        f"text must be plain text, got zero bytes in {str(binary)!r}: export it as UTF-8 text first"
    )
    assert error(latin) == (
        f"text must be UTF-8, got byte 0xe9 at offset 3 of {str(latin)!r}: "
        "convert it, for instance with iconv -t UTF-8"
    )


def test_python_reference_is_long_and_ordered():
    text = python_reference()
    assert len(text) > 100_000
    assert text.startswith('The "assert" statement')
    assert text == python_reference()


def test_tokenize_gives_one_sequence_without_special_tokens_of_its_own(tokenizer):
    ids = tokenize(tokenizer, "Call me Ishmael.")
    assert ids.dtype == torch.int64 and ids.ndim == 1
    assert tokenizer.decode(ids) == "Call me Ishmael."
    assert torch.equal(tokenize(tokenizer, "Call me Ishmael.", max_tokens=3), ids[:3])


def test_a_text_keeps_the_start_token_of_its_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(BACKBONE, bos_token="<start>", eos_token="<end>")
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<start>", "<end>")]
    template = TemplateProcessing(single="<start> $A <end>", special_tokens=ends)
    tokenizer.backend_tokenizer.post_processor = template
    assert find_start_token(tokenizer) == tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    ids = tokenize(tokenizer, "Call me Ishmael.")
    assert ids.tolist() == tokenizer("Call me Ishmael.")["input_ids"][:-1], (
        "without the token at the end"
    )
    assert torch.equal(tokenize(tokenizer, "Call me Ishmael.", max_tokens=3), ids[:3])
    message = "^text must have at least 2 tokens, got 1: give a longer text$"
    with pytest.raises(ValueError, match=message):
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
    text = SAMPLES[sample]
    whole = tokenize(tokenizer, text)
    for count in (2, 3, 100, 101, 1_000, len(whole) - 1, len(whole), len(whole) + 1):
        assert torch.equal(
            tokenize(tokenizer, text, max_tokens=max(2, count)), whole[: max(2, count)]
        )


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_text_is_cut_after_its_first_tokens(tokenizer, monkeypatch, sample, is_fast):
    monkeypatch.setattr(type(tokenizer), "is_fast", is_fast)
    text = SAMPLES[sample]
    for count in (2, 3, 100, 101):
        cut = cut_text(tokenizer, text, count)
        read = tokenizer.decode(tokenize(tokenizer, text, count)).rstrip("\ufffd")
        assert text.startswith(cut)
        assert cut.split() == read.split() or cut.rstrip("\ufffd")[:-1].split() == read.split()
        unwrapped = cut_text(tokenizer, text, count, unwrapped=True)
        assert text.startswith(unwrapped)
        whole = cut_text(tokenizer, unwrap(text), count)
        assert unwrap(unwrapped).split() == whole.split()
    assert cut_text(tokenizer, text) == cut_text(tokenizer, text, 10**6) == text


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


def test_tokenize_refuses_what_cannot_be_scored(tokenizer):
    message = "^text must have at least 2 tokens, got 1: give a longer text$"
    with pytest.raises(ValueError, match=message):
        tokenize(tokenizer, "a")
    message = "^text must have at least 2 tokens, got 0: give a longer text$"
    with pytest.raises(ValueError, match=message):
        tokenize(tokenizer, "")
    message = "^max_tokens must be at least 2, got 1: raise it, or leave it out$"
    with pytest.raises(ValueError, match=message):
        tokenize(tokenizer, "Call me Ishmael.", max_tokens=1)


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
