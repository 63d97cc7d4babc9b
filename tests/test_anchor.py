"""An anchor: the base's own text, the pull towards the base on it, and what that leaves of what was learned."""

from __future__ import annotations

import pytest
import torch
from families import VOCABULARY, make_host
from peft import LoraConfig, get_peft_model

from locas_peft import LocasConfig, SlotWriter, TestTimeTrainer, backbone, checkpoint
from locas_peft.methods import Settings, attached, make_trainer, score
from locas_peft.text import python_reference, tokenize, unwrap
from locas_peft.ttt import Anchor, write_own_text
from locas_peft.ttt.losses import divergences

SETTINGS = {"window": 16, "stride": 8, "learning_rate": 0.02}


def make_model(kind: str = "locas", family: str = "llama", **options) -> torch.nn.Module:
    host = make_host(family)
    torch.manual_seed(1)
    if kind == "lora":
        return get_peft_model(host, LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    return get_peft_model(host, LocasConfig(**{"r": 4, "scaling": 16.0} | options))


def make_ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def make_anchor(seeds: tuple[int, ...] = (5, 6, 7), **options) -> Anchor:
    return Anchor(torch.stack([make_ids(12, seed) for seed in seeds]), **options)


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def read(trainer: TestTimeTrainer, ids: torch.Tensor) -> list[float]:
    return [chunk.nll_nats for chunk in trainer.read(ids)]


def test_own_text_is_the_bases_own_whatever_its_habits_of_generation():
    model = make_model()
    expected = write_own_text(model, texts=4, tokens=24)
    base = model.get_base_model()
    habits = base.generation_config
    habits.update(eos_token_id=list(range(3, VOCABULARY, 2)), repetition_penalty=1.5, min_p=0.2, max_length=8)
    assert torch.equal(write_own_text(model, texts=4, tokens=24), expected)
    assert expected.shape == (4, 24)
    assert base.generation_config is habits


def test_every_so_many_steps_the_next_text_pulls():
    anchor = make_anchor(every=3)
    pulls = [anchor.text_of(step) for step in range(12)]
    assert [step for step, text in enumerate(pulls) if text is not None] == [2, 5, 8, 11]
    assert torch.equal(torch.cat([text for text in pulls if text is not None]), anchor.texts[[0, 1, 2, 0]])


@pytest.mark.parametrize("kind", ["lora", "locas"])
def test_a_step_follows_the_chunk_and_the_divergence_from_the_base(kind):
    ids, anchor = make_ids(16), make_anchor(weight=0.5, every=2)
    model = make_model(kind)
    trainer = TestTimeTrainer(
        model, window=16, stride=8, learning_rate=0.1, optimizer="sgd", warmup_steps=0, anchor=anchor
    )
    chunks = trainer.read(ids)
    next(chunks)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in parameters.items()}
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
        if kind == "lora":  # a LOCAS memory's slots are also clipped
            torch.testing.assert_close(parameter.detach(), before[name] - 0.1 * gradients[name])
        elif "down" in name:
            torch.testing.assert_close(parameter.detach(), before[name] - 0.1 * gradients[name])


def test_scores_before_the_first_pull_are_those_without_an_anchor():
    ids = make_ids(48)
    free = read(TestTimeTrainer(make_model(), **SETTINGS), ids)
    held = read(TestTimeTrainer(make_model(), **SETTINGS, anchor=make_anchor(every=3)), ids)
    assert held[:3] == free[:3] and held[3:] != free[3:]


