# /// script
# requires-python = ">=3.10"
# dependencies = ["locas_peft"]
#
# [tool.uv.sources]
# locas_peft = { path = ".." }
# ///
"""A memory in a minute: read a text with the embedded model, save, load, compare.

uv run examples/quickstart.py       # makes an environment of its own
python examples/quickstart.py       # where locas_peft is installed
"""

import torch
from peft import PeftModel, get_peft_model

from locas_peft import LocasConfig, TestTimeTrainer, backbone
from locas_peft.text import python_reference, tokenize, unwrap

base, tokenizer = backbone.load()
tokens = tokenize(tokenizer, unwrap(python_reference()), max_tokens=4_000)

model = get_peft_model(base, LocasConfig(r=16))
trainer = TestTimeTrainer(model, window=256, stride=128, learning_rate=4e-3, context="cache")
for chunk in trainer.read(tokens):  # each chunk is scored, then learned
    if chunk.index % 8 == 0:
        print(f"{chunk.stop:5,} tokens read, perplexity so far {trainer.perplexity:.2f}")

model.save_pretrained("memory")
loaded = PeftModel.from_pretrained(backbone.load()[0], "memory").eval()


def score_end() -> float:
    """Return the perplexity of the last 1,000 tokens, which the memory has read."""
    end = tokens[None, -1_000:]
    with torch.no_grad():
        return loaded(input_ids=end, labels=end).loss.exp().item()


with_memory = score_end()
with loaded.disable_adapter():
    without = score_end()
print(
    f"the last 1,000 tokens: perplexity {without:.2f} without the memory, {with_memory:.2f} with it"
)
