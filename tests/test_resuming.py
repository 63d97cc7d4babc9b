"""A checkpoint is loaded into the run that wrote it; where it is refused, nothing has changed."""

import os
import re

import pytest
import torch
from families import VOCABULARY, each_family, make_host
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
    expected, changed, trainer = fingerprint(make_host("llama")), make_host("llama"), make_trainer()
    read(trainer, make_ids(24))
    assert fingerprint(trainer.model) == expected
    assert fingerprint(make_model("lora", modules_to_save=["lm_head"])) == expected
    assert fingerprint(make_host("llama", torch.bfloat16)) != expected
    # Not among the first numbers.
    next(changed.parameters()).data.view(-1)[20] += 1
    assert fingerprint(changed) != expected


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (
            {"window": 24},
            {},
            "window must be 16 as in {}, got 24: give the former value, or choose",
        ),
        (
            {"optimizer": sgd(0.1)},
            {},
            "optimizer must be None as in {}, got 'training.sgd.<locals>",
        ),
        ({}, {"r": 8}, "adapter 'default': r must be 4 as in {}, got 8: give the former value, or"),
        (
            {},
            {"layers_to_transform": [1]},
            "adapter 'default': layers_to_transform must be None as",
        ),
        ({}, {"kind": "plain"}, "active adapters must be ['default'] as in {}, got []: activate"),
        ({}, {"kind": "lora"}, "adapter 'default': peft_type must be 'LOCAS' as in {}, got 'LORA'"),
        ({}, {"family": "qwen2"}, "model must be the one of {}, got other base weights: load that"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, settings, options, message):
    trainer = make_trainer()
    read(trainer, make_ids(24))
    save(trainer, tmp_path)
    other = TestTimeTrainer(make_model(**options), **SETTINGS | settings)
    before = weights_of(other.model)
    with pytest.raises(ValueError) as caught:
        resume(other, tmp_path)
    assert str(caught.value).startswith(message.format(f"the checkpoint in {str(tmp_path)!r}"))
    assert other.position == 0
    assert_same(weights_of(other.model), before)
    assert os.listdir(tmp_path) == [checkpoint.CHECKPOINT]


FIRST = ("model", "parameters", "base_model.model.model.layers.0.mlp.locas_up.default.weight")
BASE = ("model", "parameters", "base_model.model.model.embed_tokens.weight")
OPTIMIZER = ("learner", "optimizer")
GONE = object()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("chunks",), GONE),
        (("run",), GONE),
        (("chunks", 0, "stop"), 30),
        (("chunks", 1, "start"), 3),
        (("learner", "steps"), "x"),
        ((*OPTIMIZER, "param_groups"), [{}]),
        ((*OPTIMIZER, "state", 5, "exp_avg"), torch.zeros(3, 5)),
        ((*OPTIMIZER, "state", 5, "exp_avg"), GONE),
        (("scorer", "cache", "layers", 0), (torch.zeros(1, 1, 7, 8), torch.zeros(3, 5))),
        (("random", "cpu"), torch.zeros(3)),
        (FIRST, GONE),
        (FIRST, torch.zeros(3, 5)),
        (FIRST, torch.zeros(4, 16, dtype=torch.float64)),
        (BASE, torch.zeros(VOCABULARY, 16)),
        (("model", "filled", "missing"), {"slots": None}),
    ],
)
def test_a_tampered_checkpoint_is_refused_and_changes_nothing(tmp_path, path, value):
    ids, trainer, fresh = make_ids(32), make_trainer(context="cache"), make_trainer(context="cache")
    reading = trainer.read(ids)
    next(reading)
    next(reading)
    state = checkpoint.load(save(trainer, tmp_path).parent)
    entries = state
    for key in path[:-1]:
        entries = entries[key]
    entries[path[-1]] = value
    if value is GONE:
        del entries[path[-1]]
    checkpoint.save(tmp_path, state)
    before, config = weights_of(fresh.model), fresh.model.peft_config["default"].to_dict()
    random = torch.get_rng_state()
    file = re.escape(repr(str(tmp_path / checkpoint.CHECKPOINT)))
    message = rf"^checkpoint must be whole, got the damaged file {file} \(.*\): delete it to start"
    with pytest.raises(ValueError, match=message):
        resume(fresh, tmp_path)
    assert_same(weights_of(fresh.model), before)
    assert fresh.model.peft_config["default"].to_dict() == config
    assert (fresh.position, fresh.chunks, fresh.learner.optimizer) == (0, [], None)
    assert torch.equal(torch.get_rng_state(), random)
    assert os.listdir(tmp_path) == [checkpoint.CHECKPOINT]
    list(reading)
    assert read(fresh, ids) == [chunk.nll_nats for chunk in trainer.chunks]


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_without_memory_a_whole_checkpoint_is_not_called_damaged(tmp_path, monkeypatch, error):
    trainer = make_trainer()
    next(trainer.read(make_ids(32)))
    save(trainer, tmp_path)

    def fail(*_):
        raise error("out of memory")

    monkeypatch.setattr(TestTimeTrainer, "load_state_dict", fail)
    with pytest.raises(error):
        resume(make_trainer(), tmp_path)


def test_what_changes_no_arithmetic_may_differ(tmp_path):
    trainer = make_trainer()
    read(trainer, make_ids(24))
    save(trainer, tmp_path)
    model = make_model(task_type="CAUSAL_LM", revision="x")
    model.add_adapter("inactive", LocasConfig(r=2))
    resume(TestTimeTrainer(model, **SETTINGS), tmp_path)
    found, expected = weights_of(model), weights_of(trainer.model)
    assert_same({name: found[name] for name in expected}, expected)
