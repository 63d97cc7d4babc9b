"""Saved memories: their folder, loading and conversion, whatever taught them."""

from .checkpoint import CHECKPOINT_FOLDER
from .conversion import export_memories, merge_memory, save_adapter, share_weights
from .folder import FILES, MEMORY_CONFIG, RECORD, check_vacant, save_memory, upload_memory
from .loading import describe_memory, load_memory, load_memory_config, memory_attached, open_memory

__all__ = [
    "CHECKPOINT_FOLDER",
    "FILES",
    "MEMORY_CONFIG",
    "RECORD",
    "check_vacant",
    "describe_memory",
    "export_memories",
    "load_memory",
    "load_memory_config",
    "memory_attached",
    "merge_memory",
    "open_memory",
    "save_adapter",
    "save_memory",
    "share_weights",
    "upload_memory",
]
