"""What transformers answers, greedily, without and with a memory: the reference for the engines in this folder."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from locas_peft.asking import encode_question, find_pad_token
from locas_peft.bases import load_base
from locas_peft.demo import load_page_questions
from locas_peft.memories import load_memory, load_memory_config


def answer(
    memories: dict[str, Path | None], max_tokens: int
) -> tuple[list[list[int]], dict[str, list[list[int]]]]:
    """Ask the demo's 20 questions of a float32 base with each memory of it, or with None.

    Returns:
        The prompts, and for each name the answers, as token ids. An answer stops after its end token.
    """
    (name,) = {
        load_memory_config(memory)["base_model_name_or_path"]
        for memory in memories.values()
        if memory
    }
    base, tokenizer = load_base(name, dtype="float32", device="cpu")
    prompts = [encode_question(tokenizer, asked.question) for asked in load_page_questions()]
    answers = {}
    for each, memory in memories.items():
        model = base if memory is None else load_memory(base, memory).eval()
        answers[each] = _generate(model, tokenizer, prompts, max_tokens)
        base = base if memory is None else model.unload()
    return prompts, answers


@torch.inference_mode()
def _generate(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    max_tokens: int,
) -> list[list[int]]:
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    output = model.generate(
        **batch,
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=find_pad_token(tokenizer),
        temperature=None,
    )
    return [
        _cut(ids, model.generation_config.eos_token_id)
        for ids in output[:, batch["input_ids"].shape[1] :].tolist()
    ]


def _cut(ids: list[int], end: int) -> list[int]:
    """Return the ids up to the end token, with it."""
    return ids[: ids.index(end) + 1] if end in ids else ids
