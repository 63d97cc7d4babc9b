"""Memories reduced to fewer slots or widened: what they still say, and what a user may do with them afterwards."""

import pytest
import torch
from families import logits, make_host, make_tokens, same, snapshot, teach, weights_in
from peft import PeftModel, get_peft_model
from test_families import learn

from locas_peft import LocasConfig, TestTimeTrainer, calibrate, compress, grow
from locas_peft.slots.nlsvd import nl_svd
from locas_peft.slots.resizing import refit_slots
from locas_peft.tuner import clip_memories, list_layers
from locas_peft.tuner.scale import KAPPA


def make_memory(family, r=8, **kwargs):
    config = LocasConfig(r=r, init_weights="gaussian", scaling=50.0, **kwargs)
    model = get_peft_model(make_host(family), config)
    calibrate(model, [make_tokens()])
    generator = torch.Generator().manual_seed(0)
    for layer in list_layers(model):
        down = layer.locas_down["default"].weight.data
        down.copy_(0.3 * torch.randn(down.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox", "opt", "gpt2"])
def test_slots_that_say_the_same_are_folded_without_loss(family):
    model = make_memory(family)
    for layer in list_layers(model):
        *rows, _ = weights_in(layer)
        for weight in rows:
            weight.data[4:] = weight.data[:4]
    expected = logits(model)
    compress(model, 4, batches=[make_tokens()])
    torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)


def test_the_refit_is_the_least_squares_solution():
    generator = torch.Generator().manual_seed(0)
    activation = torch.randn(40, 6, generator=generator)
    value = torch.randn(6, 5, generator=generator)
    slots, fitted = refit_slots(activation.T @ activation, value, 3)
    target = activation @ value
    expected = torch.linalg.lstsq(activation[:, slots], target).solution
    torch.testing.assert_close(fitted, expected, rtol=1e-4, atol=1e-5)
    # The first slot is the one that takes away most; no other single slot leaves less.
    left = []
    for column in activation.T.unsqueeze(-1):
        residual = target - column @ torch.linalg.lstsq(column, target).solution
        left.append(residual.norm())
    assert torch.stack(left).argmin() == slots[0]


def test_padding_does_not_count():
    ids = make_tokens(2, 16)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    padded, plain = make_memory("llama"), make_memory("llama")
    compress(padded, 4, batches=[{"input_ids": ids, "attention_mask": mask}])
    compress(plain, 4, batches=[ids[:1], ids[1:, :6]])
    for layers in zip(list_layers(padded), list_layers(plain), strict=True):
        torch.testing.assert_close(*map(weights_in, layers), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_layer_memories_are_folded_by_nl_svd(dtype):
    model = make_memory("gpt_neox").to(dtype)
    clip_memories(model)
    layer = list_layers(model)[0]
    key, value = (weight.detach().float().T for weight in weights_in(layer))
    reduced = nl_svd(key, value, 3, activation=layer.ffn.act, probe_norm=4.0 * KAPPA)
    tau = layer.locas_tau["default"].clone()
    compress(model, 3)
    up, down = weights_in(layer)
    torch.testing.assert_close(up.data, reduced.key.T.to(dtype))
    torch.testing.assert_close(down.data, reduced.value.T.to(dtype))
    assert torch.equal(layer.locas_tau["default"], tau)


@pytest.mark.parametrize("family, text", [("llama", True), ("gpt_neox", True), ("gpt_neox", False)])
def test_a_compressed_memory_is_saved_loaded_merged_and_trained(family, text, tmp_path):
    model = make_memory(family, rank_pattern={"layers.0.mlp": 6})
    compress(model, 4, batches=[make_tokens()] if text else None)
    config = model.peft_config["default"]
    assert config.r == 4 and config.rank_pattern == {}
    expected = logits(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_host(family), tmp_path)
    assert torch.equal(logits(loaded), expected)
    list(TestTimeTrainer(model, window=8, stride=4, learning_rate=1e-3).read(make_tokens()[0]))
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-3, atol=1e-3)


TEXT = [make_tokens(2, 8)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rank": 9, "batches": TEXT}, ValueError, "rank must be at most .* 8, got 9: lower it"),
        ({"rank": 0, "batches": TEXT}, ValueError, "rank must be at least 1, got 0: raise it"),
        ({"rank": 2.0, "batches": TEXT}, TypeError, "rank must be an int, got float"),
        ({"rank": 4}, ValueError, "a memory of two layers, got one with gates: give batches"),
        ({"rank": 4, "batches": []}, ValueError, "a text that the memory 'default' is active on"),
        ({"rank": 4, "adapter_name": "other"}, ValueError, "memory 'other' to compress"),
    ],
)
def test_bad_input_leaves_the_memory_as_it_was(arguments, error, message):
    model = make_memory("llama")
    before = snapshot(model)
    with pytest.raises(error, match=message):
        compress(model, **arguments)
    assert model.peft_config["default"].r == 8 and same(model, before)


