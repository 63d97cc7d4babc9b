"""Two memories on one model: read two texts, switch between them, mix them in one batch, add them up, forget one.

python examples/two_memories.py                       # the embedded model, half a minute on a CPU
python examples/two_memories.py --model Qwen/Qwen3-0.6B-Base
"""

import argparse

import torch
from peft import get_peft_model

from locas_peft import LocasConfig, TestTimeTrainer, backbone
from locas_peft.bases import load_base
from locas_peft.text import python_reference, tokenize, unwrap

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default=backbone.NAME, help="a folder or a name on the hub")
parser.add_argument("--tokens", type=int, default=10_000, help="read of each text")
parser.add_argument("--out", default="memory", help="the folder of both memories")
arguments = parser.parse_args()

base, tokenizer = load_base(arguments.model)
reference = tokenize(tokenizer, unwrap(python_reference())).to(base.device)
texts = {"beginning": reference[: arguments.tokens], "end": reference[-arguments.tokens :]}

model = get_peft_model(base, LocasConfig(r=32), adapter_name="beginning")
model.add_adapter("end", LocasConfig(r=32))
for name, tokens in texts.items():
    model.set_adapter(name)
    trainer = TestTimeTrainer(model, window=512, stride=256, learning_rate=4e-3, context="cache")
    for _ in trainer.read(tokens):
        pass
    print(f"read the {name}: perplexity {trainer.perplexity:.2f}")
model.save_pretrained(arguments.out)  # a folder each

# The sum and the mean have 64 slots each.
for name, weight in (("sum", 1.0), ("mean", 0.5)):
    model.add_weighted_adapter(list(texts), [weight, weight], name, combination_type="cat")
model.eval()

# One batch, a row each: the same passage, read with each memory, with their sum and their mean, and with none.
names = ["beginning", "end", "sum", "mean", "__base__"]
for passage_name, tokens in texts.items():
    batch = tokens[-500:].expand(len(names), -1)
    with torch.no_grad():
        logits = model(input_ids=batch, adapter_names=names).logits[:, :-1].float()
    losses = torch.nn.functional.cross_entropy(logits.mT, batch[:, 1:], reduction="none")
    print(f"perplexity of a passage from the {passage_name}:")
    for name, loss in zip(names, losses.mean(dim=1), strict=True):
        print(f"  {name} {loss.exp():.2f}")

model.set_adapter("beginning")
model.delete_adapter("end")
print("left:", list(model.peft_config))
