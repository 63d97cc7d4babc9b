"""Each row of a batch is a reading of its own, into an ordinary memory."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from families import VOCABULARY, make_host, weights_in
from peft import LoraConfig, PeftModel, get_peft_model
from training import CONTEXTS, SETTINGS, assert_same, make_ids, spoil, weights_of
from training import make_model as make_adapted

from locas_peft import LocasConfig, TestTimeTrainer
from locas_peft.ttt import Anchor, TrainingSettings, read_many
from locas_peft.tuner import list_layers

LENGTHS = {"one": 45, "two": 45, "three": 9, "four": 24, "five": 2}
# How far a row may be from a reading of its own, in float64. Norms and softmaxes of the gated hosts round to float32.
HOSTS = {"qwen3": 1e-6, "phi3": 1e-6, "gemma3": 1e-6, "gpt2": 1e-9, "gpt_neox": 1e-9, "opt": 1e-9}


def make_model(family: str = "qwen3", dtype: torch.dtype = torch.float64, **options) -> PeftModel:
    return make_adapted("locas", family, dtype, **options).eval()


def make_documents(lengths: dict[str, int] = LENGTHS) -> dict[str, torch.Tensor]:
    return {name: make_ids(length, seed) for seed, (name, length) in enumerate(lengths.items())}


def make_anchor(**options) -> Anchor:
    return Anchor(torch.stack([make_ids(12, seed) for seed in (5, 6, 7)]), **options)


def memory_of(model, name: str = "default") -> dict[str, torch.Tensor]:
    """A memory's weights, by the layer and the projection."""
    return {
        f"{layer.name}.{number}": weight.detach().clone()
        for layer in list_layers(model, name)
        for number, weight in enumerate(weights_in(layer, name))
    }


def read_alone(make, ids: torch.Tensor, **settings):
    """What the single reader makes of one document: its records and its memory's weights."""
    model = make()
    return list(TestTimeTrainer(model, **SETTINGS | settings).read(ids)), memory_of(model)


def assert_as_alone(make, documents: dict[str, torch.Tensor], **settings) -> None:
    model = make()
    tolerance = HOSTS[model.config.model_type.removesuffix("_text")]
    reading = read_many(model, documents, **SETTINGS | settings)
    assert all(list(reading))
    for name, ids in documents.items():
        chunks, weights = read_alone(make, ids, **settings)
        ours, memory = reading.chunks[name], memory_of(model, name)
        key = lambda chunk: (
            chunk.reading,
            chunk.index,
            chunk.start,
            chunk.stop,
            chunk.tokens,
            chunk.learned,
        )  # noqa: E731
        assert [key(chunk) for chunk in ours] == [key(chunk) for chunk in chunks]
        for our, chunk in zip(ours, chunks, strict=True):
            assert our.nll_nats == pytest.approx(chunk.nll_nats, rel=tolerance, nan_ok=True)
        assert memory.keys() == weights.keys() and memory
        for key, weight in weights.items():
            torch.testing.assert_close(memory[key], weight, rtol=tolerance, atol=tolerance)
        assert any(weight.any() for weight in memory.values())


# Each row is what a single reading makes of it


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("family", HOSTS)
def test_each_row_is_a_reading_of_its_own(family, context):
    assert_as_alone(lambda: make_model(family), make_documents(), context=context)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("window", "stride"), [(16, 16), (9, 1), (64, 5), (12, 8)])
def test_each_row_is_a_reading_of_its_own_at_any_window(window, stride, context):
    documents = make_documents({"one": 33, "two": 30, "three": 6})
    assert_as_alone(make_model, documents, window=window, stride=stride, context=context)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_positions_stay_within_the_model_for_rows_of_different_lengths(family):
    # 64 positions: the cache is fed again at different chunks of rows that end differently.
    documents = make_documents({"one": 150, "two": 139, "three": 58, "four": 66})
    assert_as_alone(lambda: make_model(family), documents, context="cache")


