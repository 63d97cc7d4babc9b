"""The page of `locas app`: read a text, ask with and without the memory, keep memories on a shelf.

The shelf is a `library.Library`, `sessions.py` the visitors and the model that they share, `page.py` the layout.

Who sees what: each browser has a shelf of its own, in a temporary folder that is removed when the server ends. A key
in the browser's storage leads to it, so that a reloaded page and a second tab show it again. With `shelf=DIR` all
visitors share the memories in that folder, which stay: they can ask, rename and delete each other's. Texts, questions
and running readings are never shared. The page has no password: whoever can reach the address can use it.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

__all__ = ["check_installed"]

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when `page.py` imports gradio


def check_installed() -> None:
    """Raise a `ValueError` where gradio, which only `page.py` needs, is not installed."""
    if find_spec("gradio") is None:
        raise ValueError('the page needs gradio: install it with pip install "locas_peft[app]"')
