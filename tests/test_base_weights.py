"""What is computed of the base alone is computed once, while its weights stay as they are."""

import pytest
import torch
from families import make_host, make_model
from peft import get_peft_model
from training import spoil

from locas_peft import LocasConfig
from locas_peft.memories import share_weights
from locas_peft.model import compute_once
from locas_peft.ttt import OwnText


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr("locas_peft.model.base_weights._KNOWN", {})


def count_calls():
    calls = []

    def compute(model, *arguments):
        calls.append(arguments)
        return len(calls)

    return compute


def test_a_result_is_of_one_base_one_key_and_its_weights():
    host, compute = make_host("llama"), count_calls()
    assert [compute_once(host, compute, "a") for _ in range(2)] == [1, 1]
    assert compute_once(host, compute, "b") == 2
    assert compute_once(share_weights(host), compute, "a") == 1
    # Of equal weights.
    assert compute_once(get_peft_model(make_host("llama"), LocasConfig(r=4)), compute, "a") == 1
    # A tokenizer with another chat template.
    assert compute_once(host, compute, "a", state="template") == 3
    spoil(host, 0)
    assert compute_once(host, compute, "a") == 4


def test_few_results_are_kept(monkeypatch):
    monkeypatch.setattr("locas_peft.model.base_weights.MOST_KNOWN", 2)
    host, compute = make_host("llama"), count_calls()
    assert [compute_once(host, compute, key) for key in "abbcb"] == [1, 2, 2, 3, 4]


def test_a_frozen_memory_that_stays_on_is_no_part_of_what_is_kept():
    model, compute = make_model(), count_calls()
    assert [compute_once(model, compute, "a") for _ in range(2)] == [1, 1]
    own = model.active_adapter
    model.add_adapter("frozen", LocasConfig(r=4))
    model.base_model.set_adapter(["frozen", own])
    for name, parameter in model.named_parameters():
        if "frozen" in name.split("."):
            parameter.requires_grad_(False)
    assert [compute_once(model, compute, "a") for _ in range(2)] == [2, 3]


def test_a_result_of_a_reference_is_computed_at_each_call():
    model, compute = make_model(), count_calls()
    model.add_adapter("former", LocasConfig(r=4))
    assert [compute_once(model, compute, "a", reference="former") for _ in range(2)] == [1, 2]
    assert compute_once(model, compute, "a") == 3


def test_two_memories_of_a_base_have_the_same_own_text_and_it_is_written_once(monkeypatch):
    host, written = make_host("llama"), []
    monkeypatch.setattr(
        "locas_peft.ttt.steps.anchor.write_own_text",
        lambda *given: written.append(given) or torch.ones(2, 8),
    )
    texts = [OwnText(model, texts=4, tokens=8, first=2) for model in (host, share_weights(host))]
    assert torch.equal(texts[0][3], texts[1][3])
    start = ((host.config.bos_token_id,),) * 2
    assert [given[1:] for given in written] == [(2, 8, 0, start, None), (2, 8, 1, start, None)]
    assert OwnText(host, texts=4, tokens=8, seed=5, first=2)[0].shape == (8,)
    assert OwnText(host, texts=4, tokens=8, first=2, beginnings=[[3]])[0].shape == (8,)
    assert len(written) == 4


def test_nothing_is_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path))
    host, compute = make_host("llama"), count_calls()
    host.config.name_or_path = "named"
    assert [compute_once(host, compute, "a") for _ in range(2)] == [1, 1]
    assert not list(tmp_path.iterdir())
