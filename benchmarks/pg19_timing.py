"""What the rows of the PG-19 tables cost: time against both `none`, operations, memory, bytes on disk.

All rows read the first tokens of one document in one process, a few chunks each in turn, so that a ratio is between
things that happened within seconds of each other. They share the base's weights; each has its own layers and memory.
On a machine that does other things besides, processor time tells more than the clock; both are given.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pg19_rows import NONE, NONE_RECOMPUTE, TEMPLORA, Row
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.utils import logging

from locas_peft import Chunk
from locas_peft.methods import PeakMemory, Settings, attached, make_trainer, read_with
from locas_peft.ttt.host import Host

TURN_CHUNKS = 4
MOST_COUNTED_CHUNKS = 16
MEMORIZED_TOKENS = 200_000


def time_rows(base: PreTrainedModel, rows: Sequence[Row], common: Settings, ids: torch.Tensor) -> list[dict[str, Any]]:
    """Reads a text with every row, `TURN_CHUNKS` chunks each in turn.

    Args:
        base: a causal LM without adapters; not changed.
        rows: among them both rows `none`.
        common: see `Row.settings`.
        ids: LongTensor [T]; the operations of the last few chunks are counted, and these are not timed.

    Returns:
        One dictionary a row. `relative_time` and `relative_processor_time` map both `none`, and TempLoRA where it is
        among the rows, to the median over turns of that turn's ratio, once every row's context is full, and
        `relative_time_quartiles` to the lower and upper quartile;
        `..._with_start` is the ratio of the sums over all turns, making the memory, calibration and the first steps
        included. `relative_operations` is that of the operations in products of matrices and in attention: what the
        time would be if they were all that costs. `seconds_for_200k_tokens` counts the start too.

    Raises:
        ValueError: the text is too short for three turns with full contexts, or a row did not learn each chunk.
    """
    counted = {row.name: _count_chunks(base, row.settings(common)) for row in rows}
    turns = (len(ids) // common.stride - max(counted.values())) // TURN_CHUNKS
    filling = max(row.windows for row in rows) * common.window // common.stride
    first = -(-filling // TURN_CHUNKS)
    if turns - first < 3:
        needed = ((first + 3) * TURN_CHUNKS + max(counted.values())) * common.stride
        raise ValueError(f"--timing-tokens must be at least {needed:,} for these windows, got {len(ids):,}: raise it")
    wall = {row.name: [] for row in rows}
    processor = {row.name: [] for row in rows}
    for row in rows if base.device.type == "cuda" else ():  # kernels are loaded at their first use: no row shall pay
        with _Reading(base, row, common, ids) as warm_up:
            warm_up.take_turn()
    with ExitStack() as stack:
        readings = {row.name: stack.enter_context(_Reading(base, row, common, ids)) for row in rows}
        for turn in range(turns):
            start = turn % len(rows)
            for row in (*rows[start:], *rows[:start]):
                taken = readings[row.name].take_turn()
                wall[row.name].append(taken[0])
                processor[row.name].append(taken[1])
        operations = {name: reading.count_operations(counted[name]) for name, reading in readings.items()}
        parameters = {name: reading.parameters for name, reading in readings.items()}
        skipped = next((name for name, reading in readings.items() if reading.skipped_chunks), None)
        if skipped is not None:
            raise ValueError(f"row {skipped!r} left chunks unlearned, which takes other times: lower its rate")
        starts = {name: reading.start[0] for name, reading in readings.items()}
        for name, reading in readings.items():  # what came before the first chunk
            wall[name][0] += reading.start[0]
            processor[name][0] += reading.start[1]
    turn_tokens = TURN_CHUNKS * common.stride
    tokens = (turns - first) * turn_tokens
    references = [row.name for row in (NONE_RECOMPUTE, NONE, TEMPLORA) if row.name in wall]
    return [
        {
            "row": row.name,
            "extra_parameters": parameters[row.name],
            "relative_time": _medians(wall, row.name, references, first),
            "relative_time_quartiles": _quartiles(wall, row.name, references, first),
            "relative_time_with_start": _ratios_of_sums(wall, row.name, references),
            "relative_processor_time": _medians(processor, row.name, references, first),
            "relative_processor_time_with_start": _ratios_of_sums(processor, row.name, references),
            "relative_operations": {name: operations[row.name] / operations[name] for name in references},
            "operations_a_token": operations[row.name] / common.stride,
            "tokens_per_second": tokens / sum(wall[row.name][first:]),
            "seconds_for_200k_tokens": starts[row.name] + MEMORIZED_TOKENS * sum(wall[row.name][first:]) / tokens,
            "turns": turns - first,
        }
        for row in rows
    ]


def _count_chunks(base: PreTrainedModel, settings: Settings) -> int:
    """How many chunks a row's operations repeat after: the cache's context is read again, an anchor pulls."""
    cycle, limit = 1, Host(base).positions or 0
    if settings.context == "cache":
        kept = max(settings.window - settings.stride, 1) - 1
        cycle = max(1, (limit - kept) // settings.stride)
    if cycle > MOST_COUNTED_CHUNKS:  # what is so rare does not count
        cycle = TURN_CHUNKS
    return math.lcm(cycle, settings.anchor_every if settings.anchor else 1)


class _Reading:
    """A row's reading in progress, on a twin of the base with the same weights.

    Attributes:
        parameters: how many are trained.
        skipped_chunks: how many were not learned, since a loss or a gradient was not finite.
        start: seconds by the clock and by the processor that passed before the first chunk.
    """

    def __init__(self, base: PreTrainedModel, row: Row, common: Settings, ids: torch.Tensor):
        self._settings, self._ids, self._device = row.settings(common), ids, base.device
        self._twin = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})

    def __enter__(self) -> _Reading:
        self._stack = ExitStack()
        clock = _Clock(self._device)
        model = self._stack.enter_context(attached(self._twin, self._settings))
        self._trainer = make_trainer(model, self._settings)
        self._chunks = self._stack.enter_context(closing(self._trainer.read(self._ids)))
        self.start = clock.read()
        self.parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def skipped_chunks(self) -> int:
        return self._trainer.skipped_chunks

    def take_turn(self) -> tuple[float, float]:
        """Reads a turn's chunks; gives seconds by the clock and by the processor."""
        clock = _Clock(self._device)
        for _ in range(TURN_CHUNKS):
            next(self._chunks)
        return clock.read()

    def count_operations(self, chunks: int) -> float:
        """Reads some chunks; gives a chunk's operations in products of matrices and in attention, both passes."""
        cpu = {
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _count_attention,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _count_attention_backward,
        }
        with FlopCounterMode(display=False, custom_mapping=cpu) as counter:
            for _ in range(chunks):
                next(self._chunks)
        return counter.get_total_flops() / chunks


