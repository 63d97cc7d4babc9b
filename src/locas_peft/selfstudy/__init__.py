"""Self-study: the model writes questions about the passages of a text, and learns to answer with the passage.

`write_exchanges` writes and filters the exchanges, `SelfStudy` learns them, and a `Finder` finds their answers by a
question. `reading.memorize` runs all.
"""

from .exchanges import Exchange, Passage, load_exchanges, save_exchanges, split_passages
from .finding import Finder, load_finder
from .learning import SelfStudy, StudyStep
from .writing import write_exchanges

__all__ = [
    "Exchange",
    "Finder",
    "Passage",
    "SelfStudy",
    "StudyStep",
    "load_exchanges",
    "load_finder",
]
__all__ += ["save_exchanges", "split_passages", "write_exchanges"]
