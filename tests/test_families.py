"""What holds for a memory in every family of hosts."""

import json
import math
import subprocess
import sys

import pytest
import torch
from families import (
    FAMILIES,
    GATED,
    HIDDEN,
    MIXTURES,
    VOCABULARY,
    each_family,
    logits,
    make_host,
    make_tokens,
    same,
    snapshot,
    weights_in,
)
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from locas_peft import LocasConfig, calibrate
from locas_peft.tuner import find_ffns, list_layers

R = 4
SCALING = 80.0  # large enough that a memory is seen


def make_memory(family: str, **kwargs) -> PeftModel:
    """A calibrated memory, fresh."""
    model = get_peft_model(make_host(family), LocasConfig(**{"r": R, "scaling": SCALING, **kwargs}))
    calibrate(model, [make_tokens()])
    return model


def learn(model: PeftModel, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=4.0)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=make_tokens(), labels=make_tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


DENSE = [family for family in FAMILIES if family not in MIXTURES]


@pytest.fixture(params=each_family())
def family(request) -> str:
    return request.param


def test_fresh_memory_changes_no_bit(family):
    expected = logits(make_host(family))
    model = get_peft_model(make_host(family), LocasConfig(r=R))
    assert torch.equal(logits(model), expected)
    calibrate(model, [make_tokens()])
    assert torch.equal(logits(model), expected)


def test_every_ffn_gets_clones_in_unit_rows_and_zero_values(family):
    model = make_memory(family)
    layers = list_layers(model)
    assert len(layers) == 2
    for layer in layers:
        assert layer.ffn.gated == (family in GATED)
        *rows, down = weights_in(layer)
        assert down.shape == (HIDDEN, R) and not layer.has_learned("default")
        slots = torch.tensor(layer.recorded_slots("default"))
        gate, up = layer.ffn.gate_and_up_rows(slots)
        host_rows = [gate, up] if layer.ffn.gated else [up]
        for weight, host in zip(rows, host_rows, strict=True):
            assert torch.equal(weight, torch.nn.functional.normalize(host, dim=-1))


@pytest.mark.parametrize("family", each_family(DENSE))
def test_topk_clones_the_most_active_slots(family):
    host = make_host(family)
    activities = []

    def note(module, args):
        activities.append(args[0].flatten(0, -2).abs().mean(dim=0))

    down = {"c_proj", "down_proj", "w2", "dense_4h_to_h", "fc2", "fc_out"}
    for name, module in host.named_modules():
        if name.rpartition(".")[2] in down and "attn" not in name:
            module.register_forward_pre_hook(note)
    logits(host)
    layers = list_layers(make_memory(family))
    for layer, activity in zip(layers, activities, strict=True):
        assert layer.recorded_slots("default") == activity.topk(R).indices.tolist()


@pytest.mark.parametrize("family", each_family(DENSE))
def test_the_papers_tau_is_the_mean_down_norm_over_r(family):
    for layer in list_layers(make_memory(family, output_scale="paper")):
        weight = layer.ffn.down.weight
        if family == "gpt2":
            weight = weight.T
        expected = weight.norm(dim=0).mean() / R  # of [D, F]
        torch.testing.assert_close(layer.locas_tau["default"], expected, rtol=1e-6, atol=0)
        assert layer.locas_input_scale["default"] == 1.0


def test_learns_is_saved_and_leaves_the_base_alone(family, tmp_path):
    base = snapshot(make_host(family))
    model = make_memory(family)
    losses = learn(model)
    assert losses[-1] < losses[0] - 0.1
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(make_host(family)))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_host(family), tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert same(model.unload(), base)


def test_merge_equals_unmerged_and_unmerge_restores_bits(family):
    model = make_memory(family)
    learn(model)
    expected = logits(model)
    before = snapshot(model)
    for _ in range(2):
        model.merge_adapter()
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
        model.unmerge_adapter()
        assert same(model, before)


@pytest.mark.parametrize(
    "kwargs", [{}, {"pad_to_multiple_of": 16}, {"layers_to_transform": [1]}], ids=str
)
def test_merged_checkpoint_is_plain(family, kwargs, tmp_path):
    model = make_memory(family, **kwargs)
    learn(model)
    expected = logits(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)
    merged.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=1e-4)
    if family in MIXTURES:
        return  # test_mixture.py looks at their widths
    (base_width,) = {ffn.width for ffn in find_ffns(make_host(family)).values()}
    multiple = kwargs.get("pad_to_multiple_of", 1)
    width = math.ceil((base_width + R) / multiple) * multiple
    assert {ffn.width for ffn in find_ffns(plain).values()} == {width}


@pytest.mark.parametrize("activation", ["relu", "gated-gelu"])
def test_memories_of_encoder_and_decoder_merge_into_a_plain_checkpoint(activation, tmp_path):
    sizes = {"d_model": HIDDEN, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = T5Config(
        vocab_size=VOCABULARY, **sizes, feed_forward_proj=activation, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    host = T5ForConditionalGeneration(config).eval()
    target = make_tokens(seed=2)
    base = logits(host, labels=target)
    config = LocasConfig(r=R, init_weights="random", scaling=SCALING)
    model = get_peft_model(host, config)
    learn(model, steps=1)
    expected, before = logits(model, labels=target), snapshot(model)
    assert (expected - base).abs().max() > 1e-3
    assert [layer.ffn.gated for layer in list_layers(model)] == [activation != "relu"] * 4
    model.merge_adapter()
    torch.testing.assert_close(logits(model, labels=target), expected, rtol=0, atol=1e-5)
    model.unmerge_adapter()
    assert same(model, before)
    model.merge_and_unload().save_pretrained(tmp_path)
    plain = T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert plain.config.d_ff == 24 + R
    torch.testing.assert_close(logits(plain, labels=target), expected, rtol=0, atol=1e-4)


def test_bf16_merge_is_within_bf16_rounding(family):
    exact = make_memory(family)
    learn(exact)
    expected = logits(exact)
    model = get_peft_model(make_host(family), LocasConfig(r=R, scaling=SCALING))
    model.load_state_dict(exact.state_dict())
    model.to(torch.bfloat16)

    def error(model):
        return (logits(model).float() - expected).square().mean().sqrt()

    # bf16's own error: host and memory rounded to bf16, not merged.
    own_error = error(model)
    assert error(model.merge_and_unload()) <= 1.5 * own_error


def test_a_plain_checkpoint_in_a_process_without_us(tmp_path):
    model = make_memory("phi3")
    learn(model)
    expected = logits(model)
    model.merge_and_unload().save_pretrained(tmp_path)
    script = (
        "import json, sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "tokens = torch.tensor(json.loads(sys.argv[1]))\n"
        "model = AutoModelForCausalLM.from_pretrained('.', attn_implementation='eager').eval()\n"
        "print(json.dumps(model(input_ids=tokens).logits.tolist()))\n"
        "assert 'locas_peft' not in sys.modules and 'peft' not in sys.modules\n"
    )
    command = [sys.executable, "-c", script, json.dumps(make_tokens().tolist())]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    found = torch.tensor(json.loads(run.stdout))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
