"""Writing slots in closed form, and the cycle of writing and folding."""

import copy

import pytest
import torch
from families import FAMILIES, GATED, each_family, make_host, make_tokens
from peft import PeftModel, get_peft_model
from torch.nn.functional import normalize
from training import resume, save

from locas_peft import LocasConfig, SlotWriter, TestTimeTrainer, calibrate, uncalibrated_memories
from locas_peft.slots.writing import make_slots
from locas_peft.tuner import list_layers
from locas_peft.tuner.scale import KAPPA

TWO_LAYER = each_family(family for family in FAMILIES if family not in GATED)


def make_model(family="gpt_neox", r=16, **kwargs):
    host = make_host(family)
    return get_peft_model(host, LocasConfig(r=r, init_weights="write", scaling=float(r), **kwargs))


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


@torch.no_grad()
def log_likelihoods(model, ids):
    logits = model(input_ids=ids[None, :-1]).logits[0]
    return logits.double().log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def inputs_and_gradients(model, ids, place):
    """A and G `[L, D]` of one token's log-likelihood, by hand: one backward pass for that token alone."""
    inputs, gradients = [], []
    for layer in list_layers(model):
        layer.recorder = lambda a, out: (
            inputs.append(a.detach().flatten(0, -2)[place]),
            out.register_hook(lambda g: gradients.insert(0, g.detach().flatten(0, -2)[place])),
        )
    logits = model(input_ids=ids[None, : place + 1]).logits[0]
    logits.log_softmax(-1)[place, ids[place + 1]].backward()
    for layer in list_layers(model):
        layer.recorder = None
    model.zero_grad()
    return torch.stack(inputs), torch.stack(gradients)


@pytest.mark.parametrize("family", TWO_LAYER)
def test_writing_a_token_raises_its_likelihood(family):
    model = make_model(family)
    ids = make_tokens(1, 12)[0]
    before = log_likelihoods(model, ids)[-1]
    # The last token alone: what came before it has no slot, so that nothing else changes.
    writer = SlotWriter(model, epsilon=1e-3, slots_per_chunk=1, fold="nlsvd")
    with writer.recording():
        logits = model(input_ids=ids[None, :-1]).logits[0]
        loss = -logits.log_softmax(-1)[-1, ids[-1]]
        loss.backward()
    assert writer.write(loss.detach()[None]) == {}
    assert writer.taken == 1 and writer.folds == 0
    assert log_likelihoods(model, ids)[-1] > before


@pytest.mark.parametrize("output_scale", ["paper", "measured"])
@pytest.mark.parametrize("family", TWO_LAYER)
def test_a_written_slot_moves_the_output_by_the_formulas_amount(family, output_scale):
    """phi(|A|) v along the gradient, in every layer, with A as after a norm without gains."""
    model = make_model(family, output_scale=output_scale, max_slot_norm=None)
    ids = make_tokens(1, 10)[0]
    place = len(ids) - 2
    writer = SlotWriter(model, epsilon=0.01, slots_per_chunk=1)
    with writer.recording():
        loss = -model(input_ids=ids[None, :-1]).logits[0].log_softmax(-1)[-1, ids[-1]]
        loss.backward()
    inputs = torch.stack([a[place] for a in writer._inputs])
    gradients = -torch.stack([g[place] for g in writer._gradients])
    writer.write(loss.detach()[None])
    _, values = make_slots(inputs[:, None], gradients[:, None], 0.01)
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
    model = get_peft_model(
        make_host("gpt_neox"), LocasConfig(r=8, init_weights="write", output_scale="paper")
    )
    writer = SlotWriter(model, epsilon=10.0, slots_per_chunk=3, fold=fold)
    settings = {"window": 8, "stride": 4, "learning_rate": None}
    for _ in TestTimeTrainer(model, **settings, steps=[writer]).read(make_tokens(1, 24)[0]):
        assert downs(model).norm(dim=1).max() <= 1 + 1e-6
    assert writer.folds and downs(model).norm(dim=1).max() > 1 - 1e-6


def test_slots_are_the_papers():
    generator = torch.Generator().manual_seed(0)
    inputs, gradients = (
        torch.randn(3, 5, 8, generator=generator),
        torch.randn(3, 5, 8, generator=generator),
    )
    keys, values = make_slots(inputs, gradients, 0.25)
    torch.testing.assert_close(keys.norm(dim=-1), torch.ones(3, 5))
    torch.testing.assert_close(
        values.square().sum(dim=(0, 2)).sqrt(), torch.full((5,), 0.25)
    )  # over layers and D
    ratio = values / gradients
    torch.testing.assert_close(
        ratio, ratio[:1, :, :1].expand_as(ratio)
    )  # one factor a token, the same in all layers
    keys, values = make_slots(torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), 1.0)
    assert not keys.any() and not values.any()


