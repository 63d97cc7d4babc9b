"""The brake: when an adapter is compared with the base, when it is taken back, and what is left of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from families import make_host
from peft import LoraConfig, get_peft_model
from training import (
    SETTINGS,
    assert_same,
    make_ids,
    make_model,
    make_trainer,
    read,
    resume,
    save,
    trained_weights,
    weights_of,
)

from locas_peft import LocasConfig, SlotWriter, TestTimeTrainer, backbone, calibrate, read_many
from locas_peft.memories import checkpoint
from locas_peft.text import python_reference, tokenize, unwrap
from locas_peft.ttt import Chunk
from locas_peft.ttt.brake import LONGEST, NOISE, TOLERANCE, is_due, is_worse
from locas_peft.tuner import uncalibrated_memories

CHUNK = Chunk(0, 0, 8, tokens=8, nll_nats=24.0, seconds=0.0, learned=True)
SMALL = {"window": 96, "stride": 48}


def records(
    count: int, checked: dict[int, float] | None = None, taken_back: tuple[int, ...] = ()
) -> list[Chunk]:
    """Records of 3 nats a token; `checked` has the base's nats a token by the number of the chunk."""
    base = {number: 8 * nats for number, nats in (checked or {}).items()}
    return [
        replace(
            CHUNK, index=number, base_nll_nats=base.get(number), taken_back=number in taken_back
        )
        for number in range(count)
    ]


def test_checks_become_rarer():
    checked: dict[int, float] = {}
    for count in range(200):
        if is_due(records(count, checked), 3.0):
            checked[count] = 3.1
    assert list(checked) == [2, 6, 14, 30, 62, 94, 126, 158, 190] and LONGEST == 32


def test_a_jump_of_the_loss_or_a_loss_that_is_not_finite_is_checked_out_of_turn():
    before = records(5, {2: 3.1})
    assert (
        not is_due(before, 3.6)
        and is_due(before, 3.8)
        and is_due(before, math.nan)
        and is_due(before, math.inf)
    )
    assert not is_due([], 9.0)


def test_after_an_adapter_was_taken_back_the_next_check_is_soon():
    assert [is_due(records(n, {2: 3.1, 14: 2.0}, taken_back=(14,)), 3.0) for n in (15, 16)] == [
        False,
        True,
    ]


def test_much_worse_once_or_a_little_twice_is_worse():
    assert is_worse(records(2), 3.0, 3.0 - 2 * TOLERANCE)
    assert not is_worse(records(2), 3.0, 3.0 - TOLERANCE / 2) and not is_worse(records(2), 3.0, 3.1)
    assert is_worse(records(6, {2: 2.98}), 3.0, 3.0 - TOLERANCE / 2)
    assert not is_worse(records(6, {2: 2.98}), 3.0, 3.0 - NOISE / 2)
    assert not is_worse(records(6, {2: 2.995}), 3.0, 3.0 - TOLERANCE / 2)
    assert not is_worse(records(6, {2: 3.01}), 3.0, 3.0 - TOLERANCE / 2)
    assert not is_worse(records(6, {2: 2.0}, taken_back=(2,)), 3.0, 3.0 - TOLERANCE / 2)
    assert is_worse(records(2), math.nan, 3.0) and not is_worse(records(2), math.nan, math.nan)


@pytest.mark.parametrize("kind", ["lora", "locas"])
@pytest.mark.parametrize("context", ["recompute", "cache"])
def test_a_brake_that_finds_nothing_changes_nothing(kind, context):
    ids = make_ids(8).repeat(12)
    free = make_trainer(kind, context=context)
    braked = make_trainer(kind, context=context, brake=True)
    assert read(free, ids) == read(braked, ids)
    assert_same(weights_of(free.model), weights_of(braked.model))
    assert braked.taken_back == [] and braked.final[0] < braked.final[1] and free.final is None
    checked = [chunk for chunk in braked.chunks if chunk.base_nll_nats is not None]
    assert [chunk.index for chunk in checked] == [2, 6]
    plain = make_trainer("plain", context="recompute")
    expected = read(plain, ids)
    assert [chunk.base_nll_nats for chunk in checked] == pytest.approx(
        [expected[2], expected[6]], rel=1e-5
    )


