from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from families import FAMILIES, VOCABULARY, make_host
from peft import LoraConfig, PromptTuningConfig, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import locas_peft
from locas_peft import LocasConfig, checkpoint
from locas_peft.text import python_reference, tokenize, unwrap
from locas_peft.ttt import Chunk, TestTimeTrainer, read_many, token_losses
from locas_peft.ttt import losses as losses_module
from locas_peft.ttt import trainer as trainer_module

KINDS = ("plain", "lora", "locas")
CONTEXTS = ("recompute", "cache")
SETTINGS = {"window": 16, "stride": 8, "learning_rate": 0.02}


def make_model(kind: str, family: str = "llama", **options) -> torch.nn.Module:
    host = make_host(family)
    torch.manual_seed(1)
    if kind == "lora":
        config = {"r": 4, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        return get_peft_model(host, LoraConfig(**config | options))
    if kind == "locas":
        return get_peft_model(host, LocasConfig(**{"r": 4, "scaling": 16.0} | options))
    return host


def make_trainer(kind: str = "locas", **settings) -> TestTimeTrainer:
    return TestTimeTrainer(make_model(kind), **SETTINGS | settings)


def make_ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_weights(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def without_time(chunks: list[Chunk]) -> list[tuple]:
    return [(c.index, c.start, c.stop, c.tokens, c.nll_nats, c.learned) for c in chunks]


@torch.no_grad()
def read_by_hand(model, ids, window, stride) -> list[float]:
    """The protocol in its plainest form: feed context and chunk whole, pick out the chunk's own tokens."""
    nlls = []
    for start in range(0, len(ids), stride):
        begin = max(0, start - max(window - stride, 1))
        piece = ids[begin : start + stride]
        log_probabilities = model(piece.unsqueeze(0)).logits[0, :-1].double().log_softmax(-1)
        losses = -log_probabilities.gather(1, piece[1:].unsqueeze(1)).squeeze(1)
        nlls.append(losses[max(start, 1) - begin - 1 :].sum().item())
    return nlls


# What is read, and how it is scored


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("window", "stride"), [(16, 8), (16, 16), (16, 15), (9, 1), (1, 1), (64, 5)])
@pytest.mark.parametrize("length", [2, 8, 9, 16, 17, 50])
def test_every_token_but_the_first_is_scored_once(length, window, stride, context):
    trainer = TestTimeTrainer(make_model("plain"), window=window, stride=stride, learning_rate=None, context=context)
    chunks = list(trainer.read(make_ids(length)))
    assert chunks == trainer.chunks
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.start for chunk in chunks] == list(range(0, length, stride))
    assert [chunk.stop for chunk in chunks] == [*range(stride, length, stride), length]
    assert all(chunk.tokens == chunk.stop - max(chunk.start, 1) for chunk in chunks)
    assert sum(chunk.tokens for chunk in chunks) == length - 1
    assert trainer.position == length
    assert list(trainer.read(make_ids(length))) == []


@pytest.mark.parametrize(("window", "stride"), [(16, 8), (16, 16), (9, 1), (1, 1), (64, 5)])
def test_scores_are_those_of_the_protocol(window, stride):
    model, ids = make_model("plain"), make_ids(50)
    trainer = TestTimeTrainer(model, window=window, stride=stride, learning_rate=None)
    expected = read_by_hand(model, ids, window, stride)
    assert [chunk.nll_nats for chunk in trainer.read(ids)] == pytest.approx(expected, rel=1e-5)
    assert trainer.perplexity == pytest.approx(math.exp(sum(expected) / 49), rel=1e-5)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "lfm2"])
def test_cache_gives_the_scores_of_recompute_where_the_text_fits_in_a_window(family):
    model, ids = make_model("plain", family), make_ids(40)
    recompute, cache = (
        [
            chunk.nll_nats
            for chunk in TestTimeTrainer(model, window=48, stride=7, learning_rate=None, context=c).read(ids)
        ]
        for c in CONTEXTS
    )
    assert cache == pytest.approx(recompute, rel=1e-4)


@pytest.mark.parametrize(
    ("config", "attention"),
    [(tf.LlamaConfig, "sdpa"), (tf.LlamaConfig, "eager"), (tf.MistralConfig, "sdpa"), (tf.Gemma2Config, "eager")],
    ids=["full", "full, eager", "sliding", "sliding, eager"],
)
def test_cache_gives_the_scores_of_recompute_over_many_windows(config, attention):
    """With one layer, keys and values depend on nothing but their token: then both are the same at any length."""
    options = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
    sliding = {} if config is tf.LlamaConfig else {"sliding_window": 5}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config(
            **options, **sliding, vocab_size=VOCABULARY, num_hidden_layers=1, max_position_embeddings=64, head_dim=8
        ),
        attn_implementation=attention,
    ).eval()
    ids = make_ids(400)
    recompute, cache = (
        [chunk.nll_nats for chunk in TestTimeTrainer(model, **SETTINGS, context=context).read(ids)]
        for context in CONTEXTS
    )
    assert cache == pytest.approx(recompute, rel=1e-5)


