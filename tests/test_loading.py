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
    assert (
        loading.load_base(backbone.NAME, dtype="bfloat16", device="cpu")[0].dtype == torch.bfloat16
    )


def test_the_backbone_is_known_by_its_folder_too():
    assert backbone.is_embedded(backbone.NAME)
    assert backbone.is_embedded(str(backbone.path()))
    assert backbone.is_embedded("/elsewhere/site-packages/locas_peft/backbone")
    assert not backbone.is_embedded("locas_peft/other")


def test_the_backbone_with_two_layer_ffns_is_embedded_too():
    folder = str(backbone.path(backbone.MLP_NAME))
    assert backbone.name_of(folder) == backbone.MLP_NAME and backbone.is_embedded(folder)
    assert backbone.name_of(str(backbone.path())) == backbone.NAME
    assert backbone.name_of("gpt2") == "gpt2" and not backbone.is_embedded("gpt2")
    model, tokenizer = loading.load_base(folder, device="cpu")
    assert model.config.model_type == "gpt_neox" and model.config.hidden_act == "relu"
    assert tokenizer.get_vocab() == backbone.load()[1].get_vocab()
    message = "name must be one of locas_peft/tinybook-glu, locas_peft/tinybook-mlp"
    with pytest.raises(ValueError, match=message):
        backbone.load(name="locas_peft/other")


def test_a_folder_is_a_base():
    model, _ = loading.load_base(str(backbone.path()) + "/../backbone/.", device="cpu")
    assert model.config.hidden_size == 256


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "./none",
            "model must be an existing folder or a name on the hub, got './none': check the path",
        ),
        (
            "a/b/c",
            "model must be an existing folder or a name on the hub, got 'a/b/c': check the path",
        ),
        ("empty", "model must be a folder with a config.json, got 'empty': choose a saved model"),
        (
            "memory",
            "model must be a base model, got the memory 'memory': name the model it was made for",
        ),
    ],
)
def test_names_that_are_no_base(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError) as raised:
        loading.load_base(name, device="cpu")
    assert str(raised.value) == message


def test_a_broken_base_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no such type"}')
    with pytest.raises(ValueError) as raised:
        loading.load_base(str(tmp_path), device="cpu")
    assert str(raised.value).startswith(f"model {str(tmp_path)!r} cannot be loaded (")
    assert str(raised.value).endswith("): give a causal LM with its tokenizer")
    assert "\n" not in str(raised.value)


def test_a_base_that_lacks_weights_is_refused(tmp_path):
    model, tokenizer = backbone.load()
    state = {
        name: value for name, value in model.state_dict().items() if name != "model.norm.weight"
    }
    model.save_pretrained(tmp_path, state_dict=state)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"it lacks 1 tensors, such as 'model\.norm\.weight'"):
        loading.load_base(str(tmp_path))


@pytest.mark.parametrize(
    "error", [ImportError("bitsandbytes is missing"), RuntimeError("a GPU is needed")]
)
def test_what_a_quantised_base_needs_is_one_line(error, tmp_path, monkeypatch):
    model, tokenizer = backbone.load()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ValueError) as caught:
        loading.load_base(str(tmp_path))
    assert str(error) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't allocate memory: you tried to allocate 9")]
)
def test_too_little_memory_is_not_called_a_damaged_model(error, tmp_path, monkeypatch):
    base, _ = backbone.load()
    base.save_pretrained(tmp_path)

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(type(error)) as caught:
        loading.load_base(str(tmp_path))
    assert caught.value is error


def test_an_unreachable_hub_is_one_line(monkeypatch):
    import huggingface_hub

    def refuse(self, name, timeout):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    message = (
        "model 'somebody/some-model' is no folder here, and the hub cannot be reached (ConnectionError): "
        "give a folder, check the network, or leave --model out for the embedded backbone"
    )
    with pytest.raises(ValueError) as raised:
        loading.load_base("somebody/some-model", device="cpu")
    assert str(raised.value) == message


def test_unknown_dtypes_and_devices():
    with pytest.raises(
        ValueError,
        match="^dtype must be one of auto, stored, float32, bfloat16, float16, got 'int3': choose one of them$",
    ):
        loading.load_base(dtype="int3", device="cpu")
    with pytest.raises(ValueError, match="^device must be one that torch can use, got 'abacus' "):
        loading.load_base(device="abacus")


@pytest.fixture
def half(tmp_path):
    """A folder with the embedded backbone's weights in bfloat16."""
    model, tokenizer = backbone.load(torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    tokenizer.save_pretrained(tmp_path / "half")
    return str(tmp_path / "half")


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
    monkeypatch.setattr(
        placing, "join_processes", lambda: SimpleNamespace(device=torch.device("cpu"))
    )
    monkeypatch.setattr(placing, "is_fast_in_bfloat16", lambda device: fast)
    assert loading.load_base(half, dtype, device)[0].dtype == expected


def test_float32_is_only_taken_where_it_fits(half, monkeypatch):
    monkeypatch.setattr(placing, "is_fast_in_bfloat16", lambda device: False)
    stored = sum(each.nbytes for each in backbone.load(torch.bfloat16)[0].parameters())
    monkeypatch.setattr(placing, "get_max_memory", lambda: {"cpu": int(1.9 * stored / 0.8)})
    assert loading.load_base(half, device="cpu")[0].dtype == torch.bfloat16


def test_a_precision_that_accelerate_was_given_is_kept(half, monkeypatch):
    monkeypatch.setattr(placing, "is_fast_in_bfloat16", lambda device: False)
    monkeypatch.setattr(placing, "is_initialized", lambda: True)
    monkeypatch.setattr(
        placing, "AcceleratorState", lambda: SimpleNamespace(mixed_precision="bf16")
    )
    assert loading.load_base(half, device="cpu")[0].dtype == torch.bfloat16
