"""The two stages: a reading and a study. Each is a generator of steps with a state.

Both have the same interface, so that one function runs, checkpoints and resumes either
(`running.py`).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from accelerate.utils import recursively_apply
from torch import Tensor, nn

from locas_settings import ReadSettings, StudySettings

from ..asking import current_day, dated
from ..bases import load_base
from ..exchanges import Exchange
from ..selfstudy import Former, SelfStudy, StudyStep
from ..text import digest_ids
from ..ttt import (
    Anchor,
    Chunk,
    MeanOfReadings,
    OwnText,
    TestTimeTrainer,
    at_marks,
    choose_marks,
    cumulative,
    per_segment,
    perplexity,
)
from ..ttt.model_state import model_state, restore_model_state
from ..tuner import trained_parameters
from .complete import training_settings
from .methods import METHODS

__all__ = ["Reading", "Stage", "Study", "make_trainer"]

ANCHOR_TOKENS = 128
"""The most tokens of a text that the base writes for the anchor."""


class Stage:
    """A text that is being learned by the active adapter of a model.

    Attributes:
        kind: "read" or "study".
        text_sha256: of the token ids.
    """

    kind: str
    text_sha256: str

    def earlier_steps(self) -> list[Any]:
        """Return the records of the steps so far, for those who show progress."""
        return []

    def steps(self) -> Iterator[Any]:
        """Take the steps that are left, and yield the record of each; the caller may stop."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return what a stage must share with this one to go on with its state: plain values."""
        return {}

    def find_difference(self, state: dict[str, Any]) -> str | None:
        """Return the message for a state of the same text that was begun otherwise, or None."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return all that a bit-identical continuation needs: tensors on the CPU, plain values."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        raise NotImplementedError

    def figures(self) -> dict[str, Any]:
        """Return the figures for the record, as JSON values."""
        raise NotImplementedError


class Reading(Stage):
    """Test-time training on a text, LongTensor [T]; its steps are `Chunk`s."""

    kind = "read"

    def __init__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        settings: ReadSettings,
        compiled: bool = False,
    ):
        self._input_ids = input_ids
        self._readings = settings.readings
        self._trainer = make_trainer(model, settings, compiled)
        self.text_sha256 = digest_ids(input_ids)

    def earlier_steps(self) -> list[Chunk]:
        return list(self._trainer.chunks)

    def steps(self) -> Iterator[Chunk]:
        yield from self._trainer.read(self._input_ids)

    def describe(self) -> dict[str, Any]:
        return self._trainer.describe()

    def state_dict(self) -> dict[str, Any]:
        return self._trainer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.load_state_dict(state)

    def figures(self) -> dict[str, Any]:
        readings = []
        for number in range(self._readings):
            chunks = [chunk for chunk in self._trainer.chunks if chunk.reading == number]
            # A reading that was stopped has fewer. A first chunk of one token scores none.
            if any(chunk.tokens for chunk in chunks):
                readings.append(chunks)
        nats = [sum(chunk.nll_nats for chunk in chunks) for chunks in readings]
        tokens = [sum(chunk.tokens for chunk in chunks) for chunks in readings]
        if not tokens:
            raise ValueError("nothing was read yet: take a step, or one more, before finish()")
        perplexities = [perplexity(*pair) for pair in zip(nats, tokens, strict=True)]
        marks = choose_marks(len(self._input_ids))
        return {
            "scored_tokens": tokens[0],
            "nll_nats": nats[0],
            "perplexity": perplexities[0],
            "perplexity_at": at_marks(readings[0], marks),
            "perplexity_between": per_segment(readings[0], marks),
            "perplexities": perplexities,
            "curve": cumulative(readings[0]),
            "skipped_chunks": self._trainer.skipped_chunks,
            "all_scored_tokens": sum(tokens),
            "seconds": self._trainer.seconds,
        }


class Study(Stage):
    """A self-study of a text, LongTensor [T]; its steps are `StudyStep`s.

    A chat template that prints the date prints that of the first day, also after a resume.

    Args:
        model, tokenizer: a causal LM with the adapter that learns, and its tokenizer.
        settings: complete ones.
        given: the exchanges that are learned, in place of those that the model would write.
        former: the memory that the study goes on with; None for a fresh one: it then gets rows that
            tell the passages apart.
        compiled: whether the passes over lessons go through `torch.compile`.
    """

    kind = "study"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        input_ids: Tensor,
        settings: StudySettings,
        *,
        given: Sequence[Exchange] | None = None,
        former: Former | None = None,
        compiled: bool = False,
    ):
        self._model = model
        self._date = current_day()
        self.text_sha256 = digest_ids(input_ids)
        load_writer = None
        if settings.writer is not None:
            load_writer = partial(load_base, settings.writer)
        self.study = SelfStudy(
            model,
            tokenizer,
            input_ids,
            settings,
            given=given,
            former=former,
            load_writer=load_writer,
            compiled=compiled,
        )

    def steps(self) -> Iterator[StudyStep]:
        steps = self.study.run()
        while True:
            # Not around the whole loop: the caller has its own date between two steps.
            with dated(self._date):
                step = next(steps, None)
            if step is None:
                return
            yield step

    def find_difference(self, state: dict[str, Any]) -> str | None:
        return self.study.find_difference(state["study"])

    def state_dict(self) -> dict[str, Any]:
        state = {
            "text": self.text_sha256,
            "date": self._date,
            "model": model_state(self._model, trained_parameters(self._model)),
            "study": self.study.state_dict(),
        }
        return recursively_apply(lambda tensor: tensor.detach().cpu().clone(), state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = self.state_dict()
        try:
            self._load(state)
        except BaseException:
            self._load(before)
            raise

    def _load(self, state: dict[str, Any]) -> None:
        restore_model_state(self._model, trained_parameters(self._model), state["model"])
        self.study.load_state_dict(state["study"])
        # Earlier checkpoints have none.
        self._date = state.get("date", self._date)

    def figures(self) -> dict[str, Any]:
        figures = self.study.figures
        seconds = figures["writing_seconds"] + figures["learning_seconds"]
        return {**figures, "seconds": seconds, "date": self._date}


def make_trainer(
    model: nn.Module, settings: ReadSettings, compiled: bool = False
) -> TestTimeTrainer:
    """Return the trainer of a reading with complete settings, and with the method's steps.

    `compiled` is that of `TestTimeTrainer`.
    """
    writers = METHODS[settings.method].make_writers(settings, model)
    loop = training_settings(settings)
    steps = list(writers)
    if settings.anchor:
        # Complete settings have both or none.
        assert settings.anchor_every is not None
        tokens = max(min(loop.stride, ANCHOR_TOKENS), 2)
        texts = OwnText(model, tokens=tokens, seed=settings.seed)
        steps.append(Anchor(texts, weight=settings.anchor, every=settings.anchor_every))
    # The mean of two maps that were written is neither map: they may have other slots.
    if settings.readings > 1 and not writers:
        steps.append(MeanOfReadings())
    return TestTimeTrainer(model, loop, steps=steps, compiled=compiled)
