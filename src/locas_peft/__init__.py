"""Memory made of weights for language models: the LOCAS method as a PEFT tuner.

Importing this package registers `PeftType.LOCAS` with PEFT and does nothing else.
"""

from .registration import register
from .slots import RidgeWriter, SlotWriter, ValueWriter, compress, grow, to_lora, widen_base
from .ttt import (
    Anchor,
    Chunk,
    OwnText,
    TestTimeTrainer,
    TrainingSettings,
    read_many,
    write_own_text,
)
from .tuner import LocasConfig, LocasLayer, LocasModel, calibrate, rescale, uncalibrated_memories

register()

__version__ = "0.2.0"

__all__ = [
    "Anchor",
    "Chunk",
    "LocasConfig",
    "LocasLayer",
    "LocasModel",
    "OwnText",
    "RidgeWriter",
    "SlotWriter",
]
__all__ += [
    "TestTimeTrainer",
    "TrainingSettings",
    "ValueWriter",
    "calibrate",
    "compress",
    "uncalibrated_memories",
    "grow",
]
__all__ += ["read_many", "rescale", "to_lora", "widen_base", "write_own_text"]
