"""A memory in a model that FSDP2 shards over two processes learns as in one process."""

import re
import socket
import warnings
from collections.abc import Callable

import pytest
import torch
from families import make_host, make_tokens, weights_in
from peft import PeftModel, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from locas_peft import LocasConfig, calibrate, uncalibrated_memories
from locas_peft.tuner import clip_memories, list_layers

STEPS, RATE = 3, 50.0  # at this rate each step leaves the unit ball


def make_model(calibrated: bool = True) -> PeftModel:
    model = get_peft_model(make_host("llama"), LocasConfig(r=4, scaling=400.0)).train()
    if calibrated:
        calibrate(model, [make_tokens()])
    return model


def make_optimizer(model) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=RATE
    )


def train(model, optimizer, *batches: torch.Tensor) -> None:
    """Take steps along the gradient of the batches' mean loss."""
    for _ in range(STEPS):
        for batch in batches:
            (model(input_ids=batch, labels=batch).loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()


def shard(model) -> None:
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)


def train_sharded(rank: int, folder: str) -> None:
    model = make_model()
    shard(model)
    train(model, make_optimizer(model), make_tokens()[2 * rank : 2 * rank + 2])
    assert all(
        isinstance(weight, DTensor) for layer in list_layers(model) for weight in weights_in(layer)
    )
    message = "is sharded across processes: save_pretrained.folder, state_dict=state"
    with pytest.raises(ValueError, match=message):
        model.save_pretrained(f"{folder}/sharded-{rank}")
    with pytest.raises(ValueError, match="is sharded across processes: gather the base first"):
        model.merge_adapter()
    # As Accelerate and Trainer do.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if rank == 0:
        model.save_pretrained(f"{folder}/memory", state_dict=state)


def train_uncalibrated(rank: int, folder: str) -> None:
    model = make_model(calibrated=False)
    shard(model)
    message = "is sharded across processes: calibrate it before the model is"
    with pytest.raises(ValueError, match=message):
        calibrate(model, [make_tokens()])
    with pytest.raises(
        ValueError, match=re.escape("is sharded: calibrate(model, batches) before it is")
    ):
        train(model, make_optimizer(model), make_tokens())


def _run(rank: int, port: int, case: Callable, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    case(rank, folder)
    torch.distributed.destroy_process_group()


def in_two_processes(case: Callable, folder) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(_run, (port, case, str(folder)), nprocs=2)


@pytest.mark.slow
def test_training_equals_one_process_and_is_clipped(tmp_path):
    in_two_processes(train_sharded, tmp_path)
    expected, found = (
        make_model(),
        PeftModel.from_pretrained(make_host("llama"), str(tmp_path / "memory")),
    )
    train(expected, make_optimizer(expected), make_tokens()[:2], make_tokens()[2:])
    clip_memories(expected)
    assert uncalibrated_memories(found) == []
    norms = []
    for one, other in zip(list_layers(expected), list_layers(found), strict=True):
        for weight, reference in zip(weights_in(other), weights_in(one), strict=True):
            torch.testing.assert_close(weight, reference.detach(), rtol=1e-3, atol=1e-4)
        *rows, down = weights_in(other)
        norms += [weight.norm(dim=1) for weight in rows] + [down.norm(dim=0)]
    norms = torch.cat(norms)
    assert norms.max() <= 1 + 1e-6 and (norms > 1 - 1e-3).float().mean() > 0.5


@pytest.mark.slow
def test_a_sharded_memory_must_be_calibrated_before(tmp_path):
    in_two_processes(train_uncalibrated, tmp_path)