class _Clock:
    """Wall and processor time from now on; on a GPU until all that was asked of it is done."""

    def __init__(self, device: torch.device):
        self._wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else (lambda: None)
        self._wait()
        self._began = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        self._wait()
        return time.perf_counter() - self._began[0], time.process_time() - self._began[1]


def _ratios(seconds: dict[str, list[float]], name: str, other: str, first: int) -> list[float]:
    return [a / b for a, b in zip(seconds[name][first:], seconds[other][first:], strict=True)]


def _medians(seconds: dict[str, list[float]], name: str, references: list[str], first: int) -> dict[str, float]:
    return {other: statistics.median(_ratios(seconds, name, other, first)) for other in references}


def _quartiles(seconds: dict[str, list[float]], name: str, references: list[str], first: int) -> dict[str, list]:
    quarters = partial(statistics.quantiles, method="inclusive")
    return {other: quarters(_ratios(seconds, name, other, first))[::2] for other in references}


def _ratios_of_sums(seconds: dict[str, list[float]], name: str, references: list[str]) -> dict[str, float]:
    return {other: sum(seconds[name]) / sum(seconds[other]) for other in references}


def _count_attention(query: Any, key: Any, value: Any, *rest: Any, out_shape: Any = None, **named: Any) -> int:
    batch, heads, queries, size = query
    return 2 * 2 * batch * heads * queries * key[2] * size


def _count_attention_backward(outer: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
    # As torch counts it on other devices: the scores once more, then four gradients.
    return 5 * _count_attention(query, key, value) // 2


# ---------------------------------------------------------------------- memory


def measure_memory(
    load: Callable[[], PreTrainedModel], rows: Sequence[Row], common: Settings, ids: torch.Tensor
) -> dict[str, dict[str, int | None]]:
    """Measures the memory that each row takes beyond the loaded model, and what it leaves on disk.

    On a CPU each row reads in a process of its own, since freed memory stays with a process.

    Args:
        load: gives the base; can be pickled.
        rows, common: see `time_rows`.
        ids: LongTensor [T], what is read.

    Returns:
        By row: `peak_bytes` above the loaded model, `peak_bytes_early` after the first quarter of the text (the same
        where memory does not grow with the text), `adapter_bytes` on disk.
    """
    jobs = [(load, row.settings(common), ids) for row in rows]
    if load().device.type == "cuda":
        return {row.name: _measure(*job) for row, job in zip(rows, jobs, strict=True)}
    found, threads = {}, torch.get_num_threads()
    for row, job in zip(rows, jobs, strict=True):
        # A worker each, since a pool would give the next row the same one.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare_process, (threads,)) as pool:
            found[row.name] = pool.submit(_measure, *job).result()
    return found


def _prepare_process(threads: int) -> None:
    warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated")
    logging.disable_progress_bar()
    torch.set_num_threads(threads)


def _measure(load: Callable[[], PreTrainedModel], settings: Settings, ids: torch.Tensor) -> dict[str, int | None]:
    base = load()
    peak = PeakMemory(base.device)
    before = peak.read()
    early: list[int | None] = []

    def note(chunk: Chunk) -> None:
        if not early and chunk.stop >= len(ids) / 4:
            early.append(peak.read())

    with tempfile.TemporaryDirectory() as folder:
        reading = read_with(base, ids, settings, on_chunk=note, memory_dir=Path(folder) / "memory")
        files = list(Path(folder).rglob("*.safetensors"))
        adapter_bytes = sum(file.stat().st_size for file in files)
    return {
        "peak_bytes": _above(reading.peak_bytes, before),
        "peak_bytes_early": _above(early[0], before),
        "adapter_bytes": adapter_bytes,
    }


def _above(peak: int | None, before: int | None) -> int | None:
    return None if peak is None or before is None else peak - before
