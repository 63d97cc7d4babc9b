"""Test-time training: a document is read chunk by chunk, each chunk scored first and learned second.

`TestTimeTrainer` reads one document and teaches whatever adapter is active; `read_many` reads many at once and gives
each a LOCAS memory of its own.
"""

from .chunk import Chunk
from .losses import token_losses
from .trainer import TestTimeTrainer, prepare

__all__ = ["Chunk", "TestTimeTrainer", "prepare", "token_losses"]
