"""Self-study of a text: write exchanges about it, then learn their answers without the text."""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locas_settings import StudySettings

from ..asking import encode_question
from ..checks import invalid
from ..exchanges import (
    BLOCK,
    PER_PASSAGE,
    Exchange,
    check_window,
    correct,
    digest_exchanges,
    write_exchanges,
)
from ..model import CausalLM
from ..slots.discriminants import can_tell_apart, lift_norm_clip
from ..text import Passage, split_passages
from ..ttt.active import calibrate_empty
from ..tuner import unwritten_memories
from .distillation import Distillation, Former
from .lessons import FORMS, make_lesson

__all__ = ["SelfStudy", "StudyStep"]

_logger = logging.getLogger(__name__)

MOST_PASSAGES = 2_000
"""A longer text is refused: it would take days on a CPU, and one memory does not hold it."""
# The work of one lesson, its writing and all its passes, in tokens of a forward pass.
LESSON_TOKENS = 280
# Few lessons are learned more often. All studies take the time of so many more.
FURTHER_LESSONS = 60
# The window, in tokens, where none is given.
WINDOW = 512
# How many dropped replies are shown.
SAMPLES = 3
_PLAIN_STATE = ("asked", "kept", "samples", "_blocks", "_seconds")


@dataclass(frozen=True)
class StudyStep:
    """A block of passages about which exchanges were written, or an optimizer step.

    Attributes:
        phase: "write" or "learn".
        done: passages so far. Or steps so far, and those that are not needed since their lessons
            are known.
        total: passages; or steps where each lesson is learned in each pass.
        exchanges: exchanges so far.
        loss_nats: of a step, KL(teacher || student) a token of the answers; None for a block.
        written: the exchanges of a block.
    """

    phase: str
    done: int
    total: int
    exchanges: int
    loss_nats: float | None = None
    written: tuple[Exchange, ...] = ()


