"""Text in, token ids out: the first steps of text -> tokens -> chunks -> memory."""

import hashlib
import json
import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..checks import invalid
from .control_tokens import encode_text
from .words import on_one_line

__all__ = [
    "NAME",
    "cut_text",
    "digest_ids",
    "digest_json",
    "digest_tokenizer",
    "find_start_token",
    "load_text",
    "normalize_text",
    "python_reference",
    "tokenize",
    "unwrap",
]

# In a text: words with a capital that do not begin it.
NAME = re.compile(r"(?<=\s)[A-Z]\w+(?: [A-Z]\w+)*")
_MARGIN_TOKENS = 256
# A character that `unwrap` keeps, in its place among the others.
_KEPT = re.compile(r"[^\s\ufeff]")


def unwrap(text: str) -> str:
    """Join hard-wrapped lines: each paragraph on one line, one blank line between paragraphs.

    A paragraph ends at a line that holds nothing but whitespace. Line breaks inside it (Windows,
    old Mac or Unix), byte-order marks and runs of spaces become single spaces. The break of a
    hard-wrapped line of Chinese or Japanese leaves none.
    """
    text = _normalize_line_breaks(text.replace("\ufeff", ""))
    paragraphs = map(on_one_line, re.split(r"\n\s*\n", text))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def load_text(path: str | Path) -> str:
    """Load a UTF-8 text file, or stdin for `-`, without its byte-order mark.

    Every line break becomes "\\n".

    Raises:
        ValueError: the file cannot be read, is not UTF-8 text, or is empty.
    """
    name = "standard input" if str(path) == "-" else repr(str(path))
    raw = _load_bytes(path, name)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        got = f"byte 0x{raw[error.start]:02x} at offset {error.start} of {name}"
        remedy = "convert it, for instance with iconv -t UTF-8"
        raise invalid("text", "be UTF-8", got, remedy) from None
    return normalize_text(text, name)


def normalize_text(text: str, name: str) -> str:
    """Return a text with "\\n" for every line break, as `load_text` does.

    One that is empty or has zero bytes is a `ValueError`; `name` is that of its origin.
    """
    if "\0" in text:
        got = f"zero bytes in {name}"
        raise invalid("text", "be plain text", got, "export it as UTF-8 text first")
    if not text.strip():
        got = f"nothing but whitespace in {name}"
        raise invalid("text", "not be empty", got, "give one with words in it")
    return _normalize_line_breaks(text)


def python_reference() -> str:
    """Return the Python language reference that ships with every interpreter.

    These are the topics of `pydoc_data.topics`.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        remedy = "install the standard library's full package, or give a text file"
        raise ValueError(f"this Python has no pydoc_data.topics: {remedy}") from None
    return "\n\n".join(topics[name].strip("\n") for name in sorted(topics))


def tokenize(tokenizer, text: str, max_tokens: int | None = None) -> torch.LongTensor:
    """Turn a text into one sequence of token ids.

    It begins with the start token where the tokenizer puts one there, and a trainer then begins
    each window with it. There are no other special tokens: a text that spells one stays text.

    Args:
        max_tokens: keep only the first tokens, at least 2. No more of the text is tokenized than
            they need, and a margin: the cut can change the tokens just before it.

    Returns:
        LongTensor [T] on the CPU, T >= 2.

    Raises:
        ValueError: the text has fewer than two tokens without the start token: the first token is
            not scored.
    """
    if max_tokens is not None and max_tokens < 2:
        raise invalid("max_tokens", "be at least 2", max_tokens, "raise it, or leave it out")
    characters = len(text)
    wanted = len(text)
    if max_tokens is not None:
        wanted = max_tokens + _MARGIN_TOKENS
        characters = 8 * wanted
    ids = encode_text(tokenizer, text[:characters])
    while characters < len(text) and len(ids) < wanted:
        characters *= 4
        ids = encode_text(tokenizer, text[:characters])
    if len(ids) < 2:
        raise invalid("text", "have at least 2 tokens", len(ids), "give a longer text")
    start = find_start_token(tokenizer)
    if start is not None:
        ids = [start, *ids]
    return torch.tensor(ids[:max_tokens], dtype=torch.long)


def cut_text(tokenizer, text: str, max_tokens: int | None = None, unwrapped: bool = False) -> str:
    """Return the beginning of a text of which `tokenize` makes its first tokens.

    Args:
        max_tokens: as for `tokenize`; the whole text is returned for None, and where it has fewer.
        unwrapped: whether the text is unwrapped before it is tokenized. What is returned is not.

    Raises:
        ValueError: as for `tokenize`.
    """
    if max_tokens is None:
        return text
    read = unwrap(text) if unwrapped else text
    ids = tokenize(tokenizer, read, max_tokens).tolist()
    if len(ids) < max_tokens:
        return text
    if ids[0] == find_start_token(tokenizer):
        del ids[0]
    # The tokens of the last character may be cut.
    decoded = tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")
    cut = _cut_after(read, decoded)
    if getattr(tokenizer, "is_fast", False):
        # Exact also where the tokenizer replaces characters.
        encoded = tokenizer(
            read[: 2 * len(cut) + _MARGIN_TOKENS],
            add_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        if encoded["input_ids"][: len(ids)] == ids:
            cut = read[: encoded["offset_mapping"][len(ids) - 1][1]]
    return _cut_after(text, cut) if unwrapped else cut


def _cut_after(text: str, beginning: str) -> str:
    """Return the part of a text that is its beginning, in which white space may differ."""
    count = sum(1 for _ in _KEPT.finditer(beginning))
    last = next(islice(_KEPT.finditer(text), max(count - 1, 0), None), None)
    if not count or last is None:
        return beginning
    return text[: last.end()]


def find_start_token(tokenizer) -> int | None:
    """Return the token that a tokenizer puts at the start of a text; None where it puts none."""
    ids = tokenizer("a")["input_ids"]
    # A vocabulary without "a" has an unknown token in its place, which may be the start token too.
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    if ids[:1] != plain[:1] and ids[0] in tokenizer.all_special_ids:
        return ids[0]
    return None


def digest_ids(input_ids: torch.Tensor) -> str:
    """Return the SHA-256 of token ids [T] as little-endian 64-bit integers.

    It is the same on every machine and device.
    """
    return hashlib.sha256(input_ids.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def digest_json(value: Any) -> str:
    """Return the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8")).hexdigest()


def digest_tokenizer(tokenizer: Any) -> str | None:
    """Return the SHA-256 of a tokenizer's serialized file and chat template.

    None for a tokenizer without such a file.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    # The truncation and padding are those of the latest call.
    serialized = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    return digest_json([serialized, tokenizer.chat_template])


def _normalize_line_breaks(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _load_bytes(path: str | Path, name: str) -> bytes:
    """Return the content of a file, or of stdin; `name` stands in the messages."""
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except FileNotFoundError:
        remedy = "check the path, or give - to read stdin"
        raise invalid("text", "be an existing file", name, remedy) from None
    except IsADirectoryError:
        got = f"the folder {name}"
        raise invalid("text", "be a file", got, "name one file inside it") from None
    except OSError as error:
        got = f"{name} ({error.strerror})"
        remedy = "check its permissions, or pipe it to -"
        raise invalid("text", "be readable", got, remedy) from None
