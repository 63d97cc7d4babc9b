"""The table of a memory's layers that `locas inspect` prints."""

from __future__ import annotations

from typing import Any

from ..tables import Sheet, format_figure

__all__ = ["tabulate_memory"]


def tabulate_memory(memory: dict[str, Any]) -> Sheet:
    """Return the layers of `loading.describe_memory`: width, tau, norms of the slots (mean, maximum), host slots."""
    rows = []
    for layer in memory["layers"]:
        norms = [layer[part] and layer[part][which] for part in ("gate", "up", "down") for which in ("mean", "max")]
        slots = layer["slots"] or []
        listed = ", ".join(map(str, slots[:3])) + (f", ... ({len(slots)})" if len(slots) > 3 else "")
        tau = "-" if layer["tau"] is None else f"{layer['tau']:.4g}"
        rows.append([layer["name"], str(layer["r"]), tau, *(format_figure(norm, 3) for norm in norms), listed or "-"])
    norms = ["gate mean", "max", "up mean", "max", "down mean", "max"]
    return Sheet("", ["FFN", "r", "tau", *norms, "cloned from slots"], rows)
