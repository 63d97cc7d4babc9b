"""Merging in inference mode, and tensors that are made under another default device."""

import torch
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from locas_peft import LocasConfig
from locas_peft.tuner import find_ffns
from locas_peft.tuner.initialization import clone_random


def make_base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 50}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def test_a_base_that_was_merged_in_inference_mode_can_be_trained():
    model = get_peft_model(make_base(), LocasConfig(r=4))
    ids = torch.randint(0, 50, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.inference_mode():
        model.merge_adapter()
        model(input_ids=ids)
        model.unmerge_adapter()
    assert not any(weight.is_inference() for weight in model.parameters())
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = [weight.grad for name, weight in model.named_parameters() if "locas_down" in name]
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_random_clones_do_not_follow_the_default_device():
    ffn = next(iter(find_ffns(make_base()).values()))
    with torch.device("meta"):
        rows = clone_random(ffn, None, 4, torch.Generator("cpu").manual_seed(0))
    assert not rows.up.is_meta
