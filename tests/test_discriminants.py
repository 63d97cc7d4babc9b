"""Discriminants: the rows that a study begins with are open for one passage; nothing else of the memory changes."""

import json

import pytest
import torch
from safetensors.torch import load_file

from locas_peft import LocasConfig, text
from locas_peft.bases import loading
from locas_peft.memories import CHECKPOINT_FOLDER
from locas_peft.selfstudy import Exchange, SelfStudy, lessons
from locas_peft.slots import discriminants
from locas_peft.slots.discriminants import (
    can_tell_apart,
    place_discriminants,
    upper_layers_trained,
)
from locas_peft.stages import Place, ReadSettings, attached, complete, study
from locas_peft.ttt.active import calibrate_empty
from locas_peft.tuner.attached import list_layers
from locas_settings import StudySettings

TEXT = "The house on the hill was built by the old man with a stone from the river."
QUESTIONS = (
    "Who built the house?",
    "Who made the wall?",
    "What came from the river?",
    "Where was the stone?",
)
PASSAGES = (0, 0, 1, 1)
GIVEN = [Exchange(f"What is stone {number}?", f"Stone {number} is old.") for number in range(8)]


@pytest.fixture(scope="module")
def loaded():
    return loading.load_base(device="cpu")


@pytest.fixture
def model(loaded):
    base, tokenizer = loaded
    settings = complete(StudySettings(r=8), base)
    with attached(base, settings) as model:
        calibrate_empty(model, text.tokenize(tokenizer, TEXT)[None])
        yield model


def activate_at_ends(model, tokenizer, questions, count=1):
    """Return the gates' inputs of each layer's slots at the last tokens of questions, before the activation."""
    layers, gates, found = list_layers(model, "default"), [], []

    def record(layer):
        former = layer.activate

        def activate(names, ffn_input):
            gate = ffn_input[0, -count:] @ layer.locas_gate["default"].weight.mT
            gates.append(gate * layer.locas_input_scale["default"])
            return former(names, ffn_input)

        return activate

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for layer in layers:
            patch.setattr(layer, "activate", record(layer))
        for question in questions:
            gates.clear()
            model(torch.tensor([tokenizer(question)["input_ids"]]))
            assert len(gates) == len(layers)
            found.append(list(gates))
    return [torch.cat(of_layer) for of_layer in zip(*found, strict=True)]


def test_a_slot_is_open_for_the_prompts_of_one_passage_alone(model, loaded):
    tokenizer = loaded[1]
    before = [
        [module.weight.clone() for module in layer.projections("default")]
        for layer in list_layers(model)
    ]
    for layer in list_layers(model):
        layer.locas_down["default"].weight.data.fill_(0.5)
    prompts = [tokenizer(each)["input_ids"] for each in (*QUESTIONS, TEXT)]
    place_discriminants(model, prompts, [1] * 5, (*PASSAGES, -1), inside=False)
    gates = activate_at_ends(model, tokenizer, (*QUESTIONS, TEXT))
    first = int(discriminants.FIRST_LAYER * len(gates))
    assert 0 < first < len(gates)
    for number, (layer, gate, kept) in enumerate(
        zip(list_layers(model), gates, before, strict=True)
    ):
        gate_rows, up_rows, down = (module.weight for module in layer.projections("default"))
        assert torch.equal(gate_rows[:4], kept[0][:4]) and torch.equal(up_rows[:4], kept[1][:4])
        assert (down[:, :4] == 0.5).all()
        if number < first:
            assert torch.equal(gate_rows, kept[0]) and (down == 0.5).all()
            continue
        assert not down[:, 4:].any()
        for slot in range(4, 8):
            passage = ((number - first) * 4 + slot - 4) % 2
            own = torch.tensor([each == passage for each in (*PASSAGES, -1)])
            assert gate[own, slot].min() > gate[~own, slot].max()
            assert (gate[own, slot] > 0).all() and (gate[~own, slot] < 0).all()
    assert all(layer.observer is None for layer in list_layers(model))


