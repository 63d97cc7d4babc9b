"""Each chunk is scored before it is learned, and a reading that was stopped ends as one that was not."""

import math

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from families import VOCABULARY, each_family, make_host
from peft import LoraConfig, PromptTuningConfig, get_peft_model, inject_adapter_in_model
from training import (
    CONTEXTS,
    SETTINGS,
    assert_same,
    make_ids,
    make_model,
    make_run,
    make_trainer,
    read,
    resume,
    save,
    sgd,
    spoil,
    trained_weights,
    weights_of,
    without_time,
)
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from locas_peft import SlotWriter, backbone
from locas_peft.memories import checkpoint
from locas_peft.text import digest_ids, python_reference, tokenize, unwrap
from locas_peft.ttt import MeanOfReadings, TestTimeTrainer, TrainingSettings, active
from locas_peft.ttt.learner import Learner

KINDS = ("plain", "lora", "locas")
ADAPTERS = ("lora", "locas")


@torch.no_grad()
def score_by_hand(model, ids, window, stride) -> list[float]:
    """The protocol in its plainest form: feed context and chunk whole, pick out the chunk's own tokens."""
    nlls = []
    for start in range(0, len(ids), stride):
        begin = max(0, start - max(window - stride, 1))
        piece = ids[begin : start + stride]
        log_probabilities = model(piece.unsqueeze(0)).logits[0, :-1].double().log_softmax(-1)
        losses = -log_probabilities.gather(1, piece[1:].unsqueeze(1)).squeeze(1)
        nlls.append(losses[max(start, 1) - begin - 1 :].sum().item())
    return nlls


# Scores


@pytest.mark.parametrize(("window", "stride"), [(16, 8), (16, 16), (9, 1), (1, 1), (64, 5)])
def test_scores_are_those_of_the_protocol(window, stride):
    model, ids = make_model("plain"), make_ids(50)
    trainer = TestTimeTrainer(model, window=window, stride=stride, learning_rate=None)
    expected = score_by_hand(model, ids, window, stride)
    assert read(trainer, ids) == pytest.approx(expected, rel=1e-5)
    assert trainer.perplexity == pytest.approx(math.exp(sum(expected) / 49), rel=1e-5)


def read_in_both_contexts(model, ids, **settings) -> list[list[float]]:
    return [
        read(TestTimeTrainer(model, **SETTINGS | settings, context=context), ids)
        for context in CONTEXTS
    ]


@pytest.mark.parametrize("family", [family for family in each_family() if "lfm2" not in family.id])
def test_cache_gives_the_scores_of_recompute_where_the_text_fits_in_a_window(family):
    recompute, cache = read_in_both_contexts(
        make_model("plain", family), make_ids(40), window=48, stride=7
    )
    assert cache == pytest.approx(recompute, rel=1e-4)


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        (tf.LlamaConfig, "sdpa"),
        (tf.LlamaConfig, "eager"),
        (tf.MistralConfig, "sdpa"),
        (tf.Gemma2Config, "eager"),
    ],
    ids=["full", "full, eager", "sliding", "sliding, eager"],
)
def test_cache_gives_the_scores_of_recompute_over_many_windows(config, attention, monkeypatch):
    """With one layer, keys and values depend on nothing but their token: then both are the same at any length."""
    options = {"hidden_size": 16, "intermediate_size": 24}
    options |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    options |= {"num_hidden_layers": 1, "max_position_embeddings": 64, "head_dim": 8}
    sliding = {} if config is tf.LlamaConfig else {"sliding_window": 5}
    torch.manual_seed(0)
    config = config(**options, **sliding, vocab_size=VOCABULARY)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    monkeypatch.setattr("locas_peft.ttt.cache.SINKS", 0)
    recompute, cache = read_in_both_contexts(model, make_ids(400))
    assert cache == pytest.approx(recompute, rel=1e-5)


