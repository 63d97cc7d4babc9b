"""The sample of a base's weights, by which a memory recognises the base that it was made for."""

import json

import pytest
import torch
from families import change_config, make_host, make_model
from peft import LoraConfig, get_peft_model, inject_adapter_in_model

from locas_peft import LocasConfig
from locas_peft.memories import load_memory, save_memory
from locas_peft.memories.base_sample import may_be_same_weights, sample_weights


def save(folder, family: str = "llama"):
    save_memory(make_model(family), folder, "base", "card")
    return folder


# Not refused: the base may differ in what no memory depends on.
def test_other_weights_of_the_same_shapes_give_a_warning(tmp_path):
    other = make_host("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.05)
    with pytest.warns(
        UserWarning, match="^this memory was made for a base of the same shapes with other weights"
    ):
        load_memory(other, save(tmp_path / "memory"))


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "gpt_neox", "opt"])
def test_the_same_base_in_another_dtype_gives_no_warning(family, tmp_path):
    folder, sample = save(tmp_path / "memory", family), sample_weights(make_host(family))
    config = LoraConfig(target_modules="all-linear", fan_in_fan_out=family == "gpt2")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        # Warnings are errors.
        load_memory(make_host(family, dtype), folder)
        lora = inject_adapter_in_model(config, make_host(family, dtype))
        assert may_be_same_weights(sample, sample_weights(lora))
    beside = get_peft_model(
        make_host(family), LocasConfig(r=4, modules_to_save=["0"], trainable_token_indices=[5])
    )
    assert sample == sample_weights(beside)
    merged = make_model(family)
    merged.merge_adapter()
    assert sample == sample_weights(merged)
    rounded = make_host(family, torch.float16).to(torch.bfloat16)
    assert may_be_same_weights(sample, sample_weights(rounded))


@pytest.mark.parametrize("weights", [None, 5, "zz", "----", [1], "zzzz"])
def test_a_memory_without_a_usable_sample_of_its_base_loads(weights, tmp_path):
    folder = save(tmp_path / "memory")
    record = json.loads((folder / "adapter_config.json").read_text())["record"]
    host = record["host"]
    if weights == "zzzz":
        weights = weights * (len(host["weights"]) // 4)
    change_config(folder, record={**record, "host": {**host, "weights": weights}})
    load_memory(make_host("llama"), folder)


def test_a_memory_that_peft_saves_has_no_sample(tmp_path):
    make_model().save_pretrained(tmp_path)
    record = json.loads((tmp_path / "adapter_config.json").read_text())["record"]
    assert "weights" not in record["host"]
