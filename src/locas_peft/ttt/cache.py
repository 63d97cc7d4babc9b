"""The context of a chunk as keys and values that slide with the text.

Axes: B rows of a batch, n tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from .host import Host

__all__ = ["SlidingCache"]


class SlidingCache:
    """The keys and values of the last `keep` tokens that were fed, detached.

    All rows of a batch are at the same position. The positions grow with the text; when a chunk would pass the model's
    last position, the context is fed again, without gradients, from position 0.

    Args:
        host: the model.
        keep: how many tokens are kept.
        layers: (keys, values), each [B, heads, n, head size] with n <= keep, one pair a layer.
        position: of the next token to be fed; None where the context has to be fed first.
    """

    def __init__(
        self, host: Host, keep: int, layers: Sequence[tuple[Tensor, Tensor]] = (), position: int | None = None
    ):
        self._host, self._keep = host, keep
        self._layers, self._position = list(layers), position
        self._fed: tuple[list[tuple[Tensor, Tensor]], int] | None = None

    def forward(self, ids: Tensor, count: int, adapters: Sequence[str] | None = None) -> Tensor:
        """Feed the last `count` tokens after the kept context, and return their logits [B, count, V].

        The same tokens may be fed again; `advance` adds those that were fed last to the context.

        Args:
            ids: LongTensor [B, n], the context and the tokens to be fed. The context is used where it is not kept.
            count: how many tokens are fed.
            adapters: see `Host.logits`.
        """
        limit = self._host.positions
        if self._position is None or (limit is not None and self._position + count > limit):
            context = ids[:, :-count]
            self._layers, self._position = [], 0
            if context.shape[1]:
                with torch.no_grad():
                    self._feed(context, 1, adapters)
                self.advance()
        return self._feed(ids[:, -count:], count, adapters)

    def _feed(self, ids: Tensor, count: int, adapters: Sequence[str] | None) -> Tensor:
        cache = DynamicCache(self._layers)  # without a config: plain layers, which keep all that they are given
        stop = self._position + ids.shape[1]
        positions = torch.arange(self._position, stop, device=ids.device).expand(len(ids), -1)
        logits = self._host.logits(ids, count, adapters, past_key_values=cache, position_ids=positions, use_cache=True)
        self._fed = [(layer.keys, layer.values) for layer in cache.layers], stop
        return logits

    def advance(self) -> None:
        """Add the tokens that were fed last to the context, and drop the tokens older than `keep`."""
        if self._fed is None:
            return
        layers, self._position = self._fed
        self._fed = None
        if not self._keep:
            self._layers, self._position = [], 0
            return
        # Clones: a view would keep the whole former storage, and its graph, alive.
        self._layers = [tuple(entries[..., -self._keep :, :].detach().clone() for entries in pair) for pair in layers]

    def select(self, rows: list[int]) -> SlidingCache:
        """Return the cache of some rows."""
        selected = SlidingCache(self._host, self._keep, _select(self._layers, rows), self._position)
        if self._fed is not None:
            layers, stop = self._fed
            selected._fed = _select(layers, rows), stop
        return selected

    def state_dict(self) -> dict[str, Any]:
        return {"layers": self._layers, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ValueError: keys and values do not belong together.
        """
        layers = [tuple(entries.to(self._host.device) for entries in pair) for pair in state["layers"]]
        if any(entries.ndim != 4 or entries.shape[:3] != pair[0].shape[:3] for pair in layers for entries in pair):
            raise ValueError("keys and values of the cache do not belong together")
        self._layers, self._position, self._fed = layers, state["position"], None


def _select(layers: Sequence[tuple[Tensor, Tensor]], rows: list[int]) -> list[tuple[Tensor, Tensor]]:
    return [(keys[rows], values[rows]) for keys, values in layers]
