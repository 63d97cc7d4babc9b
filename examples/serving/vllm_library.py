"""Serve a library with vLLM by the plug-in of this package: a request's `model` names a memory. Cold and warm times.

    locas memorize --manifest notes.jsonl --library users --model smollm2 --study
    locas export users/Ada --base-only --neurons 64 --dtype float32 --out served
    python examples/serving/vllm_library.py users served/base --vllm-python ../vllm/bin/python

vLLM's environment has this package too. The first request for each memory is timed alone (cold), then a third one
(warm), one after all others were asked (again), and one after vLLM has unloaded the memory (loaded). Its adapter
exists by then: cold less loaded is what the plug-in adds to vLLM's own loading. Then all memories and the base are
asked at once, with `--max-loras` slots, and each answer is compared with the greedy one of transformers, token by
token. At last a memory is forgotten while the server runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from vllm_server import complete, is_unknown, post, serve

from locas_peft.bases import load_base
from locas_peft.library import Library

VOCABULARY, PROMPT_TOKENS = 4000, 12


@torch.inference_mode()
def answer(
    library: Library, names: list[str], prompt: list[int], max_tokens: int
) -> dict[str, list[int]]:
    """Return transformers' greedy continuations, in float32; "base" is the base alone."""
    base, tokenizer = load_base(library.name_base(), dtype="float32", device="cpu")
    answers = {}
    for name in ["base", *names]:
        with library.attach(base, None if name == "base" else name) as model:
            ids = torch.tensor([prompt])
            output = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False,
                pad_token_id=0, temperature=None,
            )  # fmt: skip
        answers[name] = output[0, ids.shape[1] :].tolist()
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument(
        "base", type=Path, help="the folder that locas export --base-only has written"
    )
    parser.add_argument(
        "--vllm-python", default=os.environ.get("LOCAS_VLLM"), help="of an environment with vLLM"
    )
    parser.add_argument("--max-loras", type=int, default=4, help="memories in a batch")
    parser.add_argument("--max-lora-rank", type=int, default=64, help="as vLLM takes it")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer")
    parser.add_argument(
        "--compared", type=int, default=20, help="memories whose answers are compared"
    )
    parser.add_argument(
        "--forget", action="store_true", help="forget the last memory while the server runs"
    )
    arguments = parser.parse_args()
    if arguments.vllm_python is None:
        parser.error(
            "--vllm-python, or the environment variable LOCAS_VLLM, must name the python that has vLLM"
        )
    library, draw = Library(arguments.library), random.Random(0)
    names = sorted(library.list())
    prompt = draw.choices(
        range(3, VOCABULARY), k=PROMPT_TOKENS
    )  # one for all: no cache may mix them up
    os.environ["LOCAS_LIBRARY"] = str(arguments.library.resolve())
    options = [
        "--max-loras",
        str(arguments.max_loras),
        "--max-cpu-loras",
        str(max(len(names), arguments.max_loras)),
    ]
    options += ["--enforce-eager"]  # the server starts in half of the time

    with serve(arguments.vllm_python, arguments.base, {}, arguments.max_lora_rank, options) as url:
        complete(url, "base", prompt, arguments.max_tokens)
        first = {name: [timed(url, name, prompt) for _ in range(3)] for name in names}
        again = [timed(url, name, prompt) for name in names]  # after others took its slot
        loaded = []
        for name in names:
            post(f"{url}/v1/unload_lora_adapter", {"lora_name": name})
            loaded.append(timed(url, name, prompt))
        chosen = ["base", *names[: arguments.compared]]
        began = time.perf_counter()
        with ThreadPoolExecutor(len(chosen)) as pool:
            answers = pool.map(
                lambda name: complete(url, name, prompt, arguments.max_tokens), chosen
            )
            given = dict(zip(chosen, answers, strict=True))
        seconds = time.perf_counter() - began
        refused = [
            is_unknown(url, name) for name in ("nobody", "../served", f"{names[0]}/../{names[-1]}")
        ]
        if arguments.forget:
            library.forget(names[-1])
            refused.append(is_unknown(url, names[-1]))
    if arguments.forget:
        chosen = [name for name in chosen if name != names[-1]]
    expected = answer(library, chosen[1:], prompt, arguments.max_tokens)
    wrong = [name for name in chosen if given[name] != expected[name]]
    for name in wrong:
        print(f"{name}: {given[name]}, transformers: {expected[name]}")
    print(
        f"{len(chosen) - len(wrong)} of {len(chosen)} answers as in transformers, the base's among them"
    )
    cold, warm = ([times[index] for times in first.values()] for index in (0, -1))
    result = {
        "memories": len(names),
        "same": len(chosen) - len(wrong),
        "of": len(chosen),
        "refused": refused,
    }
    result |= {
        "first_cold_s": cold[0],
        "cold_s": statistics.median(cold),
        "warm_s": statistics.median(warm),
    }
    result |= {"cold_20_s": statistics.median(cold[:20]), "again_s": statistics.median(again)}
    result |= {"loaded_s": statistics.median(loaded)}
    result |= {"tokens_per_second": len(chosen) * arguments.max_tokens / seconds}
    result["differ_from_base"] = sum(expected[name] != expected["base"] for name in chosen)
    print(json.dumps(result))
    sys.exit(bool(wrong) or not all(refused))


def timed(url: str, name: str, prompt: list[int]) -> float:
    """Return the seconds to the first token."""
    began = time.perf_counter()
    complete(url, name, prompt, 1)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
