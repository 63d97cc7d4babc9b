"""The stages that make a memory: reading a text and studying it. Only here is a memory taught."""

from locas_settings import PRESETS, AdapterSettings, ReadSettings, StudySettings

from .complete import (
    choose_values,
    complete,
    complete_all,
    for_base,
    parse_method,
    split_methods,
)
from .methods import METHODS, Method, choose_memory
from .peak import PeakMemory
from .record import ReadRecord, Record, StudyRecord, load_records, parse_record
from .running import (
    Place,
    StageRun,
    attached,
    check_continuation,
    open_reading,
    open_study,
    read,
    score,
    study,
)
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
    "check_continuation",
    "choose_values",
    "choose_memory",
    "complete",
    "complete_all",
    "for_base",
    "load_records",
    "make_trainer",
    "open_reading",
    "open_study",
    "parse_method",
    "parse_record",
    "read",
    "score",
    "split_methods",
    "study",
]
