"""Small models, texts and trainers that the tests of test-time training share."""

from collections.abc import Callable
from pathlib import Path

import torch
from families import VOCABULARY, make_host
from peft import LoraConfig, PeftModel, get_peft_model

from locas_peft import LocasConfig, TestTimeTrainer
from locas_peft.memories import checkpoint
from locas_peft.model import fingerprint
from locas_peft.stages import Place, StageRun
from locas_peft.stages.running import _describe_run
from locas_peft.stages.stage import Stage
from locas_peft.ttt import Chunk
from locas_peft.tuner import clip_memories

CONTEXTS = ("recompute", "cache")
SETTINGS = {"window": 16, "stride": 8, "learning_rate": 0.02}


def make_ids(length: int, seed: int = 0) -> torch.Tensor:
    """`LongTensor [T]` of tokens that are no special ones."""
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def make_model(
    kind: str = "locas", family: str = "llama", dtype=torch.float32, **options
) -> torch.nn.Module:
    """A host as it is ("plain"), or with an adapter whose output is large enough that it matters."""
    host = make_host(family, dtype)
    torch.manual_seed(1)
    if kind == "lora":
        config = {
            "r": 4,
            "lora_alpha": 32,
            "target_modules": "all-linear",
            "task_type": "CAUSAL_LM",
        }
        return get_peft_model(host, LoraConfig(**config | options))
    return (
        get_peft_model(
            host, LocasConfig(**{"r": 4, "scaling": 16.0, "output_scale": "paper"} | options)
        )
        if kind == "locas"
        else host
    )


def make_trainer(kind: str = "locas", **settings) -> TestTimeTrainer:
    return TestTimeTrainer(make_model(kind), **SETTINGS | settings)


def read(trainer: TestTimeTrainer, ids: torch.Tensor) -> list[float]:
    """The nll of each chunk that is left."""
    return [chunk.nll_nats for chunk in trainer.read(ids)]


class TrainerStage(Stage):
    """A reading whose trainer is given; a text is not needed to save and resume it."""

    kind = "read"

    def __init__(self, trainer: TestTimeTrainer, text_sha256: str | None):
        self.trainer = trainer
        self.text_sha256 = text_sha256

    def describe(self) -> dict:
        return self.trainer.describe()

    def state_dict(self) -> dict:
        return self.trainer.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.trainer.load_state_dict(state)


def make_run(trainer: TestTimeTrainer, folder: Path, text_sha256: str | None = None) -> StageRun:
    """Return a stage of a trainer, whose checkpoints are in a folder."""
    stage = TrainerStage(trainer, text_sha256)
    base_sha256 = fingerprint(trainer.model)
    shared = _describe_run(trainer.model, stage, trainer.settings, None, base_sha256)
    return StageRun(stage, Place(), folder, shared)


def save(trainer: TestTimeTrainer, folder: Path) -> Path:
    """Write a checkpoint, as a stage does."""
    make_run(trainer, folder).save_checkpoint()
    return folder / checkpoint.CHECKPOINT


def resume(trainer: TestTimeTrainer, folder: Path) -> None:
    """Go on from a checkpoint, with the document that it is of."""
    state = checkpoint.load(folder)
    make_run(trainer, folder, state.get("text")).resume(state)


def sgd(rate: float) -> Callable:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


def without_time(chunks: list[Chunk]) -> list[tuple]:
    return [(c.reading, c.index, c.start, c.stop, c.tokens, c.nll_nats, c.learned) for c in chunks]


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def trained_weights(model: PeftModel) -> dict[str, torch.Tensor]:
    clip_memories(model)
    return {
        name: value.detach().clone()
        for name, value in model.named_parameters()
        if value.requires_grad
    }


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys() and first
    assert all(torch.equal(first[name], second[name]) for name in first)


def spoil(model: torch.nn.Module, token: int) -> None:
    """Makes every prediction after a token nan."""
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan
