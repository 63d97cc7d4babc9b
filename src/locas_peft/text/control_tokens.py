"""Encode a user's text without control tokens, such as the one that ends a turn.

A tokenizer turns the characters "<|im_end|>" into the token that ends a turn, wherever they stand.
With them, a question or a note could forge turns of the chat. Here such characters are cut after
the first one, and the parts are tokenized apart: they give the tokens of any other text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

__all__ = ["encode_marked", "encode_text", "mark_turns"]

# Unicode keeps these characters out of all texts.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


@dataclass(frozen=True)
class _ControlTokens:
    """What a user's text must not be turned into.

    Attributes:
        pattern: matches the characters of one.
        ids: all of them.
        unknown: the one of characters that the vocabulary lacks, which any text may have.
    """

    pattern: re.Pattern[str]
    ids: frozenset[int]
    unknown: frozenset[int]


_NONE = _ControlTokens(re.compile("(?!)"), frozenset(), frozenset())


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Turn a user's text into token ids; none of them is a control token.

    Control tokens are the special ones, and others that the chat template writes, such as
    <tool_call>.
    """
    ids = _encode(tokenizer, text)
    control = _find_control_tokens(tokenizer)
    if control.ids.isdisjoint(ids):
        return ids
    forbidden = control.ids - control.unknown
    ids = _encode_parts(tokenizer, _split(tokenizer, text, control))
    # A control token of one character cannot be cut.
    return [token for token in ids if token not in forbidden]


def mark_turns(
    tokenizer: Any, turns: Sequence[Mapping[str, str]]
) -> tuple[list[dict[str, str]], str]:
    """Return turns with a mark wherever their texts are to be cut, and the mark.

    A chat template is applied to the turns, then `encode_marked` to its text. Turns without control
    tokens have no marks. The model's replies keep the control tokens that are not special, such as
    </think>: the model wrote them, and a template looks for them.

    Args:
        turns: dicts with `role` and `content`.
    """
    texts = [text for turn in turns for text in turn.values() if isinstance(text, str)]
    used = "".join(texts)
    mark = next((mark for mark in _MARKS if mark not in used), _MARKS[0])
    marked_turns = []
    for turn in turns:
        control = _find_control_tokens(tokenizer, is_reply=turn.get("role") == "assistant")
        marked = dict(turn)
        for name, text in turn.items():
            if isinstance(text, str):
                marked[name] = mark.join(_split(tokenizer, text, control))
        marked_turns.append(marked)
    return marked_turns, mark


def encode_marked(tokenizer: Any, text: str, mark: str) -> list[int]:
    """Turn a text with marks into token ids: it is cut at the marks, which are left out.

    The control tokens of the template, which no mark cuts, stay control tokens.
    """
    return _encode_parts(tokenizer, text.split(mark))


def _find_control_tokens(tokenizer: Any, is_reply: bool = False) -> _ControlTokens:
    """Return a tokenizer's control tokens; in a reply they are the special tokens alone."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return _NONE
    template = None if is_reply else str(tokenizer.chat_template)
    return _list_control_tokens(tokenizer, len(tokenizer), template)


# Keyed by what changes when tokens are added or the template is replaced.
@lru_cache(maxsize=16)
def _list_control_tokens(
    tokenizer: PreTrainedTokenizerBase, count: int, template: str | None
) -> _ControlTokens:
    try:
        added = tokenizer.added_tokens_decoder
    except NotImplementedError:
        # The tokenizer of mistral-common, which finds no control token in a text.
        return _NONE
    contents = {}
    for number, token in added.items():
        if token.special or (template is not None and _is_written(token.content, template)):
            contents[token.content] = number
    # The longest first: one may begin with another.
    longest_first = sorted(contents, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
    unknown = tokenizer.unk_token_id
    unknown_ids = frozenset() if unknown is None else frozenset([unknown])
    return _ControlTokens(re.compile(pattern), frozenset(contents.values()), unknown_ids)


def _is_written(content: str, template: str) -> bool:
    """Return whether a chat template writes a token that is neither a word nor white space.

    Words and white space of a template are also the words and white space of texts.
    """
    is_markup = not all(character.isalnum() or character.isspace() for character in content)
    return is_markup and content in template


def _split(tokenizer: Any, text: str, control: _ControlTokens) -> list[str]:
    """Return the parts of a text that give no control token; the whole where it gives none."""
    if control.ids.isdisjoint(_encode(tokenizer, text)):
        return [text]
    forbidden = control.ids - control.unknown
    cut = list(_cut(text, control.pattern))
    parts: list[str] = []
    for part, ids in zip(cut, _encode_each(tokenizer, cut), strict=True):
        if forbidden.isdisjoint(ids):
            parts.append(part)
        else:
            # Characters that the tokenizer normalizes to those of a control token.
            parts += part
    return parts


def _cut(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the parts of a text, which is cut after the first character of each match."""
    begin = 0
    # Not finditer: matches may overlap.
    match = pattern.search(text)
    while match is not None:
        end = match.start() + 1
        yield text[begin:end]
        begin = end
        match = pattern.search(text, begin)
    yield text[begin:]


def _encode(tokenizer: Any, text: str) -> list[int]:
    # verbose=False: no warning of a long sequence.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _encode_each(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def _encode_parts(tokenizer: Any, parts: list[str]) -> list[int]:
    """Return the token ids of a text that is cut into parts."""
    first, *others = parts
    ids = _encode(tokenizer, first)
    if not others:
        return ids
    # After a line break, since some tokenizers put a blank before the beginning of a text.
    line_break = _encode(tokenizer, "\n")
    after_breaks = _encode_each(tokenizer, [f"\n{part}" for part in others])
    for part, part_ids in zip(others, after_breaks, strict=True):
        if part_ids[: len(line_break)] == line_break:
            ids += part_ids[len(line_break) :]
        else:
            ids += _encode(tokenizer, part)
    return ids
