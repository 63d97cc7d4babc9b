"""Figures that a redesign must not change: readings, memories, merges, exports, one resume after a kill.

    python tests/golden/figures.py --write    # record them in tests/golden/figures.json
    python tests/golden/figures.py            # compare with the record; exit code 1 where one differs

Floating-point sums depend on the processor and on the number of threads, so a comparison is exact on the machine of
the record alone. The record names its processor.
"""

import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

RECORD = Path(__file__).with_name("figures.json")
THREADS = 2
READ = "read"
COMMON = ["--max-tokens", "4096", "--dtype", "float32", "--device", "cpu"]
READINGS = {
    "locas-glu": [],
    "locas-glu ridge": ["--update", "ridge"],
    "lora paper recompute": ["--method", "lora", "--preset", "paper", "--context", "recompute"],
    "locas-mlp written": [
        "--method",
        "locas-mlp",
        "--preset",
        "paper",
        "--model",
        "locas_peft/tinybook-mlp",
    ],
}
README_TOKENS = 10_000


def run(*arguments: str, check: bool = True, **options) -> subprocess.CompletedProcess:
    """Run the `locas` command on a fixed number of threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
    command = [sys.executable, "-m", "locas_peft", *arguments]
    return subprocess.run(
        command, check=check, env=environment, capture_output=True, text=True, **options
    )


def digest_tensors(folder: Path) -> str:
    """Return the SHA-256 over the names, dtypes, shapes and bytes of all tensors in a folder.

    The flag that tells whether a memory was calibrated is left out: 0.2.0 wrote none.
    """
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            if "locas_calibrated" in name:
                continue
            found.update(
                f"{path.relative_to(folder)} {name} {tensor.dtype} {list(tensor.shape)}\n".encode()
            )
            found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def read(text: Path, out: Path, *options: str) -> dict[str, object]:
    """Read a text into a memory; return its figures."""
    result = run(READ, str(text), "--out", str(out), *COMMON, *options, "--json", "-")
    reading = json.loads(result.stdout)
    return {
        "nll_nats": reading["nll_nats"],
        "perplexity": reading["perplexity"],
        "memory": digest_tensors(out),
    }


def read_with_a_kill(text: Path, out: Path) -> dict[str, object]:
    """Read a text, kill the process after its first checkpoint, and resume."""
    options = [READ, str(text), "--out", str(out), *COMMON, "--checkpoint-seconds", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
    process = subprocess.Popen([sys.executable, "-m", "locas_peft", *options], env=environment)
    while not (out / "checkpoint" / "checkpoint.pt").exists():
        time.sleep(0.05)
        if process.poll() is not None:
            raise RuntimeError("the reading ended before its first checkpoint")
    process.send_signal(signal.SIGKILL)
    process.wait()
    run(*options, "--resume")
    return {"memory": digest_tensors(out)}


def read_as_in_the_readme() -> list[float]:
    """Return the perplexity after each tenth chunk of the README's example, of fewer tokens."""
    from peft import get_peft_model

    from locas_peft import LocasConfig, TestTimeTrainer, backbone
    from locas_peft.text import python_reference, tokenize, unwrap

    base, tokenizer = backbone.load()
    tokens = tokenize(tokenizer, unwrap(python_reference()), max_tokens=README_TOKENS)
    model = get_peft_model(base, LocasConfig(r=64))
    trainer = TestTimeTrainer(model, window=512, stride=256, learning_rate=4e-3, context="cache")
    return [trainer.perplexity for chunk in trainer.read(tokens) if chunk.index % 10 == 9]


def measure(folder: Path) -> dict[str, object]:
    """Return all figures."""
    from locas_peft.text import python_reference

    text = folder / "reference.txt"
    text.write_text(python_reference()[:40_000], encoding="utf-8")
    figures: dict[str, object] = {}
    for name, options in READINGS.items():
        out = folder / name.replace(" ", "-")
        figures[f"read {name}"] = read(text, out, *options)
        if not name.startswith("lora"):
            merged = folder / f"{out.name}-merged"
            run("merge", str(out), "--out", str(merged))
            figures[f"merge {name}"] = digest_tensors(merged)
            exported = folder / f"{out.name}-exported"
            run("export", str(out), "--out", str(exported))
            figures[f"export {name}"] = digest_tensors(exported)
    figures["resume after a kill"] = read_with_a_kill(text, folder / "killed")
    figures["readme"] = read_as_in_the_readme()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the record")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder))
    if arguments.write:
        machine = {
            "processor": torch.backends.cpu.get_cpu_capability(),
            "machine": platform.machine(),
        }
        record = {
            "machine": machine,
            "torch": torch.__version__,
            "threads": THREADS,
            "figures": figures,
        }
        RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        return 0
    expected = json.loads(RECORD.read_text(encoding="utf-8"))["figures"]
    differing = [name for name in expected if figures.get(name) != expected[name]]
    for name in differing:
        print(f"{name}:\n  expected {expected[name]}\n  got      {figures.get(name)}")
    print(
        f"{len(expected) - len(differing)} of {len(expected)} figures are the same to the last digit"
    )
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
