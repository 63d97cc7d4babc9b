"""Test-time training: each chunk of a document is scored first and learned second."""

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
from .settings import TrainingSettings
from .steps import Step
from .steps.anchor import Anchor, OwnText, write_own_text
from .steps.mean import MeanOfReadings
from .trainer import TestTimeTrainer

__all__ = [
    "Anchor",
    "Chunk",
    "ChunkBounds",
    "MeanOfReadings",
    "OwnText",
    "Step",
    "TestTimeTrainer",
    "TrainingSettings",
    "at_marks",
    "choose_marks",
    "cumulative",
    "cut",
    "per_segment",
    "perplexity",
    "perplexity_of",
    "write_own_text",
]
