"""What is done to the slots of a memory from outside: written in closed form, folded, resized, exported as LoRA."""

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
