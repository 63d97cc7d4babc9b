"""A library of memories: add a text, ask with the memory that a question is about, forget. Extra `library`."""

from ..selfstudy.finding import score_by_words
from .library import Library, RoutedAnswer, check_name
from .routing import make_sample

__all__ = ["Library", "RoutedAnswer", "check_name", "make_sample", "score_by_words"]