def test_memories_that_cannot_be_compressed_are_refused():
    empty = get_peft_model(make_host("gpt2"), LocasConfig(r=4, init_weights="gaussian"))
    broken = make_memory("gpt2")
    weights_in(list_layers(broken)[1])[-1].data[0, 0] = torch.nan
    merged = make_memory("gpt2")
    merged.merge_adapter()
    for model, message in [
        (empty, "the memory 'default' is empty: train or write it before"),
        (broken, "the memory 'default' holds values that are not finite"),
        (merged, "is merged: call unmerge_adapter"),
        (make_host("gpt2"), r"no single LOCAS memory that is active \(active: none\) to c"),
    ]:
        with pytest.raises(ValueError, match=message):
            compress(model, 2)


# Growing


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        ("llama", "topk"),
        ("llama", "bottomk"),
        ("llama", "random"),
        ("llama", "gaussian"),
        ("llama", "activation"),
        ("phi3", "topk"),
        ("gpt_neox", "topk"),
        ("opt", "topk"),
        ("gpt2", "topk"),
    ],
)
def test_growing_changes_no_output_and_the_new_slots_learn(family, strategy, tmp_path):
    model = make_grower(family, init_weights=strategy)
    learn(model, steps=1)
    expected, former = logits(model), [weights_in(layer) for layer in list_layers(model)]
    grow(model, 7, batches=[make_tokens(seed=5)])
    torch.testing.assert_close(logits(model), expected)
    for layer, (*old_rows, old_down) in zip(list_layers(model), former, strict=True):
        *rows, down = weights_in(layer)
        assert torch.equal(down[:, :4], old_down) and not down[:, 4:].any()
        for new, old in zip(rows, old_rows, strict=True):
            assert torch.equal(new[:4], old)
            torch.testing.assert_close(new[4:].norm(dim=1), torch.ones(3))
            # Each new row differs from all others.
            assert (torch.cdist(new[4:], new) > 1e-3).sum() == 3 * 6
        slots = layer.recorded_slots("default")
        assert strategy in ("gaussian", "activation") or len(set(slots)) == 7
    learn(model, steps=1)
    assert all(weights_in(layer)[-1][:, 4:].any() for layer in list_layers(model))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_host(family), tmp_path)
    torch.testing.assert_close(logits(loaded), logits(model))
    assert loaded.peft_config["default"].r == 7


def make_grower(family="llama", tokens=None, **kwargs):
    model = get_peft_model(make_host(family), LocasConfig(r=4, **kwargs))
    calibrate(model, [make_tokens() if tokens is None else tokens])
    return model


def test_every_new_row_of_a_wide_memory_is_another_token():
    model = make_grower(tokens=make_tokens(8, 40), init_weights="activation")
    grow(model, 300, batches=[make_tokens(8, 40, seed=5)])
    for layer in list_layers(model):
        rows = weights_in(layer)[0]
        assert (torch.cdist(rows, rows) + torch.eye(300) > 1e-3).all()
    before = snapshot(model)
    message = "^batches must have at least 320 tokens .*'activation', got 80"
    with pytest.raises(ValueError, match=message):
        grow(model, 320, batches=[make_tokens(2, 40)])
    assert same(model, before)


def test_a_record_of_other_slots_than_the_rows_is_not_trusted():
    model = make_grower()
    for slots in model.peft_config["default"].get_record("slots").values():
        slots[:] = range(24)
    grow(model, 6, batches=[make_tokens()])
    assert {len(weights_in(layer)[0]) for layer in list_layers(model)} == {6}
    logits(model)


@pytest.mark.parametrize(
    ("rank", "batches", "error", "message"),
    [
        (4, [], ValueError, "^rank must be above the memory's width 4, got 4: raise it, or"),
        (25, [], ValueError, "^rank must be at most .* 24 where slots are cloned, got 25"),
        ("8", [], TypeError, "^rank must be an int, got str"),
        (8, None, ValueError, "^batches must be given for init_weights='topk': give a text"),
        (8, [], ValueError, "^calibration saw no tokens"),
    ],
)
def test_what_cannot_grow_is_refused_and_unchanged(rank, batches, error, message):
    model = make_grower()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        grow(model, rank, batches=batches)
    assert same(model, before) and model.peft_config["default"].r == 4


def test_a_written_an_empty_or_a_merged_memory_does_not_grow():
    written = get_peft_model(make_host("gpt_neox"), LocasConfig(r=4, init_weights="write"))
    empty = get_peft_model(make_host("llama"), LocasConfig(r=4))
    merged = make_grower()
    merged.merge_adapter()
    beside = make_grower()
    beside.add_adapter("other", LocasConfig(r=4, init_weights="random"))
    teach(beside, "other")
    beside.set_adapter("other")
    beside.merge_adapter()
    with pytest.raises(ValueError, match="the memory 'default' is beside a merged one: call unm"):
        grow(beside, 8, "default", batches=[make_tokens()])
    for model, message in [
        (written, "while reading: SlotWriter fills its"),
        (empty, "^the memory 'default' is empty: set r in its config, or calibrate it"),
        (merged, r"^the memory 'default' is merged: call unmerge_adapter\(\) before it grows"),
    ]:
        with pytest.raises(ValueError, match=message):
            grow(model, 8, batches=[make_tokens()])