def test_an_anchored_memory_learns_the_text_and_leaves_another_alone():
    base, tokenizer = backbone.load()
    base.requires_grad_(False)
    book = tokenize(tokenizer, unwrap(python_reference()), 6_000)
    other = write_own_text(base, texts=4, tokens=512, seed=1).reshape(-1)  # not the anchor's: another seed
    plain = Settings.from_preset("none")
    untouched, unread = score(base, other, plain), score(base, book, plain)
    found = {}
    for name, anchor in (
        ("free", None),
        ("held", Anchor(write_own_text(base, texts=24, tokens=128), weight=1.0, every=1)),
    ):
        model = get_peft_model(backbone.load()[0], LocasConfig(r=32, scaling=32.0))
        trainer = TestTimeTrainer(model, window=512, stride=256, learning_rate=4e-3, context="cache", anchor=anchor)
        read(trainer, book)
        model.requires_grad_(False)
        found[name] = trainer.perplexity, score(model, other, plain) - untouched
    assert found["held"][1] < 0.75 * found["free"][1]  # after 23 steps; what a book leaves is in benchmarks/
    assert unread - found["held"][0] > 0.8 * (unread - found["free"][0]) > 0


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
    assert all(torch.equal(value, weights[name]) for name, value in weights_of(model).items())
    for layer in model.modules():
        if hasattr(layer, "locas_down"):
            torch.nn.init.normal_(layer.locas_up["default"].weight)
            torch.nn.init.normal_(layer.locas_down["default"].weight)
    assert torch.equal(texts, write_own_text(model, texts=3, tokens=10, seed=4))


def test_own_text_follows_the_bases_distribution():
    base = make_host("llama")
    texts = write_own_text(base, texts=4000, tokens=2)
    expected = base(input_ids=texts[:1, :1]).logits[0, 0].softmax(-1)
    found = torch.bincount(texts[:, 1], minlength=VOCABULARY) / len(texts)
    deviation = (found - expected) / (expected * (1 - expected) / len(texts)).sqrt()
    assert deviation.abs().max() < 5  # standard errors


def test_resuming_is_bit_identical_and_keeps_to_the_anchor(tmp_path):
    ids = make_ids(64)
    whole = make_model()
    expected = read(TestTimeTrainer(whole, **SETTINGS, anchor=make_anchor(every=3)), ids)
    first = TestTimeTrainer(make_model(), **SETTINGS, anchor=make_anchor(every=3))
    chunks = first.read(ids)
    for _ in range(4):
        next(chunks)
    first.save(tmp_path)
    chunks.close()
    model = make_model()
    rewritten = make_anchor((8, 9, 10), every=3)  # as another machine would sample it
    again = TestTimeTrainer(model, **SETTINGS, anchor=rewritten)
    assert again.resume(tmp_path)
    read(again, ids)
    assert [chunk.nll_nats for chunk in again.chunks] == expected
    assert all(torch.equal(value, weights_of(whole)[name]) for name, value in weights_of(model).items())
    other = TestTimeTrainer(make_model(), **SETTINGS, anchor=make_anchor(every=2))
    with pytest.raises(ValueError, match="anchor must be .*'every': 3.* as in the checkpoint"):
        other.resume(tmp_path)


@pytest.mark.parametrize("texts", [torch.zeros(3, 5, dtype=torch.int64), torch.full((3, 12), 10**6)])
def test_a_checkpoints_texts_are_looked_at_before_they_are_taken_up(tmp_path, texts):
    trainer = TestTimeTrainer(make_model(), **SETTINGS, anchor=make_anchor())
    next(trainer.read(make_ids(64)))
    trainer.save(tmp_path)
    tensors, state = checkpoint.read(tmp_path)
    checkpoint.write(tmp_path, {**tensors, "anchor/texts": texts}, state)
    fresh = TestTimeTrainer(make_model(), **SETTINGS, anchor=make_anchor())
    own = fresh.anchor
    with pytest.raises(ValueError, match="^(checkpoint must be whole|anchor texts must lie in)"):
        fresh.resume(tmp_path)
    assert fresh.anchor is own and fresh.position == 0


def test_a_pull_that_is_not_finite_skips_the_chunk(monkeypatch):
    model = make_model()
    trainer = TestTimeTrainer(model, **SETTINGS, anchor=make_anchor(every=2))
    chunks = trainer.read(make_ids(24))
    next(chunks)
    before = weights_of(model)
    monkeypatch.setattr(
        "locas_peft.ttt.trainer.divergences", lambda pupil, teacher: divergences(pupil, teacher) * torch.nan
    )
    assert not next(chunks).learned and trainer.skipped_chunks == 1
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())
    monkeypatch.undo()
    assert next(chunks).learned


