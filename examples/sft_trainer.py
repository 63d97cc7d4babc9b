"""A memory under TRL's SFTTrainer: calibration and norm clip happen by themselves.

pip install trl datasets
python examples/sft_trainer.py                        # the embedded backbone, a minute on a CPU
python examples/sft_trainer.py --model Qwen/Qwen3-0.6B-Base
"""

import argparse
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from locas_peft import LocasConfig, backbone
from locas_peft.text import python_reference, unwrap
from locas_peft.tuner import clip_memories, list_layers

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument(
    "--model", help="a causal language model, by folder or hub name; the embedded one if left out"
)
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()

if arguments.model is None:
    base, tokenizer = backbone.load()
else:
    base = AutoModelForCausalLM.from_pretrained(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
paragraphs = [
    paragraph for paragraph in unwrap(python_reference()).split("\n\n") if len(paragraph) > 200
]

with tempfile.TemporaryDirectory() as folder:
    trainer = SFTTrainer(
        base,
        SFTConfig(
            folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=8,
            learning_rate=4e-3,
            max_length=256,
            logging_steps=5,
            bf16=torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list([{"text": paragraph} for paragraph in paragraphs]),
        processing_class=tokenizer,
        peft_config=LocasConfig(r=32),
    )
    trainer.train()

# Each forward, save and merge clips the weights that it uses. They are read here without one.
clip_memories(trainer.model)
layers = list_layers(trainer.model)
largest = max(layer.locas_down["default"].weight.norm(dim=0).max().item() for layer in layers)
print(f"{len(layers)} memories, largest norm of a value {largest:.3f} (never above 1)")
