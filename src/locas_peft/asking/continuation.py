"""Continue prompts in batches, and compute once what their rows share.

Axes: B rows of a batch, L their length, V vocabulary.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from ..model import CausalLM, count_positions, find_cache
from ..text import is_code
from .prompts import can_chat, list_stops

__all__ = [
    "Choose",
    "Groups",
    "Rows",
    "answer_in_batches",
    "begin_rows",
    "check_room",
    "continue_inputs",
    "continue_rows",
    "continue_texts",
    "count_shared",
    "draw",
    "first_line",
    "first_statement",
    "list_batches",
    "pad_left",
    "share_prefixes",
]

_COMMENT = re.compile(r"#|//|/\*|--")
Choose = Callable[[Tensor], Tensor]
"""Chooses the next token of each row, LongTensor [B], by the logits, float32 [B, V]."""
Rows = Sequence[Sequence[int]]
Groups = Sequence[tuple[int, range]]
"""Rows that begin alike: how many tokens they share, and their numbers (see `share_prefixes`)."""

# Masked, so that any token serves. A tokenizer's own may lie outside the embeddings.
_PAD = 0
BATCH_TOKENS = 32_768
"""The most tokens of a batch of prompts that are answered; a longer prompt is a whole batch."""
LEAST_TEMPERATURE = 1e-6
"""The logits divided by a lower temperature could exceed float32."""
LEAST_SHARED = 64
"""A beginning that all prompts share is computed once where it has so many tokens."""


def pad_left(rows: Rows, device: torch.device, least: int = 0) -> dict[str, Tensor]:
    """Return rows of token ids as a model's inputs, LongTensors [B, L]; all rows end together.

    L is the length of the longest row, or `least` where that is more.
    """
    length = max(least, *map(len, rows))
    padded_rows = []
    masks = []
    for row in rows:
        missing = length - len(row)
        padded_rows.append([_PAD] * missing + list(row))
        masks.append([0] * missing + [1] * len(row))
    mask = torch.tensor(masks, device=device)
    return {
        "ids": torch.tensor(padded_rows, device=device),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }


def share_prefixes(prompts: Rows) -> list[tuple[int, range]]:
    """Group prompts that follow each other and begin alike, such as questions about one passage.

    Return for each group how many tokens its prompts share, fewer than the shortest has, and the
    prompts' numbers. A prompt joins a group where it has at least half of what the group shares.
    """
    prefixes: list[list[int]] = []
    numbers: list[range] = []
    for number, prompt in enumerate(prompts):
        # The last token of a prompt must be fed: its logits choose the first new token.
        beginning = list(prompt[:-1])
        shared = list(commonprefix([prefixes[-1], beginning])) if prefixes else []
        if shared and 2 * len(shared) >= len(prefixes[-1]):
            prefixes[-1] = shared
            numbers[-1] = range(numbers[-1].start, number + 1)
        else:
            prefixes.append(beginning)
            numbers.append(range(number, number + 1))
    return [(len(prefix), group) for prefix, group in zip(prefixes, numbers, strict=True)]


def count_shared(prompts: Rows) -> int:
    """Return with how many tokens all prompts begin alike; 0 where they are too few to matter."""
    # The last token of a prompt must be fed: its logits choose the first new token.
    shared = len(commonprefix([list(prompt[:-1]) for prompt in prompts]))
    return shared if shared >= LEAST_SHARED else 0


@torch.no_grad()
def begin_rows(
    host: CausalLM,
    rows: Rows,
    groups: Groups = (),
    *,
    new_tokens: int = 0,
    caches: dict | None = None,
) -> dict[str, Any]:
    """Return rows as the model's inputs, after the tokens that the rows of a group share.

    Without such tokens they are those of `pad_left`.

    The keys and values of these tokens are computed once a group, without gradients. The inputs are
    whole rows where a group shares nothing, and for a model whose context is more than keys and
    values, or which counts the padding after the shared tokens.

    Args:
        rows: at least one token of each is not shared.
        new_tokens: the most tokens that will follow the rows.
        caches: keeps the keys and values for later batches with the same shared tokens.

    Raises:
        ValueError: rows of several lengths, for a model that counts padding.
    """
    if not host.can_pad_left() and len(set(map(len, rows))) > 1:
        rule = f"rows must have one length for {host.kind}, which counts padding"
        raise ValueError(f"{rule}, got several: give one row at a time")
    if not groups or not all(count for count, _ in groups) or not host.can_cache():
        return pad_left(rows, host.device)
    # Each row is padded twice: after what it shares, and before.
    rest = max(len(rows[number]) - count for count, numbers in groups for number in numbers)
    if not host.can_pad_inside(max(count for count, _ in groups) + rest + new_tokens):
        return pad_left(rows, host.device)
    shared = [rows[numbers[0]][:count] for count, numbers in groups]
    prefixes = pad_left(shared, host.device)
    cache = _compute_prefixes(host, shared, prefixes, caches)
    owners = []
    counts = []
    for group, (count, numbers) in enumerate(groups):
        owners += [group] * len(numbers)
        counts += [count] * len(numbers)
    # On the CPU: a split base has keys on several devices, which all take such indices.
    cache.batch_select_indices(torch.tensor(owners))
    rests = [row[count:] for row, count in zip(rows, counts, strict=True)]
    inputs: dict[str, Any] = pad_left(rests, host.device)
    inputs["position_ids"] += torch.tensor(counts, device=host.device)[:, None]
    masks = [prefixes["attention_mask"][owners], inputs["attention_mask"]]
    inputs["attention_mask"] = torch.cat(masks, 1)
    inputs["past_key_values"] = cache
    return inputs


def _compute_prefixes(
    host: CausalLM, shared: Rows, prefixes: dict[str, Tensor], caches: dict | None
) -> Any:
    """Return the keys and values of prefixes, out of `caches` if it has them; a copy to change."""
    key = tuple(map(tuple, shared))
    cache = None if caches is None else caches.get(key)
    if cache is None:
        cache = find_cache(host.outputs(count=1, use_cache=True, **prefixes))
    if caches is None:
        return cache
    caches[key] = cache
    return copy.deepcopy(cache)


def continue_rows(
    host: CausalLM,
    rows: Rows,
    max_new_tokens: int,
    *,
    groups: Groups = (),
    **options: Any,
) -> list[list[int]]:
    """Continue rows of token ids in one batch; return the new tokens of each.

    Args:
        host: the model in evaluation mode, with or without a memory; not changed.
        rows: token ids, none of them empty.
        groups: see `begin_rows`.
        options: of `continue_inputs`.
    """
    inputs = begin_rows(host, rows, groups, new_tokens=max_new_tokens)
    return continue_inputs(host, inputs, max_new_tokens, **options)


@torch.no_grad()
def continue_inputs(
    host: CausalLM,
    inputs: dict[str, Any],
    max_new_tokens: int,
    *,
    stops: Sequence[int] = (),
    choose: Choose | None = None,
    adapters: Sequence[str] | None = None,
    on_token: Callable[[list[list[int]]], None] | None = None,
) -> list[list[int]]:
    """Continue the rows of `begin_rows` or `pad_left`; return the new tokens of each.

    Each row ends with a stop token, or after `max_new_tokens` tokens.

    Args:
        stops: tokens that end a row.
        choose: the likeliest token by default; it is given the logits of fewer rows once half of
            them have ended.
        adapters: one adapter's name for each row (see `CausalLM.logits`); such rows share nothing.
        on_token: is given the tokens so far of all rows, after each token.
    """
    ends = set(stops)
    active = list(range(len(inputs["ids"])))
    new_rows: list[list[int]] = [[] for _ in active]
    for _ in range(max_new_tokens):
        outputs = host.outputs(count=1, adapters=adapters, use_cache=True, **inputs)
        logits = outputs.logits[:, -1].float()
        tokens = logits.argmax(-1) if choose is None else choose(logits)
        for number, token in zip(active, tokens.tolist(), strict=True):
            if not _has_ended(new_rows[number], ends):
                new_rows[number].append(token)
        if on_token is not None:
            on_token(new_rows)
        indices = [
            index for index, number in enumerate(active) if not _has_ended(new_rows[number], ends)
        ]
        if not indices:
            break
        cache = find_cache(outputs)
        inputs = _follow(inputs, tokens, cache)
        # Rows that have ended leave when they are half of the batch: each time, the keys and values
        # are copied.
        if 2 * len(indices) <= len(active) and (cache is None or host.can_cache()):
            # On the CPU, which the keys of a split base take on each of their devices.
            selected = torch.tensor(indices)
            inputs = {name: tensor[selected] for name, tensor in inputs.items()}
            active = [active[index] for index in indices]
            if adapters is not None:
                adapters = [adapters[index] for index in indices]
            if cache is not None:
                cache.batch_select_indices(selected)
        inputs["past_key_values"] = cache
    return new_rows


def _has_ended(tokens: Sequence[int], ends: set[int]) -> bool:
    return bool(tokens) and tokens[-1] in ends


def _follow(inputs: dict[str, Any], tokens: Tensor, cache: Any) -> dict[str, Tensor]:
    """Return the next inputs, for new tokens [B]; with all tokens, where there is no cache."""
    ids = tokens[:, None]
    positions = inputs["position_ids"][:, -1:] + 1
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids)], 1)
    if cache is None:
        ids = torch.cat([inputs["ids"], ids], 1)
        positions = torch.cat([inputs["position_ids"], positions], 1)
    return {"ids": ids, "position_ids": positions, "attention_mask": mask}


def draw(
    temperature: float, generator: torch.Generator, limits: GenerationConfig | None = None
) -> Choose:
    """Return a function that draws tokens from the softmax of logits [B, V] / temperature.

    Args:
        temperature: above 0; one below `LEAST_TEMPERATURE` is taken as that.
        generator: on the model's device.
        limits: draws among the likeliest tokens alone, by its `top_k` and `top_p`; 50 where it
            leaves `top_k` open, as transformers' `generate` does.
    """
    if limits is None:
        limits = GenerationConfig(top_k=0)
    top_k = 50 if limits.top_k is None else limits.top_k
    warpers = LogitsProcessorList()
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if limits.top_p and limits.top_p < 1:
        warpers.append(TopPLogitsWarper(limits.top_p))
    temperature = max(temperature, LEAST_TEMPERATURE)

    def choose(logits: Tensor) -> Tensor:
        probabilities = warpers(None, logits / temperature).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]

    return choose


def continue_texts(
    model: nn.Module,
    tokenizer: Any,
    prompts: Rows,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    adapters: Sequence[str] | None = None,
    on_text: Callable[[list[str]], None] | None = None,
    **options: Any,
) -> list[str]:
    """Return the texts that a model writes after prompts, in one batch, each up to an end token.

    Args:
        model: a causal LM in evaluation mode, with or without a memory; not changed.
        prompts: token ids, none of them empty (see `encode_prompt`).
        temperature: 0 takes the likeliest tokens; above 0, they are drawn, by `top_k` and `top_p`
            of the model.
        seed: of the tokens that are drawn. Torch's own random state is not used.
        adapters: one adapter's name for each prompt (see `CausalLM.logits`).
        on_text: is given the texts so far, after each token.
        options: of `begin_rows`: `groups` and `caches`.
    """
    host = CausalLM(model, cpu_attention=False)
    config = model.generation_config

    def decode(rows: list[list[int]]) -> list[str]:
        return tokenizer.batch_decode(rows, skip_special_tokens=True)

    stops = _list_reply_stops(config, tokenizer)
    choose = None
    if temperature:
        generator = torch.Generator(host.device).manual_seed(seed)
        choose = draw(temperature, generator, config)
    on_token: Callable[[list[list[int]]], None] | None = None
    if on_text is not None:

        def show(rows: list[list[int]]) -> None:
            on_text(decode(rows))

        on_token = show
    inputs = begin_rows(host, prompts, new_tokens=max_new_tokens, **options)
    rows = continue_inputs(
        host,
        inputs,
        max_new_tokens,
        stops=stops,
        choose=choose,
        adapters=adapters,
        on_token=on_token,
    )
    return decode(rows)


def _list_reply_stops(config: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a text: those of the model's config and of its tokenizer.

    A study teaches replies up to the turn's end, which the config of many base models leaves out.
    """
    stops = config.eos_token_id
    if stops is None:
        stops = []
    elif not isinstance(stops, list):
        stops = [stops]
    if can_chat(tokenizer):
        return [*stops, *list_stops(tokenizer)]
    # Not the other stops of a base model: its text may have more than a line.
    end = tokenizer.eos_token_id
    return stops if end is None else [*stops, end]