def test_cache_and_recompute_are_close_on_the_embedded_backbone():
    folder = Path(locas_peft.__file__).parent / "backbone"
    ids = tokenize(AutoTokenizer.from_pretrained(folder), unwrap(python_reference()), 2500)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    perplexities = []
    for context in CONTEXTS:
        trainer = TestTimeTrainer(model, window=512, stride=256, learning_rate=None, context=context)
        for _ in trainer.read(ids):
            pass
        perplexities.append(trainer.perplexity)
    assert perplexities[1] == pytest.approx(perplexities[0], rel=5e-3)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_positions_stay_within_the_model_over_any_length(family):
    model, seen = make_model("plain", family), []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True)
    trainer = TestTimeTrainer(model, **SETTINGS, context="cache")
    assert all(math.isfinite(chunk.nll_nats) for chunk in trainer.read(make_ids(300)))
    positions = [(position[0, 0].item(), position[0, -1].item()) for position in seen]
    assert max(last for _, last in positions) <= 63
    # 0..6, then eight at a time up to 62; 70 would be beyond: seven tokens of context are read afresh, and so on.
    assert positions[:11] == [(0, 6), *((7 + 8 * k, 14 + 8 * k) for k in range(7)), (0, 6), (7, 14), (15, 22)]


@pytest.mark.parametrize("context", CONTEXTS)
def test_logits_are_made_for_the_scored_tokens_only(context):
    model, rows = make_model("lora"), []
    model.get_base_model().lm_head.register_forward_hook(lambda _, args, output: rows.append(output.shape[1]))
    for _ in TestTimeTrainer(model, **SETTINGS, context=context).read(make_ids(30)):
        pass
    assert rows == [7, 8, 8, 6]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_a_chunk_do_not_depend_on_later_tokens(kind, context):
    ids, other = make_ids(40), make_ids(40, seed=1)
    mixed = torch.cat([ids[:24], other[24:]])
    first, second = (
        [chunk.nll_nats for chunk in make_trainer(kind, context=context, epochs=2).read(text)] for text in (ids, mixed)
    )
    assert first[:3] == second[:3]
    assert first[3] != second[3]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("kind", ["lora", "locas"])
def test_the_first_chunk_of_a_fresh_adapter_scores_as_the_base_does(kind, context):
    ids = make_ids(40)
    base, adapted = (
        [chunk.nll_nats for chunk in make_trainer(which, context=context).read(ids)] for which in ("plain", kind)
    )
    assert adapted[0] == base[0]
    assert adapted[1:] != base[1:]


def test_a_memory_is_calibrated_on_the_first_chunk_alone(monkeypatch):
    seen, calibrate = [], trainer_module.calibrate
    replacement = lambda model, batches: (seen.extend(batches), calibrate(model, batches))  # noqa: E731
    monkeypatch.setattr(trainer_module, "calibrate", replacement)
    ids, trainer = make_ids(40), make_trainer("locas")
    assert list(trainer.read(ids))
    assert len(seen) == 1 and torch.equal(seen[0], ids[:8].unsqueeze(0))


@pytest.mark.parametrize("shape", ["[1, T]", "int32", "requires a copy"])
def test_other_shapes_and_integers_are_read_alike(shape):
    ids = make_ids(20)
    given = {"[1, T]": ids.unsqueeze(0), "int32": ids.int(), "requires a copy": ids.repeat_interleave(2)[::2]}[shape]
    assert without_time(make_trainer().read(given)) == without_time(make_trainer().read(ids))


# Learning


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("kind", ["lora", "locas"])
def test_learning_lowers_the_perplexity_of_a_text_that_repeats(kind, context):
    ids = make_ids(64).repeat(6)  # the period is four windows: nothing but the memory can know it
    plain, trainer = (
        make_trainer("plain", context=context),
        make_trainer(kind, context=context, learning_rate=0.05 if kind == "locas" else 0.01),
    )
    for reader in (plain, trainer):
        for _ in reader.read(ids):
            pass
    assert trainer.perplexity < 0.9 * plain.perplexity
    assert trainer.skipped_chunks == 0 and all(chunk.learned for chunk in trainer.chunks)


