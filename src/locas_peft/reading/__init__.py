"""Read a text with one method and save what was learned. The only room that teaches a text and saves."""

from .methods import METHODS, PRESETS
from .record import Reading
from .settings import CompleteSettings, ReadingSettings, StudySettings, complete_all, parse_method
from .teaching import PeakMemory, StopReading, attached, make_trainer, memorize, score

__all__ = [
    "METHODS",
    "PRESETS",
    "CompleteSettings",
    "PeakMemory",
    "Reading",
    "ReadingSettings",
    "StopReading",
]
__all__ += [
    "StudySettings",
    "attached",
    "complete_all",
    "make_trainer",
    "memorize",
    "parse_method",
    "score",
]
