"""Distillation: the memory learns the answers of exchanges, each from its question alone.

Axes: T tokens of an answer, V vocabulary.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from locas_settings import StudySettings

from ..asking import begin_rows, current_day, encode_question, pad_left
from ..exchanges import Exchange
from ..model import CausalLM, candidate_divergences, compute_once
from ..slots.discriminants import place_discriminants, upper_layers_trained
from ..text import encode_text, find_start_token
from ..ttt import Anchor, OwnText
from ..ttt.learner import Learner
from ..tuner import evaluating, trained_parameters
from .lessons import FORMS, Lesson, make_lesson, write_replay_lessons
from .schedule import Schedule

__all__ = ["BATCH", "Distillation", "Former"]

BATCH = 8
"""The lessons of an optimizer step."""
# How often a lesson is learned at most, where no number is given.
PASSES = 4
# Few lessons are learned for so many steps; twice as many where no rows tell passages apart.
LEAST_STEPS = 50
# Every n-th step also limits the change of other answers and texts, with n times the weight.
PULL_EVERY = 4
# The most prompts that discriminants are computed from.
PROMPTS = 2048
# The most answers with one passage that discriminants are computed from.
ANSWERS = 4
# The reference's own texts, which pulls use in turns, and that discriminants are computed from.
OWN_TEXTS = 16
# The most tokens of an answer that such a text begins with. A fresh memory that keeps more of them
# as they are, without a question, forgets its answers.
BEGINNING = 2
# The same of a memory that goes on, and of the text that it keeps.
FORMER_BEGINNING = 64
# Of AdamW's squared gradients: a study has about a hundred steps, and their gradients fall.
BETA = 0.98
# Where the model is compiled, lengths are multiples of it: one graph serves many batches.
BUCKET = 64
WARMUP_STEPS = 5


@dataclass(frozen=True)
class Former:
    """A memory that a study goes on with, as it was before.

    Attributes:
        adapter: the name of its frozen copy in the model.
        exchanges: those that it has learned.
        text: the text in its folder; "" for none.
    """

    adapter: str
    exchanges: tuple[Exchange, ...] = ()
    text: str = ""


class Example(NamedTuple):
    """A lesson in one of its wordings: a prompt's token ids, and the answer's first tokens [T]."""

    prompt: list[int]
    lesson: Lesson
    answer: Tensor

    def list_inputs(self) -> list[int]:
        """Return the token ids that are fed: all but the last one."""
        return [*self.prompt, *self.answer.tolist()][:-1]

    def divergences(self, logits: Tensor) -> Tensor:
        """Return KL(teacher || student) at each token of the answer, [T], for logits [T, V]."""
        count = len(self.answer)
        candidates = self.lesson.candidates[:count]
        return candidate_divergences(logits, candidates, self.lesson.targets[:count])


class Distillation:
    """Train the active adapter to give the answers of exchanges, each after its question alone.

    The parameters that require gradients are changed in place; the base is not. What is known is
    not learned again (see `Schedule`): the distillation ends when all lessons are known in each
    wording, or have had all their passes.

    Args:
        model, tokenizer: a causal LM with a PEFT adapter in its layers, and its tokenizer.
        exchanges: those that are learned.
        settings: `passes`, `learning_rate`, `seed` and `anchor` are used (see `SelfStudy`).
        tells_apart: whether the upper layers begin with rows of `place_discriminants`, and are
            trained alone.
        former: the memory whose answers to other questions, and whose running text, the trained one
            keeps; None for the base's.
        compiled: whether the passes over lessons go through `torch.compile`.

    Attributes:
        steps: optimizer steps so far.
        skipped_steps: those that were not taken, for a loss or gradient that is not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        exchanges: Sequence[Exchange],
        settings: StudySettings,
        *,
        tells_apart: bool = False,
        former: Former | None = None,
        compiled: bool = False,
    ):
        self._model = model
        self._tokenizer = tokenizer
        self._host = CausalLM(model)
        self._seed = settings.seed
        self._tells_apart = tells_apart
        self._former = former
        self._reference = None if former is None else former.adapter
        self._is_compiled = compiled
        self._lessons = [make_lesson(exchange, tokenizer) for exchange in exchanges]
        least_steps = LEAST_STEPS if tells_apart else 2 * LEAST_STEPS
        usual = max(PASSES, math.ceil(least_steps * BATCH / max(len(exchanges), 1)))
        passes = usual if settings.passes is None else settings.passes
        # A factor of the learning rate.
        self._rate = min(1.0, (usual / passes) ** 0.5)
        # The passage of each lesson.
        self._answers = [exchange.answer for exchange in exchanges]
        self._schedule = Schedule(
            self._answers, wordings=len(FORMS), passes=passes, batch=BATCH, seed=settings.seed
        )
        self._learner = Learner(
            lambda: trained_parameters(model), settings.learning_rate, WARMUP_STEPS, beta=BETA
        )
        self._anchor_weight = settings.anchor or 0.0
        self._anchor: Anchor | None = None
        # How many own texts a pull uses.
        self._texts_at_once = 1 if former is None else 2
        if self._anchor_weight:
            own_text = OwnText(
                model,
                texts=OWN_TEXTS,
                seed=settings.seed,
                first=OWN_TEXTS,
                beginnings=self._draw_beginnings(),
                reference=self._reference,
            )
            self._anchor = Anchor(own_text, every=1)
        # The reference's answers to other questions, written at their first use.
        self._others: list[Example] = []
        self.steps = 0
        self.skipped_steps = 0
        self._losses: list[float] = []

    @property
    def step_counts(self) -> tuple[int, int]:
        """How many steps are done or not needed, and how many all passes have."""
        total = math.ceil(self._schedule.total / BATCH)
        if self.is_done:
            return total, total
        # Rounded down: a step before the last one is not shown as the end.
        return self._schedule.count_done() // BATCH, total

    @property
    def is_done(self) -> bool:
        """Whether all lessons are known, or have had all their passes."""
        return self._measure_done() >= 1

    def _measure_done(self) -> float:
        """Return the share of the lessons of all passes that is learned, or not needed."""
        total = self._schedule.total
        return self._schedule.count_done() / total if total else 1.0

    @property
    def mean_losses(self) -> list[float]:
        """The mean KL of the first pass and of the last one, nats a token; empty before a step."""
        if not self._losses:
            return []
        batches = max(1, math.ceil(len(self._lessons) / BATCH))
        passes = (self._losses[:batches], self._losses[-batches:])
        return [sum(losses) / len(losses) for losses in passes]

    def _draw_beginnings(self) -> list[list[int]]:
        """Return the first token ids of the own texts: those of a place in an answer.

        The texts are then of the answers' language, kind and subject, where the memory would change
        the reference's output most. Every second text of a memory that goes on begins with a part
        of the text that it keeps.
        """
        most = BEGINNING
        kept: list[int] = []
        if self._former is not None:
            most = FORMER_BEGINNING
            kept = encode_text(self._tokenizer, self._former.text)
        generator = random.Random(self._seed)
        start = find_start_token(self._tokenizer)
        beginnings = []
        for number in range(OWN_TEXTS):
            ids = kept
            if not kept or number % 2 == 0:
                ids = encode_text(self._tokenizer, generator.choice(self._answers))
            place = generator.randrange(max(1, len(ids) - most + 1))
            beginning = ids[place : place + most]
            beginnings.append(beginning if start is None else [start, *beginning])
        return beginnings

    def begin(self) -> None:
        """Prepare for the steps that are left."""
        if self._is_compiled:
            self._host.compile()
        if self._tells_apart and not self.steps:
            self._place_discriminants()

    def step(self) -> float:
        """Take the next step; return its KL, in nats a token of the lessons."""
        with evaluating(self._model), upper_layers_trained(self._model, self._tells_apart):
            loss = self._learn(self._measure_done())
        self._losses.append(loss)
        self.steps += 1
        return loss

    def _place_discriminants(self) -> None:
        """Give the memory rows that tell the lessons' answers apart.

        Half of them act at the ends of prompts, half inside the answers. The reference's answers to
        other questions, and its own texts, are of no passage.
        """
        examples, passages = self._draw_examples()
        prompts = [example.prompt for example in examples]
        ends = [1] * len(prompts)
        place_discriminants(self._model, prompts, ends, passages, inside=False)
        spans = self._list_spans(examples, passages)
        if spans:
            rows, counts, owners = zip(*spans, strict=True)
            place_discriminants(self._model, rows, counts, owners, inside=True)

    def _draw_examples(self) -> tuple[list[Example], list[int]]:
        """Return lessons drawn at random and the others, and the number of each one's passage."""
        numbers = {answer: number for number, answer in enumerate(dict.fromkeys(self._answers))}
        count = len(self._answers)
        drawn = random.Random(self._seed).sample(range(count), min(count, PROMPTS))
        examples = [self._encode(index) for index in drawn]
        passages = [numbers[self._answers[index]] for index in drawn]
        others = self._list_others()
        return examples + others, passages + [-1] * len(others)

    def _list_spans(
        self, examples: Sequence[Example], passages: Sequence[int]
    ) -> list[tuple[list[int], int, int]]:
        """Return the answers of examples, and the reference's own texts.

        Each is token ids, how many of the last ones are of a passage, and the passage's number.
        """
        spans = []
        answers = Counter[int]()
        for example, passage in zip(examples, passages, strict=True):
            answers[passage] += 1
            count = len(example.answer) - 1
            if count and (passage < 0 or answers[passage] <= ANSWERS):
                spans.append((example.list_inputs(), count, passage))
        if self._anchor is not None:
            for number in range(OWN_TEXTS):
                text = self._anchor.texts[number].tolist()
                spans.append((text, len(text) - 1, -1))
        return spans

    def _learn(self, done: float) -> float:
        """Learn the next lessons; return the KL of their answers, in nats a token.

        The weight of the pull grows with the share of the lessons that is done: first the memory
        learns its own answers, then their effect on others is undone.
        """
        chosen = self._choose()
        examples = list(chosen.values())
        pull, remainder = divmod(self.steps, PULL_EVERY)
        weight = 0.0 if remainder else done * self._anchor_weight * PULL_EVERY
        self._learner.begin()
        others = self._choose_others(pull) if weight else []
        all_losses = self._measure(examples + others)
        losses = all_losses[: len(examples)]
        loss = torch.cat(losses).mean()
        objective = loss
        if weight and self._anchor is not None:
            others_loss = torch.cat(all_losses[len(examples) :]).mean()
            objective = loss + weight * (others_loss + self._measure_texts(self._anchor, pull))
        objective.backward()
        # The rate falls to 0: at a constant one the batches of the last steps would count more than
        # the others.
        factor = self._rate * (1 - done)
        if not self._learner.finish(step=bool(loss.isfinite()), rate_factor=factor):
            self.skipped_steps += 1
        self._schedule.note(list(chosen), [example_losses.detach() for example_losses in losses])
        return loss.item()

    def _choose(self) -> dict[int, Example]:
        """Return the next lessons by their numbers."""
        examples = {}

        def measure(number: int) -> int:
            example = self._encode(number)
            examples[number] = example
            return len(example.prompt) + len(example.answer)

        return {number: examples[number] for number in self._schedule.choose(measure)}

    def _encode(self, number: int) -> Example:
        """Return a lesson in its next wording."""
        lesson = self._lessons[number]
        prompt = encode_question(self._tokenizer, *lesson.word(self._schedule.turn_of(number)))
        return Example(prompt, lesson, lesson.answer[: self._schedule.reach_of(number)])

    def _list_others(self) -> list[Example]:
        """Return the other questions, with the reference's answers; none without an anchor."""
        if self._anchor is None or self._others:
            return self._others
        arguments = self._tokenizer, self._seed, current_day()
        lessons = compute_once(
            self._model,
            write_replay_lessons,
            *arguments,
            reference=self._reference,
            state=str(self._tokenizer.chat_template),
        )
        for lesson in lessons:
            prompt = encode_question(self._tokenizer, *lesson.word(0))
            self._others.append(Example(prompt, lesson, lesson.answer))
        return self._others

    def _choose_others(self, pull: int) -> list[Example]:
        """Return the other questions of a pull, in turns."""
        others = self._list_others()
        first = pull * BATCH
        return [others[number % len(others)] for number in range(first, first + BATCH)]

    def _measure_texts(self, anchor: Anchor, pull: int) -> Tensor:
        """Return KL(reference || student) on the own texts of a pull, the mean over tokens."""
        first = self._texts_at_once * pull
        losses = []
        for number in range(first, first + self._texts_at_once):
            losses.append(anchor.loss(self._host, number % OWN_TEXTS))
        return torch.stack(losses).mean()

    def _measure(self, examples: Sequence[Example]) -> list[Tensor]:
        """Return KL(teacher || student) at each token of some answers, [T] of each example."""
        rows = [example.list_inputs() for example in examples]
        count = max(len(example.answer) for example in examples)
        if self._host.is_compiled:
            # As many rows in each batch, and few lengths.
            rows += [rows[-1]] * (-len(rows) % BATCH)
            length = _round_up(max(map(len, rows)))
            inputs = pad_left(rows, self._host.device, length)
            count = _round_up(count)
        else:
            # Such as the system message of a chat template.
            shared = commonprefix([example.prompt[:-1] for example in examples])
            inputs = begin_rows(self._host, rows, [(len(shared), range(len(rows)))])
        logits = self._host.logits(count=count, **inputs)
        losses = []
        for example, row_logits in zip(examples, logits, strict=False):
            losses.append(example.divergences(row_logits[-len(example.answer) :]))
        return losses

    def state_dict(self) -> dict[str, Any]:
        """Return the state, tensors and plain values, without the adapter's weights."""
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "losses": list(self._losses),
            "learner": self._learner.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, after the adapter's weights were restored.

        A state that does not fit is a `ValueError`, `KeyError`, `TypeError` or `AttributeError`.
        """
        self.steps = int(state["steps"])
        self.skipped_steps = int(state["skipped_steps"])
        self._losses = list(state["losses"])
        self._schedule.load_state_dict(state["schedule"])
        with upper_layers_trained(self._model, self._tells_apart):
            self._learner.load_state_dict(state["learner"])


def _round_up(length: int) -> int:
    return BUCKET * math.ceil(length / BUCKET)
