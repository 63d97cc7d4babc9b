"""No adapter: the base reads, and nothing learns."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from .method import Method

__all__ = ["NoAdapter"]


@dataclass(frozen=True, kw_only=True)
class NoAdapter(Method):
    """The base alone, in the windows of the other methods: what their figures are compared with."""

    name = "none"
    presets = {"paper": {}, "tuned": {}}

    def make_config(self, base: PreTrainedModel, seed: int) -> None:
        return None
