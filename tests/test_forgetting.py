"""Forgetting: drift is a divergence, and what is disabled is as before to the last bit."""

import json
import math

import pytest
import torch
from families import make_host, make_tokens
from peft import LoraConfig, get_peft_model

from locas_peft import LocasConfig, TestTimeTrainer, backbone
from locas_peft.asking.prompts import encode_prompt
from locas_peft.evaluation.drift import QUESTIONS, cut_pieces, measure_drift, write_own_answers
from locas_peft.evaluation.intervals import rise_interval


@pytest.fixture(scope="module")
def embedded():
    return backbone.load()


def make_model(kind: str):
    host = make_host("llama")
    torch.manual_seed(1)
    if kind == "lora":
        return get_peft_model(
            host, LoraConfig(r=4, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    return get_peft_model(host, LocasConfig(r=4, scaling=4.0))


@pytest.mark.parametrize("kind", ["lora", "locas"])
def test_drift_is_nought_before_and_its_reference_the_base_after(kind):
    ids, plain = make_tokens(1, 50)[0], make_host("llama")
    before = measure_drift(plain, cut_pieces(ids, 16, 8))
    assert before["kl_nats"] == 0 and before["nll_nats"] == before["reference_nll_nats"]
    assert before["tokens"] == 49 and set(before["chunk_kl_nats"]) == {0.0}
    model = make_model(kind)
    trainer = TestTimeTrainer(model, window=16, stride=8, learning_rate=0.02)
    for _ in trainer.read(make_tokens(1, 60, seed=9)[0]):
        pass
    model.eval()
    after = measure_drift(model, cut_pieces(ids, 16, 8))
    assert after["kl_nats"] > 0 and after["nll_nats"] != before["nll_nats"]
    assert after["reference_sha256"] == before["reference_sha256"]
    assert after["reference_nll_nats"] == before["nll_nats"]
    assert after["chunk_tokens"] == [7, *[8] * 5, 2]
    assert after["kl_per_token"] == pytest.approx(
        sum(kl * n for kl, n in zip(after["chunk_kl_nats"], after["chunk_tokens"], strict=True))
        / 49
    )
    assert json.loads(json.dumps(after)) == after


def test_a_base_that_answers_nothing_has_no_drift():
    drift = measure_drift(make_host("llama"), [])
    assert drift["tokens"] == 0
    assert math.isnan(drift["kl_per_token"]) and math.isnan(drift["perplexity"])


def test_the_rise_is_paired_over_chunks():
    rng = torch.Generator().manual_seed(0)
    tokens = [16] * 40
    before = (3 + torch.randn(40, generator=rng, dtype=torch.float64)).mul(16).tolist()
    after = [nll + 1.6 for nll in before]
    found = rise_interval(before, after, tokens)
    perplexity = torch.tensor(sum(before) / sum(tokens)).exp().item()
    assert found["mean"] == pytest.approx(
        perplexity * (torch.tensor(0.1).exp().item() - 1), rel=1e-5
    )
    assert 0 < found["low"] < found["mean"] < found["high"] < 2 * found["mean"], (
        "chunks that differ much, but all rise alike"
    )
    assert found["n"] == 40 and found == rise_interval(before, after, tokens)
    same = rise_interval(before, before, tokens)
    assert (same["mean"], same["low"], same["high"]) == (0, 0, 0)
    assert math.isnan(rise_interval(before[:1], after[:1], tokens[:1])["low"])
    assert rise_interval([], [], [])["n"] == 0


def test_drift_is_the_kl_from_the_reference_to_the_model():
    ids, model = make_tokens(1, 9)[0], make_model("lora")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
        q = model(ids.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
        with model.disable_adapter():
            p = model(ids.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum").item()
    assert measure_drift(model, cut_pieces(ids, 16, 16))["kl_nats"] == pytest.approx(
        expected, rel=1e-4
    )


def test_own_answers_are_the_bases_greedy_answers_and_drift_scores_nothing_else(embedded):
    base, tokenizer = embedded
    pieces = write_own_answers(base, tokenizer, max_new_tokens=4)
    assert 0 < len(pieces) <= len(QUESTIONS)
    ids, scored = pieces[0]
    prompt = tokenizer.decode(ids[:-scored])
    assert prompt in {
        tokenizer.decode(encode_prompt(tokenizer, question)) for question in QUESTIONS
    }
    greedy = base.generate(ids[None, :-scored], max_new_tokens=4, do_sample=False)[
        0, len(ids) - scored :
    ]
    assert tokenizer.decode(greedy).strip().startswith(tokenizer.decode(ids[-scored:]).strip())
    found = measure_drift(base, pieces)
    assert found["chunk_tokens"] == [count for _, count in pieces] and found["kl_nats"] == 0
