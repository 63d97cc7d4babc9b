"""The PEFT tuner: config, layer and model, and what they stand on. Nothing here imports from outside this folder."""

from .compression import compress
from .config import LocasConfig
from .initialization import STRATEGIES
from .layer import LocasLayer, list_layers
from .memories import calibrate, empty_memories, rescale, unwritten_memories
from .model import LocasModel
from .nlsvd import nl_svd
from .writing import SlotWriter, write_tokens

__all__ = [
    "STRATEGIES",
    "LocasConfig",
    "LocasLayer",
    "LocasModel",
    "SlotWriter",
    "calibrate",
    "compress",
    "empty_memories",
    "list_layers",
    "nl_svd",
    "rescale",
    "unwritten_memories",
    "write_tokens",
]
