"""Checks of what a caller asks of a reading: each error in one line that names field, rule, value and remedy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .gradient import GRADIENTS, is_tokenwise, list_attention
from .host import Host
from .losses import WEIGHTINGS


def to_whole(name: str, value: int, least: int) -> int:
    """Gives `value` back if it is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}: give a whole number")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}: raise it")
    return value


def check_lengths(host: Host, window: int, stride: int) -> None:
    """Checks window and stride against each other and against the model's positions."""
    if stride > window:
        raise ValueError(
            f"stride must be at most window, got stride {stride} with window {window}: lower stride or raise window"
        )
    limit = host.positions
    if limit is not None and window > limit:
        raise ValueError(
            f"window must be within the model's {limit} positions, got {window}: lower window, and stride with it"
        )


def check_context(host: Host, context: str) -> None:
    """Checks the context's name, and that the model can have a sliding cache where one is asked for."""
    if context not in ("recompute", "cache"):
        raise ValueError(f"context must be 'recompute' or 'cache', got {context!r}: choose one of the two")
    if context == "cache":
        host.check_cache()


def check_gradient(host: Host, gradient: str) -> None:
    """Checks the gradient's name, and that the model's tokens meet in attention alone where that is left out."""
    if gradient not in GRADIENTS:
        raise ValueError(f"gradient must be 'full' or 'tokenwise', got {gradient!r}: choose one of the two")
    if gradient == "tokenwise" and not is_tokenwise(host, list_attention(host.model)):
        raise ValueError(
            f"gradient must be 'full' for {host.kind}, got 'tokenwise': its tokens meet otherwise than in "
            "attention that could be left out"
        )


def check_learning(
    learning_rate: float | None, weight_decay: float, max_grad_norm: float | None, token_weighting: str
) -> None:
    """Checks the numbers of an optimizer step; a learning rate may be None."""
    if learning_rate is not None and not 0 < learning_rate < math.inf:
        raise ValueError(
            f"learning_rate must be a number above 0, got {learning_rate}: give one, 1e-3 say; "
            "to read without learning, give the model without its adapter"
        )
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be 0 or a number above, got {weight_decay}: give 0 for none")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be above 0, got {max_grad_norm}: give None for no clipping")
    if token_weighting not in WEIGHTINGS:
        raise ValueError(
            f"token_weighting must be one of {', '.join(WEIGHTINGS)}, got {token_weighting!r}: choose one of them"
        )


def to_document(host: Host, input_ids: Tensor, name: str = "input_ids") -> Tensor:
    """Gives a document as LongTensor [T].

    Args:
        input_ids: integers [T] or [1, T], T >= 2, below the model's vocabulary.
        name: what errors call it.
    """
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"{name} must be a LongTensor of shape [T] or [1, T], got {type(input_ids).__name__}: "
            "make one with torch.tensor"
        )
    if input_ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
        raise TypeError(f"{name} must be integers, got {input_ids.dtype}: give token ids as a LongTensor")
    if not (input_ids.ndim == 1 or (input_ids.ndim == 2 and input_ids.shape[0] == 1)):
        raise ValueError(
            f"{name} must have the shape [T] or [1, T], got {list(input_ids.shape)}: give one document at a time"
        )
    ids = input_ids.detach().reshape(-1).long()
    if len(ids) < 2:
        raise ValueError(f"{name} must hold at least 2 tokens, got {len(ids)}: give a longer text")
    low, high = ids.min().item(), ids.max().item()
    if low < 0 or high >= host.vocabulary:
        raise ValueError(
            f"{name} must lie in [0, {host.vocabulary}), the model's vocabulary, got {low if low < 0 else high}: "
            "use the model's own tokenizer"
        )
    return ids