@pytest.mark.parametrize("context", CONTEXTS)
def test_one_step_follows_the_gradient_of_the_chunks_mean_loss(context):
    ids, model = make_ids(8), make_model("lora")
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    loss = F.cross_entropy(model(ids[:-1].unsqueeze(0)).logits[0], ids[1:])
    loss.backward()
    expected = {name: before[name] - 0.5 * p.grad for name, p in model.named_parameters() if p.requires_grad}

    settings = SETTINGS | {"learning_rate": 0.5, "optimizer": "sgd", "warmup_steps": 0, "context": context}
    (chunk,) = TestTimeTrainer(model, **settings).read(ids)
    assert chunk.nll_nats / chunk.tokens == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(parameter, expected[name], atol=1e-6)
            assert parameter.grad is None


needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


@pytest.mark.parametrize(
    "optimizer", ["adamw", "adam", "sgd", pytest.param("muon", marks=needs_muon), torch.optim.Adagrad]
)
def test_each_optimizer_changes_the_memory_and_nothing_else(optimizer):
    model = make_model("locas")
    rate = None if callable(optimizer) else 0.1
    trainer = TestTimeTrainer(model, window=16, stride=8, learning_rate=rate, optimizer=optimizer)
    reading = trainer.read(make_ids(24))
    next(reading)
    before = weights_of(model)
    list(reading)
    changed = {name for name, value in weights_of(model).items() if not torch.equal(value, before[name])}
    assert changed and changed == {name for name, p in model.named_parameters() if p.requires_grad}


def test_the_rate_warms_up_step_by_step_and_each_epoch_is_a_step():
    rates, optimizers = [], []

    def make(parameters):
        optimizers.append(torch.optim.SGD([{"params": parameters[:2], "lr": 3.0}, {"params": parameters[2:]}], lr=6.0))
        optimizers[0].register_step_pre_hook(lambda o, *_: rates.append([group["lr"] for group in o.param_groups]))
        return optimizers[0]

    settings = SETTINGS | {"learning_rate": None, "optimizer": make, "epochs": 2, "max_grad_norm": 1e-3}
    list(TestTimeTrainer(make_model("lora"), **settings).read(make_ids(16)))
    assert len(optimizers) == 1
    assert rates == [[1.0, 2.0], [2.0, 4.0], [3.0, 6.0], [3.0, 6.0]]


def test_a_maximal_norm_bounds_the_step():
    model, settings = make_model("lora"), {"learning_rate": 1.0, "optimizer": "sgd", "warmup_steps": 0}
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    list(TestTimeTrainer(model, **SETTINGS | settings, max_grad_norm=1e-3).read(make_ids(8)))
    moved = torch.stack([(p - before[name]).norm() for name, p in model.named_parameters() if name in before]).norm()
    assert moved.item() == pytest.approx(1e-3, rel=1e-2)


def test_a_plain_model_is_only_read():
    model, graphs = make_model("plain").train(), []
    model.register_forward_hook(lambda _, args, output: graphs.append(output.logits.requires_grad))
    before = weights_of(model)
    chunks = list(TestTimeTrainer(model, **SETTINGS).read(make_ids(20)))
    assert_same_weights(weights_of(model), before)
    assert not any(graphs) and not any(chunk.learned for chunk in chunks)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["lora", "locas"])
def test_a_disabled_adapter_is_neither_used_nor_changed(kind):
    ids, model = make_ids(20), make_model(kind)
    before = weights_of(model)
    with model.disable_adapter():
        chunks = list(TestTimeTrainer(model, **SETTINGS).read(ids))
    assert_same_weights(weights_of(model), before)
    assert without_time(chunks) == without_time(make_trainer("plain").read(ids))


def test_an_injected_adapter_learns():
    config = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"])
    wrapped = make_model("lora", target_modules=["q_proj", "v_proj"])
    host = make_host("llama")
    torch.manual_seed(1)
    injected = inject_adapter_in_model(config, host)
    first, second = (list(TestTimeTrainer(model, **SETTINGS).read(make_ids(40))) for model in (wrapped, injected))
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
        if name and "locas_" not in name and not name.endswith("act_fn"):  # parts of the memory, and what it calls
            module.register_forward_hook(lambda _, args, output, name=name: watch(name, output))
    return in_graph, reached


