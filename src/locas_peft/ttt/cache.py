"""The context of a chunk as keys and values that slide with the text.

The cache keeps the first tokens of the context beside the last ones: attention sinks, as in StreamingLLM
(arXiv:2309.17453). The distance between the two grows with the text, and scores become worse with it. The context is
therefore fed again, without gradients, when the positions reach `restart`. Axes: B rows, n tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..model.causal_lm import CausalLM


class SlidingCache:
    """The keys and values of the first `sinks` and the last `keep` tokens that were fed, detached.

    With `keep` 0 there is no context at all, and no sinks. At the position `restart`, or the model's last one, the
    context is fed again, from position 0.
    """

    def __init__(self, host: CausalLM, keep: int, sinks: int = 0, restart: int | None = None):
        self._host, self._keep, self._sinks = host, keep, sinks
        limits = [limit for limit in (restart, host.positions) if limit is not None]
        self._limit = min(limits) if limits else None
        self._layers: list[
            tuple[Tensor, Tensor]
        ] = []  # keys and values of each, [B, heads, n, head size]
        self._position: int | None = (
            None  # of the next token to be fed; None where the context has to be fed first
        )
        self._fed: tuple[list[tuple[Tensor, Tensor]], int] | None = None

    def forward(self, ids: Tensor, count: int, adapters: Sequence[str] | None = None) -> Tensor:
        """Feed the last `count` tokens of `ids` [B, n] after the kept context, and return their logits [B, count, V].

        The tokens before them are the context, which is fed where it is not kept. The same tokens may be fed again.
        """
        if self._position is None or (
            self._limit is not None and self._position + count > self._limit
        ):
            context = ids[:, :-count]
            self._layers, self._position = [], 0
            if context.shape[1]:
                with torch.no_grad():
                    self._feed(context, 1, adapters)
                self.advance()
        return self._feed(ids[:, -count:], count, adapters)

    def _feed(self, ids: Tensor, count: int, adapters: Sequence[str] | None) -> Tensor:
        cache = DynamicCache(
            self._layers
        )  # without a config: plain layers, which keep all that they are given
        stop = self._position + ids.shape[1]
        positions = torch.arange(self._position, stop, device=ids.device).expand(len(ids), -1)
        logits = self._host.logits(
            ids, count, adapters, past_key_values=cache, position_ids=positions, use_cache=True
        )
        self._fed = [(layer.keys, layer.values) for layer in cache.layers], stop
        return logits

    def advance(self) -> None:
        """Add the tokens that were fed last to the context, and drop those that are no longer kept."""
        if self._fed is None:
            return
        (layers, position), self._fed = self._fed, None
        self._position = position if self._keep else 0
        self._layers = [
            tuple(self._trim(entries.detach()) for entries in pair) for pair in layers if self._keep
        ]

    def _trim(self, entries: Tensor) -> Tensor:
        # Copies: a view would keep the whole former storage, and its graph, alive.
        if entries.shape[-2] <= self._sinks + self._keep:
            return entries.clone()
        return torch.cat([entries[..., : self._sinks, :], entries[..., -self._keep :, :]], dim=-2)

    def select(self, rows: list[int]) -> SlidingCache:
        """Return the cache of some rows."""
        selected = copy.copy(self)
        selected._layers = [(keys[rows], values[rows]) for keys, values in self._layers]
        if self._fed is not None:
            layers, position = self._fed
            selected._fed = [(keys[rows], values[rows]) for keys, values in layers], position
        return selected

    def state_dict(self) -> dict[str, Any]:
        return {"layers": self._layers, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; raise a `ValueError` where keys and values do not belong together."""
        layers = [
            tuple(entries.to(self._host.device) for entries in pair) for pair in state["layers"]
        ]
        if any(
            entries.ndim != 4 or entries.shape[:3] != pair[0].shape[:3]
            for pair in layers
            for entries in pair
        ):
            raise ValueError("keys and values of the cache do not belong together")
        self._layers, self._position, self._fed = layers, state["position"], None
