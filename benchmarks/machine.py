"""What a benchmark ran on."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

import peft
import torch
import transformers


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Gives hardware, versions and the commit."""
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        commit = ""
    cpu = f"CPU, {platform.machine()}, {os.cpu_count()} cores"
    return {
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "commit": commit or None,
    }
