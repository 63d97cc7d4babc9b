"""Continuing prompts: batches, shared beginnings and padding change no token."""

import pytest
import torch
from families import make_host, make_tokens
from transformers import AutoModelForCausalLM, BartConfig, GenerationConfig, GPTNeoConfig

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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("fresh_graphs")
def test_a_compiled_model_continues_as_the_plain_one():
    first, second = make_tokens(2, 14).tolist()
    model = make_host("llama")
    hosts = [CausalLM(one) for one in (model, torch.compile(model, backend="eager"))]
    plain, compiled = (continue_rows(host, [first, second[:9]], 6) for host in hosts)
    assert compiled == plain
    assert [host.kind for host in hosts] == ["LlamaForCausalLM"] * 2


def test_rows_of_several_lengths_are_refused_where_padding_would_count():
    config = BartConfig(
        vocab_size=64,
        d_model=16,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=24,
        max_position_embeddings=64,
    )
    host = CausalLM(AutoModelForCausalLM.from_config(config).eval(), cpu_attention=False)
    first, second = make_tokens(2, 14).tolist()
    together = continue_rows(host, [first, second], 6)
    assert together == [continue_rows(host, [row], 6)[0] for row in (first, second)]
    message = "^rows must have one length for BartForCausalLM, which counts padding, got several: "
    with pytest.raises(ValueError, match=message):
        continue_rows(host, [first, second[:9]], 6)


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
    answers = {}
    for batch, texts in answer_in_batches(model, WordTokenizer(), prompts, **options):
        answers.update(zip(batch, texts, strict=True))
    return [answers[number] for number in range(len(prompts))]


def list_answered(model, prompts, **options) -> list[list[int]]:
    """Return the numbers of the prompts of each batch."""
    return [batch for batch, _ in answer_in_batches(model, WordTokenizer(), prompts, **options)]


def cut(row: list[int], stops: list[int]) -> list[int]:
    """Return a row up to its first stop token."""
    ends = [row.index(stop) + 1 for stop in stops if stop in row]
    return row[: min(ends, default=len(row))]


# Rows


def test_prompts_that_begin_alike_are_grouped():
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7], [1, 8, 9, 9, 9, 9], [1, 8, 9, 9, 9, 5], [2]]
    assert share_prefixes(prompts) == [(4, range(2)), (5, range(2, 4)), (0, range(4, 5))]


def assert_logits_of_whole_rows(host: CausalLM, rows, groups, atol: float = 1e-4) -> None:
    logits = host.logits(count=1, **begin_rows(host, rows, groups))
    for row, found in zip(rows, logits, strict=True):
        alone = host.logits(torch.tensor([row]), 1)[0]
        torch.testing.assert_close(found, alone, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2", "opt"])
def test_rows_after_a_shared_beginning_have_the_logits_of_whole_rows(family):
    ids = make_tokens(1, 11)[0].tolist()
    shared, other = ids[:7], ids[7:]
    rows = [[*shared, 5, 6, 7], [*shared, 8], [*other, 9, 10]]
    groups = share_prefixes(rows)
    assert [count for count, _ in groups] == [7, 5]
    assert_logits_of_whole_rows(CausalLM(make_host(family)), rows, groups)


def shares_beginnings(kind, window, rows, groups) -> bool:
    model = make_host("llama")
    model.config.model_type = kind
    model.config.sliding_window = window
    return "past_key_values" in begin_rows(CausalLM(model), rows, groups)


@pytest.mark.parametrize(
    ("kind", "window", "expected"),
    [("mpt", None, False), ("mistral", 6, False), ("mistral", 7, True)],
)
def test_rows_are_whole_where_padding_inside_them_counts(kind, window, expected):
    rows = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8]]
    assert shares_beginnings(kind, window, rows, [(3, range(2))]) == expected


