"""The measured scale: two hosts with one function learn the same, however that function is spread over weights."""

import copy
import json
import math

import pytest
import torch
from families import make_host, make_tokens, weights_in
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from training import make_ids

from locas_peft import (
    LocasConfig,
    SlotWriter,
    TestTimeTrainer,
    backbone,
    calibrate,
    uncalibrated_memories,
)
from locas_peft.text import python_reference, tokenize, unwrap
from locas_peft.tuner import find_ffns, list_layers
from locas_peft.tuner.scale import ALPHA, KAPPA, measure_input_scale, measure_output_scale

FACTORS = (1 / 16, 16)
NORMS = {"opt": "final_layer_norm"}
HOMOGENEOUS = (
    "llama",
    "phi3",
    "opt",
)  # gated, or with ReLU: up times c and down divided by c is the same function


@torch.no_grad()
def rescale_norms(host, factor, norm="post_attention_layernorm"):
    """Multiply the norm before each FFN by a factor, and divide the rows that read it."""
    for name, ffn in find_ffns(host).items():
        layer = host.get_submodule(name.rpartition(".")[0])
        for parameter in getattr(layer, norm).parameters():
            parameter.mul_(factor)
        for part in {ffn.parts.gate, ffn.parts.up, ffn.parts.gate_up} - {None}:
            ffn.projection(part).weight.div_(factor)


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
        for part in {ffn.parts.gate, ffn.parts.up, ffn.parts.gate_up} - {None}:
            for parameter in ffn.projection(part).parameters():
                parameter.copy_(parameter[rows])
        ffn.down.weight.copy_(ffn.down.weight[:, order])


def perplexity_while_learning(host, strategy="topk", ids=None, window=16, rate=0.02, **kwargs):
    """Read a text, by default one that repeats itself, so that there is something to learn."""
    model = get_peft_model(
        host, LocasConfig(**{"r": 8, "init_weights": strategy, "scaling": 100.0, **kwargs})
    )
    steps = [SlotWriter(model, epsilon=0.5, slots_per_chunk=1)] if strategy == "write" else []
    trainer = TestTimeTrainer(
        model, window=window, stride=window // 2, learning_rate=rate, steps=steps
    )
    for _ in trainer.read(make_ids(16).repeat(6) if ids is None else ids):
        pass
    return trainer.perplexity


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        *((family, "topk") for family in ("llama", "phi3", "opt")),
        ("llama", "gaussian"),
        ("gpt_neox", "write"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("gpt_neox", "topk"), ("llama", "activation"), ("opt", "write"))
        ),
    ],
)
def test_hosts_with_one_function_learn_the_same(family, strategy):
    host = make_host(family)
    expected = perplexity_while_learning(copy.deepcopy(host), strategy)
    still = perplexity_while_learning(copy.deepcopy(host), strategy, scaling=1e-6)
    assert abs(expected / still - 1) > 0.02  # the memory matters
    for factor in FACTORS:
        twin = copy.deepcopy(host)
        rescale_norms(twin, factor, NORMS.get(family, "post_attention_layernorm"))
        assert perplexity_while_learning(twin, strategy) == pytest.approx(expected, rel=5e-3), (
            f"norms times {factor}"
        )
        if family in HOMOGENEOUS:
            twin = copy.deepcopy(host)
            rescale_ups(twin, factor)
            assert perplexity_while_learning(twin, strategy) == pytest.approx(expected, rel=5e-3), (
                f"ups x {factor}"
            )
    permute_neurons(host)
    assert perplexity_while_learning(host, strategy) == pytest.approx(expected, rel=1e-4), (
        "permuted"
    )


def test_the_papers_scale_depends_on_the_host():
    expected, twin = (
        perplexity_while_learning(make_host("llama"), output_scale="paper"),
        make_host("llama"),
    )
    rescale_ups(twin, 16)
    assert perplexity_while_learning(twin, output_scale="paper") != pytest.approx(
        expected, rel=5e-3
    )


