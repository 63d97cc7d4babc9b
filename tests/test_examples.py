"""The folders of examples that run elsewhere: PEFT's method comparison, and a Space that runs the page."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from locas_command.program import app

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


RUN_STUB = """
import argparse, os
import torch
from peft import PeftConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from utils import SHAPE  # a module beside run.py, as in PEFT's folder

parser = argparse.ArgumentParser()
parser.add_argument("-v", "--verbose", action="store_true")
parser.add_argument("path_experiment")
path = parser.parse_args().path_experiment
assert len(path.split(os.path.sep)) == 3 and path.startswith("experiments")
model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SHAPE)), PeftConfig.from_pretrained(path)).train()
optimizer, losses = torch.optim.AdamW(model.parameters(), lr=4e-3), []
ids = torch.arange(32)[None] % 7
for _ in range(12):
    optimizer.zero_grad()
    losses.append(model(input_ids=ids, labels=ids, num_items_in_batch=31).loss)
    losses[-1].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
assert losses[-1] < losses[0]
model.eval()
with torch.inference_mode():
    model.generate(input_ids=ids, max_new_tokens=4, pad_token_id=0)
model.save_pretrained("saved")
print(model.get_nb_trainable_parameters(), os.path.getsize("saved/adapter_model.safetensors") > 0)
"""


@pytest.mark.slow
def test_peft_s_method_comparison_runs_on_a_stub(tmp_path):
    folder = tmp_path / "MetaMathQA"
    shutil.copytree(ROOT / "examples" / "method_comparison", folder)
    (folder / "run.py").write_text(RUN_STUB)
    shape = "{'hidden_size': 32, 'intermediate_size': 128, 'num_hidden_layers': 2, 'num_attention_heads': 2"
    (folder / "utils.py").write_text(f"SHAPE = {shape}, 'vocab_size': 64}}\n")
    (experiment,) = (folder / "experiments" / "locas").iterdir()
    found = json.loads((experiment / "training_params.json").read_text())["optimizer_kwargs"]["lr"]
    assert found == 4e-3
    command = [sys.executable, "run_locas.py", "-v", str(experiment.relative_to(folder))]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "True" in done.stdout


def test_the_space_runs_the_page_on_its_port():
    lines = (ROOT / "examples" / "space" / "Dockerfile").read_text().splitlines()
    command = json.loads(
        next(line for line in lines if line.startswith("CMD")).removeprefix("CMD ")
    )
    function, bound, _ = app.parse_args(command[1:], exit_on_error=False, print_error=False)
    card = ModelCard.load(
        ROOT / "examples" / "space" / "README.md", ignore_metadata_errors=True
    ).data.to_dict()
    assert function.__name__ == "app" and command[0] == "locas"
    assert card["sdk"] == "docker" and card["app_port"] == bound.kwargs["port"]
    assert bound.kwargs["host"] == "0.0.0.0" and bound.kwargs["no_browser"]


def test_the_quick_start_declares_what_it_imports():
    script = (ROOT / "examples" / "quickstart.py").read_text()
    block = "\n".join(
        line.removeprefix("#").strip() for line in script.split("# ///")[1].splitlines()[1:]
    )
    assert 'dependencies = ["locas_peft"]' in block and 'locas_peft = { path = ".." }' in block
    assert (
        f'requires-python = "{re.search(r"requires-python = .(.+).$", PROJECT, re.MULTILINE)[1]}"'
        in block
    )


@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name
)
def test_an_example_is_short(example):
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 60
