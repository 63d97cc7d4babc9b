"""Scores of targets and documents: batches change no number."""

import pytest
import torch
import torch.nn.functional as F
from families import logits, make_host, make_tokens
from training import read

from locas_peft import TestTimeTrainer
from locas_peft.asking.scoring import score_targets
from locas_peft.evaluation.drift import cut_pieces, measure_drift


def make_pairs(count: int = 7) -> list[tuple[list[int], list[int]]]:
    rows = enumerate(make_tokens(count, 20).tolist(), 2)
    return [(row[:number], row[number : 2 * number]) for number, row in rows]


def nll_alone(model, prompt, target) -> float:
    ids = torch.tensor([[*prompt, *target]])
    begin = max(len(prompt), 1)
    predicted = logits(model, ids)[0, begin - 1 : -1]
    return F.cross_entropy(predicted, ids[0, begin:], reduction="sum").item()


def check_scores(scores, model, pairs) -> None:
    assert [score.tokens for score in scores] == [len(target) for _, target in pairs]
    expected = [nll_alone(model, *pair) for pair in pairs]
    assert [score.nll_nats for score in scores] == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_batched_scores_are_those_of_each_pair_alone(family):
    model, pairs = make_host(family), make_pairs()
    scores = score_targets(model, pairs, batch_tokens=60)
    check_scores(scores, model, pairs)
    assert scores == score_targets(model, pairs, batch_tokens=60)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_shared_beginning_is_read_once_and_changes_no_score(family):
    model = make_host(family)
    beginning = make_tokens(1, 12)[0].tolist()
    pairs = [([*beginning, *prompt], target) for prompt, target in make_pairs()]
    widths = note_widths(model.get_input_embeddings())
    caches = {}
    scores = score_targets(model, pairs, batch_tokens=60, shared=12, caches=caches)
    assert widths.count(12) == 1 and max(widths) <= 20
    again = score_targets(model, pairs[:2], shared=12, caches=caches)
    assert widths.count(12) == 1
    check_scores(scores, model, pairs)
    check_scores(again, model, pairs[:2])


def note_widths(module) -> list[int]:
    """Return a list that gets the number of tokens of each input of a module."""
    widths = []
    module.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    return widths


def test_without_a_prompt_the_first_token_is_not_scored():
    model, ids = make_host("llama"), make_tokens(1, 6)[0].tolist()
    scores = score_targets(model, [([], ids), ([], ids[:1]), ([], [])])
    assert [score.tokens for score in scores] == [5, 0, 0]
    assert scores[0].nll_nats == pytest.approx(nll_alone(model, [], ids), rel=1e-4)
    assert scores[0].per_token == scores[0].nll_nats / 5
    assert scores[1].per_token != scores[1].per_token


def test_targets_that_cannot_be_scored_are_one_line():
    with pytest.raises(
        ValueError, match="^pair 0 must fit the model's 64 positions, got 66 tokens"
    ):
        score_targets(make_host("llama"), [([3] * 60, [4] * 6)])


def test_documents_are_scored_as_the_trainer_scores_them():
    model, ids = make_host("llama"), make_tokens(1, 61)[0]
    found = measure_drift(model, cut_pieces(ids, 16, 8))
    trainer = TestTimeTrainer(model, window=16, stride=8, learning_rate=None)
    assert found["chunk_nll_nats"] == pytest.approx(read(trainer, ids), rel=1e-5)
    assert sum(measure_drift(model, cut_pieces(ids, 8, 8))["chunk_tokens"]) == 60


def test_only_logits_that_are_scored_are_computed():
    model = make_host("llama")
    widths = note_widths(model.get_output_embeddings())
    score_targets(model, [([3] * 20, [4, 5]), ([3] * 19, [6])])
    # 21 tokens are fed; the scored ones are predicted at the last three of them.
    assert widths == [3]
    widths.clear()
    measure_drift(model, cut_pieces(make_tokens(1, 40)[0], 32, 8))
    assert max(widths) == 8, "of windows of 32 tokens"
