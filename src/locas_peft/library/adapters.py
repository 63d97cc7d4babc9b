"""The memories of a library as LoRA adapters for an engine, made from their files when they are asked for, and kept.

They are in the folder `ADAPTERS` of the library: `Library.forget` deletes them with the memory.
"""

import hashlib
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ..files import staged
from ..memories import MEMORY_CONFIG
from ..memories.base_sample import may_be_same_weights
from ..memories.guards import load_memory_file
from ..memories.loading import find_files
from ..memories.signing import check_signature
from ..memories.tensor_file import find_tensor_file
from ..slots.lora_export import tensors_to_lora
from .library import ADAPTERS, Library

__all__ = ["Adapters"]

_GRACE_SECONDS = 600.0  # after its last use: a request in the engine's queue may need an adapter


class Adapters:
    """The adapters of a library's memories, of at most `most_bytes`: the least recently used ones are deleted."""

    def __init__(self, library: Library, most_bytes: float):
        self._library, self._most_bytes, self._base = library, most_bytes, None
        self._root = library.folder / ADAPTERS

    def make(self, name: str, folder: str) -> str:
        """Return the folder of a memory's adapter for the base that `export_memory` wrote into a folder.

        Another content has another folder. What cannot be served, or is not signed as needed, is a `ValueError`.
        """
        if self._base is None:
            config = AutoConfig.from_pretrained(folder)
            if not hasattr(config, "locas_widened"):
                raise ValueError(
                    f"the served model must be of locas export --base-only, got {folder!r}: export it"
                )
            with torch.device("meta"):
                self._base = AutoModelForCausalLM.from_config(config)
        memory, adapter, widened = (
            self._library.find(name),
            self._find(name),
            self._base.config.locas_widened,
        )
        if self._library.key is not None:
            check_signature(memory, self._library.key)
        if not adapter.is_dir():
            config, path = find_files(memory)
            record = getattr(config, "record", None) or {}
            own = dict(record.get("host") or {})
            host = widened["host"]
            weights = own.pop("weights", None)
            if own | {"weights": host["weights"]} != host or not may_be_same_weights(
                weights, host["weights"]
            ):
                raise ValueError(
                    f"memory must be of the base that is served, got {name!r} of another: export its own"
                )
            tensors = load_memory_file(path, config)
            lora, tensors = tensors_to_lora(tensors, config, self._base, widened["neurons"])
            with staged(adapter) as new:
                lora.save_pretrained(str(new))
                save_file(tensors, new / "adapter_model.safetensors", metadata={"format": "pt"})
        os.utime(adapter)
        self._sweep()
        return str(adapter)

    def is_current(self, name: str, adapter: str) -> bool:
        """Return whether `make` would return this folder and need not make it; mark it as used. Others are current."""
        with suppress(OSError, ValueError):
            if Path(adapter).is_relative_to(self._root):
                os.utime(adapter)
            return not Path(adapter).is_relative_to(self._root) or str(self._find(name)) == adapter
        return False

    def _find(self, name: str) -> Path:
        """Return the place of a memory's adapter, which changes with the numbers, sizes and times of the files."""
        memory = self._library.find(name)
        files = (
            memory / MEMORY_CONFIG,
            find_tensor_file(memory) or "",
            f"{self._base.name_or_path}/config.json",
        )
        states = [(file.st_ino, file.st_size, file.st_ctime_ns) for file in map(os.stat, files)]
        return self._root / name / hashlib.sha256(repr(states).encode()).hexdigest()[:32]

    def _sweep(self) -> None:
        """Delete adapters of memories that are gone, those of former contents, and above the limit the oldest ones."""
        kept, names = 0, set()
        for adapter in sorted(
            self._root.glob("*/[!.]*"), key=lambda folder: -folder.stat().st_mtime
        ):
            name, late = adapter.parent.name, time.time() - adapter.stat().st_mtime > _GRACE_SECONDS
            kept += sum(file.stat().st_size for file in adapter.iterdir())
            if name not in self._library or (late and (name in names or kept > self._most_bytes)):
                shutil.rmtree(adapter, ignore_errors=True)
            names.add(name)
