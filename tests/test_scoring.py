"""Scores of targets and documents: batches change no number."""

import pytest
import torch
import torch.nn.functional as F
from families import make_host, make_tokens

from locas_peft import TestTimeTrainer
from locas_peft.asking.scoring import score_targets
from locas_peft.evaluation.drift import cut_pieces, measure_drift


def make_pairs(count: int = 7) -> list[tuple[list[int], list[int]]]:
    rows = make_tokens(count, 20).tolist()
    return [
        (row[: 2 + number], row[2 + number : 4 + 2 * number]) for number, row in enumerate(rows)
    ]


def nll_alone(model, prompt, target) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *target]])).logits[0]
    begin = max(len(prompt), 1)
    return F.cross_entropy(
        logits[begin - 1 : -1], torch.tensor([*prompt, *target])[begin:], reduction="sum"
    ).item()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_batched_scores_are_those_of_each_pair_alone(family):
    model, pairs = make_host(family), make_pairs()
    scores = score_targets(model, pairs, batch_tokens=60)
    for (prompt, target), score in zip(pairs, scores, strict=True):
        assert score.tokens == len(target)
        assert score.nll_nats == pytest.approx(nll_alone(model, prompt, target), rel=1e-4, abs=1e-4)
    assert scores == score_targets(model, pairs, batch_tokens=60)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_shared_beginning_is_read_once_and_changes_no_score(family):
    model = make_host(family)
    beginning = make_tokens(1, 12)[0].tolist()
    pairs = [([*beginning, *prompt], target) for prompt, target in make_pairs()]
    widths = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: widths.append(args[0].shape[1])
    )
    caches = {}
    scores = score_targets(model, pairs, batch_tokens=60, shared=12, caches=caches)
    assert widths.count(12) == 1 and max(widths) <= 20
    again = score_targets(model, pairs[:2], shared=12, caches=caches)
    assert widths.count(12) == 1
    for (prompt, target), score in zip(pairs, scores, strict=True):
        assert score.tokens == len(target)
        assert score.nll_nats == pytest.approx(nll_alone(model, prompt, target), rel=1e-4, abs=1e-4)
    assert [each.nll_nats for each in again] == pytest.approx(
        [each.nll_nats for each in scores[:2]], rel=1e-4
    )


def test_without_a_prompt_the_first_token_is_not_scored():
    model, ids = make_host("llama"), make_tokens(1, 6)[0].tolist()
    scores = score_targets(model, [([], ids), ([], ids[:1]), ([], [])])
    assert [score.tokens for score in scores] == [5, 0, 0]
    assert scores[0].nll_nats == pytest.approx(nll_alone(model, [], ids), rel=1e-4)
    assert scores[0].per_token == scores[0].nll_nats / 5
    assert scores[1].per_token != scores[1].per_token


def test_targets_that_cannot_be_scored_are_one_line():
    model = make_host("llama")
    message = r"^pair 0 must fit the model's 64 positions, got 66 tokens: shorten its"
    with pytest.raises(ValueError, match=message):
        score_targets(model, [([3] * 60, [4] * 6)])


def test_documents_are_scored_as_the_trainer_scores_them():
    model, ids = make_host("llama"), make_tokens(1, 61)[0]
    found = measure_drift(model, cut_pieces(ids, 16, 8))
    trainer = TestTimeTrainer(model, window=16, stride=8, learning_rate=None)
    assert found["chunk_nll_nats"] == pytest.approx(
        [chunk.nll_nats for chunk in trainer.read(ids)], rel=1e-5
    )
    assert sum(measure_drift(model, cut_pieces(ids, 8, 8))["chunk_tokens"]) == 60


def test_only_logits_that_are_scored_are_computed():
    model, widths = make_host("llama"), []
    model.get_output_embeddings().register_forward_pre_hook(
        lambda module, args: widths.append(args[0].shape[1])
    )
    score_targets(model, [([3] * 20, [4, 5]), ([3] * 19, [6])])
    assert widths == [3], (
        "21 tokens are fed; the scored ones are predicted at the last three of them"
    )
    widths.clear()
    measure_drift(model, cut_pieces(make_tokens(1, 40)[0], 32, 8))
    assert max(widths) == 8, "of windows of 32 tokens"
