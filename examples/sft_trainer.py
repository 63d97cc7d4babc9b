"""A memory under TRL's SFTTrainer: calibration and norm clip happen by themselves.

pip install trl datasets
python examples/sft_trainer.py                        # the embedded model, a minute on a CPU
python examples/sft_trainer.py --model Qwen/Qwen3-0.6B-Base
torchrun --nproc_per_node 2 examples/sft_trainer.py   # two GPUs
"""

import argparse

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from locas_peft import LocasConfig, backbone
from locas_peft.bases import load_base
from locas_peft.text import python_reference, unwrap
from locas_peft.tuner import clip_memories, list_layers

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default=backbone.NAME, help="a folder or a name on the hub")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", default="memory", help="the memory's folder")
arguments = parser.parse_args()

base, tokenizer = load_base(arguments.model)
paragraphs = unwrap(python_reference()).split("\n\n")
rows = [{"text": paragraph} for paragraph in paragraphs if len(paragraph) > 200]

trainer = SFTTrainer(
    base,
    SFTConfig(
        arguments.out,
        max_steps=arguments.steps,
        per_device_train_batch_size=8,
        learning_rate=4e-3,
        max_length=256,
        logging_steps=5,
        bf16=torch.cuda.is_available(),
        save_strategy="no",
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    peft_config=LocasConfig(r=32),
)
trainer.train()
trainer.save_model()

# Each forward, save and merge clips the weights that it uses. They are read here without one.
clip_memories(trainer.model)
layers = list_layers(trainer.model)
largest = max(layer.locas_down["default"].weight.norm(dim=0).max().item() for layer in layers)
print(f"{len(layers)} memories, largest norm of a value {largest:.3f} (never above 1)")
