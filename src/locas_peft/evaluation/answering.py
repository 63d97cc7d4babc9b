"""Greedy answers from any causal language model, in batches; what all prompts begin with goes through it once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import DynamicCache

_WORTH_KEEPING = 64


def encode_prompt(tokenizer, prompt: str) -> list[int]:
    """Turns a prompt into token ids, as the user's message where the tokenizer has a chat template.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: the text.
    """
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return list(tokenizer(prompt, verbose=False)["input_ids"])


@torch.inference_mode()
def answer(
    model: nn.Module,
    tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 32,
    batch_size: int = 16,
    skip: Callable[[Sequence[int]], bool] | None = None,
    on_batch: Callable[[list[int], list[str]], None] | None = None,
) -> list[str | None]:
    """Answers prompts greedily, in batches of similar length, padded on the left.

    Prompts that begin alike, such as questions after one dialogue, share that beginning's keys and values. The
    batches depend on the prompts and `batch_size` alone.

    Args:
        model: a causal language model in evaluation mode, with or without a memory; only read.
        tokenizer: its tokenizer.
        prompts: token ids, none of them empty (see `encode_prompt`).
        max_new_tokens: an answer's length at most.
        batch_size: prompts at once.
        skip: called with a batch's places in `prompts`; True where its answers are known already.
        on_batch: called with a batch's places and answers.

    Returns:
        Each prompt's answer, its first line that is not blank; None where its batch was skipped.

    Raises:
        ValueError: a prompt is empty, or leaves the model no room for the answer.
    """
    if not prompts:
        return []
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {number} must not be empty: give the model a question")
        if isinstance(limit, int) and 0 < limit < len(prompt) + max_new_tokens:
            raise ValueError(
                f"prompt {number} and max_new_tokens must fit the model's {limit} positions, got {len(prompt)} + "
                f"{max_new_tokens}: shorten one of them"
            )
    order = sorted(range(len(prompts)), key=lambda number: (-len(prompts[number]), number))
    batches = [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]
    wanted = [batch for batch in batches if skip is None or not skip(batch)]
    answers: list[str | None] = [None] * len(prompts)
    if not wanted:
        return answers
    beginning = _common_beginning(prompts)
    cache = _read_beginning(model, beginning) if len(beginning) >= _WORTH_KEEPING else None
    for batch in wanted:
        texts = _answer_batch(model, tokenizer, [prompts[number] for number in batch], max_new_tokens, cache)
        for number, text in zip(batch, texts, strict=True):
            answers[number] = text
        if on_batch is not None:
            on_batch(batch, texts)
    return answers


def _common_beginning(prompts: Sequence[Sequence[int]]) -> list[int]:
    """What all prompts begin with, short of the last token of any: that one has to be fed to be answered."""
    first, last = min(map(tuple, prompts)), max(map(tuple, prompts))
    shared = next((n for n, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return list(first[: min(shared, min(map(len, prompts)) - 1)])


def _read_beginning(model: nn.Module, ids: list[int]) -> DynamicCache | None:
    config = model.config.get_text_config()
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return None  # what such layers keep cannot be followed by padding
    cache = DynamicCache()
    found = model(
        input_ids=torch.tensor([ids], device=_device(model)), past_key_values=cache, use_cache=True, logits_to_keep=1
    ).past_key_values
    return found if isinstance(found, DynamicCache) and found.get_seq_length() == len(ids) else None


def _answer_batch(
    model: nn.Module, tokenizer, prompts: list[Sequence[int]], max_new_tokens: int, cache: DynamicCache | None
) -> list[str]:
    kept = 0 if cache is None else cache.get_seq_length()
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    length = max(map(len, prompts))
    ids = torch.full((len(prompts), length), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        prompt = torch.tensor(list(prompt))
        rest = len(prompt) - kept
        ids[row, :kept], mask[row, :kept] = prompt[:kept], 1
        ids[row, length - rest :], mask[row, length - rest :] = prompt[kept:], 1
    options = {}
    if cache is not None:
        options["past_key_values"] = copy.deepcopy(cache)
        options["past_key_values"].batch_repeat_interleave(len(prompts))
    device = _device(model)
    output = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=pad,
        **options,
    )
    return [first_line(text) for text in tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)]


def first_line(text: str) -> str:
    """Gives the first line of a text that is not blank, without blanks around it; models go on after an answer."""
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in lines if line), "")


def _device(model: nn.Module) -> torch.device:
    return model.get_input_embeddings().weight.device
