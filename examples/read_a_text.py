"""Let a model read a text once, save what it learned, load it elsewhere, and merge it for good.

python examples/read_a_text.py                                   # the embedded backbone, a minute on a CPU
python examples/read_a_text.py --text book.txt --model Qwen/Qwen3-0.6B-Base
"""

import argparse
import tempfile

import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from locas_peft import LocasConfig, TestTimeTrainer, backbone
from locas_peft.text import load_text, python_reference, tokenize, unwrap

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--text", help="a UTF-8 file; the Python language reference if left out")
parser.add_argument(
    "--model", help="a causal language model, by folder or hub name; the embedded one if left out"
)
parser.add_argument("--tokens", type=int, default=30_000)
arguments = parser.parse_args()


def load_base():
    if arguments.model is None:
        return backbone.load()[0]
    return AutoModelForCausalLM.from_pretrained(arguments.model)


tokenizer = (
    backbone.load()[1]
    if arguments.model is None
    else AutoTokenizer.from_pretrained(arguments.model)
)
text = load_text(arguments.text) if arguments.text else python_reference()
tokens = tokenize(
    tokenizer, unwrap(text) if arguments.model is None else text, max_tokens=arguments.tokens
)
passage = tokens[-2000:].unsqueeze(0)


def perplexity_of_passage(model) -> float:
    with torch.no_grad():
        return model(input_ids=passage, labels=passage).loss.exp().item()


print(f"before reading: {perplexity_of_passage(load_base()):.2f}")

model = get_peft_model(load_base(), LocasConfig(r=64))
trainer = TestTimeTrainer(model, window=512, stride=256, learning_rate=2e-3, context="cache")
for chunk in trainer.read(tokens):
    if chunk.index % 20 == 0:
        print(f"{chunk.stop:6,} tokens read, perplexity so far {trainer.perplexity:.2f}")

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(f"{folder}/memory")
    loaded = PeftModel.from_pretrained(load_base(), f"{folder}/memory")
    print(f"loaded memory:  {perplexity_of_passage(loaded):.2f}")
    loaded.merge_and_unload().save_pretrained(f"{folder}/merged")
    plain = AutoModelForCausalLM.from_pretrained(f"{folder}/merged", dtype=torch.float32)
    print(f"merged, plain:  {perplexity_of_passage(plain):.2f}")
