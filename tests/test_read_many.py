from __future__ import annotations

import gc
import math

import pytest
import torch
from families import VOCABULARY, make_host
from peft import LoraConfig, PeftModel, get_peft_model

from locas_peft import LocasConfig, TestTimeTrainer
from locas_peft.ttt import read_many
from locas_peft.tuner import LocasLayer
from locas_peft.tuner.stacking import MemoryStack, stacked

CONTEXTS = ("recompute", "cache")
SETTINGS = {"window": 16, "stride": 8, "learning_rate": 0.02}
LENGTHS = {"one": 45, "two": 45, "three": 9, "four": 24, "five": 2}
# How far a row may be from a reading of its own, in float64. Norms and softmaxes of the gated hosts round to float32.
HOSTS = {"qwen3": 1e-6, "phi3": 1e-6, "gemma3": 1e-6, "gpt2": 1e-9, "gpt_neox": 1e-9, "opt": 1e-9}


def make_model(family: str = "qwen3", dtype: torch.dtype = torch.float64, **options) -> PeftModel:
    return get_peft_model(make_host(family, dtype), LocasConfig(**{"r": 4, "scaling": 16.0} | options)).eval()


def make_documents(lengths: dict[str, int] = LENGTHS, vocabulary: int = VOCABULARY) -> dict[str, torch.Tensor]:
    return {
        name: torch.randint(3, vocabulary, (length,), generator=torch.Generator().manual_seed(seed))
        for seed, (name, length) in enumerate(lengths.items())
    }


def weights_of(model, name: str) -> dict[str, torch.Tensor]:
    """A memory's weights, by the layer and the projection."""
    return {
        f"{layer.name}.{number}": part.weight.detach().clone()
        for layer in model.modules()
        if isinstance(layer, LocasLayer) and name in layer.locas_up
        for number, part in enumerate(layer.projections(name))
    }


def state_of(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(first: dict, second: dict) -> None:
    assert first.keys() == second.keys() and first
    assert all(torch.equal(first[key], second[key]) for key in first)


def read_alone(make, ids: torch.Tensor, **settings):
    """What the single reader makes of one document: its records and its memory's weights."""
    model = make()
    trainer = TestTimeTrainer(model, **SETTINGS | settings)
    return list(trainer.read(ids)), weights_of(model, "default")


def assert_as_alone(make, documents: dict[str, torch.Tensor], **settings) -> None:
    model = make()
    tolerance = HOSTS[model.config.model_type.removesuffix("_text")]
    reading = read_many(model, documents, **SETTINGS | settings)
    for records in reading:
        assert records
    for name, ids in documents.items():
        chunks, weights = read_alone(make, ids, **settings)
        ours, memory = reading.chunks[name], weights_of(model, name)
        key = lambda chunk: (chunk.index, chunk.start, chunk.stop, chunk.tokens, chunk.learned)  # noqa: E731
        assert [key(chunk) for chunk in ours] == [key(chunk) for chunk in chunks]
        for our, chunk in zip(ours, chunks, strict=True):
            assert our.nll_nats == pytest.approx(chunk.nll_nats, rel=tolerance, nan_ok=True)
        assert memory.keys() == weights.keys() and memory
        for place, weight in weights.items():
            torch.testing.assert_close(memory[place], weight, rtol=tolerance, atol=tolerance)
        assert any(weight.any() for weight in memory.values())


def test_a_reading_that_is_over_keeps_nothing_but_its_records():
    reading = read_many(make_model(), make_documents(), **SETTINGS, context="cache")
    for _ in reading:
        assert reading._cache.layers
    assert reading._cache.layers is None and reading._optimizer is None
    assert all(reading.chunks.values())


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
        {"optimizer": "adam", "warmup_steps": 0},
        {"optimizer": "sgd", "learning_rate": 0.5},
        {"weight_decay": 0.3},
        {"max_grad_norm": 0.01},
        {"max_grad_norm": 0.01, "optimizer": "sgd", "learning_rate": 2.0},
        {"token_weighting": "loss"},
        {"gradient": "tokenwise"},
        {"gradient": "tokenwise", "context": "cache"},
    ],
    ids=str,
)
def test_each_setting_means_what_it_means_alone(settings):
    assert_as_alone(make_model, make_documents(), **settings)


