"""An anchor holds a memory to the base wherever the text is none of its own.

The paper bounds what a memory may do by the norms of its slots alone. Reading teaches it the text; nothing tells it
to be silent on others, and what it learns of one book it says to all. An anchor does: now and then an optimizer step
also pulls the next-token distributions with the memory towards those of the base alone, on text that the base wrote
itself. Such text stands for what the base was trained on and needs no data. This is our addition; what it brings is
measured in `benchmarks/README.md`.

Axes: n texts, L tokens of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import GenerationConfig

from ..tuner.passes import evaluating
from .host import without_adapter
from .settings import to_whole


@dataclass(frozen=True, eq=False)
class Anchor:
    """What a memory is held to the base on, and how hard. It holds any adapter that a `TestTimeTrainer` trains.

    Args:
        texts: LongTensor [n, L], L >= 2, one of them a pull, in turns. `write_own_text` makes them.
        weight: of the pull beside the chunk's loss: of KL(base || with memory), the mean over L - 1 tokens in nats.
        every: one optimizer step in so many pulls, `every` times as hard, so that the weight means the same for all.
            Each pull costs two forward passes and one backward pass over L - 1 tokens.

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
            raise TypeError(
                f"anchor texts must be a LongTensor of shape [n, L], got {type(self.texts).__name__}: "
                "make it with write_own_text(model)"
            )
        if self.texts.ndim != 2 or not len(self.texts) or self.texts.shape[1] < 2:
            raise ValueError(
                f"anchor texts must have the shape [n, L] with n >= 1 and L >= 2, got {list(self.texts.shape)}: "
                "make them with write_own_text(model)"
            )
        if not 0 < self.weight < math.inf:
            raise ValueError(f"anchor weight must be a number above 0, got {self.weight}: for none, give no anchor")
        to_whole("anchor every", self.every, 1)

    def text_of(self, step: int) -> Tensor | None:
        """Gives the text [1, L] that optimizer step `step` (from 0) is held by; None for a step without a pull."""
        pull, place = divmod(step, self.every)
        return self.texts[pull % len(self.texts)][None] if place == self.every - 1 else None

    @property
    def settings(self) -> dict:
        """What a continued reading must share, as JSON can hold it; the texts themselves lie in its checkpoint."""
        return {"weight": self.weight, "every": self.every, "texts": list(self.texts.shape)}


@torch.no_grad()
def write_own_text(model: nn.Module, texts: int = 32, tokens: int = 256, seed: int = 0) -> Tensor:
    """Lets the base write: samples of its own distribution, at temperature 1, from its start of text on.

    Adapters are switched off meanwhile; torch's random state is left as it was.

    Args:
        model: a causal language model with `generate`, plain or with adapters.
        texts: n, how many; all are written at once.
        tokens: L, the length of each, its first token included; within the model's positions.
        seed: of the sampling.

    Returns:
        LongTensor [n, L], on the model's device.

    Raises:
        ValueError: the model knows no token that a text starts with.
    """
    to_whole("texts", texts, 1)
    to_whole("tokens", tokens, 2)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    first = _start_of_text(base)
    device = base.get_input_embeddings().weight.device
    start = torch.full((texts, 1), first, dtype=torch.long, device="cpu" if device.type == "meta" else device)
    # No end of text: a sample that is over goes on as the training text did, with another one.
    sampling = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens - 1, pad_token_id=first
    )
    devices = [start.device] if start.device.type == "cuda" else []
    with evaluating(base), without_adapter(model), _plainly(base), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return base.generate(input_ids=start, attention_mask=torch.ones_like(start), generation_config=sampling)


@contextmanager
def _plainly(base: nn.Module) -> Iterator[None]:
    """Within the context, `generate` knows no habits of the model: what a call leaves open it takes from there."""
    own = base.generation_config
    base.generation_config = GenerationConfig()
    try:
        yield
    finally:
        base.generation_config = own


def _start_of_text(base: nn.Module) -> int:
    """The token that begins a text: the beginning's, or where there is none, the end's, which parts two texts."""
    vocabulary = base.get_input_embeddings().weight.shape[0]
    for config in (base.config.get_text_config(), base.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            token = getattr(config, name, None)
            token = token[0] if isinstance(token, (list, tuple)) and token else token
            if isinstance(token, int) and 0 <= token < vocabulary:  # a small vocabulary with a large one's config
                return token
    raise ValueError(
        "model's config must name a bos_token_id, eos_token_id or pad_token_id to write text from, got none in its "
        "vocabulary: set one, or give Anchor texts of your own"
    )
