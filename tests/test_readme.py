"""What the README says holds: its example and the examples run, its commands and files exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from locas_peft import backbone
from locas_peft.bases.gguf import is_installed
from locas_peft.demo import INSTALL

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def run(*arguments: str, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_examples_are_short():
    examples = blocks("python")
    assert len(examples) == 2
    for example in examples:
        assert len(example.splitlines()) <= 25


def test_the_readme_is_short():
    words = [word for word in README.split() if any(letter.isalnum() for letter in word)]
    assert len(words) <= 1_200


def test_files_of_the_tree_exist():
    tree = re.search(r"```\n(src/locas_peft/.*?)```", README, flags=re.DOTALL)[1]
    inside = ROOT
    for line in tree.splitlines():
        names = re.split(r"\s{2,}", line.strip())[0]
        # An indented line names what is in the folder above it.
        is_indented = line.startswith("  ")
        for name in names.split(", "):
            assert ((inside if is_indented else ROOT) / name).exists(), name
        if not is_indented:
            inside = ROOT / names


@pytest.mark.slow
def test_the_example_prints_what_it_says(tmp_path):
    example, _ = blocks("python")
    output = run("-c", example, folder=tmp_path)
    shown = README.split("```python")[1].split("```text\n")[1].split("```")[0]
    printed, promised = (
        [float(n) for n in re.findall(r"\d+\.\d\d", text)] for text in (output, shown)
    )
    assert len(printed) == len(promised) == 4
    assert printed == pytest.approx(promised, rel=0.01)
    assert (tmp_path / "memory" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "merged" / "model.safetensors").is_file()


SHORT = {
    "dpo.py": "--steps 4",
    "grpo.py": "--steps 1",
    "library.py": f"--model {backbone.NAME}",
    "quickstart.py": "",
    "sft_trainer.py": "--steps 3",
    "study_a_page.py": "--text page.txt",
}


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("smollm2"), reason=f"SmolLM2 is not installed: {INSTALL}")
def test_the_example_of_a_study_answers(tmp_path):
    _, example = blocks("python")
    assert "Corvin" in run("-c", example, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name
)
def test_examples_run(example, tmp_path):
    if "smollm2" in example.read_text() and not is_installed("smollm2"):
        pytest.skip(f"SmolLM2 is not installed: {INSTALL}")
    (tmp_path / "page.txt").write_text("The ferry Havorn is repaired in Bergen until May.")
    output = run(str(example), *SHORT.get(example.name, "--tokens 4000").split(), folder=tmp_path)
    assert output
    assert any(tmp_path.rglob("adapter_model.safetensors"))
    if example.name == "dpo.py":
        before, after = (
            float(number)
            for number in re.findall(r"^reward margin .*: (.+)$", output, re.MULTILINE)
        )
        assert before == 0.0 < after  # a fresh memory changes nothing: its model is the reference
    if example.name == "grpo.py":
        assert "kl: 0.0000 in the first steps" in output
