"""What is done to a memory's slots from outside: written, folded, resized, exported as LoRA."""

from .lora_export import to_lora, widen_base
from .nlsvd import nl_svd
from .recording import Writer
from .resizing import compress, grow
from .ridge import RidgeWriter, ValueWriter
from .writing import SlotWriter

__all__ = [
    "RidgeWriter",
    "SlotWriter",
    "ValueWriter",
    "Writer",
    "compress",
    "grow",
    "nl_svd",
    "to_lora",
    "widen_base",
]
