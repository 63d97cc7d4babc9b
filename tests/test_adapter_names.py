"""Adapters' names: any name that is accepted saves and loads all of its memory's tensors."""

import warnings

import pytest
import torch
from families import logits, make_host, teach
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file

from locas_peft import LocasConfig
from locas_peft.tuner import adapters_disabled, find_ffns, list_layers

# Parts of module paths, of a memory's tensors, of PEFT's wrappers, and other text.
PAIRS = [
    ("0", "1"),
    ("mlp", "layers"),
    ("model", "base_model"),
    ("weight", "bias"),
    ("locas_up", "locas_gate"),
    ("locas_down", "locas_tau"),
    ("base_layer", "original_module"),
    ("modules_to_save", "trainable_tokens_delta"),
    ("lm_head", "embed_tokens"),
    ("token_adapter", "self_attn"),
    ("experts", "vision"),
    ("a b", "José"),
    ("a", "base"),
    ("w1", "w2"),
    ("(x*)", "[0-9]+"),
]


def make_pair(names, family="llama", **fields) -> PeftModel:
    """Return a model with two memories, and the first's name, active and unlike the other."""
    model = None
    for seed, name in enumerate(names):
        config = LocasConfig(r=16, init_weights="random", seed=seed, **fields)
        with warnings.catch_warnings():
            # PEFT warns of names that are part of a prefix.
            warnings.filterwarnings("ignore", message="Adapter name")
            if model is None:
                model = get_peft_model(make_host(family), config, adapter_name=name)
            else:
                model.add_adapter(name, config)
        teach(model, name, seed=seed)
    return model.eval()


def change_others(model, name) -> None:
    """Change the weights that are trained in full, and the trained tokens, of an adapter."""
    for key, parameter in model.named_parameters():
        if f"modules_to_save.{name}." in key or f"trainable_tokens_delta.{name}" in key:
            parameter.data += 1.0


def logits_of(model, name) -> torch.Tensor:
    model.set_adapter(name)
    return logits(model.eval())


SLOTS_ALONE, HEAD, TOKENS = (
    {},
    {"modules_to_save": ["lm_head"]},
    {"trainable_token_indices": [5, 6]},
)


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        pytest.param("llama", SLOTS_ALONE, id="llama"),
        pytest.param("opt", SLOTS_ALONE, id="opt", marks=pytest.mark.slow),
        pytest.param("llama", HEAD, id="modules"),
        pytest.param("llama", TOKENS, id="tokens"),
    ],
)
def test_each_of_two_memories_is_saved_whole(names, family, fields, tmp_path):
    if fields == HEAD and names[0] == "lm_head":
        with pytest.raises(ValueError, match="conflict"):
            make_pair(names, **fields)
        return
    model = make_pair(names, family, **fields)
    for name in names:
        change_others(model, name)
    model.save_pretrained(tmp_path)
    expected = get_peft_model_state_dict(make_pair(["default"], family, **fields)).keys()
    for name in names:
        assert load_file(tmp_path / name / "adapter_model.safetensors").keys() == expected
        loaded = PeftModel.from_pretrained(make_host(family), tmp_path / name)
        assert torch.equal(logits(loaded), logits_of(model, name)), name


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_a_memory_loads_under_any_name_beside_another(names, tmp_path):
    model = make_pair(["default", "other"])
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Adapter name")
        loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path, adapter_name=names[0])
        loaded.load_adapter(tmp_path / "other", adapter_name=names[1])
    assert torch.equal(logits_of(loaded, names[0]), logits_of(model, "default"))
    assert torch.equal(logits_of(loaded, names[1]), logits_of(model, "other"))


def test_a_given_state_that_lacks_nothing_is_saved_whole(tmp_path):
    model = make_pair(["0", "1"])
    model.save_pretrained(tmp_path, selected_adapters=["0"], state_dict=model.state_dict())
    loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path / "0")
    assert torch.equal(logits(loaded), logits_of(model, "0"))


def test_a_copied_state_is_refused_where_a_name_hides_tensors_of_it(tmp_path):
    model = make_pair(["0", "1"])
    copied = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="'1'") as raised:
        model.save_pretrained(tmp_path, selected_adapters=["0"], state_dict=copied)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.glob("**/*.safetensors"))


@pytest.mark.parametrize(
    "name", ["", "a.b", "keys", "training", "persistent", "__base__", "_orig_mod"]
)
@pytest.mark.filterwarnings("ignore:Adapter name")
def test_names_that_cannot_be_kept_are_refused_before_anything_changes(name):
    host = make_host("llama")
    before = [(key, type(module)) for key, module in host.named_modules()]
    with pytest.raises(ValueError, match="adapter_name must") as raised:
        get_peft_model(host, LocasConfig(r=4), adapter_name=name)
    assert "\n" not in str(raised.value)
    assert [(key, type(module)) for key, module in host.named_modules()] == before
    model = make_pair(["default"])
    with pytest.raises(ValueError, match="adapter_name must"):
        model.add_adapter(name, LocasConfig(r=4))
    assert list(model.peft_config) == ["default"]


def test_adding_a_memory_named_like_a_layer_trains_no_frozen_one():
    model = make_pair(["default"])
    model.set_requires_grad("default", False)
    model.add_adapter("0", LocasConfig(r=4))
    trained = [key for key, weight in model.named_parameters() if weight.requires_grad]
    assert trained == []


def test_ffns_are_found_in_the_host_and_not_among_memories():
    # As wide as the host's hidden size, gate, up and down of one memory could be an FFN.
    model = make_pair(["w1", "w2"])
    model.add_adapter("w3", LocasConfig(r=16, init_weights="random"))
    names = ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert list(find_ffns(model.base_model.model)) == names
    assert [layer.name for layer in list_layers(model, "w3")] == names


def test_a_frozen_memory_named_like_a_tensor_stays_on():
    model = make_pair(["weight", "other"])
    model.base_model.set_adapter(["weight", "other"])
    model.set_requires_grad("weight", False)
    model.set_requires_grad("other", True)
    expected = logits_of(make_pair(["weight", "other"]), "weight")
    with adapters_disabled(model):
        assert torch.equal(logits(model), expected)


def test_a_mixed_batch_with_such_names():
    model = make_pair(["0", "1"])
    rows = ["0", "1", "__base__", "1"]
    mixed = logits(model, adapter_names=rows)
    for row, name in enumerate(rows[:2]):
        torch.testing.assert_close(mixed[row], logits_of(model, name)[row])


@pytest.mark.filterwarnings(
    "ignore:You are trying to modify a model with PEFT for a second time",
    "ignore:Already found a `peft_config` attribute",
)
def test_a_lora_of_the_same_name_in_the_host_is_left_out(tmp_path):
    host = get_peft_model(
        make_host("llama"), LoraConfig(target_modules=["q_proj"]), adapter_name="0"
    )
    model = get_peft_model(host.base_model.model, LocasConfig(r=4, init_weights="random"), "0")
    model.save_pretrained(tmp_path)
    assert all(".locas_" in key for key in load_file(tmp_path / "0" / "adapter_model.safetensors"))