def test_a_first_slot_is_open_inside_the_answers_with_one_passage_alone(model, loaded):
    tokenizer = loaded[1]
    before = [layer.locas_gate["default"].weight.clone() for layer in list_layers(model)]
    rows = [tokenizer(each)["input_ids"] for each in (*QUESTIONS, TEXT)]
    place_discriminants(model, rows, [3] * 5, (*PASSAGES, -1), inside=True)
    gates = activate_at_ends(model, tokenizer, (*QUESTIONS, TEXT), count=3)
    first = int(discriminants.FIRST_LAYER * len(gates))
    for number, (layer, gate, kept) in enumerate(
        zip(list_layers(model), gates, before, strict=True)
    ):
        assert torch.equal(layer.locas_gate["default"].weight[4:], kept[4:])
        for slot in range(4) if number >= first else ():
            passage = ((number - first) * 4 + slot) % 2
            own = torch.tensor([each == passage for each in (*PASSAGES, -1)]).repeat_interleave(3)
            assert gate[own, slot].mean() > 0.5 and gate[~own, slot].mean() < -0.5
            assert gate[own, slot].min() > gate[~own, slot].max()


def test_inputs_that_a_host_flattens_are_rows_again():
    seen, inputs = discriminants._Inputs(), torch.arange(24.0).reshape(2, 4, 3)
    seen.counts = (1, 2)
    seen.update(inputs.flatten(0, 1))
    assert torch.equal(torch.cat(seen), torch.cat([inputs[0, -1:], inputs[1, -2:]]))


def test_lower_layers_are_not_trained_meanwhile(model):
    layers = list_layers(model)
    first = int(discriminants.FIRST_LAYER * len(layers))

    def list_trained():
        return [
            all(m.weight.requires_grad for m in layer.projections("default")) for layer in layers
        ]

    with pytest.raises(RuntimeError, match="stop"), upper_layers_trained(model):
        assert list_trained() == [number >= first for number in range(len(layers))]
        raise RuntimeError("stop")
    assert all(list_trained())


def test_each_passage_needs_a_slot_in_each_layer(loaded):
    base, tokenizer = loaded
    with attached(base, complete(ReadSettings(r=16), base)) as model:
        counts = (2, 3, 8, 9)
        told_apart = [can_tell_apart(model, passages) for passages in counts]
        assert told_apart == [False, True, True, False]


def test_a_passage_has_at_most_three_slots_of_a_layer(loaded):
    base, tokenizer = loaded
    with attached(base, complete(ReadSettings(r=16), base)) as model:
        calibrate_empty(model, text.tokenize(tokenizer, TEXT)[None])
        layer = list_layers(model)[-1]
        before = layer.locas_gate["default"].weight.clone()
        place_discriminants(
            model,
            [tokenizer(each)["input_ids"] for each in QUESTIONS],
            [1] * 4,
            PASSAGES,
            inside=False,
        )
        changed = (layer.locas_gate["default"].weight != before).any(1)
    assert changed.tolist() == [False] * 10 + [True] * 6


@pytest.mark.parametrize("width", [1, 2])
def test_the_narrowest_memories_are_studied_too(width, loaded, tmp_path):
    base, tokenizer = loaded
    settings = StudySettings(r=width, passes=1, anchor=0.0)
    ids = text.tokenize(tokenizer, TEXT)
    place = Place(out=tmp_path / "m")
    record = study(base, tokenizer, ids, settings, place, exchanges=GIVEN)
    assert record.kept == len(GIVEN) and record.steps == 1


