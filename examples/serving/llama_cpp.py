"""Serve a merged memory with llama.cpp's OpenAI server, of the package xllamacpp (pip install xllamacpp).

    locas study one.txt --model smollm2 --out one
    python examples/serving/llama_cpp.py one

The memory is merged, and llama.cpp's own converter, which must be on the PATH, makes a GGUF file of it. 20 questions
are asked at once. Each answer is compared with the greedy one of transformers with the memory itself, token by token.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers_answers import answer

CONVERTERS = ("convert_hf_to_gguf.py", "convert-hf-to-gguf")
"""The names under which llama.cpp's converter is installed."""


def serve(file: Path) -> Any:
    """Start a server in this process, on a port of its own; it ends with the process."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_parallel, parameters.verbosity = 4096, 4, -1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = torch.get_num_threads()
    # A float16 cache, and flash attention, which computes in float16, change log-probabilities by 0.01.
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(parameters)


def complete(url: str, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the greedy continuation of a prompt, as token ids."""
    body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "return_tokens": True}
    request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)["tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("memory", type=Path, help="a memory's folder")
    parser.add_argument("--max-tokens", type=int, default=32, help="of an answer")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        merged, file = Path(folder) / "merged", Path(folder) / "model.gguf"
        locas = [
            sys.executable,
            "-m",
            "locas_peft",
            "merge",
            arguments.memory,
            "--dtype",
            "float32",
        ]
        subprocess.run([*locas, "--out", merged], check=True)
        converter = next(filter(None, map(shutil.which, CONVERTERS)), CONVERTERS[0])
        subprocess.run([converter, merged, "--outfile", file, "--outtype", "f32"], check=True)
        server = serve(file)
    prompts, expected = answer({"base": None, "memory": arguments.memory}, arguments.max_tokens)
    with ThreadPoolExecutor() as pool:
        url = server.listening_address
        given = list(pool.map(lambda prompt: complete(url, prompt, arguments.max_tokens), prompts))
    same = sum(a == b for a, b in zip(given, expected["memory"], strict=True))
    other = sum(a != b for a, b in zip(expected["memory"], expected["base"], strict=True))
    print(f"{same} of {len(prompts)} answers are transformers'; {other} differ from the base's")
    print(json.dumps({"prompts": len(prompts), "same": same, "differ_from_base": other}))
    sys.exit(same != len(prompts))


if __name__ == "__main__":
    main()
