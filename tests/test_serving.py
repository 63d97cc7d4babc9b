"""Engines that do not know LOCAS answer as transformers does: vLLM with a memory for each request, and llama.cpp.

LOCAS_VLLM names the python of vLLM's environment. The package xllamacpp has llama.cpp; its converter is on the PATH.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from locas_peft import demo
from locas_peft.bases.gguf import is_installed

ROOT = Path(__file__).parents[1]
CONVERTERS = ("convert_hf_to_gguf.py", "convert-hf-to-gguf")
PAGES = {
    "lighthouse": (demo.PAGES, 8),
    "bee": (demo.PAGES, 16),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed("smollm2"), reason="SmolLM2 is not installed"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A library of two memories of SmolLM2, of different widths."""
    folder = tmp_path_factory.mktemp("library")
    options = "--model smollm2 --dtype float32 --device cpu --window 128 --readings 4 --anchor 0"
    for name, (texts, r) in PAGES.items():
        command = [sys.executable, "-m", "locas_peft", "read", texts / f"{name}.txt"]
        command += ["--library", folder, "--name", name, "--r", str(r)]
        subprocess.run([*command, *options.split()], check=True)
    return folder


def run_example(name: str, *arguments) -> dict:
    command = [sys.executable, ROOT / "examples" / "serving" / name, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(
    "LOCAS_VLLM" not in os.environ, reason="LOCAS_VLLM does not name a python with vLLM"
)
def test_vllm_answers_each_request_with_its_memory(library):
    found = run_example("vllm_server.py", library)
    assert found["prompts"] == found["renewed"] == 20 and found["removed"] and found["refused"]
    assert found["same"] == {"base": 20, "lighthouse": 20, "bee": 20}
    assert all(found["differ_from_base"][name] >= 10 for name in PAGES)


@pytest.mark.skipif(
    not any(map(shutil.which, CONVERTERS)), reason="llama.cpp's converter is not on the PATH"
)
def test_llama_cpp_answers_with_the_merged_memory(library):
    pytest.importorskip("xllamacpp")
    found = run_example("llama_cpp.py", library / "lighthouse")
    assert (found["prompts"], found["same"]) == (20, 20)
    assert found["differ_from_base"] >= 10
