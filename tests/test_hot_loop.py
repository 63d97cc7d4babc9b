"""What a chunk must not do: walk the model's modules, wait for the device twice, or repeat the base's passes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import (
    CONTEXTS,
    SETTINGS,
    assert_same,
    make_ids,
    make_model,
    make_trainer,
    read,
    trained_weights,
    without_time,
)

from locas_peft import TestTimeTrainer
from locas_peft.ttt import Anchor

# Operations that read a tensor's values on the processor: a GPU has to be waited for.
WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero"}
WALKS = ("children", "modules", "named_children", "named_modules", "named_parameters", "parameters")


class CountWaits(TorchDispatchMode):
    """Count the operations that a GPU would have to be waited for."""

    def __init__(self):
        super().__init__()
        self.waits = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in WAITS:
            self.waits[name] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counting(monkeypatch) -> Iterator[Counter]:
    """Count waits and walks within the context, by what asked for them."""
    counts = Counter()

    def patch(owner: type, name: str) -> None:
        former = getattr(owner, name)

        def count(*args, **kwargs):
            counts[name] += 1
            return former(*args, **kwargs)

        patches.setattr(owner, name, count)

    with monkeypatch.context() as patches:
        for name in WALKS:
            patch(nn.Module, name)
        # These read the values without an operation.
        for name in ("tolist", "numpy", "cpu"):
            patch(torch.Tensor, name)
        with CountWaits() as mode:
            yield counts
    counts.update(mode.waits)


def make_anchor(every: int = 2, texts: int = 2) -> Anchor:
    return Anchor(torch.stack([make_ids(12, seed) for seed in range(5, 5 + texts)]), every=every)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    ("kind", "anchored"),
    [("plain", False), ("locas", False), ("locas", True), ("lora", False), ("lora", True)],
)
def test_a_chunk_walks_no_modules_and_waits_for_the_device_once(
    kind, anchored, context, monkeypatch
):
    steps = [make_anchor()] if anchored else []
    rate = None if kind == "plain" else 0.02
    trainer = make_trainer(kind, context=context, steps=steps, learning_rate=rate)
    chunks = trainer.read(make_ids(200))
    # Calibration, and the first pull, which finds out whether the base's states can be kept.
    for _ in range(3):
        next(chunks)
    for _ in range(4):
        with counting(monkeypatch) as counts:
            next(chunks)
        assert counts == {"tolist": 1}


def make_anchored(model, anchor: Anchor) -> TestTimeTrainer:
    return TestTimeTrainer(model, **SETTINGS, steps=[anchor])


def count_base_passes(model) -> Counter:
    """Count the forward passes of the host's first layer, by whether gradients are enabled."""
    passes = Counter()
    layer = model.get_base_model().model.layers[0]
    layer.register_forward_hook(lambda *_: passes.update([torch.is_grad_enabled()]))
    return passes


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("kind", ["locas", "lora"])
def test_the_base_passes_once_over_texts_that_return_and_figures_stay_the_same(kind, family):
    chunks = []
    weights = []
    passes = []
    for keeps in (True, False):
        anchor = make_anchor()
        model = make_model(kind, family)
        trainer = make_anchored(model, anchor)
        if not keeps:
            anchor._find_logits(trainer.host)._keeps = False
        passes.append(count_base_passes(model))
        read(trainer, make_ids(120))
        chunks.append(without_time(trainer.chunks))
        weights.append(trained_weights(model))
    assert chunks[0] == chunks[1]
    assert_same(*weights)
    # The memory's calibration is one pass more without gradients.
    extra = kind == "locas"
    assert passes[1][False] == 7 + extra
    # Gemma bounds what its head returns, so that the head's input is not kept.
    assert passes[0][False] == (7 if family == "gemma2" else 2) + extra


def test_the_base_passes_again_after_adapters_were_switched():
    model = make_model()
    model.add_adapter("other", model.peft_config["default"])
    trainer = make_anchored(model, make_anchor(every=1, texts=1))
    passes = count_base_passes(model)
    chunks = trainer.read(make_ids(60))
    for _ in range(3):
        next(chunks)
    before = passes[False]
    model.base_model.set_adapter(["default", "other"])
    trainer.steps[0].loss(trainer.host, 0)
    trainer.steps[0].loss(trainer.host, 0)
    assert passes[False] == before + 1


def test_a_base_that_is_trained_is_not_kept():
    model = make_model("lora")
    model.get_base_model().model.norm.weight.requires_grad_(True)
    trainer = make_anchored(model, make_anchor(every=1, texts=1))
    passes = count_base_passes(model)
    read(trainer, make_ids(40))
    assert passes[False] == 5