@pytest.mark.parametrize("reader", ["one document", "many"])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("lowest", [0, 1])
def test_no_gradient_is_computed_below_the_lowest_memory(lowest, context, reader):
    model = make_model("locas", layers_to_transform=[lowest])
    in_graph, reached = watch_gradients(model)
    ids = make_ids(40)
    if reader == "many":
        records = [r["x"] for r in read_many(model, {"x": ids, "y": ids.flip(0)}, **SETTINGS, context=context)]
    else:
        records = list(TestTimeTrainer(model, **SETTINGS, context=context).read(ids))
    assert len(records) == 5 and all(chunk.learned for chunk in records)

    # In the lowest layer that has one, only what follows the memory: neither its attention nor the host's own FFN.
    expected = {f"model.layers.{lowest}", f"model.layers.{lowest}.mlp", "model.norm", "lm_head"}
    above = {
        name
        for name, _ in model.get_base_model().named_modules()
        if name.startswith("model.layers.1.") and lowest == 0
    }
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


@pytest.mark.parametrize("kind", ["lora", "locas"])
def test_a_bfloat16_base_teaches_an_adapter_in_float32(kind):
    host = make_host("llama", torch.bfloat16)
    config = LocasConfig(r=4) if kind == "locas" else LoraConfig(r=4, target_modules="all-linear")
    model = get_peft_model(host, config)
    trainer = TestTimeTrainer(model, **SETTINGS, context="cache")
    assert all(chunk.learned and math.isfinite(chunk.nll_nats) for chunk in trainer.read(make_ids(80)))
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}


def test_stopping_and_going_on_is_the_same_as_reading_through():
    ids, whole, parted = make_ids(60), make_trainer(context="cache"), make_trainer(context="cache")
    list(whole.read(ids))
    for chunk in parted.read(ids):
        if chunk.index == 2:
            break
    assert parted.position == 24
    list(parted.read(ids))
    assert without_time(parted.chunks) == without_time(whole.chunks)
    assert_same_weights(weights_of(parted.model), weights_of(whole.model))


def test_rewind_reads_again_with_what_was_learned():
    ids, trainer = make_ids(64), make_trainer("lora", context="cache", learning_rate=0.05)
    list(trainer.read(ids))
    first = trainer.perplexity
    trainer.rewind()
    assert trainer.chunks == [] and trainer.position == 0 and math.isnan(trainer.perplexity)
    list(trainer.read(ids))
    assert trainer.perplexity < first
    trainer.rewind()
    list(trainer.read(make_ids(30, seed=1)))
    assert trainer.position == 30


# Losses and gradients that are not finite


def spoil(model, token: int) -> None:
    """Makes every prediction after a token nan."""
    embeddings = model.get_input_embeddings()
    with torch.no_grad():
        embeddings.weight[token] = math.nan


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("kind", ["lora", "locas"])
def test_a_loss_that_is_not_finite_leaves_the_memory_as_it_was(kind, context, epochs):
    ids = make_ids(64)
    ids[ids == 7] = 8
    ids[20] = 7
    trainer = make_trainer(kind, context=context, epochs=epochs)
    spoil(trainer.model, 7)
    memory = None
    for chunk in trainer.read(ids):
        if not chunk.learned:
            assert math.isnan(chunk.nll_nats)
            assert_same_weights(get_peft_model_state_dict(trainer.model), memory)
        memory = {name: value.clone() for name, value in get_peft_model_state_dict(trainer.model).items()}
        assert all(bool(value.isfinite().all()) for value in memory.values())
    # Token 20 lies in chunk 2 and in the context of chunk 3.
    assert [chunk.index for chunk in trainer.chunks if not chunk.learned] == [2, 3]
    assert [chunk.index for chunk in trainer.chunks if not math.isfinite(chunk.nll_nats)] == [2, 3]
    assert trainer.skipped_chunks == 2
    assert math.isnan(trainer.perplexity)


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_a_gradient_that_is_not_finite_leaves_memory_and_optimizer_as_they_were(fails_at):
    """Two epochs a chunk: the step before the failing one, of the same chunk, is undone too."""
    model = make_model("lora")
    trainer = TestTimeTrainer(model, **SETTINGS, epochs=2)
    parameter = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    calls = []

    def hook(gradient):
        calls.append(1)
        return gradient * math.nan if len(calls) == fails_at else gradient

    handle = parameter.register_hook(hook)
    skipped = (fails_at - 1) // 2
    reading = trainer.read(make_ids(40))
    before = weights_of(model)
    for _ in range(skipped + 1):
        before = weights_of(model)
        chunk = next(reading)
    assert not chunk.learned and math.isfinite(chunk.nll_nats) and trainer.skipped_chunks == 1
    assert_same_weights(weights_of(model), before)
    handle.remove()

    # As if the chunk had been scored and never learned: the same weights and the same optimizer go on.
    chunk = next(reading)
    assert chunk.learned
    state = trainer._learner.optimizer.state_dict()["state"]
    assert {entry["step"].item() for entry in state.values()} == {2 * (skipped + 1)}


