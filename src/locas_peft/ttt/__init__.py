"""Test-time training: a document is read chunk by chunk, each chunk scored first and learned second.

`TestTimeTrainer` reads one document and teaches whatever adapter is active; `read_many` reads many at once and gives
each a LOCAS memory of its own.
"""

from .anchor import Anchor, write_own_text
from .chunk import Chunk
from .losses import token_losses
from .many import ManyReading, read_many
from .trainer import TestTimeTrainer, prepare

__all__ = [
    "Anchor",
    "Chunk",
    "ManyReading",
    "TestTimeTrainer",
    "prepare",
    "read_many",
    "token_losses",
    "write_own_text",
]
