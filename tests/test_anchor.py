"""An anchor: the base's own text, the pull towards the base on it, and what that leaves of what was learned."""

import pytest
import torch
from families import VOCABULARY, logits, make_host
from peft import get_peft_model
from training import (
    SETTINGS,
    assert_same,
    make_ids,
    make_model,
    make_trainer,
    read,
    resume,
    save,
    sgd,
    trained_weights,
    weights_of,
    without_time,
)

from locas_peft import LocasConfig, SlotWriter, TestTimeTrainer, backbone, calibrate
from locas_peft.model import CausalLM, divergences
from locas_peft.stages import ReadSettings, complete, score
from locas_peft.text import python_reference, tokenize, unwrap
from locas_peft.ttt import Anchor, OwnText, write_own_text
from locas_peft.tuner import list_layers


def make_anchor(seeds: tuple[int, ...] = (5, 6, 7), **options) -> Anchor:
    return Anchor(torch.stack([make_ids(12, seed) for seed in seeds]), **options)


def remove_special_tokens(base) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(base.config, name, None)
        setattr(base.generation_config, name, None)


# The base's own text


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_own_text_is_the_bases_and_leaves_no_trace(family):
    model = make_model(family=family)
    base = model.get_base_model()
    base.config.bos_token_id = 0
    model.train()
    state, weights = torch.get_rng_state(), weights_of(model)
    texts = write_own_text(model, texts=3, tokens=10, seed=4)
    assert texts.shape == (3, 10) and texts.dtype == torch.int64
    assert torch.equal(texts, write_own_text(base, texts=3, tokens=10, seed=4))
    assert not torch.equal(texts, write_own_text(model, texts=3, tokens=10, seed=5))
    assert torch.equal(state, torch.get_rng_state()) and model.training
    assert_same(weights_of(model), weights)
    for layer in list_layers(model):
        for module in layer.projections("default"):
            torch.nn.init.normal_(module.weight)
    assert torch.equal(texts, write_own_text(model, texts=3, tokens=10, seed=4))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_own_text_goes_on_from_the_beginnings_that_are_given(family):
    base = make_host(family)
    beginnings = [[5], [6, 7, 8]]
    texts = write_own_text(base, texts=3, tokens=6, beginnings=beginnings)
    assert texts.shape == (3, 6)
    assert texts[:, 0].tolist() == [5, 6, 5] and texts[1, :3].tolist() == [6, 7, 8]
    own = OwnText(base, texts=3, tokens=6, first=2, beginnings=beginnings)
    assert own.settings["beginnings"] == beginnings and own[2][0] == 5
    assert torch.equal(own.written[:2], write_own_text(base, 2, 6, 0, beginnings))
    assert write_own_text(base, 1, 3, beginnings=beginnings[1:]).tolist() == [[6, 7, 8]]
    remove_special_tokens(base)
    assert write_own_text(base, texts=2, tokens=4, beginnings=[[5]]).shape == (2, 4)


@pytest.mark.parametrize("beginnings", [[], [[]], [[1], [1, 2, 3, 4]]])
def test_beginnings_of_another_length_are_named(beginnings):
    with pytest.raises(ValueError, match="beginnings must have 1 to 3 tokens each, got [01] to"):
        OwnText(make_host("llama"), tokens=3, beginnings=beginnings)


@pytest.mark.parametrize("beginnings", [None, [[5, 6]]])
def test_own_text_follows_the_bases_distribution(beginnings):
    base = make_host("llama")
    known = 1 if beginnings is None else 2
    texts = write_own_text(base, texts=4000, tokens=known + 1, beginnings=beginnings)
    expected = base(input_ids=texts[:1, :known]).logits[0, -1].softmax(-1)
    found = torch.bincount(texts[:, known], minlength=VOCABULARY) / len(texts)
    deviation = (found - expected) / (expected * (1 - expected) / len(texts)).sqrt()
    assert deviation.abs().max() < 5  # standard errors