@pytest.mark.parametrize(
    "options",
    [
        {"init_strategy": "gaussian"},
        {"init_strategy": "activation"},
        {"layers_to_transform": [1]},
        {"rank_pattern": {"layers.0.mlp": 2}},
        {"max_slot_norm": None},
        {"max_slot_norm": 0.3},
        {"variant": "mlp", "gated_host_experiment": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:variant 'mlp' beside gated FFNs is an experiment")
def test_each_kind_of_memory_is_what_it_is_alone(options):
    assert_as_alone(lambda: make_model(**options), make_documents())


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_bfloat16_base_teaches_memories_in_float32(context):
    model, documents = make_model(dtype=torch.bfloat16), make_documents()
    reading = read_many(model, documents, **SETTINGS, context=context)
    assert all(chunk.learned for records in reading for chunk in records.values())
    for name, ids in documents.items():
        assert all(weight.dtype == torch.float32 for weight in weights_of(model, name).values())
        chunks, _ = read_alone(lambda: make_model(dtype=torch.bfloat16), ids, context=context)
        assert sum(c.nll_nats for c in reading.chunks[name]) == pytest.approx(
            sum(c.nll_nats for c in chunks), rel=0.01
        )


def test_memories_have_the_dtype_of_the_active_one():
    host = make_host("qwen3", torch.bfloat16)
    model = get_peft_model(host, LocasConfig(r=4), autocast_adapter_dtype=False)
    list(read_many(model, make_documents(), **SETTINGS))
    assert all(weight.dtype == torch.bfloat16 for weight in weights_of(model, "one").values())


def test_one_batched_product_reads_and_teaches_all_rows(monkeypatch):
    model, documents = make_model(), make_documents()
    forwards = []
    model.get_base_model().model.layers[0].register_forward_hook(lambda m, args, out: forwards.append(len(args[0])))
    reading = read_many(model, documents, **SETTINGS)
    next(reading)
    assert forwards == [1] * len(documents) + [len(documents)]  # the calibrations, then one pass for all


# Gradients


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "opt"])
def test_the_stacks_gradients_are_right(family):
    model = make_model(family, init_strategy="gaussian")
    for name in ("x", "y", "z"):
        model.add_adapter(name, LocasConfig(r=3, init_strategy="gaussian", scaling=16.0, seed=ord(name)))
    layer = [module for module in model.modules() if isinstance(module, LocasLayer)][-1]
    stack = MemoryStack(layer, ["x", "y", "z"])
    generator = torch.Generator().manual_seed(0)
    stack.down.data.normal_(generator=generator)
    inputs, result = torch.randn(2, 3, 5, 16, dtype=torch.float64, generator=generator).unbind(0)
    inputs.requires_grad_()
    result.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda rows, down, inputs, result: stack.add_to(result, inputs), (stack.rows, stack.down, inputs, result)
    )


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "opt"])
def test_a_stack_answers_each_row_as_the_row_s_memory_does(family):
    model, documents = make_model(family), make_documents({"one": 24, "two": 24, "three": 24})
    list(read_many(model, documents, **SETTINGS))
    ids = torch.stack(list(documents.values()))
    expected = []
    for name, row in zip(documents, ids, strict=True):
        model.set_adapter(name)
        expected.append(model(row.unsqueeze(0)).logits)
    layers = [module for module in model.modules() if isinstance(module, LocasLayer)]
    stacks = [MemoryStack(layer, list(documents)) for layer in layers]
    with torch.no_grad():
        with stacked(model, stacks):
            torch.testing.assert_close(model(ids).logits, torch.cat(expected), rtol=1e-9, atol=1e-9)
        with stacked(model, stacks, [2, 0]):
            swapped = torch.cat([expected[2], expected[0]])
            torch.testing.assert_close(model(ids[[2, 0]]).logits, swapped, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(model(ids[2:]).logits, expected[2], rtol=1e-9, atol=1e-9)  # the last active one


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
        readings.append((reading, {name: weights_of(model, name) for name in documents}))
    for name in first:
        nlls = [[chunk.nll_nats for chunk in reading.chunks[name]] for reading, _ in readings]
        if name == "two":
            assert nlls[0] != nlls[1]
        else:
            assert nlls[0] == pytest.approx(nlls[1], rel=1e-12)
            for place, weight in readings[0][1][name].items():
                torch.testing.assert_close(weight, readings[1][1][name][place], rtol=1e-12, atol=1e-12)


def test_the_base_and_the_active_memory_are_untouched():
    model, documents = make_model(), make_documents()
    list(TestTimeTrainer(model, **SETTINGS).read(make_documents()["four"]))
    before, trained = state_of(model), [(n, p.requires_grad) for n, p in model.named_parameters()]
    logits = model(documents["one"].unsqueeze(0)).logits
    list(read_many(model, documents, **SETTINGS))
    after = state_of(model)
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
            assert_same(weights_of(model, name), weights)
        finished |= {n: weights_of(model, n) for n, chunk in records.items() if chunk.stop == len(documents[n])}
    assert finished.keys() == documents.keys()


def test_what_rows_need_shrinks_as_they_finish():
    model, documents = make_model(), make_documents()
    reading = read_many(model, documents, **SETTINGS, context="cache")
    for records in reading:
        left = [name for name, chunk in records.items() if chunk.stop < len(documents[name])]
        assert all(len(stack.rows) == len(stack.down) == len(left) for stack in reading._stacks)
        assert len(reading._optimizer.param_groups) == len(left)
        assert len(reading._optimizer.state) == 6 * len(left)
        assert all(len(keys) == len(values) == len(left) for keys, values in reading._cache.layers if left)


# What is not finite


def spoil(model: PeftModel, token: int) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = math.inf


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_row_that_is_not_finite_skips_that_chunk_alone(chunk, context):
    def make() -> PeftModel:
        # Its embedding is not tied to the head: a token that is fed matters, one that could be predicted does not.
        model = make_model("gpt_neox", init_strategy="gaussian")
        spoil(model, 1)
        return model

    documents = make_documents({"one": 60, "two": 60, "three": 43})
    documents["two"][8 * chunk + 3] = 1
    model = make()
    reading = read_many(model, documents, **SETTINGS, context=context)
    before = {}
    for records in reading:
        if not records["two"].learned:
            assert not math.isfinite(records["two"].nll_nats)
            assert not before or all(torch.equal(weights_of(model, "two")[k], w) for k, w in before.items())
        before = weights_of(model, "two")
        assert all(good.learned for name, good in records.items() if name != "two")
    skipped = sum(not record.learned for record in reading.chunks["two"])
    assert reading.skipped_chunks == {"one": 0, "two": skipped, "three": 0}
    assert 0 < skipped < 4
    assert_as_alone(make, documents, context=context)


def test_a_gradient_that_is_not_finite_skips_that_row_alone():
    model, documents = make_model(), make_documents({"one": 32, "two": 32})
    reading = read_many(model, documents, **SETTINGS)
    next(reading)
    before = weights_of(model, "two")
    spoiled = reading._stacks[0].rows.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), math.nan))
    records = next(reading)
    spoiled.remove()
    assert [record.learned for record in records.values()] == [True, False]
    assert math.isfinite(records["two"].nll_nats)
    assert_same(weights_of(model, "two"), before)
    steps = {
        name: {reading._optimizer.state[weight]["step"].item() for weight in group["params"]}
        for name, group in zip(documents, reading._optimizer.param_groups, strict=True)
    }
    assert steps == {"one": {2.0}, "two": {1.0}}
    assert reading._optimizer.param_groups[0]["lr"] > reading._optimizer.param_groups[1]["lr"]  # still warming up
    records = next(reading)
    assert all(record.learned for record in records.values())
    assert reading.skipped_chunks == {"one": 0, "two": 1}


