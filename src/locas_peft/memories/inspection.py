"""The table of a memory's layers that `locas inspect` prints."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

from ..tables import Sheet, format_figure

__all__ = ["tabulate_memory"]

_NORMS = (("gate", "mean"), ("up", "mean"), ("down", "mean"), ("down", "max"))


def tabulate_memory(memory: dict[str, Any]) -> Sheet:
    """Return the layers of `loading.describe_memory`, a line each that fits 80 columns.

    The title has what the names of the FFNs share, the first column the rest of each. The other columns are the width,
    tau, norms of the slots, and the first two host slots that were cloned.
    """
    pattern, names = _shorten([layer["name"] for layer in memory["layers"]])
    rows = []
    for name, layer in zip(names, memory["layers"], strict=True):
        norms = [format_figure(layer[part] and layer[part][which], 3) for part, which in _NORMS]
        tau = "-" if layer["tau"] is None else f"{layer['tau']:.4g}"
        slots = ", ".join(map(str, (layer["slots"] or [])[:2])) + ", ..." * (len(layer["slots"] or []) > 2)
        rows.append([name, str(layer["r"]), tau, *norms, slots or "-"])
    title = f"{pattern}   (gate, up, down: mean norm of the slots; max: of down)".strip()
    return Sheet(title, ["FFN", "r", "tau", "gate", "up", "down", "max", "host slots"], rows)


def _shorten(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the parts that several dotted names share at their ends, with * for the rest, and the rest of each."""
    parts = [name.split(".") for name in names]
    most = min(map(len, parts)) - 1  # something is left of each name
    head = len(commonprefix(parts)[:most])
    tail = len(commonprefix([each[::-1] for each in parts])[: most - head])
    if len(parts) < 2 or not head + tail:
        return "", list(names)
    pattern = [*parts[0][:head], "*", *parts[0][len(parts[0]) - tail :]]
    return ".".join(pattern), [".".join(each[head : len(each) - tail]) for each in parts]
