"""The rule in closed form: a map, or the values of slots, by ridge regression."""

import math

import pytest
import torch
from families import logits, make_host, make_tokens
from peft import PeftModel, get_peft_model
from test_writing import TWO_LAYER, downs, make_model, ups
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from training import assert_same, resume, save, sgd, weights_of, without_time

from locas_peft import (
    LocasConfig,
    RidgeWriter,
    SlotWriter,
    TestTimeTrainer,
    ValueWriter,
    backbone,
    compress,
)
from locas_peft.slots.ridge import SHARPNESS
from locas_peft.text import tokenize, unwrap
from locas_peft.tuner import list_layers

IDS = make_tokens(1, 40)[0]
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


def maps_of(model) -> torch.Tensor:
    """The linear maps of a two-layer memory `[L, D, D]`."""
    maps = []
    for layer in list_layers(model):
        up, down = (module.weight.detach() for module in layer.projections("default"))
        maps.append(
            layer.locas_input_scale["default"] * layer.saved_scale("default") * (down @ up).T
        )
    return torch.stack(maps)


def make_writer(model, rule=RidgeWriter, **arguments):
    return rule(model, **{"prior": 0.0, "ridge": 0.3, "rate": 1e-3, **arguments})


def make_trainer(model, writer, window=16, stride=8, learning_rate=None) -> TestTimeTrainer:
    options = {"window": window, "stride": stride, "learning_rate": learning_rate}
    return TestTimeTrainer(model, **options, steps=[writer])


def read(model, writer, ids=IDS, **options) -> None:
    list(make_trainer(model, writer, **options).read(ids))


def read_at_once(model, writer):
    """Read a text in one chunk; return A and G `[L, N, D]` that the writer takes."""
    recorded = {}

    def record(name):
        take = getattr(writer, name)

        def take_and_keep(*arguments):
            recorded[name] = take(*arguments)
            return recorded[name]

        setattr(writer, name, take_and_keep)

    record("_take_inputs")
    record("_take_gradients")
    read(model, writer, window=40, stride=40)
    # Of the sum, where the loop differentiates the mean.
    return recorded["_take_inputs"], 39 * recorded["_take_gradients"].double()


def make_metric(inputs):
    """Return C `[N, N]`, in float64, of the inputs of a layer."""
    inputs = inputs.double()
    gram = inputs.T @ inputs
    return gram + 0.3 * gram.diagonal().mean() * torch.eye(len(gram))


def read_with_map(family, r=32):
    model = make_model(family, r=r)
    return model, *read_at_once(model, make_writer(model))


@pytest.mark.parametrize("family", [family for family in TWO_LAYER if family.id != "nemotron"])
def test_the_slots_hold_the_ridge_regression_of_the_text(family):
    model, inputs, gradients = read_with_map(family)  # R > D: nothing is cut
    for layer, a, g in zip(list_layers(model), inputs, gradients, strict=True):
        cross = a.double().T @ g
        solved = torch.linalg.solve(make_metric(a), cross)
        expected = a.double() @ (1e-3 * solved / g.square().mean())
        activations = layer.activate(["default"], a)[:, :17] / SHARPNESS
        on = (activations > 0.2).all(dim=1)
        assert on.float().mean() > 0.5 and not layer.locas_up["default"].weight[17:].any()
        found = layer.recall(["default"], a).double()
        torch.testing.assert_close(found[on], expected[on], **CLOSE)


def test_a_cut_map_keeps_the_leading_terms_in_the_inputs_metric():
    whole, inputs, _ = read_with_map("gpt_neox")
    cut, *_ = read_with_map("gpt_neox", r=5)
    for full, few, a in zip(maps_of(whole), maps_of(cut), inputs, strict=True):
        values, vectors = torch.linalg.eigh(make_metric(a))
        root = (vectors * values.sqrt()) @ vectors.T
        singular = torch.linalg.svdvals(root @ full.double())
        error = torch.linalg.matrix_norm(root @ (full - few).double())
        assert error <= 1.1 * singular[4:].square().sum().sqrt()  # R = 5 slots are 4 terms


