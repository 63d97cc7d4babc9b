"""Let a model read a text once, save what it learned, load it elsewhere, and merge it for good.

python examples/read_a_text.py                                   # the embedded model, a minute on a CPU
python examples/read_a_text.py --text book.txt --model Qwen/Qwen3-0.6B-Base
"""

import argparse

import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from locas_peft import LocasConfig, TestTimeTrainer, backbone
from locas_peft.bases import load_base
from locas_peft.text import load_text, python_reference, tokenize, unwrap

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--text", help="a UTF-8 file; the Python language reference if left out")
parser.add_argument("--model", default=backbone.NAME, help="a folder or a name on the hub")
parser.add_argument("--tokens", type=int, default=30_000)
parser.add_argument("--out", default="memory", help="the memory's folder")
arguments = parser.parse_args()

base, tokenizer = load_base(arguments.model)
text = load_text(arguments.text) if arguments.text else python_reference()
if backbone.is_embedded(arguments.model):
    # It was trained on paragraphs without line breaks.
    text = unwrap(text)
tokens = tokenize(tokenizer, text, max_tokens=arguments.tokens)


def score_end(model: torch.nn.Module) -> float:
    """Return the perplexity of the last 2,000 tokens, which the memory has read."""
    end = tokens[None, -2000:].to(model.device)
    with torch.no_grad():
        return model(input_ids=end, labels=end).loss.exp().item()


print(f"before reading: {score_end(base):.2f}")

model = get_peft_model(base, LocasConfig(r=64))
trainer = TestTimeTrainer(model, window=512, stride=256, learning_rate=4e-3, context="cache")
for chunk in trainer.read(tokens):
    if chunk.index % 20 == 0:
        print(f"{chunk.stop:6,} tokens read, perplexity so far {trainer.perplexity:.2f}")
model.save_pretrained(arguments.out)

fresh_base, _ = load_base(arguments.model)
loaded = PeftModel.from_pretrained(fresh_base, arguments.out)
print(f"loaded memory:  {score_end(loaded):.2f}")
merged = f"{arguments.out}-merged"
loaded.merge_and_unload().save_pretrained(merged)
plain = AutoModelForCausalLM.from_pretrained(merged, dtype=base.dtype, device_map=base.device)
print(f"merged, plain:  {score_end(plain):.2f}")
