"""Self-study of a text: write exchanges, then learn their answers without the passages, until they are known.

Axes: B lessons of a batch, T tokens of an answer, K candidates for a token, V vocabulary.
"""

import copy
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor, nn

from ..asking import begin_rows, encode_question, find_pad_token
from ..checks import check_whole
from ..model import CausalLM, compute_once
from ..ttt import Anchor, OwnText
from ..ttt.active import calibrate_empty
from ..ttt.learner import Learner
from ..tuner import evaluating, trained_parameters
from .discriminants import can_tell_apart, place_discriminants, upper_layers_trained
from .exchanges import Exchange, Passage, correct, digest_exchanges, split_passages
from .lessons import FORMS, Lesson, make_lesson, write_replay_lessons
from .writing import BLOCK, check_window, write_exchanges

__all__ = ["PER_PASSAGE", "SelfStudy", "StudyStep"]

BATCH = 8
PER_PASSAGE = 6  # questions about a passage where the memory's rows tell the passages apart; elsewhere twice as many
PASSES, LEAST_STEPS = 4, 50
"""How often a lesson is learned at most, where no number is given; few lessons are learned for so many steps.
Where rows do not tell the passages apart, it is twice as many steps."""
SORTED = 32  # a batch takes lessons of about one length from so many
PULL_EVERY = 4  # every n-th step also limits the change of other answers and of other text, with n times the weight
PROMPTS, ANSWERS, OWN_TEXTS = 2048, 4, 4
"""What discriminants are computed from: the most prompts, the most answers with one passage, the base's own texts."""
BETA = 0.98  # of AdamW's squared gradients: a study has about a hundred steps, and their gradients fall
WHOLE_EVERY = 5
"""Every n-th time, a lesson's passage is learned to its end: else what is left out would be forgotten unseen."""
MARGIN = 4  # tokens of a passage that are learned after the last one that is not known
KNOWN_NATS = math.log(2)
"""Greedy decoding recites a token of a smaller loss: its probability is above one half (arXiv:2605.30260)."""
WARMUP_STEPS, SAMPLES = 5, 3
_PLAIN_STATE = (
    "asked",
    "samples",
    "skipped_steps",
    "_blocks",
    "_step",
    "_losses",
    "_seconds",
    "_reaches",
)

Row = tuple[
    list[int], Lesson, Tensor
]  # a prompt's token ids, a lesson, the first tokens of its answer [T]


