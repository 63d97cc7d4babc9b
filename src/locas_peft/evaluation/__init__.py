"""The protocols and their measures.

Each protocol's module has its `NAME`, its units and `tabulate(figures)`.
"""

from typing import Any

from ..tables import Sheet
from . import forgetting, locomo, perplexity
from .conversations import choose_conversations, load_locomo
from .documents import load_column, load_documents
from .forgetting import run_forgetting
from .locomo import run_locomo
from .perplexity import run_perplexity
from .runs import Run
from .units import Unit, run_units

__all__ = [
    "Run",
    "Unit",
    "choose_conversations",
    "load_column",
    "load_documents",
    "load_locomo",
    "run_forgetting",
    "run_locomo",
    "run_perplexity",
    "run_units",
    "tabulate_figures",
]

PROTOCOLS = {module.NAME: module for module in (locomo, forgetting, perplexity)}


def tabulate_figures(figures: dict[str, Any]) -> list[Sheet]:
    """Return the tables of a protocol's figures, such as those in `perplexity.json`."""
    protocol = PROTOCOLS[figures["study"]]
    return [sheet for sheet in protocol.tabulate(figures) if sheet.rows]
