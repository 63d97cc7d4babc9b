"""The PEFT tuner: config, layer and model, and what they stand on. Nothing here imports from outside this folder."""

from .config import LocasConfig
from .initialization import STRATEGIES
from .layer import LocasLayer
from .memories import calibrate, empty_memories, rescale
from .model import LocasModel

__all__ = ["STRATEGIES", "LocasConfig", "LocasLayer", "LocasModel", "calibrate", "empty_memories", "rescale"]
