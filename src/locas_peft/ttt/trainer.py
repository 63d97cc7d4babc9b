"""One document and one adapter: each chunk is scored first and learned second.

The paper's section on online memorisation. The trainer knows no adapter: it trains whatever parameters of a PEFT
model require gradients, LOCAS, LoRA or another; a model without an adapter is only read.

Axes: T tokens of the document, W window, S stride, N tokens scored in a chunk, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from .. import checkpoint
from ..tuner import SlotWriter, calibrate, empty_memories, unwritten_memories
from ..tuner.passes import evaluating
from .anchor import Anchor
from .cache import SlidingCache
from .chunk import Chunk, perplexity_of
from .continuation import (
    adapter_tensors,
    below,
    check_same_run,
    describe_run,
    fill,
    filled_fields,
    random_state,
    restore_adapters,
    set_random_state,
)
from .gradient import Gradient, bypassing, list_attention
from .host import Host, without_adapter
from .learner import Learner
from .losses import WEIGHTINGS, divergences, token_losses
from .optimizers import OPTIMIZERS, OptimizerFactory, name_of
from .settings import check_context, check_gradient, check_learning, check_lengths, to_document, to_whole

Context = Literal["recompute", "cache"]
Objective = Literal["nll", "distill"]
TokenWeighting = Literal["uniform", "loss"]


class TestTimeTrainer:
    """Reads a document and teaches the active adapter what it read (the paper's online memorisation).

    The document is cut into chunks of `stride` tokens. A chunk is scored with at most `window - stride` tokens of
    context before it, by the memory as it stands; then the memory learns the chunk. The forward pass that scores is
    the one that is differentiated, so that one epoch costs one forward and one backward pass.

    The adapter's parameters are changed in place; the base is not. Scores are taken in evaluation mode (dropout would
    falsify them), each module's own mode stands again whenever a record is handed out.

    Trained are the parameters that require gradients, if the model has a PEFT adapter. Without one, or with the
    adapter disabled, the model is only read, and no graph is built.

    Contexts:
        "recompute": each chunk's context is fed again, as in the paper; gradients flow through it.
        "cache": the context comes from a detached key/value cache that slides with the text, so that each token is
            fed once. Its older entries were computed by the memory as it stood then. The cache keeps its positions
            until the next chunk would pass the model's last one; then the context is fed once again, without
            gradients, from position 0.

    Args:
        model: a transformers causal language model, plain or with a PEFT adapter in its layers.
        window: W, the longest stretch of text that a prediction may rest on, in tokens; within the model's positions.
        stride: S, the chunk's length in tokens, 1 <= S <= W. With S = W the only context is the one token before the
            chunk, without which its first token could not be predicted.
        learning_rate: the rate after the warm-up. None for a callable `optimizer`, which brings its own rates, or
            where nothing is to be trained.
        epochs: optimizer steps a chunk. The first step uses the scoring pass; each further one runs the chunk again.
        context: "recompute" or "cache".
        gradient: "full" goes all the ways back, as in the paper; "tokenwise" leaves out those through attention, which
            takes about three quarters of the time and learns a little less (see `gradient.bypassing`). It is for
            models whose tokens meet in attention alone; the others are refused.
        optimizer: "adamw", "adam", "sgd" or "muon" of torch.optim, or a callable that takes the list of parameters
            and returns an optimizer. It is made at the first step and kept for the trainer's life.
        warmup_steps: the first so many steps use 1/(n+1), 2/(n+1), ... n/(n+1) of the rate.
        weight_decay: given to the named optimizers.
        max_grad_norm: clips the gradients' total norm where not None. (LOCAS slots are clipped by their tuner.)
        writer: writes tokens of each chunk into a two-layer LOCAS memory, from the scoring pass and its gradient,
            after the optimizer's step. With a writer, `learning_rate=None` says that the memory is not trained too.
        objective: "nll" teaches the text's own next tokens. "distill" teaches the next-token distributions of a
            teacher: the same backbone, its adapter disabled, reading the chunk with a longer context. What it costs
            is one more forward pass a chunk, over `teacher_window` tokens. Scores are the same measure under both.
        teacher_window: the longest stretch that the teacher's predictions rest on, in tokens, from `window` to the
            model's positions. None: four windows, or as many positions as there are. For "distill" only.
        token_weighting: "uniform", or "loss": each token of a chunk counts in proportion to its own loss.
        anchor: holds the memory to the base on other text (see `Anchor`); None lets it say what it likes there.

    Raises:
        TypeError, ValueError: in one line that names the argument, its rule, its value and the remedy.

    Example:
        >>> model = get_peft_model(base, LocasConfig(r=64))
        >>> trainer = TestTimeTrainer(model, window=512, stride=256, learning_rate=4e-3)
        >>> for chunk in trainer.read(input_ids):
        ...     print(chunk.stop, trainer.perplexity)
    """

    __test__ = False  # the name starts with Test: pytest would collect it

    def __init__(
        self,
        model: nn.Module,
        *,
        window: int,
        stride: int,
        learning_rate: float | None,
        epochs: int = 1,
        context: Context = "recompute",
        gradient: Gradient = "full",
        optimizer: str | OptimizerFactory = "adamw",
        warmup_steps: int = 2,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        writer: SlotWriter | None = None,
        objective: Objective = "nll",
        teacher_window: int | None = None,
        token_weighting: TokenWeighting = "uniform",
        anchor: Anchor | None = None,
    ):
        self.model = model
        self._host = Host(model)
        self.window, self.stride = to_whole("window", window, 1), to_whole("stride", stride, 1)
        self.epochs = to_whole("epochs", epochs, 1)
        self.context, self.gradient = context, gradient
        self.writer = writer
        self.objective, self.teacher_window, self.token_weighting = objective, teacher_window, token_weighting
        self.anchor = anchor
        self._learner = Learner(
            self._host,
            optimizer=optimizer,
            learning_rate=learning_rate,
            warmup_steps=to_whole("warmup_steps", warmup_steps, 0),
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
        )
        self._check_settings()
        if objective == "distill" and teacher_window is None:
            self.teacher_window = min(4 * window, self._host.positions or 4 * window)

        self.position = 0
        self.chunks: list[Chunk] = []
        self.skipped_chunks = 0
        self._bypassed = list_attention(model) if gradient == "tokenwise" else []
        self._cache = SlidingCache(self._host, keep=max(window - stride, 1) - 1)
        self._text: str | None = None
        self._resumed_from: Path | None = None
        self._reading: object | None = None  # stands for the iterator that reads; a later one takes its place
        self._locks: dict[Path, checkpoint.Lock] = {}
        self._held: Counter[Path] = Counter()

    def read(self, input_ids: Tensor) -> Iterator[Chunk]:
        """Reads a document from `position` on, and yields each chunk's record after the chunk was learned.

        The caller may stop at any record: memory, optimizer and position then stand after that chunk, and another
        `read` of the same document goes on with the next one.

        Args:
            input_ids: LongTensor [T] or [1, T], T >= 2, on any device.

        Returns:
            An iterator over the records. It does its work as it is asked for them.

        Raises:
            TypeError, ValueError: at the call, for ids that are no document or not the one begun, or a merged memory.
        """
        ids = self._document(input_ids)
        text = hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()
        if self._text not in (None, text):
            begun, remedy = "begun here", "call rewind() first, or make a new TestTimeTrainer"
            if self._resumed_from is not None:
                begun, remedy = f"begun in {str(self._resumed_from)!r}", "give that text, or choose another folder"
            raise ValueError(
                f"input_ids must be the document {begun} (sha256 {self._text[:12]}), got another one "
                f"({text[:12]}): {remedy}"
            )
        self._text = text
        return self._read(ids.to(self._host.device))

    def rewind(self) -> None:
        """Forgets the document, its records and its context; the memory and the optimizer stay as they are.

        For reading a text once more, or another one with the same memory.
        """
        self.position, self.chunks, self.skipped_chunks = 0, [], 0
        self._text, self._resumed_from = None, None
        self._cache.forget()

    @property
    def perplexity(self) -> float:
        """exp(sum of nll / number of scored tokens) over `chunks`; nan before the first scored token."""
        return perplexity_of(self.chunks)

    def _read(self, ids: Tensor) -> Iterator[Chunk]:
        reading = self._reading = object()
        try:
            while self.position < len(ids):
                chunk = self._score_and_learn(ids, self.position, min(self.position + self.stride, len(ids)))
                self.position = chunk.stop
                self.chunks.append(chunk)
                yield chunk
        finally:
            if self._reading is reading:
                self._reading = None
                self._release_locks()

    def _score_and_learn(self, ids: Tensor, start: int, stop: int) -> Chunk:
        began = time.perf_counter()
        with evaluating(self.model), self._recording(), bypassing(self._bypassed):
            parameters = self._learner.parameters()
            if parameters and not self.chunks:
                prepare(self.model, ids[start:stop].unsqueeze(0))
            undo = self._learner.snapshot() if self.epochs > 1 else None
            targets = ids[max(start, 1) : stop]
            nll_nats, learned, finite = 0.0, False, True
            distilled = self.objective == "distill" and parameters and len(targets)
            teacher = self._teacher_logits(ids, start, stop, len(targets)) if distilled else None
            for epoch in range(self.epochs if len(targets) else 0):
                with torch.set_grad_enabled(bool(parameters)):
                    logits = self._logits(ids, start, stop, len(targets))
                    losses = token_losses(logits if teacher is None else logits.detach(), targets)
                if epoch == 0:
                    nll_nats = losses.detach().double().sum().item()
                    finite = math.isfinite(nll_nats)
                if not logits.requires_grad:
                    break
                if teacher is not None:
                    losses = divergences(logits, teacher)
                finite = learned = self._learn(WEIGHTINGS[self.token_weighting](losses), parameters)
                if not finite:
                    self.skipped_chunks += 1
                    if undo is not None:
                        undo()
                    break
            if learned and self.writer is not None and self.writer.is_finite():
                self._learner.follow_slots(self.writer.write(losses.detach()).moved or {})
            if finite:
                self._cache.advance()
            else:
                self._cache.forget()  # what overflowed once would spoil every chunk that attends to it
        return Chunk(len(self.chunks), start, stop, len(targets), nll_nats, time.perf_counter() - began, learned)

    def _logits(self, ids: Tensor, start: int, stop: int, count: int) -> Tensor:
        """Gives the logits [N, V] for the chunk's targets: token t is predicted where token t - 1 is fed."""
        if self.context == "cache":
            return self._cache.forward(ids.unsqueeze(0), max(start - 1, 0), [stop - 1], count).squeeze(0)
        begin = max(0, start - max(self.window - self.stride, 1))
        return self._host.logits(ids[begin : stop - 1].unsqueeze(0), count, use_cache=False).squeeze(0)

    @torch.no_grad()
    def _teacher_logits(self, ids: Tensor, start: int, stop: int, count: int) -> Tensor:
        """Gives the teacher's logits [N, V]: the base alone, after `teacher_window - stride` tokens of context."""
        begin = max(0, start - max(self.teacher_window - self.stride, 1))
        with without_adapter(self.model):
            return self._host.logits(ids[begin : stop - 1].unsqueeze(0), count, use_cache=False).squeeze(0)

    def _learn(self, loss: Tensor, parameters: list[nn.Parameter]) -> bool:
        """Takes one optimizer step, or none where the loss or a gradient is not finite."""
        if not torch.isfinite(loss):
            return False
        if self._learner.learning_rate is None and self.writer is not None:
            loss.backward()
            for parameter in parameters:
                parameter.grad = None
            return self.writer.is_finite()
        self._learner.begin(parameters)
        loss.backward()
        self._pull_to_base()
        return self._learner.finish(parameters)

    def _pull_to_base(self) -> None:
        """Adds the anchor's gradient, where this step has one."""
        text = None if self.anchor is None else self.anchor.text_of(self._learner.steps)
        if text is None:
            return
        text, count = text.to(self._host.device), text.shape[1] - 1
        with nullcontext() if self.writer is None else self.writer.pausing():
            with torch.no_grad(), without_adapter(self.model):
                base = self._host.logits(text[:, :-1], count, use_cache=False)[0]
            logits = self._host.logits(text[:, :-1], count, use_cache=False)[0]
            (self.anchor.weight * self.anchor.every * divergences(logits, base).mean()).backward()

    def _recording(self) -> AbstractContextManager:
        return nullcontext() if self.writer is None else self.writer.recording()

    # Checkpoints

    def save(self, directory: str | Path) -> Path:
        """Writes all that a bit-identical continuation needs into a folder, in place of a former checkpoint.

        Adapter, optimizer, warm-up, position, records, key/value cache, the anchor's texts and torch's random state
        (the CPU's and the model's device's), in one file that is replaced as a whole (see `checkpoint.write`). Between
        two records of `read` the folder then stays locked for other writers until the reading ends.

        Args:
            directory: the folder; made where it is missing.

        Returns:
            The checkpoint's path.

        Raises:
            ValueError: where another process or trainer writes there, or the optimizer's state is no tensors and JSON.
            OSError: where it cannot be written; the former checkpoint stands.
        """
        directory = Path(directory)
        self._lock(directory)
        try:
            return checkpoint.write(directory, self._tensors(), self._state())
        finally:
            if self._reading is None:
                self._release_locks()

    def resume(self, directory: str | Path) -> bool:
        """Takes up the checkpoint of a folder: `read` of the same document then goes on where it was saved.

        Model, adapter configuration and settings must be those of the checkpoint. What it holds replaces the adapter's
        weights, torch's random state and the trainer's own state, its anchor's texts too: the base may write others on
        another machine.

        Args:
            directory: the folder. It stays locked for other writers until the reading ends.

        Returns:
            False where there is no checkpoint: nothing is changed then.

        Raises:
            ValueError: for a checkpoint of another model, adapter or setting, a damaged one, or one in use.
        """
        directory = Path(directory)
        if not (directory / checkpoint.CHECKPOINT).exists():
            return False
        self._lock(directory)
        try:
            found = checkpoint.read(directory)
            if found is None:  # its reading has just ended
                self._release_locks()
                return False
            tensors, state = found
            undo = self._remember()
            try:
                check_same_run(self._run(), state["run"], directory)
                self._restore(tensors, state)
            except Exception as error:
                undo()
                if isinstance(error, ValueError):
                    raise
                raise ValueError(
                    f"checkpoint must be whole, got the damaged file {str(directory / checkpoint.CHECKPOINT)!r} "
                    f"({type(error).__name__}: {error}): delete it to start afresh"
                ) from None
        except BaseException:
            self._release_locks()
            raise
        self._resumed_from = directory
        return True

    @contextmanager
    def holding(self, directory: str | Path) -> Iterator[None]:
        """Keeps a folder, for this trainer's checkpoints, from other writers within the context.

        `save` and `resume` lock a folder by themselves; this does so before there is anything to save.

        Args:
            directory: the folder; made where it is missing.

        Raises:
            ValueError: where another process or trainer writes there (`checkpoint.InUse`).
            OSError: where the folder cannot be written.
        """
        directory = Path(directory)
        key = directory.resolve()
        self._lock(directory)
        self._held[key] += 1
        try:
            yield
        finally:
            self._held[key] -= 1
            if self._reading is None:
                self._release_locks()

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {
            **adapter_tensors(self.model, self._learner.parameters()),
            **{f"optimizer/{name}": value for name, value in self._learner.tensors().items()},
            **{f"cache/{name}": value for name, value in self._cache.tensors().items()},
            **random_state(self._host.device),
        }
        if self.anchor is not None:
            tensors["anchor/texts"] = self.anchor.texts
        return {name: value.detach().cpu().clone() for name, value in tensors.items()}

    def _state(self) -> dict:
        return {
            "run": {**self._run(), "text": self._text},
            "position": self.position,
            "chunks": [asdict(chunk) for chunk in self.chunks],
            "skipped_chunks": self.skipped_chunks,
            "steps": self._learner.steps,
            "cache_layers": None if self._cache.layers is None else len(self._cache.layers),
            "cache_position": self._cache.positions[0],
            "filled": filled_fields(self.model),
            "optimizer": self._learner.state(),
        }

    def _restore(self, tensors: dict[str, Tensor], state: dict) -> None:
        restore_adapters(self.model, tensors, state["filled"])
        self._learner.restore(below(tensors, "optimizer/"), state["optimizer"], state["steps"])
        self._cache.restore(below(tensors, "cache/"), state["cache_layers"], state["cache_position"])
        self.position, self.skipped_chunks = state["position"], state["skipped_chunks"]
        self.chunks = [Chunk(**record) for record in state["chunks"]]
        if self.position != (self.chunks[-1].stop if self.chunks else 0):
            raise TypeError("position and records contradict each other")
        self._text = state["run"]["text"]
        if self.anchor is not None:
            texts = tensors["anchor/texts"].to(self.anchor.texts)
            if texts.shape != self.anchor.texts.shape:
                raise TypeError(f"anchor texts of shape {list(texts.shape)}")
            self.anchor = replace(self.anchor, texts=texts)
            self._check_anchor()
        set_random_state(tensors, self._host.device)

    def _remember(self) -> Callable[[], None]:
        """Gives a function that undoes whatever a checkpoint brings."""
        undo_learner = self._learner.snapshot()
        trainer, cache, random = vars(self).copy(), vars(self._cache).copy(), random_state(self._host.device)
        buffers, filled = [(b, b.clone()) for b in self.model.buffers()], filled_fields(self.model)

        def undo() -> None:
            undo_learner()
            vars(self).update(trainer)
            vars(self._cache).update(cache)
            set_random_state(random, self._host.device)
            for buffer, value in buffers:
                buffer.data.copy_(value)
            fill(self.model, filled)

        return undo

    def _run(self) -> dict:
        settings = {
            "window": self.window,
            "stride": self.stride,
            "learning_rate": self._learner.learning_rate,
            "epochs": self.epochs,
            "context": self.context,
            "gradient": self.gradient,
            "optimizer": name_of(self._learner.optimizer_name),
            "warmup_steps": self._learner.warmup_steps,
            "weight_decay": self._learner.weight_decay,
            "max_grad_norm": self._learner.max_grad_norm,
            "writer": None if self.writer is None else self.writer.settings,
            "objective": self.objective,
            "teacher_window": self.teacher_window,
            "token_weighting": self.token_weighting,
            "anchor": None if self.anchor is None else self.anchor.settings,
        }
        return describe_run(self.model, settings)

    def _lock(self, directory: Path) -> None:
        key = directory.resolve()
        if key not in self._locks:
            self._locks[key] = checkpoint.Lock(directory)

    def _release_locks(self) -> None:
        for key in [key for key in self._locks if not self._held[key]]:
            self._locks.pop(key).release()

    # Checks

    def _check_settings(self) -> None:
        check_lengths(self._host, self.window, self.stride)
        check_context(self._host, self.context)
        check_gradient(self._host, self.gradient)
        if not callable(self._learner.optimizer_name) and self._learner.optimizer_name not in OPTIMIZERS:
            raise ValueError(
                f"optimizer must be one of {', '.join(OPTIMIZERS)}, or a callable that takes the parameters, got "
                f"{self._learner.optimizer_name!r}: choose one of them"
            )
        if (
            self._learner.learning_rate is None
            and not callable(self._learner.optimizer_name)
            and self._learner.parameters()
            and self.writer is None
        ):
            raise ValueError(
                "learning_rate must be a number above 0 where an adapter is trained, got None: give one, 1e-3 say"
            )
        learner = self._learner
        check_learning(
            learner.learning_rate, learner.weight_decay, learner.max_grad_norm, token_weighting=self.token_weighting
        )
        self._check_objective()
        self._check_anchor()

    def _check_objective(self) -> None:
        if self.objective not in ("nll", "distill"):
            raise ValueError(f"objective must be 'nll' or 'distill', got {self.objective!r}: choose one of the two")
        if self.teacher_window is None:
            return
        if self.objective != "distill":
            raise ValueError(
                f"teacher_window has a meaning for the objective 'distill' only, got {self.teacher_window} with "
                f"{self.objective!r}: leave it out"
            )
        to_whole("teacher_window", self.teacher_window, 1)
        limit = self._host.positions
        if self.teacher_window < self.window or (limit is not None and self.teacher_window > limit):
            raise ValueError(
                f"teacher_window must be from window ({self.window}) to the model's {limit} positions, got "
                f"{self.teacher_window}: the teacher sees at least what the pupil sees"
            )

    def _check_anchor(self) -> None:
        if self.anchor is None:
            return
        if self._learner.learning_rate is None and self.writer is not None:
            raise ValueError(
                "anchor must be None for a memory that is written and not trained, got one, which pulls on training "
                "steps: give a learning_rate, or leave the anchor out"
            )
        low, high, length = self.anchor.texts.min(), self.anchor.texts.max(), self.anchor.texts.shape[1]
        if low < 0 or high >= self._host.vocabulary:
            raise ValueError(
                f"anchor texts must lie in [0, {self._host.vocabulary}), the model's vocabulary, got "
                f"{(low if low < 0 else high).item()}: write them with this model"
            )
        if self._host.positions is not None and length > self._host.positions:
            raise ValueError(
                f"anchor texts must be within the model's {self._host.positions} positions, got {length} tokens: "
                "write shorter ones"
            )

    def _document(self, input_ids: Tensor) -> Tensor:
        ids = to_document(self._host, input_ids)
        if self.writer is None and self._learner.parameters() and unwritten_memories(self.model):
            raise ValueError(
                f"writer must be given for the memory {unwritten_memories(self.model)[0]!r}, which has no slots to be "
                "trained: give writer=SlotWriter(model), or another init_strategy"
            )
        if self._learner.parameters() and self._host.is_merged():
            raise ValueError(
                "model must not have its adapter merged into the base, got a merged one, which cannot learn: "
                "call unmerge_adapter() first"
            )
        return ids


def prepare(model: nn.Module, input_ids: Tensor) -> None:
    """Calibrates the active LOCAS memories that are still empty, on the first chunk alone.

    Anything later in the document would leak into scores that are yet to be taken.

    Args:
        model: any model; nothing happens where there is no empty memory.
        input_ids: LongTensor [1, N], the first chunk.
    """
    if empty_memories(model):
        calibrate(model, [input_ids])
