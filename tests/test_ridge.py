"""The rule in closed form: a map, or the values of slots, by ridge regression."""

import math

import pytest
import torch
from families import make_host, make_tokens
from peft import PeftModel, get_peft_model
from test_writing import TWO_LAYER, downs, make_model, ups
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from training import resume, save

from locas_peft import LocasConfig, RidgeWriter, SlotWriter, TestTimeTrainer, ValueWriter, backbone
from locas_peft.slots.ridge import SHARPNESS
from locas_peft.text import tokenize, unwrap
from locas_peft.tuner import list_layers

IDS = make_tokens(1, 40)[0]
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


def map_of(layer):
    up, down = (module.weight.detach() for module in layer.projections("default"))
    return layer.locas_input_scale["default"] * layer.saved_scale("default") * (up.T @ down.T)


def make_trainer(model, window=16, stride=8, rule=RidgeWriter, **arguments):
    writer = rule(model, **{"prior": 0.0, "ridge": 0.3, "rate": 1e-3, **arguments})
    return TestTimeTrainer(model, window=window, stride=stride, learning_rate=None, steps=[writer])


def record_passes(writer) -> dict[str, torch.Tensor]:
    """From now on: A and G `[L, N, D]` that the writer takes."""
    recorded = {}
    for name, take in (("inputs", writer._take_inputs), ("gradients", writer._take_gradients)):

        def record(*arguments, name=name, take=take):
            recorded[name] = take(*arguments)
            return recorded[name]

        setattr(writer, f"_take_{name}", record)
    return recorded


def read_once(family, ids, r=32, **arguments):
    model = make_model(family, r=r)
    trainer = make_trainer(model, window=len(ids), stride=len(ids), **arguments)
    recorded = record_passes(trainer.steps[0])
    list(trainer.read(ids))
    return model, recorded["inputs"], recorded["gradients"]


@pytest.mark.parametrize("family", [family for family in TWO_LAYER if family.id != "nemotron"])
def test_the_slots_hold_the_ridge_regression_of_the_text(family):
    model, inputs, gradients = read_once(family, IDS)  # R > D: nothing is cut
    gradients = 39 * gradients.double()  # of the sum, where the loop differentiates the mean
    for layer, a, g in zip(list_layers(model), inputs.double(), gradients, strict=True):
        gram = a.T @ a
        metric = gram + 0.3 * gram.diagonal().mean() * torch.eye(16)
        expected = a @ (1e-3 * torch.linalg.solve(metric, a.T @ g) / g.square().mean())
        activations = layer.activate(["default"], a.float())[:, :17] / SHARPNESS
        on = (activations > 0.2).all(dim=1)
        assert on.float().mean() > 0.5 and not layer.locas_up["default"].weight[17:].any()
        torch.testing.assert_close(
            layer.recall(["default"], a.float()).double()[on], expected[on], **CLOSE
        )


def test_a_cut_map_keeps_the_leading_terms_in_the_inputs_metric():
    whole, inputs, _ = read_once("gpt_neox", IDS)
    cut, *_ = read_once("gpt_neox", IDS, r=5)
    for full, few, a in zip(list_layers(whole), list_layers(cut), inputs, strict=True):
        gram = (a.T @ a).double()
        metric = gram + 0.3 * gram.diagonal().mean() * torch.eye(16)
        values, vectors = torch.linalg.eigh(metric)
        root = (vectors * values.sqrt()) @ vectors.T
        linear = [map_of(layer).double() for layer in (full, few)]
        singular = torch.linalg.svdvals(root @ linear[0])
        error = torch.linalg.matrix_norm(root @ (linear[0] - linear[1]))
        assert error <= 1.1 * singular[4:].square().sum().sqrt()  # R = 5 slots are 4 terms


def test_another_activation_and_other_slots_are_refused():
    message = "^the host's activation must be like ReLU, GELU or SiLU, got "
    with pytest.raises(ValueError, match=message):
        RidgeWriter(make_model("nemotron"))
    written = make_model()
    list(
        TestTimeTrainer(
            written, window=8, stride=4, learning_rate=None, steps=[SlotWriter(written)]
        ).read(IDS)
    )
    message = "^the memory 'default' must be empty or written by RidgeWriter, got other"
    with pytest.raises(ValueError, match=message):
        RidgeWriter(written)
    for name, value in (("rate", 0.0), ("ridge", math.nan), ("prior", -1.0)):
        with pytest.raises(ValueError, match=f"^{name} must be "):
            RidgeWriter(make_model(), **{name: value})


