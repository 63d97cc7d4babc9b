"""The method "none": the base alone, in the windows of the other methods."""

from .method import Method

__all__ = ["NoAdapter"]


class NoAdapter(Method):
    """No adapter: what the figures of the other methods are compared with."""

    name = "none"
    reading = {"paper": {}, "tuned": {}}
