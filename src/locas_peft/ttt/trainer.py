"""Test-time training on one document: each chunk is scored first and learned second.

The paper's section on online memorisation. The trainer depends on no adapter type: it trains the parameters of a PEFT
model that require gradients, of LOCAS, LoRA or another method. A model without an adapter is only scored.

Axes: T tokens of the document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from ..model.causal_lm import CausalLM
from ..slots import SlotWriter
from ..text import digest_ids
from ..tuner import trained_parameters, unwritten_memories
from . import checkpoint
from .anchor import Anchor
from .chunks import Chunk, cut
from .learner import Learner, OptimizerFactory
from .loop import Loop, Row
from .run_state import describe_run, find_difference, model_state, restore_model_state
from .settings import TrainingSettings

__all__ = ["TestTimeTrainer"]


class TestTimeTrainer:
    """Train the active adapter on a document while scoring it (the paper's online memorisation).

    A chunk of `stride` tokens is scored with up to `window - stride` tokens of context before it, by the adapter as it
    is then; after that the adapter learns the chunk. The forward pass that scores is the one that is differentiated,
    so that one epoch costs one forward and one backward pass.

    The adapter's parameters that require gradients are changed in place; the base is not. Scores are taken in
    evaluation mode; each module's own mode is restored before a record is yielded. Without an adapter, or with a
    disabled one, the model is only scored.

    Args:
        model: a transformers causal language model, plain or with a PEFT adapter in its layers.
        settings: a `TrainingSettings`; None to make one of `fields`.
        optimizer: makes the optimizer, from the list of parameters; None for AdamW at `learning_rate`, without weight
            decay. It is made at the first step and kept for the trainer's life.
        writer: writes tokens of each chunk into a two-layer LOCAS memory, from the scoring pass and its gradient,
            after the optimizer's step. With a writer, neither `learning_rate` nor `optimizer` means that the memory is
            not trained as well.
        anchor: limits how the adapter changes the base's output on other text (see `Anchor`).
        fields: fields of `TrainingSettings`, in place of those of `settings`.

    Attributes:
        position: the number of tokens read so far.
        chunks: the records so far.
        skipped_chunks: how many chunks were not learned because a loss or a gradient was not finite.
        taken_back: the numbers of tokens read at which the brake took the adapter back.
        final: at the end of the last reading, what the brake's last comparison found, in nats a token: the adapter's
            loss and the base's. None before, or without a brake.

    Raises:
        TypeError, ValueError: in one line that names the argument, its rule, its value and the remedy.

    Example:
        >>> model = get_peft_model(base, LocasConfig(r=64))
        >>> trainer = TestTimeTrainer(model, window=512, stride=256, learning_rate=4e-3)
        >>> for chunk in trainer.read(input_ids):
        ...     print(chunk.stop, trainer.perplexity)
    """

    __test__ = False  # the name starts with Test: pytest would collect it
    _text: str | None
    _resumed_from: Path | None

    def __init__(
        self,
        model: nn.Module,
        settings: TrainingSettings | None = None,
        *,
        optimizer: OptimizerFactory | None = None,
        writer: SlotWriter | None = None,
        anchor: Anchor | None = None,
        **fields: Any,
    ):
        self.model = model
        self._host = CausalLM(model)
        settings = TrainingSettings(**fields) if settings is None else replace(settings, **fields)
        rates = settings.learning_rate, settings.warmup_steps, settings.decay_steps
        self._learner = Learner(self._list_trained, *rates, optimizer)
        if optimizer is not None and not callable(optimizer):
            raise TypeError(
                f"optimizer must be a callable that takes the parameters, got {optimizer!r}: give one, such as "
                "lambda parameters: torch.optim.SGD(parameters, lr=0.1), or None for AdamW"
            )
        if not self._learner.trains and writer is None and self._list_trained():
            raise ValueError(
                "learning_rate must be a number above 0 where an adapter is trained, got None: give one, 1e-3 say"
            )
        if anchor is not None:
            if not self._learner.trains and writer is not None:
                raise ValueError(
                    "anchor must be None for a memory that is written and not trained, got one, which acts on "
                    "training steps: give a learning_rate, or leave the anchor out"
                )
            anchor.check(self._host)
        self._loop = Loop(self._host, settings, writer, anchor)
        self._optimizer = optimizer
        self._iterator: object | None = None  # identifies the iterator of `read`; a later one takes its place
        self._locks: dict[Path, checkpoint.Lock] = {}
        self.rewind()

    @property
    def settings(self) -> TrainingSettings:
        return self._loop.settings

    @property
    def anchor(self) -> Anchor | None:
        return self._loop.anchor

    @property
    def chunks(self) -> list[Chunk]:
        return self._row.chunks

    @property
    def skipped_chunks(self) -> int:
        return self._row.skipped_chunks

    @property
    def seconds(self) -> float:
        """Wall time of scoring and learning so far."""
        return self._row.seconds

    @property
    def taken_back(self) -> list[int]:
        return self._row.taken_back

    @property
    def final(self) -> tuple[float, float] | None:
        return self._row.final

    @property
    def position(self) -> int:
        return self.chunks[-1].stop if self.chunks else 0

    @property
    def perplexity(self) -> float:
        """exp(sum of nll / number of scored tokens) of the current reading; nan before the first scored token."""
        return self._row.perplexity

    def read(self, input_ids: Tensor) -> Iterator[Chunk]:
        """Read a document from `position` on, and yield the record of each chunk after it was learned.

        The caller may stop at any record: adapter, optimizer and position are then as after that chunk, and another
        `read` of the same document goes on with the next one.

        Args:
            input_ids: LongTensor [T] or [1, T], T >= 2, on any device.

        Returns:
            An iterator over the records. The work is done as it is iterated.

        Raises:
            TypeError, ValueError: at the call, for ids that are no document or not the one begun, or a merged memory.
        """
        ids = self._host.check_document(input_ids)
        trained = self._list_trained()
        if trained and self._loop.writer is None and unwritten_memories(self.model):
            raise ValueError(
                f"writer must be given for the memory {unwritten_memories(self.model)[0]!r}, which has no slots to be "
                "trained: give writer=SlotWriter(model), or another init_strategy"
            )
        if trained and self._host.is_merged():
            raise ValueError(
                "model must not have its adapter merged into the base, got a merged one, which cannot learn: "
                "call unmerge_adapter() first"
            )
        text = digest_ids(ids)
        if self._text not in (None, text):
            begun, remedy = "here", "call rewind() first, or make a new TestTimeTrainer"
            if self._resumed_from is not None:
                begun, remedy = f"in {str(self._resumed_from)!r}", "give that text, or choose another folder"
            raise ValueError(
                f"input_ids must be the document begun {begun} (sha256 {self._text[:12]}), got another one "
                f"({text[:12]}): {remedy}"
            )
        self._text = text
        return self._read(ids.to(self._host.device))

    def rewind(self) -> None:
        """Forget the document, its records and its context; the adapter and the optimizer stay as they are."""
        self._text, self._resumed_from = None, None
        self._row = Row(torch.empty(0, dtype=torch.long), self._learner)
        self._batch = self._loop.make_batch([self._row])

    def _read(self, ids: Tensor) -> Iterator[Chunk]:
        iterator = self._iterator = object()
        self._row.ids = ids
        try:
            while True:
                position, reading = self.position, self.chunks[-1].reading if self.chunks else 0
                if position == len(ids):
                    position, reading = 0, reading + 1
                    self._batch = self._loop.make_batch([self._row])
                if reading == self.settings.readings:
                    self._loop.finish(self._row)
                    return
                span = next(cut(len(ids), self.settings.window, self.settings.stride, position))
                (self._batch,) = self._loop.step(self._batch, span, reading)
                yield self.chunks[-1]
        finally:
            if self._iterator is iterator:
                self._iterator = None
                self._release_locks()

    def _list_trained(self) -> list[nn.Parameter]:
        """Return what is trained; nothing for a plain model, whose own weights all require gradients."""
        return trained_parameters(self.model) if self._host.has_adapter() else []

    # ------------------------------------------------------------------ checkpoints

    def save(self, directory: str | Path | checkpoint.Lock) -> Path:
        """Write all that a bit-identical continuation needs into a folder, in place of a former checkpoint.

        Between two records of `read` the folder then stays locked for other writers until the reading ends. The
        argument may also be the caller's lock on it. The checkpoint's path is returned.

        Raises:
            ValueError: another process or trainer writes there, or the optimizer's state is not tensors and numbers.
            OSError: it cannot be written; the former checkpoint stands.
        """
        directory = self._lock(directory)
        try:
            return checkpoint.save(directory, self.state_dict())
        finally:
            if self._iterator is None:
                self._release_locks()

    def resume(self, directory: str | Path | checkpoint.Lock) -> bool:
        """Load the checkpoint of a folder: `read` of the same document goes on where it was saved. False without one.

        Model, adapter configuration and settings must be those of the checkpoint. It replaces the adapter's weights,
        torch's random state and the trainer's own state, its anchor's texts included: the base may write others on
        another machine. Where it is refused, all of these are as before. The folder, or the caller's lock on it, stays
        locked for other writers until the reading ends.

        Raises:
            ValueError: a checkpoint of another model, adapter or setting, a damaged one, or one in use.
        """
        folder = directory.directory if isinstance(directory, checkpoint.Lock) else Path(directory)
        if not checkpoint.has_checkpoint(folder):
            return False
        self._lock(directory)
        resumed = False
        try:
            state = checkpoint.load(folder)
            if state is not None:
                self._load(state, folder)
                resumed, self._resumed_from = True, folder
        finally:
            if not resumed:
                self._release_locks()
        return resumed

    def _load(self, state: dict[str, Any], folder: Path) -> None:
        """Load a checkpoint's state; where it is refused, restore the state before."""
        before = self.state_dict()
        try:
            difference = find_difference(before["run"], state["run"], folder)
            if difference is None:
                self.load_state_dict(state)
        except BaseException as error:
            self.load_state_dict(before)
            if not isinstance(error, Exception):
                raise
            raise checkpoint.damaged(folder, error) from None  # entries of another kind or shape than we write
        if difference is not None:
            raise ValueError(difference)

    def _lock(self, directory: str | Path | checkpoint.Lock) -> Path:
        """Lock a folder until the reading ends, unless the caller has locked it; return its path."""
        if isinstance(directory, checkpoint.Lock):
            return directory.directory
        key = Path(directory).resolve()
        if key not in self._locks:
            self._locks[key] = checkpoint.Lock(directory)
        return Path(directory)

    def _release_locks(self) -> None:
        while self._locks:
            self._locks.popitem()[1].close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the reading: copies of tensors on the CPU, and plain values."""
        writer, anchor = self._loop.writer, self.anchor
        named = self._optimizer if hasattr(self._optimizer, "__qualname__") else type(self._optimizer)
        settings = {
            **asdict(self.settings),
            "optimizer": None if self._optimizer is None else f"{named.__module__}.{named.__qualname__}",
            "writer": None if writer is None else writer.settings,
            "anchor": None if anchor is None else anchor.settings,
        }
        state = {
            "run": {**describe_run(self.model, settings), "text": self._text},
            "chunks": [asdict(chunk) for chunk in self.chunks],
            "skipped_chunks": self.skipped_chunks,
            "final": self.final,
            "good": self._learner.good,
            "model": model_state(self.model, self._list_trained()),
            "learner": self._learner.state_dict(),
            "cache": self._batch.cache.state_dict(),
            "anchor": None if anchor is None else anchor.known_texts,
            "random": {"cpu": torch.get_rng_state()},
        }
        if self._host.device.type == "cuda":
            state["random"]["cuda"] = torch.cuda.get_rng_state(self._host.device)
        return recursively_apply(lambda tensor: tensor.detach().cpu().clone(), state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, of a trainer with the same model and settings."""
        chunks = [Chunk(**record) for record in state["chunks"]]
        _check_records(chunks, self.settings)
        restore_model_state(self.model, self._list_trained(), state["model"])
        self._learner.load_state_dict(state["learner"])
        self._learner.load_good(state["good"])
        self._batch = self._loop.make_batch([self._row])
        self._batch.cache.load_state_dict(state["cache"])
        self._row.chunks, self._row.skipped_chunks = chunks, int(state["skipped_chunks"])
        # Compared again, an adapter that has studied since could be taken back to its state before.
        self._row.final = None if state["final"] is None else (float(state["final"][0]), float(state["final"][1]))
        self._text = state["run"]["text"]
        if self.anchor is not None:
            self._loop.anchor = self.anchor.with_texts(state["anchor"])
            self.anchor.check(self._host)
        torch.set_rng_state(state["random"]["cpu"])
        if "cuda" in state["random"] and self._host.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"], self._host.device)


def _check_records(chunks: list[Chunk], settings: TrainingSettings) -> None:
    """Raise a `ValueError` where records do not continue each other."""
    position, reading = 0, 0
    for chunk in chunks:
        if chunk.reading == reading + 1:
            position, reading = 0, chunk.reading
        first = chunk.start == position and chunk.reading == reading < settings.readings
        if not first or not 0 < chunk.stop - chunk.start <= settings.stride:
            raise ValueError(f"the record of tokens {chunk.start} to {chunk.stop} does not continue the one before")
        position = chunk.stop