@dataclass(frozen=True)
class StudyStep:
    """A block of passages about which exchanges were written, or an optimizer step.

    Attributes:
        phase: "write" or "learn".
        done: passages so far; or steps so far, and those that are not needed since their lessons are known.
        total: passages; or steps where each lesson is learned in each pass.
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


@dataclass
class _Progress:
    """What is known of a lesson."""

    due: int = 0  # the pass in which it is learned next
    seen: int = 0  # how often it was learned
    known: int = (
        0  # how often it was known, each time in the next wording, since it was last found unknown
    )


class SelfStudy:
    """Train the active adapter to answer questions about a text without the text.

    The base, with a short passage in its context, writes questions about it. The memory learns to answer each with the
    passage, from the question alone (see `lessons`). The parameters that require gradients are changed in place; the
    base is not. `state_dict` and the adapter's weights are all that a continuation needs.

    What is known is not learned again (`_Progress`); the study ends when all lessons are known in each wording.

    Args:
        model, tokenizer: a causal LM with a PEFT adapter in its layers, and its tokenizer.
        input_ids: LongTensor [N], the text.
        per_passage: questions wanted about each passage; None for `PER_PASSAGE`.
        passes: the most times that each exchange is learned; None: `PASSES`, of few exchanges for `LEAST_STEPS` steps.
            For n times as many the learning rate is divided by the square root of n.
        learning_rate: of AdamW; it falls linearly to 0 with the share of the lessons of all passes that are left.
        window: of the reading, in tokens.
        seed: of the questions and of the order of learning.
        anchor: weight of the KL from the base on its answers to other questions and on its own text at the end; it
            grows from 0 as the rate falls. 0 for none.
        given: the exchanges that are learned, in place of written ones.
        earlier: those that the memory has learned before; they are learned again as far as they are lost. One whose
            question a new exchange asks in the same words leaves: the new answer corrects it.
        discriminants: where `can_tell_apart`, the upper layers of a LOCAS memory, which has no norm clip, begin with
            rows of `place_discriminants`, and they alone are trained. Elsewhere questions and least steps are doubled.

    A text shorter than a passage, a window without room for one, and a given exchange longer than the model's
    positions are a `ValueError`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer,
        input_ids: Tensor,
        *,
        per_passage: int | None,
        passes: int | None,
        learning_rate: float,
        window: int = 512,
        seed: int = 0,
        anchor: float = 0.0,
        given: Sequence[Exchange] | None = None,
        earlier: Sequence[Exchange] = (),
        discriminants: bool = False,
    ):
        if passes is not None:
            check_whole("passes", passes, 1)
        self._model, self._tokenizer, self._host = model, tokenizer, CausalLM(model)
        self._text = input_ids[:window].to(self._host.device)
        self._per_passage, self._passes, self._seed, self._anchor = (
            per_passage,
            passes,
            seed,
            anchor,
        )
        self._discriminants = discriminants
        self._others: list[Row] = []  # written at their first use
        self._free = (
            Anchor(OwnText(model, texts=16, seed=seed, batch_size=16), every=1) if anchor else None
        )
        self._learner = Learner(
            lambda: trained_parameters(model), learning_rate, WARMUP_STEPS, beta=BETA
        )
        self.exchanges, self._earlier = list(given or ()), list(earlier)
        self._lessons: list[Lesson] = []  # made of the exchanges when all are written
        self._progress: list[_Progress] = []
        self._reaches: dict[str, int] = {}  # by answer: how many of its tokens are learned next
        self._given = None if given is None else digest_exchanges(self.exchanges)
        self._passages: list[Passage] = []
        self._check_lengths()
        if given is None:
            check_window(self._host, window)
            self._passages = split_passages(
                tokenizer, tokenizer.decode(input_ids, skip_special_tokens=True)
            )
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
                rule = f"exchange {number} must fit the model's {self._host.positions} positions"
                raise ValueError(f"{rule}, got {length} tokens: shorten its question or answer")

    @property
    def figures(self) -> dict[str, Any]:
        """JSON values: what was asked, kept and learned; the KL of a pass at the start and at the end; seconds."""
        batches = max(1, math.ceil(len(self._lessons) / BATCH))
        means = [
            sum(part) / len(part)
            for part in (self._losses[:batches], self._losses[-batches:])
            if part
        ]
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
            "exchanges_sha256": self._given or digest_exchanges(self.exchanges),
        }

    def run(self) -> Iterator[StudyStep]:
        """Write what is left to write, then learn what is left to learn; the caller may stop at any step.

        Exchanges are written block by block, `BLOCK` passages each. Without any usable exchange nothing is learned;
        `samples` then has some of those that were dropped.
        """
        calibrate_empty(self._model, self._text[None])
        yield from self._write()
        self.exchanges = correct(self._earlier, self.exchanges)
        self._lessons = [make_lesson(exchange, self._tokenizer) for exchange in self.exchanges]
        self._progress = self._progress or [_Progress() for _ in self._lessons]
        apart = self._is_apart()
        least = LEAST_STEPS if apart else 2 * LEAST_STEPS
        usual = max(PASSES, math.ceil(least * BATCH / max(len(self._lessons), 1)))
        self._passes = usual if self._passes is None else self._passes
        rate = min(1.0, (usual / self._passes) ** 0.5)
        if apart and not self._step:
            self._tell_apart()
        whole = len(self._lessons) * self._passes
        while (left := whole - sum(each.due for each in self._progress)) > 0:
            began = time.perf_counter()
            with evaluating(self._model), upper_layers_trained(self._model, apart):
                loss = self._learn(1 - left / whole, rate)
            self._losses.append(loss)
            self._step += 1
            self._seconds["learn"] += time.perf_counter() - began
            done, total = (
                math.ceil(n / BATCH) for n in (sum(each.due for each in self._progress), whole)
            )
            yield StudyStep("learn", done, total, len(self.exchanges), loss)

    def _write(self) -> Iterator[StudyStep]:
        options = {"seed": self._seed, "first": self._blocks}
        count = self._per_passage or (
            PER_PASSAGE if self._is_apart(len(self._passages)) else 2 * PER_PASSAGE
        )
        writing = write_exchanges(self._model, self._tokenizer, self._passages, count, **options)
        while BLOCK * self._blocks < len(self._passages):
            began = time.perf_counter()
            written = next(writing)
            self._blocks += 1
            self.asked += written.asked
            self.exchanges += written.exchanges
            self.samples = [*self.samples, *written.dropped][:SAMPLES]
            self._seconds["write"] += time.perf_counter() - began
            done = min(BLOCK * self._blocks, len(self._passages))
            yield StudyStep(
                "write",
                done,
                len(self._passages),
                len(self.exchanges),
                written=tuple(written.exchanges),
            )

    def _is_apart(self, passages: int = 0) -> bool:
        passages = passages or len({each.answer for each in self.exchanges})
        return self._discriminants and can_tell_apart(self._model, passages)

    def _tell_apart(self) -> None:
        """Give the memory rows that tell the lessons' answers apart, at the ends of prompts and inside the answers.

        What the pull asks, the base's answers to it, and the base's own text are of no passage.
        """
        began, pad, numbers = time.perf_counter(), find_pad_token(self._tokenizer), dict[str, int]()
        of_lesson = [numbers.setdefault(each.answer, len(numbers)) for each in self.exchanges]
        chosen = random.Random(self._seed).sample(
            range(len(of_lesson)), min(len(of_lesson), PROMPTS)
        )
        rows = [(*self._encode(each), of_lesson[each]) for each in chosen]
        rows += [(*row, -1) for row in self._list_others()]
        prompts, passages = [row[0] for row in rows], [row[-1] for row in rows]
        place_discriminants(self._model, prompts, [1] * len(rows), passages, pad, inside=False)
        spans, seen = (
            [],
            Counter[int](),
        )  # token ids, how many of the last ones are of a passage, its number
        for prompt, _, answer, number in rows:
            seen[number] += 1
            if len(answer) > 1 and (number < 0 or seen[number] <= ANSWERS):
                spans.append(([*prompt, *answer.tolist()][:-1], len(answer) - 1, number))
        for text in (
            [self._free.texts[number].tolist() for number in range(OWN_TEXTS)] if self._free else ()
        ):
            spans.append((text, len(text) - 1, -1))
        if spans:
            place_discriminants(self._model, *zip(*spans, strict=True), pad, inside=True)
        self._seconds["learn"] += time.perf_counter() - began

    def _learn(self, done: float, rate: float) -> float:
        """Take the next step, at a share `rate` of the learning rate; return its KL, in nats a token of the lessons.

        The weight of the pull grows with the share of the study that is done: first the memory learns its own answers,
        then their effect on others is undone.
        """
        number = min(each.due for each in self._progress)
        chosen = self._choose(number)
        rows = list(chosen.values())
        weight = done * self._anchor * PULL_EVERY if self._step % PULL_EVERY == 0 else 0.0
        self._learner.begin()
        others = self._list_others() if weight else []
        first = self._step // PULL_EVERY * BATCH  # this step pulls these back to the base's answers
        losses = self._distill(
            rows + [others[(first + row) % len(others)] for row in range(BATCH * bool(others))]
        )
        own, pulls = losses[: len(rows)], losses[len(rows) :]
        loss = pulled = torch.cat(own).mean()
        if weight:
            text = self._free.text_of(self._step // PULL_EVERY)
            pulled = loss + weight * (torch.cat(pulls).mean() + self._free.loss(self._host, text))
        pulled.backward()
        # The rate falls to 0: at a constant one the batches of the last steps would count more than the others.
        if not self._learner.finish(step=bool(loss.isfinite()), rate_factor=rate * (1 - done)):
            self.skipped_steps += 1
        self._note(chosen, number, [each.detach() for each in own])
        return loss.item()

    def _choose(self, number: int) -> dict[int, Row]:
        """Return the next lessons of a pass by their numbers: of about one length, so that few rows are padded."""
        order = list(range(len(self._lessons)))
        random.Random(f"{self._seed} {number}").shuffle(order)
        due = [each for each in order if self._progress[each].due == number]
        rows = {each: self._encode(each) for each in due[:SORTED]}
        lengths = {each: len(prompt) + len(answer) for each, (prompt, _, answer) in rows.items()}
        nearest = sorted(rows, key=lambda each: abs(lengths[each] - lengths[due[0]]))
        return {each: rows[each] for each in nearest[:BATCH]}

    def _encode(self, each: int) -> Row:
        """Return a lesson in its next wording."""
        lesson = self._lessons[each]
        # A lesson's wordings begin at its own number, so that a batch has all of them.
        turn = each + self._progress[each].seen
        prompt = encode_question(self._tokenizer, *lesson.word(turn))
        reach = self._reaches.get(self.exchanges[each].answer) if turn % WHOLE_EVERY else None
        return prompt, lesson, lesson.answer[:reach]

    def _list_others(self) -> list[Row]:
        """Return the other questions, with the base's answers; none without an anchor."""
        if self._anchor and not self._others:
            fields = compute_once(self._model, write_replay_lessons, self._tokenizer, self._seed)
            lessons = [Lesson(*each) for each in fields]
            self._others = [
                (encode_question(self._tokenizer, *each.word(0)), each, each.answer)
                for each in lessons
            ]
        return self._others

    def _distill(self, rows: Sequence[Row]) -> list[Tensor]:
        """Return KL(teacher || student) at each token of some answers after their prompts, [T] of each row."""
        prompts = [prompt for prompt, _, _ in rows]
        inputs = [[*prompt, *answer.tolist()][:-1] for prompt, _, answer in rows]
        shared = commonprefix(
            [prompt[:-1] for prompt in prompts]
        )  # the system message of a chat template
        inputs = begin_rows(self._host, inputs, [(len(shared), range(len(rows)))], 0)
        logits = self._host.logits(count=max(len(answer) for _, _, answer in rows), **inputs)
        return [
            _divergences(each[-len(row[2]) :], row[1])
            for each, row in zip(logits, rows, strict=True)
        ]

    def _note(self, chosen: Iterable[int], number: int, losses: Sequence[Tensor]) -> None:
        """Note what the losses of some lessons' tokens show of them: when they are due, and how far their passages."""
        unknown: dict[str, int] = {}  # by answer: the tokens up to the last that is not known
        for each, row in zip(chosen, losses, strict=True):
            beyond = (row < KNOWN_NATS).logical_not().nonzero()
            last = int(beyond[-1]) + 1 if len(beyond) else 0
            answer, progress = self.exchanges[each].answer, self._progress[each]
            unknown[answer] = max(last, unknown.get(answer, 0))
            progress.seen += 1
            progress.known = 0 if last else progress.known + 1
            left = progress.known == len(FORMS)
            progress.due = self._passes if left else min(number + 1 + progress.known, self._passes)
        self._reaches |= {answer: last + MARGIN for answer, last in unknown.items()}

    # ------------------------------------------------------------------ the state

    def state_dict(self) -> dict[str, Any]:
        """Return the study's state, tensors and plain values; the adapter's weights are not part of it."""
        return {
            **{name: copy.copy(getattr(self, name)) for name in _PLAIN_STATE},
            "given": self._given,
            "learner": self._learner.state_dict(),
            "progress": [list(vars(each).values()) for each in self._progress],
            "exchanges": [asdict(exchange) for exchange in self.exchanges],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, after the adapter's weights were restored.

        A study that was begun with other given exchanges is a `ValueError`. A state that does not fit is that, or a
        `KeyError`, `TypeError` or `AttributeError`.
        """
        if state["given"] != self._given:
            rule = "exchanges must be those that the checkpoint was begun with, got others"
            raise ValueError(f"{rule}: give the former file, or start afresh with --overwrite")
        self.exchanges = [Exchange(**each) for each in state["exchanges"]]
        self._progress = [_Progress(*each) for each in state["progress"]]
        for name in _PLAIN_STATE:
            setattr(self, name, copy.copy(state[name]))
        with upper_layers_trained(self._model, self._is_apart()):
            self._learner.load_state_dict(state["learner"])


def _divergences(logits: Tensor, lesson: Lesson) -> Tensor:
    """Return KL(teacher || student) at the first tokens of an answer, [T], from the student's logits [T, V].

    It is over the lesson's candidates and one more outcome, which stands for all other tokens. Over the candidates
    alone, the least KL would need a student that never says anything else.
    """
    logs = (
        logits.float().log_softmax(-1).gather(1, lesson.candidates[: len(logits)].to(logits.device))
    )
    targets = lesson.targets[: len(logits)].to(logs)
    others = torch.log1p(-logs.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    logs = torch.cat([logs, others], -1)
    targets = torch.cat([targets, (1 - targets.sum(-1, keepdim=True)).clamp(min=0)], -1)
    return (torch.xlogy(targets, targets) - targets * logs).sum(-1)