def test_a_written_slot_holds_what_token_by_token_gives_for_the_last_token():
    # The last token's gradient of the sum is its own; an earlier one's also holds what it does for later tokens.
    model = make_model(r=32, output_scale="paper")
    ids = make_tokens(1, 10)[0]
    single_inputs, single_gradients = inputs_and_gradients(model, ids, 8)
    write_tokens(model, ids, epsilon=0.01)
    keys, values = make_slots(single_inputs[:, None], single_gradients[:, None], 0.01)
    scales = torch.stack([layer.scale("default") for layer in list_layers(model)])[:, None]
    torch.testing.assert_close(ups(model)[:, 8], keys[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(downs(model)[:, :, 8] * scales, values[:, 0], rtol=1e-3, atol=1e-5)


def test_keys_are_unit_inputs_and_the_rest_stays_free():
    model = make_model(r=32)
    before = copy.deepcopy(model.state_dict())
    write_tokens(model, make_tokens(1, 12)[0], epsilon=0.01)
    assert SlotWriter(model).taken == 11
    assert ups(model)[:, 11:].any() == downs(model)[:, :, 11:].any() == torch.tensor(False)
    torch.testing.assert_close(ups(model)[:, :11].norm(dim=-1), torch.ones(2, 11))
    for key, tensor in model.state_dict().items():
        if ".locas_" not in key:
            assert torch.equal(tensor, before[key]), key
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(p.requires_grad == (".locas_" in name) for name, p in model.named_parameters())


def test_which_tokens_are_written():
    ids = make_tokens(1, 13)[0]
    keys = {}
    for count in (12, 4):
        model = make_model(r=32)
        writer = SlotWriter(model, slots_per_chunk=count)
        with writer.recording():
            losses = (
                -model(input_ids=ids[None, :-1])
                .logits[0]
                .log_softmax(-1)
                .gather(1, ids[1:, None])[:, 0]
            )
            losses.sum().backward()
        writer.write(losses.detach())
        assert writer.taken == count
        keys[count] = ups(model)[0, :count]
    torch.testing.assert_close(keys[4], keys[12][losses.topk(4).indices.sort().values])
    written = make_model(r=32)
    write_tokens(written, ids)
    assert SlotWriter(written).taken == 12
    torch.testing.assert_close(ups(written)[0, :12], keys[12])


@pytest.mark.parametrize("fold", ["nlsvd", "refit"])
def test_the_cycle_stays_within_its_capacity(fold):
    model = make_model(r=8)
    tensors = [
        module.weight for layer in list_layers(model) for module in layer.projections("default")
    ]
    places = [tensor.data_ptr() for tensor in tensors]
    writer = SlotWriter(model, slots_per_chunk=2, fold=fold)
    rate = None if fold == "nlsvd" else 1e-3
    trainer = TestTimeTrainer(model, window=8, stride=4, learning_rate=rate, steps=[writer])
    taken = []
    for chunk in trainer.read(make_tokens(1, 40)[0]):
        assert chunk.learned
        taken.append(writer.taken)
    assert taken == [2, 4, 6, 8, 6, 8, 6, 8, 6, 8] and writer.folds == 3
    assert places == [tensor.data_ptr() for tensor in tensors]
    assert all(tensor.isfinite().all() for tensor in tensors)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_refit_fold_answers_as_before_on_what_it_saw():
    model = make_model(r=8)
    calibrate(model, [make_tokens()])
    layers = list_layers(model)
    with torch.no_grad():  # eight slots, four of them copies: four say the same
        for layer in layers:
            rows = normalize(torch.randn(4, 16, generator=torch.Generator().manual_seed(1)), dim=1)
            layer.locas_up["default"].weight.copy_(rows.repeat(2, 1))
            layer.locas_down["default"].weight.copy_(
                0.1 * torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
            )
    writer = SlotWriter(model, fold="refit")
    inputs = torch.randn(len(layers), 30, 16, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        before = [layer.recall(["default"], a) for layer, a in zip(layers, inputs, strict=True)]
        moved = writer._fold(inputs)
        after = [layer.recall(["default"], a) for layer, a in zip(layers, inputs, strict=True)]
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-5)
    assert writer.taken == 4
    for weight, (dim, source) in moved.items():
        assert weight.shape[dim] == len(source) == 8
        assert sorted(source[:4] % 4) == [0, 1, 2, 3] and (source[4:] == -1).all()


def test_the_optimizers_state_follows_the_slots():
    model = make_model(r=8)
    writer = SlotWriter(model, slots_per_chunk=4)
    trainer = TestTimeTrainer(model, window=8, stride=4, learning_rate=1e-3, steps=[writer])
    ids = make_tokens(1, 40)[0]
    reading = trainer.read(ids)
    next(reading), next(reading), next(reading)
    assert writer.folds == 1
    for layer in list_layers(model):
        up, down = layer.locas_up["default"].weight, layer.locas_down["default"].weight
        for weight, dim in ((up, 0), (down, 1)):
            entry = trainer.learner.optimizer.state[weight]["exp_avg"]
            kept, fresh = entry.split(4, dim=dim)
            assert kept.any() and not fresh.any()


def test_a_chunk_whose_gradients_overflow_is_read_and_not_written():
    model = make_model(r=8)
    writer = SlotWriter(model)
    trainer = TestTimeTrainer(model, window=8, stride=4, learning_rate=1e-3, steps=[writer])

    def overflow(module, args, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))

    # Free slots have gradients of zero whatever arrives, so that the optimizer's own check sees nothing.
    handle = list_layers(model)[1].register_forward_hook(overflow)
    reading = trainer.read(make_tokens(1, 16)[0])
    next(reading)
    assert writer.taken == 0
    handle.remove()
    next(reading)
    assert writer.taken == 4 and ups(model).isfinite().all() and downs(model).isfinite().all()


def test_free_slots_stay_free_under_training():
    model = make_model(r=16)
    writer = SlotWriter(model, slots_per_chunk=1)
    trainer = TestTimeTrainer(model, window=8, stride=4, learning_rate=1e-2, steps=[writer])
    for _ in trainer.read(make_tokens(1, 24)[0]):
        taken = writer.taken
        assert not ups(model)[:, taken:].any() and not downs(model)[:, :, taken:].any()
    assert taken == 6


def test_reading_goes_on_from_a_checkpoint_bit_for_bit(tmp_path):
    ids = make_tokens(1, 40)[0]

    def trainer_of(model):
        writer = SlotWriter(model, slots_per_chunk=2)
        return TestTimeTrainer(model, window=8, stride=4, learning_rate=1e-3, steps=[writer])

    whole = make_model(r=8)
    chunks = list(trainer_of(whole).read(ids))
    first = trainer_of(make_model(r=8))
    for chunk in first.read(ids):
        if chunk.index == 5:
            break
    save(first, tmp_path)
    model = make_model(r=8)
    second = trainer_of(model)
    resume(second, tmp_path)
    list(second.read(ids))
    assert [c.nll_nats for c in second.chunks] == [c.nll_nats for c in chunks]
    assert torch.equal(ups(model), ups(whole)) and torch.equal(downs(model), downs(whole))

    other = make_model(r=8)
    writer = SlotWriter(other, slots_per_chunk=1)
    message = "^writer: slots_per_chunk must be 2 as in the checkpoint in "
    with pytest.raises(ValueError, match=message):
        resume(
            TestTimeTrainer(other, window=8, stride=4, learning_rate=1e-3, steps=[writer]), tmp_path
        )


def test_a_written_memory_is_saved_loaded_and_merged(tmp_path):
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
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        assert not torch.allclose(expected, make_host("gpt_neox")(input_ids=ids).logits)
    model.save_pretrained(tmp_path / "memory")
    loaded = PeftModel.from_pretrained(make_host("gpt_neox"), tmp_path / "memory")
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, expected)
        merged = loaded.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        plain = type(merged).from_pretrained(tmp_path / "merged").eval()
        torch.testing.assert_close(plain(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_gated_host_is_refused():
    with pytest.raises(ValueError) as error:
        make_model("llama")
    assert str(error.value) == (
        "init_weights='write' needs a two-layer memory, got the gated FFN model.layers.0.mlp: use 'topk', or a base "
        "with two-layer FFNs."
    )


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"epsilon": 0}, "epsilon must be a finite number above 0, got 0"),
        ({"fold": "half"}, "fold must be one of nlsvd, refit, got 'half'"),
        ({"slots_per_chunk": 0}, "slots_per_chunk must be at least 1, got 0: raise it"),
        ({"adapter_name": "other"}, "the model has no single LOCAS memory 'other' to write into"),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SlotWriter(make_model(), **kwargs)