def test_cache_and_recompute_are_close_on_the_embedded_backbone():
    model, tokenizer = backbone.load()
    ids = tokenize(tokenizer, unwrap(python_reference()), 2500)
    recompute, cache = (
        math.exp(sum(nlls) / 2499)
        for nlls in read_in_both_contexts(model, ids, window=512, stride=256)
    )
    assert cache == pytest.approx(recompute, rel=5e-3)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("window", "last", "context"), [(16, 30, (0, 6)), (40, 62, (0, 30))])
def test_positions_stay_within_two_windows_and_the_model_over_any_length(
    family, window, last, context
):
    model, seen = make_model("plain", family), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    settings = {**SETTINGS, "window": window, "context": "cache"}
    assert all(map(math.isfinite, read(TestTimeTrainer(model, **settings), make_ids(300))))
    positions = [(position[0, 0].item(), position[0, -1].item()) for position in seen]
    assert max(position for _, position in positions) == last
    # 0..6, then eight at a time up to `last`; eight more would be beyond: the context is fed again, and so on.
    expected = [(0, 6), *((begin, begin + 7) for begin in range(7, last, 8))]
    expected += [context, *((begin, begin + 7) for begin in range(context[1] + 1, last, 8))]
    assert positions[: len(expected) + 1] == [*expected, context]


@pytest.mark.parametrize("context", CONTEXTS)
def test_logits_are_made_for_the_scored_tokens_only(context):
    model, rows = make_model("lora"), []
    model.get_base_model().lm_head.register_forward_hook(
        lambda _, args, output: rows.append(output.shape[1])
    )
    read(TestTimeTrainer(model, **SETTINGS, context=context), make_ids(30))
    assert rows == [7, 8, 8, 6]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_a_chunk_do_not_depend_on_later_tokens(kind, context):
    ids, other = make_ids(40), make_ids(40, seed=1)
    mixed = torch.cat([ids[:24], other[24:]])
    first, second = (read(make_trainer(kind, context=context), text) for text in (ids, mixed))
    assert first[:3] == second[:3]
    assert first[3] != second[3]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_first_chunk_of_a_fresh_adapter_scores_as_the_base_does(kind, context):
    base, adapted = (
        read(make_trainer(which, context=context), make_ids(40)) for which in ("plain", kind)
    )
    assert adapted[0] == base[0]
    assert adapted[1:] != base[1:]


def test_a_memory_is_calibrated_on_the_first_chunk_alone(monkeypatch):
    seen, calibrate = [], active.calibrate
    monkeypatch.setattr(
        active,
        "calibrate",
        lambda model, batches, name, **options: (
            seen.extend(batches),
            calibrate(model, batches, name, **options),
        ),
    )
    ids, trainer = make_ids(40), make_trainer(readings=2)
    assert list(trainer.read(ids))
    assert len(seen) == 1 and torch.equal(seen[0], ids[:8].unsqueeze(0))


@pytest.mark.parametrize(
    "change", [lambda ids: ids[None], torch.Tensor.int, lambda ids: ids.repeat_interleave(2)[::2]]
)
def test_other_shapes_integers_and_strides_are_read_alike(change):
    ids = make_ids(20)
    assert read(make_trainer(), change(ids)) == read(make_trainer(), ids)


# Learning


@pytest.mark.parametrize(
    ("kind", "rate", "context"), [("lora", 0.01, "recompute"), ("locas", 0.05, "cache")]
)
def test_learning_lowers_the_perplexity_of_a_text_that_repeats(kind, rate, context):
    ids = make_ids(64).repeat(6)  # the period is four windows: only the memory can hold it
    plain, trainer = (
        make_trainer(which, context=context, learning_rate=rate) for which in ("plain", kind)
    )
    for reader in (plain, trainer):
        read(reader, ids)
    assert trainer.perplexity < 0.9 * plain.perplexity
    assert trainer.skipped_chunks == 0 and all(chunk.learned for chunk in trainer.chunks)


