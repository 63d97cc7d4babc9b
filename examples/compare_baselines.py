"""Compare reading without a memory, with TempLoRA and with Locas on the documents of a dataset.

TempLoRA is PEFT's LoRA in the same loop. `datasets` loads the documents, Accelerate chooses the device and the dtype
and shares the documents among processes, and `evaluate` measures. The figures do not depend on the number of
processes.

python examples/compare_baselines.py                                           # SmolLM2
accelerate launch --num_processes 2 --mixed_precision bf16 examples/compare_baselines.py        # two GPUs
ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 examples/compare_baselines.py          # two processes, CPU
python examples/compare_baselines.py --data notes.jsonl --column text --plot baselines.png
python examples/compare_baselines.py --data emozilla/pg19 --split test --documents 4 --tokens 50000
"""

import argparse
import itertools
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model

from locas_peft import LocasConfig, TestTimeTrainer
from locas_peft.bases import load_base
from locas_peft.evaluation.metrics import Perplexity
from locas_peft.text import python_reference, tokenize

METHODS = {
    "none": (None, None),
    "TempLoRA": (
        lambda: LoraConfig(r=64, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"),
        1e-3,
    ),
    "Locas": (lambda: LocasConfig(r=64, task_type="CAUSAL_LM"), 4e-3),
}
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument(
    "--data", help="a .jsonl, .parquet or .txt file, or a dataset's name on the hub"
)
parser.add_argument("--split", default="train")
parser.add_argument("--column", default="text")
parser.add_argument("--documents", type=int, default=4)
parser.add_argument("--tokens", type=int, default=2_000, help="the first tokens of each document")
parser.add_argument(
    "--model", default="smollm2", help="a folder, a name on the hub, a GGUF file, or smollm2"
)
parser.add_argument("--plot", help="a PNG file")
arguments = parser.parse_args()


def load_documents() -> list[str]:
    """Load the first documents; a file or a dataset on the hub is streamed."""
    if arguments.data is None:
        text = python_reference()
        pieces = [text[start : start + 100_000] for start in range(0, len(text), 100_000)]
        rows = Dataset.from_dict({arguments.column: pieces})
    elif (kind := FORMATS.get(Path(arguments.data).suffix)) is not None:
        options = {"sample_by": "document"} if kind == "text" else {}
        rows = load_dataset(
            kind, data_files=arguments.data, split="train", streaming=True, **options
        )
    else:
        rows = load_dataset(arguments.data, split=arguments.split, streaming=True)
    return [row[arguments.column] for row in itertools.islice(rows, arguments.documents)]


def read(document: str, method: str) -> dict:
    """Read one document with one method; return the records of its chunks."""
    make_config, learning_rate = METHODS[method]
    torch.manual_seed(0)
    model = base if make_config is None else get_peft_model(base, make_config())
    trainer = TestTimeTrainer(
        model, window=512, stride=256, learning_rate=learning_rate, decay_steps=100, context="cache"
    )
    for _ in trainer.read(tokenize(tokenizer, document, arguments.tokens)):
        pass
    if make_config is not None:
        model.unload()
    return {
        "method": method,
        "nll_nats": [chunk.nll_nats for chunk in trainer.chunks],
        "tokens": [chunk.tokens for chunk in trainer.chunks],
        "read": [chunk.stop for chunk in trainer.chunks],
        "seconds": trainer.seconds,
    }


def measure(rows: list[dict], chunks: int | None = None) -> dict:
    """Return the perplexity over all documents, of the first chunks of each."""
    metric = Perplexity()
    for row in rows:
        metric.add_batch(predictions=row["nll_nats"][:chunks], references=row["tokens"][:chunks])
    return metric.compute()


accelerator = Accelerator()  # `load_base` takes its device and its mixed precision
base, tokenizer = load_base(arguments.model)
with accelerator.split_between_processes(load_documents()) as own:
    rows = gather_object([read(document, method) for document in own for method in METHODS])

if accelerator.is_main_process:
    print(f"{'method':10}{'perplexity':>12}{'tokens':>10}{'seconds':>10}")
    curves = {}
    for method in METHODS:
        found = [row for row in rows if row["method"] == method]
        total = measure(found)
        seconds = sum(row["seconds"] for row in found)
        print(f"{method:10}{total['perplexity']:12.2f}{total['scored_tokens']:10,}{seconds:10.1f}")
        longest = max((row["read"] for row in found), key=len)
        curves[method] = (
            longest,
            [measure(found, count)["perplexity"] for count in range(1, len(longest) + 1)],
        )
    if arguments.plot:
        from matplotlib import pyplot

        for method, curve in curves.items():
            pyplot.plot(*curve, label=method)
        pyplot.xlabel("tokens of each document read")
        pyplot.ylabel("perplexity so far")
        pyplot.legend()
        pyplot.savefig(arguments.plot)
accelerator.end_training()