@pytest.mark.parametrize("kind", ["locas", "lora"])
def test_a_reference_adapter_writes_the_texts_and_is_what_the_anchor_pulls_to(kind, caplog):
    model = make_model(kind)
    model.add_adapter("former", model.peft_config["default"])
    if kind == "locas":
        for name in ("default", "former"):
            calibrate(model, [make_ids(12, 5)[None]], name)
    own, former = (weights_of_adapter(model, name) for name in ("default", "former"))
    torch.manual_seed(2)
    with torch.no_grad():
        for weight, copied in zip(own, former, strict=True):
            copied.copy_(weight.normal_(std=0.3))
    base_texts = write_own_text(model, texts=3, tokens=10)
    texts = OwnText(model, texts=3, tokens=10, first=3, reference="former")
    with caplog.at_level("INFO", logger="locas_peft"):
        assert not torch.equal(texts[0], base_texts[0])
    assert "the memory as it was writes 3 texts of 10 tokens for the anchor" in caplog.text
    with_former = write_own_text(model, texts=3, tokens=10, reference="former")
    assert torch.equal(texts.written, with_former)
    model.set_adapter("default")

    host = CausalLM(model)
    anchor = Anchor(texts, every=1)
    assert anchor.settings["reference"] == "former"
    with torch.no_grad():
        assert anchor.loss(host, 0).item() == 0
        assert Anchor(texts.written, every=1).loss(host, 0).item() > 0
        for weight in own:
            weight.mul_(1.5)
    loss = anchor.loss(host, 0)
    assert loss.item() > 0
    loss.backward()
    assert all(weight.grad is None for weight in former)
    assert any(weight.grad is not None and weight.grad.any() for weight in own)
    assert model.active_adapter == "default"


def weights_of_adapter(model, adapter: str) -> list[torch.Tensor]:
    return [weight for name, weight in model.named_parameters() if adapter in name.split(".")]


def test_own_text_does_not_depend_on_the_models_generation_config():
    base = make_host("llama")
    expected = write_own_text(base, texts=4, tokens=24)
    own = base.generation_config
    stops = list(range(3, VOCABULARY, 2))
    own.update(eos_token_id=stops, repetition_penalty=1.5, min_p=0.2, max_length=8)
    assert torch.equal(write_own_text(base, texts=4, tokens=24), expected)
    assert expected.shape == (4, 24) and base.generation_config is own


def test_a_model_without_a_start_of_text_is_named():
    base = make_host("llama")
    remove_special_tokens(base)
    with pytest.raises(ValueError, match="config must name a bos_token_id, .*: set one"):
        write_own_text(base, texts=1, tokens=4)


def test_texts_are_written_when_they_are_needed_and_then_kept(caplog):
    model = make_model()
    texts = OwnText(model, texts=5, tokens=10, seed=4, first=2)
    assert len(texts) == 5 and texts.shape == (5, 10) and texts.written.shape == (0, 10)
    with caplog.at_level("INFO", logger="locas_peft"):
        second = texts[1]
        assert texts.written.shape == (2, 10)
        third = texts[2]
    assert texts.written.shape == (5, 10)
    messages = [record.message for record in caplog.records if record.name.startswith("locas_peft")]
    assert messages == ["the base writes 2 texts of 10 tokens for the anchor"]
    assert torch.equal(texts[1], second) and torch.equal(texts[2], third)
    batches = [write_own_text(model, n, tokens=10, seed=seed) for n, seed in ((2, 4), (3, 5))]
    assert torch.equal(texts.written, torch.cat(batches))
    with pytest.raises(ValueError, match="^first must be at least 1, got 0: raise it"):
        OwnText(model, first=0)


def test_a_short_reading_writes_no_text_and_a_longer_one_the_same_as_in_advance():
    trainer = make_trainer()
    options = {"texts": 3, "tokens": 12, "first": 3}
    texts = OwnText(trainer.model, **options)
    lazy = make_trainer(steps=[Anchor(texts, every=3)])
    texts._model = lazy.model
    ids = make_ids(64)
    chunks = lazy.read(ids)
    for _ in range(2):
        next(chunks)
    assert not len(texts.written)
    list(chunks)
    ready = make_trainer(steps=[Anchor(write_own_text(trainer.model, 3, 12), every=3)])
    assert read(ready, ids) == [chunk.nll_nats for chunk in lazy.chunks]
    assert_same(weights_of(ready.model), weights_of(lazy.model))


