"""One reading of a text, in the same loop for all methods: settings -> adapter -> trainer -> memory folder."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch import nn
from transformers import PreTrainedModel

from ..checks import describe_difference
from ..memories import checkpoint
from ..memories.folder import check_vacant
from ..memories.loading import load_memory
from ..model import fingerprint
from ..selfstudy import Exchange, SelfStudy, StudyStep, load_exchanges
from ..selfstudy.exchanges import EXCHANGES, correct
from ..text import digest_ids, digest_tokenizer
from ..ttt import (
    Anchor,
    Chunk,
    MeanOfReadings,
    OwnText,
    Step,
    TestTimeTrainer,
    at_marks,
    choose_marks,
    cumulative,
    per_segment,
    perplexity,
)
from ..tuner.modules import remember_modules
from .methods import SHAPE
from .record import Reading, describe_origin, find_finished, load_reading, save_reading
from .resuming import Checkpoints, restore
from .settings import AnySettings, CompleteSettings

__all__ = ["PeakMemory", "StopReading", "attached", "make_trainer", "memorize", "score"]

ANCHOR_TOKENS = 128  # the most tokens of a text that the base writes for the anchor
STUDY_RATE = (
    1.5  # the learning rate at the start of a self-study, relative to the reading's; it falls to 0
)
STUDY_ANCHOR = 13.0  # the weight of the anchor at the end of a self-study, relative to the reading's; it grows from 0


class StopReading(Exception):
    """Raised by a callback of `memorize` to end the reading there and keep what was learned."""


def memorize(
    base: PreTrainedModel,
    input_ids: torch.LongTensor,
    settings: AnySettings,
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
    start: str | Path | None = None,
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
        resume: return the finished reading of `out`, if it is this one; else go on from the checkpoint in
            `checkpoint_dir`; from the start where there is none.
        overwrite: replace the memory in `out`, and a checkpoint; with `resume`, only those of other readings.
        title: of the text, for the record and the model card.
        on_chunk: called after each chunk; on resuming, for the chunks of the checkpoint first. It may raise
            `StopReading`, and so may `on_study`: the memory is then saved as it is.
        tokenizer: of the base; needed for a self-study (`settings.study`).
        exchanges: studied in place of those that the model would write (see `SelfStudy`).
        on_study: called after each step of a self-study.
        sample: of the text, saved beside the memory: a `Library` finds it by this.
        start: a saved memory to go on with, in place of a fresh adapter: its slots, a fresh optimizer, and its own
            exchanges, of which a study learns again what is lost. `out` may be its folder.

    A text that is too short, a method or a memory that does not fit the base, an `out` that is not vacant, and a
    checkpoint of another reading or in use (`InUse`) are `ValueError`s; a folder that cannot be written an `OSError`.
    """
    if input_ids.dim() != 1 or input_ids.numel() < 2:
        raise ValueError(
            f"input_ids must be of shape [T] with T >= 2, got {list(input_ids.shape)}: give more text"
        )
    settings = settings.complete(base)
    input_ids = input_ids[: settings.max_tokens]
    if settings.method.name == "none":
        out = checkpoint_dir = None
    with ExitStack() as stack:
        folder = (
            None
            if checkpoint_dir is None
            else stack.enter_context(checkpoint.locked(checkpoint_dir))
        )
        goes_on = None not in (start, out) and Path(out) == Path(start)
        origin = describe_origin(None if goes_on else start)
        if out is not None:
            replaces = overwrite or goes_on
            with suppress(*[ValueError] * replaces):
                if (
                    resume
                    and (finished := find_finished(out, settings, input_ids, exchanges, origin))
                    is not None
                ):
                    return finished
            check_vacant(out, resume=resume, overwrite=overwrite, goes_on=replaces)
        shared = {**settings.to_json(), **origin}
        digests = {
            "base_sha256": fingerprint(base),
            "tokenizer_sha256": digest_tokenizer(tokenizer),
        }
        earlier = [] if start is None else _load_earlier(start, settings)
        model = stack.enter_context(attached(base, settings, start))
        peak = PeakMemory(base.device)
        trainer = make_trainer(model, settings)
        state = checkpoint.load(folder) if resume and folder is not None else None
        if state is not None:
            try:
                restore(folder, state, trainer, digest_ids(input_ids), shared)
            except ValueError:
                if not overwrite:
                    raise
                state = None
        options = {"earlier": earlier, "discriminants": start is None and settings.separates}
        study = _make_study(model, tokenizer, input_ids, settings, exchanges, **options)
        if state is not None and study is not None and "study" in state:
            try:
                study.load_state_dict(state["study"])
            except (KeyError, TypeError, AttributeError) as error:
                raise checkpoint.damaged(folder, error) from None
        del state
        checkpoints, stopped = (
            Checkpoints(folder, checkpoint_seconds, shared, trainer, study),
            False,
        )
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
        figures = {"studied": study and study.figures, "stopped": stopped, "title": title}
        figures |= {"memory_dir": None if out is None else str(out), "peak_bytes": peak.read()}
        figures |= {"origin": origin if any(origin.values()) else None, **digests}
        reading = _make_reading(trainer, settings, input_ids, **figures)
        if out is not None:
            known = correct(earlier, study.exchanges if study else []) or None
            save_reading(model, out, reading, known, sample)
            if folder is not None:
                checkpoint.remove(folder)
    return reading


