"""Merging in inference mode, and tensors that are made under another default device."""

import pytest
import torch
from families import make_host, make_model, make_tokens, same, snapshot

from locas_peft.tuner import find_ffns
from locas_peft.tuner.initialization import clone_random

# FFNs of gated projections, of Conv1D, with gains, and a mixture of experts.
KINDS = [("llama", {}), ("gpt2", {}), ("llama", {"gains": True}), ("mixtral", {})]


def has_inference_tensors(model) -> bool:
    return any(weight.is_inference() for weight in model.parameters())


@pytest.mark.parametrize(("family", "fields"), KINDS)
def test_a_base_that_was_merged_in_inference_mode_can_be_trained(family, fields):
    model = make_model(family, **fields)
    before = snapshot(model)
    ids = make_tokens()
    with torch.inference_mode():
        model.merge_adapter()
        model(input_ids=ids)
        model.unmerge_adapter()
    assert not has_inference_tensors(model)
    assert same(model, before)
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = [weight.grad for name, weight in model.named_parameters() if "locas_down" in name]
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


@pytest.mark.parametrize(("family", "fields"), KINDS)
def test_a_base_that_keeps_a_memory_from_inference_mode_can_be_trained(family, fields):
    model = make_model(family, **fields)
    with torch.inference_mode():
        merged = model.merge_and_unload()
    assert not has_inference_tensors(merged)
    ids = make_tokens()
    merged.requires_grad_(True)
    merged(input_ids=ids, labels=ids).loss.backward()
    assert any(weight.grad is not None for weight in merged.parameters())


def test_random_clones_do_not_follow_the_default_device():
    ffn = next(iter(find_ffns(make_host("llama")).values()))
    with torch.device("meta"):
        rows = clone_random(ffn, None, 4, torch.Generator("cpu").manual_seed(0))
    assert not rows.up.is_meta