@pytest.mark.parametrize("context", CONTEXTS)
def test_one_step_follows_the_gradient_of_the_chunks_mean_loss(context):
    ids, model = make_ids(8), make_model("lora")
    before = trained_weights(model)
    loss = F.cross_entropy(model(ids[:-1].unsqueeze(0)).logits[0], ids[1:])
    loss.backward()
    expected = {
        name: value - 0.5 * model.get_parameter(name).grad for name, value in before.items()
    }

    settings = SETTINGS | {
        "learning_rate": None,
        "optimizer": sgd(0.5),
        "warmup_steps": 0,
        "context": context,
    }
    (chunk,) = TestTimeTrainer(model, **settings).read(ids)
    assert chunk.nll_nats / chunk.tokens == pytest.approx(loss.item(), rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), value, rtol=0, atol=1e-6)
        assert model.get_parameter(name).grad is None


@pytest.mark.parametrize(
    "optimizer", [None, sgd(0.1), torch.optim.Adagrad], ids=["adamw", "sgd", "adagrad"]
)
def test_each_optimizer_changes_the_memory_and_nothing_else(optimizer):
    trainer = make_trainer(optimizer=optimizer, learning_rate=0.1 if optimizer is None else None)
    reading = trainer.read(make_ids(24))
    next(reading)
    before = weights_of(trainer.model)
    list(reading)
    changed = {
        name
        for name, value in weights_of(trainer.model).items()
        if not torch.equal(value, before[name])
    }
    assert changed and changed == trained_weights(trainer.model).keys()


def test_the_rate_warms_up_step_by_step():
    rates, optimizers = [], []

    def make(parameters):
        optimizers.append(
            torch.optim.SGD(
                [{"params": parameters[:2], "lr": 3.0}, {"params": parameters[2:]}], lr=6.0
            )
        )
        optimizers[0].register_step_pre_hook(
            lambda o, *_: rates.append([group["lr"] for group in o.param_groups])
        )
        return optimizers[0]

    read(make_trainer("lora", learning_rate=None, optimizer=make), make_ids(32))
    assert len(optimizers) == 1
    assert rates == [[1.0, 2.0], [2.0, 4.0], [3.0, 6.0], [3.0, 6.0]]


def test_the_rate_falls_with_the_root_of_the_steps():
    model = make_model("locas")
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    learner = Learner(lambda: weights, 0.5, warmup_steps=0, decay_steps=3)

    def step():
        learner.begin()
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        learner.finish()
        return learner.optimizer.param_groups[0]["lr"]

    rates = [step() for _ in range(10)]
    assert rates == pytest.approx([0.5 * (3 / (3 + steps)) ** 0.5 for steps in range(10)])


def test_an_optimizer_trains_a_written_memory_without_a_rate():
    def read_written(**options) -> dict[str, torch.Tensor]:
        model = make_model(family="gpt2", r=16, init_weights="write")
        settings = SETTINGS | {"learning_rate": None, "steps": [SlotWriter(model)]}
        read(TestTimeTrainer(model, **settings, **options), make_ids(16))
        return trained_weights(model)

    written, trained = read_written(), read_written(optimizer=sgd(0.1))
    assert all(value.any() for value in written.values())
    assert any(not torch.equal(value, trained[name]) for name, value in written.items())


def test_a_plain_model_is_only_scored():
    model, graphs = make_model("plain").train(), []
    model.register_forward_hook(lambda _, args, output: graphs.append(output.logits.requires_grad))
    before = weights_of(model)
    chunks = list(TestTimeTrainer(model, **SETTINGS).read(make_ids(20)))
    assert_same(weights_of(model), before)
    assert not any(graphs) and not any(chunk.learned for chunk in chunks)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_models_own_weights_are_trained_where_they_are_given():
    """Dynamic evaluation: no adapter, and other weights stay as they are."""
    model = make_model("plain").requires_grad_(False)
    chosen = [
        weight for name, weight in model.named_parameters() if name.endswith("down_proj.weight")
    ]
    for weight in chosen:
        weight.requires_grad_(True)
    before = weights_of(model)
    trainer = TestTimeTrainer(
        model, window=16, stride=8, learning_rate=None, optimizer=sgd(0.1), parameters=chosen
    )
    records = list(trainer.read(make_ids(40)))
    changed = {name for name, value in weights_of(model).items() if not value.equal(before[name])}
    assert all(chunk.learned for chunk in records)
    assert changed and all(name.endswith("down_proj.weight") for name in changed)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_disabled_adapter_is_neither_used_nor_changed(kind):
    ids, model = make_ids(20), make_model(kind)
    before = weights_of(model)
    with model.disable_adapter():
        chunks = list(TestTimeTrainer(model, **SETTINGS).read(ids))
    assert_same(weights_of(model), before)
    assert without_time(chunks) == without_time(make_trainer("plain").read(ids))


def test_an_injected_adapter_learns():
    wrapped, host = make_model("lora", target_modules=["q_proj", "v_proj"]), make_host("llama")
    torch.manual_seed(1)
    injected = inject_adapter_in_model(
        LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"]), host
    )
    first, second = (
        list(TestTimeTrainer(model, **SETTINGS).read(make_ids(40))) for model in (wrapped, injected)
    )
    assert without_time(first) == without_time(second)
    assert all(chunk.learned for chunk in second)


def watch_gradients(model) -> tuple[set[str], list[str]]:
    """From now on: the modules whose output is in a graph, and those that a gradient reached, at each time."""
    in_graph, reached = set(), []

    def watch(name: str, output) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                in_graph.add(name)
                tensor.register_hook(lambda gradient: reached.append(name))

    for name, module in model.get_base_model().named_modules():
        if (
            name and "locas_" not in name and not name.endswith("act_fn")
        ):  # parts of the memory, and what it calls
            module.register_forward_hook(lambda _, args, output, name=name: watch(name, output))
    return in_graph, reached


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("lowest", [0, 1])
def test_no_gradient_is_computed_below_the_lowest_memory(lowest, context):
    model = make_model("locas", layers_to_transform=[lowest])
    in_graph, reached = watch_gradients(model)
    ids = make_ids(40)
    records = list(TestTimeTrainer(model, **SETTINGS, context=context).read(ids))
    assert len(records) == 5 and all(chunk.learned for chunk in records)

    # In the lowest layer that has one, only what follows the memory: neither its attention nor the host's own FFN.
    expected = {f"model.layers.{lowest}", f"model.layers.{lowest}.mlp", "model.norm", "lm_head"}
    names = [name for name, _ in model.get_base_model().named_modules()]
    above = {name for name in names if name.startswith("model.layers.1.") and lowest == 0}
    assert expected <= in_graph and in_graph <= expected | above | {"model.layers.1"}
    assert set(reached) == in_graph
    assert ("model.layers.1.self_attn.q_proj" in in_graph) == (lowest == 0)
    assert all(reached.count(name) == 5 for name in expected)  # once a chunk


def test_dropout_is_off_and_each_modules_mode_stands_between_chunks():
    ids, model = make_ids(20), make_model("lora", lora_dropout=0.5).train()
    model.get_base_model().model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    chunks = []
    for chunk in TestTimeTrainer(model, **SETTINGS).read(ids):
        chunks.append(chunk)
        assert [module.training for module in model.modules()] == modes
    assert without_time(chunks) == without_time(make_trainer("lora").read(ids))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_bfloat16_base_teaches_an_adapter_in_float32(kind):
    model = make_model(kind, dtype=torch.bfloat16)
    trainer = TestTimeTrainer(model, **SETTINGS, context="cache")
    assert all(
        chunk.learned and math.isfinite(chunk.nll_nats) for chunk in trainer.read(make_ids(80))
    )
    assert {value.dtype for value in trained_weights(model).values()} == {torch.float32}


