"""Locas-GLU: a memory beside gated FFNs."""

from __future__ import annotations

from dataclasses import dataclass

from .method import PAPER, TUNED, Memory

__all__ = ["LocasGlu"]

_ROWS = {"r": 64, "init": "topk", "scaling": 1.0, "row_norm": None, "max_slot_norm": None, "learning_rate": 4e-3}


@dataclass(frozen=True, kw_only=True)
class LocasGlu(Memory):
    """A gated memory of rows that are cloned from the base."""

    name, gated, other = "locas-glu", True, "locas-mlp"
    presets = {
        # The paper's tau, divided by r, and the rate of its PG-19 runs.
        "paper": {**_ROWS, "output_scale": "paper", **PAPER},
        # The measured output scale, so that one rate serves all hosts; an anchor, which limits changes on other texts.
        "tuned": {**_ROWS, "output_scale": "measured", **TUNED, "anchor": 0.3},
    }
