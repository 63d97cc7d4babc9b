"""Self-study: the model writes questions about the passages of a text, and learns to answer with the passage.

`write_exchanges` writes and filters the exchanges, and `SelfStudy` learns them. `stages.study` runs both.
"""

from .exchanges import Exchange, Passage, load_exchanges, save_exchanges, split_passages
from .learning import SelfStudy, StudyStep
from .writing import write_exchanges

__all__ = [
    "Exchange",
    "Passage",
    "SelfStudy",
    "StudyStep",
    "load_exchanges",
    "save_exchanges",
    "split_passages",
    "write_exchanges",
]