def test_stopping_and_going_on_is_the_same_as_reading_through():
    ids, whole, parted = make_ids(60), make_trainer(context="cache"), make_trainer(context="cache")
    read(whole, ids)
    former = parted.read(ids)
    for _ in range(3):
        next(former)
    assert parted.position == 24
    next(parted.read(ids))
    next(former)  # an earlier iterator goes on where the later one stopped
    read(parted, ids)
    assert without_time(parted.chunks) == without_time(whole.chunks)
    assert_same(weights_of(parted.model), weights_of(whole.model))


def test_rewind_reads_again_with_what_was_learned():
    ids, trainer = make_ids(64), make_trainer("lora", context="cache", learning_rate=0.05)
    read(trainer, ids)
    first = trainer.perplexity
    trainer.rewind()
    assert trainer.chunks == [] and trainer.position == 0 and math.isnan(trainer.perplexity)
    read(trainer, ids)
    assert trainer.perplexity < first
    trainer.rewind()
    read(trainer, make_ids(30, seed=1))
    assert trainer.position == 30


@pytest.mark.parametrize("context", CONTEXTS)
def test_readings_are_rewinds_of_one_trainer_whose_weights_are_averaged(context):
    ids, rewound, trainer = (
        make_ids(44),
        make_trainer(context=context),
        make_trainer(context=context, readings=3, steps=[MeanOfReadings()]),
    )
    expected, perplexities, ends = [], [], []
    for reading in range(3):
        rewound.rewind()
        expected += [(reading, *record[1:]) for record in without_time(rewound.read(ids))]
        perplexities.append(rewound.perplexity)
        ends.append(weights_of(rewound.model))
    for chunk in trainer.read(ids):
        assert trainer.position == chunk.stop
        if chunk.stop == len(ids):
            assert trainer.perplexity == perplexities[chunk.reading]
    assert without_time(trainer.chunks) == expected
    assert perplexities[2] < perplexities[1] < perplexities[0]
    assert list(trainer.read(ids)) == []
    mean = {name: torch.stack([end[name] for end in ends]).mean(dim=0) for name in ends[0]}
    torch.testing.assert_close(weights_of(trainer.model), mean)


# Losses and gradients that are not finite


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_loss_that_is_not_finite_leaves_the_memory_as_it_was(kind, context):
    ids = make_ids(64)
    ids[ids == 7] = 8
    ids[20] = 7
    trainer = make_trainer(kind, context=context)
    spoil(trainer.model, 7)
    memory = None
    for chunk in trainer.read(ids):
        if not chunk.learned:
            assert math.isnan(chunk.nll_nats)
            assert_same(trained_weights(trainer.model), memory)
        memory = trained_weights(trainer.model)
        assert all(bool(value.isfinite().all()) for value in memory.values())
    # Token 20 lies in chunk 2 and in the context of chunk 3.
    assert [chunk.index for chunk in trainer.chunks if not chunk.learned] == [2, 3]
    assert [chunk.index for chunk in trainer.chunks if not math.isfinite(chunk.nll_nats)] == [2, 3]
    assert trainer.skipped_chunks == 2
    assert math.isnan(trainer.perplexity)