class SelfStudy:
    """Train the active adapter to answer questions about a text without the text.

    The base, with a short passage in its context, writes questions about it. The memory learns to
    answer each with the passage, from the question alone (see `lessons`). The parameters that
    require gradients are changed in place; the base is not. `state_dict` and the adapter's weights
    are all that a continuation needs.

    What is known is not learned again (see `Schedule`). The study ends when all lessons are known
    in each wording.

    Args:
        model, tokenizer: a causal LM with a PEFT adapter in its layers, and its tokenizer.
        input_ids: LongTensor [N], the text.
        settings: those of the study itself. A fresh memory of `init` "topk" without `max_slot_norm`
            gets the rows of `place_discriminants` where `can_tell_apart`, and loses its norm clip.
            exchanges: questions that the model writes about each passage, at most; None for
                `PER_PASSAGE`.
            passes: the most times that each exchange is learned. None stands for
                `distillation.PASSES`, and `distillation.LEAST_STEPS` steps of few exchanges. For n
                times as many the learning rate is divided by the square root of n.
            learning_rate: of AdamW. It falls linearly to 0 with the share of the lessons of all
                passes that are left.
            window: in tokens; None for `WINDOW`.
            seed: of the questions and of the order of learning.
            anchor: weight at the end of the KL from the former memory, or from the base, on its
                answers to other questions and on text that it writes after words of the passages
                and of the text that the former memory keeps. It grows from 0 as the rate falls. 0
                or None for none.
        given: the exchanges that are learned, in place of written ones.
        former: the memory that the study goes on with; None for a fresh one. Its exchanges are
            learned again as far as they are lost. One whose question a new exchange asks in the
            same words leaves: the new answer corrects it.
        load_writer: returns another causal LM and its tokenizer, which write the questions in place
            of the base. It is called where questions are left to write.
        compiled: whether the passes over lessons go through `torch.compile`. The figures are the
            same to rounding. Where the model does not allow it, one line is logged.

    Attributes:
        exchanges: those so far.
        asked: how many questions were asked.
        kept: how many exchanges are of this text; `exchanges` has the earlier ones too at the end.
        samples: replies that were dropped, at most `SAMPLES`.

    Raises:
        ValueError: for a text shorter than a passage or of more than `MOST_PASSAGES`, a window
            without room for one, a given exchange longer than the model's positions, settings
            without a learning rate, and a memory whose slots are still to be written.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        input_ids: Tensor,
        settings: StudySettings,
        *,
        given: Sequence[Exchange] | None = None,
        former: Former | None = None,
        load_writer: Callable[[], tuple[nn.Module, Any]] | None = None,
        compiled: bool = False,
    ):
        if settings.learning_rate is None:
            remedy = "give one, 1e-3 say, or complete the settings"
            raise invalid("learning_rate", "be given for a study", None, remedy)
        unwritten = unwritten_memories(model)
        if unwritten:
            field = f"init of the memory {unwritten[0]!r}"
            remedy = "leave it out, or read the text"
            raise invalid(field, "make rows for a study", "'write'", remedy)
        window = settings.window or WINDOW
        self._model = model
        self._tokenizer = tokenizer
        self._settings = settings
        self._host = CausalLM(model)
        self._text = input_ids[:window].to(self._host.device)
        self._former = former
        self._per_passage = settings.exchanges or PER_PASSAGE
        has_usual_rows = settings.init == "topk" and settings.max_slot_norm is None
        self._discriminants = former is None and has_usual_rows
        self._load_writer = load_writer
        self._is_compiled = compiled
        self.exchanges = list(given or ())
        # Made when all exchanges are written.
        self._distillation: Distillation | None = None
        self._given: str | None = None
        self._passages: list[Passage] = []
        if given is None:
            check_window(self._host, window)
            _warn_of_unknown(tokenizer, input_ids)
            # Without the rest of a character that `max_tokens` cut.
            text = tokenizer.decode(input_ids, skip_special_tokens=True).rstrip("\ufffd")
            self._passages = split_passages(tokenizer, text)
            _check_passages(len(self._passages))
        else:
            self._given = digest_exchanges(self.exchanges)
            self._check_lengths()
        self.asked = len(self.exchanges)
        self.kept = len(self.exchanges)
        self.samples: list[str] = []
        self._blocks = 0
        self._seconds = {"write": 0.0, "learn": 0.0}

    def _check_lengths(self) -> None:
        for number, exchange in enumerate(self.exchanges, 1):
            question = f"{exchange.subject}: {exchange.question}"
            prompts = [encode_question(self._tokenizer, question, form) for form in FORMS]
            length = max(map(len, prompts)) + len(make_lesson(exchange, self._tokenizer).answer)
            if length > (self._host.positions or length):
                rule = f"exchange {number} must fit the model's {self._host.positions} positions"
                raise ValueError(f"{rule}, got {length} tokens: shorten its question or answer")

    @property
    def figures(self) -> dict[str, Any]:
        """What was asked and learned, seconds, and the KL of the first and last pass, as JSON."""
        learned = self._distillation
        return {
            "passages": len(self._passages),
            "asked": self.asked,
            "kept": self.kept,
            "given": self._given is not None,
            "steps": learned.steps if learned else 0,
            "skipped_steps": learned.skipped_steps if learned else 0,
            "kl_nats": learned.mean_losses if learned else [],
            "samples": self.samples,
            "writing_seconds": self._seconds["write"],
            "learning_seconds": self._seconds["learn"],
            "exchanges_sha256": self._given or digest_exchanges(self.exchanges),
        }

    def run(self) -> Iterator[StudyStep]:
        """Write what is left to write, then learn what is left to learn.

        The caller may stop at any step. Exchanges are written block by block, `BLOCK` passages
        each. Without any usable exchange nothing is learned; `samples` then has some of those that
        were dropped.
        """
        calibrate_empty(self._model, self._text[None])
        if not self._blocks and self._distillation is None:
            self._announce()
        yield from self._write()
        if self.kept:
            yield from self._learn()

    @torch.no_grad()
    def _announce(self) -> None:
        """Log about how long the study takes, by the time of a forward pass over the text."""
        text = self._text[None]
        began = time.perf_counter()
        # On a GPU, reading a logit waits for the pass.
        self._host.logits(text, 1, use_cache=False)[0, 0, 0].item()
        seconds = (time.perf_counter() - began) / text.shape[1]
        lessons = self.kept or len(self._passages) * self._per_passage
        work = (lessons + FURTHER_LESSONS) * LESSON_TOKENS
        minutes = math.ceil(work * seconds / 60)
        _logger.info("studies about %d exchanges; this takes about %d min", lessons, minutes)

    def _write(self) -> Iterator[StudyStep]:
        total = len(self._passages)
        if BLOCK * self._blocks >= total:
            return
        model = self._model
        tokenizer = self._tokenizer
        if self._load_writer is not None:
            model, tokenizer = self._load_writer()
        blocks = write_exchanges(
            model,
            tokenizer,
            self._passages,
            self._per_passage,
            seed=self._settings.seed,
            first=self._blocks,
        )
        while BLOCK * self._blocks < total:
            began = time.perf_counter()
            block = next(blocks)
            self._blocks += 1
            self.asked += block.asked
            self.exchanges += block.exchanges
            self.kept += len(block.exchanges)
            self.samples = [*self.samples, *block.dropped][:SAMPLES]
            self._seconds["write"] += time.perf_counter() - began
            done = min(BLOCK * self._blocks, total)
            written = tuple(block.exchanges)
            yield StudyStep("write", done, total, len(self.exchanges), written=written)

    def _learn(self) -> Iterator[StudyStep]:
        """Learn the exchanges until all are known, or have had all their passes."""
        began = time.perf_counter()
        distillation = self._distillation or self._plan()
        distillation.begin()
        while not distillation.is_done:
            loss = distillation.step()
            self._seconds["learn"] += time.perf_counter() - began
            yield StudyStep("learn", *distillation.step_counts, len(self.exchanges), loss)
            began = time.perf_counter()

    def _plan(self) -> Distillation:
        """Return the distillation of all exchanges, of this text and earlier ones."""
        earlier = () if self._former is None else self._former.exchanges
        self.exchanges = correct(earlier, self.exchanges)
        passages = len({exchange.answer for exchange in self.exchanges})
        tells_apart = self._discriminants and can_tell_apart(self._model, passages)
        if tells_apart:
            lift_norm_clip(self._model)
        self._distillation = Distillation(
            self._model,
            self._tokenizer,
            self.exchanges,
            self._settings,
            tells_apart=tells_apart,
            former=self._former,
            compiled=self._is_compiled,
        )
        return self._distillation

    def state_dict(self) -> dict[str, Any]:
        """Return the study's state, tensors and plain values, without the adapter's weights."""
        plain = {name: copy.copy(getattr(self, name)) for name in _PLAIN_STATE}
        learned = self._distillation
        return {
            **plain,
            "given": self._given,
            "exchanges": [asdict(exchange) for exchange in self.exchanges],
            "distillation": learned.state_dict() if learned else None,
        }

    def find_difference(self, state: dict[str, Any]) -> str | None:
        """Return the message for a state that was begun with other given exchanges, or None."""
        if state["given"] == self._given:
            return None
        rule = "exchanges must be those that the checkpoint was begun with, got others"
        return f"{rule}: give the former file, or start afresh with --overwrite"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, after the adapter's weights were restored.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: for a state that does not fit.
        """
        self.exchanges = [Exchange(**fields) for fields in state["exchanges"]]
        for name in _PLAIN_STATE:
            setattr(self, name, copy.copy(state[name]))
        self._distillation = None
        if state["distillation"] is not None:
            self._plan().load_state_dict(state["distillation"])


def _warn_of_unknown(tokenizer: Any, input_ids: Tensor) -> None:
    """Log how many tokens of a text the tokenizer does not know: passages lack these words."""
    if tokenizer.unk_token_id in (None, tokenizer.bos_token_id, tokenizer.eos_token_id):
        return
    unknown = int((input_ids == tokenizer.unk_token_id).sum())
    if unknown:
        _logger.warning(
            "the tokenizer does not know %d tokens of the text: what is learned lacks them",
            unknown,
        )


def _check_passages(passages: int) -> None:
    """Raise a `ValueError` for more passages than a study can take."""
    if passages > MOST_PASSAGES:
        rule = f"text must have at most {MOST_PASSAGES:,} passages to be studied"
        remedy = "study a part of it with max_tokens, or make a memory for each part"
        raise ValueError(f"{rule}, got {passages:,}: {remedy}")
