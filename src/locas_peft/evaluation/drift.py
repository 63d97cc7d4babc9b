"""Drift: the perplexity of a text with frozen weights, and a model's KL divergence from its base.

The base's own answers to everyday questions are a text on which a memory of something else should
change nothing.

Axes: T tokens, N tokens scored, V vocabulary.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from ..asking import answer_in_batches, encode_prompt
from ..model import CausalLM, divergences, token_losses
from ..text import encode_text
from ..ttt.chunks import cut, perplexity
from ..tuner.modules import unwrap

__all__ = ["OWN_ANSWERS", "Piece", "cut_pieces", "measure_drift", "write_own_answers"]

# Their name beside those of the unread texts in the figures of the forgetting protocol.
OWN_ANSWERS = "own answers"
QUESTIONS = (Path(__file__).parent / "everyday.txt").read_text(encoding="utf-8").splitlines()

Piece = tuple[Tensor, int]
"""Token ids, LongTensor [T], and how many of the last ones are scored."""


def cut_pieces(input_ids: Tensor, window: int, stride: int) -> list[Piece]:
    """Cut a text, LongTensor [T], T >= 2, into the pieces that `measure_drift` scores."""
    pieces = []
    for span in cut(len(input_ids), window, stride):
        if span.scored:
            pieces.append((input_ids[span.begin : span.stop], span.scored))
    return pieces


def write_own_answers(base: nn.Module, tokenizer, max_new_tokens: int = 48) -> list[Piece]:
    """Let a base answer `QUESTIONS` greedily; return each question with its answer.

    Empty answers are left out. The answer alone is scored. The tokenizer's chat template is used
    where it has one.
    """
    prompts = [encode_prompt(tokenizer, question) for question in QUESTIONS]
    pieces = []
    for batch, texts in answer_in_batches(base, tokenizer, prompts, max_new_tokens=max_new_tokens):
        for number, text in zip(batch, texts, strict=True):
            reply = encode_text(tokenizer, text)
            if reply:
                pieces.append((torch.tensor([*prompts[number], *reply]), len(reply)))
    return pieces


@torch.inference_mode()
def measure_drift(
    model: nn.Module, pieces: Iterable[Piece], on_chunk: Callable | None = None
) -> dict[str, Any]:
    """Score pieces of text with frozen weights, one by one, under a model and under its reference.

    Args:
        model: in evaluation mode; not changed. The reference of a PEFT model is its base.
        pieces: of `cut_pieces` or `write_own_answers`.
        on_chunk: called with the number of tokens of each piece that were scored.

    Returns:
        `perplexity` and `reference_perplexity`; `kl_per_token`, the mean KL of the next-token
        distributions from the reference's to the model's; `reference_sha256` over the bytes of all
        the reference's logits, by which two references are equal to the last bit; the number of
        `tokens`, `nll_nats`, `reference_nll_nats` and `kl_nats` in all; and of each piece
        `chunk_tokens`, `chunk_nll_nats` of the model and `chunk_kl_nats`, a token. Of no piece,
        the perplexities and `kl_per_token` are NaN.
    """
    host = CausalLM(model)
    plain = unwrap(model)
    digest = hashlib.sha256()
    counts = []
    nlls = []
    reference_nlls = []
    kls = []
    for ids, scored in pieces:
        ids = ids.to(host.device)
        targets = ids[-scored:]
        read = ids[None, :-1]
        # Both logits are [N, V].
        logits = host.logits(read, scored, use_cache=False)[0]
        with plain.disable_adapter() if isinstance(plain, PeftModel) else nullcontext():
            others = host.logits(read, scored, use_cache=False)[0]
        digest.update(others.contiguous().view(torch.uint8).cpu().numpy())
        counts.append(scored)
        nlls.append(_sum(token_losses(logits, targets)))
        reference_nlls.append(_sum(token_losses(others, targets)))
        kls.append(_sum(divergences(logits, others)))
        if on_chunk is not None:
            on_chunk(scored)
    tokens = sum(counts)
    nll = math.fsum(nlls)
    reference_nll = math.fsum(reference_nlls)
    kl = math.fsum(kls)
    return {
        "tokens": tokens,
        "nll_nats": nll,
        "reference_nll_nats": reference_nll,
        "kl_nats": kl,
        "reference_sha256": digest.hexdigest(),
        "chunk_kl_nats": [summed / count for summed, count in zip(kls, counts, strict=True)],
        "chunk_nll_nats": nlls,
        "chunk_tokens": counts,
        "perplexity": perplexity(nll, tokens) if tokens else math.nan,
        "reference_perplexity": perplexity(reference_nll, tokens) if tokens else math.nan,
        "kl_per_token": kl / tokens if tokens else math.nan,
    }


def _sum(values: Tensor) -> float:
    """Return the sum of values [N], accumulated in float64."""
    return values.double().sum().item()
