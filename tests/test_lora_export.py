"""A memory as a LoRA of a wider base: the same logits, without any code of ours."""

import json
import re
import subprocess
import sys

import pytest
import torch
from families import each_family, make_host, make_model, teach
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_families import DENSE, R, learn, logits, make_memory
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2Model

from locas_command import program
from locas_peft import LocasConfig, backbone, calibrate, to_lora, widen_base
from locas_peft.memories import export_memories, save_memory


def save_lora(model, folder, **options):
    config, tensors = to_lora(model, **options)
    config.save_pretrained(str(folder))
    save_file(tensors, str(folder / "adapter_model.safetensors"))


@pytest.mark.parametrize("family", each_family(DENSE))
@pytest.mark.parametrize("neurons", [None, R + 3])
def test_stock_lora_on_the_wider_base_equals_the_memory(family, neurons, tmp_path):
    model = make_memory(family)
    learn(model)
    expected, base = logits(model), make_host(family)
    untouched = logits(base)
    assert (expected - untouched).abs().max() > 1e-2
    save_lora(model, tmp_path, neurons=neurons)
    assert torch.equal(logits(model), expected)
    widen_base(base, neurons or R)
    base.save_pretrained(str(tmp_path / "base"))
    wide = type(base).from_pretrained(str(tmp_path / "base"), attn_implementation="eager")
    torch.testing.assert_close(logits(wide), untouched, rtol=0, atol=1e-5)
    lora = PeftModel.from_pretrained(wide, str(tmp_path))
    torch.testing.assert_close(logits(lora), expected, rtol=1e-4, atol=1e-4)


def test_a_model_without_a_head_is_exported(tmp_path):
    def load_base() -> Qwen2Model:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = Qwen2Config(vocab_size=64, intermediate_size=24, num_key_value_heads=1, **sizes)
        torch.manual_seed(0)
        return Qwen2Model(config).eval()

    config = LocasConfig(r=4, init_weights="random", task_type="FEATURE_EXTRACTION")
    model = get_peft_model(load_base(), config).eval()
    teach(model)
    ids = torch.tensor([[3, 4, 5]])
    expected = model(input_ids=ids).last_hidden_state
    save_lora(model, tmp_path)
    base = load_base()
    widen_base(base, 4)
    lora = PeftModel.from_pretrained(base, str(tmp_path))
    torch.testing.assert_close(lora(input_ids=ids).last_hidden_state, expected)


@pytest.mark.slow
def test_the_exported_files_need_no_code_of_ours(tmp_path):
    model, base = make_memory("llama"), make_host("llama")
    learn(model)
    save_lora(model, tmp_path / "adapter")
    widen_base(base, R)
    base.save_pretrained(str(tmp_path / "base"))
    assert (
        json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["peft_type"]
        == "LORA"
    )
    script = (
        "import sys, torch\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n"
        f"base = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'base')!r})\n"
        f"model = PeftModel.from_pretrained(base, {str(tmp_path / 'adapter')!r})\n"
        "assert 'locas_peft' not in sys.modules\n"
        "print(model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0, -1, :3].tolist())"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0, -1, :3]
    torch.testing.assert_close(torch.tensor(json.loads(found)), expected, rtol=1e-4, atol=1e-4)


def test_bad_exports_are_refused():
    model = make_memory("llama")
    message = "neurons must be at least the memory's r of 4, got 3: raise it"
    with pytest.raises(ValueError, match=message):
        to_lora(model, neurons=3)
    with pytest.raises(ValueError, match="the model has no single LOCAS memory 'other' to export"):
        to_lora(model, "other")
    message = r"no single LOCAS memory that is active \(active: none\) to export: add it"
    with pytest.raises(ValueError, match=message):
        to_lora(make_host("llama"))
    model.merge_adapter()
    message = "must not be merged, got .*mlp merged: call unmerge_adapter"
    with pytest.raises(ValueError, match=message):
        to_lora(model)
    with pytest.raises(ValueError, match="neurons must be at least 1, got 0"):
        widen_base(make_host("llama"), 0)
    beside = make_memory("llama", modules_to_save=["model.norm"])
    message = "the memory must have slots alone, got one with modules_to_save: merge it"
    with pytest.raises(ValueError, match=message):
        to_lora(beside)


# Of memories of the embedded backbone.
ANN = {"r": 3, "layers_to_transform": [1, 4]}
BOB = {"r": 5}


