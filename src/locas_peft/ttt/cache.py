"""The context of a chunk as keys and values that slide with the text.

Axes: B rows of a batch, n tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import DynamicCache

from .host import Host


class SlidingCache:
    """The keys and values of the last `keep` tokens that were fed, detached, with room for what comes next.

    All rows of a batch have kept the same number of tokens; their positions may differ.

    Attributes:
        layers: (keys, values), each [B, heads, n, head size], n <= keep, one pair a layer; None: nothing is kept.
        positions: for each row the position of the next token to be fed; None: the row's context is not known and has
            to be fed.
    """

    def __init__(
        self, host: Host, keep: int, rows: int = 1, only: Callable[[list[int]], AbstractContextManager] | None = None
    ):
        """Makes an empty cache.

        Args:
            only: a context within which the model reads a batch of these rows alone; for `rows` > 1.
        """
        self._host, self._keep, self._only = host, keep, only or (lambda rows: nullcontext())
        self.layers: list[tuple[Tensor, Tensor]] | None = None
        self.positions: list[int | None] = [None] * rows
        self._fed: tuple[DynamicCache, list[int]] | None = None

    def forget(self, rows: list[int] | None = None) -> None:
        """Makes the context of some rows, or of all, one that has to be fed."""
        self._fed = None
        self.positions = [None if rows is None or row in rows else p for row, p in enumerate(self.positions)]
        if all(position is None for position in self.positions):
            self.layers = None

    def narrow(self, rows: list[int]) -> None:
        """Keeps these rows alone."""
        self._fed, self.positions = None, [self.positions[row] for row in rows]
        if self.layers:
            self.layers = [(keys[rows], values[rows]) for keys, values in self.layers]

    def forward(self, ids: Tensor, begin: int, ends: list[int], count: int) -> Tensor:
        """Feeds ids[:, begin:max(ends)] after the kept context, and gives the logits [B, count, V] of the last tokens.

        The same tokens may be fed again; `advance` makes those that were fed last a part of the context.

        Args:
            ids: LongTensor [B, T], the documents, padded on the right.
            ends: for each row where its own tokens end.
        """
        limit = self._host.positions
        stale = [
            row
            for row, (position, end) in enumerate(zip(self.positions, ends, strict=True))
            if position is None or (limit is not None and position + end - begin > limit)
        ]
        if stale:
            self._feed_context(ids[:, max(0, begin - self._keep) : begin], stale)
        return self._feed(ids[:, begin : max(ends)], count, self.layers, self.positions)

    def advance(self) -> None:
        """Makes the tokens that were fed last a part of the context, and drops what is older than `keep`."""
        if self._fed is not None:
            cache, self.positions = self._fed
            self.layers = self._tails(cache)
            self._fed = None
            if not self._keep:
                self.positions = [0] * len(self.positions)

    def tensors(self) -> dict[str, Tensor]:
        """Gives the keys and values, named "layer/keys" and "layer/values"."""
        return {
            f"{number}/{name}": entries
            for number, pair in enumerate(self.layers or [])
            for name, entries in zip(("keys", "values"), pair, strict=True)
        }

    def restore(self, tensors: dict[str, Tensor], layers: int | None, position: int | None) -> None:
        """Takes up what `tensors` gave, for one row.

        Args:
            layers: how many there were; None for a cache that kept nothing.
            position: of the next token.

        Raises:
            KeyError, TypeError: they contradict each other.
        """
        self.forget()
        if layers is None:
            return
        device = self._host.device
        pairs = [tuple(tensors[f"{number}/{name}"] for name in ("keys", "values")) for number in range(layers)]
        if any(
            entry.ndim != 4 or entry.shape[:3] != keys.shape[:3] for keys, values in pairs for entry in (keys, values)
        ):
            raise TypeError("keys and values of the cache do not belong together")
        self.layers = [(keys.to(device), values.to(device)) for keys, values in pairs]
        self.positions = [position]

    def _feed_context(self, ids: Tensor, rows: list[int]) -> None:
        layers = []
        if ids.shape[1]:
            with torch.no_grad(), self._only(rows):
                self._feed(ids[rows], 1, [], [0] * len(rows))
            layers = self._tails(self._fed[0])
            self._fed = None
        if len(rows) == len(self.positions):
            self.layers = layers
        for (keys, values), (fed_keys, fed_values) in zip(self.layers, layers, strict=True):
            if keys is not fed_keys:
                keys[rows], values[rows] = fed_keys, fed_values
        self.positions = [ids.shape[1] if row in rows else p for row, p in enumerate(self.positions)]

    def _feed(self, ids: Tensor, count: int, layers: list[tuple[Tensor, Tensor]], positions: list[int]) -> Tensor:
        cache = DynamicCache(layers)  # without a config: plain layers, that keep what they are given
        length, limit = ids.shape[1], self._host.positions
        starts = torch.tensor(positions, device=ids.device).unsqueeze(1)
        places = torch.arange(length, device=ids.device) + starts
        if limit is not None and max(positions) + length > limit:
            places = places.clamp_(max=limit - 1)  # padding alone reaches so far
        logits = self._host.logits(ids, count, past_key_values=cache, position_ids=places, use_cache=True)
        self._fed = cache, [position + length for position in positions]
        return logits

    def _tails(self, cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
        # Clones: a view would keep the whole former storage, and its graph, alive.
        if not self._keep:
            return []
        return [
            tuple(entries[..., -self._keep :, :].detach().clone() for entries in (layer.keys, layer.values))
            for layer in cache.layers
        ]
