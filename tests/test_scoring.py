"""Scores of targets and documents, and greedy answers: batches change no number and no word."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from families import make_host, make_tokens

from locas_peft import TestTimeTrainer, backbone
from locas_peft.asking import answer, encode_prompt
from locas_peft.asking.continuation import first_line
from locas_peft.evaluation.cloze import find_spans, score_spans
from locas_peft.evaluation.conversations import Conversation, LocomoQuestion, Session, Turn
from locas_peft.evaluation.drift import cut_text, measure_drift
from locas_peft.evaluation.scoring import encode_pair, score_targets


@pytest.fixture(scope="module")
def embedded():
    return backbone.load()


def make_pairs(count: int = 7) -> list[tuple[list[int], list[int]]]:
    rows = make_tokens(count, 20).tolist()
    return [(row[: 2 + number], row[2 + number : 4 + 2 * number]) for number, row in enumerate(rows)]


def nll_alone(model, prompt, target) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *target]])).logits[0]
    begin = max(len(prompt), 1)
    return F.cross_entropy(logits[begin - 1 : -1], torch.tensor([*prompt, *target])[begin:], reduction="sum").item()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_batched_scores_are_those_of_each_pair_alone(family):
    model, pairs = make_host(family), make_pairs()
    scores = score_targets(model, pairs, batch_tokens=60)
    for (prompt, target), score in zip(pairs, scores, strict=True):
        assert score.tokens == len(target)
        assert score.nll_nats == pytest.approx(nll_alone(model, prompt, target), rel=1e-4, abs=1e-4)
    assert scores == score_targets(model, pairs, batch_tokens=60)


def test_without_a_prompt_the_first_token_is_not_scored():
    model, ids = make_host("llama"), make_tokens(1, 6)[0].tolist()
    scores = score_targets(model, [([], ids), ([], ids[:1])])
    assert [score.tokens for score in scores] == [5, 0]
    assert scores[0].nll_nats == pytest.approx(nll_alone(model, [], ids), rel=1e-4)
    assert scores[0].per_token == scores[0].nll_nats / 5 and scores[1].per_token != scores[1].per_token


def test_progress_counts_every_pair():
    seen = []
    score_targets(make_host("llama"), make_pairs(), batch_tokens=30, on_batch=seen.append)
    assert sum(seen) == 7 and len(seen) > 1


def test_targets_that_cannot_be_scored_are_one_line():
    model = make_host("llama")
    with pytest.raises(ValueError, match=r"^target 1 must not be empty: leave it out$"):
        score_targets(model, [([3], [4]), ([3], [])])
    with pytest.raises(ValueError, match=r"^pair 0 must fit the model's 64 positions, got 66 tokens: shorten its"):
        score_targets(model, [([3] * 60, [4] * 6)])


def test_a_target_is_tokenised_as_in_its_text(embedded):
    _, tokenizer = embedded
    prompt, target = encode_pair(tokenizer, "She went to the ", "old town")
    assert tokenizer.decode(prompt[1:]) == "She went to the" and tokenizer.decode(target) == " old town"
    assert prompt[0] == tokenizer.eos_token_id, "stands for the first special token that this tokenizer lacks"
    assert prompt[1:] + target == tokenizer("She went to the old town")["input_ids"]
    assert encode_pair(tokenizer, "", "Old town")[0] == [tokenizer.eos_token_id]
    with pytest.raises(ValueError, match=r"^target must not be empty: give the text that is to be scored$"):
        encode_pair(tokenizer, "She", "")


def test_documents_are_scored_as_the_trainer_scores_them():
    model, ids = make_host("llama"), make_tokens(1, 61)[0]
    found = measure_drift(model, nullcontext, cut_text(ids, 16, 8))
    trainer = TestTimeTrainer(model, window=16, stride=8, learning_rate=None)
    assert found["chunk_nll_nats"] == pytest.approx([chunk.nll_nats for chunk in trainer.read(ids)], rel=1e-5)
    assert sum(measure_drift(model, nullcontext, cut_text(ids, 8, 8))["chunk_tokens"]) == 60


def test_only_logits_that_are_scored_are_computed():
    model, widths = make_host("llama"), []
    model.get_output_embeddings().register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    score_targets(model, [([3] * 20, [4, 5]), ([3] * 19, [6])])
    assert widths == [3], "21 tokens are fed; the scored ones are predicted at the last three of them"
    widths.clear()
    measure_drift(model, nullcontext, cut_text(make_tokens(1, 40)[0], 32, 8))
    assert max(widths) == 8, "of windows of 32 tokens"


class WordTokenizer:
    """As much of a tokenizer as answers need: token n is the word "wn"."""

    pad_token_id = eos_token_id = 0
    bos_token_id = 1
    chat_template = None

    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(f"w{token}" for token in row if token > 2) for row in rows]


def make_prompts(shared: int) -> list[list[int]]:
    rows = make_tokens(5, 30, seed=5).tolist()
    beginning = make_tokens(1, 60, seed=6)[0, :shared].tolist()
    return [beginning + row[: 3 + 2 * number] for number, row in enumerate(rows)]


def answer_all(model, prompts, **options) -> list[str]:
    answers = dict(
        pair
        for batch, texts in answer(model, WordTokenizer(), prompts, **options)
        for pair in zip(batch, texts, strict=True)
    )
    return [answers[number] for number in range(len(prompts))]


@pytest.mark.parametrize("shared", [0, 20])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_batched_answers_are_those_of_each_prompt_alone(family, shared, monkeypatch):
    monkeypatch.setattr("locas_peft.asking.continuation._WORTH_KEEPING", 8)
    model, prompts = make_host(family), make_prompts(shared)
    together = answer_all(model, prompts, max_new_tokens=6, batch_size=3)
    alone = [answer_all(model, [prompt], max_new_tokens=6)[0] for prompt in prompts]
    assert together == alone
    assert together == answer_all(model, prompts, max_new_tokens=6, batch_size=3)


def test_a_common_beginning_goes_through_the_model_once(monkeypatch):
    monkeypatch.setattr("locas_peft.asking.continuation._WORTH_KEEPING", 8)
    model, fed = make_host("llama"), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    answer_all(model, make_prompts(40), max_new_tokens=1, batch_size=2)
    assert fed[0] == 40 and sum(fed[1:]) < 100


def test_batches_that_are_known_are_not_asked_again():
    model, prompts = make_host("llama"), make_prompts(0)
    every = answer_all(model, prompts, max_new_tokens=4, batch_size=2)
    batches = list(answer(model, WordTokenizer(), prompts, max_new_tokens=4, batch_size=2, known={4, 3, 2}))
    assert [batch for batch, _ in batches] == [[2, 1], [0]], "2 again: the batches are the same ones"
    assert all(every[number] == text for batch, texts in batches for number, text in zip(batch, texts, strict=True))
    assert list(answer(model, WordTokenizer(), prompts, known=range(5))) == []
    assert list(answer(model, WordTokenizer(), [])) == []


def test_prompts_without_room_are_one_line():
    with pytest.raises(
        ValueError, match=r"^prompt 0 and max_new_tokens must fit the model's 64 positions, got 60 \+ 8"
    ):
        answer_all(make_host("llama"), [[3] * 60], max_new_tokens=8)
    with pytest.raises(ValueError, match=r"^prompt 0 must not be empty"):
        answer_all(make_host("llama"), [[]], max_new_tokens=8)


def test_an_answer_ends_with_its_line():
    assert first_line("\n  in May \nand more") == "in May"
    assert first_line(" \n ") == ""


def test_a_chat_template_is_used_where_there_is_one(embedded):
    tokenizer = copy.deepcopy(embedded[1])
    assert encode_prompt(tokenizer, "Who?") == tokenizer("Who?")["input_ids"]
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
    assert tokenizer.decode(encode_prompt(tokenizer, "Who?")) == "<user>Who?<answer>"


def test_spans_are_scored_in_their_prompts_alone(embedded):
    model, tokenizer = embedded
    turns = (Turn("D1:1", "Ida", "We saw the sea, the church and a garden."),)
    asked = [
        LocomoQuestion(n, "?", 4, text, ("D1:1",))
        for n, text in enumerate(["the sea", "the church", "a garden", "saw"])
    ]
    spans = find_spans(Conversation("talk", ("Ida", "Ben"), (Session(1, None, turns),), tuple(asked)))
    scores = score_spans(model, tokenizer, spans)
    expected = nll_alone(model, *encode_pair(tokenizer, "Ida: We saw ", "the sea"))
    first = scores[0]
    assert first["nll_per_token"] * first["tokens"] == pytest.approx(expected, rel=1e-4)
    assert len(first["others_nll_per_token"]) == 3
    assert first["first"] == (first["nll_per_token"] < min(first["others_nll_per_token"]))
    assert (first["text"], first["prompt"]) == ("the sea", "Ida: We saw ")
