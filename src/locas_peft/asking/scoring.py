"""Negative log-likelihood of targets after prompts, in batches; the model may have a memory and is not changed."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..model import CausalLM, token_losses

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
    model: nn.Module, pairs: Sequence[Pair], *, batch_tokens: int = 4096
) -> list[Score]:
    """Score targets after their prompts under a model in evaluation mode, in batches of similar length.

    The batches depend on `pairs` and `batch_tokens` alone, so that a model scored twice gives the same numbers.

    Args:
        pairs: (prompt ids, target ids). After an empty prompt the target's first token is not scored. A pair that is
            longer than the model's positions is a `ValueError`.
        batch_tokens: the most tokens of a batch, padding included; a longer pair is a batch of its own.
    """
    host = CausalLM(model)
    sequences = [torch.tensor([*prompt, *target], device=host.device) for prompt, target in pairs]
    for number, tokens in enumerate(map(len, sequences)):
        if host.positions is not None and tokens - 1 > host.positions:
            rule = f"pair {number} must fit the model's {host.positions} positions"
            raise ValueError(f"{rule}, got {tokens} tokens: shorten its prompt")
    firsts = [max(len(prompt), 1) for prompt, _ in pairs]  # each sequence's first scored token
    scores = [Score(0.0, 0)] * len(sequences)
    for batch in _batches(list(map(len, sequences)), batch_tokens):
        ids = nn.utils.rnn.pad_sequence(
            [sequences[number] for number in batch], batch_first=True
        )  # [B, T]
        mask = nn.utils.rnn.pad_sequence(
            [torch.ones_like(sequences[number]) for number in batch], batch_first=True
        )
        begin, width = min(firsts[number] for number in batch), ids.shape[1]
        if begin < width:
            # logits[:, i] predicts token begin + i
            logits = host.logits(
                ids[:, :-1], width - begin, attention_mask=mask[:, :-1], use_cache=False
            )
            for row, number in enumerate(batch):
                first, stop = firsts[number], len(sequences[number])
                losses = token_losses(
                    logits[row, first - begin : stop - begin], ids[row, first:stop]
                )
                scores[number] = Score(losses.double().sum().item(), stop - first)
    return scores


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    batch: list[int] = []
    # Longest first: the first of a batch sets its width, and a batch that is too large for a device fails early.
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
