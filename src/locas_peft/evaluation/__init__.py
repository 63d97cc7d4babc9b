"""Studies and their measures: each study lists units of work, whose results are JSON files, and summarizes them."""

from ..progress import Progress, follow, silent
from .blimp import load_blimp
from .conversations import choose_conversations, load_locomo
from .documents import load_column, load_documents
from .forgetting import run_forgetting
from .locomo import run_locomo
from .perplexity import run_perplexity
from .prompts import load_prompts
from .study import Unit, open_study, run_units

__all__ = ["Progress", "Unit", "choose_conversations", "follow", "load_blimp", "load_column", "load_documents"]
__all__ += ["load_locomo", "load_prompts", "open_study", "run_forgetting", "run_locomo", "run_perplexity", "run_units"]
__all__ += ["silent"]
