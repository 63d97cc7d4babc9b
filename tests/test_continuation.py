"""Continuing prompts: batches, shared beginnings and padding change no token."""

import pytest
import torch
from families import make_host, make_tokens
from transformers import AutoModelForCausalLM, GenerationConfig, GPTNeoConfig

from locas_peft.asking import (
    answer_in_batches,
    begin_rows,
    continuation,
    continue_rows,
    continue_texts,
    draw,
    share_prefixes,
)
from locas_peft.asking.continuation import first_line, first_statement
from locas_peft.model import CausalLM


class WordTokenizer:
    """As much of a tokenizer as answers need: token n is the word "wn"."""

    pad_token_id = eos_token_id = 0
    bos_token_id = 1
    chat_template = None

    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(f"w{token}" for token in row if token > 2) for row in rows]


class NumberTokenizer(WordTokenizer):
    """Leaves token ids as they are."""

    def batch_decode(self, rows, skip_special_tokens):
        return rows


def make_prompts(shared: int) -> list[list[int]]:
    rows = make_tokens(5, 30, seed=5).tolist()
    beginning = make_tokens(1, 60, seed=6)[0, :shared].tolist()
    return [beginning + row[: 3 + 2 * number] for number, row in enumerate(rows)]


def answer_all(model, prompts, **options) -> list[str]:
    answers = dict(
        pair
        for batch, texts in answer_in_batches(model, WordTokenizer(), prompts, **options)
        for pair in zip(batch, texts, strict=True)
    )
    return [answers[number] for number in range(len(prompts))]


# Rows


def test_prompts_that_begin_alike_are_grouped():
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7], [1, 8, 9, 9, 9, 9], [1, 8, 9, 9, 9, 5], [2]]
    assert share_prefixes(prompts) == [(4, range(2)), (5, range(2, 4)), (0, range(4, 5))]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2", "opt"])
def test_rows_after_a_shared_beginning_have_the_logits_of_whole_rows(family):
    model = make_host(family)
    host, generator = CausalLM(model), torch.Generator().manual_seed(0)
    shared, other = (
        torch.randint(5, 60, (length,), generator=generator).tolist() for length in (7, 4)
    )
    rows = [[*shared, 5, 6, 7], [*shared, 8], [*other, 9, 10]]
    groups = share_prefixes(rows)
    assert [count for count, _ in groups] == [7, 5]
    logits = host.logits(count=1, **begin_rows(host, rows, groups))
    for row, found in zip(rows, logits, strict=True):
        torch.testing.assert_close(
            found, model(torch.tensor([row])).logits[0, -1:], atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("family", ["mistral", "mpt"])
def test_rows_are_whole_where_padding_inside_them_counts(family):
    model = make_host("llama")
    model.config.sliding_window, model.config.model_type = {
        "mistral": (6, "mistral"),
        "mpt": (None, "mpt"),
    }[family]
    rows = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8]]
    assert "past_key_values" not in begin_rows(CausalLM(model), rows, [(3, range(2))])
    model.config.sliding_window, model.config.model_type = 7, "mistral"
    assert "past_key_values" in begin_rows(CausalLM(model), rows, [(3, range(2))])
    # The first two share four tokens, the others one: with both paddings a row has nine.
    rows = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 10], [11, 5, 6, 7, 8, 9], [11, 9, 8]]
    groups = [(4, range(2)), (1, range(2, 4))]
    assert "past_key_values" not in begin_rows(CausalLM(model), rows, groups)


