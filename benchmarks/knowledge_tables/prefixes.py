"""PEFT's CARTRIDGE: a prefix of trained keys and values, with as many parameters as the memory."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from paper_tables.baselines import HIGH_RATES, PrefixModel, training_fields
from peft import CartridgeConfig, get_peft_model
from peft.tuners.cartridge.utils import initialize_kv_prefix_from_past_key_values
from torch import Tensor

from locas_peft import TestTimeTrainer
from locas_peft.asking.continuation import continue_inputs, first_line, pad_left
from locas_peft.asking.prompts import list_stops
from locas_peft.evaluation import Unit
from locas_peft.model import CausalLM
from locas_peft.text import tokenize

from .bench import KnowledgeBench
from .documents import Document
from .memories import SideEffects

__all__ = ["answer_after_prefix", "open_prefix"]

BATCH = 16


@contextmanager
def open_prefix(
    bench: KnowledgeBench, document: Document, start: str, memory: Unit
) -> Iterator[tuple[PrefixModel, dict[str, Any]]]:
    """Train a prefix on a text, in the loop that reads; yield its model and what it cost.

    Args:
        start: "text" for the keys and values of the text's first tokens, "random".
        memory: its number of parameters is the most that the prefix has.
    """
    ids = tokenize(bench.tokenizer, document.text)
    effects = SideEffects(bench, "recompute")
    began = time.process_time()
    torch.manual_seed(0)
    config = _make_config(bench, ids, start, memory)
    model = get_peft_model(bench.base, config)
    if start == "text":
        cache = _read(bench, ids[: config.num_virtual_tokens])
        initialize_kv_prefix_from_past_key_values(model, past_key_values=cache)
    parameters = [weight for weight in model.prompt_encoder.parameters() if weight.requires_grad]
    fields = {**training_fields(bench, HIGH_RATES[0]), "context": "recompute"}
    chunks = math.ceil(len(ids) / bench.common["stride"])
    fields["readings"] = max(bench.scale.prefix_steps // chunks, 1)
    prefix = PrefixModel(model)
    trainer = TestTimeTrainer(prefix, parameters=parameters, **fields)
    for _ in trainer.read(ids):
        pass
    cost = {"processor_seconds": time.process_time() - began}
    cost["parameters"] = sum(weight.numel() for weight in parameters)
    model.requires_grad_(False)
    yield prefix, {**cost, **effects.measure(prefix)}


@torch.inference_mode()
def _read(bench: KnowledgeBench, ids: Tensor) -> Any:
    """Return the keys and values of a text [T] under the base."""
    rows = ids[None].to(bench.base.device)
    return bench.base(rows, use_cache=True, logits_to_keep=1).past_key_values


def _make_config(bench: KnowledgeBench, ids: Tensor, start: str, memory: Unit) -> CartridgeConfig:
    """Return the config of a prefix that has no more parameters than the memory."""
    numbers_a_token = 0
    for layer in _read(bench, ids[:1]).layers:
        numbers_a_token += layer.keys.numel() + layer.values.numel()
    figures = memory.load()["figures"]
    tokens = max(figures.get("parameters", 0) // numbers_a_token, 2)
    if start == "text":
        tokens = min(tokens, len(ids))
    return CartridgeConfig(num_virtual_tokens=tokens, task_type="CAUSAL_LM")


@torch.inference_mode()
def answer_after_prefix(
    prefix: PrefixModel, tokenizer: Any, prompts: Sequence[list[int]], max_new_tokens: int
) -> list[str]:
    """Answer prompts greedily; return the first line of each answer."""
    host = CausalLM(prefix.model.get_base_model())
    stops = list_stops(tokenizer)
    texts = []
    for begin in range(0, len(prompts), BATCH):
        rows = prompts[begin : begin + BATCH]
        inputs: dict[str, Any] = pad_left(rows, host.device)
        cache = prefix.model.get_prompt(batch_size=len(rows))
        count = cache.get_seq_length()
        before = torch.ones(len(rows), count, dtype=torch.long, device=host.device)
        inputs["attention_mask"] = torch.cat([before, inputs["attention_mask"]], 1)
        inputs["position_ids"] += count
        inputs["past_key_values"] = cache
        continued = continue_inputs(host, inputs, max_new_tokens, stops=stops)
        for text in tokenizer.batch_decode(continued, skip_special_tokens=True):
            texts.append(first_line(text))
    return texts