@contextmanager
def attached(
    base: PreTrainedModel,
    settings: CompleteSettings,
    start: str | Path | None = None,
) -> Iterator[nn.Module]:
    """Attach a method's fresh adapter, or a saved memory, to a base within the context, after setting torch's seed.

    `base`, a causal LM without adapters, is mutated. Afterwards its modules, weights, `requires_grad` flags and mode
    are as before. A method that does not fit is a `ValueError`.
    """
    restore_modules = remember_modules(base)
    torch.manual_seed(settings.seed)
    try:
        if start is not None:
            model = load_memory(base, start, trainable=True)
        else:
            config = settings.method.make_config(base, settings.seed)
            if settings.separates:
                config.max_slot_norm = None
            model = base.requires_grad_(False) if config is None else get_peft_model(base, config)
        yield model
    finally:
        restore_modules()
        base.zero_grad(set_to_none=True)


class PeakMemory:
    """Records the peak of the memory in use, in bytes: torch's on CUDA, else the process's resident size."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text(
                    "5"
                )  # resets the peak in /proc/self/status

    def read(self) -> int | None:
        """Return the peak since this object was made, on macOS since the process began; None if none is kept."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        with suppress(OSError):
            if found := re.search(
                r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE
            ):
                return int(found[1]) * 1024
        with suppress(ImportError):  # Windows
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
                1 if sys.platform == "darwin" else 1024
            )
        return None


def _load_earlier(start: str | Path, settings: CompleteSettings) -> list[Exchange]:
    """Return the exchanges of a memory to go on with; a `ValueError` where it is of another method or width."""
    former, path = load_reading(start).settings.method, Path(start) / EXCHANGES
    wanted, had = (
        {name: vars(each).get(name, each.name) for name in SHAPE}
        for each in (settings.method, former)
    )
    if difference := describe_difference(
        wanted, had, f"the memory {str(start)!r} to go on with", "leave it out"
    ):
        raise ValueError(difference)
    return load_exchanges(path) if path.is_file() else []


def _make_study(
    model: nn.Module,
    tokenizer: Any,
    input_ids: torch.Tensor,
    settings: CompleteSettings,
    given: Any,
    **options: Any,
) -> SelfStudy | None:
    if settings.study is None:
        if given is not None:
            raise ValueError(
                f"exchanges have no meaning without study, got {len(given)}: set study, or leave out"
            )
        return None
    if tokenizer is None:
        raise ValueError(
            "tokenizer must be given for a self-study, got None: give the base's tokenizer"
        )
    options |= {
        "per_passage": settings.study.exchanges,
        "passes": settings.study.passes,
        "seed": settings.seed,
    }
    options |= {
        "learning_rate": STUDY_RATE * settings.training.learning_rate,
        "window": settings.training.window,
    }
    options["anchor"] = STUDY_ANCHOR * (settings.method.anchor or 0.0)
    return SelfStudy(model, tokenizer, input_ids, given=given, **options)


def make_trainer(model: nn.Module, settings: CompleteSettings) -> TestTimeTrainer:
    if method.anchor:
        tokens = max(min(training.stride, ANCHOR_TOKENS), 2)
        texts = OwnText(model, tokens=tokens, seed=settings.seed)
        steps.append(Anchor(texts, weight=method.anchor, every=method.anchor_every))
    writer = method.make_writer(model)
    if writer is not None:
        steps.append(writer)
    elif training.readings > 1 and method.name != "none":
        steps.append(MeanOfReadings())
    return TestTimeTrainer(model, training, steps=steps)


def _make_reading(
    trainer: TestTimeTrainer,
    settings: CompleteSettings,
    input_ids: torch.LongTensor,
    **figures: Any,
) -> Reading:
    readings = [
        [chunk for chunk in trainer.chunks if chunk.reading == n]
        for n in range(settings.training.readings)
    ]
    readings = [chunks for chunks in readings if chunks]  # fewer where the reading was stopped
    nlls = [sum(chunk.nll_nats for chunk in chunks) for chunks in readings]
    counts = [sum(chunk.tokens for chunk in chunks) for chunks in readings]
    marks = choose_marks(len(input_ids))
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
        extra_parameters=sum(
            parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad
        ),
        seconds=trainer.seconds,
        skipped_chunks=trainer.skipped_chunks,
        **figures,
    )


def score(model: nn.Module, input_ids: torch.LongTensor, settings: CompleteSettings) -> float:
    """Return the perplexity of a text, LongTensor [T], T >= 2, under a frozen model, in the windows of the settings.

    A parameter that requires gradients is a `ValueError`.
    """
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if learning:
        raise ValueError(
            f"model must be frozen, got {len(learning)} trainable parameters: freeze them first"
        )
    trainer = TestTimeTrainer(model, settings.for_base().training)
    for _ in trainer.read(input_ids):
        pass
    return trainer.perplexity
