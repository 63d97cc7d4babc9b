"""How much memory a reading had in use at the most."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch


class PeakMemory:
    """The highest memory in use from now on, in bytes: torch's on CUDA, the process's resident size elsewhere.

    There is one record a process (on CUDA: a device), which a new object begins afresh where the system lets it: on
    Linux and on CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: begins the record of /proc/self/status afresh
        except OSError:
            pass

    def read(self) -> int | None:
        """Gives the peak so far; None on systems that keep none."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        status = Path("/proc/self/status")  # Linux: what getrusage tells may be of the process that started this one
        found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
        if found:
            return int(found[1]) * 1024
        try:
            import resource
        except ImportError:  # Windows
            return None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
