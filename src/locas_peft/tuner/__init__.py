"""The PEFT tuner: config, layer, model and their parts. Nothing here imports from outside this folder."""

from .config import LocasConfig
from .ffn import KNOWN_PARTS, FFNParts
from .finding import find_ffns
from .initialization import STRATEGIES, Rows, Strategy
from .layer import LocasLayer, list_layers
from .lora_export import to_lora, widen_base
from .memories import calibrate, empty_memories, rescale, unwritten_memories
from .model import LocasModel
from .nlsvd import nl_svd
from .passes import adapters_disabled, evaluating, trained_parameters
from .resizing import compress, grow
from .writing import SlotWriter, write_tokens

__all__ = [
    "KNOWN_PARTS",
    "STRATEGIES",
    "FFNParts",
    "LocasConfig",
    "LocasLayer",
    "LocasModel",
    "Rows",
    "SlotWriter",
    "Strategy",
    "adapters_disabled",
    "calibrate",
    "compress",
    "grow",
    "empty_memories",
    "evaluating",
    "find_ffns",
    "list_layers",
    "nl_svd",
    "rescale",
    "to_lora",
    "trained_parameters",
    "unwritten_memories",
    "widen_base",
    "write_tokens",
]
