"""Prompts: a question, a conversation or the beginning of a text as token ids, by the tokenizer's chat template."""

from collections.abc import Sequence

__all__ = [
    "SENTENCE_PROMPT",
    "SHORT_PROMPT",
    "WRITE_PROMPT",
    "can_chat",
    "decode_after",
    "encode_answer",
]
__all__ += [
    "encode_prompt",
    "encode_question",
    "encode_turns",
    "find_pad_token",
    "fit_turns",
    "list_stops",
]
__all__ += ["put_before"]

SENTENCE_PROMPT = "{context}{question} Answer in one sentence."
SHORT_PROMPT = "{context}Answer the question in a few words.\n\nQuestion: {question}"
"""The forms of a question's prompt; `context` is empty, or a text and a blank line."""
WRITE_PROMPT = "{passage}\n\nWrite a question about this text."  # a prompt whose reply is a question about a passage


def can_chat(tokenizer) -> bool:
    """Return whether a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def encode_prompt(tokenizer, prompt: str, begin: str = "") -> list[int]:
    """Turn a prompt, and the first words of its reply, into token ids, by the chat template where there is one."""
    if not can_chat(tokenizer):
        return list(
            tokenizer(f"{prompt}\n\n{begin}" if begin else prompt, verbose=False)["input_ids"]
        )
    return encode_turns(tokenizer, [{"role": "user", "content": prompt}], begin)


def encode_question(
    tokenizer, question: str, form: str = SENTENCE_PROMPT, context: str = ""
) -> list[int]:
    """Turn a question into the token ids of a prompt, which ends where the answer begins.

    `form` has {question} and may have {context}: a text that stands before the question.
    """
    begin = "" if can_chat(tokenizer) else "Answer:"
    return encode_prompt(
        tokenizer, form.format(question=question, context=put_before(context)), begin
    )


def put_before(context: str) -> str:
    """Return a text as it stands before a question or a message in a prompt, and a blank line; "" for no text."""
    return f"Read this text.\n\n{context.strip()}\n\n" if context.strip() else ""


def encode_answer(tokenizer, answer: str) -> list[int]:
    """Turn an answer into token ids, as they follow its prompt: after a blank where there is no chat template."""
    blank = "" if can_chat(tokenizer) else " "
    return list(tokenizer(blank + answer, add_special_tokens=False, verbose=False)["input_ids"])


def decode_after(tokenizer, begin: str, ids: Sequence[int]) -> str:
    """Return the beginning of a text and the tokens that continue it as one text."""
    # Decoded together, since some tokenizers leave out the blank before the first token.
    own = tokenizer(begin, add_special_tokens=False, verbose=False)["input_ids"] if begin else []
    return tokenizer.decode([*own, *ids], skip_special_tokens=True)


def find_turn_end(tokenizer) -> int | None:
    """Return the special token that ends a reply in a tokenizer's chat template; None where it ends with none."""
    turns = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Reply"}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    end = tokenizer(
        rendered.rpartition("Reply")[2].lstrip(), add_special_tokens=False, verbose=False
    )["input_ids"]
    token = tokenizer.added_tokens_decoder.get(end[0]) if end else None
    return end[0] if token is not None and token.special else None


def list_stops(tokenizer) -> list[int]:
    """Return the tokens that end an answer, first the chat template's own; for a base model also a line's end."""
    if can_chat(tokenizer):
        ends = [find_turn_end(tokenizer), tokenizer.eos_token_id]
    else:
        lines = (tokenizer(end, add_special_tokens=False)["input_ids"] for end in ("\n", "\n\n"))
        ends = [tokenizer.eos_token_id, *(ids[0] for ids in lines if len(ids) == 1)]
    return [end for end in dict.fromkeys(ends) if end is not None]


def encode_turns(tokenizer, turns: list[dict[str, str]], begin: str = "") -> list[int]:
    """Turn a conversation, dicts with `role` and `content`, into token ids by the chat template, up to its reply."""
    text = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    return list(tokenizer(text + begin, add_special_tokens=False, verbose=False)["input_ids"])


def fit_turns(tokenizer, turns: list[dict[str, str]], most_tokens: int | None) -> list[int]:
    """Turn a conversation into at most `most_tokens` token ids, by leaving out the oldest messages and their replies.

    The last message always stays: alone it may have more tokens. It is all that a model without a chat template gets.
    """
    if not can_chat(tokenizer):
        return encode_prompt(tokenizer, turns[-1]["content"])
    ids = encode_turns(tokenizer, turns)
    while most_tokens is not None and len(ids) > most_tokens and len(turns) > 2:
        turns = turns[2:]
        ids = encode_turns(tokenizer, turns)
    return ids


def find_pad_token(tokenizer) -> int:
    """Return the token that rows of a batch are padded with: any, where the tokenizer has none for it."""
    return (
        tokenizer.pad_token_id
        if tokenizer.pad_token_id is not None
        else (tokenizer.eos_token_id or 0)
    )
