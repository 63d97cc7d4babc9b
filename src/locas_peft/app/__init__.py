"""The page of `locas app`: read a text, ask with and without the memory, keep memories on a shelf.

`shelf.py` is the folder of memories, `sessions.py` the visitors and the model that they share, `page.py` the layout.

Who sees what: each browser has a shelf of its own, in a temporary folder that is removed when the server ends. A key
in the browser's storage leads to it, so that a reloaded page and a second tab show it again. With `shelf=DIR` all
visitors share the memories in that folder, which stay: they can ask, rename and delete each other's. Texts, questions
and running readings are never shared. The page has no password: whoever can reach the address can use it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .sessions import SharedModel, Visitors

__all__ = ["check_installed", "serve"]


def check_installed() -> None:
    """Raise a `ValueError` where gradio, which only the page needs, is not installed."""
    if find_spec("gradio") is None:
        raise ValueError('the page needs gradio: install it with pip install "locas_peft[app]"')


def serve(
    name: str,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    shelf: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 7860,
    open_browser: bool = False,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve the page until an exception, such as that of Ctrl-C; running readings are then stopped and kept.

    Args:
        name: of the base, for the records of readings.
        base: a causal LM without adapters, frozen.
        tokenizer: its tokenizer.
        shelf: the folder that all visitors share; None for a temporary one each.
        host: the address to listen on.
        port: of it; 0 for any free one.
        open_browser: also open the page in this machine's browser.
        announce: called with the page's address when it can be opened.

    Raises:
        ValueError: the address cannot be used.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    from .page import build, launch

    model, visitors = SharedModel(name, base, tokenizer), Visitors(shelf)
    os.environ["GRADIO_TEMP_DIR"] = str(visitors.folder / "gradio")  # removed with the visitors' folders
    page = build(model, visitors)
    try:
        announce(launch(page, host, port, open_browser))
        threading.Event().wait()
    finally:
        page.close(verbose=False)
        model.close()
        visitors.close()
