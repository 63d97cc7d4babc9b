"""Self-study of a text: write exchanges, then learn their answers without the passages.

Axes: T tokens of an answer, K candidates for a token, V vocabulary.
"""

import copy
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from os.path import commonprefix
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from locas_settings import StudySettings

from ..asking import begin_rows, current_day, encode_question, pad_left
from ..checks import invalid
from ..model import CausalLM, candidate_divergences, compute_once
from ..slots.discriminants import can_tell_apart, place_discriminants, upper_layers_trained
from ..text import Passage, split_passages
from ..ttt import Anchor, OwnText
from ..ttt.active import calibrate_empty
from ..ttt.learner import Learner
from ..tuner import evaluating, trained_parameters
from .exchanges import Exchange, correct, digest_exchanges
from .lessons import FORMS, Lesson, make_lesson, write_replay_lessons
from .schedule import Schedule
from .writing import BLOCK, check_window, write_exchanges

__all__ = ["PER_PASSAGE", "SelfStudy", "StudyStep"]

_logger = logging.getLogger(__name__)

MOST_PASSAGES = 2_000
"""A longer text is refused: it would take days on a CPU, and one memory does not hold it."""
# The work of one lesson, its writing and all its passes, in tokens of a forward pass.
LESSON_TOKENS = 700
# The lessons of an optimizer step.
BATCH = 8
# The window, in tokens, where none is given.
WINDOW = 512
PER_PASSAGE = 6
"""Questions about a passage where rows tell the passages apart; elsewhere twice as many."""
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
# The texts of the base that discriminants are computed from.
OWN_TEXTS = 4
# Of AdamW's squared gradients: a study has about a hundred steps, and their gradients fall.
BETA = 0.98
# Where the model is compiled, lengths are multiples of it: one graph serves many batches.
BUCKET = 64
WARMUP_STEPS = 5
# How many dropped replies are shown.
SAMPLES = 3
_PLAIN_STATE = (
    "asked",
    "kept",
    "samples",
    "skipped_steps",
    "_blocks",
    "_step",
    "_losses",
    "_seconds",
)


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
        settings: those of the study itself are used, and not those of the adapter:
            exchanges: questions wanted about each passage; None for `PER_PASSAGE`.
            passes: the most times that each exchange is learned. None stands for `PASSES`, and
                `LEAST_STEPS` steps of few exchanges. For n times as many the learning rate is
                divided by the square root of n.
            learning_rate: of AdamW. It falls linearly to 0 with the share of the lessons of all
                passes that are left.
            window: in tokens; None for `WINDOW`.
            seed: of the questions and of the order of learning.
            anchor: weight at the end of the KL from the base, on its answers to other questions and
                on its own text. It grows from 0 as the rate falls. 0 or None for none.
        given: the exchanges that are learned, in place of written ones.
        earlier: those that the memory has learned before. They are learned again as far as they are
            lost. One whose question a new exchange asks in the same words leaves: the new answer
            corrects it.
        discriminants: whether the upper layers of a LOCAS memory, which has no norm clip, begin
            with rows of `place_discriminants` where `can_tell_apart`. They alone are then trained.
            Elsewhere questions and least steps are doubled.
        load_writer: returns another causal LM and its tokenizer, which write the questions in place
            of the base. It is called where questions are left to write.
        compiled: whether the passes over lessons go through `torch.compile`. The figures are the
            same to rounding. Where the model does not allow it, one line is logged.

    Attributes:
        exchanges: those so far.
        asked: how many questions were asked.
        kept: how many exchanges are of this text; `exchanges` has the earlier ones too at the end.
        samples: replies that were dropped, at most `SAMPLES`.
        skipped_steps: steps that were not taken, for a loss or gradient that is not finite.

    Raises:
        ValueError: for a text shorter than a passage or of more than `MOST_PASSAGES`, a window
            without room for one, a given exchange longer than the model's positions, and settings
            without a learning rate.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        input_ids: Tensor,
        settings: StudySettings,
        *,
        given: Sequence[Exchange] | None = None,
        earlier: Sequence[Exchange] = (),
        discriminants: bool = False,
        load_writer: Callable[[], tuple[nn.Module, Any]] | None = None,
        compiled: bool = False,
    ):
        if settings.learning_rate is None:
            remedy = "give one, 1e-3 say, or complete the settings"
            raise invalid("learning_rate", "be given for a study", None, remedy)
        window = settings.window or WINDOW
        seed = settings.seed
        self._model = model
        self._tokenizer = tokenizer
        self._host = CausalLM(model)
        self._text = input_ids[:window].to(self._host.device)
        self._per_passage = settings.exchanges
        self._passes = settings.passes
        self._seed = seed
        self._discriminants = discriminants
        self._load_writer = load_writer
        self._is_compiled = compiled
        self._anchor_weight = settings.anchor or 0.0
        self._anchor: Anchor | None = None
        if self._anchor_weight:
            own_text = OwnText(model, texts=16, seed=seed, batch_size=16)
            self._anchor = Anchor(own_text, every=1)
        # The base's answers to other questions, written at their first use.
        self._others: list[Example] = []
        self._learner = Learner(
            lambda: trained_parameters(model), settings.learning_rate, WARMUP_STEPS, beta=BETA
        )
        self.exchanges = list(given or ())
        self._earlier = list(earlier)
        # Made of the exchanges when all are written.
        self._lessons: list[Lesson] = []
        self._schedule = Schedule([], wordings=len(FORMS), passes=0, batch=BATCH, seed=seed)
        # A factor of the learning rate.
        self._rate = 1.0
        self._given: str | None = None
        self._passages: list[Passage] = []
        if given is None:
            check_window(self._host, window)
            text = tokenizer.decode(input_ids, skip_special_tokens=True)
            self._passages = split_passages(tokenizer, text)
            _check_passages(len(self._passages))
        else:
            self._given = digest_exchanges(self.exchanges)
            self._check_lengths()
        self.asked = len(self.exchanges)
        self.kept = len(self.exchanges)
        self.samples: list[str] = []
        self.skipped_steps = 0
        self._blocks = 0
        self._step = 0
        self._losses: list[float] = []
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
        batches = max(1, math.ceil(len(self._lessons) / BATCH))
        means = []
        if self._losses:
            for losses in (self._losses[:batches], self._losses[-batches:]):
                means.append(sum(losses) / len(losses))
        return {
            "passages": len(self._passages),
            "asked": self.asked,
            "kept": self.kept,
            "given": self._given is not None,
            "steps": self._step,
            "skipped_steps": self.skipped_steps,
            "kl_nats": means,
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
        if not self._blocks and not self._step:
            self._announce()
        yield from self._write()
        if not self.kept:
            return
        if not self._step:
            self._plan()
        yield from self._learn_all()

    @torch.no_grad()
    def _announce(self) -> None:
        """Log about how long the study takes, by the time of a forward pass over the text."""
        text = self._text[None]
        began = time.perf_counter()
        # On a GPU, reading a logit waits for the pass.
        self._host.logits(text, 1, use_cache=False)[0, 0, 0].item()
        seconds = (time.perf_counter() - began) / text.shape[1]
        lessons = self.kept or len(self._passages) * self._count_questions()
        minutes = math.ceil(lessons * LESSON_TOKENS * seconds / 60)
        _logger.info("studies about %d exchanges; this takes about %d min", lessons, minutes)

    def _count_questions(self) -> int:
        """Return how many questions are wanted about each passage."""
        if self._per_passage is not None:
            return self._per_passage
        return PER_PASSAGE if self._tells_apart(len(self._passages)) else 2 * PER_PASSAGE

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
            self._count_questions(),
            seed=self._seed,
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

    def _plan(self) -> None:
        """Make the lessons of all exchanges, and the schedule of their learning."""
        self.exchanges = correct(self._earlier, self.exchanges)
        self._lessons = [make_lesson(exchange, self._tokenizer) for exchange in self.exchanges]
        apart = self._tells_apart(self._count_answers())
        least_steps = LEAST_STEPS if apart else 2 * LEAST_STEPS
        usual = max(PASSES, math.ceil(least_steps * BATCH / max(len(self._lessons), 1)))
        passes = usual if self._passes is None else self._passes
        self._rate = min(1.0, (usual / passes) ** 0.5)
        answers = [exchange.answer for exchange in self.exchanges]
        self._schedule = Schedule(
            answers, wordings=len(FORMS), passes=passes, batch=BATCH, seed=self._seed
        )

    def _learn_all(self) -> Iterator[StudyStep]:
        """Learn the lessons until all are known, or have had all their passes."""
        if self._is_compiled:
            self._host.compile()
        apart = self._tells_apart(self._count_answers())
        if apart and not self._step:
            self._place_discriminants()
        total = self._schedule.total
        done = self._schedule.count_done()
        while done < total:
            began = time.perf_counter()
            with evaluating(self._model), upper_layers_trained(self._model, apart):
                loss = self._learn(done / total)
            self._losses.append(loss)
            self._step += 1
            self._seconds["learn"] += time.perf_counter() - began
            done = self._schedule.count_done()
            steps = math.ceil(done / BATCH)
            all_steps = math.ceil(total / BATCH)
            yield StudyStep("learn", steps, all_steps, len(self.exchanges), loss)

    def _count_answers(self) -> int:
        return len({exchange.answer for exchange in self.exchanges})

    def _tells_apart(self, passages: int) -> bool:
        return self._discriminants and can_tell_apart(self._model, passages)

    def _place_discriminants(self) -> None:
        """Give the memory rows that tell the lessons' answers apart, at ends and inside answers.

        They are at the ends of prompts, and inside the answers. The base's answers to other
        questions, and its own text, are of no passage.
        """
        began = time.perf_counter()
        examples, passages = self._draw_examples()
        prompts = [example.prompt for example in examples]
        ends = [1] * len(prompts)
        place_discriminants(self._model, prompts, ends, passages, inside=False)
        spans = self._list_spans(examples, passages)
        if spans:
            rows, counts, owners = zip(*spans, strict=True)
            place_discriminants(self._model, rows, counts, owners, inside=True)
        self._seconds["learn"] += time.perf_counter() - began

    def _draw_examples(self) -> tuple[list[Example], list[int]]:
        """Return lessons drawn at random and the others, and the number of each one's passage."""
        numbers: dict[str, int] = {}
        for exchange in self.exchanges:
            numbers.setdefault(exchange.answer, len(numbers))
        count = len(self.exchanges)
        drawn = random.Random(self._seed).sample(range(count), min(count, PROMPTS))
        examples = [self._encode(index) for index in drawn]
        passages = [numbers[self.exchanges[index].answer] for index in drawn]
        others = self._list_others()
        return examples + others, passages + [-1] * len(others)

    def _list_spans(
        self, examples: Sequence[Example], passages: Sequence[int]
    ) -> list[tuple[list[int], int, int]]:
        """Return the answers of examples, and the base's own texts.

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
        """Take the next step; return its KL, in nats a token of the lessons.

        The weight of the pull grows with the share of the study that is done: first the memory
        learns its own answers, then their effect on others is undone.
        """
        chosen = self._choose()
        examples = list(chosen.values())
        pull, remainder = divmod(self._step, PULL_EVERY)
        weight = 0.0 if remainder else done * self._anchor_weight * PULL_EVERY
        self._learner.begin()
        others = self._choose_others(pull) if weight else []
        all_losses = self._distill(examples + others)
        losses = all_losses[: len(examples)]
        loss = torch.cat(losses).mean()
        objective = loss
        if weight and self._anchor is not None:
            text = self._anchor.text_of(pull)
            others_loss = torch.cat(all_losses[len(examples) :]).mean()
            objective = loss + weight * (others_loss + self._anchor.loss(self._host, text))
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
        """Return the other questions, with the base's answers; none without an anchor."""
        if self._anchor is None or self._others:
            return self._others
        arguments = self._tokenizer, self._seed, current_day()
        lessons = compute_once(self._model, write_replay_lessons, *arguments)
        for lesson in lessons:
            prompt = encode_question(self._tokenizer, *lesson.word(0))
            self._others.append(Example(prompt, lesson, lesson.answer))
        return self._others

    def _choose_others(self, pull: int) -> list[Example]:
        """Return the other questions whose answers a pull brings back to the base's, in turns."""
        others = self._list_others()
        first = pull * BATCH
        return [others[number % len(others)] for number in range(first, first + BATCH)]

    def _distill(self, examples: Sequence[Example]) -> list[Tensor]:
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
            answer_logits = row_logits[-len(example.answer) :]
            losses.append(example.divergences(answer_logits))
        return losses

    def state_dict(self) -> dict[str, Any]:
        """Return the study's state, tensors and plain values, without the adapter's weights."""
        plain = {name: copy.copy(getattr(self, name)) for name in _PLAIN_STATE}
        return {
            **plain,
            "given": self._given,
            "learner": self._learner.state_dict(),
            "schedule": self._schedule.state_dict(),
            "exchanges": [asdict(exchange) for exchange in self.exchanges],
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
        if self._step:
            self._plan()
            self._schedule.load_state_dict(state["schedule"])
        apart = self._tells_apart(self._count_answers())
        with upper_layers_trained(self._model, apart):
            self._learner.load_state_dict(state["learner"])


def _round_up(length: int) -> int:
    return BUCKET * math.ceil(length / BUCKET)


def _check_passages(passages: int) -> None:
    """Raise a `ValueError` for more passages than a study can take."""
    if passages > MOST_PASSAGES:
        rule = f"text must have at most {MOST_PASSAGES:,} passages to be studied"
        remedy = "study a part of it with max_tokens, or make a memory for each part"
        raise ValueError(f"{rule}, got {passages:,}: {remedy}")
