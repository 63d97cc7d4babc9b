"""Models of known shapes with random weights: for times, which do not depend on what a model has learned."""

from __future__ import annotations

import torch
from overhead import SHAPES, make_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from locas_peft.loading import DTYPES, choose_device

__all__ = ["SHAPES", "WINDOWS", "draw", "load"]

WINDOWS = {"tiny": 64, "qwen3-0.6b": 2048, "qwen3-1.7b": 2048}


def load(shape: str, dtype: str = "auto", device: str = "auto", seed: int = 0) -> PreTrainedModel:
    """Makes a model, frozen and in evaluation mode.

    Args:
        shape: a name in `SHAPES`.
        dtype: a name in `locas_peft.loading.DTYPES`; "auto" is bfloat16 on a GPU and float32 elsewhere.
        device: a torch device, or "auto".
        seed: of the weights.
    """
    place = choose_device(device)
    if dtype == "auto":
        dtype = "bfloat16" if place.type == "cuda" else "float32"
    torch.manual_seed(seed)
    with place:
        model = AutoModelForCausalLM.from_config(make_config(shape), dtype=DTYPES[dtype])
    return model.requires_grad_(False).eval()


def draw(model: PreTrainedModel, tokens: int, seed: int = 0) -> torch.LongTensor:
    """Draws a document of random tokens, LongTensor [T] on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (tokens,), generator=generator)
