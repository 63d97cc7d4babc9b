"""The PEFT tuner: config, layer, model and their parts. It imports nothing from elsewhere."""

from .attached import (
    clip_memories,
    keep_weights,
    list_layers,
    rescale,
    uncalibrated_memories,
    unwritten_memories,
)
from .calibration import calibrate
from .config import LocasConfig
from .ffn import KNOWN_PARTS, FFNParts
from .finding import find_ffns
from .initialization import STRATEGIES, Rows, Strategy
from .layer import LocasLayer
from .model import LocasModel
from .modules import adapters_disabled, evaluating, reference_active, trained_parameters

__all__ = [
    "KNOWN_PARTS",
    "STRATEGIES",
    "FFNParts",
    "LocasConfig",
    "LocasLayer",
    "LocasModel",
    "Rows",
    "Strategy",
    "adapters_disabled",
    "calibrate",
    "clip_memories",
    "evaluating",
    "find_ffns",
    "keep_weights",
    "list_layers",
    "reference_active",
    "rescale",
    "trained_parameters",
    "uncalibrated_memories",
    "unwritten_memories",
]
