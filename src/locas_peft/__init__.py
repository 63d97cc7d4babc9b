"""Memory made of weights for language models: the LOCAS method as a PEFT tuner.

Importing this package registers `PeftType.LOCAS` with PEFT and does nothing else.
"""

from .registration import register
from .slots import RidgeWriter, SlotWriter, ValueWriter, compress, grow, to_lora, widen_base
from .ttt import (
    Anchor,
    Chunk,
    MeanOfReadings,
    OwnText,
    TestTimeTrainer,
    TrainingSettings,
    write_own_text,
)
from .tuner import LocasConfig, LocasLayer, LocasModel, calibrate, rescale, uncalibrated_memories

register()

__version__ = "0.3.0"

__all__ = [
    "Anchor",
    "Chunk",
    "LocasConfig",
    "LocasLayer",
    "LocasModel",
    "MeanOfReadings",
    "OwnText",
    "RidgeWriter",
    "SlotWriter",
    "TestTimeTrainer",
    "TrainingSettings",
    "ValueWriter",
    "calibrate",
    "compress",
    "grow",
    "rescale",
    "to_lora",
    "uncalibrated_memories",
    "widen_base",
    "write_own_text",
]
