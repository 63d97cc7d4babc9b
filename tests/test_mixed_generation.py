"""Generation's options with a mixed batch: each row of the output is what its memory alone says."""

from dataclasses import replace

import pytest
import torch
import transformers as tf
from families import logits, make_host, make_tokens, teach
from peft import PeftModel, get_peft_model

from locas_peft import LocasConfig

ROWS = ["one", "__base__", "two"]


def make_mixed(family: str = "llama", **fields) -> PeftModel:
    """Two memories, the first of which has fields of its own."""
    host = make_t5() if family == "t5" else make_host(family)
    task = "SEQ_2_SEQ_LM" if family == "t5" else "CAUSAL_LM"
    config = LocasConfig(r=4, init_weights="random", task_type=task)
    model = get_peft_model(host, replace(config, **fields), adapter_name="one")
    model.add_adapter("two", replace(config, seed=1))
    teach(model, "one")
    teach(model, "two", seed=1)
    for key, weight in model.named_parameters():
        if "modules_to_save.one." in key:
            weight.data += torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return model.eval()


def make_t5() -> tf.PreTrainedModel:
    torch.manual_seed(0)
    config = tf.T5Config(
        vocab_size=64, d_model=16, d_ff=24, d_kv=8, num_layers=2, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = tf.T5ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data *= 3
    return model


def generate_alone(model, row, **options) -> torch.Tensor:
    """Return what the memory of one row alone generates."""
    if row == "__base__":
        with model.disable_adapter():
            return model.generate(**options)
    model.set_adapter(row)
    return model.generate(**options)


def check_rows(model, ids, **options) -> None:
    options = {"max_new_tokens": 5, "min_new_tokens": 5, **options}
    mixed = model.generate(input_ids=ids, adapter_names=ROWS, **options)
    times = len(mixed) // len(ROWS)
    assert len(mixed) == times * len(ROWS)
    for number, row in enumerate(ROWS):
        alone = generate_alone(model, row, input_ids=ids[number : number + 1], **options)
        assert torch.equal(mixed[number * times : (number + 1) * times], alone), row


OPTIONS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams and returns": {"num_beams": 3, "num_return_sequences": 2},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "penalty": {"repetition_penalty": 1.3},
    "prefill in chunks": {"prefill_chunk_size": 3, "num_beams": 2},
    "guidance": {"guidance_scale": 1.5, "num_beams": 2},
    "one return": {"num_return_sequences": 1},
    # The most likely token of each memory is drawn.
    "sampled": {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
}
FEW = ("greedy", "beams", "beams and returns")
CASES = [("llama", None, name) for name in OPTIONS]
CASES += [("opt", None, "beams and returns"), ("opt", None, "sampled")]
CASES += [("qwen3_moe", None, "beams and returns")]
# An encoder sees each row once.
CASES += [("t5", None, name) for name in FEW]
# One memory trains a module.
CASES += [("llama", "lm_head", name) for name in FEW]
CASES += [("llama", "embed_tokens", name) for name in FEW]


@pytest.mark.parametrize(("family", "module", "name"), CASES)
def test_options_of_generation(family, module, name):
    fields = {"modules_to_save": [module]} if module else {}
    check_rows(make_mixed(family, **fields), make_tokens(3, 6), **OPTIONS[name])


@pytest.mark.parametrize("where", ["argument", "position", "model"])
def test_options_in_a_generation_config(where):
    model = make_mixed()
    ids = make_tokens(3, 6)
    options = {"max_new_tokens": 4, "num_beams": 3, "num_return_sequences": 2}
    expected = model.generate(input_ids=ids, adapter_names=ROWS, **options)
    config = tf.GenerationConfig(**options)
    if where == "argument":
        got = model.generate(input_ids=ids, adapter_names=ROWS, generation_config=config)
    elif where == "position":
        got = model.generate(ids, config, adapter_names=ROWS)
    else:
        model.generation_config.update(**options)
        got = model.generate(input_ids=ids, adapter_names=ROWS)
        # A forward repeats no row, whatever the generation config says.
        assert logits(model, ids, adapter_names=ROWS).shape[0] == 3
    assert torch.equal(got, expected)


def test_rows_by_their_embeddings():
    model = make_mixed()
    ids = make_tokens(3, 6)
    embeddings = model.get_input_embeddings()(ids).detach()
    options = {"max_new_tokens": 4, "num_beams": 2}
    expected = model.generate(input_ids=ids, adapter_names=ROWS, **options)
    got = model.generate(inputs_embeds=embeddings, adapter_names=ROWS, **options)
    assert torch.equal(got, expected[:, ids.shape[1] :])


@pytest.mark.parametrize("rows", [ROWS[:2], [*ROWS, "one"], ROWS * 2])
@pytest.mark.parametrize("name", ["greedy", "beams", "sampled"])
def test_other_numbers_of_names_than_rows_are_refused(rows, name):
    model = make_mixed()
    options = {"max_new_tokens": 2, **OPTIONS[name]}
    with pytest.raises(ValueError, match="Length of `adapter_names` should be the same"):
        model.generate(input_ids=make_tokens(3, 6), adapter_names=rows, **options)
