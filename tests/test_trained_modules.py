"""Modules and tokens that PEFT trains beside a memory: saved, loaded, merged, switched and mixed."""

import copy
import itertools
import json

import pytest
import torch
import transformers as tf
from families import FAMILIES, VOCABULARY, logits, make_tokens, same, snapshot, teach
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file

from locas_peft import LocasConfig
from locas_peft.memories import load_memory

EMBEDDINGS = {"llama": "embed_tokens", "gpt2": "wte"}
NEW = [VOCABULARY, VOCABULARY + 1]
pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of two families, with tied embeddings and without."""
    found = {}
    for family, tied in itertools.product(EMBEDDINGS, (False, True)):
        config = copy.deepcopy(FAMILIES[family])
        config.tie_word_embeddings = tied
        torch.manual_seed(0)
        found[family, tied] = folder = tmp_path_factory.mktemp("base")
        tf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return found


@pytest.fixture
def folder(folders):
    """The checkpoint of a llama whose embeddings are not tied."""
    return folders["llama", False]


def load_base(folder, resized=False, dtype=torch.float32, seed=7):
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if resized:
        torch.manual_seed(seed)
        model.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
    return model.eval()


def make_config(seed=0, **fields) -> LocasConfig:
    return LocasConfig(r=4, init_weights="random", seed=seed, **fields)


def train(model, name="default", seed=1) -> None:
    """Change all that is trained of a memory."""
    teach(model, name, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if f"modules_to_save.{name}." in key or f"trainable_tokens_delta.{name}" in key:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += 0.3 * noise.to(parameter)


def tokens(*last) -> torch.Tensor:
    return torch.cat([make_tokens(2, 8), torch.tensor([last, last])], dim=1)


def spell(fields, family) -> dict:
    """Return fields with the family's name of the embedding, and the new tokens."""
    text = json.dumps(fields).replace("embedding", EMBEDDINGS[family])
    return json.loads(text)


