"""One step of test-time training: score a chunk, then learn it. The batch is B documents, usually one.

Each row of the batch is one document with the adapter that learns it. All rows are at the same chunk; a row that skips
a chunk goes on in a batch of its own. Axes: B rows, N tokens scored in a chunk, V vocabulary.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..model import CausalLM, check_window, token_losses
from ..slots import Writer
from ..tuner import (
    adapters_disabled,
    calibrate,
    clip_memories,
    evaluating,
    keep_weights,
    uncalibrated_memories,
)
from .anchor import Anchor
from .brake import RATE_FACTOR, is_due, is_worse
from .cache import SlidingCache
from .chunks import Chunk, ChunkBounds, cut, perplexity_of
from .learner import Learner
from .settings import TrainingSettings

AVERAGED = 6  # chunks of a reading; a text of fewer is read again to learn it at all


@dataclass(eq=False)
class Row:
    """A document that is being read, LongTensor [T], the learner of its adapter, and its records.

    `adapter` is None in a batch of one row, whose adapters are the active ones. For `final` see `Loop.finish`.
    """

    ids: Tensor
    learner: Learner
    adapter: str | None = None
    chunks: list[Chunk] = field(default_factory=list)
    skipped_chunks: int = 0
    final: tuple[float, float] | None = None
    final_seconds: float = 0.0

    @property
    def perplexity(self) -> float:
        """exp(sum of nll / number of scored tokens) of the current reading; nan before the first scored token."""
        return perplexity_of(
            chunk for chunk in self.chunks if chunk.reading == self.chunks[-1].reading
        )

    @property
    def seconds(self) -> float:
        """Wall time of scoring and learning, of all readings together."""
        return sum(chunk.seconds for chunk in self.chunks) + self.final_seconds

    @property
    def taken_back(self) -> list[int]:
        """The numbers of tokens read at which the brake took the adapter back."""
        at_end = (
            [self.chunks[-1].stop]
            if self.final is not None and not self.final[0] <= self.final[1]
            else []
        )
        return [chunk.start for chunk in self.chunks if chunk.taken_back] + at_end


@dataclass
class Outcome:
    """What became of a chunk of one row; the fields are those of `Chunk`."""

    nll_nats: float
    base_nll_nats: float | None = None
    taken_back: bool = False


@dataclass
class Batch:
    """Rows at the same chunk, and their context."""

    rows: list[Row]
    cache: SlidingCache

    def select(self, indices: list[int]) -> Batch:
        if len(indices) == len(self.rows):
            return self
        return Batch([self.rows[index] for index in indices], self.cache.select(indices))

    @property
    def adapters(self) -> list[str] | None:
        return None if self.rows[0].adapter is None else [row.adapter for row in self.rows]

    def tokens(self, start: int, stop: int) -> Tensor:
        """Return the tokens [start, stop) of each row's document, [B, stop - start]."""
        return torch.stack([row.ids[start:stop] for row in self.rows])


