"""Models that torch wraps: compiled, with activation checkpointing, in FSDP or DDP."""

import re

import pytest
import torch
from compiling import COMPILES
from families import logits, make_host, make_tokens, same, snapshot, teach
from peft import PeftModel, get_peft_model, inject_adapter_in_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from training import assert_same
from transformers import AutoModelForCausalLM

from locas_peft import LocasConfig, LocasLayer, calibrate, uncalibrated_memories
from locas_peft.memories import load_memory
from locas_peft.memories.base_sample import sample_weights
from locas_peft.slots import to_lora
from locas_peft.tuner import find_ffns, list_layers
from locas_peft.tuner.modules import base_parameters, is_wrapper

pytestmark = COMPILES
# llama's FFN is gated and a module. opt has two layers without a module around them.
GATED_AND_FLAT = ["llama", pytest.param("opt", marks=pytest.mark.slow)]
FAMILIES = [
    *GATED_AND_FLAT,
    pytest.param("gpt2", marks=pytest.mark.slow),
    pytest.param("qwen3_moe", marks=pytest.mark.slow),
]


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


WRAPPERS = {"compile": compiled, "checkpoint": checkpoint_wrapper}


DEPTHS = {
    "layer": r"\.(layers|h)\.\d+$",
    "ffn": r"\.(mlp|fc2)$",
    "projection": r"\.(down_proj|c_fc|fc1)$",
}


def wrap(model, which, depth) -> nn.Module:
    """Wrap a model, its decoder layers, their FFNs or a projection of each; return the model."""
    wrapper = WRAPPERS[which]
    if depth == "model":
        return wrapper(model)
    host = model.get_base_model() if isinstance(model, PeftModel) else model
    names = [name for name, _ in host.named_modules() if re.search(DEPTHS[depth], name)]
    if host.config.model_type == "qwen3_moe" and not names:
        pytest.skip("the experts' weights are no modules")
    assert names
    for name in names:
        host.set_submodule(name, wrapper(host.get_submodule(name)))
    return model


def taught(host, **fields) -> PeftModel:
    config = LocasConfig(**{"r": 4, "init_weights": "random", **fields})
    model = get_peft_model(host, config)
    teach(model)
    return model.eval()


CASES = [
    pytest.param(which, depth, marks=pytest.mark.slow if depth == "model" else ())
    for which in WRAPPERS
    for depth in ("layer", "ffn", "projection", "model")
    if (which, depth) != ("checkpoint", "model")
]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("which", "depth"), CASES)
def test_a_memory_of_a_wrapped_model_is_that_of_the_plain_one(family, which, depth, tmp_path):
    plain = taught(make_host(family))
    expected = logits(plain)
    model = taught(wrap(make_host(family), which, depth))
    torch.testing.assert_close(logits(model), expected, **CLOSE)
    saved = {}
    for name, saved_model in (("plain", plain), ("wrapped", model)):
        saved_model.save_pretrained(tmp_path / name)
        saved[name] = load_file(tmp_path / name / "adapter_model.safetensors")
    assert_same(saved["plain"], saved["wrapped"])
    for folder, load in (("plain", load_memory), ("wrapped", PeftModel.from_pretrained)):
        loaded = load(make_host(family), tmp_path / folder).eval()
        assert torch.equal(logits(loaded), expected)
        loaded = load(wrap(make_host(family), which, depth), tmp_path / folder).eval()
        torch.testing.assert_close(logits(loaded), expected, **CLOSE)


@pytest.mark.parametrize("family", GATED_AND_FLAT)
@pytest.mark.parametrize(("which", "depth"), CASES)
def test_a_memory_is_saved_from_a_model_that_was_wrapped_later(family, which, depth, tmp_path):
    model = taught(make_host(family), modules_to_save=["lm_head"])
    expected = logits(model)
    wrapped = wrap(model, which, depth)
    torch.testing.assert_close(logits(wrapped), expected, **CLOSE)
    wrapped.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_host(family), tmp_path)
    assert torch.equal(logits(loaded), expected)
    model.add_adapter("other", LocasConfig(r=4, init_weights="random", seed=1))
    assert len(list_layers(model, "other")) == len(list_layers(model, "default")) == 2
    model.set_adapter("other")
    torch.testing.assert_close(logits(wrapped), logits(make_host(family)), **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("which", "depth"), CASES)
@pytest.mark.parametrize(
    ("by_itself", "ran"),
    [
        (False, False),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
    ],
)
def test_a_memory_of_a_wrapped_model_is_calibrated(family, which, depth, by_itself, ran):
    ids = make_tokens()
    plain = get_peft_model(make_host(family), LocasConfig(r=4))
    calibrate(plain, [ids])
    host = wrap(make_host(family), which, depth)
    if ran:
        host(input_ids=ids)
    model = get_peft_model(host, LocasConfig(r=4))
    if by_itself:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    else:
        calibrate(model, [ids])
    assert uncalibrated_memories(model) == []
    for layer, other in zip(list_layers(model), list_layers(plain), strict=True):
        assert layer.recorded_slots("default") == other.recorded_slots("default")


