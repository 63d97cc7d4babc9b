"""Prompts of a self-study in batches, of which what rows share is computed once, and their continuations.

Axes: B rows of a batch, L their length, T tokens of an answer, K candidates for a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor

from ..model.causal_lm import CausalLM
from .prompts import can_chat, find_pad_token, find_turn_end

__all__ = [
    "Decoded",
    "begin_rows",
    "decode",
    "list_stops",
    "pad_left",
    "share_prefixes",
]

CANDIDATES = 64
"""K: the likeliest tokens, whose probabilities are kept, and which a question's next token is drawn from."""


def pad_left(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> dict[str, Tensor]:
    """Return rows of token ids as the model's inputs, each LongTensor [B, L], so that all rows end together."""
    length = max(map(len, rows))
    ids = torch.tensor([[pad] * (length - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=device)
    return {"ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def share_prefixes(prompts: Sequence[Sequence[int]]) -> list[tuple[int, range]]:
    """Group prompts that follow each other and begin alike, such as questions about one passage.

    Returns:
        For each group how many tokens its prompts share, fewer than the shortest has, and the prompts' numbers. A
        prompt joins a group where it has at least half of what the group shares.
    """
    groups: list[tuple[list[int], int, int]] = []
    for number, prompt in enumerate(prompts):
        own, first = list(prompt[:-1]), number
        shared = commonprefix([groups[-1][0], own]) if groups else []
        if shared and 2 * len(shared) >= len(groups[-1][0]):
            own, first = shared, groups.pop()[1]
        groups.append((own, first, number + 1))
    return [(len(shared), range(first, stop)) for shared, first, stop in groups]


@torch.no_grad()
def begin_rows(
    host: CausalLM, rows: Sequence[Sequence[int]], groups: Sequence[tuple[int, range]], pad: int
) -> dict[str, Any]:
    """Return rows as the model's inputs, as `pad_left` does, after the tokens that the rows of a group share.

    The keys and values of these tokens are computed once a group, without gradients. The inputs are whole rows where
    a group shares nothing, and for a model whose context is more than keys and values, or which counts the padding
    after the shared tokens.

    Args:
        host: the model, with the adapter that is to take part.
        rows: token ids; at least one a row is not shared.
        groups: see `share_prefixes`.
        pad: any token.
    """
    can_share = host.can_cache() and host.can_pad_inside(max(map(len, rows)))
    if not can_share or not all(count for count, _ in groups):
        return pad_left(rows, pad, host.device)
    prefixes = pad_left([rows[numbers[0]][:count] for count, numbers in groups], pad, host.device)
    cache = host.outputs(count=1, use_cache=True, **prefixes).past_key_values
    owners = [group for group, (_, numbers) in enumerate(groups) for _ in numbers]
    cache.batch_select_indices(torch.tensor(owners, device=host.device))
    counts = [groups[owner][0] for owner in owners]
    inputs = pad_left([row[count:] for row, count in zip(rows, counts, strict=True)], pad, host.device)
    inputs["position_ids"] += torch.tensor(counts, device=host.device)[:, None]
    inputs["attention_mask"] = torch.cat([prefixes["attention_mask"][owners], inputs["attention_mask"]], 1)
    return {**inputs, "past_key_values": cache}


@dataclass
class Decoded:
    """Token ids LongTensor [T], and at each place the likeliest tokens and their probabilities [T, K], on the CPU."""

    ids: Tensor
    candidates: Tensor
    targets: Tensor


def decode(
    host: CausalLM,
    tokenizer,
    prompts: Sequence[Sequence[int]],
    most_tokens: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[Decoded]:
    """Continue prompts in one batch, greedily or by sampling."""
    stops = torch.tensor(list_stops(tokenizer), dtype=torch.long, device=host.device)
    inputs = begin_rows(host, prompts, share_prefixes(prompts), find_pad_token(tokenizer))
    done, steps = torch.zeros(len(prompts), dtype=torch.bool, device=host.device), []
    for _ in range(most_tokens):
        outputs = host.outputs(count=1, use_cache=True, **inputs)
        cache = getattr(outputs, "past_key_values", None)
        if cache is None:
            raise ValueError(
                f"model must keep the keys and values of its context to write exchanges, got {host.kind}: give "
                "exchanges of your own"
            )
        logits = outputs.logits[:, -1].float()
        top, candidates = logits.topk(min(CANDIDATES, logits.shape[1]))
        choice = torch.zeros(len(prompts), 1, dtype=torch.long, device=host.device)
        if temperature:  # among a few: over the whole vocabulary the drawing takes as long as the model
            choice = torch.multinomial((top / temperature).softmax(-1), 1, generator=generator)
        token = candidates.gather(1, choice)[:, 0]
        targets = (top - logits.logsumexp(-1, keepdim=True)).exp()
        steps.append((token.cpu(), candidates.cpu(), targets.cpu(), done.cpu()))
        done = done | torch.isin(token, stops)
        if done.all():
            break
        mask = inputs["attention_mask"]
        inputs = {
            "ids": token[:, None],
            "attention_mask": torch.cat([mask, mask.new_ones(len(mask), 1)], 1),
            "position_ids": inputs["position_ids"][:, -1:] + 1,
            "past_key_values": cache,
        }
    tokens, candidates, targets, ended = (torch.stack(part, 1) for part in zip(*steps, strict=True))
    lengths = (~ended).sum(1).tolist()
    return [
        Decoded(tokens[row, :n].clone(), candidates[row, :n].clone(), targets[row, :n].clone())
        for row, n in enumerate(lengths)
    ]


def list_stops(tokenizer) -> list[int]:
    """Return the tokens that end an answer, first the chat template's own; for a base model also a line's end."""
    if can_chat(tokenizer):
        ends = [find_turn_end(tokenizer), tokenizer.eos_token_id]
    else:
        lines = (tokenizer(end, add_special_tokens=False)["input_ids"] for end in ("\n", "\n\n"))
        ends = [tokenizer.eos_token_id, *(ids[0] for ids in lines if len(ids) == 1)]
    return [end for end in dict.fromkeys(ends) if end is not None]
