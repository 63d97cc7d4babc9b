"""The protocols by name. Each one's module has its `NAME`, and `tabulate(figures)`, which returns its tables."""

from typing import Any

from ..tables import Sheet
from . import forgetting, locomo, perplexity

__all__ = ["PROTOCOLS", "tabulate_figures"]

PROTOCOLS = {module.NAME: module for module in (locomo, forgetting, perplexity)}


def tabulate_figures(figures: dict[str, Any]) -> list[Sheet]:
    """Return the tables of a protocol's figures (`perplexity.json`, `locomo.json`, `forgetting.json`)."""
    return [sheet for sheet in PROTOCOLS[figures["study"]].tabulate(figures) if sheet.rows]