class Counting(torch.optim.SGD):
    """Has a plain number in its state, made with the first step that has a gradient."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
        return super().step(closure)


def make_counting(parameters):
    return Counting(parameters, lr=0.1)


@pytest.mark.parametrize("optimizer", [None, make_counting], ids=["adamw", "counting"])
@pytest.mark.parametrize("fails_at", [{2}, {1, 4}], ids=str)
def test_a_gradient_that_is_not_finite_leaves_memory_and_optimizer_as_they_were(
    fails_at, optimizer, monkeypatch
):
    rate = 0.02 if optimizer is None else None
    trainer, twin = (
        make_trainer("lora", optimizer=optimizer, learning_rate=rate) for _ in range(2)
    )
    calls, ids = [], make_ids(40)
    skipped = {call - 1 for call in fails_at}

    def hook(gradient):
        calls.append(1)
        return gradient * math.nan if len(calls) in fails_at else gradient

    next(p for p in trainer.model.parameters() if p.requires_grad).register_hook(hook)
    before = trained_weights(trainer.model)
    for chunk in trainer.read(ids):
        assert chunk.learned == (chunk.index not in skipped) and math.isfinite(chunk.nll_nats)
        assert chunk.learned or all(
            torch.equal(v, before[n]) for n, v in trained_weights(trainer.model).items()
        )
        before = trained_weights(trainer.model)
    assert trainer.skipped_chunks == len(skipped)

    # As if those chunks had been scored and never learned: the same weights and optimizer go on.
    differentiate = twin._differentiate

    def skip(losses):
        if len(twin.chunks) in skipped:
            twin.learner.begin()
            return [torch.tensor(False)]
        return differentiate(losses)

    monkeypatch.setattr(twin, "_differentiate", skip)
    read(twin, ids)
    assert without_time(twin.chunks) == without_time(trainer.chunks)
    assert_same(weights_of(twin.model), weights_of(trainer.model))


def test_an_adapter_that_is_enabled_halfway_is_calibrated_and_learns():
    trainer = make_trainer()
    ids = make_ids(40)
    with trainer.model.disable_adapter():
        reading = trainer.read(ids)
        assert not next(reading).learned
    for name, parameter in trainer.model.named_parameters():
        parameter.requires_grad_("locas_" in name)  # PEFT leaves them frozen
    assert all(chunk.learned for chunk in reading)
    assert trained_weights(trainer.model)


def test_a_frozen_adapter_is_refused_where_it_would_be_trained():
    model = make_model()
    model.requires_grad_(False)
    ids = make_ids(40)
    with pytest.raises(ValueError, match="^model must have an adapter that is trained, got a f"):
        TestTimeTrainer(model, **SETTINGS).read(ids)
    scored = TestTimeTrainer(model, **SETTINGS | {"learning_rate": None})
    assert not any(chunk.learned for chunk in scored.read(ids))
    with model.disable_adapter():
        assert not next(TestTimeTrainer(model, **SETTINGS).read(ids)).learned


# The mean of readings


def test_several_readings_without_the_step_leave_the_last_weights():
    trainer, mean = (make_trainer(readings=2, steps=steps) for steps in ([], [MeanOfReadings()]))
    read(trainer, make_ids(60))
    read(mean, make_ids(60))
    assert without_time(trainer.chunks) == without_time(mean.chunks)
    assert any(
        not torch.equal(value, weights_of(mean.model)[name])
        for name, value in weights_of(trainer.model).items()
    )


def test_a_short_document_keeps_its_last_weights():
    """Five chunks: the document is read again to learn it at all."""
    trainer, mean = (make_trainer(readings=2, steps=steps) for steps in ([], [MeanOfReadings()]))
    read(trainer, make_ids(40))
    read(mean, make_ids(40))
    assert_same(weights_of(trainer.model), weights_of(mean.model))


def test_the_mean_of_a_written_memory_is_refused():
    model = make_model(family="gpt2", r=16, init_weights="write")
    with pytest.raises(ValueError, match="^steps must not have a MeanOfReadings beside a writer"):
        TestTimeTrainer(
            model, **SETTINGS | {"readings": 2}, steps=[SlotWriter(model), MeanOfReadings()]
        )


def test_two_steps_of_one_name_are_refused():
    with pytest.raises(ValueError, match="^steps must have one mean at most, got 2: leave out"):
        make_trainer(steps=[MeanOfReadings(), MeanOfReadings()])


# Checkpoints


@pytest.mark.parametrize(
    ("kind", "settings", "read_before"),
    [
        ("locas", {"context": "cache"}, (0, 9)),
        ("locas", {"context": "recompute"}, (2,)),
        ("locas", {"context": "cache", "readings": 3}, (15, 20, 45)),  # 15 chunks a reading
        ("lora", {"context": "cache"}, (1, 9)),
        ("lora", {"learning_rate": None, "optimizer": torch.optim.Adagrad}, (0, 9)),
        ("plain", {"context": "cache"}, (1, 9)),
    ],
    ids=str,
)
def test_a_resumed_run_ends_bit_for_bit_as_one_that_was_never_stopped(
    tmp_path, kind, settings, read_before
):
    ids = make_ids(120)

    def make():
        return make_trainer(kind, **settings, steps=[MeanOfReadings()])

    whole = make()
    chunks = whole.read(ids)
    for count in read_before:
        while len(whole.chunks) < count:
            next(chunks)
        save(whole, tmp_path / str(count))
    list(chunks)
    for count in read_before:
        torch.manual_seed(99)
        resumed = make()
        resume(resumed, tmp_path / str(count))
        assert resumed.position == 8 * ((count - 1) % 15 + 1 if count else 0)
        assert resumed.chunks == whole.chunks[:count]
        read(resumed, ids)
        assert without_time(resumed.chunks) == without_time(whole.chunks)
        assert_same(weights_of(resumed.model), weights_of(whole.model))
        if kind == "locas":
            assert (
                resumed.model.peft_config["default"].get_record("slots")
                == whole.model.peft_config["default"].get_record("slots")
                is not None
            )


def test_resume_loads_the_random_state(tmp_path):
    save(make_trainer("plain"), tmp_path)
    expected = torch.rand(4)
    torch.manual_seed(5)
    resume(make_trainer("plain"), tmp_path)
    assert torch.equal(torch.rand(4), expected)


def test_resume_counts_skipped_chunks_and_keeps_records_of_nan(tmp_path):
    trainer, resumed = make_trainer("lora"), make_trainer("lora")
    spoil(trainer.model, 7)
    spoil(resumed.model, 7)
    read(trainer, torch.full((24,), 7))
    save(trainer, tmp_path)
    resume(resumed, tmp_path)
    assert resumed.skipped_chunks == 3 and math.isnan(resumed.chunks[0].nll_nats)


def test_trained_weights_outside_the_adapter_are_saved_too(tmp_path):
    whole, resumed = make_trainer("lora"), make_trainer("lora")
    for trainer in (whole, resumed):
        trainer.model.get_base_model().model.norm.weight.requires_grad_(True)
    read(whole, make_ids(24))
    save(whole, tmp_path)
    resume(resumed, tmp_path)
    assert_same(weights_of(resumed.model), weights_of(whole.model))


def test_another_text_is_refused(tmp_path):
    ids, other = make_ids(24), make_ids(24, seed=1)
    trainer, resumed = make_trainer("plain"), make_trainer("plain")
    next(trainer.read(ids))
    save(trainer, tmp_path)
    digest, other_digest = digest_ids(ids), digest_ids(other)
    digests = f"(sha256 {digest[:12]}), got another one ({other_digest[:12]})"
    with pytest.raises(ValueError) as caught:
        trainer.read(other)
    rule = f"input_ids must be the document begun here {digests}"
    remedy = "call rewind() first, or make a new TestTimeTrainer"
    assert str(caught.value) == f"{rule}: {remedy}"
    with pytest.raises(ValueError) as caught:
        make_run(resumed, tmp_path, other_digest).resume(checkpoint.load(tmp_path))
    rule = f"the text must be the one begun in the checkpoint in {str(tmp_path)!r} {digests}"
    assert str(caught.value) == f"{rule}: give that text, or choose another folder"
    assert resumed.position == 0


# Errors


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"window": 65}, ValueError, "window must be within the model's 64 positions, got 65: "),
        ({"window": None}, TypeError, "window must be an int, got NoneType: give a whole number"),
        ({"learning_rate": None}, ValueError, "learning_rate must be a number above 0 where an "),
        (
            {"optimizer": "muon"},
            TypeError,
            "optimizer must be a callable that takes the parameters, got 'muon': ",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_model_are_refused_at_construction(settings, error, message):
    with pytest.raises(error) as caught:
        make_trainer("lora", **settings)
    assert str(caught.value).startswith(message)


def test_fields_replace_those_of_the_settings():
    settings = TrainingSettings(**SETTINGS)
    assert make_trainer("plain", settings=settings, stride=4).settings == TrainingSettings(
        **SETTINGS | {"stride": 4}
    )


@pytest.mark.parametrize(
    ("input_ids", "error", "message"),
    [
        ([1, 2], TypeError, "be a LongTensor of shape [T] or [1, T], got list: make one with "),
        (torch.zeros(4), TypeError, "be integers, got torch.float32: give token ids as a "),
        (torch.zeros(2, 4).long(), ValueError, "have the shape [T] or [1, T], got [2, 4]: give "),
        (torch.tensor(3), ValueError, "have the shape [T] or [1, T], got []: give one document "),
        (torch.tensor([3]), ValueError, "hold at least 2 tokens, got 1: give a longer text"),
        (torch.tensor([3, 64]), ValueError, "lie in [0, 64), the model's vocabulary, got 64: use "),
        (torch.tensor([-1, 3]), ValueError, "lie in [0, 64), the model's vocabulary, got -1: use "),
    ],
    ids=["list", "floats", "batch", "scalar", "one token", "beyond", "negative"],
)
def test_documents_are_checked_at_the_call(input_ids, error, message):
    with pytest.raises(error) as caught:
        make_trainer("plain").read(input_ids)
    assert str(caught.value).startswith(f"input_ids must {message}")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), TypeError, "model must be a transformers causal language "),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
            ),
            ValueError,
            "model must be a causal language model, got the encoder-decoder T5ForConditionalGeneration: ",
        ),
        (
            lambda: make_model("plain", "lfm2"),
            ValueError,
            "context must be 'recompute' for lfm2, got 'cache': its ",
        ),
        (
            lambda: get_peft_model(
                make_host("llama"), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
            ),
            ValueError,
            "model's adapter must lie in its layers, got the prompt method PROMPT_TUNING: use LOCAS, LoRA or another "
            "adapter made of weights",
        ),
    ],
    ids=["no model", "t5", "lfm2", "prompt"],
)
def test_models_that_cannot_be_read_are_named(make, error, message):
    model = make()
    with pytest.raises(error) as caught:
        TestTimeTrainer(model, **SETTINGS, context="cache")
    assert str(caught.value).startswith(message)


def test_a_model_that_cannot_have_a_cache_is_read_without_one():
    assert list(TestTimeTrainer(make_model("plain", "lfm2"), **SETTINGS).read(make_ids(20)))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_merged_memory_cannot_learn(kind):
    trainer = make_trainer(kind)
    read(trainer, make_ids(24))
    trainer.rewind()
    trainer.model.merge_adapter()
    with pytest.raises(ValueError) as caught:
        trainer.read(make_ids(24))
    assert str(caught.value) == (
        "model must not have its adapter merged into the base, got a merged one, which cannot learn: "
        "call unmerge_adapter() first"
    )
    trainer.model.unmerge_adapter()
    assert list(trainer.read(make_ids(24)))


def test_switching_adapters_halfway_is_named():
    trainer = make_trainer("lora")
    reading = trainer.read(make_ids(24))
    next(reading)
    trainer.model.add_adapter("other", LoraConfig(r=2, target_modules="all-linear"))
    trainer.model.set_adapter("other")
    with pytest.raises(ValueError) as caught:
        next(reading)
    assert str(caught.value) == (
        "model must train the same parameters from the first chunk to the last, got others than the optimizer "
        "was made for: make a new TestTimeTrainer after switching or adding adapters"
    )
