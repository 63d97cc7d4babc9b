"""Test-time training: a document is read chunk by chunk; each chunk is scored first and learned second."""

from .anchor import Anchor, OwnText, write_own_text
from .chunks import (
    Chunk,
    ChunkBounds,
    at_marks,
    choose_marks,
    cumulative,
    cut,
    per_segment,
    perplexity,
    perplexity_of,
)
from .many import ManyReading, read_many
from .settings import TrainingSettings
from .trainer import TestTimeTrainer

__all__ = [
    "Anchor", "Chunk", "ChunkBounds", "ManyReading", "OwnText", "TestTimeTrainer", "TrainingSettings", "at_marks",
    "choose_marks", "cumulative", "cut", "per_segment", "perplexity", "perplexity_of", "read_many", "write_own_text",
]  # fmt: skip
