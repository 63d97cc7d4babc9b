"""Attention by matrix products on a CPU.

In bfloat16, torch's fused kernel takes two to six times as long there. Axes: B rows, H heads, G
heads of keys and values, Q queries, K keys, D dimensions of a head.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

__all__ = ["CpuAttention"]


class CpuAttention(TorchFunctionMode):
    """Compute `scaled_dot_product_attention` by matrix products, where that is faster.

    That is on a CPU in bfloat16 where a mask is given: for a chunk after cached tokens and for
    padded rows. Without a mask the fused kernel leaves out what causal attention does not see.
    Scores and weights are rounded to bfloat16, as in eager attention. The weights [B, H, Q, K] are
    kept for the backward pass.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is scaled_dot_product_attention and _is_faster(*args, **kwargs):
            return _attend(*args, **kwargs)
        return function(*args, **kwargs)


def _is_faster(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> bool:
    fits = query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.dim() == 4
    return fits and attn_mask is not None and not dropout_p and not is_causal


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """Return attention [B, H, Q, D] of queries [B, H, Q, D] over keys and values [B, G, K, D].

    G divides H. A mask is broadcast to [B, H, Q, K]: bool, or what is added to the scores.
    """
    rows, heads, queries, size = query.shape
    groups, keys = key.shape[1:3]
    if scale is None:
        scale = size**-0.5
    # The queries of all heads that share a head of keys are the rows of one product.
    query = (query * scale).reshape(rows * groups, heads // groups * queries, size)
    scores = query @ key.reshape(rows * groups, keys, size).transpose(1, 2)
    if attn_mask.dtype == torch.bool:
        # Not -inf: a query that attends to nothing would be nan.
        least = torch.finfo(scores.dtype).min
        attn_mask = scores.new_zeros(attn_mask.shape).masked_fill_(~attn_mask, least)
    scores.view(rows, heads, queries, keys).add_(attn_mask)
    attended = scores.softmax(-1) @ value.reshape(rows * groups, keys, -1)
    return attended.view(rows, heads, queries, -1)
