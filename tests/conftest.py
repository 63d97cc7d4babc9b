"""One thread for each of several test processes (`pytest -n`): more would only wait for each other."""

import importlib.util
import os
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; the commands that tests start inherit it


@pytest.fixture
def write_report():
    """The function of `benchmarks/report.py`, which needs matplotlib."""
    pytest.importorskip("matplotlib")
    path = Path(__file__).parents[1] / "benchmarks" / "report.py"
    spec = importlib.util.spec_from_file_location("report", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module.write_report
