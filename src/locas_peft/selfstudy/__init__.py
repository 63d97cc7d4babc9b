"""Self-study: the model writes questions about a text, answers them with the text, and learns the answers without it.

`write_lessons` writes and filters the exchanges, `SelfStudy` learns them. `reading.memorize` runs both.
"""

from .exchanges import Exchange, load_exchanges, save_exchanges, split_passages
from .learning import SelfStudy, StudyStep
from .writing import Lesson, write_lessons

__all__ = [
    "Exchange",
    "Lesson",
    "SelfStudy",
    "StudyStep",
    "load_exchanges",
    "save_exchanges",
    "split_passages",
    "write_lessons",
]