def make_library(folder, **memories: dict) -> dict[str, torch.Tensor]:
    """Save memories of the embedded backbone that change its output; return the logits with each."""
    expected = {}
    for number, (name, options) in enumerate(memories.items()):
        model = get_peft_model(backbone.load()[0], LocasConfig(**options))
        calibrate(model, [torch.arange(1, 65)[None]])
        generator = torch.Generator().manual_seed(number)
        for weight_name, weight in model.named_parameters():
            if "locas_down" in weight_name:
                weight.data.normal_(std=0.1, generator=generator)
        save_memory(model, folder / name, backbone.NAME, "card")
        expected[name] = logits_of_backbone(model)
    return expected


def logits_of_backbone(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(1, 25)[None]).logits


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        program.main([str(argument) for argument in arguments])
    return ended.value.code


def test_a_library_is_one_base_and_an_adapter_for_each_memory(tmp_path, capsys):
    memories = {"ann": ANN, "bob 2": BOB}
    expected = make_library(tmp_path / "notes", **memories)
    (tmp_path / "notes" / "unfinished" / "checkpoint").mkdir(parents=True)
    out = tmp_path / "served"
    assert run("export", tmp_path / "notes", "--out", out) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        f"The base, 5 neurons wider in each FFN, is in {out / 'base'}: any engine loads it",
        f"2 LoRA adapters of rank 5 at most: vLLM finds each in {out / 'adapters'} by its name",
        "vLLM needs --max-lora-rank 8",
    ]
    assert sorted(path.name for path in out.iterdir()) == ["adapters", "base"]
    assert sorted(path.name for path in (out / "adapters").iterdir()) == ["ann", "bob 2"]
    base = AutoModelForCausalLM.from_pretrained(out / "base", dtype=torch.float32)
    assert base.config.intermediate_size == 768 + 5
    plain_logits = logits_of_backbone(base)
    torch.testing.assert_close(plain_logits, logits_of_backbone(backbone.load()[0]))
    lora = PeftModel.from_pretrained(base, out / "adapters" / "ann", adapter_name="ann")
    lora.load_adapter(out / "adapters" / "bob 2", adapter_name="bob 2")
    for name, options in memories.items():
        config = json.loads((out / "adapters" / name / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"]) == ("LORA", options["r"])
        # vLLM's resolver compares this name with its --model.
        assert config["base_model_name_or_path"] == str(out / "base")
        lora.set_adapter(name)
        assert (expected[name] - plain_logits).abs().max() > 1e-2
        torch.testing.assert_close(logits_of_backbone(lora), expected[name], rtol=1e-4, atol=1e-4)


def test_a_memory_that_is_added_later_is_exported_alone(tmp_path):
    make_library(tmp_path / "notes", ann=ANN)
    options = ["--no-base", "--neurons", 6, "--base-name", "served/base"]
    assert run("export", tmp_path / "notes", "--out", tmp_path / "more", *options) == 0
    (adapter,) = (tmp_path / "more").rglob("adapter_config.json")
    assert adapter == tmp_path / "more" / "adapters" / "ann" / "adapter_config.json"
    assert json.loads(adapter.read_text())["base_model_name_or_path"] == "served/base"
    lora = load_file(adapter.with_name("adapter_model.safetensors"))
    shapes = {tuple(tensor.shape) for tensor in lora.values()}
    assert shapes == {(3, 256), (768 + 6, 3), (3, 768 + 6), (256, 3)}


def make_lora_of_backbone():
    return get_peft_model(backbone.load()[0], LoraConfig(target_modules=["up_proj"]))


def make_memory_beside_a_norm():
    config = LocasConfig(r=2, init_weights="random", modules_to_save=["model.norm"])
    return get_peft_model(backbone.load()[0], config)


@pytest.mark.parametrize(
    ("make", "base_name", "message"),
    [
        (make_lora_of_backbone, backbone.NAME, "memory must be of type LOCAS, got '.*zoe' of type"),
        (make_memory_beside_a_norm, backbone.NAME, "memory must have slots alone, got '.*zoe'"),
        (make_model, backbone.NAME, "this memory was made for another base "),
        (make_model, "another/base", "a library must hold memories of one base, got "),
    ],
)
def test_a_library_that_cannot_be_exported_is_one_line_and_leaves_nothing(
    make, base_name, message, tmp_path, capsys
):
    make_library(tmp_path / "notes", ann=ANN)
    save_memory(make(), tmp_path / "notes" / "zoe", base_name, "card")
    assert run("export", tmp_path / "notes", "--out", tmp_path / "new" / "served") == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert printed.out == "" and re.match(f"error: {message}", line)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_a_memory_beside_a_mixture_is_refused_before_anything_is_written(tmp_path):
    save_memory(make_model("mixtral"), tmp_path / "m", "host", "card")
    message = "^a memory beside a mixture of experts cannot be exported"
    with pytest.raises(ValueError, match=message):
        export_memories(make_host("mixtral"), None, {"a": tmp_path / "m"}, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
