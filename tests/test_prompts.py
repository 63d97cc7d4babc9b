"""Prompts as token ids, by the tokenizer's chat template where it has one."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from locas_peft import backbone
from locas_peft.asking.prompts import (
    decode_after,
    encode_prompt,
    encode_turns,
    find_turn_end,
    fit_turns,
)


@pytest.fixture
def tokenizer():
    return backbone.load()[1]


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"


def test_a_chat_template_is_used_where_there_is_one(tokenizer):
    assert encode_prompt(tokenizer, "Who?") == tokenizer("Who?")["input_ids"]
    tokenizer.chat_template = TEMPLATE
    assert tokenizer.decode(encode_prompt(tokenizer, "Who?")) == "<user>Who?<answer>"


def test_the_oldest_turns_are_left_out_where_they_do_not_fit(tokenizer):
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    system, *turns = [{"role": role, "content": f"number {n}"} for n, role in enumerate(roles)]
    # Without a template: the last message.
    assert fit_turns(tokenizer, turns, None) == tokenizer("number 5")["input_ids"]
    tokenizer.chat_template = TEMPLATE
    parts = [encode_turns(tokenizer, turns[first:]) for first in (0, 2, 4)]
    whole, last = len(parts[0]), len(parts[2])
    for most_tokens, part in ((None, 0), (whole, 0), (whole - 1, 1), (last, 2), (1, 2)):
        assert fit_turns(tokenizer, turns, most_tokens) == parts[part]
    assert len(turns) == 5
    assert fit_turns(tokenizer, [system, *turns], 1) == encode_turns(tokenizer, [system, turns[4]])


def make_words_tokenizer():
    """A tokenizer that leaves out the blank before the first token that it decodes."""
    words = ["<unk>", "\u2581What", "\u2581is", "\u2581it", "<eos>", "<|end|>", "\u2581Reply"]
    numbers = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")
    made.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    return made


def test_a_continuation_keeps_the_blank_before_it(tokenizer):
    words = make_words_tokenizer()
    assert words.decode([2, 3]) == "is it"
    assert decode_after(words, "What", [2, 3, 4]) == "What is it"
    assert decode_after(tokenizer, "", tokenizer(" the sea")["input_ids"]) == " the sea"
    assert decode_after(tokenizer, "Where", tokenizer(" the sea")["input_ids"]) == "Where the sea"


@pytest.mark.parametrize(
    ("end", "token"),
    [("<|end|>", 5), ("<|end|>\\n<eos>", 5), ("<eos>", 4), ("\\n", None), ("", None)],
)
def test_the_end_of_a_turn_is_the_chat_templates(end, token):
    words = make_words_tokenizer()
    words.chat_template = (
        "{% for turn in messages %}{{ turn['role'] + ': ' + turn['content'] + '"
        + end
        + "' }}{% endfor %}"
    )
    assert find_turn_end(words) == token
