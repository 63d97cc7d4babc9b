"""A memory as a LoRA of a wider base: the same logits, without any code of ours."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from families import FAMILIES, MIXTURES, make_host
from peft import PeftModel
from safetensors.torch import save_file
from test_families import R, learn, logits, make_memory

from locas_peft import to_lora, widen_base


def save_lora(model, folder, **options):
    config, tensors = to_lora(model, **options)
    config.save_pretrained(str(folder))
    save_file(tensors, str(folder / "adapter_model.safetensors"))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in MIXTURES])
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


def test_two_memories_of_different_widths_share_one_base(tmp_path):
    expected = {}
    for name, options in {
        "narrow": {"r": 2},
        "some_layers": {"r": 4, "layers_to_transform": [1]},
    }.items():
        model = make_memory("llama", **options)
        learn(model)
        expected[name] = logits(model)
        save_lora(model, tmp_path / name, neurons=4)
    base = make_host("llama")
    widen_base(base, 4)
    assert base.config.intermediate_size == base.model.layers[0].mlp.up_proj.out_features
    lora = PeftModel.from_pretrained(base, str(tmp_path / "narrow"), adapter_name="narrow")
    lora.load_adapter(str(tmp_path / "some_layers"), adapter_name="some_layers")
    for name in ("narrow", "some_layers"):
        lora.set_adapter(name)
        torch.testing.assert_close(logits(lora), expected[name], rtol=1e-4, atol=1e-4)


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
    with pytest.raises(
        ValueError, match="neurons must be at least the memory's r of 4, got 3: raise it"
    ):
        to_lora(model, neurons=3)
    with pytest.raises(ValueError, match="the model has no single LOCAS memory 'other' to export"):
        to_lora(model, "other")
    with pytest.raises(
        ValueError,
        match=r"no single LOCAS memory that is active \(active: none\) to export: add it",
    ):
        to_lora(make_host("llama"))
    model.merge_adapter()
    with pytest.raises(
        ValueError, match="must not be merged, got .*mlp merged: call unmerge_adapter"
    ):
        to_lora(model)
    with pytest.raises(ValueError, match="neurons must be at least 1, got 0"):
        widen_base(make_host("llama"), 0)
