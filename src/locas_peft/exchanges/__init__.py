"""Exchanges, a question with its answer: their file, and how a model writes them about a text.

`write_exchanges` writes questions about passages and drops poor ones. The answer of each is its
passage.
"""

from .file import (
    EXCHANGES,
    Exchange,
    correct,
    digest_exchanges,
    load_exchanges,
    save_exchanges,
)
from .writing import (
    BLOCK,
    PER_PASSAGE,
    check_window,
    draw_token,
    write_exchanges,
    write_replies,
)

__all__ = [
    "BLOCK",
    "EXCHANGES",
    "PER_PASSAGE",
    "Exchange",
    "check_window",
    "correct",
    "digest_exchanges",
    "draw_token",
    "load_exchanges",
    "save_exchanges",
    "write_exchanges",
    "write_replies",
]
