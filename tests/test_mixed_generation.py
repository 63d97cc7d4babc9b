"""Generation's options with a mixed batch: each row of the output is what its memory alone says."""

import pytest
import torch
import transformers as tf
from families import logits, make_host, make_tokens, teach
from peft import PeftModel, get_peft_model

from locas_peft import LocasConfig

ROWS = ["one", "__base__", "two"]


def make_mixed(family="llama", host=None, **fields) -> PeftModel:
    host = make_host(family) if host is None else host
    task = "SEQ_2_SEQ_LM" if host.config.is_encoder_decoder else "CAUSAL_LM"
    config = LocasConfig(r=4, init_weights="random", task_type=task, **fields)
    model = get_peft_model(host, config, adapter_name="one")
    other = LocasConfig(r=4, init_weights="random", task_type=task, seed=1)
    model.add_adapter("two", other)
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
}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("llama", name) for name in OPTIONS),
        *((f, "beams and returns") for f in ("opt", "qwen3_moe")),
    ],
)
def test_options_of_generation(family, name):
    check_rows(make_mixed(family), make_tokens(3, 6), **OPTIONS[name])


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_sampled_rows_are_of_their_memory(family):
    """The most likely token of each memory is drawn: top_k=1."""
    model = make_mixed(family)
    ids = make_tokens(3, 6)
    check_rows(model, ids, do_sample=True, top_k=1, num_return_sequences=2)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}])
@pytest.mark.parametrize("where", ["argument", "position", "model"])
def test_options_in_a_generation_config(options, where):
    model = make_mixed()
    ids = make_tokens(3, 6)
    expected = model.generate(input_ids=ids, adapter_names=ROWS, max_new_tokens=4, **options)
    config = tf.GenerationConfig(max_new_tokens=4, **options)
    if where == "argument":
        got = model.generate(input_ids=ids, adapter_names=ROWS, generation_config=config)
    elif where == "position":
        got = model.generate(ids, config, adapter_names=ROWS)
    else:
        model.generation_config.update(max_new_tokens=4, **options)
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


@pytest.mark.parametrize("options", list(OPTIONS.values())[:3], ids=list(OPTIONS)[:3])
def test_an_encoder_sees_each_row_once(options):
    check_rows(make_mixed(host=make_t5()), make_tokens(3, 6), **options)


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("options", list(OPTIONS.values())[:3], ids=list(OPTIONS)[:3])
def test_with_a_module_that_one_memory_trains(module, options):
    check_rows(make_mixed(modules_to_save=[module]), make_tokens(3, 6), **options)


@pytest.mark.parametrize("rows", [ROWS[:2], [*ROWS, "one"], ROWS * 2])
def test_other_numbers_of_names_than_rows_are_refused(rows):
    model = make_mixed()
    ids = make_tokens(3, 6)
    for options in ({}, {"num_return_sequences": 2, "do_sample": True}, {"num_beams": 2}):
        with pytest.raises(ValueError, match="Length of `adapter_names` should be the same"):
            model.generate(input_ids=ids, adapter_names=rows, max_new_tokens=2, **options)
    with pytest.raises(ValueError, match="Length of `adapter_names` should be the same"):
        logits(model, ids, adapter_names=rows)
    with pytest.raises(ValueError, match="Length of `adapter_names` should be the same"):
        logits(model, make_tokens(6, 6), adapter_names=ROWS)
