"""Rows that read one document side by side, a few chunks each in turn: their times, operations and memory.

Each ratio compares times that were taken within seconds of each other, in one process. The rows share the base's
weights; each has its own layers and adapter. On a machine that also runs other programs, processor time is more
reliable than wall time; both are given.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from measuring import Clock, share_weights, wait
from pg19_rows import NONE, NONE_RECOMPUTE, TEMPLORA, Block, Row
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.utils import logging

from locas_peft import Anchor, Chunk, SlotWriter, TestTimeTrainer, write_own_text
from locas_peft.model import count_positions
from locas_peft.stages import METHODS, PeakMemory, Place, ReadSettings, attached, read
from locas_peft.stages.complete import training_settings
from locas_peft.ttt import at_marks, perplexity_of

TURN_CHUNKS = 4
MOST_COUNTED_CHUNKS = 16
MEMORIZED_TOKENS = 200_000
BLOCK_MARKS = (10_000, 20_000, 30_000, 50_000)


class TimedReading:
    """A row's reading in progress, on a model that shares the base's weights.

    Attributes:
        parameters: how many are trained.
        start: seconds before the first chunk, by the keys "time" and "processor_time".
        turns: the same for each turn, a list by key.
    """

    def __init__(
        self,
        stack: ExitStack,
        base: PreTrainedModel,
        row: Row,
        common: ReadSettings,
        ids: torch.Tensor,
    ):
        settings, clock, self._device = row.settings(common), Clock(base.device), base.device
        model = stack.enter_context(attached(share_weights(base), settings))
        steps = []
        if settings.anchor:
            texts = write_own_text(model, tokens=settings.stride, seed=settings.seed)
            steps.append(Anchor(texts, weight=settings.anchor, every=settings.anchor_every))
        writers = METHODS[settings.method].make_writers(settings, model)
        if row.writer is not None:
            writers = [SlotWriter(model, **row.writer)]
        self.writer = writers[0] if writers else None
        steps += writers
        self.trainer = TestTimeTrainer(model, training_settings(settings), steps=steps)
        self._chunks = stack.enter_context(closing(self.trainer.read(ids)))
        self.parameters = sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        )
        self.start = dict(zip(("time", "processor_time"), clock.read(), strict=True))
        self.turns: dict[str, list[float]] = {"time": [], "processor_time": []}

    def take_turn(self) -> None:
        began = time.process_time()
        seconds = sum(chunk.seconds for chunk in islice(self._chunks, TURN_CHUNKS))
        self.turns["time"].append(
            seconds + wait(self._device)
        )  # a GPU may still be at the last step
        self.turns["processor_time"].append(time.process_time() - began)

    def count_operations(self, chunks: int) -> float:
        """Read some chunks; return a chunk's operations in matrix products and in attention, forward and backward."""
        cpu = {
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _count_attention,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _count_attention_backward,
        }
        with FlopCounterMode(display=False, custom_mapping=cpu) as counter:
            for _ in islice(self._chunks, chunks):
                pass
        return counter.get_total_flops() / chunks


def _count_attention(
    query: Any, key: Any, value: Any, *rest: Any, out_shape: Any = None, **named: Any
) -> int:
    batch, heads, queries, size = query
    return 2 * 2 * batch * heads * queries * key[2] * size


def _count_attention_backward(
    outer: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any
) -> int:
    # As torch counts it on other devices: the scores once more, then four gradients.
    return 5 * _count_attention(query, key, value) // 2


def take_turns(readings: Sequence[TimedReading], turns: int) -> None:
    for turn in range(turns):
        start = turn % len(readings)  # no row is always the first
        for reading in (*readings[start:], *readings[:start]):
            reading.take_turn()
        print(f"{turn + 1}/{turns} turns", file=sys.stderr, end="\r", flush=True)