# The pull


def test_every_so_many_steps_the_next_text_pulls():
    pulls = [make_anchor(every=3).number_of(step) for step in range(12)]
    assert pulls == [None, None, 0, None, None, 1, None, None, 2, None, None, 0]


@pytest.mark.parametrize(("weight", "is_bounded"), [(0.5, False), (1e6, True)])
@pytest.mark.parametrize("kind", ["lora", "locas"])
def test_a_step_follows_the_chunk_and_the_divergence_from_the_base(kind, weight, is_bounded):
    """The fourth one, the second with a pull, whose gradient is at most twice the chunk's."""
    ids, anchor = make_ids(32), make_anchor(weight=weight, every=2)
    model = make_model(kind)
    settings = SETTINGS | {"learning_rate": None, "optimizer": sgd(0.1), "warmup_steps": 0}
    chunks = TestTimeTrainer(model, **settings, steps=[anchor]).read(ids)
    for _ in range(3):
        next(chunks)
    before = trained_weights(model)
    parameters = {name: model.get_parameter(name) for name in before}
    predicted = model(input_ids=ids[None, 16:31]).logits[0, -8:]
    loss = torch.nn.functional.cross_entropy(predicted, ids[24:])
    text = anchor.texts[1:2, :-1]
    with model.disable_adapter():
        base = logits(model, text)[0]
    for parameter in parameters.values():
        parameter.requires_grad_(True)  # disable_adapter has switched them off
    pull = weight * 2 * divergences(model(input_ids=text).logits[0], base).mean()
    learned = torch.autograd.grad(loss, parameters.values())
    pulled = torch.autograd.grad(pull, parameters.values())
    length, most = (norm_of(gradients) for gradients in (pulled, learned))
    factor = min(1.0, 2 * most / length)
    assert (factor < 1) == is_bounded and most > 1e-6 and length > 1e-6
    next(chunks)
    for (name, parameter), own, other in zip(parameters.items(), learned, pulled, strict=True):
        if kind == "lora" or "down" in name:  # a LOCAS memory's rows are also clipped
            expected = before[name] - 0.1 * (own + factor * other)
            torch.testing.assert_close(parameter.detach(), expected)


def norm_of(tensors) -> float:
    return torch.cat([tensor.flatten() for tensor in tensors]).norm().item()


def test_an_anchored_memory_learns_the_text_and_leaves_another_alone():
    base, tokenizer = backbone.load()
    base.requires_grad_(False)
    book = tokenize(tokenizer, unwrap(python_reference()), 1_280)
    # Not the anchor's: another seed.
    other = write_own_text(base, texts=4, tokens=160, seed=1).reshape(-1)
    plain = complete(ReadSettings(method="none"))
    untouched, unread = score(base, other, plain), score(base, book, plain)
    anchor = Anchor(write_own_text(base, texts=9, tokens=64), weight=1.0, every=1)
    gains, costs = [], []
    for steps in ([], [anchor]):
        model = get_peft_model(backbone.load()[0], LocasConfig(r=32, scaling=21.0))
        settings = {"window": 256, "stride": 128, "learning_rate": 4e-3, "context": "cache"}
        trainer = TestTimeTrainer(model, **settings, steps=steps)
        read(trainer, book)
        model.requires_grad_(False)
        gains.append(unread - trainer.perplexity)
        costs.append(score(model, other, plain) - untouched)
    # After 9 steps; what a book leaves is in benchmarks/.
    assert costs[1] < 0.75 * costs[0]
    assert gains[1] > 0.8 * gains[0] > 0


def test_a_pull_that_is_not_finite_skips_the_chunk(monkeypatch):
    trainer = make_trainer(steps=[make_anchor(every=2)])
    chunks = trainer.read(make_ids(24))
    next(chunks)
    before = weights_of(trainer.model)
    monkeypatch.setattr(
        "locas_peft.ttt.steps.anchor.divergences",
        lambda student, teacher: divergences(student, teacher) * torch.nan,
    )
    assert not next(chunks).learned and trainer.skipped_chunks == 1
    assert_same(weights_of(trainer.model), before)
    monkeypatch.undo()
    assert next(chunks).learned


