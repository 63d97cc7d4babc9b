"""The stages that make a memory: reading a text and studying it. Only here is a memory taught."""

from locas_settings import PRESETS, AdapterSettings, ReadSettings, StudySettings

from .complete import complete, complete_all, parse_method
from .methods import METHODS, Method
from .peak import PeakMemory
from .record import ReadRecord, Record, StudyRecord, load_records
from .running import Place, StageRun, attached, open_reading, open_study, read, score, study
from .stage import make_trainer

__all__ = [
    "METHODS",
    "PRESETS",
    "AdapterSettings",
    "Method",
    "PeakMemory",
    "Place",
    "ReadRecord",
    "ReadSettings",
    "Record",
    "StageRun",
    "StudyRecord",
    "StudySettings",
    "attached",
    "complete",
    "complete_all",
    "load_records",
    "make_trainer",
    "open_reading",
    "open_study",
    "parse_method",
    "read",
    "score",
    "study",
]
