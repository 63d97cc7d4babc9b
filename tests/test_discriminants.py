"""Discriminants: the rows that a study begins with are open for one passage; nothing else of the memory changes."""

import json

import pytest
import torch
from safetensors.torch import load_file
from training import assert_same

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
from locas_peft.stages import Place, attached, complete, study
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
def model(loaded, request):
    base, tokenizer = loaded
    settings = complete(StudySettings(r=getattr(request, "param", 8)), base)
    with attached(base, settings) as model:
        calibrate_empty(model, text.tokenize(tokenizer, TEXT)[None])
        yield model


def place(model, tokenizer, texts=QUESTIONS, passages=PASSAGES, count=1, inside=False):
    rows = [tokenizer(each)["input_ids"] for each in texts]
    place_discriminants(model, rows, [count] * len(rows), passages, inside=inside)


def list_slots(model, name="default") -> torch.Tensor:
    """The gate and up rows and the values of a memory `[L, 3, R, D]`."""
    slots = []
    for layer in list_layers(model, name):
        gate, up, down = (module.weight.detach() for module in layer.projections(name))
        slots.append(torch.stack([gate, up, down.T]))
    return torch.stack(slots)


def activate_at_ends(model, tokenizer, texts, count):
    """Return each layer's gates, before the activation, at the last tokens of texts."""
    gates = {}
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for layer in list_layers(model, "default"):

            def activate(names, ffn_input, layer=layer, former=layer.activate):
                gate = ffn_input[0, -count:] @ layer.locas_gate["default"].weight.mT
                gates.setdefault(layer, []).append(gate * layer.locas_input_scale["default"])
                return former(names, ffn_input)

            patch.setattr(layer, "activate", activate)
        for each in texts:
            model(torch.tensor([tokenizer(each)["input_ids"]]))
    return [torch.cat(gates[layer]) for layer in list_layers(model, "default")]


@pytest.mark.parametrize(("inside", "count"), [(False, 1), (True, 3)])
def test_a_slot_is_open_for_the_tokens_of_one_passage_alone(model, loaded, inside, count):
    texts, passages = (*QUESTIONS, TEXT), (*PASSAGES, -1)
    for layer in list_layers(model):
        layer.locas_down["default"].weight.data.fill_(1e-4)
    before = list_slots(model)
    place(model, loaded[1], texts, passages, count, inside)
    after = list_slots(model)
    gates = activate_at_ends(model, loaded[1], texts, count)
    first = int(discriminants.FIRST_LAYER * len(gates))
    assert 0 < first < len(gates) and torch.equal(after[:first], before[:first])
    kept, placed = range(4), range(4, 8)
    if inside:
        kept, placed = placed, kept
    assert torch.equal(after[first:, :, list(kept)], before[first:, :, list(kept)])
    assert not after[first:, 2, list(placed)].any()
    owners = torch.tensor(passages).repeat_interleave(count)
    for number, gate in enumerate(gates[first:]):
        for slot in placed:
            is_own = owners == (number * 4 + slot) % 2
            own, others = gate[is_own, slot], gate[~is_own, slot]
            assert own.min() > others.max()
            if inside:
                assert own.mean() > 0.5 and others.mean() < -0.5
            else:
                assert own.min() > 0 > others.max()
    assert all(layer.observer is None for layer in list_layers(model))


def test_inputs_that_a_host_flattens_are_rows_again():
    seen, inputs = discriminants._Inputs(), torch.arange(24.0).reshape(2, 4, 3)
    seen.counts = (1, 2)
    seen.update(inputs.flatten(0, 1))
    assert torch.equal(torch.cat(seen), torch.cat([inputs[0, -1:], inputs[1, -2:]]))


def test_lower_layers_are_trained_again_after_an_error(model):
    before = [each.requires_grad for each in model.parameters()]
    with pytest.raises(RuntimeError, match="stop"), upper_layers_trained(model):
        raise RuntimeError("stop")
    assert [each.requires_grad for each in model.parameters()] == before


@pytest.mark.parametrize("model", [16], indirect=True)
def test_each_passage_needs_a_slot_in_each_layer(model):
    told_apart = [can_tell_apart(model, passages) for passages in (2, 3, 8, 9)]
    assert told_apart == [False, True, True, False]


@pytest.mark.parametrize("model", [16], indirect=True)
def test_a_passage_has_at_most_three_slots_of_a_layer(model, loaded):
    before = list_slots(model)
    place(model, loaded[1])
    changed = (list_slots(model)[-1, 0] != before[-1, 0]).any(1)
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
    calls = []

    def note(*arguments, inside):
        calls.append(inside)
        place_discriminants(*arguments, inside=inside)

    monkeypatch.setattr("locas_peft.selfstudy.distillation.place_discriminants", note)
    settings = StudySettings(passes=1, anchor=0.0, r=16, **fields)
    ids = text.tokenize(tokenizer, TEXT)
    study(base, tokenizer, ids, settings, Place(out=tmp_path / "m"), exchanges=GIVEN)
    assert calls == ([False, True] if placed else [])
    config = json.loads((tmp_path / "m" / "adapter_config.json").read_text())
    if "method" not in fields:
        assert (config["max_slot_norm"] is None) == placed
        assert (config["record"]["slots"] is None) == placed


def test_the_trained_memory_gets_them_where_others_are_active_beside_it(model, loaded):
    model.add_adapter("other", LocasConfig(r=8, task_type="CAUSAL_LM"))
    model.base_model.set_adapter(["other", "default"])
    for layer in list_layers(model):
        for module in layer.projections("other"):
            module.weight.requires_grad_(False)
    other, own = list_slots(model, "other"), list_slots(model)
    place(model, loaded[1])
    assert torch.equal(list_slots(model, "other"), other)
    assert not torch.equal(list_slots(model), own)


def test_an_interrupted_study_goes_on_to_the_same_bits_and_lower_layers_do_not_learn(
    loaded, tmp_path, monkeypatch
):
    monkeypatch.setattr(lessons, "TOPICS", lessons.TOPICS[:2])
    base, tokenizer = loaded
    settings = StudySettings(passes=4, anchor=0.3, r=16)
    ids = text.tokenize(tokenizer, TEXT)

    def interrupt(step):
        if step.phase == "learn" and step.done >= 2:
            raise KeyboardInterrupt

    def learn(name, on_step=None, resume=False):
        out = tmp_path / name
        checkpoint = out / CHECKPOINT_FOLDER
        place = Place(out=out, checkpoint_dir=checkpoint, checkpoint_seconds=0, resume=resume)
        study(base, tokenizer, ids, settings, place, exchanges=GIVEN, on_step=on_step)

    learn("whole")
    with pytest.raises(KeyboardInterrupt):
        learn("broken", interrupt)
    learn("broken", resume=True)
    whole, broken = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "broken")
    )
    assert_same(whole, broken)

    # The values of a fresh memory are zero.
    changed = [bool(whole[key].any()) for key in sorted(whole) if "locas_down" in key]
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