def test_a_map_is_reduced_on_a_text_alone():
    model, _, _ = read_with_map("gpt_neox", r=12)
    before = logits(model, IDS[None])
    with pytest.raises(ValueError, match="^the memory 'default' holds a map that RidgeWriter "):
        compress(model, 11)
    assert torch.equal(logits(model, IDS[None]), before)
    with model.disable_adapter():
        learned = (before - logits(model, IDS[None])).norm()
    compress(model, 11, batches=[IDS[None]])
    assert (logits(model, IDS[None]) - before).norm() < 0.1 * learned


def test_another_activation_and_other_slots_are_refused():
    with pytest.raises(ValueError, match="^the host's activation must be like ReLU, GELU or SiLU"):
        RidgeWriter(make_model("nemotron"))
    written = make_model()
    read(written, SlotWriter(written), window=8, stride=4)
    with pytest.raises(ValueError, match="^the memory 'default' must be empty or written by Ridge"):
        RidgeWriter(written)
    for name, value in (("rate", 0.0), ("ridge", math.nan), ("prior", -1.0)):
        with pytest.raises(ValueError, match=f"^{name} must be "):
            RidgeWriter(make_model(), **{name: value})


def make_gated(family="llama", **fields):
    return get_peft_model(make_host(family), LocasConfig(r=6, init_weights="gaussian", **fields))


def rows_of(model) -> list[torch.Tensor]:
    """The rows of a memory, without its values."""
    found = []
    for layer in list_layers(model):
        found += [module.weight.detach().clone() for module in layer.projections("default")[:-1]]
    return found


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_values_are_the_ridge_regression_on_their_slots_and_rows_stay(family):
    model = make_gated(family)
    rows = rows_of(model)
    inputs, gradients = read_at_once(model, make_writer(model, ValueWriter, rate=1e-6))
    for layer, a, g in zip(list_layers(model), inputs, gradients, strict=True):
        m = layer.activate(["default"], a).detach().double()
        solved = torch.linalg.solve(make_metric(m), m.T @ g)
        expected = m @ (1e-6 / (2 * 16) * solved / g.square().mean())
        assert expected.any()
        found = layer.recall(["default"], a).double()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-12)
    assert all(map(torch.equal, rows, rows_of(model)))
    before = downs(model)
    read(model, ValueWriter(model, rate=1e-12), IDS[:20])  # another text's values are added
    torch.testing.assert_close(downs(model), before, rtol=1e-3, atol=1e-9)


def test_values_stay_within_the_norm_clip_and_rows_may_be_trained_beside():
    model = make_gated()
    before = ups(model)
    read(model, ValueWriter(model, rate=1e6, prior=0.0), learning_rate=1e-3)
    norms = downs(model).norm(dim=1)
    assert norms.max() > 0.99 and norms.max() < 1.001
    assert not torch.equal(ups(model), before)


@pytest.mark.parametrize("rule", [RidgeWriter, ValueWriter])
def test_texts_at_once_are_written_as_one_after_the_other_and_padding_enters_no_sum(rule):
    lengths = (40, 9, 3, 17, 2, 25)

    def write(lengths, batch_size):
        model = make_model(r=32) if rule is RidgeWriter else make_gated()
        writer = make_writer(model, rule, prior=10.0, rate=1e-4)
        rows = [make_tokens(1, length, seed=length)[0] for length in lengths]
        for start in range(0, len(rows), batch_size):
            labels = pad_sequence(
                rows[start : start + batch_size], batch_first=True, padding_value=-100
            )
            mask = (labels != -100).long()
            with writer.recording():
                model(input_ids=labels * mask, attention_mask=mask, labels=labels).loss.backward()
            # No token follows the last one.
            assert writer.add(functional.pad(mask[:, 1:] == 1, (0, 1)))
            assert not downs(model).any()
        assert writer.solve() and downs(model).any()
        # Of RidgeWriter the maps: the keys of weak terms are rounding alone.
        maps = maps_of(model) if rule is RidgeWriter else downs(model)
        return {"maps": maps, **writer.state_dict()}

    alone = write(lengths, 1)
    assert alone["tokens"] == sum(lengths) - len(lengths)
    for at_once in (write(lengths, 8), write(lengths[::-1], 3)):
        torch.testing.assert_close(at_once, alone, **CLOSE)


