"""The schedule of a study: which lessons are learned next, and how far each passage is learned.

What is known is not learned again. The loss of a token shows whether it is known.

Axes: T tokens of an answer.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from torch import Tensor

__all__ = ["KNOWN_NATS", "Schedule"]

KNOWN_NATS = math.log(2)
"""Greedy decoding recites a token of a smaller loss, since its probability is above one half
(arXiv:2605.30260)."""
# Every n-th time, a lesson's passage is learned to its end. Else what is left out could be
# forgotten without being noticed.
WHOLE_EVERY = 5
# Tokens of a passage that are learned after the last one that is not known.
MARGIN = 4
# A batch takes lessons of about one length from so many.
SORTED = 32


@dataclass
class _Progress:
    """What is known of a lesson.

    Attributes:
        due: the pass in which it is learned next.
        seen: how often it was learned.
        known: how often it was known since it was last found unknown, each time in the next
            wording.
    """

    due: int = 0
    seen: int = 0
    known: int = 0


class Schedule:
    """Chooses the lessons of each step by what is known of them.

    A lesson that is known skips the next pass, and one more for each time that it was known before.
    Known in each wording, it leaves.

    Args:
        passages: the passage of each lesson. Lessons of one passage share how far it is learned.
        wordings: how many wordings a lesson has.
        passes: the most times that each lesson is learned.
        batch: the most lessons of a step.
        seed: of the order.
    """

    def __init__(
        self, passages: Sequence[str], *, wordings: int, passes: int, batch: int, seed: int
    ):
        self._passages = passages
        self._wordings = wordings
        self._passes = passes
        self._batch = batch
        self._seed = seed
        self._progress = [_Progress() for _ in passages]
        # How many tokens of each passage are learned next.
        self._reaches: dict[str, int] = {}
        # The present pass, and its lessons that are left, in their order.
        self._pass = 0
        self._queue: deque[int] = deque()

    @property
    def total(self) -> int:
        """How many lessons all passes have."""
        return len(self._passages) * self._passes

    def count_done(self) -> int:
        """Return how many lessons of all passes are learned, or not needed."""
        return sum(progress.due for progress in self._progress)

    def turn_of(self, number: int) -> int:
        """Return the turn of a lesson's wordings that comes next.

        They begin at the lesson's own number, so that a batch has all wordings.
        """
        return number + self._progress[number].seen

    def reach_of(self, number: int) -> int | None:
        """Return how many tokens of a lesson's answer are learned next; None for all."""
        if self.turn_of(number) % WHOLE_EVERY == 0:
            return None
        return self._reaches.get(self._passages[number])

    def choose(self, length_of: Callable[[int], int]) -> list[int]:
        """Return the numbers of the next lessons, of about one length: few rows are padded.

        Args:
            length_of: returns a lesson's length in tokens as it is learned next.
        """
        self._pass = min(progress.due for progress in self._progress)
        if not self._queue:
            order = list(range(len(self._passages)))
            random.Random(f"{self._seed} {self._pass}").shuffle(order)
            self._queue.extend(i for i in order if self._progress[i].due == self._pass)
        candidates = [self._queue.popleft() for _ in range(min(SORTED, len(self._queue)))]
        lengths = {number: length_of(number) for number in candidates}
        middle = lengths[candidates[0]]
        nearest = sorted(candidates, key=lambda number: abs(lengths[number] - middle))
        chosen = nearest[: self._batch]
        left = [number for number in candidates if number not in chosen]
        self._queue.extendleft(reversed(left))
        return chosen

    def note(self, numbers: Sequence[int], losses: Sequence[Tensor]) -> None:
        """Note when the lessons that were learned are due next, and how far.

        Args:
            numbers: those of the lessons.
            losses: of each lesson's tokens, [T], in nats.
        """
        # By passage: the tokens up to the last that is not known.
        unknown: dict[str, int] = {}
        for number, lesson_losses in zip(numbers, losses, strict=True):
            # Not >=: NaN is unknown.
            unknown_tokens = (lesson_losses < KNOWN_NATS).logical_not().nonzero()
            last = 0
            if len(unknown_tokens):
                last = int(unknown_tokens[-1]) + 1
            passage = self._passages[number]
            unknown[passage] = max(last, unknown.get(passage, 0))
            progress = self._progress[number]
            progress.seen += 1
            progress.known = 0 if last else progress.known + 1
            progress.due = min(self._pass + 1 + progress.known, self._passes)
            # Known in each wording: it is not learned again.
            if progress.known == self._wordings:
                progress.due = self._passes
        for passage, last in unknown.items():
            self._reaches[passage] = last + MARGIN

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        progress = [list(astuple(progress)) for progress in self._progress]
        return {"progress": progress, "reaches": dict(self._reaches)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; the rest of a pass follows from it."""
        self._progress = [_Progress(*values) for values in state["progress"]]
        self._reaches = dict(state["reaches"])
        self._queue.clear()
