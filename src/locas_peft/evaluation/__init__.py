"""The protocols and their measures: each protocol is a table of units of work, a summary and tables."""

from .blimp import load_blimp
from .conversations import choose_conversations, load_locomo
from .documents import load_column, load_documents
from .forgetting import run_forgetting
from .locomo import run_locomo
from .perplexity import run_perplexity
from .protocols import tabulate_figures
from .runs import Run

__all__ = ["Run", "choose_conversations", "load_blimp", "load_column", "load_documents", "load_locomo"]
__all__ += ["run_forgetting", "run_locomo", "run_perplexity", "tabulate_figures"]
