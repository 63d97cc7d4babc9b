"""Each chunk is scored before it is learned, and a reading that was stopped ends as one that was not."""

import math
import re

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

from locas_peft import SlotWriter, backbone, calibrate
from locas_peft.text import digest_ids, python_reference, tokenize, unwrap
from locas_peft.ttt import MeanOfReadings, TestTimeTrainer, TrainingSettings
from locas_peft.tuner import list_layers

KINDS = ("plain", "lora", "locas")
ADAPTERS = ("lora", "locas")


@torch.no_grad()
def score_by_hand(model, ids, window, stride) -> list[float]:
    """The protocol in its plainest form: feed context and chunk, pick out the chunk's own tokens."""
    nlls = []
    for start in range(0, len(ids), stride):
        begin = max(0, start - max(window - stride, 1))
        piece = ids[begin : start + stride]
        if begin and ids[0] == model.config.bos_token_id:
            piece = torch.cat([ids[:1], piece])
        logits = model(piece.unsqueeze(0)).logits[0, :-1].double()
        losses = F.cross_entropy(logits, piece[1:], reduction="none")
        scored = min(start + stride, len(ids)) - max(start, 1)
        nlls.append(losses[len(losses) - scored :].sum().item())
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
    model = make_model("plain", family)
    recompute, cache = read_in_both_contexts(model, make_ids(40), window=48, stride=7)
    assert cache == pytest.approx(recompute, rel=1e-4)


