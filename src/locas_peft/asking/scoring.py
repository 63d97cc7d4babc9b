"""Negative log-likelihood of targets after prompts, in batches.

The model may have a memory, and is not changed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..model import CausalLM, token_losses
from .continuation import begin_rows, list_batches

__all__ = ["Score", "score_targets"]

Pair = tuple[Sequence[int], Sequence[int]]


class Score(NamedTuple):
    """A target's summed negative log-likelihood, in nats, and the number of tokens in the sum."""

    nll_nats: float
    tokens: int

    @property
    def per_token(self) -> float:
        """Nats a token; nan if no token was scored."""
        return self.nll_nats / self.tokens if self.tokens else float("nan")


@torch.inference_mode()
def score_targets(
    model: nn.Module,
    pairs: Sequence[Pair],
    *,
    batch_tokens: int = 4096,
    shared: int = 0,
    caches: dict | None = None,
) -> list[Score]:
    """Score targets after their prompts under a model in evaluation mode.

    The batches, of similar length, depend on `pairs` and `batch_tokens` alone, so that a model
    scored twice gives the same numbers.

    Args:
        pairs: (prompt ids, target ids). After an empty prompt the target's first token is not
            scored. A pair that is longer than the model's positions is a `ValueError`.
        batch_tokens: the most tokens of a batch, padding included; a longer pair is a batch of its
            own.
        shared: with how many tokens all prompts begin alike, fewer than the shortest prompt has
            (see `count_shared`). Their keys and values are computed once.
        caches: keeps these keys and values for later calls with the same beginning.
    """
    if caches is None:
        caches = {}
    host = CausalLM(model)
    sequences = [torch.tensor([*prompt, *target], device=host.device) for prompt, target in pairs]
    lengths = [len(sequence) for sequence in sequences]
    for number, tokens in enumerate(lengths):
        if host.positions is not None and tokens - 1 > host.positions:
            rule = f"pair {number} must fit the model's {host.positions} positions"
            raise ValueError(f"{rule}, got {tokens} tokens: shorten its prompt")
    # The first scored token of each sequence.
    firsts = [max(len(prompt), 1) for prompt, _ in pairs]
    scores = [Score(0.0, 0)] * len(sequences)
    for batch in list_batches(lengths, batch_tokens):
        rows = [sequences[number] for number in batch]
        begins = [firsts[number] for number in batch]
        if shared:
            batch_scores = _score_after(host, rows, begins, shared, caches)
        else:
            batch_scores = _score_batch(host, rows, begins)
        for number, score in zip(batch, batch_scores, strict=True):
            scores[number] = score
    return scores


def _score_batch(host: CausalLM, sequences: list[Tensor], firsts: list[int]) -> list[Score]:
    """Return the scores of sequences [T], each from its first scored token on."""
    # [B, T]
    ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    ones = [torch.ones_like(sequence) for sequence in sequences]
    mask = nn.utils.rnn.pad_sequence(ones, batch_first=True)
    begin = min(firsts)
    width = ids.shape[1]
    if begin >= width:
        return [Score(0.0, 0)] * len(sequences)
    # logits[:, i] predicts token begin + i.
    logits = host.logits(ids[:, :-1], width - begin, attention_mask=mask[:, :-1], use_cache=False)
    scores = []
    for number, (sequence, first) in enumerate(zip(sequences, firsts, strict=True)):
        stop = len(sequence)
        if stop <= first:
            scores.append(Score(0.0, 0))
            continue
        predicted = logits[number, first - begin : stop - begin]
        losses = token_losses(predicted, ids[number, first:stop])
        scores.append(Score(losses.double().sum().item(), stop - first))
    return scores


def _score_after(
    host: CausalLM, sequences: list[Tensor], firsts: list[int], shared: int, caches: dict
) -> list[Score]:
    """Return the scores of sequences [T] whose first `shared` tokens are the same."""
    rows = [sequence[:-1].tolist() for sequence in sequences]
    inputs = begin_rows(host, rows, [(shared, range(len(rows)))], caches=caches)
    counts = [len(sequence) - first for sequence, first in zip(sequences, firsts, strict=True)]
    # All rows end together.
    logits = host.logits(inputs.pop("ids"), max(max(counts), 1), **inputs)
    scores = []
    for row_logits, sequence, count in zip(logits, sequences, counts, strict=True):
        if count <= 0:
            scores.append(Score(0.0, 0))
            continue
        losses = token_losses(row_logits[-count:], sequence[-count:])
        scores.append(Score(losses.double().sum().item(), count))
    return scores