# Ordinary memories


def test_each_memory_is_saved_and_loaded_as_any_other(tmp_path):
    model, documents = make_model(), make_documents()
    reading = read_many(model, documents, **SETTINGS)
    list(reading)
    for name, ids in documents.items():
        model.set_adapter(name)
        logits = model(ids.unsqueeze(0)).logits
        model.save_pretrained(tmp_path, selected_adapters=[name])
        loaded = PeftModel.from_pretrained(make_host("qwen3", torch.float64), tmp_path / name).eval()
        assert torch.equal(loaded(ids.unsqueeze(0)).logits, logits)
        assert loaded.peft_config["default"].slots == model.peft_config[name].slots is not None
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
        trainer = TestTimeTrainer(expected, **SETTINGS)
        chunks = trainer.read(documents[name])
        next(chunks), next(chunks)
        for place, weight in weights_of(expected, "default").items():
            torch.testing.assert_close(weights_of(model, name)[place], weight, rtol=1e-9, atol=1e-9)
        model.set_adapter(name)
        logits = model(documents[name].unsqueeze(0)).logits
        torch.testing.assert_close(logits, expected(documents[name].unsqueeze(0)).logits, rtol=1e-9, atol=1e-9)
        model.save_pretrained(tmp_path, selected_adapters=[name])
        loaded = PeftModel.from_pretrained(make_host("gpt_neox", torch.float64), tmp_path / name).eval()
        assert torch.equal(loaded(documents[name].unsqueeze(0)).logits, logits)
    if close != "neither":
        storages = [p.weight.untyped_storage().data_ptr() for m in model.modules() if isinstance(m, LocasLayer)
                    for n in documents for p in m.projections(n)]  # fmt: skip
        assert len(set(storages)) == len(storages)