@pytest.mark.parametrize(
    ("config_class", "attention", "sliding"),
    [
        (tf.LlamaConfig, "sdpa", {}),
        (tf.LlamaConfig, "eager", {}),
        (tf.MistralConfig, "sdpa", {"sliding_window": 5}),
        (tf.Gemma2Config, "eager", {"sliding_window": 5}),
    ],
    ids=["full", "full, eager", "sliding", "sliding, eager"],
)
def test_cache_gives_the_scores_of_recompute_over_many_windows(
    config_class, attention, sliding, monkeypatch
):
    """With one layer, keys and values depend on nothing but their token: then both are the same at any length."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "head_dim": 8, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    config = config_class(
        **sizes, **heads, **sliding, num_hidden_layers=1, max_position_embeddings=64
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    monkeypatch.setattr("locas_peft.ttt.cache.SINKS", 0)
    recompute, cache = read_in_both_contexts(model, make_ids(200))
    assert cache == pytest.approx(recompute, rel=1e-5)


def test_cache_and_recompute_are_close_on_the_embedded_backbone():
    model, tokenizer = backbone.load()
    ids = tokenize(tokenizer, unwrap(python_reference()), 1500)
    both = read_in_both_contexts(model, ids, window=512, stride=256)
    recompute, cache = (math.exp(sum(nlls) / 1499) for nlls in both)
    assert cache == pytest.approx(recompute, rel=5e-3)


@pytest.mark.parametrize(
    ("family", "window", "last", "expected"),
    [
        ("llama", 16, 30, [0, 7, 15, 23, 0, 7, 15, 23, 0]),
        ("gpt2", 40, 62, [0, 7, 15, 23, 31, 39, 47, 55, 0, 31, 39, 47, 55, 0]),
    ],
)
def test_positions_stay_within_two_windows_and_the_model_over_any_length(
    family, window, last, expected
):
    """Eight tokens at a time, up to `last`. Where eight more are beyond it, the context is fed again."""
    model, first_positions, last_positions = make_model("plain", family), [], []

    def see(module, args, kwargs) -> None:
        positions = kwargs["position_ids"][0].tolist()
        first_positions.append(positions[0])
        last_positions.append(positions[-1])

    model.register_forward_pre_hook(see, with_kwargs=True)
    settings = {**SETTINGS, "window": window, "context": "cache"}
    assert all(map(math.isfinite, read(TestTimeTrainer(model, **settings), make_ids(200))))
    assert first_positions[: len(expected)] == expected
    assert max(last_positions) == last


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
    ids = make_ids(40)
    mixed = torch.cat([ids[:24], make_ids(16, seed=1)])
    first, second = (read(make_trainer(kind, context=context), text) for text in (ids, mixed))
    assert first[:3] == second[:3]
    assert first[3] != second[3]


@pytest.mark.parametrize("disabled_chunks", [0, 2])
def test_a_memory_is_calibrated_on_its_first_chunk_after_the_start_token(disabled_chunks):
    """On more, later tokens would leak into scores."""
    model, other = (make_model(scaling=1.0, output_scale="measured") for _ in range(2))
    ids = torch.cat([torch.tensor([1]), make_ids(39)])
    reading = TestTimeTrainer(model, **SETTINGS, readings=2).read(ids)
    with model.disable_adapter():
        for _ in range(disabled_chunks):
            assert not next(reading).learned
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("locas_" in name)  # PEFT leaves them frozen
    assert all(chunk.learned for chunk in reading)
    first = torch.cat([ids[:1], ids[16:24]]) if disabled_chunks else ids[:8]
    calibrate(other, [first[None]])
    for layer, expected in zip(list_layers(model), list_layers(other), strict=True):
        assert torch.equal(
            layer.locas_input_scale["default"], expected.locas_input_scale["default"]
        )


@pytest.mark.parametrize(
    "change", [lambda ids: ids[None], torch.Tensor.int, lambda ids: ids.repeat_interleave(2)[::2]]
)
def test_other_shapes_integers_and_strides_are_read_alike(change):
    ids = make_ids(20)
    assert read(make_trainer(), change(ids)) == read(make_trainer(), ids)


# Learning


@pytest.mark.parametrize("context", CONTEXTS)
def test_one_step_follows_the_gradient_of_the_chunks_mean_loss(context):
    ids, model = make_ids(8), make_model("lora")
    before = trained_weights(model)
    loss = F.cross_entropy(model(ids[:-1].unsqueeze(0)).logits[0], ids[1:])
    loss.backward()
    expected = {
        name: value - 0.5 * model.get_parameter(name).grad for name, value in before.items()
    }

    settings = {"learning_rate": None, "optimizer": sgd(0.5), "warmup_steps": 0}
    (chunk,) = TestTimeTrainer(model, **SETTINGS | settings, context=context).read(ids)
    assert chunk.nll_nats / chunk.tokens == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(trained_weights(model), expected, rtol=0, atol=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())


def list_changed(model, before: dict[str, torch.Tensor]) -> set[str]:
    weights = weights_of(model).items()
    return {name for name, value in weights if not torch.equal(value, before[name])}


@pytest.mark.parametrize(
    "optimizer", [None, sgd(0.1), torch.optim.Adagrad], ids=["adamw", "sgd", "adagrad"]
)
def test_each_optimizer_changes_the_memory_and_nothing_else(optimizer):
    trainer = make_trainer(optimizer=optimizer, learning_rate=0.1 if optimizer is None else None)
    reading = trainer.read(make_ids(24))
    next(reading)
    before = weights_of(trainer.model)
    list(reading)
    changed = list_changed(trainer.model, before)
    assert changed and changed == trained_weights(trainer.model).keys()


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        ({}, [1 / 3, 2 / 3, 1, 1]),
        ({"warmup_steps": 0, "decay_steps": 3}, [(3 / (3 + step)) ** 0.5 for step in range(4)]),
    ],
    ids=["warm-up", "decay"],
)
def test_the_rate_of_each_group_warms_up_and_falls_with_the_root_of_the_steps(settings, factors):
    rates, optimizers = [], []

    def note(optimizer, *_) -> None:
        rates.extend(group["lr"] for group in optimizer.param_groups)

    def make(parameters):
        groups = [{"params": parameters[:2], "lr": 0.003}, {"params": parameters[2:]}]
        optimizers.append(torch.optim.SGD(groups, lr=0.006))
        optimizers[0].register_step_pre_hook(note)
        return optimizers[0]

    read(make_trainer("lora", learning_rate=None, optimizer=make, **settings), make_ids(32))
    assert len(optimizers) == 1
    assert rates == pytest.approx([rate * each for each in factors for rate in (0.003, 0.006)])


def test_an_optimizer_trains_a_written_memory_without_a_rate():
    model = make_model(family="gpt2", r=16, init_weights="write")
    settings = SETTINGS | {"learning_rate": None, "steps": [SlotWriter(model)]}
    trainer = TestTimeTrainer(model, **settings, optimizer=sgd(0.1))
    read(trainer, make_ids(16))
    assert trainer.learner.steps == 2
    assert all(value.any() for value in trained_weights(model).values())


def test_a_plain_model_is_only_scored():
    model, graphs = make_model("plain").train(), []
    model.register_forward_hook(lambda _, args, output: graphs.append(output.logits.requires_grad))
    before = weights_of(model)
    trainer = TestTimeTrainer(model, **SETTINGS)
    read(trainer, make_ids(20))
    assert_same(weights_of(model), before)
    assert not any(graphs) and not any(chunk.learned for chunk in trainer.chunks)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_models_own_weights_are_trained_where_they_are_given():
    """Dynamic evaluation: no adapter, and other weights stay as they are."""
    model = make_model("plain").requires_grad_(False)
    chosen = [layer.mlp.down_proj.weight.requires_grad_(True) for layer in model.model.layers]
    before = weights_of(model)
    settings = SETTINGS | {"learning_rate": None, "optimizer": sgd(0.1), "parameters": chosen}
    assert all(chunk.learned for chunk in TestTimeTrainer(model, **settings).read(make_ids(40)))
    names = {f"model.layers.{index}.mlp.down_proj.weight" for index in range(2)}
    assert list_changed(model, before) == names


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_disabled_adapter_is_neither_used_nor_changed(kind):
    ids, model, plain = make_ids(20), make_model(kind), make_trainer("plain")
    before = weights_of(model)
    with model.disable_adapter():
        chunks = list(TestTimeTrainer(model, **SETTINGS).read(ids))
    assert_same(weights_of(model), before)
    assert without_time(chunks) == without_time(plain.read(ids))


def test_an_injected_adapter_learns():
    modules = {"target_modules": ["q_proj", "v_proj"]}
    wrapped, host = make_model("lora", **modules), make_host("llama")
    torch.manual_seed(1)
    injected = inject_adapter_in_model(LoraConfig(r=4, lora_alpha=32, **modules), host)
    first, second = (
        list(TestTimeTrainer(model, **SETTINGS).read(make_ids(40))) for model in (wrapped, injected)
    )
    assert without_time(first) == without_time(second)
    assert all(chunk.learned for chunk in second)


@pytest.mark.parametrize("context", CONTEXTS)
def test_no_gradient_is_computed_below_the_lowest_memory(context):
    """Of its layer, neither the attention nor the host's own FFN is in the graph."""
    model, in_graph = make_model("locas", layers_to_transform=[1]), set()

    def watch(name: str, output) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, torch.Tensor) and output.requires_grad:
            in_graph.add(name)

    for name, module in model.get_base_model().named_modules():
        # Neither parts of the memory nor what it calls.
        if "locas_" not in name and not name.endswith("act_fn"):
            module.register_forward_hook(lambda _, args, output, name=name: watch(name, output))
    trainer = TestTimeTrainer(model, **SETTINGS, context=context)
    assert all(chunk.learned for chunk in trainer.read(make_ids(40)))
    assert in_graph == {"model.layers.1", "model.layers.1.mlp", "model.norm", "lm_head"}