# Checkpoints


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("locas", {"context": "cache"}),
        pytest.param("locas", {"context": "recompute", "optimizer": "muon"}, marks=needs_muon),
        ("lora", {"context": "cache", "epochs": 2, "max_grad_norm": 1.0, "weight_decay": 0.1}),
        ("lora", {"optimizer": "sgd"}),
        ("plain", {"context": "cache"}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value.values())),
)
@pytest.mark.parametrize("read", [0, 1, 9])
def test_a_resumed_run_ends_bit_for_bit_as_one_that_was_never_stopped(tmp_path, kind, settings, read):
    ids = make_ids(120)
    whole = make_trainer(kind, **settings)
    chunks = whole.read(ids)
    if kind == "locas" and read == 0:
        read = 2
    for _ in range(read):
        next(chunks)
    whole.save(tmp_path)
    list(chunks)

    torch.manual_seed(99)
    resumed = make_trainer(kind, **settings)
    assert resumed.resume(tmp_path)
    assert resumed.position == 8 * read and resumed.chunks == whole.chunks[:read]
    list(resumed.read(ids))
    assert without_time(resumed.chunks) == without_time(whole.chunks)
    assert_same_weights(weights_of(resumed.model), weights_of(whole.model))
    if kind == "locas":
        assert resumed.model.peft_config["default"].slots == whole.model.peft_config["default"].slots is not None


def test_resume_takes_up_the_random_state(tmp_path):
    make_trainer("plain").save(tmp_path)
    expected = torch.rand(4)
    torch.manual_seed(5)
    trainer = make_trainer("plain")
    assert trainer.resume(tmp_path)
    assert torch.equal(torch.rand(4), expected)


def test_resume_counts_skipped_chunks_and_keeps_records_of_nan(tmp_path):
    trainer = make_trainer("lora")
    spoil(trainer.model, 7)
    ids = torch.full((24,), 7)
    list(trainer.read(ids))
    trainer.save(tmp_path)
    resumed = make_trainer("lora")
    spoil(resumed.model, 7)
    assert resumed.resume(tmp_path)
    assert resumed.skipped_chunks == 3 and math.isnan(resumed.chunks[0].nll_nats)


def test_trained_weights_outside_the_adapter_are_saved_too(tmp_path):
    def make():
        trainer = make_trainer("lora")
        trainer.model.get_base_model().model.norm.weight.requires_grad_(True)
        return trainer

    whole = make()
    list(whole.read(make_ids(24)))
    whole.save(tmp_path)
    resumed = make()
    assert resumed.resume(tmp_path)
    assert_same_weights(weights_of(resumed.model), weights_of(whole.model))


