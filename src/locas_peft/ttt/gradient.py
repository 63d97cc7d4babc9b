"""The paths that a gradient takes through the host: all of them, or each token's own alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..tuner.passes import evaluating
from .host import Host

Gradient = Literal["full", "tokenwise"]
GRADIENTS: tuple[str, ...] = get_args(Gradient)


def list_attention(model: nn.Module) -> list[nn.Module]:
    """Gives the modules in which a model's tokens attend to each other: those with "Attention" in their class's name.

    Where one lies in another, as in BERT and GPT-Neo, the inner one: the outer may hold the residual connection.
    """
    named = [module for module in model.modules() if "Attention" in type(module).__name__]
    return [module for module in named if set(named).isdisjoint(list(module.modules())[1:])]


@contextmanager
def bypassing(attention: list[nn.Module]) -> Iterator[None]:
    """Within the context, no gradient flows from what attention says to what it attended to.

    What is left are the residual stream, the norms and the FFNs, which answer each token by itself: the loss of a
    token's prediction teaches what the slots of all layers said at that token, and not what slots had said at earlier
    ones, where attention brought it from. The forward pass computes the same; attention's backward pass, and all that
    would be kept for it, are saved. Parameters inside attention, LoRA's say, still get the gradient that comes to them
    directly.

    Args:
        attention: see `list_attention`. Of each the first argument is detached, the hidden states of the tokens; what
            else it is given, such as the residual stream in BLOOM, passes.
    """
    handles = [module.register_forward_pre_hook(_detach_tokens, with_kwargs=True) for module in attention]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_tokenwise(host: Host, attention: list[nn.Module]) -> bool:
    """Tries with three tokens whether a prediction's gradient, bypassing attention, reaches its own token alone.

    It does not where tokens meet otherwise (convolutions, state spaces, linear attention), where attention takes
    queries and keys as separate arguments, or where it holds the residual stream, which must not be cut.
    """
    # Any tokens but the first ids, which may stand for padding.
    ids = torch.tensor([[host.vocabulary * part // 4 for part in (1, 2, 3)]], device=host.device)
    leaves: list[Tensor] = []

    def start_here(module: nn.Module, args: tuple, embedded: Tensor) -> Tensor:
        leaves.append(embedded.detach().requires_grad_())
        return leaves[-1].clone()  # some models scale it in place

    handle = host.model.get_input_embeddings().register_forward_hook(start_here)
    try:
        with evaluating(host.model), torch.enable_grad(), bypassing(attention):
            logits = host.logits(ids, 1, use_cache=False)
            (reached,) = torch.autograd.grad(logits[0, -1].float().logsumexp(dim=-1), leaves[:1], allow_unused=True)
    finally:
        handle.remove()
    return reached is not None and bool(reached[0, -1].any()) and not reached[0, :-1].any()


def _detach_tokens(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    if args:
        return (args[0].detach(), *args[1:]), kwargs
    tokens = kwargs.get("hidden_states")
    return args, kwargs if tokens is None else {**kwargs, "hidden_states": tokens.detach()}