def test_dropout_is_off_and_each_modules_mode_stands_between_chunks():
    ids, model = make_ids(20), make_model("lora", lora_dropout=0.5).train()
    model.get_base_model().model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    chunks = []
    for chunk in TestTimeTrainer(model, **SETTINGS).read(ids):
        chunks.append(chunk)
        assert [module.training for module in model.modules()] == modes
    assert without_time(chunks) == without_time(make_trainer("lora").read(ids))


def test_stopping_and_going_on_is_the_same_as_reading_through():
    ids, whole, parted = make_ids(60), make_trainer(context="cache"), make_trainer(context="cache")
    read(whole, ids)
    former = parted.read(ids)
    for _ in range(3):
        next(former)
    assert parted.position == 24
    next(parted.read(ids))
    # An earlier iterator goes on where the later one stopped.
    list(former)
    assert without_time(parted.chunks) == without_time(whole.chunks)
    assert_same(weights_of(parted.model), weights_of(whole.model))


@pytest.mark.parametrize("context", CONTEXTS)
def test_readings_are_rewinds_of_one_trainer_whose_weights_are_averaged(context):
    ids, rewound = make_ids(44), make_trainer(context=context)
    trainer = make_trainer(context=context, readings=3, steps=[MeanOfReadings()])
    expected, ends = [], []
    for reading in range(3):
        rewound.rewind()
        expected += [(reading, *record[1:]) for record in without_time(rewound.read(ids))]
        ends.append(weights_of(rewound.model))
    assert without_time(trainer.read(ids)) == expected
    assert trainer.perplexity == rewound.perplexity
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
    before = None
    for chunk in trainer.read(ids):
        memory = trained_weights(trainer.model)
        assert all(value.isfinite().all() for value in memory.values())
        assert math.isfinite(chunk.nll_nats) == chunk.learned
        if not chunk.learned:
            assert_same(memory, before)
        before = memory
    # Token 20 lies in chunk 2 and in the context of chunk 3.
    assert [chunk.index for chunk in trainer.chunks if not chunk.learned] == [2, 3]
    assert trainer.skipped_chunks == 2
    assert math.isnan(trainer.perplexity)


