"""Two memories of one model, in every state: the outputs are what the active ones say, or one line refuses the step."""

import functools
import itertools
import random

import pytest
import torch
from families import logits, make_host, make_tokens, same, snapshot, teach
from peft import PeftModel, get_peft_model

from locas_peft import LocasConfig, calibrate, rescale
from locas_peft.tuner import list_layers

pytestmark = pytest.mark.filterwarnings(
    "ignore:Adapter cannot be set when the model is merged",
    "ignore:Already following adapters were merged",
    "ignore:All adapters are already merged",
    "ignore:Adapter .* was active which is now deleted",
    "ignore:The model contains some adapter layers that are enabled and others",
)


def add(model, name) -> None:
    width, seed = {"one": (4, 0), "two": (3, 1)}[name]
    model.add_adapter(name, LocasConfig(r=width, init_weights="random", seed=seed))
    teach(model, name, seed=seed)


def make_two(family) -> PeftModel:
    config = LocasConfig(r=4, init_weights="random")
    model = get_peft_model(make_host(family), config, adapter_name="one")
    teach(model, "one")
    add(model, "two")
    return model.eval()


@functools.cache
def say(family, *names) -> torch.Tensor:
    """Return what memories say together."""
    if not names:
        return logits(make_host(family))
    model = make_two(family)
    model.base_model.set_adapter(list(names))
    return logits(model)


def use_disabled(model) -> None:
    with model.disable_adapter():
        logits(model)


def use_rescaled(model) -> None:
    with rescale(model, 0.5):
        logits(model)


STEPS = {
    "set one": lambda model: model.set_adapter("one"),
    "set two": lambda model: model.set_adapter("two"),
    "set both": lambda model: model.base_model.set_adapter(["one", "two"]),
    "set none": lambda model: model.base_model.set_adapter([]),
    "merge": lambda model: model.merge_adapter(),
    "merge one": lambda model: model.merge_adapter(["one"]),
    "merge two": lambda model: model.merge_adapter(["two"]),
    "merge both": lambda model: model.merge_adapter(["one", "two"]),
    "unmerge": lambda model: model.unmerge_adapter(),
    "delete one": lambda model: model.delete_adapter("one"),
    "delete two": lambda model: model.delete_adapter("two"),
    "add one": lambda model: add(model, "one"),
    "add two": lambda model: add(model, "two"),
    "disabled": use_disabled,
    "disable": lambda model: model.base_model.disable_adapter_layers(),
    "enable": lambda model: model.base_model.enable_adapter_layers(),
    "rescaled": use_rescaled,
}


def describe(model) -> tuple:
    layers = []
    for layer in list_layers(model):
        parts = (layer.merged_adapters, layer.active_adapters, layer.disable_adapters)
        layers.append((*map(str, parts), list(layer.locas_up)))
    return layers, list(model.peft_config)


def check(family, steps) -> None:
    model = make_two(family)
    for number, step in enumerate(steps):
        done = str(steps[: number + 1])
        before = describe(model)
        expected = logits(model)
        try:
            STEPS[step](model)
        except ValueError as error:
            assert "\n" not in str(error) and describe(model) == before, done
            assert torch.equal(logits(model), expected), done
            continue
        states = describe(model)[0]
        assert all(state == states[0] for state in states), done
        layer = list_layers(model)[0]
        # What is merged by its name takes part as if it were active.
        taking_part = {*layer.active_adapters, *layer.merged_adapters} & set(layer.locas_up)
        if layer.disable_adapters:
            taking_part = set()
        said = say(family, *sorted(taking_part))
        torch.testing.assert_close(logits(model), said, rtol=1e-3, atol=1e-3, msg=done)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_every_two_steps(family):
    for steps in itertools.product(STEPS, repeat=2):
        check(family, steps)


@pytest.mark.parametrize(
    ("family", "walks"),
    [
        ("llama", 10),
        ("opt", 10),
        pytest.param("gpt2", 30, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 30, marks=pytest.mark.slow),
    ],
)
def test_random_walks(family, walks):
    generator = random.Random(0)
    for _ in range(walks):
        check(family, generator.choices(list(STEPS), k=8))


@pytest.mark.parametrize("family", ["llama", "opt", "qwen3_moe"])
@pytest.mark.parametrize(("merged", "other"), [("one", "two"), ("two", "one")])
def test_one_of_two_active_memories_is_merged(family, merged, other):
    model = make_two(family)
    model.base_model.set_adapter(["one", "two"])
    model.merge_adapter([merged])
    assert list_layers(model)[0].merged_adapters == [merged]
    torch.testing.assert_close(logits(model), say(family, "one", "two"), rtol=1e-4, atol=1e-4)
    model.delete_adapter(other)
    torch.testing.assert_close(logits(model), say(family, merged), rtol=1e-4, atol=1e-4)


def test_what_is_said_after_the_last_memory_is_deleted():
    model = make_two("llama")
    model.delete_adapter("one")
    assert not any("one" in name.split(".") for name in model.state_dict())
    model.delete_adapter("two")
    assert model.active_adapters == [] and not model.peft_config
    assert torch.equal(logits(model), say("llama"))
    with model.disable_adapter():
        assert torch.equal(logits(model), say("llama"))
    add(model, "two")
    model.set_adapter("two")
    assert torch.equal(logits(model), say("llama", "two"))
    with pytest.raises(ValueError, match="does not exist"):
        model.delete_adapter("one")


def test_a_memory_that_is_not_active_is_not_merged_in_place_of_the_active_one():
    model = make_two("llama")
    with pytest.raises(ValueError, match="adapter_names must be active, or merged with 'one'"):
        model.merge_adapter(["two"])
    merged = model.merge_and_unload(adapter_names=["two"])
    torch.testing.assert_close(logits(merged), say("llama", "two"), rtol=1e-4, atol=1e-4)


def test_a_new_memory_beside_a_merged_one_is_made_of_the_host_s_slots():
    model = make_two("llama")
    expected = snapshot(model)
    model.delete_adapter("two")
    model.merge_adapter()
    with pytest.warns(UserWarning, match="Unmerging the model first"):
        add(model, "two")
    assert same(model, expected)


@pytest.mark.parametrize("layers", [[0, 1], [1]])
def test_a_memory_beside_a_merged_one_is_not_calibrated(layers):
    config = LocasConfig(r=4, init_weights="random", layers_to_transform=[0])
    model = get_peft_model(make_host("llama"), config, adapter_name="one")
    teach(model, "one")
    model.add_adapter("two", LocasConfig(r=3, layers_to_transform=layers))
    model.base_model.set_adapter(["one", "two"])
    model.merge_adapter(["one"])
    first = list_layers(model, "two")[0]
    with pytest.raises(ValueError, match="'two' is beside a merged one: call unmerge_adapter"):
        calibrate(model, [make_tokens()], "two")
    with pytest.raises(ValueError, match="waits for its calibration is beside a merged one: call"):
        model.train()(input_ids=make_tokens(), labels=make_tokens())
    assert first.needs_calibration("two")
    assert list_layers(model, "one")[0].merged_adapters == ["one"]
    model.unmerge_adapter()
    calibrate(model, [make_tokens()], "two")


def test_adding_a_memory_fails_beside_a_merged_one():
    model = make_two("llama")
    model.merge_adapter()
    before = describe(model)
    with pytest.raises(ValueError, match="r must be at most"):
        model.add_adapter("wide", LocasConfig(r=1000))
    assert describe(model) == before
