"""The cached context: attention sinks, the restart of its positions, and the token that every window begins with."""

import math

import pytest
import torch
from test_trainer import score_by_hand
from training import CONTEXTS, make_ids, make_model, make_trainer, read
from transformers import AutoModelForCausalLM, Phi3Config

from locas_peft.bases.gguf import is_installed
from locas_peft.bases.loading import load_base
from locas_peft.demo import INSTALL
from locas_peft.model import CausalLM
from locas_peft.text import python_reference, tokenize, unwrap
from locas_peft.ttt import TestTimeTrainer
from locas_peft.ttt.cache import SlidingCache


def feed(keep: int, ids: torch.Tensor) -> torch.Tensor:
    """Feed a text [1, T] in chunks of eight tokens; return the keys that the first layer keeps."""
    cache = SlidingCache(CausalLM(make_model("plain")), keep)
    for stop in range(8, ids.shape[1] + 1, 8):
        cache.forward(ids[:, :stop], 8)
        cache.advance()
    return cache._layers[0][0]


def make_document(length: int = 40) -> torch.Tensor:
    """A document [T] whose first token alone is the start token of `make_model`."""
    return torch.cat([torch.tensor([1]), make_ids(length - 1)])


def test_the_first_and_the_last_tokens_are_kept(monkeypatch):
    monkeypatch.setattr("locas_peft.ttt.cache.SINKS", 3)
    ids = make_ids(16)[None]
    everything = feed(16, ids)
    torch.testing.assert_close(feed(5, ids[:, :8]), everything[..., :8, :])
    expected = torch.cat([everything[..., :3, :], everything[..., -5:, :]], dim=-2)
    torch.testing.assert_close(feed(5, ids), expected)


@pytest.mark.parametrize("stride", [8, 15, 16])
@pytest.mark.parametrize("context", CONTEXTS)
def test_every_window_begins_with_the_documents_start_token(stride, context):
    model, ids = make_model("plain"), make_document()
    trainer = TestTimeTrainer(model, window=16, stride=stride, learning_rate=None, context=context)
    # The cache's window is as long as the text that has been read so far in its first chunks only.
    count = 2 if context == "cache" and stride == 8 else None
    expected = score_by_hand(model, ids, 16, stride)
    assert read(trainer, ids)[:count] == pytest.approx(expected[:count], rel=1e-5)


@pytest.mark.parametrize("context", CONTEXTS)
def test_only_the_models_own_start_token_is_repeated(context, monkeypatch):
    monkeypatch.setattr("locas_peft.ttt.cache.SINKS", 0)
    # Without an adapter: a second reading differs by the model's start token alone.
    own, other, without = (make_trainer("plain", context=context) for _ in range(3))
    ids = make_document()
    other.model.config.bos_token_id = 2
    without.model.config.bos_token_id = None
    first = read(own, ids)
    assert read(other, ids) == read(without, ids) != first
    own.rewind()
    assert read(own, ids) == first
    own.rewind()
    own.model.config.bos_token_id = 2
    other.rewind()
    assert read(own, ids) == read(other, ids) != first, "another document, or model, tells anew"


def test_a_resumed_reading_keeps_the_start_token(monkeypatch):
    monkeypatch.setattr("locas_peft.ttt.cache.SINKS", 0)
    whole, first, second = (make_trainer(context="cache") for _ in range(3))
    ids = make_document()
    next(first.read(ids))
    second.load_state_dict(first.state_dict())
    assert read(second, ids) == read(whole, ids)[1:]


def test_a_window_of_all_positions_has_no_room_for_the_start_token():
    model, ids = make_model("plain"), make_document(100)
    settings = {"window": 64, "stride": 64, "learning_rate": None}
    with_start = read(TestTimeTrainer(model, **settings), ids)
    model.config.bos_token_id = None
    assert read(TestTimeTrainer(model, **settings), ids) == with_start


def test_positions_stay_where_longrope_keeps_its_frequencies():
    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 99}
    positions = {"max_position_embeddings": 96, "original_max_position_embeddings": 24}
    tokens = {"pad_token_id": 0, "eos_token_id": 0}
    config = Phi3Config(**sizes, **positions, **tokens, num_hidden_layers=1, rope_parameters=rope)
    model, seen = AutoModelForCausalLM.from_config(config).eval(), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["position_ids"].max().item()), with_kwargs=True
    )
    options = {"stride": 8, "learning_rate": None, "context": "cache"}
    read(TestTimeTrainer(model, window=16, **options), make_ids(90))
    assert 16 <= max(seen) < 24
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