def test_memories_that_cannot_be_written_are_refused():
    gated = get_peft_model(make_host("llama"), LocasConfig(r=4, init_weights="gaussian"))
    with pytest.raises(ValueError, match="must have two layers to be written, got gates beside"):
        SlotWriter(gated)
    with pytest.raises(ValueError, match="must have one width, got"):
        SlotWriter(make_model(rank_pattern={"layers.0.mlp": 8}))
    message = "r must be at least 2 for a memory that is written, got 1"
    with pytest.raises(ValueError, match=message):
        SlotWriter(make_model(r=1))
    message = r"no single LOCAS memory that is active \(active: none\) to write into"
    with pytest.raises(ValueError, match=message):
        SlotWriter(make_host("gpt_neox"))
    silent = get_peft_model(
        make_host("gpt_neox"), LocasConfig(r=4, init_weights="write", scaling=0.0)
    )
    with pytest.raises(ValueError, match="output scale above 0"):
        SlotWriter(silent)


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
    before = ups(model).clone(), downs(model).clone()
    writer = SlotWriter(model)
    with pytest.raises(ValueError, match="needs a forward and a backward pass inside recording"):
        writer.write(torch.zeros(3))
    with writer.recording():
        model(input_ids=make_tokens(1, 6)).logits.sum().mul(float("nan")).backward()
    with pytest.raises(ValueError, match="must be finite to be written, got NaN"):
        writer.write(torch.zeros(3))
    assert torch.equal(ups(model), before[0]) and torch.equal(downs(model), before[1])
