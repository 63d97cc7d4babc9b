"""Reading a text with one method: none, LoRA or a Locas memory, from its settings to the saved memory."""

from .adapters import METHODS, attached, find_layers
from .memory_folder import CHECKPOINT_FOLDER, find_finished, has_checkpoint, save_memory
from .peak_memory import PeakMemory
from .reading import make_trainer, read_with, score
from .record import READING, Reading
from .settings import METHOD_FIELDS, PRESETS, UPDATES, Settings

__all__ = [
    "CHECKPOINT_FOLDER",
    "METHODS",
    "METHOD_FIELDS",
    "PRESETS",
    "READING",
    "UPDATES",
    "PeakMemory",
    "Reading",
    "Settings",
    "attached",
    "find_finished",
    "find_layers",
    "has_checkpoint",
    "make_trainer",
    "read_with",
    "save_memory",
    "score",
]
