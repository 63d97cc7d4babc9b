"""Memories by folder: loaded onto their base, described from their files, and one line for each fault.

`test_hostile_files.py` has the files that are refused.
"""

import copy
import gc
import os
import shutil

import psutil
import pytest
import torch
from families import FAMILIES, logits, make_host, make_tokens, same, snapshot
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from locas_peft import LocasConfig, backbone, calibrate
from locas_peft.asking import continue_texts
from locas_peft.bases.loading import load_base
from locas_peft.library import Library
from locas_peft.memories import loading, share_weights
from locas_peft.memories.folder import pack, unpack


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """A calibrated memory of the embedded backbone, r=4."""
    model, _ = backbone.load()
    model = get_peft_model(model, LocasConfig(r=4, task_type="CAUSAL_LM"))
    calibrate(model, [torch.arange(32).unsqueeze(0)])
    folder = tmp_path_factory.mktemp("memory")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    """A LoRA of the embedded backbone."""
    folder = tmp_path_factory.mktemp("lora")
    config = LoraConfig(r=2, target_modules=["q_proj"])
    get_peft_model(backbone.load()[0], config).save_pretrained(folder)
    return folder


def make_llama(tied=False):
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES["llama"])
    config.tie_word_embeddings = tied
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't allocate memory: you tried to allocate 9")]
)
def test_too_little_memory_is_not_called_a_damaged_memory(error, memory, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(loading.PeftModel, "from_pretrained", fail)
    with pytest.raises(type(error)) as caught:
        loading.load_memory(make_llama(), memory)
    assert caught.value is error


def test_a_replacement_of_a_memory_is_finished_before_it_loads(memory, tmp_path):
    shutil.copytree(memory, tmp_path / ".locas-moving")
    (tmp_path / ".locas-moving" / ".old").mkdir()
    (tmp_path / ".locas-moving" / "adapter_config.json").rename(tmp_path / "adapter_config.json")
    assert loading.describe_memory(tmp_path)["parameters"] == 6 * (3 * 4 * 256 + 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in memory.iterdir()
    )


def test_a_signed_folder_of_0_2_0_loads_is_packed_and_is_forgotten(memory, tmp_path):
    """Version 0.2.0 wrote two files of signatures beside a memory."""
    folder = tmp_path / "library" / "ann"
    shutil.copytree(memory, folder)
    for name in ("model.sig", "model-and-text.sig"):
        (folder / name).write_text("{}")
    base, _ = backbone.load()
    assert list(loading.load_memory(base, folder).peft_config) == ["default"]
    pack(folder, tmp_path / "ann.zip")
    (tmp_path / "unpacked").mkdir()
    unpack(tmp_path / "ann.zip", tmp_path / "unpacked")
    names = {path.name for path in (tmp_path / "unpacked").iterdir()}
    assert {"adapter_config.json", "model.sig", "model-and-text.sig"} <= names
    Library(tmp_path / "library").forget("ann")
    assert list((tmp_path / "library").iterdir()) == []


def test_loading_draws_no_random_numbers(memory):
    base, _ = backbone.load()
    state = torch.get_rng_state()
    loading.load_memory(base, memory)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_memory_loads_for_reading(memory):
    base, _ = load_base(device="cpu")
    model = loading.load_memory(base, memory, pad_to_multiple_of=256)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.merge_and_unload().config.intermediate_size == 1024


@pytest.mark.parametrize(
    ("family", "misfit"),
    [
        ("llama", r"LlamaForCausalLM '' \(.*\)"),
        ("gpt2", r"GPT2LMHeadModel '' \(it has other modules\)"),
    ],
)
def test_an_adapter_of_another_base_is_refused(family, misfit, lora):
    message = f"^memory '.*' does not fit {misfit}: load the base that it was made for$"
    with pytest.raises(ValueError, match=message):
        loading.load_memory(make_host(family), lora)


def test_fields_that_a_memory_does_not_have(lora):
    message = "^pad_to_multiple_of has no meaning for a memory of type LORA, got 8: leave it out$"
    with pytest.raises(ValueError, match=message):
        loading.load_memory(backbone.load()[0], lora, pad_to_multiple_of=8)


def test_an_adapter_that_would_change_the_base_is_refused(tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")
    get_peft_model(make_host("llama"), config).save_pretrained(tmp_path)
    base = make_host("llama")
    before = snapshot(base)
    with pytest.raises(ValueError, match="must not change the base, got init_lora_weights='pissa'"):
        loading.load_memory(base, tmp_path)
    assert same(base, before)


def test_a_memory_describes_itself(memory):
    found = loading.describe_memory(memory)
    assert found["peft_type"] == "LOCAS" and found["r"] == 4 and found["init"] == "topk"
    assert found["dtype"] == "float32" and found["replaces"] == []
    assert found["parameters"] == 6 * (3 * 4 * 256 + 3)
    assert found["bytes"] == (memory / "adapter_model.safetensors").stat().st_size
    assert [layer["name"] for layer in found["layers"]] == [
        f"model.layers.{number}.mlp" for number in range(6)
    ]
    for layer in found["layers"]:
        assert layer["r"] == 4
        assert layer["tau"] > 0
        assert len(layer["slots"]) == 4
        assert layer["gate"]["mean"] == pytest.approx(1, rel=1e-5)
        assert layer["up"]["max"] == pytest.approx(1, rel=1e-5)
        assert layer["down"] == {"mean": 0.0, "max": 0.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            None,
            "must be a folder that holds a memory, got .*, no folder: make one with `locas read",
        ),
        ("{", "must be JSON .*: write it again$"),
        ('{"r": 4}', "must name its peft_type, got none: copy or save the memory again$"),
        ('{"peft_type": "LOCAS"}', "has no adapter_model.safetensors: copy or save the memory"),
    ],
    ids=["no folder", "no JSON", "no type", "no tensors"],
)
def test_damaged_memories(config, message, tmp_path):
    folder, base = tmp_path / "memory", make_llama()
    if config is not None:
        folder.mkdir()
        (folder / "adapter_config.json").write_text(config)
    with pytest.raises(ValueError, match=message):
        loading.describe_memory(folder)
    with pytest.raises(ValueError, match=message):
        loading.load_memory(base, folder)
    assert not hasattr(base, "peft_config")


