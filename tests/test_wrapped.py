"""Models that torch wraps: compiled, with activation checkpointing, in FSDP or DDP."""

import warnings

import pytest
import torch
from compiling import COMPILES
from families import logits, make_host, make_tokens, same, snapshot, teach
from peft import PeftModel, get_peft_model, inject_adapter_in_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM

from locas_peft import LocasConfig, LocasLayer, calibrate, uncalibrated_memories
from locas_peft.memories import load_memory
from locas_peft.memories.base_sample import sample_weights
from locas_peft.slots import to_lora
from locas_peft.tuner import find_ffns, list_layers
from locas_peft.tuner.modules import base_parameters

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


def wrap(model, which, depth) -> nn.Module:
    """Wrap a model, its decoder layers, their FFNs or a projection of each; return the model."""
    wrapper = WRAPPERS[which]
    if depth == "model":
        return wrapper(model)
    host = model.get_base_model() if isinstance(model, PeftModel) else model
    names = [name for name, module in host.named_modules() if is_at(name, module, depth)]
    assert names
    for name in names:
        parent, _, child = name.rpartition(".")
        owner = host.get_submodule(parent)
        setattr(owner, child, wrapper(getattr(owner, child)))
    return model


def is_at(name, module, depth) -> bool:
    if ".locas_" in name or name.endswith("base_layer"):
        return False
    if depth == "layer":
        return type(module).__name__.endswith(("DecoderLayer", "GPT2Block"))
    if depth == "ffn":
        return name.endswith((".mlp", ".fc2"))
    return name.endswith((".down_proj", ".c_fc", ".fc1")) and not hasattr(module, "fc1")


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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("which", "depth"), CASES)
def test_a_memory_of_a_wrapped_model_is_that_of_the_plain_one(family, which, depth, tmp_path):
    if family == "qwen3_moe" and depth == "projection":
        pytest.skip("the experts' weights are no modules")
    plain = taught(make_host(family))
    expected = logits(plain)
    plain.save_pretrained(tmp_path / "plain")
    names = [layer.name for layer in list_layers(plain)]
    model = taught(wrap(make_host(family), which, depth))
    assert [layer.name for layer in list_layers(model)] == names
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "wrapped")
    paths = [tmp_path / name / "adapter_model.safetensors" for name in ("plain", "wrapped")]
    tensors, others = map(load_file, paths)
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[key], others[key]) for key in tensors)
    for folder in (tmp_path / "plain", tmp_path / "wrapped"):
        for load in (PeftModel.from_pretrained, load_memory):
            loaded = load(make_host(family), folder).eval()
            assert torch.equal(logits(loaded), expected)
            loaded = load(wrap(make_host(family), which, depth), folder).eval()
            torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", GATED_AND_FLAT)
