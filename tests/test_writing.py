"""Writing slots in closed form, and the cycle of writing and folding."""

import itertools

import pytest
import torch
from families import (
    FAMILIES,
    GATED,
    each_family,
    logits,
    make_host,
    make_tokens,
    same,
    snapshot,
    weights_in,
)
from peft import PeftModel, get_peft_model
from torch.nn.functional import normalize
from training import resume, save

from locas_peft import LocasConfig, SlotWriter, TestTimeTrainer, calibrate, uncalibrated_memories
from locas_peft.slots.writing import make_slots
from locas_peft.tuner import list_layers
from locas_peft.tuner.scale import KAPPA

TWO_LAYER = each_family(family for family in FAMILIES if family not in GATED)


def make_model(family="gpt_neox", r=16, **kwargs):
    options = {"r": r, "init_weights": "write", "scaling": float(r), **kwargs}
    return get_peft_model(make_host(family), LocasConfig(**options))


def make_trainer(model, rate=1e-3, **arguments):
    writer = SlotWriter(model, **arguments)
    return TestTimeTrainer(model, window=8, stride=4, learning_rate=rate, steps=[writer]), writer


def write_tokens(model, ids, **arguments):
    """Write all tokens but the first of a text of at most half as many as the memory has slots."""
    writer = SlotWriter(model, slots_per_chunk=len(ids), fold="nlsvd", **arguments)
    settings = {"window": len(ids), "stride": len(ids), "learning_rate": None}
    list(TestTimeTrainer(model, **settings, steps=[writer]).read(ids))


def ups(model):
    return torch.stack([layer.locas_up["default"].weight.detach() for layer in list_layers(model)])


def downs(model):
    return torch.stack(
        [layer.locas_down["default"].weight.detach() for layer in list_layers(model)]
    )


def stored(model):
    """Keys `[L, R, D]` and values `[L, D, R]` of a memory."""
    return ups(model), downs(model)


def log_likelihoods(model, ids):
    predicted = model(input_ids=ids[None, :-1]).logits[0]
    return predicted.double().log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def record(model, writer, ids, first=0):
    """Run the passes that a writer needs; return the losses of the tokens from the first one on."""
    with writer.recording():
        losses = -log_likelihoods(model, ids)[first:]
        losses.sum().backward()
    return losses.detach().float()


def inputs_and_gradients(model, ids, place):
    """A and G `[L, D]` of one token's log-likelihood, by hand: one backward pass for it alone."""
    recorded = []
    for layer in list_layers(model):
        layer.recorder = lambda a, out: recorded.append((a, out))
    likelihood = log_likelihoods(model, ids[: place + 2])[-1]
    for layer in list_layers(model):
        layer.recorder = None
    inputs, outputs = zip(*recorded, strict=True)
    gradients = torch.autograd.grad(likelihood, outputs)
    rows = [
        torch.stack([each.flatten(0, -2)[place] for each in which]) for which in (inputs, gradients)
    ]
    return rows[0].detach(), rows[1]


@pytest.mark.parametrize("output_scale", ["paper", "measured"])
@pytest.mark.parametrize("family", TWO_LAYER)
def test_a_written_slot_moves_the_output_by_the_formulas_amount(family, output_scale):
    """phi(|A|) v along the gradient, in every layer, with A as after a norm without gains."""
    model = make_model(family, output_scale=output_scale, max_slot_norm=None)
    ids = make_tokens(1, 10)[0]
    inputs, gradients = inputs_and_gradients(model, ids, len(ids) - 2)
    before = log_likelihoods(model, ids)[-1]
    # The last token alone: what came before it has no slot, so that nothing else changes.
    writer = SlotWriter(model, epsilon=1e-3, slots_per_chunk=1)
    assert writer.write(record(model, writer, ids, first=-1)) == {}
    assert writer.taken == 1 and writer.folds == 0
    assert log_likelihoods(model, ids)[-1] > before
    keys, values = make_slots(inputs[:, None], gradients[:, None], 1e-3)
    torch.testing.assert_close(stored(model)[0][:, 0], keys[:, 0], rtol=1e-4, atol=1e-5)
    for layer, a, value in zip(list_layers(model), inputs, values[:, 0], strict=True):
        assert (layer.locas_input_scale["default"] == 1) == (output_scale == "paper")
        change = layer.recall(["default"], a[None])[0].detach()
        size = layer.locas_input_scale["default"] * a.norm()
        if output_scale == "measured":
            size = size / KAPPA
            assert size == pytest.approx(16**0.5, rel=0.25)  # the root of D
        torch.testing.assert_close(change, layer.ffn.act(size) * value, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("fold", ["nlsvd", "refit"])
def test_stored_values_obey_the_clip_without_a_step_of_an_optimizer(fold):
    """The paper's output scale is divided by r: with many slots the stored values are long."""
    model = make_model(r=8, scaling=1.0, output_scale="paper")
    trainer, writer = make_trainer(model, None, epsilon=10.0, slots_per_chunk=3, fold=fold)
    for _ in trainer.read(make_tokens(1, 24)[0]):
        longest = stored(model)[1].norm(dim=1).max()
        assert longest <= 1 + 1e-6
    assert writer.folds and longest > 1 - 1e-6


def test_slots_are_the_papers():
    inputs, gradients = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    keys, values = make_slots(inputs, gradients, 0.25)
    torch.testing.assert_close(keys, inputs / inputs.norm(dim=-1, keepdim=True))
    # Over layers and D.
    lengths = gradients.square().sum(dim=(0, 2), keepdim=True).sqrt()
    torch.testing.assert_close(values, 0.25 * gradients / lengths)
    keys, values = make_slots(torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), 1.0)
    assert not keys.any() and not values.any()


