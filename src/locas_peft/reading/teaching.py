"""One reading of a text: settings -> adapter -> trainer -> memory folder. The only code that teaches a text and saves.

All methods run in the same loop, so that their figures compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..memories import checkpoint
from ..memories.folder import check_vacant
from ..selfstudy import Exchange, SelfStudy, StudyStep
from ..text import digest_ids
from ..ttt import (
    Anchor,
    Chunk,
    OwnText,
    TestTimeTrainer,
    at_marks,
    choose_marks,
    cumulative,
    per_segment,
    perplexity,
)
from .adapters import attached
from .peak_memory import PeakMemory
from .record import Reading, save_reading
from .resuming import Checkpoints, restore
from .settings import CompleteSettings, ReadingSettings

__all__ = ["StopReading", "make_trainer", "memorize", "score"]

ANCHOR_TOKENS = 128
"""The most tokens of a text that the base writes for the anchor."""
STUDY_RATE = 1.5
"""The learning rate at the start of a self-study, relative to the reading's; it falls to 0."""
STUDY_ANCHOR = 13.0
"""The weight of the anchor at the end of a self-study, relative to the reading's; it grows from 0."""


class StopReading(Exception):
    """Raised by a callback of `memorize` to end the reading there and keep what was learned."""


def memorize(
    base: PreTrainedModel,
    input_ids: torch.LongTensor,
    settings: ReadingSettings | CompleteSettings,
    *,
    out: str | Path | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_seconds: float = 30.0,
    resume: bool = False,
    overwrite: bool = False,
    title: str | None = None,
    on_chunk: Callable[[Chunk], None] | None = None,
    tokenizer: Any = None,
    exchanges: Sequence[Exchange] | None = None,
    on_study: Callable[[StudyStep], None] | None = None,
    sample: str | None = None,
) -> Reading:
    """Read a text with one method, from a fresh adapter or a checkpoint to the figures and the saved memory.

    `base` is mutated while this runs and restored at the end (see `attached`).

    Args:
        base: a causal LM without adapters.
        input_ids: LongTensor [T], T >= 2; the first `settings.max_tokens` are read.
        settings: completed here, where they are not.
        out: the memory's folder, written whole or not at all. The method "none" has nothing to save.
        checkpoint_dir: a folder for the unfinished state, saved every `checkpoint_seconds`, and where a callback
            raises, and removed after the memory was saved; without `out` the caller removes it. It is locked for the
            whole call. Where it cannot be written, a warning is logged and the reading goes on.
        checkpoint_seconds: the least time between two checkpoints.
        resume: go on from the checkpoint in `checkpoint_dir`; from the start where there is none.
        overwrite: replace the memory in `out`, and a checkpoint that is not resumed.
        title: of the text, for the record and the model card.
        on_chunk: called after each chunk; on resuming, for the chunks of the checkpoint first. It may raise
            `StopReading`, and so may `on_study`: the memory is then saved as it is.
        tokenizer: of the base; needed for a self-study (`settings.study`).
        exchanges: studied in place of those that the model would write (see `SelfStudy`).
        on_study: called after each step of a self-study.
        sample: of the text, saved beside the memory: a `Library` finds it by this.

    Returns:
        The reading.

    Raises:
        ValueError: the text is too short, the method does not fit the base, `out` is not vacant, or the checkpoint is
            of another reading or in use.
        OSError: the disk is full, or a folder cannot be written.
    """
    if input_ids.dim() != 1 or input_ids.numel() < 2:
        raise ValueError(f"input_ids must be of shape [T] with T >= 2, got {list(input_ids.shape)}: give more text")
    settings = settings.complete(base, tokenizer)
    input_ids = input_ids[: settings.max_tokens]
    if settings.method.name == "none":
        out = checkpoint_dir = None
    with ExitStack() as stack:
        folder = None if checkpoint_dir is None else stack.enter_context(checkpoint.locked(checkpoint_dir))
        if out is not None:
            check_vacant(out, resume=resume, overwrite=overwrite)
        model = stack.enter_context(attached(base, settings))
        peak = PeakMemory(base.device)
        trainer = make_trainer(model, settings)
        state = checkpoint.load(folder) if resume and folder is not None else None
        if state is not None:
            restore(folder, state, trainer, digest_ids(input_ids), settings)
        study = _make_study(model, tokenizer, input_ids, settings, exchanges)
        if state is not None and study is not None and "study" in state:
            try:
                study.load_state_dict(state["study"])
            except (KeyError, TypeError, AttributeError) as error:
                raise checkpoint.damaged(folder, error) from None
        del state
        checkpoints, stopped = Checkpoints(folder, checkpoint_seconds, settings, trainer, study), False
        try:
            for chunk in trainer.chunks if on_chunk is not None else ():
                on_chunk(chunk)
            for chunk in trainer.read(input_ids):
                checkpoints.after(chunk, on_chunk)
            if study is not None:
                checkpoints.save()  # the first exchanges take long
                for step in study.run():
                    checkpoints.after(step, on_study, due=step.phase == "write")
        except StopReading:
            stopped = True
        studied = None if study is None else study.figures
        memory_dir = None if out is None else str(out)
        figures = {"studied": studied, "stopped": stopped, "memory_dir": memory_dir, "title": title}
        reading = _make_reading(trainer, settings, input_ids, peak, **figures)
        if out is not None:
            save_reading(model, out, reading, None if study is None else study.exchanges, sample)
        if folder is not None and out is not None:
            checkpoint.remove(folder)
    return reading


