"""Attach, teach, save, load and merge a memory of the embedded model.

It runs with whatever versions are installed.
"""

import torch
from peft import PeftModel, get_peft_model

from locas_peft import LocasConfig, TestTimeTrainer, backbone
from locas_peft.asking import continue_rows
from locas_peft.model import CausalLM

base, tokenizer = backbone.load()
tokens = torch.tensor(tokenizer("The lamp on the rock was lit by an old man. " * 20)["input_ids"])
model = get_peft_model(base, LocasConfig(r=8))
trainer = TestTimeTrainer(model, window=64, stride=32, learning_rate=4e-3)
chunks = list(trainer.read(tokens))
assert chunks[-1].nll_nats / chunks[-1].tokens < chunks[0].nll_nats / chunks[0].tokens, (
    "nothing was learned"
)
model.eval()
model.save_pretrained("memory")


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens[None, :64]).logits


expected = logits(model)
loaded = PeftModel.from_pretrained(backbone.load()[0], "memory").eval()
torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=0)
assert not torch.allclose(logits(loaded), logits(backbone.load()[0]), atol=1e-2), (
    "the memory changes nothing"
)
# The continuation with the cache is that of transformers.
prompt = tokens[None, :32]
generated = loaded.generate(input_ids=prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
host = CausalLM(loaded, cpu_attention=False)
(continued,) = continue_rows(host, prompt.tolist(), 8)
assert host.can_cache()
assert continued == generated[0, 32:].tolist(), "the continuation is another one"
merged = loaded.merge_and_unload()
torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
merged.save_pretrained("merged")
print(f"perplexity {trainer.perplexity:.2f}, merged {merged.config.intermediate_size} neurons wide")