def test_a_pickle_of_tensors_loads(memory, tmp_path):
    shutil.copytree(memory, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_model.safetensors").unlink()
    # As `save_pretrained(safe_serialization=False)` does.
    torch.save(tensors, tmp_path / "adapter_model.bin")
    assert loading.describe_memory(tmp_path)["layers"] == loading.describe_memory(memory)["layers"]
    assert list(loading.load_memory(backbone.load()[0], tmp_path).peft_config) == ["default"]


def save_with_embeddings(folder, tied=False) -> torch.Tensor:
    """Save a memory with other embeddings than those of `make_llama`; return the logits with it."""
    host = make_llama(tied)
    with torch.no_grad():
        for weight in {host.model.embed_tokens.weight, host.lm_head.weight}:
            weight.mul_(3)
    model = get_peft_model(host, LocasConfig(r=4, task_type="CAUSAL_LM"))
    calibrate(model, [make_tokens()])
    torch.nn.init.ones_(host.model.layers[0].mlp.locas_down["default"].weight)
    model.save_pretrained(folder, save_embedding_layers=True)
    return logits(model.eval())


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_of_a_memory_are_gone_with_it(tied, tmp_path):
    expected = save_with_embeddings(tmp_path, tied)
    base = make_llama(tied)
    before = logits(base)
    weights = dict(base.named_parameters())
    with loading.memory_attached(base, tmp_path) as model:
        assert torch.equal(logits(model), expected)
        embeddings = base.get_input_embeddings().weight
        assert (base.get_output_embeddings().weight is embeddings) == tied
    assert torch.equal(logits(base), before)
    for name, weight in base.named_parameters():
        assert weight is weights[name]


def test_embeddings_of_a_memory_leave_a_model_of_the_same_weights_alone(tmp_path):
    expected = save_with_embeddings(tmp_path)
    base = make_llama()
    before = logits(base)
    model = loading.load_memory(share_weights(base), tmp_path)
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(base), before)


def test_a_memory_that_was_merged_while_it_was_attached_is_taken_out(tmp_path):
    save_with_embeddings(tmp_path)
    base = make_llama()
    before = snapshot(base)
    with loading.memory_attached(base, tmp_path) as model:
        model.merge_adapter()
    assert same(base, before)


@pytest.mark.slow
def test_cycles_of_attaching_answering_and_detaching_leave_nothing(memory):
    """LOCAS_CYCLES=10000 takes half an hour; 500 where it is not set.

    safetensors itself keeps some bytes of each load (docs/upstream/safetensors-load.md); a cycle has two.
    """
    base, tokenizer = load_base(device="cpu")
    cycles = int(os.environ.get("LOCAS_CYCLES", 500))
    prompt, process, sizes = [tokenizer("The old man")["input_ids"]], psutil.Process(), []
    for cycle in range(cycles):
        with loading.memory_attached(base, memory) as model:
            continue_texts(model, tokenizer, prompt, 2)
        if cycle % 100 == 99:
            gc.collect()
            sizes.append((process.memory_info().rss, process.num_fds(), len(gc.get_objects())))
    assert not hasattr(base, "peft_config")
    (bytes_before, files_before, objects_before), (bytes_after, files_after, objects_after) = (
        sizes[1],
        sizes[-1],
    )
    assert files_after <= files_before
    assert objects_after <= 1.001 * objects_before
    before = process.memory_info().rss
    for _ in range(2 * cycles):
        load_file(memory / "adapter_model.safetensors")
    kept_by_safetensors = process.memory_info().rss - before
    assert bytes_after - bytes_before <= 1.2 * kept_by_safetensors + 5 * 2**20, sizes
