"""Text in, token ids out: the first steps of text -> tokens -> chunks -> memory."""

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["NAME", "digest_ids", "digest_json", "digest_tokenizer", "find_start_token", "load_text"]
__all__ += ["python_reference", "tokenize", "unwrap"]

NAME = re.compile(
    r"(?<=\s)[A-Z]\w+(?: [A-Z]\w+)*"
)  # in a text: words with a capital that do not begin it
_MARGIN_TOKENS = 256


def unwrap(text: str) -> str:
    """Join hard-wrapped lines: each paragraph on one line, one blank line between paragraphs.

    A paragraph ends at a line that holds nothing but whitespace. Line breaks inside it (Windows, old Mac or Unix),
    byte-order marks and runs of spaces become single spaces.
    """
    text = text.replace("\ufeff", "").replace("\r\n", "\n").replace("\r", "\n")
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def load_text(path: str | Path) -> str:
    """Load a UTF-8 text file, or stdin for `-`, without its byte-order mark; every line break becomes "\\n"."""
    name = "standard input" if str(path) == "-" else repr(str(path))
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except OSError as error:
        rules = {
            FileNotFoundError: f"an existing file, got {name}: check the path, or give - to read stdin",
            IsADirectoryError: f"a file, got the folder {name}: name one file inside it",
        }
        other = f"readable, got {name} ({error.strerror}): check its permissions, or pipe it to -"
        raise ValueError(f"text must be {rules.get(type(error), other)}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at offset {error.start} of {name}"
        raise ValueError(
            f"text must be UTF-8, got {found}: convert it, for instance with iconv -t UTF-8"
        ) from None
    if "\0" in text:
        raise ValueError(
            f"text must be plain text, got zero bytes in {name}: export it as UTF-8 text first"
        )
    if not text.strip():
        raise ValueError(
            f"text must not be empty, got nothing but whitespace in {name}: give a file with text in it"
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


def python_reference() -> str:
    """Return the Python language reference that ships with every interpreter, the topics of `pydoc_data.topics`."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        remedy = "install the standard library's full package, or give a text file"
        raise ValueError(f"this Python has no pydoc_data.topics: {remedy}") from None
    return "\n\n".join(topics[name].strip("\n") for name in sorted(topics))


def tokenize(tokenizer, text: str, max_tokens: int | None = None) -> torch.LongTensor:
    """Turn a text into one sequence of token ids, LongTensor [T] on the CPU, T >= 2.

    It begins with the start token where the tokenizer puts one there, and a trainer then begins each window with it.
    There are no other special tokens. With `max_tokens` only the first tokens are kept, and no more of the text is
    tokenized than they need, and a margin: the cut can change the tokens just before it. Fewer than two tokens
    without the start token are a `ValueError`: the first token is not scored.
    """
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(
            f"max_tokens must be at least 2, got {max_tokens}: raise it, or leave it out"
        )
    characters = len(text) if max_tokens is None else 8 * (max_tokens + _MARGIN_TOKENS)
    ids = _encode(tokenizer, text[:characters])
    while characters < len(text) and len(ids) < max_tokens + _MARGIN_TOKENS:
        characters *= 4
        ids = _encode(tokenizer, text[:characters])
    if len(ids) < 2:
        raise ValueError(f"text must have at least 2 tokens, got {len(ids)}: give a longer text")
    start = find_start_token(tokenizer)
    ids = ids if start is None else [start, *ids]
    return torch.tensor(ids[:max_tokens], dtype=torch.long)


def find_start_token(tokenizer) -> int | None:
    """Return the token that a tokenizer puts at the start of a text; None where it puts none there."""
    ids = tokenizer("a")["input_ids"]
    return ids[0] if ids and ids[0] in tokenizer.all_special_ids else None


def digest_ids(input_ids: torch.Tensor) -> str:
    """Return the SHA-256 of token ids [T] as little-endian 64-bit integers: the same on every machine and device."""
    return hashlib.sha256(input_ids.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def digest_json(value: Any) -> str:
    """Return the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8")).hexdigest()


def digest_tokenizer(tokenizer: Any) -> str | None:
    """Return the SHA-256 of a tokenizer's serialized file and chat template; None for one without such a file."""
    backend, last_call = (
        getattr(tokenizer, "backend_tokenizer", None),
        {"truncation": None, "padding": None},
    )
    return backend and digest_json(
        [json.loads(backend.to_str()) | last_call, tokenizer.chat_template]
    )


def _encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)[
        "input_ids"
    ]  # no warning of a long sequence