def make_gated(family="llama", **fields):
    return get_peft_model(make_host(family), LocasConfig(r=6, init_weights="gaussian", **fields))


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_values_are_the_ridge_regression_on_their_slots_and_rows_stay(family):
    model = make_gated(family)
    rows = [
        module.weight.clone()
        for layer in list_layers(model)
        for module in layer.projections("default")[:-1]
    ]
    trainer = make_trainer(model, window=40, stride=40, rule=ValueWriter, rate=1e-6)
    recorded = record_passes(trainer.steps[0])
    list(trainer.read(IDS))
    for layer, a, g in zip(list_layers(model), *recorded.values(), strict=True):
        m, g = layer.activate(["default"], a).detach().double(), 39 * g.double()
        gram = m.T @ m
        metric = gram + 0.3 * gram.diagonal().mean() * torch.eye(6)
        expected = m @ (1e-6 / (2 * 16) * torch.linalg.solve(metric, m.T @ g) / g.square().mean())
        assert expected.any()
        torch.testing.assert_close(
            layer.recall(["default"], a).double(), expected, rtol=1e-3, atol=1e-12
        )
    after = [
        module.weight
        for layer in list_layers(model)
        for module in layer.projections("default")[:-1]
    ]
    assert all(map(torch.equal, rows, after))
    goes_on = ValueWriter(model, rate=1e-12)  # another text's values are added
    before = downs(model)
    list(
        TestTimeTrainer(model, window=16, stride=8, learning_rate=None, steps=[goes_on]).read(
            IDS[:20]
        )
    )
    torch.testing.assert_close(downs(model), before, rtol=1e-3, atol=1e-9)


def test_values_stay_within_the_norm_clip_and_rows_may_be_trained_beside():
    model = make_gated()
    before = ups(model)
    writer = ValueWriter(model, rate=1e6, prior=0.0)
    list(TestTimeTrainer(model, window=16, stride=8, learning_rate=1e-3, steps=[writer]).read(IDS))
    norms = downs(model).norm(dim=1)
    assert norms.max() > 0.99 and norms.max() < 1.001
    assert not torch.equal(ups(model), before)


@pytest.mark.parametrize("rule", [RidgeWriter, ValueWriter])
def test_texts_at_once_are_written_as_one_after_the_other_and_padding_enters_no_sum(rule):
    lengths = (40, 9, 3, 17, 2, 25)

    def write(lengths, batch_size):
        model = make_model(r=32) if rule is RidgeWriter else make_gated()
        writer = rule(model, prior=10.0, ridge=0.3, rate=1e-4)
        rows = [make_tokens(1, length, seed=length)[0] for length in lengths]
        for start in range(0, len(rows), batch_size):
            ids = pad_sequence(rows[start : start + batch_size], batch_first=True)
            labels = pad_sequence(
                rows[start : start + batch_size], batch_first=True, padding_value=-100
            )
            with writer.recording():
                model(
                    input_ids=ids, attention_mask=(labels != -100).long(), labels=labels
                ).loss.backward()
            assert writer.add(
                functional.pad(labels[:, 1:] != -100, (0, 1))
            )  # no token follows the last one
            assert not downs(model).any()
        assert writer.solve() and downs(model).any()
        # Of RidgeWriter the maps: the keys of weak terms are rounding alone.
        maps = (
            torch.stack(list(map(map_of, list_layers(model))))
            if rule is RidgeWriter
            else downs(model)
        )
        return {"maps": maps, **writer.state_dict()}

    alone = write(lengths, 1)
    assert alone["tokens"] == sum(lengths) - len(lengths)
    for at_once in (write(lengths, 8), write(lengths[::-1], 3)):
        torch.testing.assert_close(at_once, alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rule", [RidgeWriter, ValueWriter])
def test_resuming_is_bit_identical(rule, tmp_path):
    ids = make_tokens(1, 200)[0]

    def make():
        model = make_gated() if rule is ValueWriter else make_model()
        return make_trainer(model, rule=rule)

    whole, first, second = make(), make(), make()
    chunks = list(whole.read(ids))
    for chunk in first.read(ids):
        if chunk.index == 9:
            break
    save(first, tmp_path)
    resume(second, tmp_path)
    list(second.read(ids))
    assert [chunk.nll_nats for chunk in second.chunks] == [chunk.nll_nats for chunk in chunks]
    assert torch.equal(ups(second.model), ups(whole.model))
    assert torch.equal(downs(second.model), downs(whole.model))


def test_a_memory_goes_on_from_its_own_map():
    model = make_model(r=32)
    list(make_trainer(model).read(IDS))
    before = [map_of(layer) for layer in list_layers(model)]
    writer = RidgeWriter(model, rate=1e-9)
    list(
        TestTimeTrainer(model, window=16, stride=8, learning_rate=None, steps=[writer]).read(
            IDS[:20]
        )
    )
    after = [map_of(layer) for layer in list_layers(model)]
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)


