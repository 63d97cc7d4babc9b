"""Answers from a causal language model, in batches: the likeliest one, or several that a memory recites."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from os.path import commonprefix
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from ..model.causal_lm import CausalLM, count_positions
from .prompts import find_pad_token

__all__ = ["GREEDY", "answer", "first_line", "recite"]

GREEDY: dict[str, Any] = {
    **{"do_sample": False, "temperature": None, "top_p": None, "top_k": None},
    **{"repetition_penalty": 1.0, "no_repeat_ngram_size": 0},
}
"""Options of `generate` that take the likeliest token, whatever the model's own settings say."""

_WORTH_KEEPING = 64
"""A shared beginning of at least this many tokens is computed once and kept."""


@torch.inference_mode()
def answer(
    model: nn.Module,
    tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 32,
    batch_size: int = 16,
    known: Collection[int] = (),
) -> Iterator[tuple[list[int], list[str]]]:
    """Answer prompts greedily, in batches of similar length, padded on the left.

    The keys and values of a beginning that all prompts share, such as a dialogue before its questions, are computed
    once. The batches depend on the prompts and `batch_size` alone.

    Args:
        model: a causal language model in evaluation mode, with or without a memory; not changed.
        prompts: token ids, none of them empty (see `text.encode_prompt`).
        known: indices of prompts whose answers are not needed; a batch of only such prompts is left out.

    Yields:
        A batch's indices into `prompts` and its answers, each one the first line that is not blank.

    Raises:
        ValueError: a prompt is empty, or leaves no positions for the answer.
    """
    _check_fit(model, prompts, max_new_tokens)
    batches = [batch for batch in _batches(prompts, batch_size) if not all(number in known for number in batch)]
    if not batches:
        return
    shortest = min(map(len, prompts))
    shared = commonprefix([list(prompt[: shortest - 1]) for prompt in prompts])  # a prompt's last token must be fed
    longest = max(map(len, prompts)) + max_new_tokens
    cache = _fill_cache(model, shared, longest) if len(shared) >= _WORTH_KEEPING else None
    for batch in batches:
        rows = [prompts[number] for number in batch]
        yield batch, _answer_batch(model, tokenizer, rows, max_new_tokens, cache=cache)


@torch.inference_mode()
def recite(
    model: nn.Module,
    tokenizer,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    max_new_tokens: int = 64,
    batch_size: int = 4,
) -> list[list[str]]:
    """Return for each prompt the `count` likeliest answers that a beam search finds, or fewer, the likeliest first.

    A memory that has learned passages may recite a wrong one; the right one is often among the first few. The search
    has two beams an answer, and orders answers by their mean log-probability a token.

    Args, raises: as for `answer`.
    """
    _check_fit(model, prompts, max_new_tokens)
    recited: dict[int, list[str]] = {}
    for batch in _batches(prompts, batch_size):
        rows = [prompts[number] for number in batch]
        texts = _answer_batch(model, tokenizer, rows, max_new_tokens, num_beams=2 * count, num_return_sequences=count)
        for place, number in enumerate(batch):
            found = texts[place * count : (place + 1) * count]
            recited[number] = [text for text in dict.fromkeys(found) if text]
    return [recited[number] for number in range(len(prompts))]


def _check_fit(model: nn.Module, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    positions = count_positions(model)
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {number} must not be empty: give the model a question")
        if positions is not None and positions < len(prompt) + max_new_tokens:
            raise ValueError(
                f"prompt {number} and max_new_tokens must fit the model's {positions} positions, got {len(prompt)} + "
                f"{max_new_tokens}: shorten one of them"
            )


def _batches(prompts: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Return the prompts' numbers in batches of similar length, the longest first."""
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    return [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]


def first_line(text: str) -> str:
    """Return the first line of a text that is not blank, stripped: models continue after their answer."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _fill_cache(model: nn.Module, ids: list[int], longest: int) -> DynamicCache | None:
    """Run tokens through the model and return their keys and values; None where padding cannot follow them.

    `longest` is the length of the longest row that begins with them, with its padding and its answer.
    """
    config, host = model.config.get_text_config(), CausalLM(model)
    only_full = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    if not only_full or not host.can_pad_inside(longest):
        return None
    cache = DynamicCache()
    host.logits(torch.tensor([ids], device=host.device), 1, past_key_values=cache, use_cache=True)
    return cache if cache.get_seq_length() == len(ids) else None


def _answer_batch(
    model: nn.Module,
    tokenizer,
    prompts: list[Sequence[int]],
    max_new_tokens: int,
    *,
    cache: DynamicCache | None = None,
    **search: int,
) -> list[str]:
    """Return the answers to prompts whose shared beginning is in `cache`; `search` are options of `generate`."""
    kept = 0 if cache is None else cache.get_seq_length()
    pad = find_pad_token(tokenizer)
    length = max(map(len, prompts))
    ids = torch.full((len(prompts), length), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(map(torch.tensor, prompts)):  # beginning, padding, rest
        rest = length - (len(prompt) - kept)
        ids[row, :kept], mask[row, :kept] = prompt[:kept], 1
        ids[row, rest:], mask[row, rest:] = prompt[kept:], 1
    options = {"max_new_tokens": max_new_tokens, "pad_token_id": pad, "num_beams": 1, **GREEDY, **search}
    if cache is not None:
        options["past_key_values"] = copy.deepcopy(cache)
        options["past_key_values"].batch_repeat_interleave(len(prompts))
    device = CausalLM(model).device
    output = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), **options)
    return [first_line(text) for text in tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)]
