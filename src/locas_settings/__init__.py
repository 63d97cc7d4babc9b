"""The settings of the two stages: reading a text and studying it.

The command line turns the fields of these classes into options. This package imports neither torch
nor `locas_peft`, so that help is printed at once.
"""

from .adapter import LARGEST, METHODS, AdapterSettings
from .reading import PRESETS, UPDATES, ReadSettings
from .study import StudySettings

StageSettings = ReadSettings | StudySettings

__all__ = [
    "LARGEST",
    "METHODS",
    "PRESETS",
    "UPDATES",
    "AdapterSettings",
    "ReadSettings",
    "StageSettings",
    "StudySettings",
]
