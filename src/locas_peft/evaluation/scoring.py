"""Negative log-likelihoods from any causal language model: of targets after prompts, in batches, and of documents.

The model is only read. Whether it has a memory, and which, is the caller's business.

Axes: B batch, T tokens, N tokens scored, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Score(NamedTuple):
    """What a target cost: the summed negative log-likelihood, in nats, and over how many tokens it was summed."""

    nll_nats: float
    tokens: int

    @property
    def per_token(self) -> float:
        """Nats a token; nan where no token was scored."""
        return self.nll_nats / self.tokens if self.tokens else float("nan")


def encode_pair(tokenizer, prompt: str, target: str) -> tuple[list[int], list[int]]:
    """Turns a prompt and what follows it into token ids, split where the target begins.

    Both are tokenised together, so that the target's first token is the one that a reader of the whole would see;
    blanks between the two belong to the target.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: what stands before, possibly nothing.
        target: what is scored, not empty.

    Returns:
        The prompt's ids and the target's. The prompt begins with the tokenizer's first special token (for lack of
        one, the end-of-text token), where it has one, so that the target's first token is always foretold.

    Raises:
        ValueError: `target` is empty.
    """
    if not target:
        raise ValueError("target must not be empty: give the text that is to be scored")
    blanks = len(prompt) - len(prompt.rstrip())
    if blanks:
        prompt, target = prompt[:-blanks], prompt[-blanks:] + target
    whole = tokenizer(prompt + target, add_special_tokens=False, verbose=False)["input_ids"]
    known = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"] if prompt else []
    split = min(len(known), len(whole) - 1)
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return ([] if first is None else [first]) + whole[:split], whole[split:]


@torch.inference_mode()
def score_targets(
    model: nn.Module,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_tokens: int = 4096,
    on_batch: Callable[[int], None] | None = None,
) -> list[Score]:
    """Scores targets after their prompts, in batches of similar length, padded on the right.

    The batches depend on `pairs` and `batch_tokens` alone, so that a model scored twice gives the same numbers.

    Args:
        model: a causal language model, in evaluation mode; only read.
        pairs: (prompt ids, target ids). With an empty prompt the target's first token is not scored.
        batch_tokens: at most so many tokens, padding included, go through the model at once; a longer pair goes alone.
        on_batch: called with the number of pairs that were scored.

    Returns:
        One `Score` a pair, in the order of `pairs`.

    Raises:
        ValueError: a target is empty, or a pair is longer than the model's positions.
    """
    device = model.get_input_embeddings().weight.device
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    sequences = []
    for number, (prompt, target) in enumerate(pairs):
        ids = [*prompt, *target]
        if not len(target):
            raise ValueError(f"target {number} must not be empty: leave it out")
        if isinstance(limit, int) and 0 < limit < len(ids) - 1:
            raise ValueError(
                f"pair {number} must fit the model's {limit} positions, got {len(ids)} tokens: shorten its prompt"
            )
        sequences.append((ids, len(target) if len(prompt) else len(target) - 1))
    scores: list[Score] = [Score(0.0, 0)] * len(sequences)
    for batch in _batches([len(ids) for ids, _ in sequences], batch_tokens):
        length = max(len(sequences[number][0]) for number in batch)
        ids = torch.zeros(len(batch), length, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, number in enumerate(batch):
            its = torch.tensor(sequences[number][0])
            ids[row, : len(its)], mask[row, : len(its)] = its, 1
        ids, mask = ids.to(device), mask.to(device)
        logits = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], use_cache=False).logits  # [B, T - 1, V]
        for row, number in enumerate(batch):
            its, count = sequences[number]
            if count:
                part = slice(len(its) - 1 - count, len(its) - 1)
                losses = F.cross_entropy(logits[row, part].float(), ids[row, 1:][part], reduction="none")
                scores[number] = Score(losses.double().sum().item(), count)
        if on_batch is not None:
            on_batch(len(batch))
    return scores


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        # Longest first: the first of a batch sets its width, and a batch that is too large for a device fails early.
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


@torch.inference_mode()
def read_logits(model: nn.Module, input_ids: Tensor, window: int, stride: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Reads a document as the perplexity protocol has it, and gives the logits of each chunk in turn.

    Chunks of `stride` tokens, each with at most `window - stride` tokens of context before it, fed again. Nothing is
    learned.

    Args:
        model: a causal language model, in evaluation mode.
        input_ids: LongTensor [T], T >= 2.
        window: the longest stretch that a prediction may rest on, in tokens.
        stride: a chunk's tokens, at most `window`.

    Returns:
        An iterator over (logits [N, V], targets LongTensor [N]); every token but the first is a target once.
    """
    ids = input_ids.to(model.get_input_embeddings().weight.device)
    for start in range(0, len(ids), stride):
        stop = min(start + stride, len(ids))
        targets = ids[max(start, 1) : stop]
        if not len(targets):
            continue
        begin = max(0, start - max(window - stride, 1))
        logits = model(input_ids=ids[begin : stop - 1].unsqueeze(0), use_cache=False).logits[0]
        yield logits[-len(targets) :], targets
