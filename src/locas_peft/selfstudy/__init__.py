"""Self-study: the model asks questions about a text's passages and learns to answer them.

`SelfStudy` writes the exchanges of a text (see `exchanges`) and learns them.
"""

from ..exchanges import Exchange, load_exchanges, save_exchanges, write_exchanges
from ..text import Passage, split_passages
from .distillation import Former
from .study import SelfStudy, StudyStep

__all__ = [
    "Exchange",
    "Former",
    "Passage",
    "SelfStudy",
    "StudyStep",
    "load_exchanges",
    "save_exchanges",
    "split_passages",
    "write_exchanges",
]