@pytest.mark.parametrize(
    "settings",
    [
        {"warmup_steps": 0},
        {"epochs": 2, "context": "cache"},
        {"readings": 2, "context": "cache"},
        {"anchor": make_anchor(every=2)},
        {"anchor": make_anchor(every=3), "readings": 2, "epochs": 2},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_each_setting_means_what_it_means_alone(settings):
    # "a" is a part of the tuner's prefix, which PEFT warns about.
    assert_as_alone(make_model, make_documents({"a": 45, **LENGTHS}), **settings)


@pytest.mark.parametrize(
    "options",
    [
        {"init_weights": "gaussian"},
        {"init_weights": "activation"},
        {"layers_to_transform": [1]},
        {"rank_pattern": {"layers.0.mlp": 2}},
        {"max_slot_norm": None},
        {"max_slot_norm": 0.3},
    ],
    ids=str,
)
def test_each_kind_of_memory_is_what_it_is_alone(options):
    assert_as_alone(lambda: make_model(**options), make_documents())


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_bfloat16_base_teaches_memories_in_float32(context):
    model, documents = make_model(dtype=torch.bfloat16), make_documents()
    reading = read_many(model, documents, **SETTINGS, context=context)
    assert all(chunk.learned for records in reading for chunk in records.values())
    for name, ids in documents.items():
        assert all(weight.dtype == torch.float32 for weight in memory_of(model, name).values())
        chunks, _ = read_alone(lambda: make_model(dtype=torch.bfloat16), ids, context=context)
        nll = sum(chunk.nll_nats for chunk in chunks)
        assert sum(chunk.nll_nats for chunk in reading.chunks[name]) == pytest.approx(nll, rel=0.01)


def test_memories_have_the_dtype_of_the_active_one():
    host = make_host("qwen3", torch.bfloat16)
    model = get_peft_model(host, LocasConfig(r=4), autocast_adapter_dtype=False)
    list(read_many(model, make_documents(), **SETTINGS))
    assert all(weight.dtype == torch.bfloat16 for weight in memory_of(model, "one").values())


def test_one_pass_scores_and_teaches_all_rows():
    model, documents = make_model(), make_documents({"one": 24, "two": 24, "three": 24})
    forwards = []
    model.get_base_model().model.layers[0].register_forward_hook(
        lambda m, args, out: forwards.append(len(args[0]))
    )
    for _ in read_many(model, documents, **SETTINGS):
        pass
    assert forwards == [1] * 3 + [3] * 3  # the calibrations, then one pass a chunk


def test_a_batch_shrinks_as_rows_finish():
    model, documents = make_model(), make_documents()
    layer, rows = model.get_base_model().model.layers[0], []
    layer.register_forward_hook(lambda m, args, out: rows.append(len(args[0])))
    for records in read_many(model, documents, **SETTINGS, context="cache"):
        if 0 < len(rows) and all(chunk.index > 0 for chunk in records.values()):
            assert sum(rows) in (
                len(records),
                2 * len(records),
            )  # twice where the context was fed again
        rows.clear()


def test_a_reading_that_is_over_keeps_nothing_but_its_records():
    model = make_model()
    reading = read_many(model, make_documents(), **SETTINGS, context="cache", epochs=2)
    next(reading)
    optimizers = [weakref.ref(row.learner.optimizer) for row in reading._rows.values()]
    for _ in reading:
        pass
    gc.collect()
    assert [optimizer() for optimizer in optimizers] == [None] * len(LENGTHS)
    assert all(reading.chunks.values())
    assert not any(
        p.grad is not None or p.requires_grad
        for n, p in model.named_parameters()
        if "default" not in n
    )


def test_records_and_perplexity_are_those_of_the_protocol():
    model, documents = make_model(), make_documents()
    reading = read_many(
        model, list(documents.items()), TrainingSettings(**SETTINGS, readings=3), readings=2
    )
    assert math.isnan(reading.perplexity("one"))
    list(reading)
    for name, ids in documents.items():
        chunks = [chunk for chunk in reading.chunks[name] if chunk.reading == 1]
        assert len(reading.chunks[name]) == 2 * len(chunks)
        assert sum(chunk.tokens for chunk in chunks) == len(ids) - 1
        nll = sum(chunk.nll_nats for chunk in chunks)
        assert reading.perplexity(name) == pytest.approx(math.exp(nll / (len(ids) - 1)))
        assert all(chunk.seconds > 0 for chunk in chunks)


# Rows do not touch each other


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_row_does_not_depend_on_another_rows_text(family, context):
    first, second = make_documents(), make_documents()
    second["two"] = second["two"].flip(0)
    readings = []
    for documents in (first, second):
        model = make_model(family)
        reading = read_many(model, documents, **SETTINGS, context=context)
        list(reading)
        readings.append((reading, {name: memory_of(model, name) for name in documents}))
    for name in first:
        nlls = [[chunk.nll_nats for chunk in reading.chunks[name]] for reading, _ in readings]
        if name == "two":
            assert nlls[0] != nlls[1]
        else:
            assert nlls[0] == pytest.approx(nlls[1], rel=1e-12)
            for key, weight in readings[0][1][name].items():
                torch.testing.assert_close(
                    weight, readings[1][1][name][key], rtol=1e-12, atol=1e-12
                )


def test_the_base_and_the_active_memory_are_untouched():
    model, documents = make_model(), make_documents()
    list(TestTimeTrainer(model, **SETTINGS).read(make_documents()["four"]))
    before, trained = weights_of(model), [(n, p.requires_grad) for n, p in model.named_parameters()]
    logits = model(documents["one"].unsqueeze(0)).logits
    list(read_many(model, documents, **SETTINGS))
    after = weights_of(model)
    assert_same(before, {name: after[name] for name in before})
    assert model.active_adapters == ["default"]
    parameters = dict(model.named_parameters())
    assert all(parameters[name].requires_grad == requires_grad for name, requires_grad in trained)
    assert all(p.grad is None for p in parameters.values())
    assert torch.equal(model(documents["one"].unsqueeze(0)).logits, logits)


def test_an_active_memory_that_is_frozen_stays_so():
    model = make_model(inference_mode=True)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    reading = read_many(model, make_documents(), **SETTINGS)
    assert all(chunk.learned for records in reading for chunk in records.values())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_finished_row_is_not_touched_again():
    model, documents = make_model(), make_documents()
    finished = {}
    for records in read_many(model, documents, **SETTINGS):
        for name, weights in finished.items():
            assert name not in records
            assert_same(memory_of(model, name), weights)
        finished |= {
            n: memory_of(model, n)
            for n, chunk in records.items()
            if chunk.stop == len(documents[n])
        }
    assert finished.keys() == documents.keys()


# What is not finite


@pytest.mark.parametrize("settings", [{}, {"context": "cache"}, {"epochs": 2}], ids=str)
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_row_that_is_not_finite_skips_that_chunk_alone(chunk, settings):
    def make() -> PeftModel:
        # Its embedding is not tied to the head: a token that is fed matters, one that could be predicted does not.
        model = make_model("gpt_neox", init_weights="gaussian")
        spoil(model, 1)
        return model

    documents = make_documents({"one": 60, "two": 60, "three": 43})
    documents["two"][8 * chunk + 3] = 1
    model = make()
    reading = read_many(model, documents, **SETTINGS | settings)
    before = {}
    for records in reading:
        if not records["two"].learned:
            assert not math.isfinite(records["two"].nll_nats)
            assert not before or all(
                torch.equal(memory_of(model, "two")[k], w) for k, w in before.items()
            )
        before = memory_of(model, "two")
        assert all(good.learned for name, good in records.items() if name != "two")
    skipped = sum(not record.learned for record in reading.chunks["two"])
    assert reading.skipped_chunks == {"one": 0, "two": skipped, "three": 0}
    assert 0 < skipped < 4
    assert_as_alone(make, documents, **settings)


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_gradient_that_is_not_finite_skips_that_row_alone(epoch):
    """Two epochs a chunk: the step before the failing one, of the same chunk, is undone too."""
    model, documents = make_model(), make_documents({"one": 32, "two": 32})
    reading = read_many(model, documents, **SETTINGS, epochs=2)
    next(reading)
    before, calls = memory_of(model, "two"), []

    def hook(gradient):
        calls.append(1)
        return gradient * math.nan if len(calls) == epoch else gradient

    handle = list_layers(model, "two")[0].locas_up["two"].weight.register_hook(hook)
    records = next(reading)
    handle.remove()
    assert [record.learned for record in records.values()] == [True, False]
    assert math.isfinite(records["two"].nll_nats)
    assert_same(memory_of(model, "two"), before)
    assert [row.learner.steps for row in reading._rows.values()] == [4, 2]
    assert all(record.learned for record in next(reading).values())
    assert reading.skipped_chunks == {"one": 0, "two": 1}


# Ordinary memories


def test_each_memory_is_saved_and_loaded_as_any_other(tmp_path):
    model, documents = make_model(), make_documents()
    list(read_many(model, documents, **SETTINGS))
    for name, ids in documents.items():
        model.set_adapter(name)
        logits = model(ids.unsqueeze(0)).logits
        model.save_pretrained(tmp_path, selected_adapters=[name])
        loaded = PeftModel.from_pretrained(
            make_host("qwen3", torch.float64), tmp_path / name
        ).eval()
        assert torch.equal(loaded(ids.unsqueeze(0)).logits, logits)
        assert (
            loaded.peft_config["default"].get_record("slots")
            == model.peft_config[name].get_record("slots")
            is not None
        )
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(ids.unsqueeze(0)).logits, logits)


@pytest.mark.parametrize("close", ["close", "drop", "neither"])
def test_a_reading_that_stops_early_leaves_what_was_learned(tmp_path, close):
    model, documents = make_model("gpt_neox"), make_documents()
    reading = read_many(model, documents, **SETTINGS)
    next(reading)
    next(reading)
    if close == "close":
        reading.close()
    if close == "drop":
        del reading
        gc.collect()  # what was dropped goes with the next collection
    for name in ("one", "three"):
        expected = make_model("gpt_neox")
        chunks = TestTimeTrainer(expected, **SETTINGS).read(documents[name])
        next(chunks), next(chunks)
        for key, weight in memory_of(expected).items():
            torch.testing.assert_close(memory_of(model, name)[key], weight, rtol=1e-9, atol=1e-9)
        model.set_adapter(name)
        ids = documents[name].unsqueeze(0)
        logits = model(ids).logits
        torch.testing.assert_close(logits, expected(ids).logits, rtol=1e-9, atol=1e-9)
        model.save_pretrained(tmp_path, selected_adapters=[name])
        loaded = PeftModel.from_pretrained(
            make_host("gpt_neox", torch.float64), tmp_path / name
        ).eval()
        assert torch.equal(loaded(ids).logits, logits)


def test_the_model_can_be_used_and_its_modes_stand_between_two_records():
    model, documents = make_model(), make_documents()
    ids = documents["one"].unsqueeze(0)
    expected = model(ids).logits
    model.get_base_model().model.layers[0].train()
    modes = {module: module.training for module in model.modules()}
    for records in read_many(model, documents, **SETTINGS):
        assert records and torch.equal(model(ids).logits, expected)
        assert all(module.training == mode for module, mode in modes.items())


def test_another_text_can_be_read_with_the_same_model_later():
    model, documents = make_model(), make_documents()
    list(read_many(model, documents, **SETTINGS))
    before = {name: memory_of(model, name) for name in documents}
    list(read_many(model, {f"{name} again": ids for name, ids in documents.items()}, **SETTINGS))
    for name in documents:
        assert_same(memory_of(model, name), before[name])
        assert_same(memory_of(model, f"{name} again"), before[name])


# Errors


def assert_refused(model, documents, error: type[Exception], message: str, **settings) -> None:
    before = weights_of(model)
    with pytest.raises(error) as caught:
        read_many(model, documents, **SETTINGS | settings)
    assert str(caught.value).startswith(message)
    assert_same(before, weights_of(model))


UNUSABLE = (
    "documents' names must be names that an adapter can have, got {!r}: give one without dots that is not an "
    "attribute of a PyTorch module"
)


@pytest.mark.parametrize(
    ("documents", "error", "message"),
    [
        ({}, ValueError, "documents must hold at least one, got none: give a mapping from names to LongTensors"),
        ({1: [3, 4]}, TypeError, "documents' names must be strings, got int: give each a name"),
        *(({name: [3, 4]}, ValueError, UNUSABLE.format(name)) for name in ("", "a.txt", "keys", "__class__")),
        ([("x", [3, 4]), ("x", [3, 4])], ValueError, "documents' names must differ, got 'x' twice: give each its own"),
        ({"default": [3, 4]}, ValueError, "documents' names must be new to the model, got 'default', which is an "),
        ({"x": [3.0, 4.0]}, TypeError, "documents['x'] must be integers, got torch.float32: give token ids as a "),
        ({"y": [3, 4], "x": [3]}, ValueError, "documents['x'] must hold at least 2 tokens, got 1: give a longer text"),
        ({"x": [3, VOCABULARY]}, ValueError, "documents['x'] must lie in [0, 64), the model's vocabulary, got 64: "),
        ({"x": "text"}, TypeError, "documents['x'] must be a LongTensor of shape [T] or [1, T], got str: make one "),
    ],
)  # fmt: skip
def test_documents_are_checked_at_the_call(documents, error, message):
    pairs = documents.items() if isinstance(documents, dict) else documents
    pairs = [(name, torch.tensor(ids) if isinstance(ids, list) else ids) for name, ids in pairs]
    assert_refused(make_model(), pairs, error, message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"window": 4},
            "stride must be at most window, got stride 8 with window 4: lower stride or raise window",
        ),
        (
            {"context": "long"},
            "context must be one of recompute, cache, got 'long': choose one of them",
        ),
        (
            {"learning_rate": None},
            "learning_rate must be a number above 0, got None: give one, 1e-3 say",
        ),
        (
            {"anchor": Anchor(torch.full((1, 4), VOCABULARY))},
            "anchor texts must lie in [0, 64), the model's ",
        ),
    ],
)
def test_settings_are_checked_at_the_call(settings, message):
    assert_refused(make_model(), make_documents(), ValueError, message, **settings)


