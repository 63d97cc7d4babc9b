"""A library of memories: add a text, ask with the memory that a question is about, forget.

It needs the extra `library`.
"""

from .answering import LibraryAnswerer
from .library import Library
from .names import check_name
from .routing import make_sample, score_by_words
from .source import add_sources, check_text, find_source, join_texts

__all__ = [
    "Library",
    "LibraryAnswerer",
    "add_sources",
    "check_name",
    "check_text",
    "find_source",
    "join_texts",
    "make_sample",
    "score_by_words",
]