def time_rows(
    base: PreTrainedModel, rows: Sequence[Row], common: ReadSettings, ids: torch.Tensor
) -> list[dict[str, Any]]:
    """Time rows relative to both `none` and, where it is among them, to TempLoRA.

    Args:
        base: a causal LM without adapters; not changed.
        rows: among them both `none`.
        common: see `Row.settings`.
        ids: LongTensor [T]. The operations of the last few chunks are counted; these chunks are not timed.

    Returns:
        One dictionary a row. `relative_time` and `relative_processor_time` are medians of a turn's ratio, over the
        turns in which every row's context is full. `..._with_start` is the ratio of the sums over all turns, with
        making the memory, calibration and the first steps included. `seconds_for_200k_tokens` includes the start.

    Raises:
        ValueError: the text is too short for three turns with full contexts, or a row did not learn each chunk.
    """
    counted = {row.name: count_chunks(base, row.settings(common)) for row in rows}
    turns = (len(ids) // common.stride - max(counted.values())) // TURN_CHUNKS
    filling = max(row.windows for row in rows) * common.window // common.stride
    first = -(-filling // TURN_CHUNKS)
    if turns - first < 3:
        needed = ((first + 3) * TURN_CHUNKS + max(counted.values())) * common.stride
        raise ValueError(
            f"--timing-tokens must be at least {needed:,} for these windows, got {len(ids):,}: raise it"
        )
    for row in (
        rows if base.device.type == "cuda" else ()
    ):  # load all kernels before anything is timed
        with ExitStack() as stack:
            TimedReading(stack, base, row, common, ids).take_turn()
    with ExitStack() as stack:
        readings = {row.name: TimedReading(stack, base, row, common, ids) for row in rows}
        take_turns(list(readings.values()), turns)
        operations = {
            name: reading.count_operations(counted[name]) for name, reading in readings.items()
        }
    skipped = next(
        (name for name, reading in readings.items() if reading.trainer.skipped_chunks), None
    )
    if skipped is not None:
        raise ValueError(
            f"row {skipped!r} skipped chunks, whose times differ from those of others: lower its rate"
        )
    tokens = (turns - first) * TURN_CHUNKS * common.stride
    references = {
        row.name: readings[row.name]
        for row in (NONE_RECOMPUTE, NONE, TEMPLORA)
        if row.name in readings
    }
    results = []
    for name, own in readings.items():
        result: dict[str, Any] = {"row": name, "extra_parameters": own.parameters}
        for key in own.turns:
            ratios = {
                other: [
                    a / b
                    for a, b in zip(own.turns[key][first:], reading.turns[key][first:], strict=True)
                ]
                for other, reading in references.items()
            }
            result[f"relative_{key}"] = {
                other: statistics.median(found) for other, found in ratios.items()
            }
            result[f"relative_{key}_quartiles"] = {
                other: statistics.quantiles(found, method="inclusive")[::2]
                for other, found in ratios.items()
            }
            result[f"relative_{key}_with_start"] = {
                other: (own.start[key] + sum(own.turns[key]))
                / (reading.start[key] + sum(reading.turns[key]))
                for other, reading in references.items()
            }
        seconds = sum(own.turns["time"][first:])
        result |= {
            "relative_operations": {
                other: operations[name] / operations[other] for other in references
            },
            "operations_a_token": operations[name] / common.stride,
            "tokens_per_second": tokens / seconds,
            "seconds_for_200k_tokens": own.start["time"] + MEMORIZED_TOKENS * seconds / tokens,
            "turns": turns - first,
        }
        results.append(result)
    return results


def count_chunks(base: PreTrainedModel, settings: ReadSettings) -> int:
    """Return the number of chunks after which a row's operations repeat.

    The cache's context is fed again at two windows, or at the model's last position, and an anchor acts on every n-th
    step.
    """
    cycle = 1
    if settings.context == "cache":
        limit = min(2 * settings.window, count_positions(base) or 2 * settings.window)
        kept = max(settings.window - settings.stride, 1) - 1
        cycle = max(1, (limit - kept) // settings.stride)
    if cycle > MOST_COUNTED_CHUNKS:  # too rare to matter
        cycle = TURN_CHUNKS
    return math.lcm(cycle, settings.anchor_every if settings.anchor else 1)


def read_block(
    base: PreTrainedModel,
    block: Block,
    rows: Sequence[Row],
    common: ReadSettings,
    ids: torch.Tensor,
) -> list[dict[str, Any]]:
    """Read a text with rows of the first block; return one dictionary a row.

    Args:
        base: tinybook-mlp; not changed.
        common: see `Row.settings`.
        ids: LongTensor [T].
    """
    common = dataclasses.replace(common, context=block.context)
    with ExitStack() as stack:
        readings = [TimedReading(stack, base, row, common, ids) for row in rows]
        take_turns(readings, -(-len(ids) // (TURN_CHUNKS * common.stride)))
    return [
        {
            "row": row.name,
            "tokens": len(ids),
            "settings": row.describe(),
            "perplexity_at": at_marks(
                reading.trainer.chunks, [mark for mark in BLOCK_MARKS if mark <= len(ids)]
            ),
            "perplexity": perplexity_of(reading.trainer.chunks),
            "extra_parameters": reading.parameters,
            "seconds": sum(chunk.seconds for chunk in reading.trainer.chunks),
            "median_chunk_seconds": statistics.median(
                chunk.seconds for chunk in reading.trainer.chunks
            ),
            "skipped_chunks": reading.trainer.skipped_chunks,
            "folds": getattr(reading.writer, "folds", None),
        }
        for row, reading in zip(rows, readings, strict=True)
    ]


# ---------------------------------------------------------------------- memory


def measure_memory(
    load: Callable[[], PreTrainedModel],
    rows: Sequence[Row],
    common: ReadSettings,
    ids: torch.Tensor,
) -> dict[str, dict[str, int | None]]:
    """Measure the memory that each row uses beyond the loaded model, and its adapter's size on disk.

    On a CPU each row reads in a process of its own, since freed memory stays with a process.

    Args:
        load: returns the base; can be pickled.
        ids: LongTensor [T], the text that is read.

    Returns:
        For each row `peak_bytes` above the loaded model, `peak_bytes_early` after the first quarter of the text (the
        same where memory does not grow with the text), and `adapter_bytes` on disk.
    """
    jobs = {row.name: partial(measure_row, load, row.settings(common), ids) for row in rows}
    if load().device.type == "cuda":
        return {name: job() for name, job in jobs.items()}
    found, spawn = {}, multiprocessing.get_context("spawn")
    for (
        name,
        job,
    ) in jobs.items():  # a pool for each row, since a pool would give the next row the same process
        with ProcessPoolExecutor(1, spawn, _prepare_process, (torch.get_num_threads(),)) as pool:
            found[name] = pool.submit(job).result()
    return found


def _prepare_process(threads: int) -> None:
    warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated")
    logging.disable_progress_bar()
    torch.set_num_threads(threads)


def measure_row(
    load: Callable[[], PreTrainedModel], settings: ReadSettings, ids: torch.Tensor
) -> dict[str, int | None]:
    """Measure one row in this process; see `measure_memory`."""
    base = load()
    peak = PeakMemory(base.device)
    before, early = peak.read(), []

    def note(chunk: Chunk) -> None:
        if not early and chunk.stop >= len(ids) / 4:
            early.append(peak.read())

    with tempfile.TemporaryDirectory() as folder:
        reading = read(base, ids, settings, Place(out=Path(folder) / "memory"), on_step=note)
        adapter_bytes = sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))
    peaks = {"peak_bytes": reading.peak_bytes, "peak_bytes_early": early[0]}
    above = {
        name: None if value is None or before is None else value - before
        for name, value in peaks.items()
    }
    return {**above, "adapter_bytes": adapter_bytes}
