"""The anchor limits how learning one text changes the model's output on other texts.

With an anchor, some optimizer steps also minimise the KL divergence from the base to the model with its adapter, on
text that the base generated: it is similar to what the base was trained on and needs no data. The anchor is our
addition (`benchmarks/README.md` has its measurements); the paper's only bound is the norm clip of the slots.

Axes: n texts, L tokens of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import GenerationConfig

from ..tuner.passes import adapters_disabled, evaluating
from .host import Host
from .settings import check_whole

__all__ = ["Anchor", "write_own_text"]


@dataclass(frozen=True, eq=False)
class Anchor:
    """The texts on which any adapter that a `TestTimeTrainer` trains stays close to the base, and the weight.

    Args:
        texts: LongTensor [n, L], L >= 2; each pull uses one, in turns. `write_own_text` makes them.
        weight: of KL(base || with the adapter), the mean over L - 1 tokens in nats, beside the chunk's loss.
        every: every n-th optimizer step pulls, with n times the weight, so that the weight has the same meaning for
            all n. A pull takes two forward passes and one backward pass over L - 1 tokens.

    Raises:
        TypeError, ValueError: in one line that names the argument, its rule, its value and the remedy.

    Example:
        >>> anchor = Anchor(write_own_text(model))
        >>> trainer = TestTimeTrainer(model, window=512, stride=256, learning_rate=4e-3, anchor=anchor)
    """

    texts: Tensor
    weight: float = 1.0
    every: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.texts, Tensor) or self.texts.dtype != torch.int64:
            got = self.texts.dtype if isinstance(self.texts, Tensor) else type(self.texts).__name__
            raise TypeError(
                f"anchor texts must be a LongTensor of shape [n, L], got {got}: make it with write_own_text(model)"
            )
        if self.texts.ndim != 2 or not len(self.texts) or self.texts.shape[1] < 2:
            raise ValueError(
                f"anchor texts must have the shape [n, L] with n >= 1 and L >= 2, got {list(self.texts.shape)}: "
                "make them with write_own_text(model)"
            )
        if not 0 < self.weight < math.inf:
            raise ValueError(f"anchor weight must be a number above 0, got {self.weight}: for none, give no anchor")
        check_whole("anchor every", self.every, 1)

    def text_of(self, step: int) -> Tensor | None:
        """Return the text [1, L] of optimizer step `step` (from 0), or None for a step without a pull."""
        pull, remainder = divmod(step, self.every)
        return self.texts[pull % len(self.texts)][None] if remainder == self.every - 1 else None

    @property
    def settings(self) -> dict[str, Any]:
        """What a resumed reading must share; the texts themselves are part of its checkpoint."""
        return {"weight": self.weight, "every": self.every, "texts": list(self.texts.shape)}

    def check(self, host: Host) -> None:
        """Raise a `ValueError` where the texts do not fit a model's vocabulary or positions."""
        host.check_tokens(self.texts, "anchor texts", "write them with this model")
        length = self.texts.shape[1]
        if host.positions is not None and length > host.positions:
            raise ValueError(
                f"anchor texts must be within the model's {host.positions} positions, got {length} tokens: "
                "write shorter ones"
            )


@torch.no_grad()
def write_own_text(model: nn.Module, texts: int = 32, tokens: int = 256, seed: int = 0) -> Tensor:
    """Sample texts from the base's own distribution, at temperature 1, from its start-of-text token on.

    Adapters are disabled during the call; torch's random state is left as it was.

    Args:
        model: a causal language model with `generate`, plain or with adapters.
        texts: n; all are sampled in one batch.
        tokens: L, the first token included; within the model's positions.
        seed: of the sampling.

    Returns:
        LongTensor [n, L], on the model's device.

    Raises:
        ValueError: the model's config names no token that a text could start with.
    """
    check_whole("texts", texts, 1)
    check_whole("tokens", tokens, 2)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    first = _start_of_text(base)
    start = torch.full((texts, 1), first, dtype=torch.long, device=Host(base).device)
    # No end of text: after the end of one sample, another one follows, as in training text.
    sampling = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens - 1, pad_token_id=first
    )
    devices = [start.device] if start.device.type == "cuda" else []
    own = base.generation_config
    with evaluating(base), adapters_disabled(model), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        try:
            base.generation_config = GenerationConfig()  # `generate` takes what a call leaves open from there
            return base.generate(input_ids=start, attention_mask=torch.ones_like(start), generation_config=sampling)
        finally:
            base.generation_config = own


def _start_of_text(base: nn.Module) -> int:
    """Return the token that begins a text: the beginning's or, where there is none, the end's, a separator."""
    vocabulary = base.get_input_embeddings().weight.shape[0]
    for config in (base.config.get_text_config(), base.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            token = getattr(config, name, None)
            token = token[0] if isinstance(token, (list, tuple)) and token else token
            if isinstance(token, int) and 0 <= token < vocabulary:  # the config may be of a larger vocabulary
                return token
    raise ValueError(
        "model's config must name a bos_token_id, eos_token_id or pad_token_id to write text from, got none in its "
        "vocabulary: set one, or give Anchor texts of your own"
    )
