"""The cached context: attention sinks, the restart of its positions, and the token that every window begins with."""

from __future__ import annotations

import math

import pytest
import torch
from training import make_ids, make_model, make_trainer, read
from transformers import AutoModelForCausalLM, Phi3Config

from locas_peft.bases.gguf import is_installed
from locas_peft.bases.loading import load_base
from locas_peft.demo import INSTALL
from locas_peft.model import CausalLM
from locas_peft.text import python_reference, tokenize, unwrap
from locas_peft.ttt import TestTimeTrainer, loop
from locas_peft.ttt.cache import SlidingCache


def feed(cache: SlidingCache, ids: torch.Tensor, step: int) -> list[torch.Tensor]:
    """Feeds a text in chunks of `step` tokens, and gives the keys of the first layer after each."""
    kept = []
    for stop in range(step, ids.shape[1] + 1, step):
        cache.forward(ids[:, :stop], step)
        cache.advance()
        kept.append(cache._layers[0][0])
    return kept


def test_the_first_and_the_last_tokens_are_kept():
    host, ids = CausalLM(make_model("plain")), make_ids(24)[None]
    everything = feed(SlidingCache(host, keep=24), ids, 8)[-1]
    kept = feed(SlidingCache(host, keep=5, sinks=3), ids[:, :8], 8)[-1]
    torch.testing.assert_close(
        kept, torch.cat([everything[..., :3, :], everything[..., 3:8, :]], dim=-2)
    )
    kept = feed(SlidingCache(host, keep=5, sinks=3), ids[:, :16], 8)[-1]
    assert kept.shape[-2] == 8
    torch.testing.assert_close(kept[..., :3, :], everything[..., :3, :])


def test_the_context_is_fed_again_when_the_positions_reach_the_restart():
    host, ids = CausalLM(make_model("plain")), make_ids(40)[None]
    cache = SlidingCache(host, keep=7, sinks=2, restart=24)
    for stop in range(8, 41, 8):
        logits = cache.forward(ids[:, max(0, stop - 15) : stop], 8)
        assert cache._fed[1] <= 24
        cache.advance()
    fresh = SlidingCache(host, keep=7, sinks=2, restart=24)
    again = fresh.forward(ids[:, 25:40], 8)
    assert logits.shape == again.shape == (1, 8, host.vocabulary)


@pytest.mark.parametrize("context", ["recompute", "cache"])
def test_every_window_begins_with_the_start_token(context):
    model, ids = make_model("plain"), make_ids(40)
    with torch.no_grad():
        expected = []
        for start in range(0, 40, 8):
            begin = max(0, start - 8)
            logits = model(torch.cat([torch.tensor([1]), ids[begin : start + 8]])[None]).logits[
                0, :-1
            ]
            losses = torch.nn.functional.cross_entropy(
                logits, ids[begin : start + 8], reduction="none"
            )
            expected.append(losses[max(start, 1) - begin :].sum().item())
    trainer = TestTimeTrainer(
        model, window=16, stride=8, learning_rate=None, context=context, start_token=1
    )
    # The cache's window is as long as the text that has been read so far in its first two chunks only.
    count = 5 if context == "recompute" else 2
    assert read(trainer, ids)[:count] == pytest.approx(expected[:count], rel=1e-5)


@pytest.mark.parametrize("context", ["recompute", "cache"])
def test_a_document_that_begins_with_the_start_token_tells_it(context):
    ids = torch.cat([torch.tensor([1]), make_ids(39).clamp(min=2)])
    options = {"window": 16, "stride": 8, "learning_rate": 1e-3, "context": context, "sinks": 0}
    told, given = make_trainer(**options), make_trainer(**options, start_token=1)
    told.model.config.bos_token_id = given.model.config.bos_token_id = 1
    assert read(told, ids) == read(given, ids)
    other = make_trainer(**options)
    other.model.config.bos_token_id = 2
    assert read(other, ids) != read(make_trainer(**options, start_token=1), ids), (
        "it is not this model's"
    )
    told.rewind()
    assert read(told, ids[1:]) != read(given, ids) and told.settings.start_token is None


def test_a_resumed_reading_keeps_the_start_token(tmp_path):
    ids = torch.cat([torch.tensor([1]), make_ids(39).clamp(min=2)])
    whole, first, second = (
        make_trainer(window=16, stride=8, context="cache", sinks=0) for _ in range(3)
    )
    for trainer in (whole, first, second):
        trainer.model.config.bos_token_id = 1
    expected = read(whole, ids)
    next(iter(first.read(ids)))
    second.load_state_dict(first.state_dict())
    assert read(second, ids) == expected[1:]