def test_the_model_can_be_used_between_two_records():
    model, documents = make_model(), make_documents()
    ids = documents["one"].unsqueeze(0)
    expected = model(ids).logits
    for records in read_many(model, documents, **SETTINGS):
        assert records and torch.equal(model(ids).logits, expected)
        assert not model.training


def test_each_modules_mode_stands_between_records():
    model = make_model().train()
    model.get_base_model().model.layers[0].eval()
    modes = {module: module.training for module in model.modules()}
    for _ in read_many(model, make_documents(), **SETTINGS):
        assert all(module.training == mode for module, mode in modes.items())


def test_another_text_can_be_read_with_the_same_model_later():
    model, documents = make_model(), make_documents()
    list(read_many(model, documents, **SETTINGS))
    before = {name: weights_of(model, name) for name in documents}
    list(read_many(model, {f"{name} again": ids for name, ids in documents.items()}, **SETTINGS))
    for name in documents:
        assert_same(weights_of(model, name), before[name])
        assert_same(weights_of(model, f"{name} again"), before[name])


def test_records_and_perplexity_are_those_of_the_protocol():
    model, documents = make_model(), make_documents()
    reading = read_many(model, list(documents.items()), **SETTINGS)
    assert math.isnan(reading.perplexity("one"))
    list(reading)
    for name, ids in documents.items():
        chunks = reading.chunks[name]
        assert sum(chunk.tokens for chunk in chunks) == len(ids) - 1
        nll = sum(chunk.nll_nats for chunk in chunks)
        assert reading.perplexity(name) == pytest.approx(math.exp(nll / (len(ids) - 1)))
        assert all(chunk.seconds > 0 for chunk in chunks)


# Errors


def lora(**options) -> PeftModel:
    return get_peft_model(make_host("qwen3"), LoraConfig(r=2, target_modules=["q_proj"], **options))


@pytest.mark.parametrize(
    ("documents", "error", "message"),
    [
        ({}, ValueError, "documents must hold at least one, got none: give a mapping from names to LongTensors"),
        ({1: [3, 4]}, TypeError, "documents' names must be strings, got int: give each a name"),
        (
            {"": [3, 4]},
            ValueError,
            "documents' names must be names that an adapter can have, got '': give one without dots that is no word "
            "of PyTorch's, nor a part of 'locas_'",
        ),
        (
            {"a": [3, 4]},
            ValueError,
            "documents' names must be names that an adapter can have, got 'a': give one without dots that is no "
            "word of PyTorch's, nor a part of 'locas_'",
        ),
        (
            {"a.txt": [3, 4]},
            ValueError,
            "documents' names must be names that an adapter can have, got 'a.txt': give one without dots that is no "
            "word of PyTorch's, nor a part of 'locas_'",
        ),
        (
            {"keys": [3, 4]},
            ValueError,
            "documents' names must be names that an adapter can have, got 'keys': give one without dots that is no "
            "word of PyTorch's, nor a part of 'locas_'",
        ),
        (
            [("x", [3, 4]), ("x", [3, 4])],
            ValueError,
            "documents' names must differ, got 'x' twice: give each its own",
        ),
        (
            {"default": [3, 4]},
            ValueError,
            "documents' names must be new to the model, got 'default', which is an adapter already: choose another "
            "name, or delete_adapter that one first",
        ),
        (
            {"x": [3.0, 4.0]},
            TypeError,
            "documents['x'] must be integers, got torch.float32: give token ids as a LongTensor",
        ),
        ({"y": [3, 4], "x": [3]}, ValueError, "documents['x'] must hold at least 2 tokens, got 1: give a longer text"),
        (
            {"x": [3, 64]},
            ValueError,
            "documents['x'] must lie in [0, 64), the model's vocabulary, got 64: use the model's own tokenizer",
        ),
        (
            {"x": "text"},
            TypeError,
            "documents['x'] must be a LongTensor of shape [T] or [1, T], got str: make one with torch.tensor",
        ),
    ],
)
def test_documents_are_checked_at_the_call(documents, error, message):
    def to_tensors(value):
        return torch.tensor(value) if isinstance(value, list) else value

    pairs = documents.items() if isinstance(documents, dict) else documents
    pairs = [(name, to_tensors(ids)) for name, ids in pairs]
    model = make_model()
    before = state_of(model)
    with pytest.raises(error) as caught:
        read_many(model, pairs, **SETTINGS)
    assert str(caught.value) == message
    assert_same(before, state_of(model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 4}, "stride must be at most window, got stride 8 with window 4: lower stride or raise window"),
        ({"context": "long"}, "context must be 'recompute' or 'cache', got 'long': choose one of the two"),
        (
            {"learning_rate": 0.0},
            "learning_rate must be a number above 0, got 0.0: give one, 1e-3 say; to read without learning, give the "
            "model without its adapter",
        ),
        ({"learning_rate": None}, "learning_rate must be a number above 0, got None: give one, 1e-3 say"),
        (
            {"optimizer": "muon"},
            "optimizer must be one of adamw, adam, sgd where many documents are read at once, got 'muon': choose one "
            "of them, or read one after the other with TestTimeTrainer",
        ),
        ({"weight_decay": -1.0}, "weight_decay must be 0 or a number above, got -1.0: give 0 for none"),
    ],
)
def test_settings_are_checked_at_the_call(settings, message):
    with pytest.raises(ValueError) as caught:
        read_many(make_model(), make_documents(), **SETTINGS | settings)
    assert str(caught.value) == message


