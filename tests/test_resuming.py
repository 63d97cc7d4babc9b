"""A checkpoint is loaded into the run that wrote it; where it is refused, nothing has changed."""

import os

import pytest
import torch
from families import VOCABULARY, each_family, make_host
from peft import get_peft_model
from training import (
    SETTINGS,
    assert_same,
    make_ids,
    make_model,
    make_trainer,
    read,
    resume,
    save,
    sgd,
    spoil,
    weights_of,
)

from locas_peft import LocasConfig
from locas_peft.memories import checkpoint
from locas_peft.model import fingerprint
from locas_peft.ttt import TestTimeTrainer


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys"
)  # PEFT's LoRA for experts
@pytest.mark.parametrize("family", each_family())
def test_the_fingerprint_of_a_base_is_the_same_with_and_without_adapters(family):
    expected = fingerprint(make_host(family))
    assert fingerprint(make_model("locas", family)) == expected
    assert fingerprint(make_model("lora", family)) == expected


def test_the_fingerprint_is_that_of_the_base():
    expected, spoiled, trainer = fingerprint(make_host("llama")), make_host("llama"), make_trainer()
    read(trainer, make_ids(24))
    assert fingerprint(trainer.model) == expected
    assert fingerprint(make_model("lora", modules_to_save=["lm_head"])) == expected
    spoil(spoiled, 0)
    assert fingerprint(spoiled) != expected
    assert fingerprint(make_host("llama", torch.bfloat16)) != expected
    spoiled = make_host("llama")
    next(spoiled.parameters()).data.view(-1)[20] += 1  # not among the first numbers
    assert fingerprint(spoiled) != expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 24}, "window must be 16 {}, got 24: give the former value, or choose"),
        ({"stride": 4}, "stride must be 8 {}, got 4: give the former value, or choose"),
        ({"context": "cache"}, "context must be 'recompute' {}, got 'cache': give the"),
        ({"readings": 2}, "readings must be 1 {}, got 2: give the former value, or"),
        ({"optimizer": sgd(0.1)}, "optimizer must be None {}, got 'training.sgd.<locals>.<"),
        ({"r": 8}, "adapter 'default': r must be 4 {}, got 8: give the former value, or"),
        ({"layers_to_transform": [1]}, "adapter 'default': layers_to_transform must be None {}"),
        ({"kind": "plain"}, "active adapters must be ['default'] {}, got []: activate"),
        ({"kind": "lora"}, "adapter 'default': peft_type must be 'LOCAS' {}, got 'LORA'"),
        ({"family": "qwen2"}, "model must be the one {}, got other base weights: load that"),
        ({"spoiled": True}, "model must be the one {}, got other base weights: load that"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, change, message):
    trainer = make_trainer()
    read(trainer, make_ids(24))
    save(trainer, tmp_path)

    change = dict(change)
    spoiled = change.pop("spoiled", False)
    options = {
        name: change.pop(name)
        for name in ("kind", "family", "r", "layers_to_transform")
        if name in change
    }
    model = make_model(**options)
    if spoiled:
        spoil(model, 0)
    other = TestTimeTrainer(model, **SETTINGS | change)
    before = weights_of(model)
    with pytest.raises(ValueError) as caught:
        resume(other, tmp_path)
    of = "of" if "the one" in message else "as in"
    message = message.format(f"{of} the checkpoint in {str(tmp_path)!r}")
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
    assert other.position == 0
    after = weights_of(model)
    assert all(
        torch.equal(after[name].nan_to_num(), value.nan_to_num()) for name, value in before.items()
    )
    assert os.listdir(tmp_path) == [checkpoint.CHECKPOINT]


FIRST = "base_model.model.model.layers.0.mlp.locas_up.default.weight"
BASE = "base_model.model.model.embed_tokens.weight"


@pytest.mark.parametrize(
    "tamper",
    [
        lambda state: state.pop("chunks"),
        lambda state: state.pop("run"),
        lambda state: state.update(chunks=[1]),
        lambda state: state["chunks"][0].update(stop=30),
        lambda state: state["chunks"][1].update(start=3),
        lambda state: state.update(skipped_chunks="x"),
        lambda state: state["learner"].update(steps="x"),
        lambda state: state["learner"]["optimizer"].update(param_groups=[{}]),
        lambda state: state["learner"]["optimizer"]["state"][5].update(exp_avg=torch.zeros(3, 5)),
        lambda state: state["learner"]["optimizer"]["state"][5].pop("exp_avg"),
        lambda state: state["scorer"]["cache"]["layers"].append(
            (torch.zeros(1, 1, 7, 8), torch.zeros(3, 5))
        ),
        lambda state: state["random"].update(cpu=torch.zeros(3)),
        lambda state: state["model"]["parameters"].pop(FIRST),
        lambda state: state["model"]["parameters"].update({FIRST: torch.zeros(3, 5)}),
        lambda state: state["model"]["parameters"].update(
            {FIRST: torch.zeros(4, 16, dtype=torch.float64)}
        ),
        lambda state: state["model"]["parameters"].update({BASE: torch.zeros(VOCABULARY, 16)}),
        lambda state: state["model"]["filled"].update({"missing": {"slots": None}}),
    ],
)
def test_a_tampered_checkpoint_is_refused_and_changes_nothing(tmp_path, tamper):
    ids = make_ids(32)
    trainer = make_trainer(context="cache")
    reading = trainer.read(ids)
    next(reading)
    next(reading)
    state = checkpoint.load(save(trainer, tmp_path).parent)
    tamper(state)
    checkpoint.save(tmp_path, state)
    reading.close()
    fresh = make_trainer(context="cache")
    before, config = weights_of(fresh.model), fresh.model.peft_config["default"].to_dict()
    random = torch.get_rng_state()
    with pytest.raises(ValueError) as caught:
        resume(fresh, tmp_path)
    path = tmp_path / checkpoint.CHECKPOINT
    assert str(caught.value).startswith(
        f"checkpoint must be whole, got the damaged file {str(path)!r} ("
    )
    assert str(caught.value).endswith("): delete it to start afresh")
    assert "\n" not in str(caught.value)
    assert_same(weights_of(fresh.model), before)
    assert fresh.model.peft_config["default"].to_dict() == config
    assert (fresh.position, fresh.chunks, fresh.learner.optimizer) == (0, [], None)
    assert torch.equal(torch.get_rng_state(), random)
    assert os.listdir(tmp_path) == [checkpoint.CHECKPOINT]
    assert read(fresh, ids) == read(make_trainer(context="cache"), ids)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_without_memory_a_whole_checkpoint_is_not_called_damaged(tmp_path, monkeypatch, error):
    ids = make_ids(32)
    trainer = make_trainer()
    next(trainer.read(ids))
    save(trainer, tmp_path)

    def fail(*args, **kwargs):
        raise error("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(TestTimeTrainer, "load_state_dict", fail)
        with pytest.raises(error):
            resume(make_trainer(), tmp_path)
    resume(make_trainer(), tmp_path)


def test_what_changes_no_arithmetic_may_differ(tmp_path):
    trainer = make_trainer()
    read(trainer, make_ids(24))
    save(trainer, tmp_path)
    model = get_peft_model(
        make_host("llama"),
        LocasConfig(r=4, scaling=16.0, output_scale="paper", task_type="CAUSAL_LM", revision="x"),
    )
    model.add_adapter("inactive", LocasConfig(r=2))
    resumed = TestTimeTrainer(model, **SETTINGS)
    resume(resumed, tmp_path)
    expected = weights_of(trainer.model)
    assert_same(
        {name: value for name, value in weights_of(model).items() if name in expected}, expected
    )