def test_a_saved_map_is_read_back(tmp_path):
    model = make_model(r=32)
    list(make_trainer(model).read(IDS))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_host("gpt_neox"), tmp_path, is_trainable=True)
    assert torch.equal(RidgeWriter(loaded)._read_map(), RidgeWriter(model)._read_map())
    assert RidgeWriter(loaded)._read_map().any()


@pytest.mark.parametrize("radius", [1.0, 0.25, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_written_map_is_within_the_clip_and_survives_a_step_of_an_optimizer(radius, dtype):
    """Long rows were clipped by the first step, whatever its rate: the loss went from 3.79 to 4.83."""
    model = make_model(r=32, max_slot_norm=radius)
    for layer in list_layers(model):
        for module in layer.projections("default"):
            module.to(dtype)
    list(make_trainer(model, rate=0.1).read(IDS))
    for layer in list_layers(model):
        up, down = (module.weight.detach().float() for module in layer.projections("default"))
        assert 0.2 * (radius or 1) < up.norm(dim=1).max() < (radius or 1)
        assert 0.2 * (radius or 1) < down.norm(dim=0).max() < (radius or 1)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        before = model(input_ids=IDS[None]).logits
    loss = model(input_ids=IDS[None], labels=IDS[None]).loss
    loss.backward()
    torch.optim.SGD(weights, lr=1e-12).step()
    with torch.no_grad():
        after = model(input_ids=IDS[None]).logits
        with model.disable_adapter():
            base = model(input_ids=IDS[None]).logits
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    assert (after - base).abs().max() > 0.1


def test_a_rate_beside_a_map_that_is_written_anew_is_refused():
    for options in (
        {"learning_rate": 1e-3},
        {"learning_rate": None, "optimizer": torch.optim.Adagrad},
    ):
        model = make_model()
        message = "^learning_rate and optimizer must be None beside a RidgeWriter, "
        with pytest.raises(ValueError, match=message):
            TestTimeTrainer(model, window=16, stride=8, **options, steps=[RidgeWriter(model)])


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        *(
            (RidgeWriter, kind)
            for kind in ("short", "constant", "repeated", "overflow", "no gradient")
        ),
        *((ValueWriter, kind) for kind in ("repeated", "overflow")),
    ],
)
def test_a_text_that_nothing_can_be_learned_from_stays_finite_and_no_worse(kind, rule):
    base, tokenizer = backbone.load(
        name=backbone.MLP_NAME if rule is RidgeWriter else backbone.NAME
    )
    text = tokenize(tokenizer, unwrap("A lamp was lit in the window of the house. " * 20), 240)
    ids = {"short": text[:20], "constant": text, "repeated": text[:1].repeat(240)}.get(kind, text)
    settings = {"window": 64, "stride": 32, "learning_rate": None}
    plain = TestTimeTrainer(base, **settings)
    list(plain.read(ids))
    model = get_peft_model(
        base, LocasConfig(r=16, init_weights="write" if rule is RidgeWriter else "topk")
    )
    layer, writer = list_layers(model)[2], rule(model)
    if kind == "overflow":  # finite inputs whose squares are not
        take = writer._take_inputs
        writer._take_inputs = lambda *arguments: take(*arguments) * 1e30
    if kind == "no gradient":

        def silence(module, args, output):
            if output.requires_grad:
                output.register_hook(torch.zeros_like)

        layer.register_forward_hook(silence)
    trainer = TestTimeTrainer(model, **settings, steps=[writer])
    list(trainer.read(ids))
    assert ups(model).isfinite().all() and downs(model).isfinite().all()
    assert trainer.perplexity <= plain.perplexity * 1.001
    assert kind != "overflow" or not downs(model).any()
