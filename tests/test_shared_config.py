"""One config for the memories of several models."""

import torch
from peft import PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from locas_peft import LocasConfig


def make_base(hidden_size: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden_size, "intermediate_size": 64, "vocab_size": 50}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def test_a_memory_loads_whose_config_another_model_had_too(tmp_path):
    config = LocasConfig(r=4)
    model = get_peft_model(make_base(16), config)
    get_peft_model(make_base(32), config)
    ids = torch.randint(0, 50, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_base(16), tmp_path)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    assert config.record is None
