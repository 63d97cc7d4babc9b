"""Test-time training on one document, with any adapter in a model's layers (the paper's online memorisation)."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from accelerate.utils import recursively_apply
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..model.causal_lm import CausalLM
from ..slots import Writer
from ..text import digest_ids
from ..tuner import trained_parameters, unwritten_memories
from .anchor import Anchor
from .chunks import Chunk, cut
from .learner import Learner, OptimizerFactory
from .loop import Loop, Row
from .model_state import model_state, restore_model_state
from .settings import TrainingSettings


class TestTimeTrainer:
    """Train the active adapter on a document while scoring it (the paper's online memorisation).

    A chunk of `stride` tokens is scored with up to `window - stride` tokens of context before it, by the adapter as it
    is then; after that the adapter learns the chunk. The forward pass that scores is the one that is differentiated.

    The adapter's parameters that require gradients are changed in place; the base is not. Scores are taken in
    evaluation mode. Without an adapter, or with a disabled one, the model is only scored.

    Args:
        model: a transformers causal language model, plain or with a PEFT adapter in its layers.
        settings: a `TrainingSettings`; None to make one of `fields`.
        optimizer: makes the optimizer, from the list of parameters, at the first step; None for AdamW at
            `learning_rate`, without weight decay.
        writer: a `SlotWriter`, `RidgeWriter` or `ValueWriter`, which changes a LOCAS memory after each chunk, from the
            scoring pass and its gradient, after the optimizer's step. With a writer, neither `learning_rate` nor
            `optimizer` means that the memory is not trained as well.
        anchor: limits how the adapter changes the base's output on other text.
        fields: fields of `TrainingSettings`, in place of those of `settings`.

    An argument that does not fit is a `TypeError` or `ValueError` in one line, which names it and the remedy.
    """

    __test__ = False  # the name starts with Test: pytest would collect it
    _text: str | None

    def __init__(
        self,
        model: nn.Module,
        settings: TrainingSettings | None = None,
        *,
        optimizer: OptimizerFactory | None = None,
        writer: Writer | None = None,
        anchor: Anchor | None = None,
        **fields: Any,
    ):
        self.model, self._host = model, CausalLM(model)
        settings = TrainingSettings(**fields) if settings is None else replace(settings, **fields)
        rates = settings.learning_rate, settings.warmup_steps, settings.decay_steps
        self._learner = Learner(self._list_trained, *rates, optimizer)
        if optimizer is not None and not callable(optimizer):
            remedy = "give one, such as lambda parameters: torch.optim.SGD(parameters, lr=0.1), or None for AdamW"
            raise TypeError(
                f"optimizer must be a callable that takes the parameters, got {optimizer!r}: {remedy}"
            )
        if not self._learner.trains and writer is None and self._list_trained():
            rule = "learning_rate must be a number above 0 where an adapter is trained"
            raise ValueError(f"{rule}, got None: give one, 1e-3 say")
        if anchor is not None:
            if not self._learner.trains and writer is not None:
                rule = "anchor must be None for a memory that is written and not trained, got one, which acts on"
                raise ValueError(
                    f"{rule} training steps: give a learning_rate, or leave the anchor out"
                )
            anchor.check(self._host)
        self._loop = Loop(self._host, settings, writer, anchor)
        self._optimizer = optimizer
        self.rewind()

    @property
    def settings(self) -> TrainingSettings:
        return self._loop.settings

    @property
    def anchor(self) -> Anchor | None:
        return self._loop.anchor

    @property
    def chunks(self) -> list[Chunk]:
        """The records so far."""
        return self._row.chunks

    @property
    def skipped_chunks(self) -> int:
        """How many chunks were not learned because a loss or a gradient was not finite."""
        return self._row.skipped_chunks

    @property
    def seconds(self) -> float:
        """Wall time of scoring and learning so far."""
        return self._row.seconds

    @property
    def taken_back(self) -> list[int]:
        """The numbers of tokens read at which the brake took the adapter back."""
        return self._row.taken_back

    @property
    def final(self) -> tuple[float, float] | None:
        """At the end, the losses of the brake's last comparison, the adapter's and the base's, in nats a token."""
        return self._row.final

    @property
    def position(self) -> int:
        """The number of tokens read so far."""
        return self.chunks[-1].stop if self.chunks else 0

    @property
    def perplexity(self) -> float:
        """exp(sum of nll / number of scored tokens) of the current reading; nan before the first scored token."""
        return self._row.perplexity

    def read(self, input_ids: Tensor) -> Iterator[Chunk]:
        """Read a document from `position` on, and yield the record of each chunk after it was learned.

        The caller may stop at any record: adapter, optimizer and position are then as after that chunk, and another
        `read` of the same document goes on with the next one.

        `input_ids` is a LongTensor [T] or [1, T], T >= 2, on any device. Ids that are no document or not the one
        begun, or a merged memory, are a `TypeError` or `ValueError` at the call.
        """
        ids = self._host.check_document(input_ids)
        trained = self._list_trained()
        if trained and self._loop.writer is None and (unwritten := unwritten_memories(self.model)):
            rule = f"writer must be given for the memory {unwritten[0]!r}, which has no slots to be trained"
            raise ValueError(f"{rule}: give writer=SlotWriter(model), or another init_weights")
        if trained and any(
            module.merged for module in self.model.modules() if isinstance(module, BaseTunerLayer)
        ):
            what = "model must not have its adapter merged into the base, got a merged one, which cannot learn"
            raise ValueError(f"{what}: call unmerge_adapter() first")
        text = digest_ids(ids)
        if self._text not in (None, text):
            rule = f"input_ids must be the document begun here (sha256 {self._text[:12]}), got another one"
            raise ValueError(
                f"{rule} ({text[:12]}): call rewind() first, or make a new TestTimeTrainer"
            )
        self._text = text
        if not self.chunks:
            self._loop.find_start_token([ids])
            self._batch = self._loop.make_batch([self._row])
        return self._read(ids.to(self._host.device))

    def rewind(self) -> None:
        """Forget the document, its records and its context; the adapter and the optimizer stay as they are."""
        self._text, self._learner.mean = None, (0, [])
        self._row = Row(torch.empty(0, dtype=torch.long), self._learner)
        self._batch = self._loop.make_batch([self._row])

    def _read(self, ids: Tensor) -> Iterator[Chunk]:
        self._row.ids = ids
        while True:
            position, reading = self.position, self.chunks[-1].reading if self.chunks else 0
            if position == len(ids):
                self._loop.end_reading(self._row, reading)
                position, reading = 0, reading + 1
                self._batch = self._loop.make_batch([self._row])
            if reading == self.settings.readings:
                return
            bounds = next(cut(len(ids), self.settings.window, self.settings.stride, position))
            (self._batch,) = self._loop.step(self._batch, bounds, reading)
            yield self.chunks[-1]

    def _list_trained(self) -> list[nn.Parameter]:
        """Return what is trained; nothing for a plain model, whose own weights all require gradients."""
        return trained_parameters(self.model) if self._host.has_adapter() else []

    def describe(self) -> dict[str, Any]:
        """Return, as plain values, what a trainer must share with this one to go on with its state."""
        writer, anchor = self._loop.writer, self.anchor
        named = (
            self._optimizer if hasattr(self._optimizer, "__qualname__") else type(self._optimizer)
        )
        return {
            **asdict(self.settings),
            "optimizer": None
            if self._optimizer is None
            else f"{named.__module__}.{named.__qualname__}",
            "writer": None if writer is None else writer.settings,
            "anchor": None if anchor is None else anchor.settings,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all that a bit-identical continuation needs: copies of tensors on the CPU, and plain values."""
        state: dict[str, Any] = {
            "text": self._text,
            "start_token": self._loop.start_token,
            "chunks": [asdict(chunk) for chunk in self.chunks],
            "skipped_chunks": self.skipped_chunks,
            "final": self.final,
            "model": model_state(self.model, self._list_trained()),
            "learner": self._learner.state_dict(),
            "writer": {} if self._loop.writer is None else self._loop.writer.state_dict(),
            "cache": self._batch.cache.state_dict(),
            "random": {"cpu": torch.get_rng_state()},
        }
        if self._host.device.type == "cuda":
            state["random"]["cuda"] = torch.cuda.get_rng_state(self._host.device)
        return recursively_apply(lambda tensor: tensor.detach().cpu().clone(), state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, of a trainer whose model is the same and whose `describe` is equal.

        `read` of the same document then goes on where that trainer was. The adapter's weights and torch's random state
        are replaced. A state that does not fit is an error, and both are as before.
        """
        before = self.state_dict()
        try:
            self._load(state)
        except BaseException:
            self._load(before)
            raise

    def _load(self, state: dict[str, Any]) -> None:
        chunks = [Chunk(**record) for record in state["chunks"]]
        _check_records(chunks, self.settings)
        restore_model_state(self.model, self._list_trained(), state["model"])
        self._learner.load_state_dict(state["learner"])
        if self._loop.writer is not None:
            self._loop.writer.load_state_dict(state["writer"])
        self._loop.start_token = state["start_token"]
        self._batch = self._loop.make_batch([self._row])
        self._batch.cache.load_state_dict(state["cache"])
        self._row.chunks, self._row.skipped_chunks = chunks, int(state["skipped_chunks"])
        # Compared again, an adapter that has studied since could be taken back to its state before.
        self._row.final = (
            None if state["final"] is None else (float(state["final"][0]), float(state["final"][1]))
        )
        self._text = state["text"]
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
            raise ValueError(
                f"the record of tokens {chunk.start} to {chunk.stop} does not continue the one before"
            )
        position = chunk.stop
