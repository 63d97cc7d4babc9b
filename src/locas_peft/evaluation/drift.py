"""Drift: the perplexity of a text with frozen weights, and the KL divergence of a model from its base.

The base's own answers to everyday questions are a text on which a memory of something else should change nothing.

Axes: N tokens scored, V vocabulary.
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
from ..ttt.chunks import cut, perplexity

__all__ = ["OWN_ANSWERS", "Piece", "cut_text", "measure_drift", "write_own_answers"]

OWN_ANSWERS = (
    "own answers"  # beside the names of the unread texts in the figures of the forgetting protocol
)
QUESTIONS = (Path(__file__).parent / "everyday.txt").read_text(encoding="utf-8").splitlines()

Piece = tuple[Tensor, int]  # token ids, LongTensor [T], and how many of the last ones are scored


def cut_text(input_ids: Tensor, window: int, stride: int) -> list[Piece]:
    """Cut a text, LongTensor [T], T >= 2, into the pieces that `measure_drift` scores."""
    spans = cut(len(input_ids), window, stride)
    return [(input_ids[span.begin : span.stop], span.scored) for span in spans if span.scored]


def write_own_answers(base: nn.Module, tokenizer, max_new_tokens: int = 48) -> list[Piece]:
    """Let a base answer `QUESTIONS` greedily; return question and answer of each answer that is not empty.

    The answer alone is scored. The tokenizer's chat template is used where it has one.
    """
    prompts = [encode_prompt(tokenizer, question) for question in QUESTIONS]
    pieces = []
    for batch, texts in answer_in_batches(base, tokenizer, prompts, max_new_tokens=max_new_tokens):
        for number, text in zip(batch, texts, strict=True):
            if reply := tokenizer(text, add_special_tokens=False)["input_ids"]:
                pieces.append((torch.tensor([*prompts[number], *reply]), len(reply)))
    return pieces


@torch.inference_mode()
def measure_drift(
    model: nn.Module, pieces: Iterable[Piece], on_chunk: Callable | None = None
) -> dict[str, Any]:
    """Score pieces of text with frozen weights, one by one, under a model and under its reference.

    The model, in evaluation mode, is not changed. The reference of a PEFT model is its base. `on_chunk` is called with
    the number of tokens of each piece that were scored.

    Returns:
        `perplexity` and `reference_perplexity`; `kl_per_token`, the mean KL of the next-token distributions from the
        reference's to the model's; `reference_sha256` over the bytes of all the reference's logits, by which two
        references are equal to the last bit; the number of `tokens`, `nll_nats`, `reference_nll_nats` and `kl_nats`
        in all; and of each piece `chunk_tokens`, `chunk_nll_nats` of the model and `chunk_kl_nats`, a token.
    """
    host, hashed = CausalLM(model), hashlib.sha256()
    counts, sums = [], []
    for ids, scored in pieces:
        ids = ids.to(host.device)
        targets, read = ids[-scored:], ids[None, :-1]
        logits = host.logits(read, scored, use_cache=False)[0]  # [N, V]
        with model.disable_adapter() if isinstance(model, PeftModel) else nullcontext():
            others = host.logits(read, scored, use_cache=False)[0]
        hashed.update(others.contiguous().view(torch.uint8).cpu().numpy())
        values = (
            token_losses(logits, targets),
            token_losses(others, targets),
            divergences(logits, others),
        )
        counts.append(scored)
        sums.append([each.double().sum().item() for each in values])
        if on_chunk is not None:
            on_chunk(scored)
    tokens = sum(counts)
    nll, reference_nll, kl = (math.fsum(column) for column in zip(*sums, strict=True))
    return {
        **{"tokens": tokens, "nll_nats": nll, "reference_nll_nats": reference_nll, "kl_nats": kl},
        "reference_sha256": hashed.hexdigest(),
        "chunk_kl_nats": [
            summed / count for (_, _, summed), count in zip(sums, counts, strict=True)
        ],
        "chunk_nll_nats": [summed for summed, _, _ in sums],
        "chunk_tokens": counts,
        "perplexity": perplexity(nll, tokens),
        "reference_perplexity": perplexity(reference_nll, tokens),
        "kl_per_token": kl / tokens,
    }
