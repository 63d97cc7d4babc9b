"""Self-study: the model writes questions about a text, answers them with the text, and learns the answers without it.

`write_exchanges` writes and filters the exchanges, `SelfStudy` learns them. `reading.memorize` runs both.
"""

from .exchanges import Exchange, find_subject, load_exchanges, save_exchanges, split_passages
from .learning import SelfStudy, StudyStep
from .writing import write_exchanges

__all__ = [
    "Exchange",
    "SelfStudy",
    "StudyStep",
    "find_subject",
    "load_exchanges",
    "save_exchanges",
    "split_passages",
    "write_exchanges",
]
