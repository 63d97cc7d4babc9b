"""Memories reduced to fewer slots or widened: what they still say, and what a user may do with them afterwards."""

import pytest
import torch
from families import logits, make_host, make_tokens, weights_in
from peft import PeftModel, get_peft_model

from locas_peft import LocasConfig, TestTimeTrainer, calibrate, compress, grow
from locas_peft.slots.nlsvd import nl_svd
from locas_peft.slots.resizing import refit_slots
from locas_peft.tuner import clip_memories, list_layers
from locas_peft.tuner.scale import KAPPA


def make_memory(family, r=8, seed=0, **kwargs):
    model = get_peft_model(
        make_host(family), LocasConfig(r=r, init_weights="gaussian", scaling=50.0, **kwargs)
    )
    calibrate(model, [make_tokens()])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in list_layers(model):
            down = layer.locas_down["default"].weight
            down.copy_(0.3 * torch.randn(down.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox", "opt", "gpt2"])
def test_refitting_at_full_width_changes_nothing(family):
    model, ids = make_memory(family, r=4), make_tokens(4, 32)
    expected = logits(model, ids)
    compress(model, 4, batches=[ids])
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_slots_that_say_the_same_are_folded_without_loss(family):
    model, ids = make_memory(family), make_tokens(4, 32)
    with torch.no_grad():
        for layer in list_layers(model):
            for module in layer.projections("default")[:-1]:
                module.weight[4:] = module.weight[:4]
    expected = logits(model, ids)
    compress(model, 4, batches=[ids])
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-3, atol=1e-3)


def test_the_refit_is_the_least_squares_solution():
    generator = torch.Generator().manual_seed(0)
    activation, value = (
        torch.randn(40, 6, generator=generator),
        torch.randn(6, 5, generator=generator),
    )
    slots, fitted = refit_slots(activation.T @ activation, value, 3)
    target = activation @ value
    expected = torch.linalg.lstsq(activation[:, slots], target).solution
    torch.testing.assert_close(fitted, expected, rtol=1e-4, atol=1e-5)
    # The first slot is the one that takes away most; no other single slot leaves less.
    left = [
        (target - column @ torch.linalg.lstsq(column, target).solution).norm()
        for column in activation.T.unsqueeze(-1).unbind()
    ]
    assert torch.stack(left).argmin() == slots[0]


def test_padding_does_not_count():
    ids = make_tokens(2, 16)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    padded, plain = make_memory("llama"), make_memory("llama")
    compress(padded, 4, batches=[{"input_ids": ids, "attention_mask": mask}])
    compress(plain, 4, batches=[ids[:1], ids[1:, :6]])
    for one, other in zip(list_layers(padded), list_layers(plain), strict=True):
        for a, b in zip(one.projections("default"), other.projections("default"), strict=True):
            torch.testing.assert_close(a.weight, b.weight, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_layer_memories_are_folded_by_nl_svd(dtype):
    model = make_memory("gpt_neox").to(dtype)
    clip_memories(model)
    layer = list_layers(model)[0]
    up, down = (module.weight.detach().clone() for module in layer.projections("default"))
    tau = layer.locas_tau["default"].clone()
    compress(model, 3)
    reduced = nl_svd(
        up.float().T, down.float().T, 3, activation=layer.ffn.act, probe_norm=4.0 * KAPPA
    )
    torch.testing.assert_close(layer.locas_up["default"].weight, reduced.key.T.to(dtype))
    torch.testing.assert_close(layer.locas_down["default"].weight, reduced.value.T.to(dtype))
    assert torch.equal(layer.locas_tau["default"], tau)


@pytest.mark.parametrize("family, text", [("llama", True), ("gpt_neox", True), ("gpt_neox", False)])
def test_a_compressed_memory_is_saved_loaded_merged_and_trained(family, text, tmp_path):
    model, ids = make_memory(family, rank_pattern={"layers.0.mlp": 6}), make_tokens(2, 16)
    compress(model, 4, batches=[ids] if text else None)
    config = model.peft_config["default"]
    assert config.r == 4 and config.rank_pattern == {}
    expected = logits(model, ids)
    model.save_pretrained(tmp_path / "memory")
    loaded = PeftModel.from_pretrained(make_host(family), tmp_path / "memory").eval()
    assert torch.equal(logits(loaded, ids), expected)
    list(TestTimeTrainer(model, window=8, stride=4, learning_rate=1e-3).read(ids[0]))
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits(merged, ids), expected, rtol=1e-3, atol=1e-3)


def test_bad_input_leaves_the_memory_as_it_was():
    ids = make_tokens(2, 8)
    model = make_memory("llama")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for arguments, error, message in [
        ({"rank": 9, "batches": [ids]}, ValueError, "rank must be at most .* 8, got 9: lower it"),
        ({"rank": 0, "batches": [ids]}, ValueError, "rank must be at least 1, got 0: raise it"),
        ({"rank": 2.0, "batches": [ids]}, TypeError, "rank must be an int, got float"),
        ({"rank": 4}, ValueError, "a memory of two layers, got one with gates: give batches"),
        ({"rank": 4, "batches": []}, ValueError, "a text that the memory 'default' is active on"),
        ({"rank": 4, "adapter_name": "other"}, ValueError, "memory 'other' to compress"),
    ]:
        with pytest.raises(error, match=message):
            compress(model, **arguments)
    assert model.peft_config["default"].r == 8
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]), key


