"""Engines that do not know LOCAS answer as transformers does: vLLM with a memory for each request, and llama.cpp.

LOCAS_VLLM names the python of vLLM's environment. The package xllamacpp has llama.cpp; its converter is on the PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from locas_peft.bases.gguf import is_installed

ROOT = Path(__file__).parents[1]
CONVERTERS = ("convert_hf_to_gguf.py", "convert-hf-to-gguf")
PAGES = {
    "lighthouse": (ROOT / "src" / "locas_peft" / "demo", 8),
    "bee": (ROOT / "benchmarks" / "pages", 16),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed("smollm2"), reason="SmolLM2 is not installed"),
]


@pytest.fixture(scope="module")
def memories(tmp_path_factory):
    """The folders of two memories of SmolLM2 of different widths."""
    home = tmp_path_factory.mktemp("memories")
    for name, (folder, r) in PAGES.items():
        options = f"--model smollm2 --dtype float32 --device cpu --r {r} --window 128 --readings 4 --anchor 0"
        command = [
            sys.executable,
            "-m",
            "locas_peft",
            "memorize",
            folder / f"{name}.txt",
            "--out",
            home / name,
        ]
        subprocess.run([*command, *options.split()], check=True)
    return [home / name for name in PAGES]


def run_example(name: str, *arguments) -> dict:
    command = [sys.executable, ROOT / "examples" / "serving" / name, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(
    "LOCAS_VLLM" not in os.environ, reason="LOCAS_VLLM does not name a python with vLLM"
)
def test_vllm_answers_each_request_with_its_memory(memories):
    found = run_example("vllm_server.py", *memories)
    assert found["prompts"] == 20 and found["removed"]
    assert found["same"] == {"base": 20, "lighthouse": 20, "bee": 20}
    assert all(found["differ_from_base"][name] >= 10 for name in PAGES)


@pytest.mark.skipif(
    "LOCAS_VLLM" not in os.environ, reason="LOCAS_VLLM does not name a python with vLLM"
)
def test_vllm_serves_a_library_by_name(tmp_path):
    """That python has this package too. One slot for two memories: each, and the base, is answered as alone."""
    locas = [sys.executable, "-m", "locas_peft"]
    for name in ("lighthouse", "bee", "forgotten"):
        text = PAGES.get(name, PAGES["bee"])[0] / f"{'bee' if name == 'forgotten' else name}.txt"
        options = ["--r", "8", "--window", "64", "--stride", "32", "--anchor", "0", "--readings", "4", "--device", "cpu"]
        command = [
            *locas,
            "memorize",
            text,
            "--library",
            tmp_path / "users",
            "--name",
            name,
            *options,
        ]
        subprocess.run(command, check=True)
    export = [
        *locas,
        "export",
        tmp_path / "users" / "bee",
        "--base-only",
        "--dtype",
        "float32",
        "--out",
        tmp_path / "served",
    ]
    subprocess.run(export, check=True)
    options = ["--max-loras", "1", "--max-lora-rank", "8", "--forget"]
    found = run_example(
        "vllm_library.py", tmp_path / "users", tmp_path / "served" / "base", *options
    )
    assert (found["same"], found["of"], found["refused"]) == (3, 3, [True] * 4)
    assert found["differ_from_base"] >= 1


@pytest.mark.skipif(
    not any(map(shutil.which, CONVERTERS)), reason="llama.cpp's converter is not on the PATH"
)
def test_llama_cpp_answers_with_the_merged_memory(memories):
    pytest.importorskip("xllamacpp")
    found = run_example("llama_cpp.py", memories[0])
    assert (found["prompts"], found["same"]) == (20, 20)
    assert found["differ_from_base"] >= 10
