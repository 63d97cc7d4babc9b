"""The method "locas-mlp": a memory beside two-layer FFNs, cloned or written slot by slot."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from locas_settings import ReadSettings

from ...slots import RidgeWriter, SlotWriter
from ...ttt.steps import Step
from .memory import TRAINED, MemoryMethod
from .method import PAPER, TUNED, Unused

__all__ = ["LocasMlp"]

_WRITING = ("epsilon", "slots_per_chunk")
# Without an optimizer nothing trains the gains.
_TRAINED = (*TRAINED, "gains")
_SHAPE = {"max_slot_norm": None, "gains": None}
_SLOTS = {**_SHAPE, "update": "bp", "epsilon": 0.01, "slots_per_chunk": 8}
_TUNED_RATE = 8e-3


class LocasMlp(MemoryMethod):
    """Locas-MLP (the paper, section "Memory Initialization for Locas-MLP")."""

    name = "locas-mlp"
    gated = False
    other_method = "locas-glu"
    reading = {
        # The paper's written slots (`slots.writing` lists our choices), with tau undivided
        # (`complete`) and a rate from our sweep.
        "paper": {
            "r": 64,
            "init": "write",
            "output_scale": "paper",
            "scaling": None,
            "learning_rate": 5e-4,
            **_SLOTS,
            **PAPER,
        },
        "tuned": {
            "r": 64,
            "init": "topk",
            "output_scale": "measured",
            "scaling": 4.0,
            "learning_rate": _TUNED_RATE,
            **_SLOTS,
            **TUNED,
        },
    }
    study = {
        "r": 64,
        "init": "topk",
        "output_scale": "measured",
        "scaling": 4.0,
        **_SHAPE,
        "learning_rate": 1.5 * _TUNED_RATE,
        "layers_to_transform": None,
        "anchor": None,
    }

    def complete(self, defaults: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        values = super().complete(defaults, given)
        if values["scaling"] is None:
            values["scaling"] = float(values["r"])
        return values

    def list_unused(self, values: dict[str, Any], given: Mapping[str, Any]) -> Unused:
        unused = super().list_unused(values, given)
        if values["init"] != "write":
            return [("init", ("update", *_WRITING)), *unused]
        if values.get("update") == "nlsvd":
            return [("update", _TRAINED), *unused]
        if values.get("update") == "ridge":
            return [("update", (*_TRAINED, *_WRITING)), *unused]
        return unused

    def make_writers(self, settings: ReadSettings, model: nn.Module) -> list[Step]:
        if settings.init != "write":
            return []
        if settings.update == "ridge":
            return [RidgeWriter(model)]
        options: dict[str, Any] = {
            "epsilon": settings.epsilon,
            "slots_per_chunk": settings.slots_per_chunk,
            "fold": "nlsvd" if settings.update == "nlsvd" else "refit",
        }
        return [SlotWriter(model, **options)]
