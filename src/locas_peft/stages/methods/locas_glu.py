"""The method "locas-glu": a memory beside gated FFNs, of rows that are cloned from the base."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from locas_settings import ReadSettings

from ...checks import invalid
from ...slots import ValueWriter
from ...ttt.steps import Step
from .memory import TRAINED, MemoryMethod
from .method import PAPER, STUDY_ANCHOR, TUNED, Unused

__all__ = ["LocasGlu"]

_ROWS = {"r": 64, "init": "topk", "scaling": 1.0, "max_slot_norm": None, "gains": None}
_LEARNING_RATE = 4e-3
_ANCHOR = 0.3


class LocasGlu(MemoryMethod):
    """Locas-GLU (the paper, section "Memory Initialization for Locas-GLU")."""

    name = "locas-glu"
    gated = True
    other_method = "locas-mlp"
    reading = {
        # The paper's tau, divided by r, and the rate of its ablation of initialisations.
        "paper": {
            **_ROWS,
            "learning_rate": _LEARNING_RATE,
            "update": "bp",
            "output_scale": "paper",
            **PAPER,
        },
        # The measured output scale, so that one rate serves all hosts, and an anchor, which limits
        # changes on other texts.
        "tuned": {
            **_ROWS,
            "learning_rate": _LEARNING_RATE,
            "update": "bp",
            "output_scale": "measured",
            **TUNED,
            "anchor": _ANCHOR,
        },
    }
    study = {
        **_ROWS,
        "learning_rate": 1.5 * _LEARNING_RATE,
        "output_scale": "measured",
        "layers_to_transform": None,
        "anchor": STUDY_ANCHOR,
    }

    def list_unused(self, values: dict[str, Any], given: Mapping[str, Any]) -> Unused:
        update = values.get("update")
        if update == "nlsvd":
            rule = f"be bp or ridge for the method {self.name!r}"
            raise invalid("update", rule, "'nlsvd'", "leave it out")
        if update == "ridge" and "learning_rate" not in given:
            if values.get("gains"):
                rule = "be trained, which update='ridge' alone does not"
                raise invalid("gains", rule, True, "give learning_rate, 4e-3 say")
            return [("update", TRAINED)]
        return super().list_unused(values, given)

    def make_writers(self, settings: ReadSettings, model: nn.Module) -> list[Step]:
        if settings.update == "ridge":
            return [ValueWriter(model)]
        return []