class Loop:
    """Scores and learns the chunks of documents. Settings that do not fit the model are a `ValueError`.

    A `writer` changes a two-layer LOCAS memory after each chunk; for batches of one row.
    """

    def __init__(
        self,
        host: CausalLM,
        settings: TrainingSettings,
        writer: Writer | None = None,
        anchor: Anchor | None = None,
    ):
        self.host, self.settings, self.writer, self.anchor = host, settings, writer, anchor
        self.start_token = settings.start_token
        self._check_settings()

    def _check_settings(self) -> None:
        settings, host = self.settings, self.host
        check_window(settings.window, host.positions)
        if settings.start_token is not None and self._fills_positions():
            rule = f"stride must be below a window of all {host.positions} positions, got {settings.stride}"
            raise ValueError(f"{rule}: lower it, since the start token takes one")
        if settings.context == "cache":
            if not host.can_cache():
                name, remedy = (
                    host.base.config.model_type,
                    "its layers keep more than keys and values that slide",
                )
                raise ValueError(f"context must be 'recompute' for {name}, got 'cache': {remedy}")
            if settings.window > (host.rope_positions or sys.maxsize):
                reason = f"where {host.kind} changes its positions' frequencies"
                rule = f"context must be 'recompute' with a window above {host.rope_positions}, {reason}"
                raise ValueError(
                    f"{rule}, got 'cache' with {settings.window}: give it, or lower window"
                )

    def find_start_token(self, documents: Iterable[Tensor]) -> None:
        """Take the start token from documents, LongTensor [T] each, unless the settings give it.

        It is their first token, where that is the model's `bos_token_id` in all of them: their tokenizer puts one
        there. A window of all positions without context has no room for it.
        """
        own = self.host.start_token
        if self.settings.start_token is None:
            fits = own is not None and not self._fills_positions()
            self.start_token = (
                own if fits and all(int(ids[0]) == own for ids in documents) else None
            )

    def _fills_positions(self) -> bool:
        return self.settings.stride == self.settings.window == self.host.positions

    def make_batch(self, rows: list[Row]) -> Batch:
        """Return a batch of rows whose context is not known yet."""
        settings = self.settings
        keep = max(settings.window - settings.stride, 1) - 1
        sinks = settings.sinks if self.start_token is None else max(settings.sinks, 1)
        restart = min(2 * settings.window, self.host.rope_positions or sys.maxsize)
        return Batch(rows, SlidingCache(self.host, keep, sinks, restart))

    def first_chunk(self, row: Row) -> Tensor:
        """Return the tokens of a row's first chunk after the start token, where there is one, [1, N]."""
        return self._put_start(row.ids[None, : self.settings.stride], 0)

    def step(self, batch: Batch, bounds: ChunkBounds, reading: int = 0) -> list[Batch]:
        """Score a chunk, which each row's document has, and learn it; append its record to each row.

        Return the batches that go on: `batch` itself, or, where rows did not learn the chunk, the other rows and a
        batch for each of those. Their context is fed again: it may hold values that are not finite.
        """
        began = time.perf_counter()
        learning = bool(batch.rows[0].learner.parameters())
        with evaluating(self.host.model):
            if learning and batch.adapters is None:
                # Not at the first chunk alone: the adapter may have been enabled after it.
                calibrate_empty(self.host.model, self._window(batch, bounds.start, bounds.stop))
            for row in batch.rows if learning and self.settings.brake else ():
                if not row.chunks or row.learner.good is None:
                    row.learner.keep_good()
            if learning and self.settings.epochs > 1:
                paused = time.perf_counter()
                for row in batch.rows:
                    row.learner.take_snapshot()
                began += (
                    time.perf_counter() - paused
                )  # a safeguard of ours, not a cost of the method
            with nullcontext() if self.writer is None else self.writer.recording():
                outcomes, going_on = self._score_and_learn(batch, bounds, learning)
        seconds = (time.perf_counter() - began) / len(batch.rows)
        batches = [going_on] if going_on.rows else []
        for row, outcome in zip(batch.rows, outcomes, strict=True):
            finished = row in going_on.rows
            if not finished:
                batches.append(self.make_batch([row]))
            if outcome.taken_back:
                self._take_back(row)
            elif learning and not finished:
                row.skipped_chunks += 1
                if self.settings.epochs > 1:
                    row.learner.restore_snapshot()
            learned = learning and finished and bounds.scored > 0
            index = (
                row.chunks[-1].index + 1 if row.chunks and row.chunks[-1].reading == reading else 0
            )
            figures = {**vars(outcome), "seconds": seconds, "learned": learned, "reading": reading}
            row.chunks.append(Chunk(index, bounds.start, bounds.stop, bounds.scored, **figures))
        return batches

    def end_reading(self, row: Row, reading: int) -> None:
        """Average the trained weights over the ends of several readings, and `finish` after the last one."""
        last = reading + 1 == self.settings.readings
        written = (
            self.writer is not None
        )  # two maps may have other slots, whose mean is neither map
        if (
            self.settings.readings > 1
            and not written
            and len(row.ids) > (AVERAGED - 1) * self.settings.stride
        ):
            clip_memories(self.host.model, row.adapter)
            row.learner.average(reading + 1, last)
            keep_weights(self.host.model, row.adapter)
        if last:
            self.finish(row)

    def finish(self, row: Row) -> None:
        """Compare the adapter that is left with the base on a chunk, once; take it back where it is worse.

        The chunk is the last one that was compared before, or the last one of all. `row.final` becomes the two losses,
        the adapter's first, in nats a token.
        """
        began, scored = time.perf_counter(), [chunk for chunk in row.chunks if chunk.tokens]
        # An adapter that was enabled after the last chunk has no good state.
        trained = row.learner.parameters() and row.learner.good is not None
        if not self.settings.brake or row.final is not None or not trained or not scored:
            return
        chunk = next(
            (chunk for chunk in reversed(scored) if chunk.base_nll_nats is not None), scored[-1]
        )
        batch = self.make_batch([row])
        bounds = next(cut(chunk.stop, self.settings.window, self.settings.stride, chunk.start))
        with evaluating(self.host.model):
            (nll,) = self._reread(batch, bounds, with_adapters=True)
            base_nll = chunk.base_nll_nats
            if base_nll is None:
                (base_nll,) = self._reread(batch, bounds, with_adapters=False)
        if math.isfinite(base_nll):
            row.final = nll / chunk.tokens, base_nll / chunk.tokens
            if not nll <= base_nll:  # nan too
                self._take_back(row)
        row.final_seconds = time.perf_counter() - began

    def _take_back(self, row: Row) -> None:
        row.learner.take_back(RATE_FACTOR)
        keep_weights(self.host.model, row.adapter)
        if self.writer is not None:
            self.writer.take_back(RATE_FACTOR)

    def _score_and_learn(
        self, batch: Batch, bounds: ChunkBounds, learning: bool
    ) -> tuple[list[Outcome], Batch]:
        """Return each row's outcome, and the batch of the rows that go on with this context.

        These are the rows whose losses and gradients were finite and whose adapters were not taken back.
        """
        outcomes = [Outcome(0.0) for _ in batch.rows]
        targets = batch.tokens(max(bounds.start, 1), bounds.stop)
        for epoch in range(self.settings.epochs if bounds.scored else 0):
            with torch.set_grad_enabled(learning):
                logits = self._logits(batch, bounds).flatten(0, 1)
                losses = token_losses(logits, targets.flatten()).unflatten(
                    0, targets.shape
                )  # [B, N]
            nlls = losses.detach().double().sum(dim=1).tolist()
            del logits
            if epoch == 0:
                outcomes = [Outcome(nll) for nll in nlls]
            if epoch == 0 and learning and self.settings.brake:
                self._compare(batch, bounds, outcomes)
                kept = [index for index, outcome in enumerate(outcomes) if not outcome.taken_back]
                if len(kept) < len(outcomes):
                    batch, targets, losses = batch.select(kept), targets[kept], losses[kept]
                    nlls = [nlls[index] for index in kept]
                if not kept:
                    break
            healthy = list(map(math.isfinite, nlls))
            healthy = self._learn(batch, losses, healthy) if learning else healthy
            kept = [index for index, good in enumerate(healthy) if good]
            if len(kept) < len(healthy):
                batch, targets = batch.select(kept), targets[kept]
            if not kept or not learning:
                break
        if (
            learning
            and batch.rows
            and bounds.scored
            and self.writer is not None
            and self.writer.is_finite()
        ):
            batch.rows[0].learner.move_slots(self.writer.write(losses.detach()[0]))
        batch.cache.advance()
        return outcomes, batch

    def _compare(self, batch: Batch, bounds: ChunkBounds, outcomes: list[Outcome]) -> None:
        """Compare with the base the rows whose turn it is, before they learn the chunk; complete their outcomes."""
        rows = zip(batch.rows, outcomes, strict=True)
        due = [(row, one) for row, one in rows if is_due(row.chunks, one.nll_nats / bounds.scored)]
        if not due:
            return
        base_nlls = self._reread(
            replace(batch, rows=[row for row, _ in due]), bounds, with_adapters=False
        )
        for (row, one), base_nll in zip(due, base_nlls, strict=True):
            one.base_nll_nats = base_nll
            one.taken_back = is_worse(
                row.chunks, one.nll_nats / bounds.scored, base_nll / bounds.scored
            )
            if one.nll_nats < base_nll:
                row.learner.keep_good()

    @torch.no_grad()
    def _reread(self, batch: Batch, bounds: ChunkBounds, with_adapters: bool) -> list[float]:
        """Return each row's nll of a chunk, in nats, from a window that is fed again."""
        targets = batch.tokens(max(bounds.start, 1), bounds.stop)
        ids = self._window(batch, bounds.begin, bounds.stop - 1)
        with nullcontext() if with_adapters else adapters_disabled(self.host.model):
            logits = self.host.logits(
                ids, bounds.scored, batch.adapters if with_adapters else None, use_cache=False
            )
        losses = token_losses(logits.flatten(0, 1), targets.flatten()).unflatten(0, targets.shape)
        return [row_losses.double().sum().item() for row_losses in losses]

    def _logits(self, batch: Batch, bounds: ChunkBounds) -> Tensor:
        """Return the logits [B, N, V] of the chunk's targets: token t is predicted where token t - 1 is fed."""
        ids = self._window(batch, bounds.begin, bounds.stop - 1)
        # Without other context than the start token there is nothing to keep.
        alone = self.start_token is not None and self.settings.window - self.settings.stride <= 1
        if self.settings.context == "cache" and not alone:
            return batch.cache.forward(ids, bounds.scored, batch.adapters)
        return self.host.logits(ids, bounds.scored, batch.adapters, use_cache=False)

    def _window(self, batch: Batch, begin: int, stop: int) -> Tensor:
        """Return the tokens [begin, stop) of each row's document after the start token, where there is one."""
        return self._put_start(batch.tokens(begin, stop), begin)

    def _put_start(self, ids: Tensor, begin: int) -> Tensor:
        """Return the start token, where there is one, and tokens [B, n] of documents from the index `begin` on."""
        start = self.start_token
        if start is None or (begin == 0 and bool((ids[:, 0] == start).all())):
            return ids
        return torch.cat([ids.new_full((len(ids), 1), start), ids], dim=1)

    def _learn(self, batch: Batch, losses: Tensor, finite: list[bool]) -> list[bool]:
        """Take a step for each row whose loss, of [B, N], and gradient are finite; return which they are."""
        if not any(finite):
            return finite
        # The gradient of the sum is each row's own gradient, since no adapter serves two rows.
        rows = (
            losses if all(finite) else losses[[index for index, good in enumerate(finite) if good]]
        )
        loss = rows.mean(dim=1).sum()
        if self.writer is not None and not batch.rows[0].learner.trains:
            loss.backward()
            for parameter in batch.rows[0].learner.parameters():
                parameter.grad = None
            return [self.writer.is_finite()]
        for row in batch.rows:
            row.learner.begin()
        loss.backward()
        self._pull_to_base(batch)
        return [row.learner.finish(step=good) for row, good in zip(batch.rows, finite, strict=True)]

    def _pull_to_base(self, batch: Batch) -> None:
        """Add the anchor's gradient to the rows whose step has one."""
        by_step: dict[
            int, list[Row]
        ] = {}  # documents of different lengths are at different steps in a second reading
        for row in batch.rows if self.anchor is not None else ():
            by_step.setdefault(row.learner.steps, []).append(row)
        for step, rows in by_step.items():
            text = self.anchor.text_of(step)
            if text is not None:
                with nullcontext() if self.writer is None else self.writer.pausing():
                    self.anchor.losses(
                        self.host, text, replace(batch, rows=rows).adapters, len(rows)
                    ).sum().backward()


def calibrate_empty(model: nn.Module, input_ids: Tensor, adapter_name: str | None = None) -> None:
    """Calibrate empty memories, or one, on their first chunk, a LongTensor [B, N]: later tokens leak into scores."""
    for name in uncalibrated_memories(model, adapter_name):
        calibrate(model, [input_ids], name, across_processes=False)
