"""Test-time training on one document, with any adapter in a model's layers.

Paper, section "Memory Accumulation over Context": the model learns the document while it reads it,
chunk by chunk; for whole books see the section "Whole-Book Online Language Modeling on PG-19".

Axes: T tokens of the document, N tokens scored in a chunk.
"""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from ..model import CausalLM
from ..text import digest_ids
from ..tuner import uncalibrated_memories, unwritten_memories
from .active import ActiveParts, calibrate_empty
from .chunks import Chunk, ChunkBounds, cut, perplexity_of
from .learner import Learner, OptimizerFactory
from .model_state import model_state, restore_model_state
from .scoring import Scorer
from .settings import TrainingSettings
from .steps import Step

__all__ = ["TestTimeTrainer"]


class TestTimeTrainer:
    """Train the active adapter on a document while scoring it (the paper's online memorisation).

    A chunk of `stride` tokens is scored with up to `window - stride` tokens of context before it,
    by the adapter as it is then; after that the adapter learns the chunk. The forward pass that
    scores is the one that is differentiated.

    The adapter's parameters that require gradients are changed in place; the base is not. Scores
    are taken in evaluation mode. Without an adapter, or with a disabled one, the model is only
    scored. Where the document begins with the model's `bos_token_id`, each window and the cache
    begin with it too.

    Args:
        model: a transformers causal language model, plain or with a PEFT adapter in its layers.
        settings: a `TrainingSettings`; None to make one of `fields`.
        optimizer: makes the optimizer, from the list of parameters, at the first step; None for
            AdamW at `learning_rate`, without weight decay.
        steps: what else happens in a reading, in this order (see `Step`): an `Anchor`,
            `MeanOfReadings`, or a `SlotWriter`, `RidgeWriter` or `ValueWriter`. With such a writer,
            neither `learning_rate` nor `optimizer` means that the memory is not trained as well.
        parameters: what is trained, such as the base's own weights (dynamic evaluation); None for
            the parameters of the active adapters.
        compiled: whether the model's passes go through `torch.compile`. The figures are the same to
            rounding. Where the model or a step does not allow it, one line is logged.
        fields: fields of `TrainingSettings`, in place of those of `settings`.

    Attributes:
        chunks: the records so far.
        skipped_chunks: how many chunks were not learned because a loss or a gradient was not
            finite.
        host, learner: the model as the loop uses it, and the optimizer; for the steps.

    Raises:
        TypeError, ValueError: for an argument that does not fit, in one line that names it and the
            remedy.
    """

    __test__ = False  # the name starts with Test: pytest would collect it

    def __init__(
        self,
        model: nn.Module,
        settings: TrainingSettings | None = None,
        *,
        optimizer: OptimizerFactory | None = None,
        steps: Iterable[Step] = (),
        parameters: Iterable[nn.Parameter] | None = None,
        compiled: bool = False,
        **fields: Any,
    ):
        self.model = model
        self.host = CausalLM(model)
        if settings is None:
            self.settings = TrainingSettings(**fields)
        else:
            self.settings = replace(settings, **fields)
        self.steps = list(steps)
        self.learner = Learner(
            lambda: self._active.parameters,
            self.settings.learning_rate,
            self.settings.warmup_steps,
            self.settings.decay_steps,
            optimizer,
        )
        self._optimizer = optimizer
        self._active = ActiveParts(self.host, parameters)
        self._check_optimizer()
        self._scorer = Scorer(self.host, self.settings)
        self._check_steps()
        if compiled:
            writers = [step.name for step in self.steps if step.learns]
            self.host.compile(f"a {writers[0]} records its layers" if writers else None)
        self.rewind()

    # ------------------------------------------------------------------ the loop

    def read(self, input_ids: Tensor) -> Iterator[Chunk]:
        """Read a document from `position` on, and yield each chunk's record after it was learned.

        The caller may stop at any record: adapter, optimizer and position are then as after that
        chunk, and another `read` of the same document goes on with the next one.

        Args:
            input_ids: LongTensor [T] or [1, T], T >= 2, on any device.

        Raises:
            TypeError, ValueError: at the call, for ids that are no document or not the one begun, a
                merged memory, and a memory to be written without a writer.
        """
        ids = self.host.check_document(input_ids)
        self._active.walk()
        self._check_adapter()
        self._begin(ids)
        return self._read(ids.to(self.host.device))

    def _read(self, ids: Tensor) -> Iterator[Chunk]:
        # The state tells what comes next: another `read`, or a loaded state, goes on here.
        while self._reading < self.settings.readings:
            start = self._start_of_next_chunk
            if start < len(ids):
                bounds = next(cut(len(ids), self.settings.window, self.settings.stride, start))
                yield self._read_chunk(ids, bounds)
            else:
                self._end_reading()

    def _read_chunk(self, ids: Tensor, bounds: ChunkBounds) -> Chunk:
        """Score a chunk, by the adapter as it is; learn it; return its record."""
        began = time.perf_counter()
        with self._in_chunk(ids, bounds):
            with torch.set_grad_enabled(self._learns):
                losses = self._scorer.score(ids, bounds)  # [N]
            nats = losses.detach().double().sum()
            learns = self._learns and len(losses) > 0
            checks = [nats.isfinite()]
            if learns:
                checks += self._differentiate(losses)
            finite = torch.stack([check.to(nats.device) for check in checks]).all()
            # The chunk's only wait for the device.
            nll_nats, is_finite = torch.stack([nats, finite.to(nats.dtype)]).tolist()
            learned = learns and self._finish(losses, bool(is_finite))
        if learned or (math.isfinite(nll_nats) and not self._learns):
            self._scorer.keep_context()
        else:
            # The context may hold values that are not finite.
            self._scorer.forget_context()
        return self._record(bounds, nll_nats, learned, time.perf_counter() - began)

    def _differentiate(self, losses: Tensor) -> list[Tensor]:
        """Differentiate the mean of a chunk's losses [N], and what the steps add to it.

        Returns:
            Whether the gradients and what the steps recorded are finite, BoolTensors [].
        """
        self.learner.begin()
        losses.mean().backward()
        self.host.keep_gradients(self._active.parameters)
        for step in self.steps:
            step.before_optimizer_step(self)
        checks = []
        if self.learner.trains:
            checks.append(self.learner.check_gradients())
        for step in self.steps:
            check = step.is_finite()
            if isinstance(check, Tensor):
                checks.append(check)
            elif not check:
                checks.append(torch.tensor(False))
        return checks

    def _finish(self, losses: Tensor, is_finite: bool) -> bool:
        """Take one step on a chunk with the losses [N], if all is finite; return whether it was.

        Otherwise the adapter and the optimizer stay as they were.
        """
        self.learner.end(is_finite)
        if is_finite:
            for step in self.steps:
                step.after_chunk(self, losses.detach())
        return is_finite

    def _end_reading(self) -> None:
        began = time.perf_counter()
        for step in self.steps:
            step.after_reading(self, self._reading)
        self._reading += 1
        self._scorer.forget_context()
        self._seconds_at_ends += time.perf_counter() - began

    # ------------------------------------------------------------------ where the reading is

    @property
    def position(self) -> int:
        """The number of tokens read so far."""
        if not self.chunks:
            return 0
        return self.chunks[-1].stop

    @property
    def perplexity(self) -> float:
        """exp(sum of nll / number of scored tokens) of the current reading.

        It is nan before the first scored token.
        """
        if not self.chunks:
            return math.nan
        current = self.chunks[-1].reading
        return perplexity_of(chunk for chunk in self.chunks if chunk.reading == current)

    @property
    def seconds(self) -> float:
        """Wall time so far, of all readings together: of the chunks, and of the readings' ends."""
        return sum(chunk.seconds for chunk in self.chunks) + self._seconds_at_ends

    @property
    def is_only_written(self) -> bool:
        """Whether a step changes the adapter and no optimizer does."""
        return not self.learner.trains and any(step.learns for step in self.steps)

    def rewind(self) -> None:
        """Forget the document, its records and its context.

        The adapter and the optimizer stay as they are.
        """
        self.chunks: list[Chunk] = []
        self.skipped_chunks = 0
        self._text: str | None = None
        self._reading = 0
        self._seconds_at_ends = 0.0
        self._scorer.forget_context()

    @property
    def _start_of_next_chunk(self) -> int:
        if not self.chunks or self.chunks[-1].reading < self._reading:
            return 0
        return self.chunks[-1].stop

    @property
    def _learns(self) -> bool:
        return bool(self._active.parameters)

    def _begin(self, ids: Tensor) -> None:
        """Begin a document, or check that it is the one begun."""
        text = digest_ids(ids)
        if self._text not in (None, text):
            rule = f"input_ids must be the document begun here (sha256 {self._text[:12]})"
            remedy = "call rewind() first, or make a new TestTimeTrainer"
            raise ValueError(f"{rule}, got another one ({text[:12]}): {remedy}")
        self._text = text
        if not self.chunks:
            self._scorer.begin(ids)

    @contextmanager
    def _in_chunk(self, ids: Tensor, bounds: ChunkBounds) -> Iterator[None]:
        """Prepare the model and the steps for a chunk: evaluation mode, calibration, recording."""
        self._active.update()
        with ExitStack() as stack:
            stack.enter_context(self._active.evaluating())
            if self._learns and not self._active.calibrated:
                chunk = self._scorer.put_start(ids, bounds.start, bounds.stop)
                calibrate_empty(self.model, chunk)
                # Each layer now knows that it waits for none: a compiled forward could not look.
                uncalibrated_memories(self.model)
                self._active.calibrated = True
            for step in self.steps:
                stack.enter_context(step.recording())
            yield

    def _record(self, bounds: ChunkBounds, nll_nats: float, learned: bool, seconds: float) -> Chunk:
        index = 0
        if self.chunks and self.chunks[-1].reading == self._reading:
            index = self.chunks[-1].index + 1
        if self._learns and bounds.scored and not learned:
            self.skipped_chunks += 1
        chunk = Chunk(
            index=index,
            start=bounds.start,
            stop=bounds.stop,
            tokens=bounds.scored,
            nll_nats=nll_nats,
            seconds=seconds,
            learned=learned,
            reading=self._reading,
        )
        self.chunks.append(chunk)
        return chunk

    # ------------------------------------------------------------------ checks

    def _check_optimizer(self) -> None:
        if self._optimizer is not None and not callable(self._optimizer):
            rule = "optimizer must be a callable that takes the parameters"
            example = "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
            remedy = f"give one, such as {example}, or None for AdamW"
            raise TypeError(f"{rule}, got {self._optimizer!r}: {remedy}")

    def _check_steps(self) -> None:
        names = [step.name for step in self.steps]
        for name in names:
            if names.count(name) > 1:
                rule = f"steps must have one {name} at most"
                raise ValueError(f"{rule}, got {names.count(name)}: leave out the others")
        if not self.learner.trains and not self.is_only_written and self._learns:
            rule = "learning_rate must be a number above 0 where an adapter is trained"
            raise ValueError(f"{rule}, got None: give one, 1e-3 say")
        for step in self.steps:
            step.check(self)

    def _check_adapter(self) -> None:
        if self.learner.trains and self._active.frozen:
            rule = "model must have an adapter that is trained, got a frozen one"
            remedy = "load it with is_trainable=True, or give learning_rate=None to score alone"
            raise ValueError(f"{rule}: {remedy}")
        if not self._learns:
            return
        unwritten = unwritten_memories(self.model)
        if unwritten and not any(step.learns for step in self.steps):
            rule = f"steps must have a writer for the memory {unwritten[0]!r}"
            reason = "which has no slots to be trained"
            remedy = "give steps=[SlotWriter(model)], or another init_weights"
            raise ValueError(f"{rule}, {reason}: {remedy}")
        if self._active.merged:
            rule = "model must not have its adapter merged into the base"
            got = "got a merged one, which cannot learn"
            raise ValueError(f"{rule}, {got}: call unmerge_adapter() first")

    # ------------------------------------------------------------------ the state

    def describe(self) -> dict[str, Any]:
        """Return, as plain values, what a trainer must share to go on with this one's state."""
        optimizer = None
        if self._optimizer is not None:
            named = self._optimizer
            if not hasattr(named, "__qualname__"):
                named = type(named)
            optimizer = f"{named.__module__}.{named.__qualname__}"
        steps = {step.name: step.settings for step in self.steps}
        return {**asdict(self.settings), "optimizer": optimizer, **steps}

    def state_dict(self) -> dict[str, Any]:
        """Return all that a bit-identical continuation needs.

        These are copies of tensors on the CPU, and plain values.
        """
        random = {"cpu": torch.get_rng_state()}
        if self.host.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.host.device)
        self._active.walk()
        state = {
            "text": self._text,
            "chunks": [asdict(chunk) for chunk in self.chunks],
            "skipped_chunks": self.skipped_chunks,
            "reading": self._reading,
            "seconds_at_ends": self._seconds_at_ends,
            "model": model_state(self.model, self._active.parameters),
            "learner": self.learner.state_dict(),
            "steps": {step.name: step.state_dict() for step in self.steps},
            "scorer": self._scorer.state_dict(),
            "random": random,
        }
        return recursively_apply(lambda tensor: tensor.detach().cpu().clone(), state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        The other trainer's model must be the same, and its `describe` equal.

        `read` of the same document then goes on where that trainer was. The adapter's weights and
        torch's random state are replaced. A state that does not fit is an error, and both are as
        before.
        """
        before = self.state_dict()
        try:
            self._load(state)
        except BaseException:
            self._load(before)
            raise

    def _load(self, state: dict[str, Any]) -> None:
        chunks = [Chunk(**record) for record in state["chunks"]]
        reading = int(state["reading"])
        seconds_at_ends = float(state["seconds_at_ends"])
        _check_records(chunks, reading, self.settings)
        restore_model_state(self.model, self._active.parameters, state["model"])
        self.learner.load_state_dict(state["learner"])
        for step in self.steps:
            step.load_state_dict(state["steps"][step.name])
        self._scorer.load_state_dict(state["scorer"])
        self.chunks = chunks
        self.skipped_chunks = int(state["skipped_chunks"])
        self._reading = reading
        self._seconds_at_ends = seconds_at_ends
        self._text = state["text"]
        torch.set_rng_state(state["random"]["cpu"])
        if "cuda" in state["random"] and self.host.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"], self.host.device)


def _check_records(chunks: list[Chunk], last: int, settings: TrainingSettings) -> None:
    """Raise a `ValueError` unless records continue each other, up to the reading `last`."""
    position = 0
    reading = 0
    for chunk in chunks:
        if chunk.reading == reading + 1:
            position = 0
            reading = chunk.reading
        continues = chunk.start == position and chunk.reading == reading
        fits = 0 < chunk.stop - chunk.start <= settings.stride and reading < settings.readings
        if not continues or not fits:
            rule = "the record of tokens"
            raise ValueError(
                f"{rule} {chunk.start} to {chunk.stop} does not continue the one before"
            )
        position = chunk.stop
    if last not in (reading, reading + 1):
        raise ValueError(f"the records are of reading {reading}, got {last}")