FIELDS = [
    {},
    {"trainable_token_indices": NEW},
    {"trainable_token_indices": {"embedding": NEW}},
    {"trainable_token_indices": {"embedding": NEW, "lm_head": NEW}},
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embedding"]},
    {"modules_to_save": ["embedding", "lm_head"]},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied")
def test_new_tokens_and_modules_of_a_resized_base(family, tied, fields, folders, tmp_path):
    folder = folders[family, tied]
    memory = tmp_path / "memory"
    ids = tokens(*NEW)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        config = make_config(**spell(fields, family))
        model = get_peft_model(load_base(folder, True, dtype), config)
        train(model)
        expected = logits(model.eval(), ids)
        model.save_pretrained(memory)
        keys = load_file(memory / "adapter_model.safetensors").keys()
        assert not any(".default" in key for key in keys)
        loaded = PeftModel.from_pretrained(load_base(folder, True, dtype), memory)
        assert torch.equal(logits(loaded, ids), expected)
        # The rows of new tokens were random: the memory's file has them.
        loaded = load_memory(load_base(folder, True, dtype, seed=8), memory).eval()
        assert torch.equal(logits(loaded, ids), expected)
        model.merge_and_unload().save_pretrained(tmp_path / "merged")
        loaded = load_base(tmp_path / "merged", dtype=dtype)
        error = (logits(loaded, ids) - expected).norm() / expected.norm()
        assert error < tolerance


@pytest.mark.parametrize(
    ("dtype", "autocast_adapter_dtype"), [(torch.bfloat16, True), (torch.float16, False)]
)
@pytest.mark.parametrize("fields", FIELDS[:2] + FIELDS[4:5], ids=str)
def test_loading_in_low_memory_is_exact(dtype, autocast_adapter_dtype, fields, folder, tmp_path):
    model = get_peft_model(load_base(folder, True, dtype), make_config(**fields))
    train(model)
    model.save_pretrained(tmp_path)
    loaded = []
    for low in (False, True):
        base = load_base(folder, True, dtype)
        options = {"low_cpu_mem_usage": low, "autocast_adapter_dtype": autocast_adapter_dtype}
        loaded.append(PeftModel.from_pretrained(base, tmp_path, **options).eval())
    assert same(loaded[0], snapshot(loaded[1]))
    assert torch.equal(*(logits(each, tokens(*NEW)) for each in loaded))


IDS = tokens(5, 6)
IN_FULL = {"modules_to_save": ["lm_head"]}
TOKEN = {"trainable_token_indices": [5]}


PAIRS = [
    (TOKEN, {}),
    ({}, TOKEN),
    (TOKEN, {"trainable_token_indices": [6, 7]}),
    (TOKEN, {"trainable_token_indices": {"lm_head": [6, 7]}}),
    (IN_FULL, {}),
    ({}, IN_FULL),
    (IN_FULL, TOKEN),
    (IN_FULL, {"modules_to_save": ["embed_tokens"]}),
]


def make_pair(folder, fields) -> tuple[PeftModel, dict[str, torch.Tensor]]:
    """Return a model with the memories one and two, and what each of them and the base say."""
    model = get_peft_model(load_base(folder), make_config(**fields[0]), adapter_name="one")
    model.add_adapter("two", make_config(1, **fields[1]))
    train(model, "one", seed=1)
    train(model, "two", seed=2)
    model.eval()
    with model.disable_adapter():
        says = {"__base__": logits(model, IDS)}
    for name in ("one", "two"):
        says[name] = say(model, name)
    return model, says


def say(model, name) -> torch.Tensor:
    model.set_adapter(name)
    return logits(model.eval(), IDS)


def test_a_pickle_with_embeddings_is_loaded(folder, tmp_path):
    """The config names the embeddings of the file that was written last."""
    model = get_peft_model(load_base(folder, resized=True), make_config())
    train(model)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    model.save_pretrained(tmp_path, safe_serialization=False)
    (tmp_path / "adapter_model.safetensors").unlink()
    loaded = PeftModel.from_pretrained(load_base(folder, resized=True, seed=8), tmp_path)
    ids = tokens(*NEW)
    assert torch.equal(logits(loaded.eval(), ids), logits(model.eval(), ids))


@pytest.mark.parametrize("fields", PAIRS, ids=str)
def test_two_memories_with_other_fields_are_saved_loaded_and_deleted(fields, folder, tmp_path):
    model, says = make_pair(folder, fields)
    assert torch.equal(says["__base__"], logits(load_base(folder), IDS))
    rows = ["one", "__base__", "two", "one"]
    mixed = logits(model, IDS[:1].expand(4, -1), adapter_names=rows)
    for row, name in zip(mixed, rows, strict=True):
        torch.testing.assert_close(row, says[name][0], rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(load_base(folder), tmp_path / "two", adapter_name="two")
    loaded.load_adapter(tmp_path / "one", "one")
    for name in ("one", "two"):
        assert torch.equal(say(loaded, name), says[name])
        alone = PeftModel.from_pretrained(load_base(folder), tmp_path / name)
        assert torch.equal(logits(alone, IDS), says[name])
    loaded.delete_adapter("one")
    assert torch.equal(say(loaded, "two"), says["two"])


def test_tokens_of_the_memory_that_is_left_are_active_and_may_be_merged_by_name(folder):
    model = get_peft_model(load_base(folder), make_config(trainable_token_indices=[5, 6]))
    train(model)
    ids = tokens(5, 6)
    expected = logits(model.eval(), ids)
    model.add_adapter("other", make_config(1))
    train(model, "other", 2)
    model.set_adapter("other")
    other = logits(model, ids)
    model.merge_adapter(adapter_names=["other"])
    torch.testing.assert_close(logits(model, ids), other, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    with pytest.warns(UserWarning, match="was active which is now deleted"):
        model.delete_adapter("other")
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("fields", PAIRS, ids=str)
@pytest.mark.parametrize("name", ["one", "two"])
def test_one_of_two_memories_with_other_fields_is_merged(name, fields, folder):
    model, says = make_pair(folder, fields)
    model.set_adapter(name)
    model.merge_adapter()
    torch.testing.assert_close(logits(model, IDS), says[name], rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    for other in ("one", "two"):
        assert torch.equal(say(model, other), says[other])
    model.set_adapter(name)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged, IDS), says[name], rtol=1e-4, atol=1e-4)


BY_TOKENS = {"trainable_token_indices": {"lm_head": [5]}}


@pytest.mark.parametrize("fields", [(IN_FULL, BY_TOKENS), (BY_TOKENS, IN_FULL)], ids=str)
def test_a_module_is_not_trained_in_full_and_by_its_tokens(fields, folder):
    model = get_peft_model(load_base(folder), make_config(**fields[0]), adapter_name="one")
    before = snapshot(model)
    with pytest.raises(ValueError, match="marked to be trained fully: .* got lm_head"):
        model.add_adapter("two", make_config(**fields[1]))
    assert same(model, before)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_nor_where_the_embeddings_are_tied(folders):
    base = load_base(folders["llama", True])
    before = snapshot(base)
    with pytest.raises(ValueError, match="marked to be trained fully: .* got lm_head"):
        get_peft_model(base, make_config(**IN_FULL, trainable_token_indices=[5]))
    assert same(base, before)


@pytest.mark.parametrize(
    "indices", [{"lm_head": [5, 6]}, {"embed_tokens": [5, 6], "lm_head": [3]}], ids=str
)
@pytest.mark.parametrize("verb", ["merge_adapter", "merge_and_unload"])
def test_tokens_of_tied_embeddings_that_differ_are_not_merged(indices, verb, folders):
    config = make_config(trainable_token_indices=indices)
    model = get_peft_model(load_base(folders["llama", True]), config)
    train(model)
    before = snapshot(model)
    with pytest.raises(ValueError, match="tied") as raised:
        getattr(model, verb)()
    assert "\n" not in str(raised.value) and same(model, before)


def test_memories_that_train_one_module_are_not_active_together(folder):
    model, says = make_pair(folder, (IN_FULL, IN_FULL))
    model.set_adapter("one")
    message = "Only one adapter can be set at a time .* lm_head"
    with pytest.raises(ValueError, match=message) as raised:
        model.base_model.set_adapter(["one", "two"])
    assert "\n" not in str(raised.value)
    assert torch.equal(logits(model, IDS), says["one"])


@pytest.mark.parametrize("active", [["two", "three"], ["one", "two", "three"]])
def test_deleting_one_of_three_memories_with_a_trained_module(active, folder):
    model, _ = make_pair(folder, (IN_FULL, {}))
    model.add_adapter("three", make_config(2))
    train(model, "three", seed=3)
    model.set_adapter("one")
    model.base_model.set_adapter(["two", "three"])
    expected = logits(model.eval())
    model.base_model.set_adapter(active)
    model.delete_adapter("one")
    assert model.active_adapters == ["two", "three"] and list(model.peft_config) == ["two", "three"]
    assert torch.equal(logits(model), expected)


def test_merged_tokens_are_unmerged_with_the_memory(folder):
    model, says = make_pair(folder, (TOKEN, {}))
    model.set_adapter("one")
    model.merge_adapter()
    with pytest.warns(UserWarning, match="Unmerging the model first"):
        model.set_adapter("two")
    assert torch.equal(logits(model, IDS), says["two"])
    with model.disable_adapter():
        assert torch.equal(logits(model, IDS), says["__base__"])