def test_memories_that_cannot_be_compressed_are_refused():
    with pytest.raises(ValueError, match="the memory 'default' is empty: train or write it before"):
        compress(get_peft_model(make_host("gpt2"), LocasConfig(r=4, init_weights="gaussian")), 2)
    broken = make_memory("gpt2")
    with torch.no_grad():
        list_layers(broken)[1].locas_down["default"].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="the memory 'default' holds values that are not finite"):
        compress(broken, 2)
    merged = make_memory("gpt2")
    merged.merge_adapter()
    with pytest.raises(ValueError, match="is merged: call unmerge_adapter"):
        compress(merged, 2)
    message = r"no single LOCAS memory that is active \(active: none\) to c"
    with pytest.raises(ValueError, match=message):
        compress(make_host("gpt2"), 2)


# Growing


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        *(("llama", name) for name in ("topk", "bottomk", "random", "gaussian", "activation")),
        *((name, "topk") for name in ("phi3", "gpt_neox", "opt", "gpt2")),
    ],
)
def test_growing_changes_no_output_and_the_new_slots_learn(family, strategy, tmp_path):
    model = get_peft_model(make_host(family), LocasConfig(r=4, init_weights=strategy))
    ids = make_tokens()
    calibrate(model, [ids])
    teach(model, ids)
    expected, former = logits(model, ids), [weights_in(layer) for layer in list_layers(model)]
    grow(model, 7, batches=[make_tokens(seed=5)])
    torch.testing.assert_close(logits(model, ids), expected)
    for layer, weights in zip(list_layers(model), former, strict=True):
        *rows, down = weights_in(layer)
        assert all(torch.equal(new[:4], old) for new, old in zip(rows, weights, strict=False))
        assert torch.equal(down[:, :4], weights[-1]) and not down[:, 4:].any()
        for new in rows:
            torch.testing.assert_close(new[4:].norm(dim=1), torch.ones(3))
            assert (torch.cdist(new[4:], new[:4]) > 1e-3).all()
            assert (torch.cdist(new[4:], new[4:]) > 1e-3).sum() == 6
    teach(model, ids)
    assert all(weights_in(layer)[-1][:, 4:].any() for layer in list_layers(model))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_host(family), tmp_path).eval()
    torch.testing.assert_close(logits(loaded, ids), logits(model, ids))
    assert loaded.peft_config["default"].r == 7
    if strategy in ("topk", "bottomk", "random"):
        assert all(
            len(set(slots)) == 7
            for slots in loaded.peft_config["default"].get_record("slots").values()
        )


def test_every_new_row_of_a_wide_memory_is_another_token():
    model = get_peft_model(make_host("llama"), LocasConfig(r=4, init_weights="activation"))
    calibrate(model, [make_tokens(8, 40)])
    grow(model, 300, batches=[make_tokens(8, 40, seed=5)])
    for layer in list_layers(model):
        rows = weights_in(layer)[0]
        assert (torch.cdist(rows, rows) + torch.eye(300) > 1e-3).all()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = "^batches must have at least 320 tokens .*'activation', got 80"
    with pytest.raises(ValueError, match=message):
        grow(model, 320, batches=[make_tokens(2, 40)])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_record_of_other_slots_than_the_rows_is_not_trusted():
    model = get_peft_model(make_host("llama"), LocasConfig(r=4))
    calibrate(model, [make_tokens()])
    config = model.peft_config["default"]
    for slots in config.get_record("slots").values():
        slots[:] = range(24)
    grow(model, 6, batches=[make_tokens()])
    assert {len(weights_in(layer)[0]) for layer in list_layers(model)} == {6}
    model(make_tokens())


def teach(model, ids):
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1.0
    )
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("config", "rank", "batches", "error", "message"),
    [
        ({}, 4, [], ValueError, "^rank must be above the memory's width 4, got 4: raise it, or"),
        ({}, 25, [], ValueError, "^rank must be at most .* 24 where slots are cloned, got 25"),
        ({}, "8", [], TypeError, "^rank must be an int, got str"),
        ({}, 8, None, ValueError, "^batches must be given for init_weights='topk': give a text"),
        ({}, 8, [], ValueError, "^calibration saw no tokens"),
        ({"init_weights": "write"}, 8, None, ValueError, "while reading: SlotWriter fills its"),
    ],
)
def test_what_cannot_grow_is_refused_and_unchanged(config, rank, batches, error, message):
    model = get_peft_model(make_host("gpt_neox" if config else "llama"), LocasConfig(r=4, **config))
    if not config:
        calibrate(model, [make_tokens()])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=message):
        grow(model, rank, batches=batches)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.peft_config["default"].r == 4


def test_an_empty_or_a_merged_memory_does_not_grow():
    model = get_peft_model(make_host("llama"), LocasConfig(r=4))
    message = "^the memory 'default' is empty: set r in its config, or calibrate it"
    with pytest.raises(ValueError, match=message):
        grow(model, 8, batches=[make_tokens()])
    calibrate(model, [make_tokens()])
    model.merge_adapter()
    message = r"^the memory 'default' is merged: call unmerge_adapter\(\) before it grows"
    with pytest.raises(ValueError, match=message):
        grow(model, 8, batches=[make_tokens()])
