"""Text in, token ids out: the first steps of text -> tokens -> chunks -> memory."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

import torch


def unwrap(text: str) -> str:
    """Joins hard-wrapped lines: each paragraph on one line, one blank line between paragraphs.

    Line breaks inside a paragraph (Windows, old Mac or Unix ones), byte-order marks and runs of spaces carry
    nothing that a language model should spend tokens on.

    Args:
        text: any text; a paragraph ends at a line that holds nothing but whitespace.

    Returns:
        The paragraphs without leading or trailing whitespace; the empty string where there is none.

    Example:
        >>> unwrap("Call me\\nIshmael.\\n\\nSome years ago")
        'Call me Ishmael.\\n\\nSome years ago'
    """
    text = text.replace("\ufeff", "").replace("\r\n", "\n").replace("\r", "\n")
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def read_text(path: str | Path) -> str:
    """Reads a UTF-8 text file, or standard input for `-`, as it stands but for a byte-order mark.

    Args:
        path: a file's path, or `-`.

    Returns:
        The text, with its line breaks as Python's universal newlines give them.

    Raises:
        ValueError: where there is no such file, or it is no readable file, empty, or not UTF-8.
    """
    name = "standard input" if str(path) == "-" else repr(str(path))
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"text must be an existing file, got {name}: check the path, or give - to read stdin"
        ) from None
    except IsADirectoryError:
        raise ValueError(f"text must be a file, got the folder {name}: name one file inside it") from None
    except OSError as error:
        raise ValueError(
            f"text must be readable, got {name} ({error.strerror}): check its permissions, or pipe it to -"
        ) from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text must be UTF-8, got byte 0x{raw[error.start]:02x} at offset {error.start} of {name}: "
            "convert it, for instance with iconv -t UTF-8"
        ) from None
    if "\0" in text:
        raise ValueError(f"text must be plain text, got zero bytes in {name}: export it as UTF-8 text first")
    if not text.strip():
        raise ValueError(f"text must not be empty, got nothing but whitespace in {name}: give a file with text in it")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def python_reference() -> str:
    """Gives the Python language reference that ships with every interpreter: a text that is always at hand.

    Returns:
        The topics of `pydoc_data.topics`, sorted by name, a blank line between; about half a million characters,
        and not the same ones for each Python version.

    Raises:
        ValueError: where a distribution has left the topics out.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError(
            "this Python has no pydoc_data.topics: install the standard library's full package, or give a text file"
        ) from None
    return "\n\n".join(topics[name].strip("\n") for name in sorted(topics))


def tokenize(tokenizer, text: str, max_tokens: int | None = None) -> torch.LongTensor:
    """Turns a text into one sequence of token ids, without special tokens.

    Args:
        tokenizer: a transformers tokenizer. Its warning about sequences beyond the model's length is not shown:
            a text is read in chunks and may be of any length.
        text: the text as the model shall see it (see `unwrap`).
        max_tokens: how many tokens to keep at most, from the start; all of them where None.

    Returns:
        LongTensor [T], on the CPU, T >= 2.

    Raises:
        ValueError: where `max_tokens` is below 2 or the text makes fewer than two tokens: with the first token
            unscored, nothing would be left to measure.
    """
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(f"max_tokens must be at least 2, got {max_tokens}: raise it, or leave it out")
    ids = tokenizer(
        text, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )["input_ids"]
    if len(ids) < 2:
        raise ValueError(f"text must have at least 2 tokens, got {len(ids)}: give a longer text")
    return torch.tensor(ids[:max_tokens], dtype=torch.long)


def digest_ids(input_ids: torch.Tensor) -> str:
    """Gives the SHA-256 of token ids [T] as little-endian 64-bit integers: the same on every machine and device."""
    return hashlib.sha256(input_ids.cpu().numpy().astype("<i8").tobytes()).hexdigest()
