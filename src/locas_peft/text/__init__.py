"""Texts: files, token ids, control tokens, blocks, dialogues, passages, sentences, words."""

from .blocks import (
    Block,
    is_code,
    list_blocks,
    split_items,
    split_pairs,
    split_records,
    split_rows,
)
from .control_tokens import encode_marked, encode_text, mark_turns
from .dialogues import Turn, ends_sentence, list_turns
from .documents import (
    NAME,
    cut_text,
    digest_ids,
    digest_json,
    digest_tokenizer,
    find_start_token,
    load_text,
    normalize_text,
    python_reference,
    tokenize,
    unwrap,
)
from .passages import LONGEST_PASSAGE, REPORTED, Passage, split_passages
from .sentences import guess_language, split_sentences
from .words import holds_phrase, list_content_words, list_runs, split_words

__all__ = [
    "LONGEST_PASSAGE",
    "NAME",
    "REPORTED",
    "Block",
    "Passage",
    "Turn",
    "cut_text",
    "digest_ids",
    "digest_json",
    "digest_tokenizer",
    "encode_marked",
    "encode_text",
    "ends_sentence",
    "find_start_token",
    "guess_language",
    "holds_phrase",
    "is_code",
    "list_blocks",
    "list_content_words",
    "list_runs",
    "list_turns",
    "load_text",
    "mark_turns",
    "normalize_text",
    "python_reference",
    "split_items",
    "split_pairs",
    "split_passages",
    "split_records",
    "split_rows",
    "split_sentences",
    "split_words",
    "tokenize",
    "unwrap",
]