def test_writing_changes_no_weight_of_the_base():
    model = make_model(r=32)
    before = snapshot(model)
    write_tokens(model, make_tokens(1, 12)[0])
    changed = {key for key, tensor in model.state_dict().items() if (tensor != before[key]).any()}
    assert changed and all(".locas_" in key for key in changed)
    assert all(p.requires_grad == (".locas_" in name) for name, p in model.named_parameters())


def test_which_tokens_are_written():
    ids = make_tokens(1, 13)[0]
    models = {}
    for count in (4, 12):
        model = models[count] = make_model(r=32, output_scale="paper")
        writer = SlotWriter(model, slots_per_chunk=count)
        losses = record(model, writer, ids)
        writer.write(losses)
        assert writer.taken == count
    chosen = losses.topk(4).indices.sort().values
    keys, values = stored(models[12])
    torch.testing.assert_close(stored(models[4])[0][:, :4], keys[:, chosen])
    # A trainer writes the same.
    written = make_model(r=32, output_scale="paper")
    write_tokens(written, ids)
    torch.testing.assert_close(ups(written), keys)
    torch.testing.assert_close(downs(written), values, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("fold", "rate"), [("nlsvd", None), ("refit", 1e-3)])
def test_the_cycle_stays_within_its_capacity(fold, rate):
    model = make_model(r=8)
    tensors = [weight for layer in list_layers(model) for weight in weights_in(layer)]
    places = [tensor.data_ptr() for tensor in tensors]
    trainer, writer = make_trainer(model, rate, slots_per_chunk=2, fold=fold)
    taken = []
    for chunk in trainer.read(make_tokens(1, 40)[0]):
        assert chunk.learned
        taken.append(writer.taken)
    assert taken == [2, 4, 6, 8, 6, 8, 6, 8, 6, 8] and writer.folds == 3
    assert places == [tensor.data_ptr() for tensor in tensors]
    assert all(tensor.isfinite().all() for tensor in tensors)
    assert all(parameter.grad is None for parameter in model.parameters())


@torch.no_grad()
def test_a_refit_fold_answers_as_before_on_what_it_saw():
    model = make_model(r=8)
    calibrate(model, [make_tokens()])
    layers = list_layers(model)
    generator = torch.Generator().manual_seed(1)
    # Eight slots, four of them copies: four say the same.
    for layer in layers:
        up, down = weights_in(layer)
        rows = torch.randn(4, 16, generator=generator)
        up.copy_(normalize(rows, dim=1).repeat(2, 1))
        down.copy_(0.1 * torch.randn(16, 8, generator=generator))
    writer = SlotWriter(model, fold="refit")
    inputs = torch.randn(len(layers), 30, 16, generator=generator)

    def recall():
        return [layer.recall(["default"], a) for layer, a in zip(layers, inputs, strict=True)]

    before = recall()
    moved = writer._fold(inputs)
    torch.testing.assert_close(recall(), before, rtol=1e-3, atol=1e-5)
    assert writer.taken == 4
    for _, source in moved.values():
        assert sorted(source[:4] % 4) == [0, 1, 2, 3] and (source[4:] == -1).all()


def test_the_optimizers_state_follows_the_slots():
    model = make_model(r=8)
    trainer, writer = make_trainer(model, slots_per_chunk=4)
    reading = trainer.read(make_tokens(1, 40)[0])
    next(reading), next(reading), next(reading)
    assert writer.folds == 1
    for layer in list_layers(model):
        for dim, weight in enumerate(weights_in(layer)):
            entry = trainer.learner.optimizer.state[weight]["exp_avg"]
            kept, fresh = entry.split(4, dim=dim)
            assert kept.any() and not fresh.any()


def test_a_chunk_whose_gradients_overflow_is_read_and_not_written():
    model = make_model(r=8)
    trainer, writer = make_trainer(model)

    def overflow(module, args, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))

    # Free slots have gradients of zero whatever arrives: the optimizer's own check sees nothing.
    handle = list_layers(model)[1].register_forward_hook(overflow)
    reading = trainer.read(make_tokens(1, 16)[0])
    next(reading)
    assert writer.taken == 0
    handle.remove()
    next(reading)
    assert writer.taken == 4 and all(tensor.isfinite().all() for tensor in stored(model))


