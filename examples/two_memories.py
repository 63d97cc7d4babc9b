"""Two memories on one model: read two texts, switch between them, mix them in one batch, add them up, forget one.

python examples/two_memories.py                       # the embedded backbone, half a minute on a CPU
python examples/two_memories.py --model Qwen/Qwen3-0.6B-Base
"""

import argparse

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from locas_peft import LocasConfig, TestTimeTrainer, backbone
from locas_peft.text import python_reference, tokenize, unwrap

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument(
    "--model", help="a causal language model, by folder or hub name; the embedded one if left out"
)
parser.add_argument("--tokens", type=int, default=10_000, help="read of each text")
arguments = parser.parse_args()

if arguments.model is None:
    base, tokenizer = backbone.load()
else:
    base = AutoModelForCausalLM.from_pretrained(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
reference = tokenize(tokenizer, unwrap(python_reference()))
texts = {"beginning": reference[: arguments.tokens], "end": reference[-arguments.tokens :]}

model = get_peft_model(base, LocasConfig(r=32), adapter_name="beginning")
model.add_adapter("end", LocasConfig(r=32))
for name, tokens in texts.items():
    model.set_adapter(name)
    trainer = TestTimeTrainer(model, window=512, stride=256, learning_rate=2e-3, context="cache")
    for _ in trainer.read(tokens):
        pass
    print(f"read the {name}: perplexity {trainer.perplexity:.2f}")
for name, weight in (("sum", 1.0), ("mean", 0.5)):  # 64 slots each
    model.add_weighted_adapter(["beginning", "end"], [weight, weight], name, combination_type="cat")
model.eval()

# One batch, a row each: the same passage, read with each memory, with their sum and their mean, and with none.
names = ["beginning", "end", "sum", "mean", "__base__"]
for passage_name, tokens in texts.items():
    batch = tokens[-500:].expand(len(names), -1)
    with torch.no_grad():
        logits = model(input_ids=batch, adapter_names=names).logits[:, :-1].float()
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), batch[:, 1:], reduction="none"
    ).mean(dim=1)
    row = ", ".join(f"{name} {loss.exp():.2f}" for name, loss in zip(names, losses, strict=True))
    print(f"perplexity of a passage from the {passage_name}: {row}")

model.set_adapter("beginning")
model.delete_adapter("end")
print("left:", list(model.peft_config))
