"""Self-study: the model writes questions about the passages of a text, and learns to answer with the passage.

`write_exchanges` writes and filters the exchanges, `SelfStudy` learns them. `reading.memorize` runs both.
"""

from .exchanges import Exchange, Passage, load_exchanges, load_passages, save_exchanges, split_passages
from .learning import SelfStudy, StudyStep
from .writing import write_exchanges

__all__ = ["Exchange", "Passage", "SelfStudy", "StudyStep", "load_exchanges", "load_passages", "save_exchanges"]
__all__ += ["split_passages", "write_exchanges"]
