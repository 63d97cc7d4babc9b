"""Prompts: a question, a conversation or the beginning of a text as token ids.

The tokenizer's chat template is used where it has one. Control tokens that a prompt, a message or
an answer spells are text; those of the template are control tokens.
"""

from collections.abc import Sequence
from typing import Any

from ..text import encode_marked, encode_text, find_start_token, mark_turns
from .dates import pin_date

__all__ = [
    "SENTENCE_PROMPT",
    "SHORT_PROMPT",
    "WRITE_PROMPT",
    "can_chat",
    "decode_after",
    "encode_answer",
    "encode_beginning",
    "encode_prompt",
    "encode_question",
    "encode_turns",
    "find_pad_token",
    "fit_turns",
    "list_stops",
    "put_before",
]

SENTENCE_PROMPT = "{context}{question} Answer in one sentence."
SHORT_PROMPT = "{context}Answer the question in a few words.\n\nQuestion: {question}"
"""The forms of a question's prompt; `context` is empty, or a text and a blank line."""
WRITE_PROMPT = "{passage}\n\nWrite a question about this text."
"""A prompt whose reply is a question about a passage."""


def can_chat(tokenizer: Any) -> bool:
    """Return whether a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def encode_prompt(tokenizer: Any, prompt: str, begin: str = "") -> list[int]:
    """Turn a prompt, and the first words of its reply, into token ids."""
    if can_chat(tokenizer):
        return encode_turns(tokenizer, [{"role": "user", "content": prompt}], begin)
    text = f"{prompt}\n\n{begin}" if begin else prompt
    return encode_beginning(tokenizer, text)


def encode_beginning(tokenizer: Any, text: str) -> list[int]:
    """Turn the beginning of a text, which is continued, into token ids, without a chat template."""
    start = find_start_token(tokenizer)
    ids = encode_text(tokenizer, text)
    return ids if start is None else [start, *ids]


def encode_question(
    tokenizer: Any, question: str, form: str = SENTENCE_PROMPT, context: str = ""
) -> list[int]:
    """Turn a question into the token ids of a prompt, which ends where the answer begins.

    Args:
        form: has {question} and may have {context}.
        context: a text that stands before the question.
    """
    begin = "" if can_chat(tokenizer) else "Answer:"
    prompt = form.format(question=question, context=put_before(context))
    return encode_prompt(tokenizer, prompt, begin)


def put_before(context: str) -> str:
    """Return a text as it stands before a question in a prompt; "" for no text."""
    if not context.strip():
        return ""
    return f"Read this text.\n\n{context.strip()}\n\n"


def encode_answer(tokenizer: Any, answer: str) -> list[int]:
    """Turn an answer into token ids, as they follow its prompt."""
    blank = "" if can_chat(tokenizer) else " "
    return encode_text(tokenizer, blank + answer)


def decode_after(tokenizer: Any, begin: str, ids: Sequence[int]) -> str:
    """Return the beginning of a text and the tokens that continue it as one text."""
    # Decoded together, since some tokenizers leave out the blank before the first token.
    begin_ids = encode_text(tokenizer, begin) if begin else []
    return tokenizer.decode([*begin_ids, *ids], skip_special_tokens=True)


def find_turn_end(tokenizer: Any) -> int | None:
    """Return the special token that ends a reply in a chat template; None where none does."""
    turns = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Reply"}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    end = rendered.rpartition("Reply")[2].lstrip()
    ids = tokenizer(end, add_special_tokens=False)["input_ids"]
    if not ids:
        return None
    token = tokenizer.added_tokens_decoder.get(ids[0])
    return ids[0] if token is not None and token.special else None


def list_stops(tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer, first that of the chat template.

    For a base model the end of a line is one too.
    """
    if can_chat(tokenizer):
        stops = [find_turn_end(tokenizer), tokenizer.eos_token_id]
    else:
        stops = [tokenizer.eos_token_id]
        for line_end in ("\n", "\n\n"):
            ids = tokenizer(line_end, add_special_tokens=False)["input_ids"]
            if len(ids) == 1:
                stops.append(ids[0])
    return [stop for stop in dict.fromkeys(stops) if stop is not None]


def encode_turns(tokenizer: Any, turns: list[dict[str, str]], begin: str = "") -> list[int]:
    """Turn a conversation into token ids by the chat template, up to its reply.

    Args:
        turns: dicts with `role` and `content`.
        begin: the first words of the reply.
    """
    marked_turns, mark = mark_turns(tokenizer, turns)
    text = tokenizer.apply_chat_template(
        marked_turns,
        add_generation_prompt=True,
        tokenize=False,
        enable_thinking=False,
        **pin_date(tokenizer),
    )
    return encode_marked(tokenizer, text + begin, mark)


def fit_turns(tokenizer: Any, turns: list[dict[str, str]], most_tokens: int | None) -> list[int]:
    """Turn a conversation into at most `most_tokens` token ids.

    The oldest messages and their replies are left out. A system message and the last message always
    stay: alone they may have more tokens. The last message is all that a model without a chat
    template gets.
    """
    if not can_chat(tokenizer):
        return encode_prompt(tokenizer, turns[-1]["content"])
    system = [turn for turn in turns[:1] if turn["role"] == "system"]
    turns = turns[len(system) :]
    ids = encode_turns(tokenizer, [*system, *turns])
    while most_tokens is not None and len(ids) > most_tokens and len(turns) > 2:
        turns = turns[2:]
        ids = encode_turns(tokenizer, [*system, *turns])
    return ids


def find_pad_token(tokenizer: Any) -> int:
    """Return the token that rows of a batch are padded with: any, where there is none for it."""
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    return tokenizer.eos_token_id or 0