@pytest.mark.parametrize(("which", "depth"), CASES)
def test_a_memory_is_saved_from_a_model_that_was_wrapped_later(family, which, depth, tmp_path):
    model = taught(make_host(family), modules_to_save=["lm_head"])
    expected = logits(model)
    wrapped = wrap(model, which, depth)
    torch.testing.assert_close(logits(wrapped), expected, rtol=1e-4, atol=1e-4)
    wrapped.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_host(family), tmp_path)
    assert torch.equal(logits(loaded), expected)
    model.add_adapter("other", LocasConfig(r=4, init_weights="random", seed=1))
    assert len(list_layers(model, "other")) == len(list_layers(model, "default")) == 2
    model.set_adapter("other")
    torch.testing.assert_close(logits(wrapped), logits(make_host(family)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("which", "depth"), CASES)
@pytest.mark.parametrize("ran", [False, True], ids=["new", "ran"])
def test_a_memory_of_a_wrapped_model_is_calibrated(family, which, depth, ran):
    if family == "qwen3_moe" and depth == "projection":
        pytest.skip("the experts' weights are no modules")
    ids = make_tokens()
    plain = get_peft_model(make_host(family), LocasConfig(r=4))
    calibrate(plain, [ids])
    for by_itself in (False, True):
        host = wrap(make_host(family), which, depth)
        if ran:
            host(input_ids=ids)
        model = get_peft_model(host, LocasConfig(r=4))
        if by_itself:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        else:
            calibrate(model, [ids])
        assert uncalibrated_memories(model) == []
        slots = model.peft_config["default"].get_record("slots")
        assert slots == plain.peft_config["default"].get_record("slots")


@pytest.mark.parametrize("family", GATED_AND_FLAT)
@pytest.mark.parametrize(("which", "depth"), CASES)
@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
def test_a_memory_of_a_wrapped_model_learns_and_is_merged(family, which, depth, later):
    ids = make_tokens()

    if family == "opt" and later and (which, depth) == ("checkpoint", "ffn"):
        model = wrap(taught(make_host(family)), which, depth)
        with pytest.raises(ValueError, match="wrap the decoder layer"):
            model(input_ids=ids, labels=ids).loss.backward()
        return

    def make(wraps):
        host = make_host(family)
        if wraps and not later:
            host = wrap(host, which, depth)
        model = taught(host)
        return model, wrap(model, which, depth) if wraps and later else model

    plain, _ = make(False)
    plain(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model, wrapped = make(True)
    wrapped(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for layer, other in zip(list_layers(plain), list_layers(model), strict=True):
        for weight, own in zip(layer.weights("default"), other.weights("default"), strict=True):
            torch.testing.assert_close(own.grad, weight.grad, rtol=1e-3, atol=1e-5)
    expected = logits(plain)
    model.merge_adapter()
    torch.testing.assert_close(logits(wrapped), expected, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    tensors, others = to_lora(plain)[1], to_lora(model)[1]
    assert tensors.keys() == others.keys()
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    assert not any(isinstance(module, LocasLayer) for module in merged.modules())
    widths = {ffn.width for ffn in find_ffns(merged).values()}
    config = merged.config
    assert widths == {getattr(config, "ffn_dim", None) or config.intermediate_size}


def test_activation_checkpointing_around_a_memory_stays_when_it_is_unloaded():
    model = wrap(taught(make_host("llama")), "checkpoint", "ffn")
    host = model.unload()
    assert type(host.model.layers[0].mlp).__name__ == "CheckpointWrapper"
    assert torch.equal(logits(host), logits(make_host("llama")))


@pytest.mark.parametrize("which", WRAPPERS)
def test_the_names_of_the_base_s_weights_are_those_of_the_plain_model(which):
    host = wrap(make_host("llama"), which, "layer")
    names = [name for name, _ in base_parameters(host)]
    assert names == [name for name, _ in base_parameters(make_host("llama"))]
    assert sample_weights(host) == sample_weights(make_host("llama"))


def test_a_given_state_of_a_wrapped_model_is_saved(tmp_path):
    model = taught(make_host("llama"), modules_to_save=["lm_head"])
    states = {
        "compiled": compiled(model).state_dict(),
        "parallel": {f"module.{key}": tensor for key, tensor in model.state_dict().items()},
    }
    for name, state in states.items():
        model.save_pretrained(tmp_path / name, state_dict=state)
        loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path / name)
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
    fields = {"rank_pattern": {"layers.0.mlp": 2}, "r": 4}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model = taught(wrap(make_host("llama"), which, "layer"), **fields)
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
    torch.testing.assert_close(logits(injected.eval()), logits(model), rtol=1e-4, atol=1e-4)


def test_a_model_in_data_parallel_gets_no_memory():
    host = nn.DataParallel(make_host("llama"))
    with pytest.raises(ValueError, match="DataParallel: wrap the model that has the memory"):
        get_peft_model(host, LocasConfig(r=4))


def test_a_merged_base_with_activation_checkpointing_loads_without_it(tmp_path):
    model = taught(wrap(make_host("llama"), "checkpoint", "ffn"))
    expected = logits(model)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)