@pytest.mark.parametrize("stride", [15, 16])
@pytest.mark.parametrize("context", ["recompute", "cache"])
def test_chunks_without_context_begin_with_the_start_token_too(stride, context):
    model, ids = make_model("plain"), make_ids(40)
    expected = []
    with torch.no_grad():
        for start in range(0, 40, stride):
            fed = torch.cat([torch.tensor([1]), ids[max(start - 1, 0) : start + stride]])
            losses = torch.nn.functional.cross_entropy(
                model(fed[None, :-1]).logits[0], fed[1:], reduction="none"
            )
            expected.append(
                losses[1:].sum().item()
            )  # the token before the chunk is not scored again
    trainer = TestTimeTrainer(
        model, window=16, stride=stride, learning_rate=None, context=context, start_token=1
    )
    assert read(trainer, ids) == pytest.approx(expected, rel=1e-5)


def test_the_start_token_stays_in_a_cache_without_sinks():
    options = {"window": 16, "stride": 4, "learning_rate": None, "context": "cache"}
    one, none = (
        read(
            TestTimeTrainer(make_model("plain"), **options, start_token=1, sinks=sinks),
            make_ids(60),
        )
        for sinks in (1, 0)
    )
    assert none == one


def test_a_memory_is_calibrated_after_the_start_token(monkeypatch):
    seen, calibrate = [], loop.calibrate
    monkeypatch.setattr(
        loop,
        "calibrate",
        lambda model, ids, name, **given: (seen.extend(ids), calibrate(model, ids, name, **given)),
    )
    ids = make_ids(24)
    trainer = TestTimeTrainer(
        make_model("locas"), window=16, stride=8, learning_rate=1e-3, start_token=1
    )
    read(trainer, ids)
    (first,) = seen
    assert first.tolist() == [[1, *ids[:8].tolist()]]


def test_the_start_token_needs_a_position():
    with pytest.raises(
        ValueError, match="^stride must be below a window of all 64 positions, got 64: lower it"
    ):
        TestTimeTrainer(
            make_model("plain"), window=64, stride=64, learning_rate=None, start_token=1
        )


def test_positions_stay_where_longrope_keeps_its_frequencies():
    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    sizes |= {
        "vocab_size": 99,
        "max_position_embeddings": 96,
        "original_max_position_embeddings": 24,
    }
    config = Phi3Config(**sizes, rope_parameters=rope, pad_token_id=0, eos_token_id=0)
    model, seen = AutoModelForCausalLM.from_config(config).eval(), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    options = {"stride": 8, "learning_rate": None, "context": "cache"}
    read(TestTimeTrainer(model, window=16, **options), make_ids(90))
    assert 16 <= max(positions.max().item() for positions in seen) < 24
    with pytest.raises(ValueError, match="^context must be 'recompute' with a window above 24"):
        TestTimeTrainer(model, window=32, **options)


def test_a_text_that_begins_with_the_start_token_does_not_get_a_second_one():
    model, ids = make_model("plain"), torch.cat([torch.tensor([1]), make_ids(7)])
    plain = read(TestTimeTrainer(model, window=16, stride=8, learning_rate=None), ids)
    assert (
        read(TestTimeTrainer(model, window=16, stride=8, learning_rate=None, start_token=1), ids)
        == plain
    )


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("smollm2"), reason=f"SmolLM2 is not installed: {INSTALL}")
@pytest.mark.filterwarnings("ignore")
def test_cached_and_recomputed_perplexity_agree_on_a_pretrained_model():
    """Without sinks the cached perplexity is higher by half: trained attention rests on the first tokens."""
    model, tokenizer = load_base("smollm2", dtype="bfloat16", device="cpu")
    ids = tokenize(tokenizer, unwrap(python_reference()), 1536)

    def perplexity(**settings) -> float:
        trainer = TestTimeTrainer(model, window=512, stride=256, learning_rate=None, **settings)
        return math.exp(sum(read(trainer, ids)) / 1535)

    recomputed = perplexity(context="recompute")
    assert perplexity(context="cache") == pytest.approx(recomputed, rel=0.01)
    assert perplexity(context="cache", sinks=0) > 1.1 * recomputed
