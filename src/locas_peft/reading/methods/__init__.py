"""The methods that can read a text, one file each. A new method is a file here and its class in `METHODS`."""

from .locas_glu import LocasGlu
from .locas_mlp import LocasMlp
from .lora import Lora
from .method import PRESETS, Adapter, Memory, Method
from .none import NoAdapter

__all__ = ["METHODS", "METHOD_FIELDS", "PRESETS", "Adapter", "Memory", "Method"]

METHODS: dict[str, type[Method]] = {cls.name: cls for cls in (NoAdapter, Lora, LocasGlu, LocasMlp)}
METHOD_FIELDS = tuple(dict.fromkeys(name for cls in reversed(METHODS.values()) for name in cls.presets["paper"]))
"""The settings that not every method has: its own, and those of the training of an adapter."""
