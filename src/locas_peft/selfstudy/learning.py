"""Self-study of a text: write exchanges, then learn their answers without the passages, mixed with reading the text.

Axes: B lessons of a batch, T tokens of an answer, K candidates for a token, V vocabulary.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor, nn

from ..asking import begin_rows, encode_question
from ..model.causal_lm import CausalLM
from ..text import find_start_token
from ..ttt.learner import Learner
from ..ttt.loop import calibrate_empty
from ..ttt.losses import token_losses
from ..tuner import evaluating, trained_parameters
from .exchanges import Exchange, Passage, digest_exchanges, split_passages
from .lessons import FORMS, Lesson, make_lesson
from .replay import write_replay_lessons
from .writing import BLOCK, check_window, write_exchanges

__all__ = ["SelfStudy", "StudyStep"]

BATCH = 8
READ_EVERY = 8
"""Every n-th step also reads a piece of the text."""
READ_TOKENS = 512
PULL_EVERY = 4
"""Every n-th step also limits the change of other answers, with n times the weight."""
WARMUP_STEPS = 5
SAMPLES = 3


@dataclass(frozen=True)
class StudyStep:
    """A block of passages about which exchanges were written, or an optimizer step.

    Attributes:
        phase: "write" or "learn".
        done: passages or steps so far.
        total: passages or steps in all.
        exchanges: exchanges kept so far.
        loss_nats: of a step, KL(teacher || student) a token of the answers; None for a block.
        written: the exchanges that were kept of a block.
    """

    phase: str
    done: int
    total: int
    exchanges: int
    loss_nats: float | None = None
    written: tuple[Exchange, ...] = ()


class SelfStudy:
    """Train the active adapter to answer questions about a text without the text.

    The base, with a short passage in its context, writes questions about it. The memory learns to answer each with the
    passage, from the question alone (see `lessons`). The parameters that require gradients are changed in place; the
    base is not. Each step's batch and wording follow from its number and the seed, so that `state_dict` and the
    adapter's weights are all that a continuation needs.

    Args:
        model: a causal LM with a PEFT adapter in its layers.
        tokenizer: its tokenizer.
        input_ids: LongTensor [N], the text.
        per_passage: questions wanted about each passage.
        passes: how often each exchange is learned.
        learning_rate: of AdamW; it falls linearly to 0.
        window: the longest piece of the text that is read at once, in tokens.
        seed: of the questions and of the order of learning.
        anchor: weight of the KL from the base on its answers to other questions at the end; it grows linearly from 0.
            0 for none.
        given: the exchanges that are learned, in place of written ones.

    Raises:
        ValueError: the text is shorter than a passage, the window leaves no room for one, or a given exchange is
            longer than the model's positions.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer,
        input_ids: Tensor,
        *,
        per_passage: int,
        passes: int,
        learning_rate: float,
        window: int = 512,
        seed: int = 0,
        anchor: float = 0.0,
        given: Sequence[Exchange] | None = None,
    ):
        self._model, self._tokenizer, self._host = model, tokenizer, CausalLM(model)
        self._ids = input_ids.to(self._host.device)
        self._pieces = _split(self._ids, min(window, READ_TOKENS), find_start_token(tokenizer))
        self._per_passage, self._passes, self._seed, self._anchor = per_passage, passes, seed, anchor
        self._others: list[Lesson] = []  # written at the first pull
        self._learner = Learner(lambda: trained_parameters(model), learning_rate, WARMUP_STEPS)
        self.exchanges = list(given or ())
        self._lessons: list[Lesson] = []  # made of the exchanges when all are written
        self._given = None if given is None else digest_exchanges(self.exchanges)
        self._passages: list[Passage] = []
        self._check_lengths()
        if given is None:
            check_window(self._host, window)
            self._passages = split_passages(tokenizer, tokenizer.decode(input_ids, skip_special_tokens=True))
        self.asked = len(self.exchanges)
        self.samples: list[str] = []
        self.skipped_steps = 0
        self._blocks, self._step = 0, 0
        self._losses: list[float] = []
        self._seconds = {"write": 0.0, "learn": 0.0}

    def _check_lengths(self) -> None:
        for number, exchange in enumerate(self.exchanges, 1):
            question = f"{exchange.subject}: {exchange.question}"
            prompts = (encode_question(self._tokenizer, question, form) for form in FORMS)
            length = max(map(len, prompts)) + len(make_lesson(exchange, self._tokenizer).answer)
            if length > (self._host.positions or length):
                raise ValueError(
                    f"exchange {number} must fit the model's {self._host.positions} positions, got {length} tokens: "
                    "shorten its question or answer"
                )

    @property
    def figures(self) -> dict[str, Any]:
        """JSON values: what was asked, kept and learned; the KL of the first and the last pass; seconds."""
        batches = max(1, math.ceil(len(self._lessons) / BATCH))
        means = [sum(part) / len(part) for part in (self._losses[:batches], self._losses[-batches:]) if part]
        return {
            "passages": len(self._passages),
            "asked": self.asked,
            "kept": len(self.exchanges),
            "given": self._given is not None,
            "steps": self._step,
            "skipped_steps": self.skipped_steps,
            "kl_nats": means,
            "samples": self.samples,
            "writing_seconds": self._seconds["write"],
            "learning_seconds": self._seconds["learn"],
            "exchanges_sha256": digest_exchanges(self.exchanges),
        }

    def run(self) -> Iterator[StudyStep]:
        """Write what is left to write, then learn what is left to learn; the caller may stop at any step.

        Exchanges are written block by block, `BLOCK` passages each. Without any usable exchange nothing is learned;
        `samples` then has some of those that were dropped.
        """
        calibrate_empty(self._model, self._pieces[0][None])
        yield from self._write()
        self._lessons = [make_lesson(exchange, self._tokenizer) for exchange in self.exchanges]
        batches = math.ceil(len(self._lessons) / BATCH)
        while self._step < batches * self._passes:
            began = time.perf_counter()
            with evaluating(self._model):
                loss = self._learn(batches)
            self._losses.append(loss)
            self._step += 1
            self._seconds["learn"] += time.perf_counter() - began
            yield StudyStep("learn", self._step, batches * self._passes, len(self.exchanges), loss)

    def _write(self) -> Iterator[StudyStep]:
        options = {"seed": self._seed, "first": self._blocks}
        writing = write_exchanges(self._model, self._tokenizer, self._passages, self._per_passage, **options)
        while BLOCK * self._blocks < len(self._passages):
            began = time.perf_counter()
            written = next(writing)
            self._blocks += 1
            self.asked += written.asked
            self.exchanges += written.exchanges
            self.samples = [*self.samples, *written.dropped][:SAMPLES]
            self._seconds["write"] += time.perf_counter() - began
            done = min(BLOCK * self._blocks, len(self._passages))
            kept = tuple(written.exchanges)
            yield StudyStep("write", done, len(self._passages), len(self.exchanges), written=kept)

    def _learn(self, batches: int) -> float:
        """Take the next step; return its KL, in nats a token."""
        number, index = divmod(self._step, batches)
        order = list(range(len(self._lessons)))
        random.Random(f"{self._seed} {number}").shuffle(order)
        # A lesson's wordings begin at its own number, so that a batch has all of them.
        chosen = [(self._lessons[each], each + number) for each in order[index::batches]]
        self._learner.begin()
        loss = self._distill(chosen)
        loss.backward()
        if self._step % READ_EVERY == 0:
            piece = self._pieces[self._step // READ_EVERY % len(self._pieces)]
            token_losses(
                self._host.logits(piece[None, :-1], len(piece) - 1, use_cache=False)[0], piece[1:]
            ).mean().backward()
        done = self._step / (batches * self._passes)
        self._pull(done)
        # The rate falls to 0: at a constant one the batches of the last steps would count more than the others.
        if not self._learner.finish(step=bool(loss.isfinite()), rate_factor=1 - done):
            self.skipped_steps += 1
        return loss.item()

    def _distill(self, chosen: Sequence[tuple[Lesson, int]]) -> Tensor:
        """Return KL(teacher || student) of lessons, each in one of its wordings, the mean over the answers' tokens."""
        prompts = [encode_question(self._tokenizer, *lesson.word(number)) for lesson, number in chosen]
        lessons = [lesson for lesson, _ in chosen]
        rows = [[*prompt, *lesson.answer.tolist()] for prompt, lesson in zip(prompts, lessons, strict=True)]
        shared = commonprefix([prompt[:-1] for prompt in prompts])  # the system message of a chat template
        inputs = begin_rows(self._host, [row[:-1] for row in rows], [(len(shared), range(len(rows)))], 0)
        logits = self._host.logits(count=max(len(lesson.answer) for lesson in lessons), **inputs)
        of_each = zip(logits, lessons, strict=True)
        return torch.cat([_divergences(row[-len(lesson.answer) :], lesson) for row, lesson in of_each]).mean()

    def _pull(self, done: float) -> None:
        """Add the gradient of the KL from the base on its answers to other questions, where this step has one.

        The weight grows with the share of the study that is done: first the memory learns its own answers, then their
        effect on others is undone.
        """
        pull, remainder = divmod(self._step, PULL_EVERY)
        weight = done * self._anchor * PULL_EVERY
        if remainder or not weight:
            return
        self._others = self._others or write_replay_lessons(self._model, self._tokenizer, self._seed)
        chosen = [self._others[(pull * BATCH + row) % len(self._others)] for row in range(BATCH)]
        loss = self._distill([(lesson, 0) for lesson in chosen])
        (weight * loss).backward()

    # ------------------------------------------------------------------ the state

    def state_dict(self) -> dict[str, Any]:
        """Return the study's state, tensors and plain values; the adapter's weights are not part of it."""
        return {
            "given": self._given,
            "blocks": self._blocks,
            "asked": self.asked,
            "samples": list(self.samples),
            "skipped_steps": self.skipped_steps,
            "step": self._step,
            "losses": list(self._losses),
            "seconds": dict(self._seconds),
            "learner": self._learner.state_dict(),
            "others": [vars(lesson) for lesson in self._others],
            "exchanges": [asdict(exchange) for exchange in self.exchanges],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, after the adapter's weights were restored.

        Raises:
            ValueError: the study was begun with other given exchanges, or the state does not fit.
            KeyError, TypeError, AttributeError: the state does not fit.
        """
        if state["given"] != self._given:
            raise ValueError(
                "exchanges must be those that the checkpoint was begun with, got others: give the former file, or "
                "start afresh with --overwrite"
            )
        self.exchanges = [Exchange(**each) for each in state["exchanges"]]
        self._others = [Lesson(**{**each, "forms": tuple(each["forms"])}) for each in state["others"]]
        self._blocks, self._step, self.asked = state["blocks"], state["step"], state["asked"]
        self.samples, self._losses = list(state["samples"]), list(state["losses"])
        self.skipped_steps, self._seconds = state["skipped_steps"], dict(state["seconds"])
        self._learner.load_state_dict(state["learner"])


def _divergences(logits: Tensor, lesson: Lesson) -> Tensor:
    """Return KL(teacher || student) at each token of an answer, [T], from the student's logits [T, V].

    It is over the lesson's candidates and one more outcome, which stands for all other tokens. Over the candidates
    alone, the least KL would need a student that never says anything else.
    """
    logs = logits.float().log_softmax(-1).gather(1, lesson.candidates.to(logits.device))
    targets = lesson.targets.to(logs)
    others = torch.log1p(-logs.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    logs = torch.cat([logs, others], -1)
    targets = torch.cat([targets, (1 - targets.sum(-1, keepdim=True)).clamp(min=0)], -1)
    return (torch.xlogy(targets, targets) - targets * logs).sum(-1)


def _split(ids: Tensor, length: int, start_token: int | None) -> list[Tensor]:
    """Return the pieces of a text, LongTensor [T], each of at most `length` tokens with the start token before it."""
    if start_token is None:
        return [piece for piece in ids.split(length) if len(piece) > 1]
    text = ids[1:] if ids[0] == start_token else ids
    return [torch.cat([ids.new_tensor([start_token]), piece]) for piece in text.split(max(length - 1, 1))]
