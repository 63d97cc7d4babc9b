"""The scores of a document's chunks: what is fed, in which context, after which start token.

Axes: T tokens of the document, n tokens that are fed, N tokens that are scored, V vocabulary.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from ..model import CausalLM, check_window, token_losses
from .cache import SlidingCache
from .chunks import ChunkBounds
from .settings import TrainingSettings

__all__ = ["Scorer"]


class Scorer:
    """Score the chunks of a document, each with the context before it.

    Where the document begins with the model's start token, each window and the cache begin with it.

    Args:
        host: the model.
        settings: `window`, `stride` and `context`.

    Raises:
        ValueError: for settings that do not fit the model.
    """

    def __init__(self, host: CausalLM, settings: TrainingSettings):
        _check_settings(host, settings)
        self._host = host
        self._settings = settings
        self._start_token: int | None = None
        self.forget_context()

    def begin(self, ids: Tensor) -> None:
        """Begin a document [T]: find its start token, and forget the context."""
        self._start_token = None
        settings = self._settings
        # A window of all positions without context has no room for the start token.
        fills_positions = settings.stride == settings.window == self._host.positions
        if int(ids[0]) == self._host.start_token and not fills_positions:
            self._start_token = self._host.start_token
        self.forget_context()

    def score(self, ids: Tensor, bounds: ChunkBounds) -> Tensor:
        """Return the losses [N] of a chunk of the document [T], in nats."""
        if not bounds.scored:
            return torch.zeros(0)
        # Token t is predicted where token t - 1 is fed.
        fed = self.put_start(ids, bounds.begin, bounds.stop - 1)
        targets = ids[max(bounds.start, 1) : bounds.stop]
        return token_losses(self._logits(fed, len(targets)), targets)

    def put_start(self, ids: Tensor, begin: int, stop: int) -> Tensor:
        """Return the tokens [begin, stop) of the document after its start token, if any, [1, n]."""
        window = ids[begin:stop]
        if self._start_token is not None and begin > 0:
            # Its own first token: a copy from the processor would wait for the device.
            window = torch.cat([ids[:1], window])
        return window[None]

    def keep_context(self) -> None:
        """Add the chunk that was scored last to the context."""
        self._cache.advance()

    def forget_context(self) -> None:
        """Forget the context, so that it is fed again with the next chunk."""
        settings = self._settings
        keep = max(settings.window - settings.stride, 1) - 1
        restart = min(2 * settings.window, self._host.rope_positions or sys.maxsize)
        self._cache = SlidingCache(self._host, keep, restart, settings.stride)

    def state_dict(self) -> dict[str, Any]:
        return {"start_token": self._start_token, "cache": self._cache.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start_token = state["start_token"]
        self.forget_context()
        self._cache.load_state_dict(state["cache"])

    def _logits(self, fed: Tensor, count: int) -> Tensor:
        """Return the logits [N, V] at the last `count` of the tokens that are fed, [1, n]."""
        settings = self._settings
        # Without other context than the start token there is nothing to keep.
        alone = self._start_token is not None and settings.window - settings.stride <= 1
        if settings.context == "cache" and not alone:
            return self._cache.forward(fed, count)[0]
        return self._host.logits(fed, count, use_cache=False)[0]


def _check_settings(host: CausalLM, settings: TrainingSettings) -> None:
    check_window(settings.window, host.positions)
    if settings.context == "recompute":
        return
    if not host.can_cache():
        rule = f"context must be 'recompute' for {host.base.config.model_type}"
        remedy = "its layers keep more than keys and values that slide"
        raise ValueError(f"{rule}, got 'cache': {remedy}")
    if host.rope_positions is not None and settings.window > host.rope_positions:
        rule = f"context must be 'recompute' with a window above {host.rope_positions}"
        reason = f"where {host.kind} changes its positions' frequencies"
        remedy = "give it, or lower window"
        raise ValueError(f"{rule}, {reason}, got 'cache' with {settings.window}: {remedy}")
