"""The paths that a gradient takes through the host: all of them, or each token's own alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn

Gradient = Literal["full", "tokenwise"]


def list_attention(model: nn.Module) -> list[nn.Module]:
    """Gives the modules in which a model's tokens attend to each other: those with "Attention" in their class's name.

    Where one lies in another, as in BERT and GPT-Neo, the inner one: the outer may hold the residual connection.
    """
    named = {module for module in model.modules() if "Attention" in type(module).__name__}
    return [module for module in named if named.isdisjoint(list(module.modules())[1:])]


@contextmanager
def bypassing(attention: list[nn.Module]) -> Iterator[None]:
    """Within the context, no gradient flows from what attention says to what it attended to.

    What is left are the residual stream, the norms and the FFNs, which answer each token by itself: the loss of a
    token's prediction teaches what the slots of all layers said at that token, and not what slots had said at earlier
    ones, where attention brought it from. The forward pass is the same to the last bit; attention's backward pass,
    and all that would be kept for it, are saved. Parameters inside attention, LoRA's say, still get the gradient that
    comes to them directly.

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


def _detach_tokens(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    if args:
        return (args[0].detach(), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": kwargs["hidden_states"].detach()}
