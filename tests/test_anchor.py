"""An anchor: the base's own text, the pull towards the base on it, and what that leaves of what was learned."""

import pytest
import torch
from families import VOCABULARY, make_host
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
)

from locas_peft import LocasConfig, SlotWriter, TestTimeTrainer, backbone, calibrate
from locas_peft.model import CausalLM, divergences
from locas_peft.stages import ReadSettings, complete, score
from locas_peft.text import python_reference, tokenize, unwrap
from locas_peft.ttt import Anchor, OwnText, write_own_text


def make_anchor(seeds: tuple[int, ...] = (5, 6, 7), **options) -> Anchor:
    return Anchor(torch.stack([make_ids(12, seed) for seed in seeds]), **options)


# The base's own text


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_own_text_is_the_bases_and_leaves_no_trace(family):
    model = make_model(family=family)
    model.get_base_model().config.bos_token_id = 0
    model.train()
    state, weights = torch.get_rng_state(), weights_of(model)
    texts = write_own_text(model, texts=3, tokens=10, seed=4)
    assert texts.shape == (3, 10) and texts.dtype == torch.int64
    assert torch.equal(texts, write_own_text(model.get_base_model(), texts=3, tokens=10, seed=4))
    assert not torch.equal(texts, write_own_text(model, texts=3, tokens=10, seed=5))
    assert torch.equal(state, torch.get_rng_state()) and model.training
    assert_same(weights_of(model), weights)
    for layer in model.modules():
        if hasattr(layer, "locas_down"):
            torch.nn.init.normal_(layer.locas_up["default"].weight)
            torch.nn.init.normal_(layer.locas_down["default"].weight)
    assert torch.equal(texts, write_own_text(model, texts=3, tokens=10, seed=4))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_own_text_goes_on_from_the_beginnings_that_are_given(family):
    base = make_host(family)
    beginnings = [[5], [6, 7, 8]]
    texts = write_own_text(base, texts=3, tokens=6, beginnings=beginnings)
    assert texts.shape == (3, 6)
    assert texts[:, 0].tolist() == [5, 6, 5] and texts[1, :3].tolist() == [6, 7, 8]
    pairs = OwnText(base, texts=3, tokens=6, batch_size=2, beginnings=beginnings)
    assert pairs[2][0] == 5 and pairs[1][:3].tolist() == [6, 7, 8]
    assert torch.equal(pairs.written[:2], write_own_text(base, 2, 6, 0, beginnings))
    others = OwnText(base, texts=3, tokens=6, batch_size=2, beginnings=[[5]])
    assert pairs.settings["beginnings"] == beginnings and others.settings != pairs.settings
    whole = write_own_text(base, texts=1, tokens=3, beginnings=beginnings[1:])
    assert whole.tolist() == [[6, 7, 8]]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(base.config, name, None)
        setattr(base.generation_config, name, None)
    assert write_own_text(base, texts=2, tokens=4, beginnings=[[5]]).shape == (2, 4)


@pytest.mark.parametrize("beginnings", [[], [[]], [[1], [1, 2, 3, 4]]])
def test_beginnings_of_another_length_are_named(beginnings):
    with pytest.raises(ValueError, match="beginnings must have 1 to 3 tokens each, got [01] to"):
        OwnText(make_host("llama"), tokens=3, beginnings=beginnings)


def test_a_text_after_a_beginning_follows_the_bases_distribution():
    base = make_host("llama")
    texts = write_own_text(base, texts=4000, tokens=3, beginnings=[[5, 6]])
    expected = base(input_ids=texts[:1, :2]).logits[0, 1].softmax(-1)
    found = torch.bincount(texts[:, 2], minlength=VOCABULARY) / len(texts)
    deviation = (found - expected) / (expected * (1 - expected) / len(texts)).sqrt()
    assert deviation.abs().max() < 5  # standard errors


@pytest.mark.parametrize("kind", ["locas", "lora"])
def test_a_reference_adapter_writes_the_texts_and_is_what_the_anchor_pulls_to(kind, caplog):
    model = make_model(kind)
    model.add_adapter("former", model.peft_config["default"])
    if kind == "locas":
        for name in ("default", "former"):
            calibrate(model, [make_ids(12, 5)[None]], name)
    own, former = split_weights(model)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in own:
            weight.normal_(std=0.3)
        for weight, value in zip(former, own, strict=True):
            weight.copy_(value)
    base_texts = write_own_text(model, texts=3, tokens=10)
    texts = OwnText(model, texts=3, tokens=10, batch_size=3, reference="former")
    with caplog.at_level("INFO", logger="locas_peft"):
        assert not torch.equal(texts[0], base_texts[0])
    assert "the memory as it was writes texts for the anchor, 3 of 10" in caplog.text
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


