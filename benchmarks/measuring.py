"""What the benchmarks share: models of known shapes, clocks, the machine's description, Markdown tables, and pairs."""

from __future__ import annotations

import copy
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from locas_peft.asking import (
    SHORT_PROMPT,
    Answer,
    Question,
    answer_in_batches,
    check_room,
    encode_question,
    find_pad_token,
)
from locas_peft.asking.continuation import first_line
from locas_peft.bases import DTYPES, choose_device
from locas_peft.exchanges import Exchange
from locas_peft.library import Library, make_sample
from locas_peft.model import CausalLM
from locas_peft.stages import Place, StudyRecord, StudySettings, parse_method, study
from locas_peft.text import tokenize

RECITED_TOKENS = 64
"""The most tokens of what a memory recites."""

_QWEN3 = {
    "num_hidden_layers": 28,
    "vocab_size": 151936,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "vocab_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128, **_QWEN3},
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128, **_QWEN3},
}


def load_shape(shape: str, dtype: str = "auto", device: str = "auto") -> PreTrainedModel:
    """Make a model with random weights, frozen and in evaluation mode: times do not depend on what a model learned.

    Args:
        shape: a name in `SHAPES`.
        dtype: a name in `locas_peft.bases.DTYPES`; "auto" is bfloat16 on a GPU and float32 elsewhere.
        device: a torch device, or "auto".
    """
    torch_device = choose_device(device)
    if dtype == "auto":
        dtype = "bfloat16" if torch_device.type == "cuda" else "float32"
    # The anchor's text begins with the token `bos_token_id`.
    config = Qwen3Config(
        **SHAPES[shape], max_position_embeddings=40960, tie_word_embeddings=True, bos_token_id=0
    )
    torch.manual_seed(0)
    with torch_device:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    return model.requires_grad_(False).eval()


def draw_tokens(model: PreTrainedModel, tokens: int) -> torch.LongTensor:
    """Draw a document of random tokens, LongTensor [T] on the CPU."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.config.vocab_size, (tokens,), generator=generator)


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Make a second model with the same weights, so that an adapter on one does not touch the other's layers."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def wait(device: torch.device) -> float:
    """Wait until a GPU is idle, and return the seconds that this took; do nothing for a CPU."""
    began = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


class Clock:
    """Wall and processor time since its construction. On a GPU both ends wait until the device is idle."""

    def __init__(self, device: torch.device):
        self._device = device
        wait(device)
        self._began = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Return seconds of wall time and of processor time."""
        wait(self._device)
        return time.perf_counter() - self._began[0], time.process_time() - self._began[1]