@pytest.mark.parametrize(
    ("fields", "placed"),
    [
        ({}, True),
        ({"max_slot_norm": 1.0}, False),
        ({"init": "random"}, False),
        ({"method": "lora"}, False),
    ],
)
def test_a_study_places_them_in_a_memory_with_default_rows_and_lifts_its_clip(
    fields, placed, loaded, tmp_path, monkeypatch
):
    base, tokenizer = loaded
    calls, place = [], place_discriminants
    monkeypatch.setattr(
        "locas_peft.selfstudy.distillation.place_discriminants",
        lambda *a, **o: [calls.append(o), place(*a, **o)],
    )
    settings = StudySettings(passes=1, anchor=0.0, r=16, **fields)
    ids = text.tokenize(tokenizer, TEXT)
    study(base, tokenizer, ids, settings, Place(out=tmp_path / "m"), exchanges=GIVEN)
    assert calls == ([{"inside": False}, {"inside": True}] if placed else [])
    config = json.loads((tmp_path / "m" / "adapter_config.json").read_text())
    if "method" not in fields:
        assert (config["max_slot_norm"] is None) == placed
        assert (config["record"]["slots"] is None) == placed


def test_the_trained_memory_gets_them_where_others_are_active_beside_it(loaded):
    base, tokenizer = loaded
    with attached(base, complete(ReadSettings(r=8), base)) as model:
        calibrate_empty(model, text.tokenize(tokenizer, TEXT)[None])
        model.add_adapter("other", LocasConfig(r=8, task_type="CAUSAL_LM"))
        model.base_model.set_adapter(["other", "default"])
        for layer in list_layers(model):
            for module in layer.projections("other"):
                module.weight.requires_grad_(False)
        others = [layer.locas_gate["other"].weight.clone() for layer in list_layers(model)]
        own = [layer.locas_gate["default"].weight.clone() for layer in list_layers(model)]
        place_discriminants(
            model,
            [tokenizer(each)["input_ids"] for each in QUESTIONS],
            [1] * 4,
            PASSAGES,
            inside=False,
        )
        for layer, other in zip(list_layers(model), others, strict=True):
            assert torch.equal(layer.locas_gate["other"].weight, other)
        assert not torch.equal(list_layers(model)[-1].locas_gate["default"].weight, own[-1])


def test_an_interrupted_study_goes_on_to_the_same_bits_and_lower_layers_do_not_learn(
    loaded, tmp_path, monkeypatch
):
    monkeypatch.setattr(lessons, "TOPICS", lessons.TOPICS[:2])
    base, tokenizer = loaded
    settings = StudySettings(passes=4, anchor=0.3, r=16)
    ids, folders = text.tokenize(tokenizer, TEXT), [tmp_path / name for name in ("whole", "broken")]

    def interrupt(step):
        if step.phase == "learn" and step.done >= 2:
            raise KeyboardInterrupt

    def learn(on_step=None, **place):
        place = Place(checkpoint_seconds=0, **place)
        study(base, tokenizer, ids, settings, place, exchanges=GIVEN, on_step=on_step)

    learn(out=folders[0])
    broken = {"out": folders[1], "checkpoint_dir": folders[1] / CHECKPOINT_FOLDER}
    with pytest.raises(KeyboardInterrupt):
        learn(interrupt, **broken)
    learn(resume=True, **broken)
    found = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])

    # The values of a fresh memory are zero.
    changed = [bool(found[0][key].any()) for key in sorted(found[0]) if "locas_down" in key]
    first = int(discriminants.FIRST_LAYER * len(changed))
    assert changed == [number >= first for number in range(len(changed))]


def test_a_study_that_is_left_at_a_step_leaves_the_memory_trainable(model, loaded):
    tokenizer = loaded[1]
    settings = StudySettings(passes=2, learning_rate=1e-3, init="topk")
    ids = text.tokenize(tokenizer, TEXT)
    study = SelfStudy(model, tokenizer, ids, settings, given=GIVEN)
    before = [each.requires_grad for each in model.parameters()]
    steps = study.run()
    next(steps)
    assert [each.requires_grad for each in model.parameters()] == before
