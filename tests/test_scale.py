"""The measured scale: two hosts with one function learn the same, however that function is spread over weights."""

import copy
import math

import pytest
import torch
from families import logits, make_host, make_model, make_tokens, rewrite, weights_in
from peft import PeftModel, get_peft_model
from training import SETTINGS, make_ids

from locas_peft import (
    LocasConfig,
    SlotWriter,
    TestTimeTrainer,
    calibrate,
    uncalibrated_memories,
)
from locas_peft.tuner import find_ffns, list_layers
from locas_peft.tuner.scale import ALPHA, KAPPA, measure_input_scale, measure_output_scale

NORMS = {"opt": "final_layer_norm"}
# Gated, or with ReLU: up times c and down divided by c is the same function.
HOMOGENEOUS = ("llama", "phi3", "opt")


@torch.no_grad()
def rescale_norms(host, factor, norm="post_attention_layernorm"):
    """Multiply the norm before each FFN by a factor, and divide the rows that read it."""
    for name, ffn in find_ffns(host).items():
        layer = host.get_submodule(name.rpartition(".")[0])
        for parameter in getattr(layer, norm).parameters():
            parameter.mul_(factor)
        for projection in inlets_of(ffn):
            projection.weight.div_(factor)


def inlets_of(ffn):
    """The projections that read the FFN's input."""
    parts = {ffn.parts.gate, ffn.parts.up, ffn.parts.gate_up} - {None}
    return [ffn.projection(part) for part in parts]


@torch.no_grad()
def rescale_ups(host, factor):
    """Multiply the up rows of each FFN by a factor, biases included, and divide the down columns."""
    for ffn in find_ffns(host).values():
        first = ffn.width if ffn.parts.gate_up else 0
        for parameter in ffn.projection(ffn.parts.inlet).parameters():
            parameter[first:].mul_(factor)
        ffn.down.weight.div_(factor)


@torch.no_grad()
def permute_neurons(host):
    for ffn in find_ffns(host).values():
        order = torch.randperm(ffn.width, generator=torch.Generator().manual_seed(5))
        rows = torch.cat([order, order + ffn.width]) if ffn.parts.gate_up else order
        for projection in inlets_of(ffn):
            for parameter in projection.parameters():
                parameter.copy_(parameter[rows])
        ffn.down.weight.copy_(ffn.down.weight[:, order])


def perplexity_while_learning(host, strategy, scaling=100.0):
    """Read a text that repeats itself, so that there is something to learn."""
    model = get_peft_model(host, LocasConfig(r=8, init_weights=strategy, scaling=scaling))
    steps = [SlotWriter(model, epsilon=0.5, slots_per_chunk=1)] if strategy == "write" else []
    trainer = TestTimeTrainer(model, steps=steps, **SETTINGS)
    list(trainer.read(make_ids(16).repeat(6)))
    return trainer.perplexity


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        ("llama", "topk"),
        ("phi3", "topk"),
        ("opt", "topk"),
        ("llama", "gaussian"),
        ("gpt_neox", "write"),
        pytest.param("gpt_neox", "topk", marks=pytest.mark.slow),
        pytest.param("llama", "activation", marks=pytest.mark.slow),
        pytest.param("opt", "write", marks=pytest.mark.slow),
    ],
)
def test_hosts_with_one_function_learn_the_same(family, strategy):
    host = make_host(family)
    expected = perplexity_while_learning(copy.deepcopy(host), strategy)
    still = perplexity_while_learning(copy.deepcopy(host), strategy, scaling=1e-6)
    assert abs(expected / still - 1) > 0.02  # the memory matters
    norm = NORMS.get(family, "post_attention_layernorm")
    for factor in (1 / 16, 16):
        twin = copy.deepcopy(host)
        rescale_norms(twin, factor, norm)
        if family in HOMOGENEOUS:
            rescale_ups(twin, 3 * factor)
        assert perplexity_while_learning(twin, strategy) == pytest.approx(expected, rel=5e-3)
    permute_neurons(host)
    assert perplexity_while_learning(host, strategy) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt"])