@pytest.mark.parametrize("family", GATED_AND_FLAT)
@pytest.mark.parametrize(("which", "depth"), CASES)
@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
def test_a_memory_of_a_wrapped_model_learns_and_is_merged(family, which, depth, later):
    ids = make_tokens()
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    if later:
        model = taught(make_host(family))
        wrapped = wrap(model, which, depth)
    else:
        model = wrapped = taught(wrap(make_host(family), which, depth))
    if family == "opt" and later and (which, depth) == ("checkpoint", "ffn"):
        with pytest.raises(ValueError, match="wrap the decoder layer"):
            wrapped(**inputs).loss.backward()
        return
    plain = taught(make_host(family))
    for each in (plain, wrapped):
        each(**inputs).loss.backward()
    for layer, other in zip(list_layers(plain), list_layers(model), strict=True):
        for weight, own in zip(layer.weights("default"), other.weights("default"), strict=True):
            torch.testing.assert_close(own.grad, weight.grad, rtol=1e-3, atol=1e-5)
    expected = logits(plain)
    model.merge_adapter()
    torch.testing.assert_close(logits(wrapped), expected, **CLOSE)
    model.unmerge_adapter()
    assert to_lora(plain)[1].keys() == to_lora(model)[1].keys()
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, **CLOSE)
    assert not any(isinstance(module, LocasLayer) for module in merged.modules())
    width = getattr(merged.config, "ffn_dim", None) or merged.config.intermediate_size
    assert {ffn.width for ffn in find_ffns(merged).values()} == {width}


def test_activation_checkpointing_around_a_memory_stays_when_it_is_unloaded():
    host = wrap(taught(make_host("llama")), "checkpoint", "ffn").unload()
    assert is_wrapper(host.model.layers[0].mlp)
    assert torch.equal(logits(host), logits(make_host("llama")))


@pytest.mark.parametrize("which", WRAPPERS)
def test_the_names_of_the_base_s_weights_are_those_of_the_plain_model(which):
    host, plain = wrap(make_host("llama"), which, "layer"), make_host("llama")
    names = [name for name, _ in base_parameters(host)]
    assert names == [name for name, _ in base_parameters(plain)]
    assert sample_weights(host) == sample_weights(plain)


def test_a_given_state_of_a_wrapped_model_is_saved(tmp_path):
    model = taught(make_host("llama"), modules_to_save=["lm_head"])
    of_parallel = {f"module.{key}": tensor for key, tensor in model.state_dict().items()}
    for state in (compiled(model).state_dict(), of_parallel):
        model.save_pretrained(tmp_path, state_dict=state)
        loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path)
        assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("which", WRAPPERS)
def test_a_part_of_a_wrapped_layer_is_trained_beside_a_memory(which, tmp_path):
    fields = {"modules_to_save": ["input_layernorm"]}
    model = taught(make_host("llama"), **fields)
    for key, weight in model.named_parameters():
        if "modules_to_save" in key:
            weight.data += 1.0
    expected = logits(model)
    wrap(model, which, "layer").save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(make_host("llama"), tmp_path)), expected)
    host = wrap(make_host("llama"), which, "layer")
    before = snapshot(host)
    with pytest.raises(ValueError, match="modules_to_save must .* after the memory") as raised:
        taught(host, **fields)
    assert "\n" not in str(raised.value) and same(host, before)


@pytest.mark.parametrize("which", WRAPPERS)
def test_patterns_and_layers_of_a_wrapped_model(which):
    # Warnings are errors.
    model = taught(wrap(make_host("llama"), which, "layer"), rank_pattern={"layers.0.mlp": 2})
    assert [layer.locas_up["default"].out_features for layer in list_layers(model)] == [2, 4]
    for fields in ({"layers_to_transform": [1]}, {"target_modules": ["model.layers.1.mlp"]}):
        model = taught(wrap(make_host("llama"), which, "layer"), **fields)
        assert [layer.name for layer in list_layers(model)] == ["model.layers.1.mlp"]


@pytest.mark.parametrize("which", WRAPPERS)
@pytest.mark.parametrize("depth", ["layer", "ffn"])
def test_a_memory_is_injected_by_the_names_of_a_state(which, depth):
    model = taught(make_host("llama"))
    state = get_peft_model_state_dict(model)
    bare = {key.removeprefix("base_model.model."): tensor for key, tensor in state.items()}
    host = wrap(make_host("llama"), which, depth)
    config = LocasConfig(r=4, init_weights="random")
    injected = inject_adapter_in_model(config, host, state_dict=bare)
    set_peft_model_state_dict(injected, state)
    torch.testing.assert_close(logits(injected.eval()), logits(model), **CLOSE)


def test_a_model_in_data_parallel_gets_no_memory():
    host = nn.DataParallel(make_host("llama"))
    with pytest.raises(ValueError, match="DataParallel: wrap the model that has the memory"):
        get_peft_model(host, LocasConfig(r=4))


def test_a_merged_base_with_activation_checkpointing_loads_without_it(tmp_path):
    model = taught(wrap(make_host("llama"), "checkpoint", "ffn"))
    expected = logits(model)
    model.merge_and_unload().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(loaded), expected, **CLOSE)
