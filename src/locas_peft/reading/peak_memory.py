"""The highest memory in use during a reading."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path

import torch

__all__ = ["PeakMemory"]


class PeakMemory:
    """Records the highest memory in use from now on, in bytes: torch's on CUDA, the process's resident size elsewhere.

    Each process (on CUDA: each device) has one record. A new object resets it on Linux and on CUDA; on other systems
    the record covers the whole life of the process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak in /proc/self/status

    def read(self) -> int | None:
        """Return the peak so far; None on systems that record none."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        status = Path("/proc/self/status")  # Linux: getrusage may return the peak of the parent process
        found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
        if found:
            return int(found[1]) * 1024
        try:
            import resource
        except ImportError:  # Windows
            return None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