@pytest.mark.parametrize("rule", [RidgeWriter, ValueWriter])
def test_resuming_is_bit_identical(rule, tmp_path):
    ids = make_tokens(1, 100)[0]

    def make():
        model = make_gated() if rule is ValueWriter else make_model()
        return make_trainer(model, make_writer(model, rule))

    whole, resumed = make(), make()
    for chunk in whole.read(ids):
        if chunk.index == 5:
            save(whole, tmp_path)
    resume(resumed, tmp_path)
    list(resumed.read(ids))
    assert without_time(resumed.chunks) == without_time(whole.chunks)
    assert_same(weights_of(resumed.model), weights_of(whole.model))


def test_a_saved_memory_goes_on_from_its_own_map(tmp_path):
    model = make_model(r=32)
    read(model, make_writer(model))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_host("gpt_neox"), tmp_path, is_trainable=True)
    read(loaded, RidgeWriter(loaded, rate=1e-9), IDS[:20])
    assert maps_of(model).any()
    torch.testing.assert_close(maps_of(loaded), maps_of(model), **CLOSE)


@pytest.mark.parametrize("radius", [1.0, 0.25, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_written_map_is_within_the_clip_and_survives_a_step_of_an_optimizer(radius, dtype):
    """Long rows were clipped by the first step, whatever its rate: the loss went from 3.79 to 4.83."""
    model = make_model(r=32, max_slot_norm=radius)
    for layer in list_layers(model):
        for module in layer.projections("default"):
            module.to(dtype)
    read(model, make_writer(model, rate=0.1))
    for layer in list_layers(model):
        up, down = (module.weight.detach().float() for module in layer.projections("default"))
        for norms in (up.norm(dim=1), down.norm(dim=0)):
            assert 0.2 * (radius or 1) < norms.max() < (radius or 1)
    before = logits(model, IDS[None])
    model(input_ids=IDS[None], labels=IDS[None]).loss.backward()
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.optim.SGD(weights, lr=1e-12).step()
    after = logits(model, IDS[None])
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    with model.disable_adapter():
        assert (after - logits(model, IDS[None])).abs().max() > 0.1


def test_a_rate_beside_a_map_that_is_written_anew_is_refused():
    model = make_model()
    for options in ({"learning_rate": 1e-3}, {"learning_rate": None, "optimizer": sgd(0.1)}):
        message = "^learning_rate and optimizer must be None beside a RidgeWriter, "
        with pytest.raises(ValueError, match=message):
            TestTimeTrainer(model, window=16, stride=8, **options, steps=[RidgeWriter(model)])


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("short", RidgeWriter),
        ("constant", RidgeWriter),
        ("no gradient", RidgeWriter),
        ("repeated", RidgeWriter),
        ("repeated", ValueWriter),
        ("overflow", RidgeWriter),
        ("overflow", ValueWriter),
    ],
)
def test_a_text_that_nothing_can_be_learned_from_stays_finite_and_no_worse(kind, rule):
    name, init = (backbone.MLP_NAME, "write") if rule is RidgeWriter else (backbone.NAME, "topk")
    base, tokenizer = backbone.load(name=name)
    text = tokenize(tokenizer, unwrap("A lamp was lit in the window of the house. " * 20), 240)
    ids = {"short": text[:20], "repeated": text[:1].repeat(240)}.get(kind, text)
    settings = {"window": 64, "stride": 32, "learning_rate": None}
    plain = TestTimeTrainer(base, **settings)
    list(plain.read(ids))
    model = get_peft_model(base, LocasConfig(r=16, init_weights=init))
    writer = rule(model)
    if kind == "overflow":  # finite inputs whose squares are not
        take = writer._take_inputs
        writer._take_inputs = lambda *arguments: take(*arguments) * 1e30
    if kind == "no gradient":

        def silence(module, args, output):
            if output.requires_grad:
                output.register_hook(torch.zeros_like)

        list_layers(model)[2].register_forward_hook(silence)
    trainer = TestTimeTrainer(model, **settings, steps=[writer])
    list(trainer.read(ids))
    assert ups(model).isfinite().all() and downs(model).isfinite().all()
    assert trainer.perplexity <= plain.perplexity * 1.001
    assert kind != "overflow" or not downs(model).any()