def split_weights(model) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the weights of the adapters "default" and "former"."""
    found = {"default": [], "former": []}
    for name, weight in model.named_parameters():
        for adapter, weights in found.items():
            if adapter in name.split("."):
                weights.append(weight)
    return found["default"], found["former"]


def test_own_text_does_not_depend_on_the_models_generation_config():
    model = make_model()
    expected = write_own_text(model, texts=4, tokens=24)
    own = model.get_base_model().generation_config
    own.update(
        eos_token_id=list(range(3, VOCABULARY, 2)), repetition_penalty=1.5, min_p=0.2, max_length=8
    )
    assert torch.equal(write_own_text(model, texts=4, tokens=24), expected)
    assert expected.shape == (4, 24)
    assert model.get_base_model().generation_config is own


def test_own_text_follows_the_bases_distribution():
    base = make_host("llama")
    texts = write_own_text(base, texts=4000, tokens=2)
    expected = base(input_ids=texts[:1, :1]).logits[0, 0].softmax(-1)
    found = torch.bincount(texts[:, 1], minlength=VOCABULARY) / len(texts)
    deviation = (found - expected) / (expected * (1 - expected) / len(texts)).sqrt()
    assert deviation.abs().max() < 5  # standard errors


def test_a_model_without_a_start_of_text_is_named():
    base = make_host("llama")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(base.config, name, None)
        setattr(base.generation_config, name, None)
    message = "model's config must name a bos_token_id, eos_token_id or pad_token_id"
    with pytest.raises(ValueError, match=message):
        write_own_text(base, texts=1, tokens=4)


def test_texts_are_written_when_they_are_needed_and_then_kept(caplog):
    model = make_model()
    texts = OwnText(model, texts=5, tokens=10, seed=4, batch_size=2)
    assert len(texts) == 5 and texts.shape == (5, 10) and texts.written.shape == (0, 10)
    with caplog.at_level("INFO", logger="locas_peft"):
        third = texts[2]
    assert texts.written.shape == (4, 10)
    messages = [record.message for record in caplog.records if record.name.startswith("locas_peft")]
    assert messages == ["the base writes texts for the anchor, 2 of 10 tokens at a time"]
    assert torch.equal(third, write_own_text(model, texts=2, tokens=10, seed=5)[0])
    assert torch.equal(texts[2], third) and texts.written.shape == (4, 10)
    assert torch.equal(texts[4], write_own_text(model, texts=1, tokens=10, seed=6)[0])
    assert torch.equal(texts[1], write_own_text(model, texts=2, tokens=10, seed=4)[1])
    with pytest.raises(ValueError, match="^batch_size must be at least 1, got 0: raise it"):
        OwnText(model, batch_size=0)


def test_a_short_reading_writes_no_text_and_a_longer_one_the_same_as_in_advance():
    trainer = make_trainer()
    options = {"texts": 3, "tokens": 12, "batch_size": 3}
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
    anchor = make_anchor(every=3)
    pulls = [anchor.number_of(step) for step in range(12)]
    assert [step for step, text in enumerate(pulls) if text is not None] == [2, 5, 8, 11]
    assert [text for text in pulls if text is not None] == [0, 1, 2, 0]


def test_a_pull_is_on_the_text_of_its_number():
    model = make_model("lora")
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    host = CausalLM(model)
    anchor = make_anchor()
    losses = [anchor.loss(host, number).item() for number in range(3)]
    alone = [Anchor(anchor.texts[number : number + 1]) for number in range(3)]
    assert losses == [each.loss(host, 0).item() for each in alone]
    assert len(set(losses)) == 3


@pytest.mark.parametrize("kind", ["lora", "locas"])
def test_a_step_follows_the_chunk_and_the_divergence_from_the_base(kind):
    ids, anchor = make_ids(16), make_anchor(weight=0.5, every=2)
    model = make_model(kind)
    settings = SETTINGS | {"learning_rate": None, "optimizer": sgd(0.1), "warmup_steps": 0}
    chunks = TestTimeTrainer(model, **settings, steps=[anchor]).read(ids)
    next(chunks)
    before = trained_weights(model)
    parameters = {name: model.get_parameter(name) for name in before}
    logits = model(input_ids=ids[None, :15]).logits[0, -8:]
    loss = torch.nn.functional.cross_entropy(logits, ids[8:])
    text = anchor.texts[:1]
    with torch.no_grad(), model.disable_adapter():
        base = model(input_ids=text[:, :-1]).logits[0]
    for parameter in parameters.values():
        parameter.requires_grad_(True)  # disable_adapter has switched them off
    loss = loss + 0.5 * 2 * divergences(model(input_ids=text[:, :-1]).logits[0], base).mean()
    gradients = dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True))
    assert any(gradient.abs().max() > 1e-6 for gradient in gradients.values())
    next(chunks)
    for name, parameter in parameters.items():
        if kind == "lora" or "down" in name:  # a LOCAS memory's rows are also clipped
            torch.testing.assert_close(parameter.detach(), before[name] - 0.1 * gradients[name])


def test_scores_before_the_first_pull_are_those_without_an_anchor():
    free, held = (
        read(make_trainer(steps=steps), make_ids(48)) for steps in ([], [make_anchor(every=3)])
    )
    assert held[:3] == free[:3] and held[3:] != free[3:]


def test_an_anchored_memory_learns_the_text_and_leaves_another_alone():
    base, tokenizer = backbone.load()
    base.requires_grad_(False)
    book = tokenize(tokenizer, unwrap(python_reference()), 1_280)
    other = write_own_text(base, texts=4, tokens=160, seed=1).reshape(
        -1
    )  # not the anchor's: another seed
    plain = complete(ReadSettings(method="none"))
    untouched, unread = score(base, other, plain), score(base, book, plain)
    found = {}
    for name, steps in (
        ("free", []),
        ("held", [Anchor(write_own_text(base, texts=16, tokens=64), weight=1.0, every=1)]),
    ):
        model = get_peft_model(backbone.load()[0], LocasConfig(r=32, scaling=21.0))
        trainer = TestTimeTrainer(
            model, window=256, stride=128, learning_rate=4e-3, context="cache", steps=steps
        )
        read(trainer, book)
        model.requires_grad_(False)
        found[name] = trainer.perplexity, score(model, other, plain) - untouched
    assert (
        found["held"][1] < 0.75 * found["free"][1]
    )  # after 9 steps; what a book leaves is in benchmarks/
    assert unread - found["held"][0] > 0.8 * (unread - found["free"][0]) > 0


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


def test_resuming_is_bit_identical_and_keeps_to_the_anchor(tmp_path):
    ids, whole = make_ids(64), make_trainer(steps=[make_anchor(every=3)])
    chunks = whole.read(ids)
    for _ in range(4):
        next(chunks)
    save(whole, tmp_path)
    list(chunks)
    resumed = make_trainer(steps=[make_anchor(every=3)])
    resume(resumed, tmp_path)
    read(resumed, ids)
    assert [chunk.nll_nats for chunk in resumed.chunks] == [
        chunk.nll_nats for chunk in whole.chunks
    ]
    assert_same(weights_of(resumed.model), weights_of(whole.model))
    message = "^anchor: every must be 3 as in the checkpoint in .*, got 2: "
    with pytest.raises(ValueError, match=message):
        resume(make_trainer(steps=[make_anchor(every=2)]), tmp_path)
    message = "^anchor: texts: sha256 must be .* as in the checkpoint in "
    with pytest.raises(ValueError, match=message):
        resume(make_trainer(steps=[make_anchor((8, 9, 10), every=3)]), tmp_path)


def test_resuming_writes_the_same_texts_again(tmp_path, monkeypatch):
    def make_lazy():
        return make_trainer(steps=[Anchor(OwnText(make_model(), 4, 12, batch_size=2), every=2)])

    ids, whole = make_ids(64), make_lazy()
    chunks = whole.read(ids)
    for _ in range(3):
        next(chunks)
    save(whole, tmp_path)
    list(chunks)
    monkeypatch.setattr("locas_peft.model.base_weights._KNOWN", {})  # as in another process
    resumed = make_lazy()
    resume(resumed, tmp_path)
    read(resumed, ids)
    assert [chunk.nll_nats for chunk in resumed.chunks] == [
        chunk.nll_nats for chunk in whole.chunks
    ]
    assert_same(weights_of(resumed.model), weights_of(whole.model))
    assert torch.equal(resumed.steps[0].texts.written, whole.steps[0].texts.written)
    texts = OwnText(make_model(), 4, 12, seed=1, batch_size=2)
    other = make_trainer(steps=[Anchor(texts, every=2)])
    message = "^anchor: texts: seed must be 0 as in the checkpoint in .*, got 1: "
    with pytest.raises(ValueError, match=message):
        resume(other, tmp_path)


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
            r"texts must lie in \[0, 64\), the model's vocabulary, got 64: write them with this model",
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
    message = "^steps must not have an Anchor for a memory that is written and not trained, got one"
    with pytest.raises(ValueError, match=message):
        TestTimeTrainer(model, **settings, steps=[SlotWriter(model), make_anchor()])