def test_the_local_attention_of_gpt_neo_counts_padding():
    config = GPTNeoConfig(
        vocab_size=64,
        hidden_size=16,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=2,
        window_size=16,
        max_position_embeddings=64,
    )
    host = CausalLM(AutoModelForCausalLM.from_config(config).eval())
    rows = make_tokens(2, 30, seed=3).tolist()
    rows = [[*rows[0][:20], *rows[0][20:]], [*rows[0][:20], 5, 6]]
    logits = host.logits(count=1, **begin_rows(host, rows, [(20, range(2))]))
    alone = host.logits(torch.tensor([rows[1]]), 1)
    torch.testing.assert_close(logits[1], alone[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_model_that_keeps_no_context_writes_the_same(family, monkeypatch):
    host, rows = (
        CausalLM(make_host(family)),
        [row[: 3 + 2 * number] for number, row in enumerate(make_prompts(0))],
    )
    expected, outputs = continue_rows(host, rows, 5), host.outputs

    def forget(*args, **kwargs):
        found = outputs(*args, **kwargs)
        found.past_key_values = None
        return found

    monkeypatch.setattr(host, "outputs", forget)
    assert continue_rows(host, rows, 5) == expected


def test_rows_end_at_a_stop_token_and_are_shown_meanwhile():
    host, rows, seen = CausalLM(make_host("llama")), make_prompts(0)[:2], []
    whole = continue_rows(
        host, rows, 6, on_token=lambda new: seen.append([list(row) for row in new])
    )
    assert [len(row) for row in whole] == [6, 6]
    assert seen == [[row[: number + 1] for row in whole] for number in range(6)]
    stop = whole[0][2]
    ended = continue_rows(host, rows, 6, stops=[stop])
    assert ended == [row[: row.index(stop) + 1] if stop in row else row for row in whole]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_rows_that_have_ended_leave_when_they_are_half_of_the_batch(family, monkeypatch):
    host, rows, sizes = CausalLM(make_host(family)), make_prompts(4), []
    whole, outputs = continue_rows(host, rows, 8), host.outputs
    stops = [row[number] for number, row in enumerate(whole[:3])]
    expected = [
        row[: 1 + min((row.index(stop) for stop in stops if stop in row), default=8)]
        for row in whole
    ]

    def count(ids, *args, **kwargs):
        sizes.append(len(ids))
        return outputs(ids, *args, **kwargs)

    monkeypatch.setattr(host, "outputs", count)
    assert continue_rows(host, rows, 8, stops=stops) == expected
    assert sizes[0] == 5 and min(sizes) <= 2
    assert continue_rows(host, rows, 8, stops=stops, groups=[(4, range(5))]) == expected


@pytest.mark.parametrize(("ends", "stops"), [(None, []), (7, [7]), ([7, 8], [7, 8])])
def test_a_text_ends_with_the_tokenizer_s_end_too(ends, stops, monkeypatch):
    seen = []
    monkeypatch.setattr(
        continuation, "continue_inputs", lambda *_, stops, **__: seen.append(stops) or []
    )
    model = make_host("llama")
    model.generation_config.eos_token_id = ends
    tokenizer = WordTokenizer()
    tokenizer.eos_token_id = 4
    continue_texts(model, tokenizer, [[5, 6]], 3)
    tokenizer.eos_token_id = 0
    continue_texts(model, tokenizer, [[5, 6]], 3)
    tokenizer.eos_token_id = None
    continue_texts(model, tokenizer, [[5, 6]], 3)
    assert seen == [[*stops, 4], [*stops, 0], stops]
    tokenizer.chat_template = "{{ messages }}"
    monkeypatch.setattr(continuation, "list_stops", lambda _: [9, 4])
    continue_texts(model, tokenizer, [[5, 6]], 3)
    assert seen[3] == [*stops, 9, 4]


def test_tokens_are_drawn_as_generate_draws_them():
    model, prompt = make_host("llama"), make_tokens(1, 9)
    model.generation_config.eos_token_id = None
    for limits in ({}, {"top_k": 3}, {"top_k": 0, "top_p": 0.5}):
        model.generation_config.update(**limits)
        torch.manual_seed(7)
        expected = model.generate(
            prompt, max_new_tokens=12, do_sample=True, temperature=0.7, pad_token_id=0
        )
        state = torch.get_rng_state()
        (found,) = continue_texts(
            model, NumberTokenizer(), prompt.tolist(), 12, temperature=0.7, seed=7
        )
        assert found == expected[0, 9:].tolist()
        assert torch.equal(state, torch.get_rng_state())


def test_a_very_low_temperature_draws_the_likeliest_token():
    logits = torch.tensor([[1.0, 90.0, 3.0]])
    for temperature in (1e-3, 1e-38, 1e-300):
        assert draw(temperature, torch.Generator())(logits).tolist() == [1]


def test_only_the_likeliest_tokens_are_drawn():
    logits = torch.arange(6.0).repeat(500, 1)
    generator = torch.Generator().manual_seed(0)
    assert set(draw(9.0, generator)(logits).tolist()) == set(range(6))
    assert set(draw(9.0, generator, GenerationConfig(top_k=2))(logits).tolist()) == {4, 5}


# Answers


@pytest.mark.parametrize("shared", [0, 20])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_batched_answers_are_those_of_each_prompt_alone(family, shared, monkeypatch):
    monkeypatch.setattr("locas_peft.asking.continuation.LEAST_SHARED", 8)
    model, prompts = make_host(family), make_prompts(shared)
    together = answer_all(model, prompts, max_new_tokens=6, batch_size=3)
    alone = [answer_all(model, [prompt], max_new_tokens=6)[0] for prompt in prompts]
    assert together == alone
    assert together == answer_all(model, prompts, max_new_tokens=6, batch_size=3)


def test_a_common_beginning_goes_through_the_model_once(monkeypatch):
    monkeypatch.setattr("locas_peft.asking.continuation.LEAST_SHARED", 8)
    model, fed = make_host("llama"), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    answer_all(model, make_prompts(40), max_new_tokens=1, batch_size=2)
    assert fed[0] == 40 and sum(fed[1:]) < 100


def test_batches_that_are_known_are_not_asked_again():
    model, prompts = make_host("llama"), make_prompts(0)
    every = answer_all(model, prompts, max_new_tokens=4, batch_size=2)
    batches = list(
        answer_in_batches(
            model, WordTokenizer(), prompts, max_new_tokens=4, batch_size=2, known={4, 3, 2}
        )
    )
    assert [batch for batch, _ in batches] == [[2, 1], [0]], (
        "2 again: the batches are the same ones"
    )
    assert all(
        every[number] == text
        for batch, texts in batches
        for number, text in zip(batch, texts, strict=True)
    )
    assert list(answer_in_batches(model, WordTokenizer(), prompts, known=range(5))) == []
    assert list(answer_in_batches(model, WordTokenizer(), [])) == []


def test_long_prompts_are_answered_in_small_batches(monkeypatch):
    model, prompts = make_host("llama"), make_prompts(40)
    whole = answer_all(model, prompts, max_new_tokens=4)
    monkeypatch.setattr(continuation, "BATCH_TOKENS", 100)
    batches = [
        batch for batch, _ in answer_in_batches(model, WordTokenizer(), prompts, max_new_tokens=4)
    ]
    # Of 51, 49, 47, 45 and 43 tokens.
    assert batches == [[4], [3, 2], [1, 0]]
    assert answer_all(model, prompts, max_new_tokens=4) == whole
    monkeypatch.setattr(continuation, "BATCH_TOKENS", 10)
    assert answer_all(model, prompts, max_new_tokens=4) == whole


def test_prompts_without_room_are_one_line():
    message = r"^prompt 0 and max_new_tokens must fit the model's 64 positions, got 60 \+ 8"
    with pytest.raises(ValueError, match=message):
        answer_all(make_host("llama"), [[3] * 60], max_new_tokens=8)
    with pytest.raises(ValueError, match=r"^prompt 0 must not be empty"):
        answer_all(make_host("llama"), [[]], max_new_tokens=8)


def test_an_answer_ends_with_its_line():
    assert first_line("\n  in May \nand more") == "in May"
    assert first_line(" \n ") == ""
    code = "def fare(stop):\n    return stop.fare * 3"
    assert first_statement(f"\n{code}\n") == code
    assert first_statement("In May.\nx = 3\ny = 4") == "In May."
    assert first_statement(" \n ") == ""
