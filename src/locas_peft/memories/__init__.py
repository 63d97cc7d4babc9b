"""Saved memories: loaded, described, combined, merged, exported."""

from .conversion import combine_memories, export_memory, merge_memory, merge_to_gguf, save_adapter, share_weights
from .loading import MEMORY_CONFIG, describe_memory, load_memory, load_memory_config, memory_attached

__all__ = [
    "MEMORY_CONFIG",
    "combine_memories",
    "describe_memory",
    "export_memory",
    "load_memory",
    "load_memory_config",
    "memory_attached",
    "merge_memory",
    "merge_to_gguf",
    "save_adapter",
    "share_weights",
]
