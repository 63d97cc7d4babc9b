"""`add_weighted_adapter`: one memory that adds what the weighted sum of others adds."""

import pytest
import torch
from families import make_host, make_model, make_tokens, teach, weights_in
from peft import PeftModel, get_peft_model
from test_families import SCALING, learn, logits

from locas_peft import LocasConfig, calibrate, rescale
from locas_peft.tuner import list_layers

FAMILIES = ["llama", "phi3", "gpt2", "opt", "qwen2_moe"]


def make_two(family: str = "llama", **second) -> PeftModel:
    """Two memories that have learned, of different widths, scales and seeds."""
    model = get_peft_model(make_host(family), LocasConfig(r=4, scaling=SCALING), adapter_name="one")
    fields = {"r": 3, "init_weights": "random", "scaling": SCALING / 2, **second}
    model.add_adapter("two", LocasConfig(**fields))
    for seed, name in enumerate(["one", "two"]):
        model.set_adapter(name)
        calibrate(model, [make_tokens(seed=seed + 5)])
        learn(model, steps=2)
    return model


@pytest.fixture(scope="module")
def two():
    """Two memories of a Llama. A test may add others, and chooses the active one."""
    return make_two()


def alone(model: PeftModel, name: str) -> torch.Tensor:
    model.set_adapter(name)
    return logits(model)


def combine(model: PeftModel, weights: list[float]) -> PeftModel:
    """Combine the two memories as a third one, which is active."""
    model.add_weighted_adapter(["one", "two"], weights, "both")
    model.set_adapter("both")
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_combined_memory_equals_both_together(family, tmp_path):
    model = make_two(family)
    base, single = logits(make_host(family)), {name: alone(model, name) for name in ("one", "two")}
    model.base_model.set_adapter(["one", "two"])
    expected = logits(model)
    assert all((expected - other).abs().max() > 1e-2 for other in (base, *single.values()))
    combine(model, [1.0, 1.0])
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert {layer.locas_up["both"].out_features for layer in list_layers(model)} == {7}
    assert torch.equal(alone(model, "one"), single["one"])
    model.save_pretrained(str(tmp_path), selected_adapters=["both"])
    loaded = PeftModel.from_pretrained(make_host(family), str(tmp_path / "both"))
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", [(0.5, 2.0), (1.0, -1.0), (0.0, 0.0), (-0.3, 0.0)])
def test_weights_scale_each_part(weights):
    model = make_two()
    with rescale(model, weights[0], "one"), rescale(model, weights[1], "two"):
        model.base_model.set_adapter(["one", "two"])
        expected = logits(model)
    combine(model, list(weights))
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_the_slots_of_all_parts_are_recorded_where_all_are_known():
    model = combine(make_two(), [1.0, 1.0])
    one, two, both = (
        model.peft_config[name].get_record("slots") for name in ("one", "two", "both")
    )
    assert both == {name: one[name] + two[name] for name in one}
    model.add_adapter("three", LocasConfig(r=2, init_weights="gaussian"))
    calibrate(model, [make_tokens()], "three")
    model.add_weighted_adapter(["one", "three"], [1.0, 1.0], "some")
    assert model.peft_config["some"].get_record("slots") is None


def test_slots_within_the_norm_clip_stay_within_it_and_training_goes_on():
    model = combine(make_two(), [3.0, 0.1])
    before = logits(model)
    for layer in list_layers(model):
        for projection, dim in zip(layer.projections("both"), (1, 1, 0), strict=True):
            assert projection.weight.norm(dim=dim).max() <= 1 + 1e-5
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trained and all(".both." in name for name in trained)
    losses = learn(model)
    assert losses[-1] < losses[0] and not torch.equal(logits(model), before)


BOTH = (["one", "two"], [1.0, 1.0], "both")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["one", "three"], [1.0, 1.0], "both"), r"adapters must .*, got \['one', 'three'\]"),
        ((["one", "one"], [1.0, 1.0], "both"), "adapters must name different memories"),
        (([], [], "both"), "adapters must name different memories"),
        ((["one", "two"], [1.0], "both"), r"a finite number for each of one, two, got \[1.0\]"),
        ((["one", "two"], [1.0, float("nan")], "both"), "weights must be a finite number"),
        ((["one", "two"], [1.0, 1.0], "one"), "adapter_name must be new to the model, got 'one':"),
        ((*BOTH, "svd"), "combination_type must .*, got 'svd'"),
    ],
)
def test_bad_arguments_leave_the_model_as_it_was(arguments, message, two):
    before = alone(two, "one")
    with pytest.raises(ValueError, match=message):
        two.add_weighted_adapter(*arguments)
    assert torch.equal(logits(two), before) and set(two.peft_config) == {"one", "two"}


ALONE = "adapters must have slots alone, got 'two' with {0}: train memories without {0} to combine"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, ALONE.format("modules_to_save")),
        ({"trainable_token_indices": [5, 6]}, ALONE.format("trainable_token_indices")),
        ({"layers_to_transform": [1]}, "adapters must be beside the same FFNs, got 'two' beside 1"),
        ({}, "the memory 'two' is empty"),
    ],
)
def test_memories_that_cannot_be_combined_are_named(second, message):
    model = make_model(name="one")
    model.add_adapter("two", LocasConfig(r=3, **second))
    with pytest.raises(ValueError, match=message):
        model.add_weighted_adapter(*BOTH)
    assert set(model.peft_config) == {"one", "two"}


def test_a_merged_memory_is_not_combined():
    model = make_two()
    model.merge_adapter(["two"])
    with pytest.raises(ValueError, match="the memory 'two' is merged: call unmerge_adapter"):
        model.add_weighted_adapter(*BOTH)


@pytest.mark.parametrize("autocast", [True, False])
def test_the_combined_memory_of_a_bfloat16_base_has_the_dtype_of_its_parts(autocast):
    model = get_peft_model(
        make_host("llama", torch.bfloat16), LocasConfig(r=4), autocast_adapter_dtype=autocast
    )
    calibrate(model, [make_tokens()])
    teach(model)
    model.add_weighted_adapter(["default"], [1.0], "same")
    for layer in list_layers(model):
        own, combined = (weights_in(layer, name) for name in ("default", "same"))
        assert combined[0].dtype == (torch.float32 if autocast else torch.bfloat16)
        assert all(map(torch.equal, own, combined))
        # A move to another device keeps the dtype.
        layer._move_adapter_to_device_of_base_layer("same")
        assert weights_in(layer, "same")[0].dtype == combined[0].dtype


def test_slots_longer_than_another_memory_s_clip_keep_their_length():
    model = make_two(max_slot_norm=None)
    with torch.no_grad():
        for layer in list_layers(model):
            layer.locas_down["two"].weight.mul_(30)
    model.base_model.set_adapter(["one", "two"])
    expected = logits(model)
    combine(model, [1.0, 1.0])
    assert model.peft_config["both"].max_slot_norm is None
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_memories_wider_together_than_the_host_s_ffn_can_be_combined():
    model = make_model(r=16)
    model.add_adapter("two", LocasConfig(r=16, init_weights="random"))
    teach(model, "two", 1)
    model.base_model.set_adapter(["default", "two"])
    expected = logits(model)
    assert list_layers(model)[0].ffn.slots < 32
    model.add_weighted_adapter(["default", "two"], [1.0, 1.0], "both")
    model.set_adapter("both")
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
