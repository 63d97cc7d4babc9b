"""Every slot's rows and column stay in the unit ball, whoever takes the optimizer's step."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from datasets import Dataset
from families import make_host, make_tokens, weights_in
from peft import get_peft_model

from locas_peft import LocasConfig, compress
from locas_peft.tuner import list_layers
from locas_peft.tuner.norm_clip import clip_norms_


def make_model(family="llama", **kwargs):
    return get_peft_model(
        make_host(family), LocasConfig(**{"r": 4, "scaling": 400.0, **kwargs})
    ).train()


def slot_norms(model, adapter_name="default"):
    """All norms of gate rows, up rows and down columns."""
    norms = []
    for layer in list_layers(model):
        *rows, down = weights_in(layer, adapter_name)
        norms += [weight.detach().float().norm(dim=1) for weight in rows] + [
            down.detach().float().norm(dim=0)
        ]
    return torch.cat(norms)


def assert_clipped(model, reached=True):
    norms = slot_norms(model)
    assert norms.max() <= 1 + 1e-6
    assert not reached or norms.max() > 1 - 1e-3


def train(model, optimizer, steps=3, step=None):
    for _ in range(steps):
        model(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
        (step or optimizer.step)()
        optimizer.zero_grad()


def test_projection_is_the_paper_s():
    weight = torch.randn(5, 7) * torch.tensor([0.01, 0.3, 1.0, 3.0, 100.0])[:, None]
    expected = weight / weight.norm(dim=1, keepdim=True).clamp(min=1)
    for dim, given in ((1, weight.clone()), (0, weight.T.clone())):
        clip_norms_([given], [dim], max_norm=1.0)
        torch.testing.assert_close(given if dim else given.T, expected)
    small = weight[:2].clone()
    for radius in (2.9, 7.4, 10.0):  # radii whose reciprocal is rounded, too
        clip_norms_([small], [1], max_norm=radius)
        assert torch.equal(small, weight[:2])


def test_flattened_rows_are_refused():
    with pytest.raises(
        ValueError, match=r"whole rows of a memory, got a flattened part of shape \[12\]: use FSDP2"
    ):
        clip_norms_([torch.ones(12)], [-1], max_norm=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_grouped_clip_is_bit_identical_to_one_weight_at_a_time(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 256), (256, 64), (64, 256), (5, 7), (7, 5)]
    weights = [(0.2 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]
    dims, alone = [-1, -2, -1, -1, -2], [weight.clone() for weight in weights]
    clip_norms_(weights, dims, max_norm=1.3)
    for weight, single, dim in zip(weights, alone, dims, strict=True):
        norms = torch.linalg.vector_norm(
            single.float() if dtype == torch.bfloat16 else single, dim=dim, keepdim=True
        )
        expected = single * (1 / (norms / 1.3).clamp(min=1)).to(dtype)
        clip_norms_([single], [dim], max_norm=1.3)
        assert torch.equal(weight, single) and torch.equal(weight, expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad", "RMSprop", "NAdam"])
def test_bare_loop(family, optimizer):
    model = make_model(family)
    train(
        model,
        getattr(torch.optim, optimizer)([p for p in model.parameters() if p.requires_grad], lr=3.0),
    )
    assert_clipped(model)


def test_closures_and_user_made_optimizers():
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = make_model()
    optimizer = Mine(model.parameters(), lr=50.0)
    train(model, optimizer)
    assert_clipped(model)


def test_radius_is_the_config_s():
    for radius in (0.5, 2.0, None):
        model = make_model(max_slot_norm=radius)
        train(model, torch.optim.SGD(model.parameters(), lr=50.0))
        largest = slot_norms(model).max()
        assert largest > 3 if radius is None else abs(largest - radius) < 1e-5


def test_memories_that_are_not_trained_are_left_alone():
    model = make_model()
    model.add_adapter("still", LocasConfig(r=4, init_weights=False))
    before = slot_norms(model, "still")
    train(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=50.0))
    assert torch.equal(slot_norms(model, "still"), before) and before.max() > 2


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_are_clipped_too(how):
    model = how(make_model())
    train(model, torch.optim.SGD(model.parameters(), lr=50.0))
    assert_clipped(model)


def test_layers_that_are_gone_are_forgotten():
    model = make_model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    train(model, optimizer, steps=1)
    layers = [weakref.ref(layer) for layer in list_layers(model)]
    model.unload()
    del model
    gc.collect()
    assert all(layer() is None for layer in layers)
    before = [weight.clone() for weight in optimizer.param_groups[0]["params"]]
    optimizer.step()
    assert all(map(torch.equal, optimizer.param_groups[0]["params"], before))
    parameters = [weakref.ref(weight) for weight in optimizer.param_groups[0]["params"]]
    del optimizer, before
    gc.collect()
    assert all(parameter() is None for parameter in parameters)


def test_parameters_that_an_optimizer_gains_or_loses_are_followed():
    model = make_model()
    model.add_adapter("second", LocasConfig(r=4, scaling=400.0, init_weights="gaussian"))
    first, second = (
        [p for n, p in model.named_parameters() if f".{name}." in n]
        for name in ("default", "second")
    )
    optimizer = torch.optim.SGD(first, lr=50.0)
    train(model, optimizer, steps=1)
    optimizer.add_param_group({"params": second})
    model.set_adapter("second")
    train(model, optimizer)
    assert slot_norms(model, "second").max() <= 1 + 1e-6
    del optimizer.param_groups[0]
    before = slot_norms(model)
    train(model, optimizer)
    assert slot_norms(model, "second").max() <= 1 + 1e-6 and torch.equal(slot_norms(model), before)
    with pytest.warns(UserWarning, match="Setting active adapter to default"):
        model.delete_adapter("second")
    with torch.no_grad():
        for weight in second:
            weight.fill_(2.0)
            weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert all(bool((weight == 2.0).all()) for weight in second)  # no longer a memory's


def test_weights_that_were_replaced_are_followed():
    model = make_model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=50.0)
    train(model, optimizer)
    former = optimizer.param_groups[0]["params"]
    compress(model, 2, batches=[make_tokens()])
    with torch.no_grad():
        for weight in former:
            weight.fill_(2.0)
            weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert all(bool((weight == 2.0).all()) for weight in former)  # no longer a memory's
    train(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=50.0))
    assert_clipped(model)


def test_only_weights_that_the_step_changed_are_clipped():
    model = make_model(init_weights="gaussian")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=50.0)
    with torch.no_grad():
        for weight in parameters:
            weight.fill_(2.0)
    parameters[0].grad = torch.zeros_like(parameters[0])
    optimizer.step()
    assert parameters[0].norm(dim=1).max() <= 1 + 1e-6
    assert all(bool((weight == 2.0).all()) for weight in parameters[1:])


def test_optimizers_without_gradients_are_clipped():
    class Random(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for weight in self.param_groups[0]["params"]:
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))

    model = make_model(init_weights="gaussian")
    Random([p for p in model.parameters() if p.requires_grad], {}).step()
    assert_clipped(model)


def test_accelerate():
    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3.0))
    for _ in range(3):
        accelerator.backward(model(input_ids=make_tokens(), labels=make_tokens()).loss)
        optimizer.step()
        optimizer.zero_grad()
    assert_clipped(accelerator.unwrap_model(model))


def test_transformers_trainer(tmp_path):
    model = make_model()
    rows = [{"input_ids": row, "labels": row} for row in make_tokens(8).tolist()]
    arguments = tf.TrainingArguments(
        tmp_path, max_steps=4, learning_rate=1.0, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    tf.Trainer(model, arguments, train_dataset=Dataset.from_list(rows)).train()
    assert_clipped(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL uses names that transformers has renamed
def test_sft_trainer_on_the_embedded_backbone(tmp_path):
    from trl import SFTConfig, SFTTrainer

    from locas_peft import backbone

    base, tokenizer = backbone.load()
    text = "The memory is beside the model, and the model reads what the memory learns. "
    arguments = SFTConfig(
        str(tmp_path), max_steps=4, learning_rate=0.06, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, bf16=False, max_length=64, dataloader_pin_memory=False,
        logging_steps=1,
    )  # fmt: skip
    trainer = SFTTrainer(
        base,
        arguments,
        train_dataset=Dataset.from_list([{"text": text * 3}] * 8),
        processing_class=tokenizer,
        peft_config=LocasConfig(r=8, scaling=1.0),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert_clipped(trainer.model)
    trainer.save_model(str(tmp_path / "memory"))
    assert (tmp_path / "memory" / "adapter_model.safetensors").is_file()
