"""The peak of the memory in use while a stage runs."""

import re
import sys
from contextlib import suppress
from pathlib import Path

import torch

__all__ = ["PeakMemory"]


class PeakMemory:
    """Records the peak of the memory in use, in bytes: torch's on CUDA, else the process's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError):
            # Resets the peak in /proc/self/status.
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int | None:
        """Return the peak since this object was made, on macOS since the process began.

        None where the system keeps none.
        """
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        with suppress(OSError):
            status = Path("/proc/self/status").read_text()
            peak = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
            if peak is not None:
                return int(peak[1]) * 1024
        # Windows has no module `resource`.
        with suppress(ImportError):
            import resource

            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return None
