"""Texts: files, token ids, control tokens, words."""

from .control_tokens import encode_marked, encode_text, mark_turns
from .documents import (
    NAME,
    digest_ids,
    digest_json,
    digest_tokenizer,
    find_start_token,
    load_text,
    python_reference,
    tokenize,
    unwrap,
)

__all__ = [
    "NAME",
    "digest_ids",
    "digest_json",
    "digest_tokenizer",
    "encode_marked",
    "encode_text",
    "find_start_token",
    "load_text",
    "mark_turns",
    "python_reference",
    "tokenize",
    "unwrap",
]
