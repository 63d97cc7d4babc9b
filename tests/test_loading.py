"""Loading: bases by name, memories by folder, and one line for each fault."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from locas_peft import LocasConfig, backbone, calibrate
from locas_peft.bases import loading


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """A calibrated memory of the embedded backbone, r=4."""
    model, _ = backbone.load()
    model = get_peft_model(model, LocasConfig(r=4, task_type="CAUSAL_LM"))
    calibrate(model, [torch.arange(32).unsqueeze(0)])
    folder = tmp_path_factory.mktemp("memory")
    model.save_pretrained(folder)
    return folder


def tiny_llama():
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return AutoModelForCausalLM.from_config(config)


def test_the_backbone_loads_by_default():
    model, tokenizer = loading.load_base(device="cpu")
    assert (model.config.model_type, model.dtype, model.training) == ("qwen3", torch.float32, False)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert tokenizer.decode(tokenizer("A memory of weights")["input_ids"]) == "A memory of weights"
    assert loading.load_base(backbone.NAME, dtype="bfloat16", device="cpu")[0].dtype == torch.bfloat16


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
    with pytest.raises(ValueError, match="name must be one of locas_peft/tinybook-glu, locas_peft/tinybook-mlp"):
        backbone.load(name="locas_peft/other")


def test_a_folder_is_a_base():
    model, _ = loading.load_base(str(backbone.path()) + "/../backbone/.", device="cpu")
    assert model.config.hidden_size == 256


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./none", "model must be an existing folder or a name on the hub, got './none': check the path"),
        ("a/b/c", "model must be an existing folder or a name on the hub, got 'a/b/c': check the path"),
        ("empty", "model must be a folder with a config.json, got 'empty': choose a saved model"),
        ("memory", "model must be a base model, got the memory 'memory': name the model it was made for"),
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
    state = {name: value for name, value in model.state_dict().items() if name != "model.norm.weight"}
    model.save_pretrained(tmp_path, state_dict=state)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"it lacks 1 tensors, such as 'model\.norm\.weight'"):
        loading.load_base(str(tmp_path))


@pytest.mark.parametrize("error", [ImportError("bitsandbytes is missing"), RuntimeError("a GPU is needed")])
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


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory: you tried to allocate 9")])
def test_too_little_memory_is_not_called_a_damaged_model(error, memory, tmp_path, monkeypatch):
    base, _ = backbone.load()
    base.save_pretrained(tmp_path)

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", fail)
    monkeypatch.setattr(loading.PeftModel, "from_pretrained", fail)
    for load in (lambda: loading.load_base(str(tmp_path)), lambda: loading.load_memory(base, memory)):
        with pytest.raises(type(error)) as caught:
            load()
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
        ValueError, match="^dtype must be one of auto, float32, bfloat16, float16, got 'int3': choose one of them$"
    ):
        loading.load_base(dtype="int3", device="cpu")
    with pytest.raises(ValueError, match="^device must be one that torch can use, got 'abacus' "):
        loading.load_base(device="abacus")


def test_a_launcher_chooses_device_and_dtype(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert loading.choose_device("auto") == torch.device("cuda")
    for rank, expected in (("0", "cuda:0"), ("1", "cuda:1"), ("2", "cuda:0")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert loading.choose_device("auto") == torch.device(expected)
    assert loading.choose_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    assert loading.choose_device("auto") == torch.device("cpu")
    for precision, expected in (("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        assert loading.load_base()[0].dtype == expected
    assert loading.load_base(dtype="float32")[0].dtype == torch.float32
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(
        ValueError, match="^mixed precision must be one of no, bf16, fp16, got 'fp8': choose one of them$"
    ):
        loading.load_base()


def test_a_replacement_of_a_memory_is_finished_before_it_loads(memory, tmp_path):
    shutil.copytree(memory, tmp_path / ".locas-moving")
    (tmp_path / ".locas-moving" / ".old").mkdir()
    (tmp_path / ".locas-moving" / "adapter_config.json").rename(tmp_path / "adapter_config.json")
    assert loading.describe_memory(tmp_path)["parameters"] == 6 * (3 * 4 * 256 + 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in memory.iterdir())


@pytest.mark.parametrize("key", ["cls", "self"])
def test_a_config_with_keys_that_are_no_fields_is_one_line(memory, tmp_path, key):
    shutil.copytree(memory, tmp_path, dirs_exist_ok=True)
    config = json.loads((memory / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, key: 1}))
    for load in (
        loading.describe_memory,
        lambda folder: loading.load_memory(loading.load_base(device="cpu")[0], folder),
    ):
        with pytest.raises(ValueError, match="adapter_config.json .*: copy or save the memory again$"):
            load(tmp_path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user whom permissions bind")
def test_unreadable_weights_are_not_called_truncated(memory, tmp_path):
    shutil.copytree(memory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_model.safetensors").chmod(0)
    with pytest.raises(ValueError, match=r"cannot be read \(Permission denied\): check the file's permissions$"):
        loading.describe_memory(tmp_path)


def test_a_memory_loads_for_reading(memory):
    base, _ = loading.load_base(device="cpu")
    model = loading.load_memory(base, memory, pad_to_multiple_of=256)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.merge_and_unload().config.intermediate_size == 1024


def test_a_memory_of_another_base_is_refused(memory, tmp_path):
    with pytest.raises(ValueError, match="^this memory was made for another base "):
        loading.load_memory(tiny_llama(), memory)
    base, _ = loading.load_base(device="cpu")
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError) as raised:
        loading.load_memory(tiny_llama(), tmp_path)
    assert str(raised.value).startswith(f"memory {str(tmp_path)!r} does not fit LlamaForCausalLM '' (")
    assert str(raised.value).endswith("): load the base that it was made for")
    other = GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(ValueError) as raised:
        loading.load_memory(AutoModelForCausalLM.from_config(other), tmp_path)
    message = f"memory {str(tmp_path)!r} does not fit GPT2LMHeadModel '' (it has other modules): "
    assert str(raised.value) == message + "load the base that it was made for"


def test_a_memory_s_file_is_checked_before_anything_is_made(memory, tmp_path):
    def write(**fields):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **fields}))

    config = json.loads((memory / "adapter_config.json").read_text())
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes((memory / "adapter_model.safetensors").read_bytes())
    base = loading.load_base(device="cpu")[0]
    write(r=10**9, init_strategy="gaussian")
    for look in (loading.describe_memory, lambda folder: loading.load_memory(base, folder)):
        with pytest.raises(ValueError, match="does not fit its config at model.layers.0.mlp: "):
            look(tmp_path)
    write(modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match="no tensor is for modules_to_save. Save the memory again.$"):
        loading.load_memory(base, tmp_path)
    write(trainable_token_indices=[1])
    with pytest.raises(ValueError, match="no tensor is for trainable_token_indices. Save the memory again.$"):
        loading.load_memory(base, tmp_path)
    for fields, message in (
        ({"peft_type": "NOPE"}, "must name a peft_type that PEFT has, got 'NOPE': update peft$"),
        ({"base_model_name_or_path": 5}, "must name its base by a string, got 5: copy or save the memory again$"),
    ):
        write(**fields)
        with pytest.raises(ValueError, match=message):
            loading.load_memory(base, tmp_path)
    write()
    tensors = load_file(weights)
    weights.unlink()
    with pytest.raises(ValueError, match="has no adapter_model.safetensors: copy or save the memory again$"):
        loading.load_memory(base, tmp_path)
    assert not hasattr(base, "peft_config")
    torch.save(tensors, tmp_path / "adapter_model.bin")  # as `save_pretrained(safe_serialization=False)` does
    assert loading.describe_memory(tmp_path)["layers"] == loading.describe_memory(memory)["layers"]
    assert list(loading.load_memory(base, tmp_path).peft_config) == ["default"]


def test_describing_refuses_what_loading_refuses(memory, tmp_path):
    tensors = load_file(memory / "adapter_model.safetensors")
    tau = "base_model.model.model.layers.0.mlp.locas_tau"
    for name, value, message in (
        ("nan", {tau: torch.tensor(torch.nan)}, "locas_tau holds values that are not finite"),
        ("absurd", {tau: torch.tensor(1e38)}, "locas_tau holds 1e[+]38, at most 1e[+]12 in size expected"),
        (
            "head",
            {"base_model.model.lm_head.weight": torch.zeros(4096, 256)},
            "lm_head.weight is a weight of the base",
        ),
    ):
        shutil.copytree(memory, tmp_path / name)
        save_file({**tensors, **value}, tmp_path / name / "adapter_model.safetensors")
        for look in (loading.describe_memory, lambda folder: loading.load_memory(backbone.load()[0], folder)):
            with pytest.raises(ValueError, match=message):
                look(tmp_path / name)


def test_a_description_names_what_replaces_weights_of_the_base(memory, tmp_path):
    found = loading.describe_memory(memory)
    assert (found["replaces"], found["learned"]) == ([], False)
    config = LocasConfig(r=4, init_strategy="random", modules_to_save=["model.norm"])
    model = get_peft_model(backbone.load()[0], config)
    model.get_base_model().model.layers[3].mlp.locas_down["default"].weight.data[0, 0] = 0.5
    model.save_pretrained(tmp_path)
    found = loading.describe_memory(tmp_path)
    assert (found["replaces"], found["learned"]) == (["model.norm.weight"], True)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.q_proj.base_layer.weight"])
def test_another_adapter_s_file_cannot_replace_weights_of_the_base(tmp_path, name):
    base, _ = loading.load_base(device="cpu")
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    loading.load_memory(loading.load_base(device="cpu")[0], tmp_path)
    shape = (4096, 256) if name == "lm_head.weight" else (256, 256)
    save_file({**tensors, f"base_model.model.{name}": torch.zeros(shape)}, tmp_path / "adapter_model.safetensors")
    base, _ = loading.load_base(device="cpu")
    before = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    with pytest.raises(ValueError, match=f"{name} is a weight of the base and no part of the adapter; save it with"):
        loading.load_memory(base, tmp_path)
    after = base.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)


def test_another_adapter_that_does_not_fit_leaves_the_base(tmp_path):
    base, _ = loading.load_base(device="cpu")
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    model = tiny_llama()
    before, names = model.state_dict(), [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError, match="does not fit LlamaForCausalLM"):
        loading.load_memory(model, tmp_path)
    assert [name for name, _ in model.named_modules()] == names and not hasattr(model, "peft_config")
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in before.items())


def test_fields_that_a_memory_does_not_have(tmp_path):
    base, _ = loading.load_base(device="cpu")
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    message = "^pad_to_multiple_of has no meaning for a memory of type LORA, got 8: leave it out$"
    with pytest.raises(ValueError, match=message):
        loading.load_memory(loading.load_base(device="cpu")[0], tmp_path, pad_to_multiple_of=8)


def test_a_memory_describes_itself(memory):
    found = loading.describe_memory(memory)
    assert (found["peft_type"], found["r"], found["init"], found["dtype"]) == ("LOCAS", 4, "topk", "float32")
    assert found["parameters"] == 6 * (3 * 4 * 256 + 2)
    assert found["bytes"] == (memory / "adapter_model.safetensors").stat().st_size
    assert [layer["name"] for layer in found["layers"]] == [f"model.layers.{number}.mlp" for number in range(6)]
    for layer in found["layers"]:
        assert layer["r"] == 4
        assert layer["tau"] > 0
        assert len(layer["slots"]) == 4
        assert layer["gate"]["mean"] == pytest.approx(1, rel=1e-5)
        assert layer["up"]["max"] == pytest.approx(1, rel=1e-5)
        assert layer["down"] == {"mean": 0.0, "max": 0.0}


def test_damaged_memories(memory, tmp_path):
    nothing = tmp_path / "nothing"
    message = (
        f"memory must be a folder that holds a memory, got {str(nothing)!r}, no folder: "
        "make one with `locas memorize TEXT --out DIR`"
    )
    with pytest.raises(ValueError) as raised:
        loading.describe_memory(nothing)
    assert str(raised.value) == message
    config = tmp_path / "adapter_config.json"
    config.write_text("{")
    with pytest.raises(ValueError, match="must be JSON .*: write it again$"):
        loading.describe_memory(tmp_path)
    config.write_text(json.dumps({"r": 4}))
    with pytest.raises(ValueError, match="must name its peft_type, got none: copy or save the memory again$"):
        loading.describe_memory(tmp_path)
    config.write_text((memory / "adapter_config.json").read_text())
    with pytest.raises(ValueError, match="has no adapter_model.safetensors: copy or save the memory again$"):
        loading.describe_memory(tmp_path)
    whole = (memory / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"is truncated or not a safetensors file .*: copy or save it again\.$"):
        loading.describe_memory(tmp_path)
