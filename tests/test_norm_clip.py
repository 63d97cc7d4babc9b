"""Every slot's rows and column are in the unit ball where they are used, whoever writes them."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from datasets import Dataset
from families import change_config, make_host, make_tokens, weights_in
from peft import PeftModel, get_peft_model

from locas_peft import LocasConfig, calibrate, compress, to_lora
from locas_peft.tuner import clip_memories, list_layers
from locas_peft.tuner.norm_clip import NormClip, clip_norms_


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


@torch.no_grad()
def use(model):
    model(input_ids=make_tokens())


def assert_clipped(model, reached=True):
    use(model)
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
    message = r"whole rows of a memory, got a flattened part of shape \[12\]: use FSDP2"
    with pytest.raises(ValueError, match=message):
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


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "NAdam"])
def test_bare_loop(optimizer):
    model = make_model("opt")
    train(
        model,
        getattr(torch.optim, optimizer)([p for p in model.parameters() if p.requires_grad], lr=3.0),
    )
    assert_clipped(model)


def test_radius_is_the_config_s():
    for radius in (0.5, 2.0, None):
        model = make_model(max_slot_norm=radius)
        train(model, torch.optim.SGD(model.parameters(), lr=50.0))
        use(model)
        largest = slot_norms(model).max()
        assert largest > 3 if radius is None else abs(largest - radius) < 1e-5


def test_memories_that_are_not_used_are_left_alone():
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


def test_weights_that_were_replaced_are_clipped():
    model = make_model()
    train(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=50.0))
    compress(model, 2, batches=[make_tokens()])
    # Slots that are folded into one are longer than the clip: they keep their function.
    assert slot_norms(model).max() > 1 and model.peft_config["default"].max_slot_norm is None
    model.peft_config["default"].max_slot_norm = 1.0
    train(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=50.0))
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


# ------------------------------------------------------------------------- the bits of a bare loop


def memory_of(model, adapter_name="default"):
    return [weight for layer in list_layers(model) for weight in weights_in(layer, adapter_name)]


def bits_of(model):
    return [weight.detach().clone() for weight in memory_of(model)]


def clip_all(model, radius=1.0):
    for layer in list_layers(model):
        weights = weights_in(layer)
        clip_norms_(weights, [-1] * (len(weights) - 1) + [-2], radius)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("AdamW", {"foreach": False}),
        ("AdamW", {"foreach": True}),
        ("AdamW", {"fused": True}),
        ("SGD", {"lr": 50.0}),
        ("SGD", {"lr": 50.0, "fused": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float32), ("gpt2", torch.bfloat16)], ids=str
)
def test_a_bare_loop_has_the_bits_of_a_clip_after_each_step(family, optimizer, options, dtype):
    models = []
    for clips_itself in (True, False):
        host = make_host(family, dtype)
        model = get_peft_model(host, LocasConfig(r=4, scaling=30.0), autocast_adapter_dtype=False)
        calibrate(model, [make_tokens()])
        if not clips_itself:
            model.peft_config["default"].max_slot_norm = None
        step = getattr(torch.optim, optimizer)(memory_of(model), **{"lr": 0.05, **options})
        for number in range(12):
            loss = model(input_ids=make_tokens(), labels=make_tokens()).loss
            loss.backward()
            step.step()
            step.zero_grad()
            if not clips_itself:
                clip_all(model)
            elif number % 3 == 0:
                use(model)
        models.append(model)
    clip_memories(models[0])
    for weight, expected in zip(bits_of(models[0]), bits_of(models[1]), strict=True):
        assert torch.equal(weight, expected)
    assert slot_norms(models[0]).max() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_clip_is_idempotent(dtype):
    model = get_peft_model(
        make_host("llama", dtype), LocasConfig(r=8, scaling=400.0), autocast_adapter_dtype=False
    )
    train(model, torch.optim.SGD(memory_of(model), lr=50.0))
    clip_memories(model)
    before = bits_of(model)
    for _ in range(3):
        clip_memories(model)
        model(input_ids=make_tokens())
        use(model)
        model.state_dict()
    assert all(map(torch.equal, bits_of(model), before))


def test_a_saved_memory_is_clipped_and_loads_with_the_same_bits(tmp_path):
    model = make_model()
    train(model, torch.optim.SGD(memory_of(model), lr=50.0))
    assert slot_norms(model).max() > 1.1
    model.save_pretrained(tmp_path)
    assert slot_norms(model).max() <= 1 + 1e-6
    before = bits_of(model)
    for low_cpu_mem_usage in (False, True):
        loaded = PeftModel.from_pretrained(
            make_host("llama"), tmp_path, is_trainable=True, low_cpu_mem_usage=low_cpu_mem_usage
        )
        loaded(input_ids=make_tokens())
        assert all(map(torch.equal, bits_of(loaded), before))


def test_a_state_dict_that_is_loaded_is_clipped_where_it_is_too_long():
    model = make_model()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in state:
        if ".locas_up." in name:
            state[name] *= 3.0
    model.load_state_dict(state)
    use(model)
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
    use(model)
    for weight in memory_of(model):
        write(weight)
    if trains:
        model(input_ids=make_tokens())
    else:
        use(model)
    norms = slot_norms(model)
    if write is write_by_data and not trains:
        # A change that no forward without gradients can see; it ends with the next save.
        assert norms.max() > 8
        model.state_dict()
        norms = slot_norms(model)
    assert norms.max() <= 1 + 1e-6


def test_optimizers_of_copies_and_of_flattened_parameters_are_clipped():
    model = make_model(init_weights="gaussian")
    weights = memory_of(model)
    flat = torch.nn.Parameter(torch.cat([weight.detach().flatten() for weight in weights]))
    optimizer = torch.optim.AdamW([flat], lr=3.0)
    for _ in range(3):
        model(input_ids=make_tokens(), labels=make_tokens()).loss.backward()
        flat.grad = torch.cat([weight.grad.flatten() for weight in weights])
        optimizer.step()
        start = 0
        for weight in weights:
            weight.data.copy_(flat.data[start : start + weight.numel()].view_as(weight))
            weight.grad = None
            start += weight.numel()
    assert_clipped(model)


def test_a_frozen_memory_that_nobody_wrote_is_not_looked_at(monkeypatch):
    model = make_model(init_weights="random", output_scale="paper")
    model.requires_grad_(False)
    use(model)
    calls = []
    monkeypatch.setattr(NormClip, "clip_", lambda *args: calls.append(args))
    model(input_ids=make_tokens())
    use(model)
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
        assert slot_norms(model).max() <= 1 + 1e-6
    use(model)


def test_gradient_checkpointing_trains_and_is_clipped():
    models = []
    for checkpointed in (True, False):
        model = make_model()
        calibrate(model, [make_tokens()])
        if checkpointed:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable({"use_reentrant": False})
        train(model, torch.optim.SGD(memory_of(model), lr=1.0))
        assert_clipped(model, reached=False)
        models.append(model)
    for weight, expected in zip(*map(bits_of, models), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-4)


def test_two_forwards_before_one_backward():
    model = make_model()
    train(model, torch.optim.SGD(memory_of(model), lr=50.0))
    loss = sum(
        model(input_ids=make_tokens(seed=seed), labels=make_tokens(seed=seed)).loss
        for seed in (1, 2)
    )
    loss.backward()
    assert all(weight.grad.isfinite().all() for weight in memory_of(model))


def test_a_merged_memory_is_clipped_and_comes_back():
    model = make_model().eval()
    train(model, torch.optim.SGD(memory_of(model), lr=50.0))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        expected = twin(input_ids=make_tokens()).logits
    model.merge_adapter()
    assert slot_norms(model).max() <= 1 + 1e-6
    with torch.no_grad():
        merged = model(input_ids=make_tokens()).logits
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    with torch.no_grad():
        assert torch.equal(model(input_ids=make_tokens()).logits, expected)


def test_combined_and_exported_memories_are_clipped():
    model = make_model(init_weights="random", output_scale="paper")
    train(model, torch.optim.SGD(memory_of(model), lr=50.0))
    model.add_weighted_adapter(["default"], [1.0], "combined")
    assert slot_norms(model, "combined").max() <= 1 + 1e-6
    with torch.no_grad():
        for weight in memory_of(model):
            weight.mul_(9.0)
    to_lora(model, "default")
    assert slot_norms(model).max() <= 1 + 1e-6


def test_a_loaded_memory_with_longer_rows_keeps_its_function(tmp_path):
    model = make_model(init_weights="random", max_slot_norm=None)
    for weight in memory_of(model):
        weight.data.mul_(3.0).add_(0.1)
    with torch.no_grad():
        expected = model.eval()(input_ids=make_tokens()).logits
    model.save_pretrained(tmp_path)
    change_config(tmp_path, max_slot_norm=1.0)
    with pytest.warns(UserWarning) as raised:
        loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path)
    assert [str(one.message) for one in raised if one.category is UserWarning] == [
        "the memory has rows that are longer than its max_slot_norm of 1: it is loaded with "
        "max_slot_norm=None, so that it keeps its function."
    ]
    assert loaded.peft_config["default"].max_slot_norm is None
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=make_tokens()).logits, expected)


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
    train(model, torch.optim.SGD(model.parameters(), lr=10.0))
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = PeftModel.from_pretrained(make_host("llama"), tmp_path, is_trainable=True)
    assert loaded.peft_config["default"].max_slot_norm == 1.0
    before = [weight.clone() for layer in list_layers(loaded) for weight in weights_in(layer)]
    assert slot_norms(loaded).max() > 1 + 1e-6, "rounding left rows beyond the radius"
    use(loaded)
    after = [weight for layer in list_layers(loaded) for weight in weights_in(layer)]
    assert all(map(torch.equal, before, after))
    train(loaded, torch.optim.SGD(loaded.parameters(), lr=1e-3), steps=1)
    assert_clipped(loaded)


def test_gradients_of_each_text_by_torch_func():
    model = make_model()
    use_tokens = make_tokens(batch=2)
    model(input_ids=use_tokens, labels=use_tokens).loss.backward()
    model.zero_grad()
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def loss(weights, tokens):
        inputs = {"input_ids": tokens[None], "use_cache": False}
        logits = torch.func.functional_call(model, weights, kwargs=inputs).logits[0]
        return torch.nn.functional.cross_entropy(logits[:-1], tokens[1:])

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, use_tokens)
    for index, tokens in enumerate(use_tokens):
        model.zero_grad()
        loss(weights, tokens).backward()
        for name, weight in weights.items():
            torch.testing.assert_close(gradients[name][index], weight.grad, rtol=1e-3, atol=1e-5)


def test_a_state_of_partitioned_weights_is_made_without_a_clip():
    """As DeepSpeed's ZeRO-3 leaves them: empty, with the whole weights elsewhere."""
    model = make_model()
    for layer in list_layers(model):
        for weight in weights_in(layer):
            weight.data = weight.data.new_empty(0)
    assert any(".locas_up." in name for name in model.state_dict())
