"""A library of memories: add a text, ask with the memory that a question is about, forget.

It needs the extra `library`.
"""

from .answering import LibraryAnswerer
from .library import Library
from .names import check_name
from .routing import make_sample, score_by_words

__all__ = ["Library", "LibraryAnswerer", "check_name", "make_sample", "score_by_words"]