def beside_lora() -> PeftModel:
    model = lora()
    host = model.get_base_model()
    return get_peft_model(host, LocasConfig(r=4))


def disabled() -> PeftModel:
    model = make_model()
    model.base_model.disable_adapter_layers()
    return model


def merged() -> PeftModel:
    model = make_model(init_strategy="gaussian")
    model.merge_adapter()
    return model


def two_active() -> PeftModel:
    model = make_model()
    model.add_adapter("other", LocasConfig(r=4))
    model.base_model.set_adapter(["default", "other"])
    return model


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_host("qwen3"),
            "model must be a PEFT model with an active LOCAS memory, got Qwen3ForCausalLM: use get_peft_model(model, "
            "LocasConfig()), or read one after the other with TestTimeTrainer",
        ),
        (
            lora,
            "model must be a PEFT model with an active LOCAS memory, got one with LORA: use get_peft_model(model, "
            "LocasConfig()), or read one after the other with TestTimeTrainer",
        ),
        (
            beside_lora,
            "model must have LOCAS memories alone, got peft.tuners.lora.layer.Linear, which cannot be taught a row at "
            "a time: merge or unload it, or read one after the other with TestTimeTrainer",
        ),
        (
            lambda: make_model(modules_to_save=["lm_head"]),
            "model must have LOCAS memories alone, got peft.utils.other.ModulesToSaveWrapper, which cannot be taught "
            "a row at a time: merge or unload it, or read one after the other with TestTimeTrainer",
        ),
        (
            lambda: make_model("gpt2", init_strategy="write"),
            "init_strategy must be one that makes rows, got 'write', whose slots are written one document at a time: "
            "choose 'topk', or read one after the other with TestTimeTrainer",
        ),
        (merged, "model must not have a memory merged into the base: call unmerge_adapter() first"),
        (disabled, "model must not have its adapters disabled, got disabled ones: enable them first"),
        (
            two_active,
            "model must have one active adapter, got default, other: call set_adapter with the one that the memories "
            "shall be like",
        ),
    ],
)
def test_models_that_cannot_be_read_are_named(make, message):
    model = make()
    before = state_of(model)
    with pytest.raises(ValueError) as caught:
        read_many(model, make_documents(), **SETTINGS)
    assert str(caught.value) == message
    assert_same(before, state_of(model))


def test_a_calibration_that_fails_leaves_the_model_as_it_was():
    model, documents = make_model("gpt_neox"), make_documents()
    spoil(model, 1)
    documents["three"][2] = 1
    before, names = state_of(model), [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError, match="activations are not finite on the calibration text"):
        next(read_many(model, documents, **SETTINGS))
    assert_same(before, state_of(model))
    assert [name for name, _ in model.named_modules()] == names
    assert list(model.peft_config) == ["default"]


@pytest.mark.parametrize("change", ["delete", "move", "merge"])
def test_memories_changed_under_the_reading_are_named(change):
    model, documents = make_model(), make_documents()
    reading = read_many(model, documents, **SETTINGS)
    next(reading)
    if change == "delete":
        model.delete_adapter("two")
    if change == "move":
        model.to(torch.float32)
    if change == "merge":
        model.merge_adapter(["one"])
    with pytest.raises(ValueError) as caught:
        next(reading)
    assert str(caught.value) == (
        "model must keep the memories that are being read into as they are, got one that was moved, merged or "
        "deleted: call close() on the reading first"
    )
