"""Forgetting: drift is a divergence, and what is disabled is as before to the last bit."""

import json
import math

import pytest
import torch
from families import logits, make_host
from training import make_ids, make_model, make_trainer, read

from locas_peft import backbone
from locas_peft.asking.prompts import encode_prompt
from locas_peft.evaluation.drift import QUESTIONS, cut_pieces, measure_drift, write_own_answers
from locas_peft.evaluation.intervals import rise_interval


@pytest.mark.parametrize("kind", ["lora", "locas"])
def test_drift_is_nought_before_and_its_reference_the_base_after(kind):
    pieces = cut_pieces(make_ids(50), 16, 8)
    before = measure_drift(make_host("llama"), pieces)
    assert before["kl_nats"] == 0 and before["nll_nats"] == before["reference_nll_nats"]
    assert before["tokens"] == 49 and set(before["chunk_kl_nats"]) == {0.0}
    trainer = make_trainer(kind)
    read(trainer, make_ids(60, seed=9))
    after = measure_drift(trainer.model.eval(), pieces)
    assert after["kl_nats"] > 0 and after["nll_nats"] != before["nll_nats"]
    assert after["reference_sha256"] == before["reference_sha256"]
    assert after["reference_nll_nats"] == before["nll_nats"]
    assert after["chunk_tokens"] == [7, *[8] * 5, 2]
    chunks = zip(after["chunk_kl_nats"], after["chunk_tokens"], strict=True)
    assert after["kl_per_token"] == pytest.approx(sum(kl * tokens for kl, tokens in chunks) / 49)
    assert json.loads(json.dumps(after)) == after


def test_a_base_that_answers_nothing_has_no_drift():
    drift = measure_drift(make_host("llama"), [])
    assert drift["tokens"] == 0
    assert math.isnan(drift["kl_per_token"]) and math.isnan(drift["perplexity"])


def test_the_rise_of_nothing_of_one_chunk_and_of_the_same():
    before, after, tokens = [48.0, 32.0], [49.6, 33.6], [16, 16]
    rise = math.exp(80 / 32) * (math.exp(0.1) - 1)
    assert rise_interval(before, after, tokens)["mean"] == pytest.approx(rise)
    same = rise_interval(before, before, tokens)
    assert same == {"mean": 0, "low": 0, "high": 0, "n": 2}
    assert math.isnan(rise_interval(before[:1], after[:1], tokens[:1])["low"])
    assert rise_interval([], [], [])["n"] == 0


def test_drift_is_the_kl_from_the_reference_to_the_model():
    ids, model = make_ids(9), make_model("lora")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    q = logits(model, ids[None])[0, :-1].log_softmax(-1)
    with model.disable_adapter():
        p = logits(model, ids[None])[0, :-1].log_softmax(-1)
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum").item()
    found = measure_drift(model, cut_pieces(ids, 16, 16))["kl_nats"]
    assert found == pytest.approx(expected, rel=1e-4)


def test_own_answers_are_the_bases_greedy_answers_and_drift_scores_nothing_else():
    base, tokenizer = backbone.load()
    pieces = write_own_answers(base, tokenizer, max_new_tokens=4)
    assert 0 < len(pieces) <= len(QUESTIONS)
    ids, scored = pieces[0]
    prompt, answer = ids[:-scored], ids[-scored:]
    prompts = [encode_prompt(tokenizer, question) for question in QUESTIONS]
    assert tokenizer.decode(prompt) in map(tokenizer.decode, prompts)
    greedy = base.generate(prompt[None], max_new_tokens=4, do_sample=False)[0, len(prompt) :]
    assert tokenizer.decode(greedy).strip().startswith(tokenizer.decode(answer).strip())
    found = measure_drift(base, pieces)
    assert found["chunk_tokens"] == [count for _, count in pieces] and found["kl_nats"] == 0
