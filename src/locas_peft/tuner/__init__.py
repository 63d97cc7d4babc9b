"""The PEFT tuner: config, layer, model and their parts. It imports nothing of this package."""

from .attached import empty_memories, list_layers, rescale, unwritten_memories
from .calibration import calibrate
from .config import LocasConfig
from .ffn import KNOWN_PARTS, FFNParts
from .finding import find_ffns
from .initialization import STRATEGIES, Rows, Strategy
from .layer import LocasLayer
from .model import LocasModel
from .modules import adapters_disabled, evaluating, trained_parameters

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
    "empty_memories",
    "evaluating",
    "find_ffns",
    "list_layers",
    "rescale",
    "trained_parameters",
    "unwritten_memories",
]
