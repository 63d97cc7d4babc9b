"""The protocols and their measures. Each protocol's module has its `NAME`, its units and `tabulate(figures)`."""

from typing import Any

from ..tables import Sheet
from . import forgetting, locomo, perplexity
from .conversations import choose_conversations, load_locomo
from .documents import load_column, load_documents
from .forgetting import run_forgetting
from .locomo import run_locomo
from .perplexity import run_perplexity
from .runs import Run

__all__ = ["Run", "choose_conversations", "load_column", "load_documents", "load_locomo"]
__all__ += ["run_forgetting", "run_locomo", "run_perplexity", "tabulate_figures"]

PROTOCOLS = {module.NAME: module for module in (locomo, forgetting, perplexity)}


def tabulate_figures(figures: dict[str, Any]) -> list[Sheet]:
    """Return the tables of a protocol's figures (`perplexity.json`, `locomo.json`, `forgetting.json`)."""
    return [sheet for sheet in PROTOCOLS[figures["study"]].tabulate(figures) if sheet.rows]
