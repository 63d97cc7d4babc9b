"""Tokenwise gradients: a backward pass that leaves out the paths through attention."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..model.causal_lm import CausalLM
from ..tuner import evaluating

__all__ = ["bypassing", "is_tokenwise", "list_attention"]


def list_attention(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules of a model: those with "Attention" in the name of their class.

    Where one lies in another, as in BERT and GPT-Neo, the inner one: the outer may contain the residual connection.
    """
    named = [module for module in model.modules() if "Attention" in type(module).__name__]
    return [module for module in named if set(named).isdisjoint(list(module.modules())[1:])]


@contextmanager
def bypassing(attention: list[nn.Module]) -> Iterator[None]:
    """Within the context, no gradient flows from the output of attention to the tokens that were attended to.

    The loss of a prediction then trains the slots of all layers at its own token, and not the slots at earlier tokens.
    The forward pass is the same. Parameters inside attention, such as LoRA's, still receive the gradient that reaches
    them directly. The first argument of each module, the hidden states, is detached; others, such as BLOOM's residual
    stream, are not.
    """
    with ExitStack() as hooks:
        for module in attention:
            hooks.enter_context(module.register_forward_pre_hook(_detach_tokens, with_kwargs=True))
        yield


def _detach_tokens(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    if args:
        return (args[0].detach(), *args[1:]), kwargs
    tokens = kwargs.get("hidden_states")
    return args, kwargs if tokens is None else {**kwargs, "hidden_states": tokens.detach()}


def is_tokenwise(host: CausalLM, attention: list[nn.Module]) -> bool:
    """Test with three tokens whether the gradient of a prediction, bypassing attention, reaches its own token only.

    It does not where tokens interact outside attention (convolutions, state spaces, linear attention), where attention
    takes queries and keys as separate arguments, or where it contains the residual stream.
    """
    # Not the first ids, which may stand for padding.
    ids = torch.tensor([[host.vocabulary * part // 4 for part in (1, 2, 3)]], device=host.device)
    leaves: list[Tensor] = []

    def replace_by_leaf(module: nn.Module, args: tuple, embedded: Tensor) -> Tensor:
        leaves.append(embedded.detach().requires_grad_())
        return leaves[-1].clone()  # some models scale it in place

    replacing = host.model.get_input_embeddings().register_forward_hook(replace_by_leaf)
    with replacing, evaluating(host.model), torch.enable_grad(), bypassing(attention):
        logits = host.logits(ids, 1, use_cache=False)
        (gradient,) = torch.autograd.grad(logits[0, -1].float().logsumexp(dim=-1), leaves[:1], allow_unused=True)
    return gradient is not None and bool(gradient[0, -1].any()) and not gradient[0, :-1].any()