@pytest.fixture(scope="module")
def english():
    """`LongTensor [T]` of a text that the embedded model can read: a random host has no skill that could be ruined."""
    _, tokenizer = backbone.load()
    return tokenize(tokenizer, unwrap(python_reference()), 1_200)


def make_ruinous(kind: str, **settings) -> TestTimeTrainer:
    torch.manual_seed(0)
    lora = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(
        backbone.load()[0], lora if kind == "lora" else LocasConfig(r=4, max_slot_norm=None)
    )
    return TestTimeTrainer(model, **SMALL | {"learning_rate": 0.3} | settings)


@pytest.mark.parametrize(
    ("kind", "context", "epochs"), [("lora", "recompute", 1), ("locas", "cache", 2)]
)
def test_an_adapter_that_a_high_rate_ruins_is_taken_back_and_goes_on(
    kind, context, epochs, english
):
    options = {"context": context, "epochs": epochs}
    base = read(
        TestTimeTrainer(backbone.load()[0], **SMALL, learning_rate=None, context=context), english
    )
    ruined = read(make_ruinous(kind, brake=False, **options), english)
    trainer = make_ruinous(kind, **options)
    scores = read(trainer, english)
    assert not sum(ruined[12:]) <= 1.2 * sum(base[12:])
    assert trainer.taken_back and sum(scores[12:]) < 1.1 * sum(base[12:])
    stopped = [chunk for chunk in trainer.chunks if chunk.taken_back]
    assert [chunk.start for chunk in stopped] == [
        tokens for tokens in trainer.taken_back if tokens < len(english)
    ]
    assert not any(chunk.learned for chunk in stopped) and trainer.skipped_chunks == 0


@pytest.mark.parametrize("kind", ["lora", "locas"])
def test_what_is_left_at_the_end_is_not_worse_than_the_base(kind, english):
    trainer = make_ruinous(kind, warmup_steps=0, learning_rate=3.0 if kind == "lora" else 1e4)
    empty = trained_weights(trainer.model)
    read(trainer, english[:48])
    assert trainer.final[0] > trainer.final[1] and trainer.taken_back == [48]
    left = trained_weights(trainer.model)
    if kind == "lora":
        assert_same(left, empty)
    else:
        assert not any(value.any() for name, value in left.items() if "locas_down" in name)


def test_a_written_memory_is_taken_back_too():
    _, tokenizer = backbone.load(name=backbone.MLP_NAME)
    ids = tokenize(tokenizer, unwrap(python_reference()), 480)

    def make(**settings):
        model = get_peft_model(
            backbone.load(name=backbone.MLP_NAME)[0],
            LocasConfig(r=64, init_strategy="write", max_slot_norm=None),
        )
        return TestTimeTrainer(
            model,
            **SMALL,
            learning_rate=None,
            writer=SlotWriter(model, slots_per_chunk=4, epsilon=1e3),
            **settings,
        )

    base = read(
        TestTimeTrainer(backbone.load(name=backbone.MLP_NAME)[0], **SMALL, learning_rate=None), ids
    )
    trainer = make()
    scores = read(trainer, ids)
    assert trainer.taken_back and scores[1] > 1.1 * base[1]
    assert trainer.chunks[1].base_nll_nats == pytest.approx(base[1], rel=1e-5)
    assert scores[2] == pytest.approx(base[2], rel=1e-5)  # the good state was the empty memory


@pytest.mark.parametrize("kind", ["lora", "locas"])
def test_resuming_is_bit_identical_after_an_adapter_was_taken_back(kind, english, tmp_path):
    ids, whole = english[:480], make_ruinous(kind, context="cache")
    chunks = whole.read(ids)
    while not whole.taken_back:
        next(chunks)
    next(chunks)
    save(whole, tmp_path)
    list(chunks)
    resumed = make_ruinous(kind, context="cache")
    resume(resumed, tmp_path)
    read(resumed, ids)
    assert [chunk.nll_nats for chunk in resumed.chunks] == [
        chunk.nll_nats for chunk in whole.chunks
    ]
    assert (resumed.taken_back, resumed.final) == (whole.taken_back, whole.final)
    assert_same(weights_of(resumed.model), weights_of(whole.model))
    state = checkpoint.load(tmp_path)
    checkpoint.save(
        tmp_path, {**state, "learner": {**state["learner"], "good": state["learner"]["good"][1:]}}
    )
    with pytest.raises(ValueError, match="^checkpoint must be whole"):
        resume(make_ruinous(kind, context="cache"), tmp_path)


