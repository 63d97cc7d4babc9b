"""The cached context: attention sinks, the restart of its positions, and the token that every window begins with."""

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
from locas_peft.ttt import TestTimeTrainer, active
from locas_peft.ttt.cache import SlidingCache


def feed(cache: SlidingCache, ids: torch.Tensor, step: int) -> list[torch.Tensor]:
    """Feeds a text in chunks of `step` tokens, and gives the keys of the first layer after each."""
    kept = []
    for stop in range(step, ids.shape[1] + 1, step):
        cache.forward(ids[:, :stop], step)
        cache.advance()
        kept.append(cache._layers[0][0])
    return kept


def begin_with_start(model, ids: torch.Tensor) -> torch.Tensor:
    """A document [T] that begins with the model's start token, which no other token of it is."""
    model.config.bos_token_id = 1
    return torch.cat([torch.tensor([1]), ids[1:].clamp(min=2)])


def test_the_first_and_the_last_tokens_are_kept(monkeypatch):
    monkeypatch.setattr("locas_peft.ttt.cache.SINKS", 3)
    host, ids = CausalLM(make_model("plain")), make_ids(24)[None]
    everything = feed(SlidingCache(host, keep=24), ids, 8)[-1]
    kept = feed(SlidingCache(host, keep=5), ids[:, :8], 8)[-1]
    torch.testing.assert_close(
        kept, torch.cat([everything[..., :3, :], everything[..., 3:8, :]], dim=-2)
    )
    kept = feed(SlidingCache(host, keep=5), ids[:, :16], 8)[-1]
    assert kept.shape[-2] == 8
    torch.testing.assert_close(kept[..., :3, :], everything[..., :3, :])


@pytest.mark.parametrize("context", ["recompute", "cache"])
def test_every_window_begins_with_the_documents_start_token(context):
    model = make_model("plain")
    ids = begin_with_start(model, make_ids(40))
    with torch.no_grad():
        expected = []
        for start in range(0, 40, 8):
            begin = max(0, start - 8)
            fed = ids[begin : start + 8]
            if begin:
                fed = torch.cat([ids[:1], fed])
            losses = torch.nn.functional.cross_entropy(
                model(fed[None, :-1]).logits[0], fed[1:], reduction="none"
            )
            scored = min(start + 8, 40) - max(start, 1)
            expected.append(losses[-scored:].sum().item())
    trainer = TestTimeTrainer(model, window=16, stride=8, learning_rate=None, context=context)
    # The cache's window is as long as the text that has been read so far in its first chunks only.
    count = 5 if context == "recompute" else 2
    assert read(trainer, ids)[:count] == pytest.approx(expected[:count], rel=1e-5)


@pytest.mark.parametrize("context", ["recompute", "cache"])
def test_only_the_models_own_start_token_is_repeated(context, monkeypatch):
    monkeypatch.setattr("locas_peft.ttt.cache.SINKS", 0)
    options = {"window": 16, "stride": 8, "learning_rate": 1e-3, "context": context}
    told, other, without = (make_trainer(**options) for _ in range(3))
    ids = begin_with_start(told.model, make_ids(40))
    other.model.config.bos_token_id = 2
    without.model.config.bos_token_id = None
    first = read(told, ids)
    assert read(other, ids) == read(without, ids) != first
    told.rewind()
    told.model.config.bos_token_id = 2
    other.rewind()
    assert read(told, ids) != first, "another document, or model, tells anew"


def test_a_resumed_reading_keeps_the_start_token(monkeypatch):
    monkeypatch.setattr("locas_peft.ttt.cache.SINKS", 0)
    whole, first, second = (make_trainer(window=16, stride=8, context="cache") for _ in range(3))
    for trainer in (whole, first, second):
        ids = begin_with_start(trainer.model, make_ids(40))
    expected = read(whole, ids)
    next(iter(first.read(ids)))
    second.load_state_dict(first.state_dict())
    assert read(second, ids) == expected[1:]


@pytest.mark.parametrize("stride", [15, 16])
@pytest.mark.parametrize("context", ["recompute", "cache"])
def test_chunks_without_context_begin_with_the_start_token_too(stride, context):
    model = make_model("plain")
    ids = begin_with_start(model, make_ids(40))
    expected = []
    with torch.no_grad():
        for start in range(0, 40, stride):
            fed = ids[max(start - 1, 0) : start + stride]
            if start > 1:
                fed = torch.cat([ids[:1], fed])
            losses = torch.nn.functional.cross_entropy(
                model(fed[None, :-1]).logits[0], fed[1:], reduction="none"
            )
            # The token before the chunk is not scored again.
            scored = min(start + stride, 40) - max(start, 1)
            expected.append(losses[-scored:].sum().item())
    trainer = TestTimeTrainer(model, window=16, stride=stride, learning_rate=None, context=context)
    assert read(trainer, ids) == pytest.approx(expected, rel=1e-5)


def test_a_memory_is_calibrated_after_the_start_token(monkeypatch):
    seen, calibrate = [], active.calibrate
    monkeypatch.setattr(
        active,
        "calibrate",
        lambda model, ids, name, **given: (seen.extend(ids), calibrate(model, ids, name, **given)),
    )
    model = make_model("plain")
    ids = begin_with_start(model, make_ids(24))
    trainer = TestTimeTrainer(model, window=16, stride=8, learning_rate=1e-3)
    list(trainer.read(ids))
    # A memory that is added after two chunks is calibrated on the third one.
    memory = make_model("locas")
    memory.config.bos_token_id = 1
    state = trainer.state_dict()
    late = TestTimeTrainer(memory, window=16, stride=8, learning_rate=1e-3)
    late.chunks = trainer.chunks[:2]
    late._text = state["text"]
    late._scorer.begin(ids)
    next(late.read(ids))
    (first,) = seen
    assert first.tolist() == [[1, *ids[16:24].tolist()]]


def test_a_window_of_all_positions_has_no_room_for_the_start_token():
    model = make_model("plain")
    ids = begin_with_start(model, make_ids(100))
    trainer = TestTimeTrainer(model, window=64, stride=64, learning_rate=None)
    told = read(trainer, ids)
    model.config.bos_token_id = None
    assert read(TestTimeTrainer(model, window=64, stride=64, learning_rate=None), ids) == told


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


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("smollm2"), reason=f"SmolLM2 is not installed: {INSTALL}")
@pytest.mark.filterwarnings("ignore")
def test_cached_and_recomputed_perplexity_agree_on_a_pretrained_model(monkeypatch):
    """Without sinks the cached perplexity is higher by half: trained attention rests on the first tokens."""
    model, tokenizer = load_base("smollm2", dtype="bfloat16", device="cpu")
    ids = tokenize(tokenizer, unwrap(python_reference()), 1536)

    def perplexity(**settings) -> float:
        trainer = TestTimeTrainer(model, window=512, stride=256, learning_rate=None, **settings)
        return math.exp(sum(read(trainer, ids)) / 1535)

    recomputed = perplexity(context="recompute")
    assert perplexity(context="cache") == pytest.approx(recomputed, rel=0.01)
    monkeypatch.setattr("locas_peft.ttt.cache.SINKS", 0)
    assert perplexity(context="cache") > 1.1 * recomputed