def test_resume_without_a_checkpoint_changes_nothing(tmp_path):
    trainer = make_trainer()
    assert not trainer.resume(tmp_path / "missing")
    assert not trainer.resume(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system cannot kill a process outright")
def test_a_killed_process_is_continued_bit_for_bit(tmp_path):
    folder = Path(__file__).parent
    program = f"""
        import sys
        sys.path.insert(0, {str(folder)!r})
        from test_ttt import make_ids, make_trainer
        trainer = make_trainer("locas", context="cache", epochs=2)
        for chunk in trainer.read(make_ids(4000)):
            trainer.save({str(tmp_path)!r})
            print(chunk.index, flush=True)
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        for line in process.stdout:
            if int(line) == 5:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL

    ids = make_ids(4000)
    whole, resumed = (make_trainer("locas", context="cache", epochs=2) for _ in range(2))
    assert resumed.resume(tmp_path)
    assert 5 < len(resumed.chunks) < 400
    end = len(resumed.chunks) + 4
    for trainer in (whole, resumed):
        for chunk in trainer.read(ids):
            if chunk.index == end:
                break
    assert without_time(resumed.chunks) == without_time(whole.chunks)
    assert_same_weights(weights_of(resumed.model), weights_of(whole.model))


def test_what_was_learned_survives_a_save_that_fails(tmp_path, monkeypatch):
    ids, whole, trainer = make_ids(40), make_trainer("lora"), make_trainer("lora")
    list(whole.read(ids))
    for chunk in trainer.read(ids):
        with monkeypatch.context() as patch:
            patch.setattr(
                checkpoint, "save_file", lambda *a, **k: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
            )
            if chunk.index == 2:
                with pytest.raises(OSError, match=r"^checkpoint folder must be writable, got .* \(full\): free some"):
                    trainer.save(tmp_path)
    assert without_time(trainer.chunks) == without_time(whole.chunks)
    trainer.save(tmp_path)
    assert os.listdir(tmp_path) == ["checkpoint.safetensors"]


@pytest.mark.skipif(checkpoint.fcntl is None, reason="this system has no flock")
def test_a_folder_is_locked_while_it_is_written_to_and_free_afterwards(tmp_path):
    ids, first, second = make_ids(24), make_trainer("plain"), make_trainer("plain")
    message = (
        f"^checkpoint folder must have one writer, got '{tmp_path}' which process {os.getpid()} is using: "
        "wait for it, or choose another folder$"
    )
    for _ in first.read(ids):
        first.save(tmp_path)
        with pytest.raises(ValueError, match=message):
            second.save(tmp_path)
        with pytest.raises(ValueError, match=message):
            second.resume(tmp_path)
    assert second.resume(tmp_path)
    with pytest.raises(ValueError, match=message):
        first.save(tmp_path)
    list(second.read(ids))
    first.save(tmp_path)
    assert os.listdir(tmp_path) == ["checkpoint.safetensors"]


@pytest.mark.skipif(checkpoint.fcntl is None, reason="this system has no flock")
def test_a_held_folder_stays_locked_until_the_outermost_ends_and_the_reading_too(tmp_path):
    def is_locked() -> bool:
        try:
            checkpoint.Lock(tmp_path).release()
        except checkpoint.InUse:
            return True
        return False

    ids, trainer = make_ids(40), make_trainer("plain")
    with trainer.holding(tmp_path):
        with trainer.holding(tmp_path):
            pass
        for _ in trainer.read(ids):
            assert is_locked()
        assert is_locked()
    assert not is_locked()
    trainer.rewind()
    reading = trainer.read(ids)
    next(reading)
    trainer.save(tmp_path)
    with trainer.holding(tmp_path):
        pass
    assert is_locked()
    reading.close()
    assert not is_locked()


@pytest.mark.skipif(checkpoint.fcntl is None, reason="this system has no flock")
def test_an_abandoned_reading_does_not_unlock_the_one_that_follows(tmp_path):
    ids, trainer = make_ids(40), make_trainer("plain")
    former = trainer.read(ids)
    next(former)
    later = trainer.read(ids)
    next(later)
    trainer.save(tmp_path)
    former.close()
    with pytest.raises(ValueError, match="^checkpoint folder must have one writer"):
        checkpoint.Lock(tmp_path)
    later.close()
    checkpoint.Lock(tmp_path).release()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 24}, "window must be 16 as in the checkpoint in '{}', got 24: give the former value, or choose"),
        ({"stride": 4}, "stride must be 8 as in the checkpoint in '{}', got 4: give the former value, or choose"),
        ({"context": "cache"}, "context must be 'recompute' as in the checkpoint in '{}', got 'cache': give the"),
        ({"optimizer": "sgd"}, "optimizer must be 'adamw' as in the checkpoint in '{}', got 'sgd': give the former"),
        ({"r": 8}, "adapter 'default': r must be 4 as in the checkpoint in '{}', got 8: give the former value, or"),
        ({"family": "qwen2"}, "model must be the one of the checkpoint in '{}', got other base weights: load that"),
        ({"kind": "plain"}, "active adapters must be ['default'] as in the checkpoint in '{}', got []: activate"),
        ({"spoiled": True}, "model must be the one of the checkpoint in '{}', got other base weights: load that"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, change, message):
    trainer = make_trainer("lora")
    list(trainer.read(make_ids(24)))
    trainer.save(tmp_path)

    change = dict(change)
    options = {"r": change.pop("r")} if "r" in change else {}
    model = make_model(change.pop("kind", "lora"), change.pop("family", "llama"), **options)
    if change.pop("spoiled", False):
        spoil(model, 0)
    other = TestTimeTrainer(model, **SETTINGS | change)
    before = weights_of(model)
    with pytest.raises(ValueError) as caught:
        other.resume(tmp_path)
    assert str(caught.value).startswith(message.format(tmp_path)) and "\n" not in str(caught.value)
    assert other.position == 0
    after = weights_of(model)
    assert all(torch.equal(after[name], value) or value.isnan().any() for name, value in before.items())
    assert os.listdir(tmp_path) == ["checkpoint.safetensors"]


def test_another_text_is_refused(tmp_path):
    ids, other = make_ids(24), make_ids(24, seed=1)
    trainer = make_trainer("plain")
    next(trainer.read(ids))
    message = "input_ids must be the document begun {} (sha256 {}), got another one ({}): {}"
    digest, other_digest = (hashlib.sha256(text.numpy().tobytes()).hexdigest()[:12] for text in (ids, other))
    with pytest.raises(ValueError) as caught:
        trainer.read(other)
    remedy = "call rewind() first, or make a new TestTimeTrainer"
    assert str(caught.value) == message.format("here", digest, other_digest, remedy)

    trainer.save(tmp_path)
    resumed = make_trainer("plain")
    resumed.resume(tmp_path)
    with pytest.raises(ValueError) as caught:
        resumed.read(other)
    remedy = "give that text, or choose another folder"
    assert str(caught.value) == message.format(f"in {str(tmp_path)!r}", digest, other_digest, remedy)


@pytest.mark.parametrize(
    "tamper",
    [
        lambda tensors, state: state.pop("position"),
        lambda tensors, state: state.update(position="x"),
        lambda tensors, state: state.update(position=3),
        lambda tensors, state: state.update(steps="x"),
        lambda tensors, state: state.update(chunks=[1]),
        lambda tensors, state: state.update(cache_layers=9),
        lambda tensors, state: state["optimizer"].update(param_groups=[{}]),
        lambda tensors, state: tensors.update({"cache/1/values": torch.zeros(3, 5)}),
        lambda tensors, state: tensors.update({"optimizer/5/exp_avg": torch.zeros(3, 5)}),
        lambda tensors, state: tensors.pop("random/cpu"),
        lambda tensors, state: tensors.update(
            {"parameter/base_model.model.model.embed_tokens.weight": torch.zeros(VOCABULARY, 16)}
        ),
    ],
)
def test_a_tampered_checkpoint_is_refused_and_changes_nothing(tmp_path, tamper):
    ids = make_ids(32)
    trainer = make_trainer(context="cache")
    next(trainer.read(ids))
    trainer.save(tmp_path)
    tensors, state = checkpoint.read(tmp_path)
    tamper(tensors, state)
    checkpoint.write(tmp_path, tensors, state)
    fresh = make_trainer(context="cache")
    before, config = weights_of(fresh.model), fresh.model.peft_config["default"].to_dict()
    with pytest.raises(
        ValueError, match="^checkpoint must be whole, got the damaged file .*: delete it to start afresh$"
    ):
        fresh.resume(tmp_path)
    assert_same_weights(weights_of(fresh.model), before)
    assert fresh.model.peft_config["default"].to_dict() == config
    assert (fresh.position, fresh.chunks, fresh._learner.optimizer) == (0, [], None)
    assert len(list(fresh.read(ids))) == 4


def test_a_checkpoint_holds_tensors_and_json_only(tmp_path):
    trainer = make_trainer("locas", context="cache")
    list(trainer.read(make_ids(24)))
    tensors, state = checkpoint.read(trainer.save(tmp_path).parent)
    assert json.loads(json.dumps(state)) == state
    assert {name.split("/")[0] for name in tensors} == {"adapter", "optimizer", "cache", "random"}


# The loss


@pytest.mark.parametrize("piece", [1, 3 * 50, 2**23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_token_losses_are_those_of_cross_entropy_at_any_piece_size(monkeypatch, piece, dtype):
    monkeypatch.setattr(losses_module, "PIECE", piece)
    generator = torch.Generator().manual_seed(0)
    logits = (10 * torch.randn(10, 50, generator=generator)).to(dtype).requires_grad_()
    targets, weights = torch.randint(0, 50, (10,), generator=generator), torch.randn(10, generator=generator)
    losses = token_losses(logits, targets)
    (losses * weights).sum().backward()
    gradient, logits.grad = logits.grad, None
    expected = F.cross_entropy(logits.to(losses.dtype), targets, reduction="none")
    (expected * weights).sum().backward()
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert gradient.dtype == dtype
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(gradient, logits.grad)


# Errors


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"stride": 0}, ValueError, "stride must be at least 1, got 0: raise it"),
        ({"stride": 8.0}, TypeError, "stride must be an int, got float: give a whole number"),
        ({"window": True}, TypeError, "window must be an int, got bool: give a whole number"),
        ({"epochs": 0}, ValueError, "epochs must be at least 1, got 0: raise it"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps must be at least 0, got -1: raise it"),
        (
            {"stride": 17},
            ValueError,
            "stride must be at most window, got stride 17 with window 16: lower stride or raise window",
        ),
        (
            {"window": 65},
            ValueError,
            "window must be within the model's 64 positions, got 65: lower window, and stride with it",
        ),
        (
            {"context": "whole"},
            ValueError,
            "context must be 'recompute' or 'cache', got 'whole': choose one of the two",
        ),
        (
            {"optimizer": "adamax"},
            ValueError,
            "optimizer must be one of adamw, adam, sgd, muon, or a callable that takes the parameters, got 'adamax': "
            "choose one of them",
        ),
        (
            {"learning_rate": 0.0},
            ValueError,
            "learning_rate must be a number above 0, got 0.0: give one, 1e-3 say; "
            "to read without learning, give the model without its adapter",
        ),
        (
            {"learning_rate": math.nan},
            ValueError,
            "learning_rate must be a number above 0, got nan: give one, 1e-3 say; "
            "to read without learning, give the model without its adapter",
        ),
        (
            {"learning_rate": None},
            ValueError,
            "learning_rate must be a number above 0 where an adapter is trained, got None: give one, 1e-3 say",
        ),
        (
            {"weight_decay": -0.1},
            ValueError,
            "weight_decay must be 0 or a number above, got -0.1: give 0 for none",
        ),
        (
            {"max_grad_norm": 0.0},
            ValueError,
            "max_grad_norm must be above 0, got 0.0: give None for no clipping",
        ),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_settings_are_checked_at_construction(settings, error, message):
    with pytest.raises(error) as caught:
        make_trainer("lora", **settings)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("input_ids", "error", "message"),
    [
        (
            [1, 2],
            TypeError,
            "input_ids must be a LongTensor of shape [T] or [1, T], got list: make one with torch.tensor",
        ),
        (
            torch.zeros(4),
            TypeError,
            "input_ids must be integers, got torch.float32: give token ids as a LongTensor",
        ),
        (
            torch.zeros(2, 4, dtype=torch.long),
            ValueError,
            "input_ids must have the shape [T] or [1, T], got [2, 4]: give one document at a time",
        ),
        (
            torch.tensor(3),
            ValueError,
            "input_ids must have the shape [T] or [1, T], got []: give one document at a time",
        ),
        (torch.tensor([3]), ValueError, "input_ids must hold at least 2 tokens, got 1: give a longer text"),
        (
            torch.tensor([3, 64]),
            ValueError,
            "input_ids must lie in [0, 64), the model's vocabulary, got 64: use the model's own tokenizer",
        ),
        (
            torch.tensor([-1, 3]),
            ValueError,
            "input_ids must lie in [0, 64), the model's vocabulary, got -1: use the model's own tokenizer",
        ),
    ],
    ids=["list", "floats", "batch", "scalar", "one token", "beyond", "negative"],
)
def test_documents_are_checked_at_the_call(input_ids, error, message):
    with pytest.raises(error) as caught:
        make_trainer("plain").read(input_ids)
    assert str(caught.value) == message


def test_models_that_cannot_be_read_are_named():
    with pytest.raises(TypeError) as caught:
        TestTimeTrainer(torch.nn.Linear(2, 2), **SETTINGS)
    assert str(caught.value) == (
        "model must be a transformers causal language model, got Linear: load one with AutoModelForCausalLM"
    )
    with pytest.raises(ValueError) as caught:
        TestTimeTrainer(make_model("plain", "lfm2"), **SETTINGS, context="cache")
    assert str(caught.value) == (
        "context must be 'recompute' for lfm2, got 'cache': "
        "its layers keep more than keys and values that could slide with the text"
    )
    assert list(TestTimeTrainer(make_model("plain", "lfm2"), **SETTINGS).read(make_ids(20)))
    prompt = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(ValueError) as caught:
        TestTimeTrainer(get_peft_model(make_host("llama"), prompt), **SETTINGS)
    assert str(caught.value) == (
        "model's adapter must lie in its layers, got the prompt method PROMPT_TUNING: "
        "use LOCAS, LoRA or another adapter made of weights"
    )


@pytest.mark.parametrize("kind", ["lora", "locas"])
def test_a_merged_memory_cannot_learn(kind):
    trainer = make_trainer(kind)
    list(trainer.read(make_ids(24)))
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


@needs_muon
def test_muon_takes_matrices_only():
    model = make_model("lora")
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError) as caught:
        list(TestTimeTrainer(model, **SETTINGS, optimizer="muon").read(make_ids(8)))
    assert str(caught.value) == (
        "optimizer 'muon' must have matrices only, got a parameter of shape (16,): use 'adamw'"
    )


def test_muon_needs_a_torch_that_has_it(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ValueError) as caught:
        list(make_trainer("lora", optimizer="muon").read(make_ids(8)))
    assert str(caught.value) == (
        f"optimizer 'muon' must have torch 2.9 or later, got {torch.__version__}: use 'adamw'"
    )
