"""Base models by name: a folder, the hub, a GGUF file, or an embedded backbone."""

from .loading import DTYPES, choose_device, load_base

__all__ = ["DTYPES", "choose_device", "load_base"]
