"""Continue prompts in batches, of which what rows share is computed once.

Axes: B rows of a batch, L their length, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from ..model import CausalLM, count_positions
from .prompts import find_pad_token

__all__ = ["Choose", "Groups", "Rows", "answer", "begin_rows", "check_room", "continue_rows"]
__all__ += ["continue_texts", "draw", "first_line", "pad_left", "share_prefixes"]

Choose = Callable[[Tensor], Tensor]
"""Chooses the next token of each row, LongTensor [B], by the logits, float32 [B, V]."""
Rows = Sequence[Sequence[int]]
Groups = Sequence[tuple[int, range]]
"""Rows that begin alike: how many tokens they share, and their numbers (see `share_prefixes`)."""

_WORTH_KEEPING = (
    64  # a beginning that all prompts share is computed once where it has so many tokens
)


def pad_left(rows: Rows, pad: int, device: torch.device) -> dict[str, Tensor]:
    """Return rows of token ids as the model's inputs, each LongTensor [B, L], so that all rows end together."""
    length = max(map(len, rows))
    ids = torch.tensor([[pad] * (length - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=device)
    return {"ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def share_prefixes(prompts: Rows) -> list[tuple[int, range]]:
    """Group prompts that follow each other and begin alike, such as questions about one passage.

    Return for each group how many tokens its prompts share, fewer than the shortest has, and the prompts' numbers. A
    prompt joins a group where it has at least half of what the group shares.
    """
    groups: list[tuple[list[int], int, int]] = []
    for number, prompt in enumerate(prompts):
        own, first = list(prompt[:-1]), number
        shared = list(commonprefix([groups[-1][0], own])) if groups else []
        if shared and 2 * len(shared) >= len(groups[-1][0]):
            own, first = shared, groups.pop()[1]
        groups.append((own, first, number + 1))
    return [(len(shared), range(first, stop)) for shared, first, stop in groups]


@torch.no_grad()
def begin_rows(
    host: CausalLM,
    rows: Rows,
    groups: Groups,
    pad: int,
    *,
    new_tokens: int = 0,
    caches: dict | None = None,
) -> dict[str, Any]:
    """Return rows as the model's inputs, as `pad_left` does, after the tokens that the rows of a group share.

    The keys and values of these tokens are computed once a group, without gradients. The inputs are whole rows where
    a group shares nothing, and for a model whose context is more than keys and values, or which counts the padding
    after the shared tokens.

    At least one token of each row is not shared. `pad` is any token. At most `new_tokens` will follow the rows.
    `caches` keeps the keys and values for later batches with the same shared tokens.
    """
    can_share = host.can_cache() and host.can_pad_inside(max(map(len, rows)) + new_tokens)
    if not can_share or not groups or not all(count for count, _ in groups):
        return pad_left(rows, pad, host.device)
    shared = [rows[numbers[0]][:count] for count, numbers in groups]
    prefixes = pad_left(shared, pad, host.device)
    key = tuple(map(tuple, shared))
    cache = None if caches is None else caches.get(key)
    if cache is None:
        cache = host.outputs(count=1, use_cache=True, **prefixes).past_key_values
    if caches is not None:
        caches[key], cache = cache, copy.deepcopy(cache)
    owners = [group for group, (_, numbers) in enumerate(groups) for _ in numbers]
    cache.batch_select_indices(torch.tensor(owners, device=host.device))
    counts = [groups[owner][0] for owner in owners]
    inputs = pad_left(
        [row[count:] for row, count in zip(rows, counts, strict=True)], pad, host.device
    )
    inputs["position_ids"] += torch.tensor(counts, device=host.device)[:, None]
    inputs["attention_mask"] = torch.cat(
        [prefixes["attention_mask"][owners], inputs["attention_mask"]], 1
    )
    return {**inputs, "past_key_values": cache}


@torch.no_grad()
def continue_rows(
    host: CausalLM,
    rows: Rows,
    max_new_tokens: int,
    *,
    pad: int,
    stops: Sequence[int] = (),
    choose: Choose | None = None,
    groups: Groups = (),
    caches: dict | None = None,
    adapters: Sequence[str] | None = None,
    on_token: Callable[[list[list[int]]], None] | None = None,
) -> list[list[int]]:
    """Continue rows of token ids in one batch, each until it has written a stop token or `max_new_tokens` tokens.

    Args:
        host: the model in evaluation mode, with or without a memory; not changed.
        rows: token ids, none of them empty.
        pad: any token.
        stops: tokens that end a row; a row's last token may be one.
        choose: the likeliest token by default; it is given the logits of fewer rows once half of them have ended.
        groups, caches: see `begin_rows`.
        adapters: one adapter's name for each row (see `CausalLM.logits`); such rows share nothing.
        on_token: is given the tokens so far of all rows, after each token.
    """
    ends, new, left = set(stops), [list[int]() for _ in rows], list(range(len(rows)))
    inputs = begin_rows(host, rows, groups, pad, new_tokens=max_new_tokens, caches=caches)
    for _ in range(max_new_tokens):
        outputs = host.outputs(count=1, adapters=adapters, use_cache=True, **inputs)
        logits = outputs.logits[:, -1].float()
        token = logits.argmax(-1) if choose is None else choose(logits)
        for number, each in zip(left, token.tolist(), strict=True):
            new[number] += [] if new[number] and new[number][-1] in ends else [each]
        if on_token is not None:
            on_token(new)
        going = [place for place, number in enumerate(left) if new[number][-1] not in ends]
        if not going:
            break
        cache = getattr(outputs, "past_key_values", None)
        following = {"ids": token[:, None], "position_ids": inputs["position_ids"][:, -1:] + 1}
        if cache is None:  # the model keeps no context: all tokens go through it again
            following = {
                name: torch.cat([inputs[name], each], 1) for name, each in following.items()
            }
        following["attention_mask"] = torch.cat(
            [inputs["attention_mask"], torch.ones_like(token)[:, None]], 1
        )
        # Rows that have ended leave when they are half of the batch: each time, the keys and values are copied.
        if 2 * len(going) <= len(left) and (cache is None or host.can_cache()):
            kept = torch.tensor(going, device=host.device)
            following = {name: each[kept] for name, each in following.items()}
            left, adapters = (
                [left[place] for place in going],
                adapters and [adapters[place] for place in going],
            )
            if cache is not None:
                cache.batch_select_indices(kept)
        inputs = {**following, "past_key_values": cache}
    return new


def draw(
    temperature: float, generator: torch.Generator, limits: GenerationConfig | None = None
) -> Choose:
    """Return a function that draws tokens from the softmax of logits [B, V] / temperature.

    `limits` draws among the likeliest tokens alone, by its `top_k` and `top_p`; 50 where it leaves `top_k` open, as
    transformers' `generate` does. The generator is on the model's device.
    """
    limits = GenerationConfig(top_k=0) if limits is None else limits
    warpers, top_k = LogitsProcessorList(), 50 if limits.top_k is None else limits.top_k
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(limits.top_p)] if (limits.top_p or 1) < 1 else []

    def choose(logits: Tensor) -> Tensor:
        return torch.multinomial(
            warpers(None, logits / temperature).softmax(-1), 1, generator=generator
        )[:, 0]

    return choose


def continue_texts(
    model: nn.Module,
    tokenizer,
    prompts: Rows,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    on_text: Callable[[list[str]], None] | None = None,
    **options: Any,
) -> list[str]:
    """Return the texts that a model writes after prompts, in one batch, each up to an end token of the model.

    Args:
        model: a causal LM in evaluation mode, with or without a memory; not changed.
        prompts: token ids, none of them empty (see `encode_prompt`).
        temperature: 0 takes the likeliest tokens; above 0, they are drawn, by `top_k` and `top_p` of the model.
        seed: of the tokens that are drawn. Torch's own random state is not used.
        on_text: is given the texts so far, after each token.
        options: more for `continue_rows`.
    """
    host, config = CausalLM(model, cpu_attention=False), model.generation_config

    def decode(rows: list[list[int]]) -> list[str]:
        return tokenizer.batch_decode(rows, skip_special_tokens=True)

    ends = config.eos_token_id
    options["stops"] = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if temperature:
        options["choose"] = draw(
            temperature, torch.Generator(host.device).manual_seed(seed), config
        )
    if on_text is not None:
        options["on_token"] = lambda rows: on_text(decode(rows))
    return decode(
        continue_rows(host, prompts, max_new_tokens, pad=find_pad_token(tokenizer), **options)
    )


def answer(
    model: nn.Module,
    tokenizer,
    prompts: Rows,
    *,
    max_new_tokens: int = 32,
    batch_size: int = 16,
    known: Iterable = (),
) -> Iterator[tuple[list[int], list[str]]]:
    """Answer prompts greedily; yield each batch's indices into `prompts`, and the first line of each of its answers.

    The batches, of similar length, depend on the prompts and `batch_size` alone. The keys and values of a beginning
    that all prompts share, such as a dialogue before its questions, are computed once. `known` has the indices of
    prompts whose answers are not needed; a batch of only such prompts is left out. For errors see `check_room`.
    """
    shared = commonprefix(
        [list(prompt[:-1]) for prompt in prompts]
    )  # a prompt's last token must be fed
    known, caches = set(known), dict[Any, Any]()
    for number, prompt in enumerate(prompts):
        check_room(model, prompt, max_new_tokens, f"prompt {number}")
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    for batch in [order[first : first + batch_size] for first in range(0, len(order), batch_size)]:
        if not known.issuperset(batch):
            groups = [(len(shared), range(len(batch)))] if len(shared) >= _WORTH_KEEPING else []
            rows = [prompts[number] for number in batch]
            texts = continue_texts(
                model, tokenizer, rows, max_new_tokens, groups=groups, caches=caches
            )
            yield batch, [first_line(text) for text in texts]


def check_room(
    model: nn.Module,
    prompt: Sequence[int],
    max_new_tokens: int,
    name: str,
    option: str = "max_new_tokens",
) -> None:
    """Raise a `ValueError` for a prompt that is empty, or leaves no positions for `max_new_tokens` tokens."""
    if not len(prompt):
        raise ValueError(f"{name} must not be empty: give the model a question")
    positions = count_positions(model)
    if positions is not None and positions < len(prompt) + max_new_tokens:
        got = f"{len(prompt)} + {max_new_tokens}: shorten one of them"
        raise ValueError(
            f"{name} and {option} must fit the model's {positions} positions, got {got}"
        )


def first_line(text: str) -> str:
    """Return the first line of a text that is not blank, stripped: models continue after their answer."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