def test_a_writer_records_the_chunk_and_not_the_anchor():
    written = []
    for anchor in ([], [make_anchor(every=1)]):
        model = make_model(family="gpt2", r=16, init_weights="write")
        steps = [*anchor, SlotWriter(model, slots_per_chunk=4)]
        read(TestTimeTrainer(model, **SETTINGS, steps=steps), make_ids(8))
        written.append(trained_weights(model))
    assert_same(*written)
    assert any(value.any() for name, value in written[0].items() if "locas_up" in name)


# Checkpoints


def make_lazy(seed: int = 0) -> Anchor:
    return Anchor(OwnText(make_model(), 4, 12, seed, first=2), every=2)


@pytest.mark.parametrize(
    ("make", "others"),
    [
        (
            lambda: make_anchor(every=3),
            {
                "every must be 3 as in the checkpoint in .*, got 2: ": lambda: make_anchor(every=2),
                "texts: sha256 must be ": lambda: make_anchor((8, 9, 10), every=3),
            },
        ),
        (
            make_lazy,
            {"texts: seed must be 0 as in the checkpoint in .*, got 1: ": lambda: make_lazy(1)},
        ),
    ],
)
def test_resuming_is_bit_identical_and_keeps_to_the_anchor(make, others, tmp_path, monkeypatch):
    ids, whole = make_ids(64), make_trainer(steps=[make()])
    chunks = whole.read(ids)
    for _ in range(4):
        next(chunks)
    save(whole, tmp_path)
    list(chunks)
    monkeypatch.setattr("locas_peft.model.base_weights._KNOWN", {})  # as in another process
    resumed = make_trainer(steps=[make()])
    resume(resumed, tmp_path)
    list(resumed.read(ids))
    assert without_time(resumed.chunks) == without_time(whole.chunks)
    assert_same(weights_of(resumed.model), weights_of(whole.model))
    for message, make_other in others.items():
        with pytest.raises(ValueError, match=f"^anchor: {message}"):
            resume(make_trainer(steps=[make_other()]), tmp_path)


# Errors


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Anchor([[1, 2]]), TypeError, "texts must be a LongTensor .*, got list: make it"),
        (lambda: Anchor(torch.ones(2, 8)), TypeError, "texts must be a LongTensor of .*, got "),
        (
            lambda: Anchor(make_ids(8)),
            ValueError,
            r"texts must have the shape .* got \[8\]: make th",
        ),
        (
            lambda: make_anchor(weight=0.0),
            ValueError,
            "weight must be .* above 0, got 0.0: for none",
        ),
        (
            lambda: Anchor(OwnText(make_model(), 4, 12), reference="former"),
            ValueError,
            "reference must be that of the OwnText, got .former. for the anchor: leave it out",
        ),
        (lambda: make_anchor(every=0), ValueError, r"every must be at least 1, got 0: raise it"),
        (
            lambda: make_trainer(steps=[Anchor(torch.full((1, 4), VOCABULARY))]),
            ValueError,
            r"texts must lie in \[0, 64\), the model's vocabulary, got 64: write them",
        ),
        (
            lambda: make_trainer(steps=[Anchor(torch.ones(1, 5000, dtype=torch.long))]),
            ValueError,
            r"texts must be within the model's 64 positions, got 5000 tokens: write shorter ones",
        ),
    ],
)
def test_bad_anchors_are_refused(make, error, message):
    with pytest.raises(error, match=f"^anchor {message}"):
        make()


def test_a_memory_that_is_only_written_has_no_anchor():
    model = make_model(family="gpt2", r=16, init_weights="write")
    settings = SETTINGS | {"learning_rate": None}
    with pytest.raises(ValueError, match="^steps must not have an Anchor for a memory that is wr"):
        TestTimeTrainer(model, **settings, steps=[SlotWriter(model), make_anchor()])


def test_a_base_that_is_trained_is_not_pulled_to_itself():
    host = make_host("llama")
    options = {"parameters": list(host.parameters()), **SETTINGS}
    with pytest.raises(ValueError, match="^steps must not have an Anchor where the base itself is"):
        TestTimeTrainer(host, **options, steps=[make_anchor()])
    TestTimeTrainer(host, **options)
