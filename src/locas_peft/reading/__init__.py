"""Read a text with one method and save what was learned. The only room that teaches a text and saves."""

from .adapters import attached
from .methods import METHODS, PRESETS
from .record import Reading
from .settings import CompleteSettings, ReadingSettings, StudySettings, complete_all, label_method, parse_method
from .teaching import StopReading, make_trainer, memorize, score

__all__ = [
    "METHODS",
    "PRESETS",
    "CompleteSettings",
    "Reading",
    "ReadingSettings",
    "StopReading",
    "StudySettings",
    "attached",
    "complete_all",
    "label_method",
    "make_trainer",
    "memorize",
    "parse_method",
    "score",
]