def answer_in_batches(
    model: nn.Module,
    tokenizer: Any,
    prompts: Rows,
    *,
    max_new_tokens: int = 32,
    batch_size: int = 16,
    known: Iterable[int] = (),
    caches: dict | None = None,
) -> Iterator[tuple[list[int], list[str]]]:
    """Answer prompts greedily; yield each batch's indices, and the beginning of each answer.

    See `first_statement`.

    The batches, of similar length, depend on the prompts and `batch_size` alone: they have at most
    so many prompts, and `BATCH_TOKENS` tokens. The keys and values of a beginning that all prompts
    share, such as a dialogue before its questions, are computed once. `known` has the indices of
    prompts whose answers are not needed; a batch of only such prompts is left out. For errors see
    `check_room`.

    Args:
        caches: keeps these keys and values, for `score_targets` of the same prompts.
    """
    for number, prompt in enumerate(prompts):
        check_room(model, prompt, max_new_tokens, f"prompt {number}")
    shared = count_shared(prompts)
    known = set(known)
    if caches is None:
        caches = {}
    for batch in list_batches([len(prompt) for prompt in prompts], BATCH_TOKENS, batch_size):
        if known.issuperset(batch):
            continue
        groups = [(shared, range(len(batch)))] if shared else []
        rows = [prompts[number] for number in batch]
        texts = continue_texts(model, tokenizer, rows, max_new_tokens, groups=groups, caches=caches)
        yield batch, [first_statement(text) for text in texts]