def test_the_padding_of_both_parts_counts():
    # The first two share four tokens, the others one: with both paddings a row has nine.
    rows = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 10], [11, 5, 6, 7, 8, 9], [11, 9, 8]]
    assert not shares_beginnings("mistral", 7, rows, [(4, range(2)), (1, range(2, 4))])


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
    (row,) = make_tokens(1, 30, seed=3).tolist()
    assert_logits_of_whole_rows(host, [row, [*row[:20], 5, 6]], [(20, range(2))], 1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_model_that_keeps_no_context_writes_the_same(family, monkeypatch):
    host, rows = CausalLM(make_host(family)), make_prompts(0)
    expected = continue_rows(host, rows, 5)
    outputs = host.outputs

    def forget(*args, **kwargs):
        found = outputs(*args, **kwargs)
        found.past_key_values = None
        return found

    monkeypatch.setattr(host, "outputs", forget)
    assert continue_rows(host, rows, 5) == expected


def test_rows_are_shown_while_they_are_written():
    host, rows = CausalLM(make_host("llama")), make_prompts(0)[:2]
    seen = []

    def show(new):
        seen.append([list(row) for row in new])

    whole = continue_rows(host, rows, 6, on_token=show)
    assert [len(row) for row in whole] == [6, 6]
    assert seen == [[row[: number + 1] for row in whole] for number in range(6)]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_rows_that_have_ended_leave_when_they_are_half_of_the_batch(family, monkeypatch):
    host, rows, sizes = CausalLM(make_host(family)), make_prompts(4), []
    whole = continue_rows(host, rows, 8)
    outputs = host.outputs
    stops = [row[number] for number, row in enumerate(whole[:3])]
    expected = [cut(row, stops) for row in whole]

    def count(ids, *args, **kwargs):
        sizes.append(len(ids))
        return outputs(ids, *args, **kwargs)

    monkeypatch.setattr(host, "outputs", count)
    assert continue_rows(host, rows, 8, stops=stops) == expected
    assert sizes[0] == 5 and min(sizes) <= 2
    assert continue_rows(host, rows, 8, stops=stops, groups=[(4, range(5))]) == expected


def test_a_text_ends_with_the_end_of_the_model_or_of_its_tokenizer(monkeypatch):
    model, tokenizer = make_host("llama"), NumberTokenizer()

    def write(ends, end):
        model.generation_config.eos_token_id = ends
        tokenizer.eos_token_id = end
        return continue_texts(model, tokenizer, [[7, 8]], 8)[0]

    whole = write(None, None)
    assert len(whole) == 8
    for ends, end in ((whole[2], 0), ([0, whole[2]], whole[4]), (0, whole[2]), (None, whole[2])):
        assert write(ends, end) == cut(whole, [whole[2]])
    # A tokenizer's end may be token 0.
    config = GenerationConfig(eos_token_id=7)
    assert continuation._list_reply_stops(config, WordTokenizer()) == [7, 0]
    tokenizer.chat_template = "{{ messages }}"
    monkeypatch.setattr(continuation, "list_stops", lambda _: [0, whole[2]])
    assert write(None, None) == cut(whole, [whole[2]])


@pytest.mark.parametrize("limits", [{}, {"top_k": 3}, {"top_k": 0, "top_p": 0.5}])
def test_tokens_are_drawn_as_generate_draws_them(limits):
    model, prompt = make_host("llama"), make_tokens(1, 9)
    model.generation_config.update(eos_token_id=None, **limits)
    torch.manual_seed(7)
    options = {"do_sample": True, "temperature": 0.7, "pad_token_id": 0}
    expected = model.generate(prompt, max_new_tokens=12, **options)
    state = torch.get_rng_state()
    rows = prompt.tolist()
    (found,) = continue_texts(model, NumberTokenizer(), rows, 12, temperature=0.7, seed=7)
    assert found == expected[0, 9:].tolist()
    assert torch.equal(state, torch.get_rng_state())


def test_a_very_low_temperature_draws_the_likeliest_token():
    logits = torch.tensor([[1.0, 90.0, 3.0]])
    for temperature in (1e-3, 1e-38, 1e-300):
        assert draw(temperature, torch.Generator())(logits).tolist() == [1]


# Answers


@pytest.mark.parametrize("shared", [0, 20])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_batched_answers_are_those_of_each_prompt_alone(family, shared, monkeypatch):
    monkeypatch.setattr(continuation, "LEAST_SHARED", 8)
    model, prompts = make_host(family), make_prompts(shared)
    together = answer_all(model, prompts, max_new_tokens=6, batch_size=3)
    assert together == [answer_all(model, [prompt], max_new_tokens=6)[0] for prompt in prompts]


def test_a_common_beginning_goes_through_the_model_once(monkeypatch):
    monkeypatch.setattr(continuation, "LEAST_SHARED", 8)
    model, fed = make_host("llama"), []
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda module, args: fed.append(args[0].numel()))
    answer_all(model, make_prompts(40), max_new_tokens=1, batch_size=2)
    assert fed[0] == 40 and sum(fed[1:]) < 100


def test_batches_that_are_known_are_not_asked_again():
    model, prompts = make_host("llama"), make_prompts(0)
    # 2 again: the batches are the same ones.
    options = {"max_new_tokens": 1, "batch_size": 2}
    assert list_answered(model, prompts, **options) == [[4, 3], [2, 1], [0]]
    assert list_answered(model, prompts, known={4, 3, 2}, **options) == [[2, 1], [0]]
    assert list_answered(model, prompts, known=range(5)) == []
    assert list_answered(model, []) == []


# The prompts have 51, 49, 47, 45 and 43 tokens.
@pytest.mark.parametrize(
    ("tokens", "batches"),
    [(255, [[4, 3, 2, 1, 0]]), (100, [[4], [3, 2], [1, 0]]), (10, [[4], [3], [2], [1], [0]])],
)
def test_long_prompts_are_answered_in_small_batches(tokens, batches, monkeypatch):
    monkeypatch.setattr(continuation, "BATCH_TOKENS", tokens)
    assert list_answered(make_host("llama"), make_prompts(40), max_new_tokens=1) == batches


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([3] * 60, r"^prompt 0 and max_new_tokens must fit the model's 64 positions, got 60 \+ 8"),
        ([], "^prompt 0 must not be empty"),
    ],
)
def test_prompts_without_room_are_one_line(prompt, message):
    with pytest.raises(ValueError, match=message):
        answer_all(make_host("llama"), [prompt], max_new_tokens=8)


def test_an_answer_ends_with_its_line():
    assert first_line("\n  in May \nand more") == "in May"
    assert first_line(" \n ") == ""
    code = "def fare(stop):\n    return stop.fare * 3"
    assert first_statement(f"\n{code}\n") == code
    assert first_statement("In May.\nx = 3\ny = 4") == "In May."
    commented = "# Load the tickets.\nwith open(path) as file:\n    tickets = json.load(file)"
    assert first_statement(commented) == commented
    assert first_statement("# Tickets\nThey cost three euros.") == "# Tickets"
    assert first_statement(" \n ") == ""
