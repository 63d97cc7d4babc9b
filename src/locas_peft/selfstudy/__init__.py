"""Self-study: the model asks questions about a text's passages and learns to answer them.

`write_exchanges` writes and filters the questions; the answer of each is its passage. `SelfStudy`
writes the exchanges of a text and learns them.
"""

from ..text import Passage, split_passages
from .distillation import Former
from .exchanges import Exchange, load_exchanges, save_exchanges
from .study import SelfStudy, StudyStep
from .writing import write_exchanges

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