def list_batches(
    lengths: Sequence[int], batch_tokens: int, most_rows: int | None = None
) -> Iterator[list[int]]:
    """Yield the numbers of each batch of rows, the longest first.

    The first of a batch sets its width, and a batch that is too large for a device fails early.

    Args:
        lengths: of the rows, in tokens.
        batch_tokens: the most tokens of a batch, padding included; a longer row is a whole batch.
        most_rows: of a batch; None for no limit.
    """
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        is_full = bool(batch) and (len(batch) + 1) * lengths[batch[0]] > batch_tokens
        if is_full or len(batch) == most_rows:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def check_room(
    model: nn.Module,
    prompt: Sequence[int],
    max_new_tokens: int,
    name: str,
    option: str = "max_new_tokens",
) -> None:
    """Raise a `ValueError` for an empty prompt, or one without room for `max_new_tokens` tokens.

    The message calls the two `name` and `option`.
    """
    if not len(prompt):
        raise ValueError(f"{name} must not be empty: give the model a question")
    positions = count_positions(model)
    if positions is not None and positions < len(prompt) + max_new_tokens:
        got = f"{len(prompt)} + {max_new_tokens}: shorten one of them"
        raise ValueError(
            f"{name} and {option} must fit the model's {positions} positions, got {got}"
        )


def first_line(text: str) -> str:
    """Return the first line that is not blank, stripped: models continue after their answer."""
    for line in text.splitlines():
        if line.strip():
            return line.strip()
    return ""


def first_statement(text: str) -> str:
    """Return an answer that is code, from its first line on, else the first line of an answer."""
    first = first_line(text)
    lines = [line for line in text.splitlines() if line.strip()]
    if (is_code([first]) or _COMMENT.match(first)) and is_code(lines):
        return text.strip()
    return first
