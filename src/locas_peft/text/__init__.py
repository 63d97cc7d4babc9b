"""Texts: files, token ids, control tokens, sentences, words."""

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
from .sentences import split_sentences
from .words import holds_phrase, list_runs, split_words

__all__ = [
    "NAME",
    "digest_ids",
    "digest_json",
    "digest_tokenizer",
    "encode_marked",
    "encode_text",
    "find_start_token",
    "holds_phrase",
    "list_runs",
    "load_text",
    "mark_turns",
    "python_reference",
    "split_sentences",
    "split_words",
    "tokenize",
    "unwrap",
]
