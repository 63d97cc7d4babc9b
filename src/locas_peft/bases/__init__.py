"""Base models by name: a folder, the hub, a GGUF file, an embedded backbone; their placement."""

from .loading import load_base
from .placing import DTYPES, QUANTIZATIONS, choose_device

__all__ = ["DTYPES", "QUANTIZATIONS", "choose_device", "load_base"]