def test_free_slots_stay_free_under_training():
    model = make_model(r=16)
    trainer, writer = make_trainer(model, 1e-2, slots_per_chunk=1)
    for _ in trainer.read(make_tokens(1, 24)[0]):
        keys, values = stored(model)
        assert not keys[:, writer.taken :].any() and not values[:, :, writer.taken :].any()
    assert writer.taken == 6


def test_reading_goes_on_from_a_checkpoint_bit_for_bit(tmp_path):
    ids = make_tokens(1, 40)[0]
    whole, part, rest = (make_model(r=8) for _ in range(3))
    first, _ = make_trainer(whole, slots_per_chunk=2)
    chunks = list(first.read(ids))
    second, _ = make_trainer(part, slots_per_chunk=2)
    for _ in itertools.islice(second.read(ids), 6):
        pass
    save(second, tmp_path)
    third, _ = make_trainer(rest, slots_per_chunk=2)
    resume(third, tmp_path)
    list(third.read(ids))
    assert [c.nll_nats for c in third.chunks] == [c.nll_nats for c in chunks]
    assert same(rest, snapshot(whole))

    other, _ = make_trainer(make_model(r=8), slots_per_chunk=1)
    with pytest.raises(ValueError, match="^writer: slots_per_chunk must be 2 as in the checkpoint"):
        resume(other, tmp_path)


def test_a_written_memory_is_saved_and_loaded(tmp_path):
    model = make_model(r=32)
    ids = make_tokens(1, 12)
    with pytest.warns(UserWarning, match="is saved empty"):
        model.save_pretrained(tmp_path)
    model.merge_adapter()
    model.unmerge_adapter()
    assert uncalibrated_memories(model) == ["default"]
    write_tokens(model, ids[0], epsilon=0.1)  # measures the scale in the same pass
    assert uncalibrated_memories(model) == []
    with pytest.raises(ValueError, match="is written while reading, not calibrated"):
        calibrate(model, [ids])
    expected = logits(model, ids)
    assert not torch.allclose(expected, logits(make_host("gpt_neox"), ids))
    model.save_pretrained(tmp_path / "memory")
    loaded = PeftModel.from_pretrained(make_host("gpt_neox"), tmp_path / "memory")
    assert torch.equal(logits(loaded, ids), expected)


def test_a_gated_host_is_refused():
    message = "^init_weights='write' needs a two-layer memory, got the gated FFN model.layers.0.mlp"
    with pytest.raises(ValueError, match=message):
        make_model("llama")


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {"epsilon": 0}, "epsilon must be a finite number above 0, got 0"),
        ({}, {"fold": "half"}, "fold must be one of nlsvd, refit, got 'half'"),
        ({}, {"slots_per_chunk": 0}, "slots_per_chunk must be at least 1, got 0: raise it"),
        ({}, {"adapter_name": "other"}, "no single LOCAS memory 'other' to write into"),
        ({"family": "llama", "init_weights": "gaussian"}, {}, "must have two layers to be written"),
        ({"rank_pattern": {"layers.0.mlp": 8}}, {}, "must have one width, got"),
        ({"r": 1}, {}, "r must be at least 2 for a memory that is written, got 1"),
        ({"scaling": 0.0}, {}, "output scale above 0"),
    ],
)
def test_what_cannot_be_written_is_refused(options, arguments, message):
    with pytest.raises(ValueError, match=message):
        SlotWriter(make_model(**options), **arguments)


def test_a_model_without_a_memory_cannot_be_written_into():
    message = r"no single LOCAS memory that is active \(active: none\) to write into"
    with pytest.raises(ValueError, match=message):
        SlotWriter(make_host("gpt_neox"))


def test_a_memory_without_slots_is_not_read_with_in_vain():
    model = make_model()
    trainer = TestTimeTrainer(model, window=8, stride=4, learning_rate=1e-3)
    message = "steps must have a writer for the memory 'default', which has no slots"
    with pytest.raises(ValueError, match=message):
        trainer.read(make_tokens(1, 12)[0])
    write_tokens(model, make_tokens(1, 6)[0])  # a written one may be trained without
    assert all(chunk.learned for chunk in trainer.read(make_tokens(1, 12)[0]))


def test_what_is_not_finite_is_not_written():
    model = make_model()
    write_tokens(model, make_tokens(1, 6)[0])
    before = snapshot(model)
    writer = SlotWriter(model)
    with pytest.raises(ValueError, match="needs a forward and a backward pass inside recording"):
        writer.write(torch.zeros(3))
    with writer.recording():
        model(input_ids=make_tokens(1, 6)).logits.sum().mul(float("nan")).backward()
    with pytest.raises(ValueError, match="must be finite to be written, got NaN"):
        writer.write(torch.zeros(3))
    assert same(model, before)