def test_the_backbone_and_its_twins_learn_the_same():
    base, tokenizer = backbone.load()
    ids = tokenize(tokenizer, unwrap(python_reference()), max_tokens=1_000)

    def read(*changes):
        host = copy.deepcopy(base)
        for change, *factor in changes:
            change(host, *factor)
        return perplexity_while_learning(host, ids=ids, window=256, rate=4e-3, r=64, scaling=1.0)

    expected = read()
    assert read((rescale_norms, 1 / 16), (rescale_ups, 3)) == pytest.approx(expected, rel=5e-3)
    assert read((rescale_norms, 3), (rescale_ups, 1 / 16)) == pytest.approx(expected, rel=5e-3)
    assert read((permute_neurons,)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt"])
@pytest.mark.parametrize("r", [8, 2])
def test_slots_together_add_a_share_of_the_elements(family, r):
    model = get_peft_model(make_host(family), LocasConfig(r=r))
    seen = {}
    for layer in list_layers(model):
        layer.ffn.inlet.register_forward_pre_hook(
            lambda m, args, name=layer.name: seen.update({name: args[0]})
        )
        layer.ffn.down.register_forward_hook(
            lambda m, args, out, name=layer.name: seen.update({name + "!": out})
        )
    calibrate(model, [make_tokens()])
    for layer in list_layers(model):
        inputs, outputs = seen[layer.name].flatten(0, -2), seen[layer.name + "!"].flatten(0, -2)
        k, tau = layer.locas_input_scale["default"], layer.locas_tau["default"]
        torch.testing.assert_close((k * inputs).norm(dim=1).median(), torch.tensor(KAPPA * 16**0.5))
        gate, up = (weights_in(layer)[0], weights_in(layer)[-2])
        slots = layer.ffn.act(k * inputs @ gate.T) * (k * inputs @ up.T if layer.ffn.gated else 1)
        shares = tau * slots.abs().mean(dim=0) / outputs.norm(dim=1).median()
        torch.testing.assert_close(shares.sum(), torch.tensor(ALPHA / 16**0.5))


def test_one_token_with_a_huge_output_does_not_matter():
    outputs, slots = torch.ones(100), torch.ones(100, 4)
    outputs[0] = 1e5
    otherwise = torch.tensor(7.0)
    assert measure_output_scale(slots, outputs, 25, otherwise) == pytest.approx(ALPHA / 5 / 4)
    assert measure_output_scale(0 * slots, outputs, 25, otherwise) == 7.0
    assert measure_input_scale(torch.zeros(5, 3)) == 1.0


def test_an_unmeasured_memory_is_saved_and_loaded_and_measured_later(tmp_path):
    model = get_peft_model(make_host("llama"), LocasConfig(r=4, init_weights="gaussian"))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path, is_trainable=True)
    assert uncalibrated_memories(loaded) == ["default"]
    rows = [weight.clone() for layer in list_layers(loaded) for weight in weights_in(layer)]
    loaded.train()(input_ids=make_tokens())
    assert uncalibrated_memories(loaded) == []
    assert all(layer.locas_input_scale["default"] > 0 for layer in list_layers(loaded))
    assert all(
        map(
            torch.equal,
            rows,
            [weight for layer in list_layers(loaded) for weight in weights_in(layer)],
        )
    )


def test_files_from_before_the_measured_scale_load_as_the_papers(tmp_path):
    model = get_peft_model(
        make_host("llama"), LocasConfig(r=4, init_weights="random", output_scale="paper")
    )
    for layer in list_layers(model):
        layer.locas_down["default"].weight.data.normal_(generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.eval()(input_ids=make_tokens()).logits
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = {
        key: tensor
        for key, tensor in load_file(path).items()
        if "locas_input_scale" not in key and "locas_calibrated" not in key
    }
    assert len(tensors) == 2 * 4
    save_file(tensors, path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    del config["output_scale"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    for low_cpu_mem_usage in (False, True):
        loaded = PeftModel.from_pretrained(
            make_host("llama"), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage
        )
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=make_tokens()).logits, expected)
        assert loaded.peft_config["default"].output_scale == "paper"
        assert uncalibrated_memories(loaded) == []


def test_a_file_that_lacks_the_scale_of_one_layer_is_refused(tmp_path):
    model = get_peft_model(make_host("llama"), LocasConfig(r=4))
    calibrate(model, [make_tokens()])
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    save_file(
        {key: t for key, t in load_file(path).items() if "layers.1.mlp.locas_input" not in key},
        path,
    )
    with pytest.raises(ValueError, match="the file has no .*layers.1.mlp.locas_input_scale"):
        PeftModel.from_pretrained(make_host("llama"), tmp_path)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_learning_in_bf16_is_learning_in_float32(family):
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = get_peft_model(
            make_host(family, dtype), LocasConfig(r=8, scaling=30.0), autocast_adapter_dtype=False
        )
        trainer = TestTimeTrainer(model, window=16, stride=8, learning_rate=0.02)
        first, *_, last = [
            chunk.nll_nats / chunk.tokens for chunk in trainer.read(make_ids(16).repeat(12))
        ]
        assert {layer.locas_input_scale["default"].dtype for layer in list_layers(model)} == {
            torch.float32
        }
        losses.append(math.exp(last - first))
    assert losses[0] < 0.9 and losses[1] == pytest.approx(losses[0], rel=0.1)


def test_a_memory_that_waits_is_calibrated_beside_one_that_has_learned():
    model = get_peft_model(make_host("llama"), LocasConfig(r=4, scaling=30.0), adapter_name="old")
    list(TestTimeTrainer(model, window=16, stride=8, learning_rate=0.02).read(make_ids(32)))
    model.add_adapter("new", LocasConfig(r=4, scaling=30.0))
    model.base_model.set_adapter(["old", "new"])
    list(TestTimeTrainer(model, window=16, stride=8, learning_rate=0.02).read(make_ids(32)))
    assert all(layer.has_learned(name) for layer in list_layers(model) for name in ("old", "new"))