@pytest.mark.parametrize("r", [8, 2])
def test_slots_together_add_a_share_of_the_elements(family, r):
    model = get_peft_model(make_host(family), LocasConfig(r=r))
    layer = list_layers(model)[1]
    seen = []
    layer.ffn.inlet.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    layer.ffn.down.register_forward_hook(lambda _, args, output: seen.append(output))
    calibrate(model, [make_tokens()])
    inputs, outputs = (each.flatten(0, -2) for each in seen)
    scaled = layer.locas_input_scale["default"] * inputs
    torch.testing.assert_close(scaled.norm(dim=1).median(), torch.tensor(KAPPA * 16**0.5))
    slots = layer.activate(["default"], inputs)
    added = layer.locas_tau["default"] * slots.abs().mean(dim=0).sum()
    share = added / outputs.norm(dim=1).median()
    torch.testing.assert_close(share, torch.tensor(ALPHA / 16**0.5))


def test_one_token_with_a_huge_output_does_not_matter():
    outputs, slots = torch.ones(100), torch.ones(100, 4)
    outputs[0] = 1e5
    otherwise = torch.tensor(7.0)
    assert measure_output_scale(slots, outputs, 25, otherwise) == pytest.approx(ALPHA / 5 / 4)
    assert measure_output_scale(0 * slots, outputs, 25, otherwise) == 7.0
    assert measure_input_scale(torch.zeros(5, 3)) == 1.0


def test_an_unmeasured_memory_is_measured_later_and_keeps_its_rows():
    model = get_peft_model(make_host("llama"), LocasConfig(r=4, init_weights="gaussian"))
    rows = [weight.clone() for layer in list_layers(model) for weight in weights_in(layer)]
    assert uncalibrated_memories(model) == ["default"]
    model.train()(input_ids=make_tokens())
    assert uncalibrated_memories(model) == []
    for layer in list_layers(model):
        assert layer.locas_input_scale["default"] not in (0, 1)
        assert all(torch.equal(weight, rows.pop(0)) for weight in weights_in(layer))


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_files_from_before_the_measured_scale_load_as_the_papers(low_cpu_mem_usage, tmp_path):
    model = make_model().eval()
    assert list_layers(model)[0].locas_input_scale["default"] == 1
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, keep_former_tensors)
    loaded = PeftModel.from_pretrained(
        make_host("llama"), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage
    )
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.peft_config["default"].output_scale == "paper"
    assert uncalibrated_memories(loaded) == []


def keep_former_tensors(tensors):
    for key in list(tensors):
        if key.endswith(("locas_input_scale", "locas_calibrated")):
            del tensors[key]
    assert len(tensors) == 2 * 4


def test_a_file_that_lacks_the_scale_of_one_layer_is_refused(tmp_path):
    make_model().save_pretrained(tmp_path)
    key = "base_model.model.model.layers.1.mlp.locas_input_scale"
    rewrite(tmp_path, lambda tensors: tensors.pop(key))
    with pytest.raises(ValueError, match="the file has no .*layers.1.mlp.locas_input_scale"):
        PeftModel.from_pretrained(make_host("llama"), tmp_path)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_learning_in_bf16_is_learning_in_float32(family):
    ratios = []
    for dtype in (torch.float32, torch.bfloat16):
        config = LocasConfig(r=8, scaling=30.0)
        model = get_peft_model(make_host(family, dtype), config, autocast_adapter_dtype=False)
        trainer = TestTimeTrainer(model, **SETTINGS)
        first, *_, last = trainer.read(make_ids(16).repeat(12))
        ratios.append(math.exp(last.nll_nats / last.tokens - first.nll_nats / first.tokens))
    assert ratios[0] < 0.9 and ratios[1] == pytest.approx(ratios[0], rel=0.1)


def test_a_memory_that_waits_is_calibrated_beside_one_that_has_learned():
    config = LocasConfig(r=4, scaling=30.0)
    model = get_peft_model(make_host("llama"), config, adapter_name="old")
    list(TestTimeTrainer(model, **SETTINGS).read(make_ids(32)))
    model.add_adapter("new", config)
    model.base_model.set_adapter(["old", "new"])
    list(TestTimeTrainer(model, **SETTINGS).read(make_ids(32)))
    assert all(layer.has_learned(name) for layer in list_layers(model) for name in ("old", "new"))
