"""Attention of one new token over a long context, on a CPU.

Without a mask transformers leaves heads that share keys to torch, which repeats the keys for each
head. With a mask it computes such heads as rows of one product.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

__all__ = ["masked_attention"]

NAME = "sdpa_masked"


@contextmanager
def masked_attention(model: PreTrainedModel) -> Iterator[None]:
    """Give each new token of a model on a CPU a mask.

    In bfloat16 a token after 16,384 others takes 0.3 s in place of 1.2 s (Qwen of 0.5B, one core).
    A model whose attention is not `sdpa`, or that is on a GPU, is left as it is.
    """
    before = model.config._attn_implementation
    if before != "sdpa" or model.device.type != "cpu":
        yield
        return
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention [B, Q, H, D] of queries [B, H, Q, D] over keys and values [B, G, K, D]."""
    if attention_mask is None and query.shape[2] == 1:
        attention_mask = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
