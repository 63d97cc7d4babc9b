"""Locas-MLP: a memory beside two-layer FFNs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ...checks import check_choice, check_number, check_whole
from ...slots import SlotWriter
from .method import PAPER, TUNED, Memory, checked

__all__ = ["UPDATES", "LocasMlp"]

UPDATES = ("bp", "nlsvd")

_ROWS = {"row_norm": None, "max_slot_norm": None, "update": "bp", "epsilon": 0.01, "slots_per_chunk": 8}
_PAPER = {"r": 64, "init": "write", "output_scale": "paper", "scaling": None, "learning_rate": 5e-4}
_TUNED = {"r": 64, "init": "topk", "output_scale": "measured", "scaling": 4.0, "learning_rate": 8e-3}


@dataclass(frozen=True, kw_only=True)
class LocasMlp(Memory):
    """A two-layer memory, of cloned rows or written slot by slot.

    Args:
        update: of a memory with init "write": "bp" also trains its slots, "nlsvd" only writes and folds them. None
            for another init, as the next two.
        epsilon: length of a written value.
        slots_per_chunk: how many tokens of a chunk are written, those with the highest loss.
    """

    name, gated, other = "locas-mlp", False, "locas-glu"
    presets = {
        # Written slot by slot as in the paper, but with tau undivided (`choose`) and a rate from our sweep
        # (benchmarks/README.md).
        "paper": {**_PAPER, **_ROWS, **PAPER},
        "tuned": {**_TUNED, **_ROWS, **TUNED},
    }
    update: str | None = checked(partial(check_choice, choices=UPDATES))
    epsilon: float | None = checked(check_number)
    slots_per_chunk: int | None = checked(partial(check_whole, least=1))

    @classmethod
    def choose(cls, preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
        values = super().choose(preset, given)
        if values["scaling"] is None:
            values["scaling"] = float(values["r"])
        return values

    @classmethod
    def list_unused(cls, values: dict[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
        unused = super().list_unused(values)
        if values["init"] != "write":
            return [("init", ("update", "epsilon", "slots_per_chunk")), *unused]
        if values["update"] == "nlsvd":
            return [("update", ("learning_rate", "decay_steps", "anchor")), *unused]
        return unused

    def make_writer(self, model: nn.Module) -> SlotWriter | None:
        if self.init != "write":
            return None
        fold = "nlsvd" if self.update == "nlsvd" else "refit"
        return SlotWriter(model, fold=fold, epsilon=self.epsilon, slots_per_chunk=self.slots_per_chunk)
