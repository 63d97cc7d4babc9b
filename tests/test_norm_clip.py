"""Every slot's rows and column are in the unit ball where they are used, whoever writes them."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from datasets import Dataset
from families import change_config, logits, make_host, make_tokens, snapshot, weights_in
from peft import PeftModel, get_peft_model

from locas_peft import LocasConfig, calibrate, compress, to_lora
from locas_peft.tuner import clip_memories, list_layers, trained_parameters
from locas_peft.tuner.norm_clip import COLUMNS, ROWS, NormClip, clip_norms_


def make_model(family="llama", **kwargs):
    config = LocasConfig(**{"r": 4, "scaling": 400.0, **kwargs})
    return get_peft_model(make_host(family), config).train()


def slot_norms(model, adapter_name="default"):
    """All norms of gate rows, up rows and down columns."""
    norms = []
    for layer in list_layers(model):
        *rows, down = weights_in(layer, adapter_name)
        for weight in [*rows, down.T]:
            norms.append(weight.detach().float().norm(dim=1))
    return torch.cat(norms)


def assert_within_the_ball(model, adapter_name="default"):
    assert slot_norms(model, adapter_name).max() <= 1 + 1e-6


def assert_clipped(model, reached=True):
    logits(model)
    assert_within_the_ball(model)
    assert not reached or slot_norms(model).max() > 1 - 1e-3


def train(model, lr=50.0, steps=3):
    """Train by steps that make slots longer than the clip allows, unless the rate is small."""
    optimizer = torch.optim.SGD(trained_parameters(model), lr=lr)
    for _ in range(steps):
        model(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_norms_are_taken_in_float32_or_wider(dtype):
    weight = (0.2 * torch.randn(64, 256, generator=torch.Generator().manual_seed(0))).to(dtype)
    wide = weight.to(torch.promote_types(dtype, torch.float32))
    factor = (wide.norm(dim=1, keepdim=True) / 1.3).clamp(min=1).reciprocal().to(dtype)
    expected = weight * factor
    clip_norms_([weight], [ROWS], max_norm=1.3)
    assert torch.equal(weight, expected)


def test_projection_is_the_paper_s():
    weight = torch.randn(5, 7) * torch.tensor([0.01, 0.3, 1.0, 3.0, 100.0])[:, None]
    expected = weight / weight.norm(dim=1, keepdim=True).clamp(min=1)
    rows, columns = weight.clone(), weight.T.clone()
    clip_norms_([rows, columns], [ROWS, COLUMNS], max_norm=1.0)
    torch.testing.assert_close(rows, expected)
    torch.testing.assert_close(columns.T, expected)
    small = weight[:2].clone()
    for radius in (2.9, 7.4, 10.0):  # radii whose reciprocal is rounded, too
        clip_norms_([small], [ROWS], max_norm=radius)
        assert torch.equal(small, weight[:2])


def test_flattened_rows_are_refused():
    message = r"whole rows of a memory, got a flattened part of shape \[12\]: use FSDP2"
    with pytest.raises(ValueError, match=message):
        clip_norms_([torch.ones(12)], [-1], max_norm=1.0)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_radius_is_the_config_s(family):
    for radius in (0.5, 2.0, None):
        model = make_model(family, max_slot_norm=radius)
        train(model)
        logits(model)
        largest = slot_norms(model).max()
        assert largest > 3 if radius is None else abs(largest - radius) < 1e-5


def test_memories_that_are_not_used_are_left_alone():
    model = make_model()
    model.add_adapter("still", LocasConfig(r=4, init_weights=False))
    before = slot_norms(model, "still")
    train(model)
    assert torch.equal(slot_norms(model, "still"), before) and before.max() > 2


def test_pickled_models_are_clipped_too():
    model = pickle.loads(pickle.dumps(make_model()))
    train(model)
    assert_clipped(model)


def test_weights_that_were_replaced_are_clipped():
    model = make_model()
    train(model)
    compress(model, 2, batches=[make_tokens()])
    # Slots that are folded into one are longer than the clip: they keep their function.
    assert slot_norms(model).max() > 1 and model.peft_config["default"].max_slot_norm is None
    model.peft_config["default"].max_slot_norm = 1.0
    train(model)
    assert_clipped(model)


def test_layers_that_are_gone_are_forgotten():
    model = make_model()
    train(model, steps=1)
    layers = [weakref.ref(layer) for layer in list_layers(model)]
    model.unload()
    del model
    gc.collect()
    assert all(layer() is None for layer in layers)


# ------------------------------------------------------------------------- the bits of a bare loop


def memory_of(model):
    return [weight for layer in list_layers(model) for weight in weights_in(layer)]


def bits_of(model):
    return [weight.clone() for weight in memory_of(model)]


def clip_all(model):
    for layer in list_layers(model):
        *rows, down = weights_in(layer)
        clip_norms_([*rows, down], [ROWS] * len(rows) + [COLUMNS], 1.0)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("AdamW", {"foreach": False}), ("AdamW", {"fused": True}), ("SGD", {"lr": 50.0})],
    ids=str,
)
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float32), ("gpt2", torch.bfloat16)], ids=str
)
def test_a_bare_loop_has_the_bits_of_a_clip_after_each_step(family, optimizer, options, dtype):
    models = []
    for clips_itself in (True, False):
        config = LocasConfig(r=4, scaling=30.0)
        model = get_peft_model(make_host(family, dtype), config, autocast_adapter_dtype=False)
        calibrate(model, [make_tokens()])
        if not clips_itself:
            model.peft_config["default"].max_slot_norm = None
        parameters = trained_parameters(model)
        step = getattr(torch.optim, optimizer)(parameters, **{"lr": 0.05, **options})
        for number in range(12):
            model(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
            step.step()
            step.zero_grad()
            if not clips_itself:
                clip_all(model)
            elif number % 3 == 0:
                logits(model)
        models.append(model)
    clip_memories(models[0])
    assert all(map(torch.equal, *map(bits_of, models)))
    assert slot_norms(models[0]).max() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_clip_is_idempotent(dtype):
    config = LocasConfig(r=8, scaling=400.0)
    model = get_peft_model(make_host("llama", dtype), config, autocast_adapter_dtype=False)
    train(model)
    clip_memories(model)
    before = bits_of(model)
    for _ in range(3):
        clip_memories(model)
        model(input_ids=make_tokens())
        logits(model)
        model.state_dict()
    assert all(map(torch.equal, bits_of(model), before))


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_a_saved_memory_is_clipped_and_loads_with_the_same_bits(low_cpu_mem_usage, tmp_path):
    model = make_model()
    train(model)
    assert slot_norms(model).max() > 1.1
    model.save_pretrained(tmp_path)
    assert_within_the_ball(model)
    options = {"is_trainable": True, "low_cpu_mem_usage": low_cpu_mem_usage}
    loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path, **options)
    loaded(input_ids=make_tokens())
    assert all(map(torch.equal, bits_of(loaded), bits_of(model)))


def test_a_state_dict_that_is_loaded_is_clipped_where_it_is_too_long():
    model = make_model()
    state = snapshot(model)
    for name in state:
        if ".locas_up." in name:
            state[name] *= 3.0
    model.load_state_dict(state)
    assert_clipped(model)


# --------------------------------------------------------------------- whoever writes the weights


def write_by_data(weight):
    weight.data.mul_(9.0)


def write_without_gradients(weight):
    with torch.no_grad():
        weight.mul_(9.0)


def write_in_inference_mode(weight):
    with torch.inference_mode():
        weight.mul_(9.0)


def replace_data(weight):
    weight.data = weight.data * 9.0


@pytest.mark.parametrize(
    "write", [write_by_data, write_without_gradients, write_in_inference_mode, replace_data]
)
@pytest.mark.parametrize("trains", [True, False])
def test_writes_are_clipped_at_the_next_use(write, trains):
    model = make_model(init_weights="random", output_scale="paper")
    logits(model)
    for weight in trained_parameters(model):
        write(weight)
    if trains:
        model(input_ids=make_tokens())
    else:
        logits(model)
    if write is write_by_data and not trains:
        # A change that no forward without gradients can see; it ends with the next save.
        assert slot_norms(model).max() > 8
        model.state_dict()
    assert_within_the_ball(model)


def test_a_frozen_memory_that_nobody_wrote_is_not_looked_at(monkeypatch):
    model = make_model(init_weights="random", output_scale="paper")
    model.requires_grad_(False)
    logits(model)
    calls = []
    monkeypatch.setattr(NormClip, "clip_", lambda *args: calls.append(args))
    model(input_ids=make_tokens())
    logits(model)
    with torch.inference_mode():
        model(input_ids=make_tokens())
    assert not calls


def test_a_memory_of_inference_tensors_is_used():
    with torch.inference_mode():
        model = make_model(init_weights="random", output_scale="paper")
        model(input_ids=make_tokens())
        for weight in memory_of(model):
            weight.mul_(9.0)
        model(input_ids=make_tokens())
        assert_within_the_ball(model)
    logits(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradient_checkpointing_trains_and_is_clipped():
    models = []
    for checkpointed in (True, False):
        model = make_model()
        calibrate(model, [make_tokens()])
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        train(model, lr=1.0)
        assert_clipped(model, reached=False)
        models.append(model)
    torch.testing.assert_close(*map(bits_of, models), rtol=1e-3, atol=1e-4)


def test_two_forwards_before_one_backward():
    model = make_model()
    train(model)
    first, second = make_tokens(seed=1), make_tokens(seed=2)
    loss = model(input_ids=first, labels=first).loss + model(input_ids=second, labels=second).loss
    loss.backward()
    assert all(weight.grad.isfinite().all() for weight in trained_parameters(model))


def test_a_merged_memory_is_clipped_and_comes_back():
    model = make_model().eval()
    train(model)
    expected = logits(copy.deepcopy(model))
    model.merge_adapter()
    assert_within_the_ball(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    assert torch.equal(logits(model), expected)


def test_combined_and_exported_memories_are_clipped():
    model = make_model(init_weights="random", output_scale="paper")
    train(model)
    model.add_weighted_adapter(["default"], [1.0], "combined")
    assert_within_the_ball(model, "combined")
    for weight in trained_parameters(model):
        write_without_gradients(weight)
    to_lora(model, "default")
    assert_within_the_ball(model)


def test_a_loaded_memory_with_longer_rows_keeps_its_function(tmp_path):
    model = make_model(init_weights="random", max_slot_norm=None)
    for weight in memory_of(model):
        weight.data.mul_(3.0).add_(0.1)
    expected = logits(model.eval())
    model.save_pretrained(tmp_path)
    change_config(tmp_path, max_slot_norm=1.0)
    with pytest.warns(
        UserWarning, match="longer than its max_slot_norm of 1: it is loaded"
    ) as raised:
        loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path)
    assert [one.category for one in raised].count(UserWarning) == 1
    assert loaded.peft_config["default"].max_slot_norm is None
    assert torch.equal(logits(loaded), expected)


# ---------------------------------------------------------------------------------------- trainers


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


def test_rows_that_are_rounded_to_bfloat16_are_loaded_as_they_are(tmp_path):
    model = make_model(max_slot_norm=1.0).to(torch.bfloat16)
    train(model, lr=10.0)
    model.save_pretrained(tmp_path)
    # Warnings are errors.
    loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path, is_trainable=True)
    assert loaded.peft_config["default"].max_slot_norm == 1.0
    before = bits_of(loaded)
    assert slot_norms(loaded).max() > 1 + 1e-6, "rounding left rows beyond the radius"
    logits(loaded)
    assert all(map(torch.equal, before, bits_of(loaded)))
    train(loaded, lr=1e-3, steps=1)
    assert_clipped(loaded)


def test_gradients_of_each_text_by_torch_func():
    model = make_model()
    texts = make_tokens(batch=2)
    calibrate(model, [texts])
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def loss(weights, tokens):
        inputs = {"input_ids": tokens[None], "use_cache": False}
        output = torch.func.functional_call(model, weights, kwargs=inputs).logits[0]
        return torch.nn.functional.cross_entropy(output[:-1], tokens[1:])

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, texts)
    for index, tokens in enumerate(texts):
        expected = torch.autograd.grad(loss(weights, tokens), list(weights.values()))
        found = [gradient[index] for gradient in gradients.values()]
        torch.testing.assert_close(found, list(expected), rtol=1e-3, atol=1e-5)


def test_a_state_of_partitioned_weights_is_made_without_a_clip():
    """As DeepSpeed's ZeRO-3 leaves them: empty, with the whole weights elsewhere."""
    model = make_model()
    for weight in trained_parameters(model):
        weight.data = weight.data.new_empty(0)
    assert any(".locas_up." in name for name in model.state_dict())
