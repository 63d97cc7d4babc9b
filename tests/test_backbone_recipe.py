"""The recipe of the embedded backbone: a run can be stopped, continued and loaded."""

import importlib
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training import assert_same
from transformers import AutoModelForCausalLM, AutoTokenizer

from locas_peft.memories import checkpoint

FOLDER = Path(__file__).parents[1] / "benchmarks" / "backbone"
# Muon multiplies the matrices in bfloat16, which takes 20 times as long on a CPU that multiplies in float32 alone.
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


@pytest.fixture
def recipe(monkeypatch):
    """Return the script as a module: narrow models, steps of 2 x 32 tokens, and a clock that ticks once a step."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("train")
    monkeypatch.setattr(module, "CONTEXT_TOKENS", 32)
    monkeypatch.setattr(module, "BATCH_WINDOWS", 2)
    for name in ("Qwen3Config", "GPTNeoXConfig"):
        config = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda config=config, **options: config(**options | SMALL)
        )
    ticks = iter(range(10**6))
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    yield module
    torch.set_num_threads(threads)
    for name in ("train", "books"):
        sys.modules.pop(name)


@pytest.fixture
def books(tmp_path):
    """Return a directory of two books of random words, hard-wrapped."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 7))) for _ in range(100)]
    folder = tmp_path / "books"
    folder.mkdir()
    for name in ("first", "second"):
        lines = [" ".join(generator.choices(words, k=10)) for _ in range(200)]
        (folder / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def run(recipe, books, tmp_path):
    """Return a function that runs the script into a folder and returns its exit code."""

    def run(out: str, options: str) -> int:
        folders = ["--books", str(books), "--out", str(tmp_path / out)]
        return recipe.main([*folders, "--threads", "1", *options.split()])

    return run


@pytest.mark.parametrize("arch", ["glu", "mlp"])
def test_trains_resumes_and_loads(recipe, run, books, tmp_path, capsys, arch):
    out = tmp_path / "out"
    assert run("out", f"--arch {arch} --minutes 0.05") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 3

    held_out = f"--held-out {books} --held-out-tokens 100"
    assert run("out", f"--arch {arch} --minutes 0.1 --resume {held_out}") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["steps"], result["seconds"]) == (6, 6)
    # Windows of 32, 32, 32 and 4 tokens a book, the first token of each unscored.
    assert result["held_out"]["scored_tokens"] == 2 * (3 * 31 + 3)
    line = f"| all | {result['held_out']['loss']:.3f} |"
    assert line in (out / "README.md").read_text(encoding="utf-8")

    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert len(tokenizer) == model.config.vocab_size == result["vocabulary"]
    text = (books / "first.txt").read_text(encoding="utf-8").replace("\n", " ")
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    reloaded = recipe.held_out_loss(model.float(), {"first": torch.tensor(ids)}, 100)
    assert reloaded["loss"] == pytest.approx(result["held_out"]["by_book"]["first"], rel=1e-5)


def test_a_killed_run_continues_bit_for_bit(recipe, run, tmp_path, monkeypatch):
    options = "--arch mlp --minutes 0.1 --checkpoint-minutes 0.05"
    assert run("whole", options) == 0

    save = checkpoint.save

    def save_and_die(directory, state):
        save(directory, state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(recipe.checkpoint, "save", save_and_die)
        run("parts", options)
    assert checkpoint.load(tmp_path / "parts")["step"] == 3
    assert run("parts", f"{options} --resume") == 0

    whole, parts = (checkpoint.load(tmp_path / name)["model"] for name in ("whole", "parts"))
    assert_same(whole, parts)


def test_two_backbones_share_a_tokenizer(run, tmp_path):
    assert run("glu", "--arch glu --minutes 0.01") == 0
    assert run("mlp", f"--arch mlp --minutes 0.01 --tokenizer {tmp_path / 'glu'}") == 0
    first, second = (AutoTokenizer.from_pretrained(tmp_path / arch) for arch in ("glu", "mlp"))
    assert first.get_vocab() == second.get_vocab()


def test_a_pass_reads_every_window_once(recipe):
    tokens = torch.arange(32 * 11 + 5)
    # 10 windows, 2 a step.
    steps = [recipe.training_batch(tokens, step, seed=0) for step in range(6)]
    read = torch.cat(steps[:5]).flatten().sort().values
    assert torch.equal(read, torch.arange(int(read[0]), int(read[0]) + 320))
    assert torch.equal(recipe.training_batch(tokens, 3, seed=0), steps[3])
    assert not torch.equal(steps[5], steps[0])


def test_learning_rate_follows_the_budget(recipe):
    assert recipe.learning_rate_factor(0, 0.0) == 1 / recipe.WARMUP_STEPS
    assert recipe.learning_rate_factor(1000, 0.4) == 1
    assert recipe.learning_rate_factor(1000, 0.7) == pytest.approx(0.5)
    assert recipe.learning_rate_factor(1000, 1.0) == 0


def test_bad_input_ends_with_one_line(run, tmp_path, capsys):
    empty, saved = tmp_path / "empty", tmp_path / "out" / "checkpoint.pt"
    empty.mkdir()

    def error_of(options):
        assert run("out", options) == 2
        return capsys.readouterr().err.splitlines()[-1]

    found = error_of(f"--arch glu --books {empty}")
    assert found.startswith(f"error: no .txt file in {empty}: give a directory of ")
    found = error_of(f"--arch glu --tokenizer {empty}")
    assert found.startswith(f"error: no tokenizer.json in {empty}: give the output folder of ")
    found = error_of("--arch glu --minutes 0")
    assert found == "error: --minutes must be more than 0, got 0"
    assert run("out", "--arch glu --minutes 0.01") == 0
    found = error_of("--arch glu")
    assert found.startswith(f"error: {saved} exists: continue it with --resume, or ")
    found = error_of("--arch mlp --resume")
    assert found.startswith(f"error: {saved} was made with arch='glu', this run has 'mlp': give ")