def test_a_gradient_that_is_not_finite_leaves_memory_and_optimizer_as_they_were():
    trainer, calls = make_trainer("lora"), []

    def spoil_some(gradient):
        calls.append(gradient)
        return gradient * math.nan if len(calls) in (1, 4) else gradient

    next(p for p in trainer.model.parameters() if p.requires_grad).register_hook(spoil_some)
    # It makes the optimizer.
    trainer.learner.begin()
    before = trainer.state_dict()
    for chunk in trainer.read(make_ids(40)):
        assert math.isfinite(chunk.nll_nats)
        state = trainer.state_dict()
        if not chunk.learned:
            for part in ("model", "learner"):
                torch.testing.assert_close(state[part], before[part], rtol=0, atol=0)
        before = state
    assert [chunk.index for chunk in trainer.chunks if not chunk.learned] == [0, 3]
    assert trainer.skipped_chunks == 2 and trainer.learner.steps == 3


def test_a_frozen_adapter_is_refused_where_it_would_be_trained():
    model, ids = make_model().requires_grad_(False), make_ids(40)
    trainer = TestTimeTrainer(model, **SETTINGS)
    with pytest.raises(ValueError, match="^model must have an adapter that is trained, got a f"):
        trainer.read(ids)
    scored = TestTimeTrainer(model, **SETTINGS | {"learning_rate": None})
    assert not any(chunk.learned for chunk in scored.read(ids))
    with model.disable_adapter():
        assert not next(trainer.read(ids)).learned


# The mean of readings


# Of five chunks, the document is read again to learn it at all.
@pytest.mark.parametrize(("length", "averages"), [(40, False), (60, True)])
def test_the_step_averages_the_readings_of_a_document_that_is_not_short(length, averages):
    last, mean = (make_trainer(readings=2, steps=steps) for steps in ([], [MeanOfReadings()]))
    read(last, make_ids(length))
    read(mean, make_ids(length))
    assert without_time(last.chunks) == without_time(mean.chunks)
    assert bool(list_changed(mean.model, weights_of(last.model))) == averages


def test_a_mean_beside_a_writer_or_a_second_one_is_refused():
    model = make_model(family="gpt2", r=16, init_weights="write")
    for steps, message in (
        ([SlotWriter(model), MeanOfReadings()], "not have a MeanOfReadings beside a writer"),
        ([MeanOfReadings(), MeanOfReadings()], "have one mean at most, got 2: leave out"),
    ):
        with pytest.raises(ValueError, match=f"^steps must {message}"):
            TestTimeTrainer(model, **SETTINGS, readings=2, steps=steps)


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
        assert resumed.chunks == whole.chunks[:count]
        read(resumed, ids)
        assert without_time(resumed.chunks) == without_time(whole.chunks)
        assert_same(weights_of(resumed.model), weights_of(whole.model))


def test_resume_loads_the_random_state(tmp_path):
    save(make_trainer("plain"), tmp_path)
    expected = torch.rand(4)
    torch.manual_seed(5)
    resume(make_trainer("plain"), tmp_path)
    assert torch.equal(torch.rand(4), expected)