def compare(seconds: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Return the ratio of the fastest rounds, and median, least and greatest ratio of a round."""
    ratios = [a / b for a, b in zip(seconds, base, strict=True)]
    fastest = min(seconds) / min(base)
    return {
        "fastest": fastest,
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
    }


def _find_commit() -> str | None:
    """Return the commit of this folder; None without git or outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # no git
        return None
    return found.stdout.strip() or None


# Not later: a commit that is made during a run is not the one that was measured.
COMMIT = _find_commit()


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return hardware, versions, and the commit that was current when the program began."""
    cpu = f"CPU, {platform.machine()}, {os.cpu_count()} cores"
    return {
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "commit": COMMIT,
    }


def make_study(label: str, passes: int | None) -> StudySettings:
    """Return the settings of a study by a method's label: NAME[@WIDTH][:RATE], and "+" its anchor where it has one."""
    spec, _, anchor = label.partition("+")
    method, fields = parse_method(spec)
    if anchor:
        fields["anchor"] = float(anchor)
    return StudySettings(method=method, passes=passes, **fields)


def study_into(
    library: Library,
    name: str,
    base: PreTrainedModel,
    tokenizer: Any,
    text: str,
    exchanges: Sequence[Exchange],
    settings: StudySettings,
    start: Path | None = None,
) -> StudyRecord:
    """Study given exchanges about a text into a memory of a library; `start` is a memory to go on with."""
    place = Place(out=library.choose_folder(name), title=name, sample=make_sample(text, start))
    input_ids = tokenize(tokenizer, text)
    return study(base, tokenizer, input_ids, settings, place, start=start, exchanges=exchanges)


def make_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table, with the numbers right of the first column."""
    lines = [
        "| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in (head, *rows)
    ]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:]])


def encode_pair(tokenizer, prompt: str, target: str) -> tuple[list[int], list[int]]:
    """Turn a prompt, which may be empty, and the text after it into token ids, split where the target begins.

    Both are tokenized together, so that the target's tokens are those of the whole text. Blanks between the two belong
    to the target. The prompt's ids begin with the tokenizer's begin-of-text token (or, if it has none, its end-of-text
    token), so that the target's first token can be scored.
    """
    if not target:
        raise ValueError("target must not be empty: give the text that is to be scored")
    text, prompt = prompt + target, prompt.rstrip()
    whole = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    known = (
        tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"] if prompt else []
    )
    split = min(len(known), len(whole) - 1)
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return ([] if first is None else [first]) + whole[:split], whole[split:]


@torch.inference_mode()
def recite(
    model: nn.Module, tokenizer, questions: Sequence[str], count: int = 10
) -> list[list[str]]:
    """Return for each question the `count` likeliest answers that a beam search finds, or fewer, the likeliest first.

    A memory that has learned passages may recite a wrong one; the right one is often among the first few. The search
    has two beams an answer, and orders answers by their mean log-probability a token. For errors see `check_room`.
    """
    options: dict[str, Any] = {
        "num_beams": 2 * count,
        "num_return_sequences": count,
        "do_sample": False,
    }
    # What the call leaves open, `generate` takes from the model's generation config.
    options |= {**dict.fromkeys(("temperature", "top_p", "top_k")), "repetition_penalty": 1.0}
    options |= {
        "no_repeat_ngram_size": 0,
        "max_new_tokens": RECITED_TOKENS,
        "pad_token_id": find_pad_token(tokenizer),
    }
    recited, device = [], CausalLM(model).device
    for number, question in enumerate(questions):
        prompt = encode_question(tokenizer, question)
        check_room(model, prompt, RECITED_TOKENS, f"prompt {number}")
        ids = torch.tensor([prompt], device=device)
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        texts = tokenizer.batch_decode(output[:, len(prompt) :], skip_special_tokens=True)
        recited.append(list(dict.fromkeys(filter(None, map(first_line, texts)))))
    return recited


def answer_briefly(
    model: nn.Module, tokenizer, questions: Sequence[Question], contexts: Sequence[str]
) -> list[Answer]:
    """Answer questions in a few words, each with a text before it; "" for none."""
    prompts = [
        encode_question(tokenizer, asked.question, SHORT_PROMPT, context)
        for asked, context in zip(questions, contexts, strict=True)
    ]
    texts = answer_prompts(model, tokenizer, prompts)
    return [Answer(asked, text) for asked, text in zip(questions, texts, strict=True)]


def answer_prompts(
    model: nn.Module, tokenizer, prompts: Sequence[list[int]], **options: Any
) -> list[str]:
    """Answer prompts greedily, in their order; `options` are those of `answer_in_batches`."""
    texts = [""] * len(prompts)
    for numbers, answers in answer_in_batches(model, tokenizer, prompts, **options):
        for number, answer in zip(numbers, answers, strict=True):
            texts[number] = answer
    return texts


def is_exact(given: str, gold: str) -> bool:
    """Return whether an answer is the gold phrase, case-folded, without leading articles and final full stops."""
    both = (
        re.sub(r"^(a|an|the)\s+", "", " ".join(each.casefold().split())).rstrip(".")
        for each in (given, gold)
    )
    return next(both) == next(both)
