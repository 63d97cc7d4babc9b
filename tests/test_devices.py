"""Devices that are not here: the way of a step on another device than the CPU, and how often a step waits for it.

The other device is `meta`, whose tensors have no values. Torch refuses operands on two devices, and a copy from `meta`
to the CPU. What a step decides by values is replaced: each number that it reads is 1, each truth true.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from families import make_host
from peft import LoraConfig, get_peft_model

import locas_peft
from locas_peft import LocasConfig, TestTimeTrainer, calibrate
from locas_peft.model import CausalLM
from locas_peft.ttt import Anchor, trainer
from locas_peft.tuner import LocasLayer

OURS = str(Path(locas_peft.__file__).parent)


def ones(shape):
    return [ones(shape[1:]) for _ in range(shape[0])] if shape else 1.0


@pytest.fixture
def elsewhere(monkeypatch):
    """Put models on `meta`; count the reads of values that our code asks for, by file and line."""
    waits: Counter[str] = Counter()

    def read(value):
        def reading(tensor, *args):
            frame = sys._getframe(1)
            if tensor.is_meta and frame.f_code.co_filename.startswith(OURS):
                waits[f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"] += 1
            return value(tensor)

        return reading

    monkeypatch.setattr(torch.Tensor, "tolist", read(lambda tensor: ones(tuple(tensor.shape))))
    monkeypatch.setattr(torch.Tensor, "item", read(lambda tensor: 1.0))
    monkeypatch.setattr(torch.Tensor, "__bool__", read(lambda tensor: True))
    # For a model on `meta` these stand for an offloaded one, and for a memory without rows.
    monkeypatch.setattr(CausalLM, "device", property(lambda host: torch.device("meta")))
    monkeypatch.setattr(LocasLayer, "needs_calibration", lambda layer, name: False)
    monkeypatch.setattr(trainer, "digest_ids", lambda ids: "of values")
    return waits


@pytest.mark.parametrize("context", ["cache", "recompute"])
@pytest.mark.parametrize("kind", ["locas", "lora"])
def test_a_step_stays_on_its_device_and_waits_for_it_twice(kind, context, request):
    config = (
        LocasConfig(r=4, task_type="CAUSAL_LM")
        if kind == "locas"
        else LoraConfig(target_modules="all-linear")
    )
    model = get_peft_model(make_host("llama", torch.bfloat16).requires_grad_(False), config)
    if kind == "locas":
        calibrate(model, [torch.arange(3, 35)[None]])
    waits = request.getfixturevalue("elsewhere")
    anchor = Anchor(torch.arange(3, 35).reshape(2, 16), weight=0.3, every=4)
    reader = TestTimeTrainer(
        model.to("meta"),
        window=16,
        stride=8,
        learning_rate=1e-3,
        context=context,
        steps=[anchor],
    )
    of_chunk = []
    for chunk in reader.read(torch.arange(3, 35).repeat(2)):
        of_chunk.append(sum(waits.values()))
        assert chunk.learned
        waits.clear()
    assert len(of_chunk) == 8
    assert max(of_chunk) <= 2, waits
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
