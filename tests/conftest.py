"""One thread for each of several test processes (`pytest -n`): more would only wait for each other."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = (
        "1"  # before torch is imported; the commands that tests start inherit it
    )


@pytest.fixture(scope="session")
def load_benchmark():
    """Return a function that loads a script of `benchmarks/`, which may import its neighbours, as a module."""

    def load(name: str):
        path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(
            spec
        )  # dataclasses look it up
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(path.parent)
            spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def write_report(load_benchmark):
    """The function of `benchmarks/report.py`, which needs matplotlib."""
    pytest.importorskip("matplotlib")
    return load_benchmark("report").write_report


@pytest.fixture
def fresh_graphs():
    """Let a test compile anew, and leave nothing compiled and no counts to the others."""
    from torch import _dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


@pytest.fixture
def traced(monkeypatch):
    """Trace, without the compiler, which takes most of the time."""
    import torch

    compile_ = torch.compile

    def trace(model, mode, **options):
        # The mode is of the compiler.
        return compile_(model, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", trace)
