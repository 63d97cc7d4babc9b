"""The context of a chunk as keys and values that slide with the text.

The cache keeps the first tokens of the context beside the last ones: attention sinks, as in
StreamingLLM (arXiv:2309.17453). The distance between the two grows with the text, and scores become
worse with it. The context is therefore fed again, without gradients, when the positions reach
`restart`. Axes: n tokens, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ..model.causal_lm import CausalLM, find_cache

__all__ = ["SINKS", "SlidingCache"]

SINKS = 4
"""The first tokens of the context that are kept: trained attention rests on them."""

Layers = list[tuple[Tensor, Tensor]]
"""The keys and values of each layer, both [1, heads, n, head size]."""


class SlidingCache:
    """The keys and values of the first `SINKS` and the last `keep` tokens that were fed, detached.

    With `keep` 0 there is no context at all, and no sinks. At the position `restart`, or the
    model's last one, the context is fed again, from position 0.

    Args:
        host: the model. Where it is compiled, chunks and contexts are padded to one shape.
        keep: how many of the last tokens are kept.
        restart: a position.
        chunk: the most tokens of a chunk.
    """

    def __init__(
        self, host: CausalLM, keep: int, restart: int | None = None, chunk: int | None = None
    ):
        self._host = host
        self._keep = keep
        self._chunk = chunk
        limits = [limit for limit in (restart, host.positions) if limit is not None]
        self._limit = min(limits, default=None)
        self._layers: Layers = []
        # The position of the next token to be fed; None where the context has to be fed first.
        self._position: int | None = None
        self._fed: tuple[Layers, int] | None = None

    def forward(self, ids: Tensor, count: int) -> Tensor:
        """Feed the last `count` tokens of `ids` [1, n]; return their logits [1, count, V].

        The tokens before them are the context, which is fed where it is not kept. The same tokens
        may be fed again.
        """
        if self._must_feed_context(count):
            context = ids[:, :-count]
            self._layers = []
            self._position = 0
            if context.shape[1]:
                with torch.no_grad():
                    self._feed(context, 1)
                self.advance()
        return self._feed(ids[:, -count:], count)

    def advance(self) -> None:
        """Add the tokens that were fed last to the context; drop those that are not kept."""
        if self._fed is None:
            return
        layers, position = self._fed
        self._fed = None
        if not self._keep:
            self._layers = []
            self._position = 0
            return
        self._layers = [(self._trim(keys), self._trim(values)) for keys, values in layers]
        self._position = position

    def state_dict(self) -> dict[str, Any]:
        return {"layers": self._layers, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Keys and values that do not belong together are a `ValueError`.
        """
        device = self._host.device
        layers = [(keys.to(device), values.to(device)) for keys, values in state["layers"]]
        for keys, values in layers:
            if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
                raise ValueError("keys and values of the cache do not belong together")
        self._layers = layers
        self._position = state["position"]
        self._fed = None

    def _must_feed_context(self, count: int) -> bool:
        if self._position is None:
            return True
        return self._limit is not None and self._position + count > self._limit

    def _feed(self, ids: Tensor, count: int) -> Tensor:
        length = self._chunk if self._host.is_compiled else None
        if length is not None and count == ids.shape[1] <= length:
            return self._feed_padded(ids, length)
        # Without a config its layers are plain ones, which keep all that they are given.
        cache = DynamicCache(self._layers)
        stop = self._position + ids.shape[1]
        positions = torch.arange(self._position, stop, device=ids.device).expand(len(ids), -1)
        logits = self._host.logits(
            ids, count, past_key_values=cache, position_ids=positions, use_cache=True
        )
        self._fed = ([(layer.keys, layer.values) for layer in cache.layers], stop)
        return logits

    def _feed_padded(self, ids: Tensor, length: int) -> Tensor:
        """Feed a chunk [1, n] in the shape of all chunks, [1, length]; return its logits [1, n, V].

        Padding is on the left of the context, and on the right of the chunk.
        """
        count = ids.shape[1]
        stop = self._position + count
        missing = length - count
        kept = self._layers[0][0].shape[-2] if self._layers else 0
        room = SINKS + self._keep if self._keep else 0
        padding = room - kept
        padded = [_pad(layer, padding) for layer in self._layers] or self._make_empty(room)
        cache = DynamicCache(padded)
        positions = torch.arange(self._position, stop + missing, device=ids.device)
        logits = self._host.logits(
            nn.functional.pad(ids, (0, missing)),
            length,
            past_key_values=cache,
            # Within the model's positions, also where padding is beyond them.
            position_ids=positions.clamp(max=stop - 1)[None],
            attention_mask=self._make_mask(room, padding, length),
            use_cache=True,
        )
        fed = slice(padding, room + count)
        # Copies: the next replay of a captured graph writes over what this one returned.
        layers = [
            (layer.keys[..., fed, :].detach().clone(), layer.values[..., fed, :].detach().clone())
            for layer in cache.layers
        ]
        self._fed = (layers, stop)
        return logits[:, :count] if missing else logits

    def _make_empty(self, room: int) -> Layers:
        """Return keys and values of zeros for a context that is empty.

        They have the shapes of those of one token: what a layer keeps differs between families.
        """
        if not room:
            return []
        token = torch.zeros(1, 1, dtype=torch.long, device=self._host.device)
        with torch.no_grad():
            outputs = CausalLM(self._host.model).outputs(token, 1, use_cache=True)
        layers = []
        for layer in find_cache(outputs).layers:
            keys, values = (
                entries.new_zeros(*entries.shape[:2], room, entries.shape[3])
                for entries in (layer.keys, layer.values)
            )
            layers.append((keys, values))
        return layers

    def _make_mask(self, room: int, padding: int, length: int) -> Tensor:
        """Return what is added to a chunk's attention scores, [1, 1, length, room + length].

        It is 0 where a token sees a key: of the context behind its padding, and of the chunk up to
        the token itself.
        """
        weight = self._host.model.get_input_embeddings().weight
        keys = torch.arange(room + length, device=weight.device)
        last = room + torch.arange(length, device=weight.device)
        is_hidden = (keys < padding) | (keys > last[:, None])
        # Not -inf, so that no family's softmax has a row of nothing else.
        least = torch.finfo(weight.dtype).min
        mask = weight.new_zeros(is_hidden.shape).masked_fill_(is_hidden, least)
        return mask[None, None]

    def _trim(self, entries: Tensor) -> Tensor:
        # Copies: a view would keep the whole former storage, and its graph, alive.
        entries = entries.detach()
        if entries.shape[-2] <= SINKS + self._keep:
            return entries.clone()
        return torch.cat([entries[..., :SINKS, :], entries[..., -self._keep :, :]], dim=-2)


def _pad(layer: tuple[Tensor, Tensor], padding: int) -> tuple[Tensor, Tensor]:
    """Return keys and values with zeros before them, [1, heads, padding + n, head size]."""
    keys, values = layer
    return nn.functional.pad(keys, (0, 0, padding, 0)), nn.functional.pad(
        values, (0, 0, padding, 0)
    )
