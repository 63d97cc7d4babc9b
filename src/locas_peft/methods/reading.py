"""One reading, from a fresh adapter or a checkpoint to the figures and the saved memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import checkpoint
from ..evaluation.perplexity import at_marks, choose_marks, cumulative, perplexity
from ..text import digest_ids
from ..ttt import Anchor, Chunk, TestTimeTrainer, write_own_text
from ..tuner import SlotWriter
from .adapters import attached
from .memory_folder import save_memory
from .peak_memory import PeakMemory
from .record import Reading
from .settings import Settings


def read_with(
    base: PreTrainedModel,
    input_ids: torch.LongTensor,
    settings: Settings,
    *,
    on_chunk: Callable[[Chunk], None] | None = None,
    memory_dir: str | Path | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_seconds: float = 30.0,
    resume: bool = False,
) -> Reading:
    """Reads a text with one method, from a fresh adapter or a checkpoint to the figures and the saved memory.

    Mutates `base` while it runs and leaves it as it was (see `attached`).

    Args:
        base: a causal LM without adapters.
        input_ids: LongTensor [T], T >= 2; the first `settings.max_tokens` of it are read.
        settings: see `Settings`.
        on_chunk: called after each chunk; on resuming, for the chunks of the checkpoint first.
        memory_dir: where the memory and its `reading.json` go, whole or not at all. The method "none" has nothing to
            save.
        checkpoint_dir: where the state is kept every `checkpoint_seconds`, and removed from once the memory is saved.
            No other reading may have it meanwhile. It is made at the start, and goes in the end where it is empty.
        checkpoint_seconds: at least so much time lies between two checkpoints.
        resume: goes on from the checkpoint in `checkpoint_dir`; from the start where there is none.

    Returns:
        The reading; `memory_dir` in it is the folder that was written, if any.

    Raises:
        ValueError: the text is too short, the method does not fit the base, the checkpoint is of another reading, or
            another one is at work there.
        OSError: the disk is full, or a folder cannot be written.
    """
    if input_ids.dim() != 1 or input_ids.numel() < 2:
        raise ValueError(f"input_ids must be of shape [T] with T >= 2, got {list(input_ids.shape)}: give more text")
    input_ids = input_ids[: settings.max_tokens]
    if settings.method == "none":
        memory_dir = checkpoint_dir = None
    with ExitStack() as stack:
        model = stack.enter_context(attached(base, settings))
        peak = PeakMemory(base.device)
        began = time.perf_counter()
        trainer = make_trainer(model, settings)
        preparation_seconds = time.perf_counter() - began
        if checkpoint_dir is not None:
            stack.enter_context(_own_folder(trainer, Path(checkpoint_dir)))
            if resume:
                trainer.resume(checkpoint_dir)
        for chunk in trainer.chunks:
            _call(on_chunk, chunk)
        saved = time.monotonic()
        with closing(_begin(trainer, input_ids, checkpoint_dir)) as chunks:
            for chunk in chunks:
                _call(on_chunk, chunk)
                if checkpoint_dir is not None and time.monotonic() - saved >= checkpoint_seconds:
                    trainer.save(checkpoint_dir)
                    saved = time.monotonic()
        chunks = trainer.chunks
        nll_nats, scored_tokens = sum(chunk.nll_nats for chunk in chunks), sum(chunk.tokens for chunk in chunks)
        reading = Reading(
            settings=settings,
            text_sha256=digest_ids(input_ids),
            scored_tokens=scored_tokens,
            nll_nats=nll_nats,
            perplexity=perplexity(nll_nats, scored_tokens),
            perplexity_at=at_marks(chunks, choose_marks(len(input_ids))),
            curve=cumulative(chunks),
            extra_parameters=_count_extra_parameters(model, base),
            seconds=preparation_seconds + sum(chunk.seconds for chunk in chunks),
            peak_bytes=peak.read(),
            skipped_chunks=trainer.skipped_chunks,
            memory_dir=None if memory_dir is None else str(memory_dir),
        )
        if memory_dir is not None:
            save_memory(model, memory_dir, reading)
        if checkpoint_dir is not None:
            checkpoint.remove(checkpoint_dir)
    return reading


def score(model: nn.Module, input_ids: torch.LongTensor, settings: Settings) -> float:
    """Gives the perplexity of a text under a model that does not learn while it reads.

    Args:
        model: a causal LM, with or without an adapter; not changed. None of its parameters may require gradients.
        input_ids: LongTensor [T], T >= 2.
        settings: window, stride and context are taken from it.

    Raises:
        ValueError: a parameter requires gradients, so that reading would teach it.
    """
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if learning:
        raise ValueError(f"model must be frozen, got {len(learning)} trainable parameters: freeze them first")
    trainer = TestTimeTrainer(
        model, window=settings.window, stride=settings.stride, learning_rate=None, context=settings.context
    )
    for _ in trainer.read(input_ids):
        pass
    return trainer.perplexity


def make_trainer(model: nn.Module, settings: Settings, **options: Any) -> TestTimeTrainer:
    """Makes the trainer of a reading: with the memory's writer, and the text that an anchor holds it by.

    Args:
        model: what `attached` gives.
        settings: how the text is read.
        options: further arguments of `TestTimeTrainer`, such as `objective`.
    """
    writer = None
    if settings.init == "write":
        fold = "nlsvd" if settings.update == "nlsvd" else "refit"
        slots = {"epsilon": settings.epsilon, "slots_per_chunk": settings.slots_per_chunk}
        slots = {name: value for name, value in slots.items() if value is not None}
        writer = SlotWriter(model, fold=fold, **slots)
    anchor = None
    if settings.anchor is not None:
        own = write_own_text(model, tokens=settings.stride, seed=settings.seed)
        anchor = Anchor(own, weight=settings.anchor, every=settings.anchor_every)
    return TestTimeTrainer(
        model,
        window=settings.window,
        stride=settings.stride,
        learning_rate=settings.learning_rate,
        epochs=settings.epochs,
        context=settings.context,
        gradient=settings.gradient or "full",
        writer=writer,
        anchor=anchor,
        **options,
    )


def _call(callback: Callable[[Chunk], None] | None, chunk: Chunk) -> None:
    if callback is not None:
        callback(chunk)


def _count_extra_parameters(model: nn.Module, base: nn.Module) -> int:
    return 0 if model is base else sum(p.numel() for p in model.parameters() if p.requires_grad)


def _begin(
    trainer: TestTimeTrainer, input_ids: torch.LongTensor, checkpoint_dir: str | Path | None
) -> Iterator[Chunk]:
    if not trainer.position:
        return trainer.read(input_ids)
    try:
        return trainer.read(input_ids)
    except ValueError as error:
        raise ValueError(
            f"text must be the one that the checkpoint in {str(checkpoint_dir)!r} was begun with, to the last token: "
            "give that text and the same limit of tokens, or choose another folder"
        ) from error


@contextmanager
def _own_folder(trainer: TestTimeTrainer, directory: Path) -> Iterator[None]:
    """Keeps a checkpoint's folder for one trainer; it goes in the end if empty, and so do those made for it."""
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        with trainer.holding(directory):
            yield
    finally:
        for folder in dict.fromkeys((directory, *made)):
            with suppress(OSError):
                folder.rmdir()
