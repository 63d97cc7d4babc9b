"""A compiled reading has the figures of a plain one, to rounding; what cannot be compiled says so in one line."""

import logging
from functools import partial

import pytest
import torch
from compiling import COMPILES
from families import FAMILIES, make_host
from peft import LoraConfig
from torch import _dynamo as dynamo
from training import make_ids, make_model, read, trained_weights, without_time
from transformers import AutoModelForCausalLM, FalconConfig

from locas_peft import SlotWriter, TestTimeTrainer
from locas_peft.model import CausalLM, compiled
from locas_peft.model.causal_lm import find_cache
from locas_peft.ttt import Anchor
from locas_peft.ttt.cache import SlidingCache

SETTINGS = {"window": 16, "stride": 8, "learning_rate": 0.02, "context": "cache"}
pytestmark = COMPILES


def make_trainer(kind="locas", is_compiled=True, anchored=False, **settings) -> TestTimeTrainer:
    anchor = Anchor(torch.stack([make_ids(12, seed) for seed in (5, 6)]), every=2)
    return TestTimeTrainer(
        make_model(kind),
        **SETTINGS | settings,
        steps=[anchor] if anchored else [],
        compiled=is_compiled,
    )


def check_same(kind: str, anchored: bool, context: str, caplog) -> None:
    trainers = []
    for is_compiled in (False, True):
        # At a higher rate rounding grows tenfold with each chunk of so small a model.
        options = {"context": context, "learning_rate": 0.002}
        trainers.append(make_trainer(kind, is_compiled, anchored, **options))
        read(trainers[-1], make_ids(60))
    plain, other = trainers
    assert other.host.is_compiled, caplog.text
    for one, two in zip(without_time(plain.chunks), without_time(other.chunks), strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    weights = trained_weights(other.model)
    for name, weight in trained_weights(plain.model).items():
        assert (weights[name] - weight).norm() <= 0.01 * weight.norm()


@pytest.mark.parametrize(
    ("kind", "anchored", "context"),
    [
        ("locas", True, "cache"),
        pytest.param("lora", False, "cache", marks=pytest.mark.slow),
        pytest.param("locas", False, "recompute", marks=pytest.mark.slow),
    ],
)
def test_a_traced_reading_has_the_same_figures(kind, anchored, context, traced, caplog):
    check_same(kind, anchored, context, caplog)


@pytest.mark.slow
def test_a_compiled_reading_has_the_same_figures(caplog):
    check_same("locas", True, "cache", caplog)


def test_chunks_share_one_graph_and_switched_adapters_have_the_figures_of_a_plain_reading(
    traced, monkeypatch
):
    monkeypatch.setattr(FAMILIES["llama"], "num_hidden_layers", 1)
    counts, nats = dynamo.utils.counters["stats"], []
    for is_compiled in (False, True):
        trainer = make_trainer(is_compiled=is_compiled)
        chunks = trainer.read(make_ids(60))
        next(chunks)
        next(chunks)
        graphs = counts["unique_graphs"]
        next(chunks)
        assert counts["unique_graphs"] == graphs
        with trainer.model.disable_adapter():
            scored = next(chunks)
        assert not scored.learned
        for name, parameter in trainer.model.named_parameters():
            # PEFT leaves them frozen.
            parameter.requires_grad_("locas_" in name)
        next(chunks)
        nats.append([chunk.nll_nats for chunk in trainer.chunks])
    assert graphs and nats[1] == pytest.approx(nats[0], rel=1e-4)


def make_falcon():
    config = FalconConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("make", [make_falcon, partial(make_host, "deepseek_v3")])
def test_an_empty_context_has_the_shapes_of_the_familys_keys_and_values(make):
    """Falcon has one head of them, DeepSeek keeps values of another size than keys."""
    host = CausalLM(make())
    cache = SlidingCache(host, keep=8, chunk=8)
    expected = find_cache(host.outputs(make_ids(7)[None], 1, use_cache=True)).layers
    shapes = [(keys.shape, values.shape) for keys, values in cache._make_empty(7)]
    assert shapes == [(layer.keys.shape, layer.values.shape) for layer in expected]


# What cannot be compiled


def read_with_warnings(trainer: TestTimeTrainer, caplog) -> list[str]:
    with caplog.at_level(logging.WARNING, logger="locas_peft"):
        assert len(read(trainer, make_ids(30))) == 4
    return [record.message for record in caplog.records if record.name.startswith("locas_peft")]


def test_a_compiler_that_fails_is_one_line(monkeypatch, caplog):
    def fail(graph, inputs):
        raise OSError("no C++ compiler")

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **_: compile_(model, backend=fail))
    trainer = make_trainer()
    (message,) = read_with_warnings(trainer, caplog)
    assert message.startswith("the model is not compiled: ") and "no C++ compiler" in message
    assert not trainer.host.is_compiled
    plain = read(make_trainer(is_compiled=False), make_ids(30))
    # The first chunk was padded.
    assert [chunk.nll_nats for chunk in trainer.chunks] == pytest.approx(plain, rel=1e-4)


def test_a_writer_is_not_compiled(caplog):
    model = make_model(family="gpt2", init_weights="write")
    settings = SETTINGS | {"learning_rate": None, "compiled": True}
    trainer = TestTimeTrainer(model, **settings, steps=[SlotWriter(model)])
    messages = read_with_warnings(trainer, caplog)
    assert messages == ["the model is not compiled: a writer records its layers"]


@pytest.mark.parametrize(
    ("family", "name", "value", "reason"),
    [
        ("mistral", "sliding_window", 8, "its attention has a sliding window"),
        (
            "llama",
            "_attn_implementation",
            "flash_attention_2",
            "its attention is 'flash_attention_2', not 'sdpa'",
        ),
        ("llama", "alibi", True, "its attention has no positions"),
    ],
)
def test_bases_that_do_not_fit_are_named(family, name, value, reason):
    base = make_host(family)
    setattr(base.config, name, value)
    assert compiled.find_compile_obstacle(base) == reason


def test_quantised_and_offloaded_bases_are_named():
    base = make_host("llama")
    assert compiled.find_compile_obstacle(base) is None
    base.is_quantized = True
    assert compiled.find_compile_obstacle(base) == "its layers are quantised"
    base.lm_head._hf_hook = object()
    assert compiled.find_compile_obstacle(base).startswith("its layers are offloaded or split")


@pytest.mark.slow
def test_lora_of_another_width_makes_another_graph(traced):
    nats = []
    for is_compiled in (False, True):
        trainer = make_trainer("lora", is_compiled)
        config = LoraConfig(r=2, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        trainer.model.add_adapter("narrow", config)
        chunks = trainer.read(make_ids(60))
        next(chunks)
        nats.append([next(chunks).nll_nats])
        trainer.model.set_adapter("narrow")
        other = TestTimeTrainer(trainer.model, **SETTINGS, compiled=is_compiled)
        nats[-1] += read(other, make_ids(30))
    assert nats[1] == pytest.approx(nats[0], rel=1e-4)