def _make_study(
    model: nn.Module,
    tokenizer: Any,
    input_ids: torch.LongTensor,
    settings: CompleteSettings,
    exchanges: Sequence[Exchange] | None,
) -> SelfStudy | None:
    """Return the self-study that the settings ask for, or None."""
    if settings.study is None:
        if exchanges is not None:
            raise ValueError(f"exchanges have no meaning without study, got {len(exchanges)}: set study, or leave out")
        return None
    if tokenizer is None:
        raise ValueError("tokenizer must be given for a self-study, got None: give the base's tokenizer")
    return SelfStudy(
        model,
        tokenizer,
        input_ids,
        per_passage=settings.study.exchanges,
        passes=settings.study.passes,
        learning_rate=STUDY_RATE * settings.training.learning_rate,
        window=settings.training.window,
        seed=settings.seed,
        anchor=STUDY_ANCHOR * (settings.method.anchor or 0.0),
        given=exchanges,
    )


def make_trainer(model: nn.Module, settings: CompleteSettings) -> TestTimeTrainer:
    """Return the trainer of a reading, with the memory's writer and the anchor where the settings ask for them."""
    method, anchor = settings.method, None
    if method.anchor:
        texts = OwnText(model, tokens=max(min(settings.training.stride, ANCHOR_TOKENS), 2), seed=settings.seed)
        anchor = Anchor(texts, weight=method.anchor, every=method.anchor_every)
    return TestTimeTrainer(model, settings.training, writer=method.make_writer(model), anchor=anchor)


def _make_reading(
    trainer: TestTimeTrainer,
    settings: CompleteSettings,
    input_ids: torch.LongTensor,
    peak: PeakMemory,
    **figures: Any,
) -> Reading:
    """Return the figures of a reading, with those that are given."""
    readings = [[chunk for chunk in trainer.chunks if chunk.reading == n] for n in range(settings.training.readings)]
    readings = [chunks for chunks in readings if chunks]  # fewer where the reading was stopped
    nlls = [sum(chunk.nll_nats for chunk in chunks) for chunks in readings]
    counts = [sum(chunk.tokens for chunk in chunks) for chunks in readings]
    marks = choose_marks(len(input_ids))
    final, final_base = trainer.final or (None, None)
    return Reading(
        settings=settings,
        text_sha256=digest_ids(input_ids),
        scored_tokens=counts[0],
        nll_nats=nlls[0],
        perplexity=perplexity(nlls[0], counts[0]),
        perplexity_at=at_marks(readings[0], marks),
        perplexity_between=per_segment(readings[0], marks),
        perplexities=[perplexity(nll, tokens) for nll, tokens in zip(nlls, counts, strict=True)],
        curve=cumulative(readings[0]),
        extra_parameters=sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad),
        seconds=trainer.seconds,
        peak_bytes=peak.read(),
        skipped_chunks=trainer.skipped_chunks,
        taken_back=trainer.taken_back,
        final_nats=final,
        final_base_nats=final_base,
        **figures,
    )


def score(model: nn.Module, input_ids: torch.LongTensor, settings: CompleteSettings) -> float:
    """Return the perplexity of a text, LongTensor [T], T >= 2, under a frozen model, with or without an adapter.

    The windows of the settings are used. A parameter that requires gradients is a `ValueError`;
    the model is not changed.
    """
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if learning:
        raise ValueError(f"model must be frozen, got {len(learning)} trainable parameters: freeze them first")
    trainer = TestTimeTrainer(model, settings.for_base().training)
    for _ in trainer.read(input_ids):
        pass
    return trainer.perplexity
