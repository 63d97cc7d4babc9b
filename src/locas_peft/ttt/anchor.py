"""The anchor limits how learning one text changes the model's output on other texts.

Some optimizer steps also minimise the KL divergence from the base to the model with its adapter, on n texts of L
tokens that the base generated. This is our addition; the paper's only bound is the norm clip of the slots.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..asking import continue_rows, draw
from ..checks import check_whole
from ..model import CausalLM, compute_once, divergences
from ..text import digest_ids
from ..tuner import adapters_disabled, evaluating

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Anchor:
    """The texts on which an adapter in training stays close to the base, and the weight of that pull.

    Args:
        texts: LongTensor [n, L], L >= 2, or an `OwnText`; each pull uses one, in turns.
        weight: of KL(base || with the adapter), the mean over L - 1 tokens in nats, beside the chunk's loss.
        every: every n-th step pulls, with n times the weight: two forward passes and a backward one over L - 1 tokens.
    """

    texts: Tensor | OwnText
    weight: float = 1.0
    every: int = 4

    def __post_init__(self) -> None:
        texts = self.texts
        if not isinstance(texts, OwnText):
            if not isinstance(texts, Tensor) or texts.dtype != torch.int64:
                got = texts.dtype if isinstance(texts, Tensor) else type(texts).__name__
                what = f"anchor texts must be a LongTensor of shape [n, L], got {got}"
                raise TypeError(f"{what}: make it with write_own_text(model)")
            if texts.ndim != 2 or not len(texts) or texts.shape[1] < 2:
                what = f"anchor texts must have the shape [n, L] with n >= 1 and L >= 2, got {list(texts.shape)}"
                raise ValueError(f"{what}: make them with write_own_text(model)")
        if not 0 < self.weight < math.inf:
            raise ValueError(
                f"anchor weight must be a number above 0, got {self.weight}: for none, give no anchor"
            )
        check_whole("anchor every", self.every, 1)

    def text_of(self, step: int) -> Tensor | None:
        """Return the text [1, L] of optimizer step `step` (from 0), or None for a step without a pull."""
        pull, remainder = divmod(step, self.every)
        return self.texts[pull % len(self.texts)][None] if remainder == self.every - 1 else None

    def losses(
        self, host: CausalLM, text: Tensor, adapters: Sequence[str] | None = None, rows: int = 1
    ) -> Tensor:
        """Return the loss [B] of a pull for each row of a batch: the weighted divergence from the base, in nats."""
        ids, count = text.to(host.device)[:, :-1], text.shape[1] - 1
        with torch.no_grad(), adapters_disabled(host.model):
            base = host.logits(ids, count, use_cache=False)[0]
        logits = host.logits(ids.expand(rows, -1), count, adapters, use_cache=False)
        return (
            self.weight
            * self.every
            * torch.stack([divergences(each, base).mean() for each in logits])
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What a resumed reading must share, as plain values."""
        texts = (
            self.texts.settings
            if isinstance(self.texts, OwnText)
            else {"sha256": digest_ids(self.texts)}
        )
        return {"weight": self.weight, "every": self.every, "texts": texts}

    def check(self, host: CausalLM) -> None:
        """Raise a `ValueError` where the texts do not fit a model's vocabulary or positions."""
        if not isinstance(self.texts, OwnText):
            host.check_tokens(self.texts, "anchor texts", "write them with this model")
        if host.positions is not None and self.texts.shape[1] > host.positions:
            what = f"anchor texts must be within the model's {host.positions} positions"
            raise ValueError(f"{what}, got {self.texts.shape[1]} tokens: write shorter ones")


class OwnText:
    """Texts of `write_own_text`, each written at its first use, and once on a machine (see `compute_once`).

    Args:
        texts, tokens: n and L.
        seed: of the first batch; each batch has the next one.
        batch_size: texts that are written at once.

    `shape` is (n, L), and `written` a LongTensor [k, L] of the texts so far.
    """

    def __init__(
        self,
        model: nn.Module,
        texts: int = 32,
        tokens: int = 128,
        seed: int = 0,
        batch_size: int = 4,
    ):
        for name, value, least in (
            ("texts", texts, 1),
            ("tokens", tokens, 2),
            ("batch_size", batch_size, 1),
        ):
            check_whole(name, value, least)
        _start_of_text(host := CausalLM(model))
        self._model, self.shape = model, torch.Size((texts, tokens))
        self.settings = {"texts": texts, "tokens": tokens, "seed": seed, "batch_size": batch_size}
        self.written = torch.empty(0, tokens, dtype=torch.long, device=host.device)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> Tensor:
        """Return a text, LongTensor [L]; write it, and those before it, where they are missing."""
        count, length, seed, most = self.settings.values()
        while (begun := len(self.written)) <= index:
            shape = min(most, count - begun), length, seed + begun // most
            batch = compute_once(
                self._model, _write_batch, *shape, logging.DEBUG if begun else logging.INFO
            )
            self.written = torch.cat([self.written, batch.to(self.written.device)])
        return self.written[index]


def _write_batch(model: nn.Module, texts: int, tokens: int, seed: int, level: int) -> Tensor:
    _logger.log(
        level, "the base writes texts for the anchor, %d of %d tokens at a time", texts, tokens
    )
    return write_own_text(model, texts, tokens, seed)


@torch.no_grad()
def write_own_text(model: nn.Module, texts: int = 32, tokens: int = 256, seed: int = 0) -> Tensor:
    """Sample texts, LongTensor [n, L], from the base's own distribution, from its start-of-text token on.

    The temperature is 1. Adapters are disabled during the call; torch's random state is not used. A model whose config
    names no token that a text could start with is a `ValueError`.

    Args:
        model: a causal language model, plain or with adapters.
        texts: n; all are sampled in one batch, by `seed`.
        tokens: L, the first token included; within the model's positions.
    """
    check_whole("texts", texts, 1)
    check_whole("tokens", tokens, 2)
    base = CausalLM(model).base
    host = CausalLM(base, cpu_attention=False)
    first, choose = _start_of_text(host), draw(1.0, torch.Generator(host.device).manual_seed(seed))
    with evaluating(base), adapters_disabled(model):
        # No stop token: after the end of one sample, another one follows, as in training text.
        written = continue_rows(host, [[first]] * texts, tokens - 1, pad=first, choose=choose)
    return torch.tensor([[first, *ids] for ids in written], device=host.device)


def _start_of_text(host: CausalLM) -> int:
    """Return the token that begins a text: the beginning's or, where there is none, the end's, a separator."""
    for config in (host.base.config.get_text_config(), host.base.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            token = getattr(config, name, None)
            token = token[0] if isinstance(token, (list, tuple)) and token else token
            if (
                isinstance(token, int) and 0 <= token < host.vocabulary
            ):  # the config may be of a larger vocabulary
                return token
    what = (
        "model's config must name a bos_token_id, eos_token_id or pad_token_id to write text from"
    )
    raise ValueError(
        f"{what}, got none in its vocabulary: set one, or give Anchor texts of your own"
    )
