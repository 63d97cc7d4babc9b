"""Loading: bases by name, memories by folder, and one line for each fault."""

from types import SimpleNamespace

import pytest
import torch

from locas_peft import backbone
from locas_peft.bases import loading, placing


def test_the_backbone_loads_by_default():
    model, tokenizer = loading.load_base(device="cpu")
    assert (model.config.model_type, model.dtype, model.training) == ("qwen3", torch.float32, False)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert tokenizer.decode(tokenizer("A memory of weights")["input_ids"]) == "A memory of weights"
    model, _ = loading.load_base(backbone.NAME, dtype="bfloat16", device="cpu")
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "known"),
    [
        (backbone.NAME, backbone.NAME),
        (str(backbone.path()), backbone.NAME),
        ("/elsewhere/site-packages/locas_peft/backbone", backbone.NAME),
        (str(backbone.path(backbone.MLP_NAME)), backbone.MLP_NAME),
        ("locas_peft/other", None),
        ("gpt2", None),
    ],
)
def test_the_backbone_is_known_by_its_folder_too(name, known):
    assert backbone.is_embedded(name) == (known is not None)
    assert backbone.name_of(name) == (known or name)


def test_the_backbone_with_two_layer_ffns_is_embedded_too():
    model, tokenizer = loading.load_base(str(backbone.path(backbone.MLP_NAME)), device="cpu")
    assert model.config.model_type == "gpt_neox" and model.config.hidden_act == "relu"
    assert tokenizer.get_vocab() == backbone.load()[1].get_vocab()
    with pytest.raises(
        ValueError, match="name must be one of locas_peft/tinybook-glu, locas_peft/"
    ):
        backbone.load(name="locas_peft/other")


def test_a_folder_is_a_base():
    model, _ = loading.load_base(str(backbone.path()) + "/../backbone/.", device="cpu")
    assert model.config.hidden_size == 256


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./none", "be an existing folder or a name on the hub, got './none': check the path"),
        ("a/b/c", "be an existing folder or a name on the hub, got 'a/b/c': check the path"),
        ("empty", "be a folder with a config.json, got 'empty': choose a saved model"),
        ("memory", "be a base model, got the memory 'memory': name the model it was made for"),
    ],
)
def test_names_that_are_no_base(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"^model must {message}$"):
        loading.load_base(name, device="cpu")


def test_a_broken_base_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no such type"}')
    message = "^model '.*' cannot be loaded .*: give a causal LM with its tokenizer$"
    with pytest.raises(ValueError, match=message) as raised:
        loading.load_base(str(tmp_path), device="cpu")
    assert "\n" not in str(raised.value)


def test_a_base_that_lacks_weights_is_refused(tmp_path):
    model, tokenizer = backbone.load()
    state = model.state_dict()
    del state["model.norm.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"it lacks 1 tensors, such as 'model\.norm\.weight'"):
        loading.load_base(str(tmp_path))


@pytest.fixture
def fail_to_load(tmp_path, monkeypatch):
    """Return a function that loads a folder where transformers raises an error."""

    def load(error):
        def fail(*args, **kwargs):
            raise error

        monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", fail)
        loading.load_base(str(tmp_path))

    backbone.load()[0].config.save_pretrained(tmp_path)
    return load


@pytest.mark.parametrize(
    "error", [ImportError("bitsandbytes is missing"), RuntimeError("a GPU is needed")]
)
def test_what_a_quantised_base_needs_is_one_line(error, fail_to_load):
    with pytest.raises(ValueError, match=str(error)) as caught:
        fail_to_load(error)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't allocate memory: you tried to allocate 9")]
)
def test_too_little_memory_is_not_called_a_damaged_model(error, fail_to_load):
    with pytest.raises(type(error)) as caught:
        fail_to_load(error)
    assert caught.value is error


def test_an_unreachable_hub_is_one_line(monkeypatch):
    import huggingface_hub

    def refuse(self, name, timeout):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    message = r"the hub cannot be reached \(ConnectionError\): give a folder, .*leave --model out"
    with pytest.raises(ValueError, match=message):
        loading.load_base("somebody/some-model", device="cpu")


def test_unknown_dtypes_and_devices():
    with pytest.raises(ValueError, match="^dtype must be one of auto, stored, .*, got 'int3'"):
        loading.load_base(dtype="int3", device="cpu")
    with pytest.raises(ValueError, match="^device must be one that torch can use, got 'abacus' "):
        loading.load_base(device="abacus")


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A folder with the embedded backbone's weights in bfloat16."""
    folder = tmp_path_factory.mktemp("half")
    for part in backbone.load(torch.bfloat16):
        part.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("device", ["auto", "cpu"])
@pytest.mark.parametrize(
    ("fast", "dtype", "expected"),
    [
        (True, "auto", torch.bfloat16),
        (False, "auto", torch.float32),
        (False, "stored", torch.bfloat16),
        (False, "bfloat16", torch.bfloat16),
    ],
)
def test_a_cpu_that_is_slow_at_16_bits_gets_float32(
    device, fast, dtype, expected, half, monkeypatch
):
    cpu = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(placing, "join_processes", lambda: cpu)
    monkeypatch.setattr(placing, "is_fast_in_bfloat16", lambda device: fast)
    assert loading.load_base(half, dtype, device)[0].dtype == expected


def test_float32_is_only_taken_where_it_fits(half, monkeypatch):
    monkeypatch.setattr(placing, "is_fast_in_bfloat16", lambda device: False)
    stored = sum(each.nbytes for each in backbone.load(torch.bfloat16)[0].parameters())
    monkeypatch.setattr(placing, "get_max_memory", lambda: {"cpu": int(1.9 * stored / 0.8)})
    assert loading.load_base(half, device="cpu")[0].dtype == torch.bfloat16