def test_a_checkpoint_has_skipped_chunks_and_trained_weights_outside_the_adapter(tmp_path):
    whole, resumed = make_trainer("lora"), make_trainer("lora")
    for trainer in (whole, resumed):
        spoil(trainer.model, 7)
        trainer.model.get_base_model().model.norm.weight.requires_grad_(True)
    read(whole, torch.cat([make_ids(16).clamp(min=8), torch.full((8,), 7)]))
    save(whole, tmp_path)
    resume(resumed, tmp_path)
    assert resumed.skipped_chunks == 1 and math.isnan(resumed.chunks[2].nll_nats)
    assert_same(trained_weights(resumed.model), trained_weights(whole.model))


def test_another_text_is_refused_until_the_trainer_is_rewound():
    ids, other, trainer = make_ids(24), make_ids(30, seed=1), make_trainer("plain")
    next(trainer.read(ids))
    begun, got = (digest_ids(each)[:12] for each in (ids, other))
    message = rf"document begun here \(sha256 {begun}\), got another one \({got}\): call rewind\("
    with pytest.raises(ValueError, match=f"^input_ids must be the {message}"):
        trainer.read(other)
    trainer.rewind()
    assert trainer.chunks == [] and trainer.position == 0 and math.isnan(trainer.perplexity)
    read(trainer, other)
    assert trainer.position == 30


# Errors


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"window": 65}, ValueError, "window must be within the model's 64 positions, got 65: "),
        ({"window": None}, TypeError, "window must be an int, got NoneType: "),
        ({"learning_rate": None}, ValueError, "learning_rate must be a number above 0 where an "),
        ({"optimizer": "muon"}, TypeError, "optimizer must be a callable .*, got 'muon': give "),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_model_are_refused_at_construction(settings, error, message):
    with pytest.raises(error, match=f"^{message}"):
        make_trainer("lora", **settings)


def test_fields_replace_those_of_the_settings():
    trainer = make_trainer("plain", settings=TrainingSettings(**SETTINGS), stride=4)
    assert trainer.settings == TrainingSettings(**SETTINGS | {"stride": 4})


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
    with pytest.raises(error, match=re.escape(f"input_ids must {message}")):
        make_trainer("plain").read(input_ids)


def make_t5() -> torch.nn.Module:
    sizes = {"vocab_size": 8, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes))


def make_prompted() -> torch.nn.Module:
    config = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    return get_peft_model(make_host("llama"), config)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: torch.nn.Linear(2, 2),
            TypeError,
            "model must be a transformers causal language ",
        ),
        (make_t5, ValueError, "model must be a causal .* the encoder-decoder T5ForConditionalGen"),
        (
            lambda: make_model("plain", "lfm2"),
            ValueError,
            "context must be 'recompute' for lfm2, got 'cache': its ",
        ),
        (
            make_prompted,
            ValueError,
            "model's adapter must lie in its layers, got the prompt method PROMPT_TUNING: use",
        ),
    ],
    ids=["no model", "t5", "lfm2", "prompt"],
)
def test_models_that_cannot_be_read_are_named(make, error, message):
    model = make()
    with pytest.raises(error, match=f"^{message}"):
        TestTimeTrainer(model, **SETTINGS, context="cache")


def test_a_model_that_cannot_have_a_cache_is_read_without_one():
    assert list(TestTimeTrainer(make_model("plain", "lfm2"), **SETTINGS).read(make_ids(20)))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_merged_memory_cannot_learn(kind):
    trainer = make_trainer(kind)
    read(trainer, make_ids(24))
    trainer.rewind()
    trainer.model.merge_adapter()
    message = "^model must not have its adapter merged .* call unmerge_adapter\\(\\) first$"
    with pytest.raises(ValueError, match=message):
        trainer.read(make_ids(24))
    trainer.model.unmerge_adapter()
    assert list(trainer.read(make_ids(24)))


def test_switching_adapters_halfway_is_named():
    trainer = make_trainer("lora")
    reading = trainer.read(make_ids(24))
    next(reading)
    trainer.model.add_adapter("other", LoraConfig(r=2, target_modules="all-linear"))
    trainer.model.set_adapter("other")
    message = "^model must train the same parameters .*: make a new TestTimeTrainer after switching"
    with pytest.raises(ValueError, match=message):
        next(reading)