@pytest.mark.parametrize("kind", ["lora", "locas"])
@pytest.mark.parametrize("chunks_before", [1, 3])
def test_an_adapter_that_is_enabled_later_learns_as_if_the_text_began_there(kind, chunks_before):
    """It is calibrated on its first chunk; the brake can take it back to its state before that chunk."""
    ids, trainer = make_ids(80), make_trainer(kind, brake=True)
    trainer.model.disable_adapter_layers()
    reading = trainer.read(ids)
    before = [next(reading) for _ in range(chunks_before)]
    assert not any(chunk.learned for chunk in before)
    trainer.model.enable_adapter_layers()
    fresh = trained_weights(trainer.model)
    if kind == "locas":
        assert uncalibrated_memories(trainer.model) == ["default"]
    after = list(reading)
    assert all(chunk.learned or chunk.taken_back for chunk in after) and after[0].learned
    assert not uncalibrated_memories(trainer.model)
    assert any(
        not torch.equal(value, fresh[name])
        for name, value in trained_weights(trainer.model).items()
    )
    if kind == "locas":
        alone = make_model("locas")
        calibrate(alone, [ids[None, 8 * chunks_before : 8 * chunks_before + 8]])
        assert trainer.model.peft_config["default"].slots == alone.peft_config["default"].slots


def test_an_adapter_that_is_enabled_after_the_last_chunk_is_not_compared():
    trainer = make_trainer("lora", brake=True)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=100.0)
    before = trained_weights(trainer.model)
    trainer.model.disable_adapter_layers()
    reading = trainer.read(make_ids(16))
    for _ in range(2):
        next(reading)
    trainer.model.enable_adapter_layers()
    assert list(reading) == [] and trainer.final is None and trainer.taken_back == []
    assert_same(trained_weights(trainer.model), before)


def test_a_finished_reading_is_not_compared_again_after_it_is_resumed(tmp_path):
    """A self-study follows on a reading: compared again, what it learned could be taken back."""
    ids, trainer = make_ids(8).repeat(12), make_trainer("locas", brake=True)
    read(trainer, ids)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=100.0)  # which makes this text worse
    save(trainer, tmp_path)
    resumed = make_trainer("locas", brake=True)
    resume(resumed, tmp_path)
    assert read(resumed, ids) == []
    assert resumed.final == trainer.final
    assert_same(weights_of(resumed.model), weights_of(trainer.model))


def test_one_document_of_many_is_taken_back_and_the_others_go_on():
    # float64: at this rate the rounding of float32 grows to more than the tolerance, on some CPUs.
    model = get_peft_model(
        make_host("llama").double(), LocasConfig(r=4, scaling=16.0, output_scale="paper")
    )
    documents = {
        "good": make_ids(4).repeat(30),
        "bad": torch.cat([make_ids(4).repeat(6), make_ids(96, seed=3)]),
    }
    reading = read_many(model, documents, **SETTINGS | {"learning_rate": 0.3, "brake": True})
    scores = {name: [] for name in documents}
    for records_of in reading:
        for name, chunk in records_of.items():
            scores[name].append(chunk.nll_nats)
    assert reading.taken_back["bad"] and not reading.taken_back["good"]
    alone = {}
    for name, ids in documents.items():
        model = get_peft_model(
            make_host("llama").double(), LocasConfig(r=4, scaling=16.0, output_scale="paper")
        )
        trainer = TestTimeTrainer(model, **SETTINGS | {"learning_rate": 0.3, "brake": True})
        alone[name] = read(trainer, ids), trainer.taken_back
    for name in documents:
        assert reading.taken_back[name] == alone[name][1]
        assert scores[name] == pytest.approx(alone[name][0], rel=1e-3)