def changed(change, **options) -> PeftModel:
    model = make_model(**options)
    change(model)
    return model


def beside_lora() -> PeftModel:
    model = get_peft_model(make_host("qwen3"), LoraConfig(r=2, target_modules=["q_proj"]))
    return get_peft_model(model.get_base_model(), LocasConfig(r=4))


def add_another(model) -> None:
    model.add_adapter("other", LocasConfig(r=4))
    model.base_model.set_adapter(["default", "other"])


# How each model is made, and what read_many says that it must be.
UNREADABLE = {
    "plain": (lambda: make_host("qwen3"), "be a PEFT model with an active LOCAS memory, got Qwen3ForCausalLM: use "),
    "LoRA": (lambda: make_adapted("lora"), "be a PEFT model with an active LOCAS memory, got one with LORA: use get_"),
    "beside LoRA": (beside_lora, "have LOCAS memories alone, got a layer of peft.tuners.lora.layer.Linear: unload "),
    "modules to save": (
        lambda: make_model(modules_to_save=["lm_head"]), "have LOCAS memories alone, got a layer of peft.utils.other."
    ),
    "merged": (
        lambda: changed(lambda model: model.merge_adapter(), init_weights="gaussian"),
        "not have a memory merged into the base: call unmerge_adapter() first",
    ),
    "disabled": (
        lambda: changed(lambda model: model.base_model.disable_adapter_layers()), "not have its adapters disabled, "
    ),
    "two": (lambda: changed(add_another), "have one active adapter, got default, other: call set_adapter with the "),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
@pytest.mark.parametrize(("make", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_models_that_cannot_be_read_are_named(make, message):
    assert_refused(make(), make_documents(), ValueError, f"model must {message}")


def test_a_memory_that_is_written_cannot_be_one_of_many():
    message = "init_weights must be one that makes rows, got 'write', whose slots are written one document at a time"
    assert_refused(make_model("gpt2", init_weights="write"), make_documents(), ValueError, message)


def test_a_calibration_that_fails_leaves_the_model_as_it_was():
    model, documents = make_model("gpt_neox"), make_documents()
    spoil(model, 1)
    documents["three"][2] = 1
    before, names = weights_of(model), [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError, match="activations are not finite on the calibration text"):
        next(read_many(model, documents, **SETTINGS))
    after = weights_of(model)
    assert before.keys() == after.keys()
    assert all(
        torch.equal(after[name].nan_to_num(), value.nan_to_num()) for name, value in before.items()
    )
    assert [name for name, _ in model.named_modules()] == names
    assert list(model.peft_config) == ["default"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: model.delete_adapter("two"),
            r"^Trying to infer with non-existing adapter\(s\): two$",
        ),
        (
            lambda model: model.merge_adapter(["one"]),
            "^Cannot pass `adapter_names` when there are merged adapters",
        ),
        (
            lambda model: setattr(
                list_layers(model, "two")[0].locas_up, "two", torch.nn.Linear(16, 4).double()
            ),
            "^model must train the same parameters from the first chunk to the last",
        ),
    ],
    ids=["delete", "merge", "replace"],
)
def test_memories_changed_under_the_reading_are_named(change, message):
    model, documents = make_model(), make_documents()
    reading = read_many(model, documents, **SETTINGS)
    next(reading)
    change(model)
    with pytest.raises(ValueError, match=message):
        next(reading)