def test_a_writer_notes_the_chunk_and_not_the_anchor():
    ids = make_ids(8)
    written = []
    for anchor in (None, make_anchor(every=1)):
        model = make_model(family="gpt2", r=16, init_strategy="write")
        writer = SlotWriter(model, slots_per_chunk=4)
        read(TestTimeTrainer(model, **SETTINGS, writer=writer, anchor=anchor), ids)
        written.append(weights_of(model))
    assert all(torch.equal(value, written[1][name]) for name, value in written[0].items() if "locas" in name)
    assert any(value.any() for name, value in written[0].items() if "locas_up" in name)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: Anchor([[1, 2]]),
            TypeError,
            r"anchor texts must be a LongTensor of shape \[n, L\], got list: make it",
        ),
        (lambda: Anchor(torch.ones(2, 8)), TypeError, r"anchor texts must be a LongTensor"),
        (
            lambda: Anchor(make_ids(8)),
            ValueError,
            r"anchor texts must have the shape \[n, L\] .* got \[8\]: make them",
        ),
        (lambda: make_anchor(weight=0.0), ValueError, r"anchor weight must be a number above 0, got 0.0: for none"),
        (lambda: make_anchor(every=0), ValueError, r"anchor every must be at least 1, got 0: raise it"),
        (
            lambda: TestTimeTrainer(make_model(), **SETTINGS, anchor=Anchor(torch.full((1, 4), VOCABULARY))),
            ValueError,
            r"anchor texts must lie in \[0, .*\), the model's vocabulary, got .*: write them with this model",
        ),
        (
            lambda: TestTimeTrainer(make_model(), **SETTINGS, anchor=Anchor(torch.ones(1, 5000, dtype=torch.long))),
            ValueError,
            r"anchor texts must be within the model's \d+ positions, got 5000 tokens: write shorter ones",
        ),
    ],
)
def test_bad_anchors_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_memory_that_is_only_written_has_no_anchor():
    model = make_model(family="gpt2", r=16, init_strategy="write")
    with pytest.raises(ValueError, match="anchor must be None for a memory that is written and not trained"):
        TestTimeTrainer(model, window=16, stride=8, learning_rate=None, writer=SlotWriter(model), anchor=make_anchor())


def test_a_model_without_a_start_of_text_says_so():
    base = make_host("llama")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(base.config, name, None)
        setattr(base.generation_config, name, None)
    with pytest.raises(ValueError, match="model's config must name a bos_token_id, eos_token_id or pad_token_id"):
        write_own_text(base, texts=1, tokens=4)


def test_settings_make_the_anchor():
    settings = Settings.from_preset("locas-glu", r=4, anchor=0.5, window=32, stride=16)
    assert (settings.anchor, settings.anchor_every) == (0.5, 4)
    base, _ = backbone.load()
    with attached(base, settings) as model:
        anchor = make_trainer(model, settings).anchor
        assert (anchor.weight, anchor.every, anchor.texts.shape) == (0.5, 4, (32, 16))
        assert torch.equal(anchor.texts, write_own_text(model, tokens=16))


def test_no_weight_is_no_anchor():
    for method in ("locas-glu", "lora"):
        settings = Settings.from_preset(method, anchor=0)
        assert settings.anchor is None and settings.anchor_every is None
    with pytest.raises(ValueError, match="anchor_every has no meaning with anchor=None, got 2: leave it out"):
        Settings.from_preset("lora", anchor=0, anchor_every=2)
    with pytest.raises(ValueError, match="anchor has no meaning for the method 'none'"):
        Settings.from_preset("none", anchor=1.0)
    with pytest.raises(ValueError, match="anchor has no meaning with update='nlsvd', got 1.0"):
        Settings.from_preset("locas-mlp", "paper", update="nlsvd", anchor=1.0)
    with pytest.raises(ValueError, match="anchor must be a finite number above 0, got -1"):
        Settings.from_preset("lora", anchor=-1.0)
