"""What reading costs: rows that read one document side by side, a few chunks each in turn.

Each ratio compares times that were taken within seconds of each other, in one process. The rows
share the base's weights; each has its own layers and adapter. On a machine that also runs other
programs, processor time is more reliable than wall time; both are given.
"""

import math
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from measuring import make_table, share_weights, wait
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from locas_peft.bases import load_base
from locas_peft.evaluation import Unit
from locas_peft.model import count_positions
from locas_peft.stages import PeakMemory, complete
from locas_peft.ttt import Anchor, OwnText

from .bench import SWEEP_BOOK, Bench
from .rows import DEFAULT_LORA, LOCAS, NARROW, NONE, Row, locas, two_layer_rows

__all__ = [
    "TURN_CHUNKS",
    "count_least_tokens",
    "count_operations",
    "fill",
    "format_ratio",
    "measure_peaks",
    "tabulate",
    "time_rows",
]

TURN_CHUNKS = 4
MOST_COUNTED_CHUNKS = 16
LEAST_TURNS = 3
AGAIN = Row("no memory, each window read again", "none", {"context": "recompute"})
PAPER_NOTE = (
    "The paper, Qwen3-0.6B-Base, relative to no memory with a 2K window: TempLoRA 4.3, Locas 1.4; "
    "Qwen3-1.7B-Base 4.7 and 1.8."
)


class Host(Protocol):
    """What rows are timed on: a base, and the settings that all rows share. A `Bench` is one."""

    base: PreTrainedModel
    common: Mapping[str, Any]
    compiled: bool


class TimedReading:
    """A row's reading in progress, on a model that shares the base's weights.

    Attributes:
        parameters: how many are trained.
        turns: wall and processor seconds of each turn, by "seconds" and "processor_seconds".
    """

    def __init__(self, stack: ExitStack, host: Host, row: Row, ids: torch.Tensor):
        self._device = host.base.device
        opened = row.open(share_weights(host.base), host.common, compiled=host.compiled)
        trainer = stack.enter_context(opened)
        self._trainer = trainer
        self._anchor = next((step for step in trainer.steps if isinstance(step, Anchor)), None)
        self._chunks = stack.enter_context(closing(trainer.read(ids)))
        self.parameters = sum(weight.numel() for weight in trainer.learner.parameters())
        self.turns: dict[str, list[float]] = {"seconds": [], "processor_seconds": []}

    def write_texts(self, turns: int) -> float:
        """Write the anchor's texts of so many turns; return the processor seconds a turn.

        They are 0 without an anchor, and about 0 where another row has written the same texts.
        """
        if self._anchor is None:
            return 0.0
        texts = self._anchor.texts
        assert isinstance(texts, OwnText)  # that of `make_trainer`
        pulls = TURN_CHUNKS / self._anchor.every
        count = min(math.ceil(turns * pulls), len(texts))
        began = time.process_time()
        # Those before it are written too, in batches, which may be more than are needed.
        texts[count - 1]
        return (time.process_time() - began) / len(texts.written) * pulls

    @property
    def has_anchor(self) -> bool:
        """Whether some of the steps pull."""
        return self._anchor is not None

    def take_turn(self) -> None:
        """Read the chunks of a turn, and record their times."""
        began = time.process_time()
        seconds = sum(chunk.seconds for chunk in islice(self._chunks, TURN_CHUNKS))
        # A GPU may still be at the last step.
        self.turns["seconds"].append(seconds + wait(self._device))
        self.turns["processor_seconds"].append(time.process_time() - began)

    def count_operations(self, chunks: int) -> float:
        """Read some chunks; return a chunk's operations in matrix products and in attention."""

        def read() -> None:
            for _ in islice(self._chunks, chunks):
                pass

        return count_operations(read) / chunks

    @property
    def skipped_chunks(self) -> int:
        """How many chunks were not learned: their times differ from those of others."""
        return self._trainer.skipped_chunks


def count_operations(act: Callable[[], Any]) -> int:
    """Call a function; return its operations in matrix products and in attention."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    counts = {attention: _count_attention, backward: _count_attention_backward}
    with FlopCounterMode(display=False, custom_mapping=counts) as counter:
        act()
    return counter.get_total_flops()


def _count_attention(query: Any, key: Any, *rest: Any, out_shape: Any = None, **named: Any) -> int:
    batch, heads, queries, size = query
    return 2 * 2 * batch * heads * queries * key[2] * size


def _count_attention_backward(outer: Any, query: Any, key: Any, *rest: Any, **named: Any) -> int:
    # As torch counts it on other devices: the scores once more, then four gradients.
    return 5 * _count_attention(query, key) // 2


def count_chunks(host: Host, row: Row) -> int:
    """Return the number of chunks after which a row's operations repeat.

    The cache's context is fed again at two windows, or at the model's last position, and an anchor
    acts on every n-th step.
    """
    settings = complete(row.settings(host.common), host.base)
    cycle = 1
    if settings.context == "cache":
        twice = 2 * settings.window
        limit = min(twice, count_positions(host.base) or twice)
        kept = max(settings.window - settings.stride, 1) - 1
        cycle = max(1, (limit - kept) // settings.stride)
    if cycle > MOST_COUNTED_CHUNKS:
        # Too rare to matter.
        cycle = TURN_CHUNKS
    every = settings.anchor_every if settings.anchor else 1
    return math.lcm(cycle, every)


def count_least_tokens(host: Host, rows: Sequence[Row]) -> int:
    """Return the length of the shortest text on which `time_rows` can time rows."""
    stride = host.common["stride"]
    counted = max(count_chunks(host, row) for row in rows)
    return ((_count_first_turns(host) + LEAST_TURNS) * TURN_CHUNKS + counted) * stride


def _count_first_turns(host: Host) -> int:
    """Return how many turns begin before all contexts are full."""
    return -(-host.common["window"] // (host.common["stride"] * TURN_CHUNKS))


def time_rows(host: Host, rows: Sequence[Row], ids: torch.Tensor) -> list[dict[str, Any]]:
    """Time rows side by side.

    Args:
        host: its base is not changed.
        rows: their names are different.
        ids: LongTensor [T]. The operations of the last few chunks are counted; these are not timed.

    Returns:
        One dictionary a row: `seconds` and `processor_seconds` of each turn in which all contexts
        are full, `operations` a token, `parameters`, and `writing_processor_seconds`. These are not
        in the times of the turns: a process writes the texts of an anchor once for all readings,
        and the first reading takes so much longer a turn.

    Raises:
        ValueError: the text is too short for three such turns, or a chunk was not learned.
    """
    counted = {row.name: count_chunks(host, row) for row in rows}
    stride = host.common["stride"]
    turns = (len(ids) // stride - max(counted.values())) // TURN_CHUNKS
    first = _count_first_turns(host)
    if turns - first < LEAST_TURNS:
        needed = count_least_tokens(host, rows)
        raise ValueError(f"timed_tokens must be at least {needed:,}, got {len(ids):,}: raise it")
    with ExitStack() as stack:
        readings = {}
        for row in rows:
            readings[row.name] = TimedReading(stack, host, row, ids)
        names = list(readings)
        # The first row with an anchor writes for all of them.
        writing = max(reading.write_texts(turns) for reading in readings.values())
        for turn in range(turns):
            # No row is always the first.
            start = turn % len(names)
            for name in (*names[start:], *names[:start]):
                readings[name].take_turn()
        operations = {}
        for name, reading in readings.items():
            operations[name] = reading.count_operations(counted[name]) / stride
    results = []
    for name, reading in readings.items():
        if reading.skipped_chunks:
            raise ValueError(f"row {name!r} skipped chunks, whose times differ: lower its rate")
        kept = {key: values[first:] for key, values in reading.turns.items()}
        results.append(
            {
                "row": name,
                "parameters": reading.parameters,
                "operations": operations[name],
                "writing_processor_seconds": writing if reading.has_anchor else 0.0,
                **kept,
            }
        )
    return results


# ---------------------------------------------------------------------- memory


def measure_peak(
    load: Callable[[], PreTrainedModel], row: Row, common: Mapping[str, Any], ids: torch.Tensor
) -> int | None:
    """Return the peak memory of a reading above the loaded model, in bytes, in this process."""
    base = load()
    base.requires_grad_(False)
    peak = PeakMemory(base.device)
    before = peak.read()
    with row.open(base, common) as trainer:
        for _ in trainer.read(ids):
            pass
    after = peak.read()
    if before is None or after is None:
        return None
    return after - before


def measure_peaks(
    load: Callable[[], PreTrainedModel],
    rows: Sequence[Row],
    common: Mapping[str, Any],
    ids: torch.Tensor,
) -> dict[str, int | None]:
    """Return each row's peak memory above the loaded model.

    Each row reads in a process of its own: freed memory stays with a process.

    Args:
        load: loads the model; a function of a module.
        rows: of `time_rows`.
        common: the settings that all rows share.
        ids: LongTensor [T], the text that is read.
    """
    peaks = {}
    context = multiprocessing.get_context("spawn")
    threads = torch.get_num_threads()
    for row in rows:
        # A pool for each row: it would give the next row the same process.
        with ProcessPoolExecutor(1, context, _prepare_process, (threads,)) as pool:
            peaks[row.name] = pool.submit(measure_peak, load, row, common, ids).result()
    return peaks


def _load_model(model: str, dtype: str, device: str) -> PreTrainedModel:
    base, _ = load_base(model, dtype, device)
    return base


def _prepare_process(threads: int) -> None:
    warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated")
    torch.set_num_threads(threads)


# ---------------------------------------------------------------------- the table


def _list_rows(bench: Bench) -> list[Row]:
    rows = [AGAIN, NONE, DEFAULT_LORA]
    if not bench.is_gated:
        return [*rows, *two_layer_rows()]
    return [*rows, LOCAS, locas(name="Locas r=64, without the anchor", anchor=0.0), NARROW]


def _make_unit(bench: Bench) -> Unit:
    ids = bench.document(SWEEP_BOOK, bench.scale.timed_tokens)
    rows = _list_rows(bench)

    def measure(unit: Unit) -> dict[str, Any]:
        results = time_rows(bench, rows, ids)
        load = partial(_load_model, bench.model, bench.dtype, bench.device)
        peaks = measure_peaks(load, rows, bench.common, ids[: len(ids) // 2])
        for result in results:
            result["peak_bytes"] = peaks[result["row"]]
        return {"rows": results}

    about = {"row": "all", "document": SWEEP_BOOK, "tokens": len(ids), "settings": bench.common}
    return bench.unit("time/rows.json", about, measure)


def fill(bench: Bench) -> None:
    """Time the rows side by side, and measure the peak memory of each in its own process."""
    bench.run([_make_unit(bench)])


def tabulate(bench: Bench) -> str:
    """Return the ratios to both rows without a memory and to TempLoRA."""
    result = bench.load(_make_unit(bench))
    if result is None:
        return ""
    rows = result["figures"]["rows"]
    by_name = {row["row"]: row for row in rows}
    references = [by_name[name] for name in (AGAIN.name, NONE.name, DEFAULT_LORA.name)]
    lines = []
    for row in rows:
        cells = [row["row"], f"{row['parameters']:,}"]
        for reference in references:
            cells.append(format_ratio(row, reference, "processor_seconds"))
        cells.append(_format_first_reading(row, references[-1]))
        cells.append(format_ratio(row, references[0], "seconds"))
        cells.append(f"{row['operations'] / references[1]['operations']:.2f}")
        peak = row["peak_bytes"]
        cells.append("-" if peak is None else f"{peak / 2**30:.2f}")
        lines.append(cells)
    head = [
        "",
        "parameters",
        "processor time / window read again",
        "/ no memory",
        "/ TempLoRA",
        "the same, with the anchor's texts written",
        "wall time / window read again",
        "operations / no memory",
        "peak above the model, GiB",
    ]
    note = (
        f"{bench.scale.timed_tokens:,} tokens of book {SWEEP_BOOK}, the rows in turn, {TURN_CHUNKS} "
        "chunks a turn: the median of a turn's ratio and its quartiles. Peak memory over half of "
        "the text, each row in its own process."
    )
    parts = [note, make_table(head, lines)]
    if bench.is_gated:
        parts.append(PAPER_NOTE)
    return "\n\n".join(parts)


def _format_first_reading(row: dict[str, Any], reference: dict[str, Any]) -> str:
    """Return the ratio of processor times where a row's anchor has to write its texts."""
    writing = row.get("writing_processor_seconds")
    if writing is None:
        return "-"
    key = "processor_seconds"
    return format_ratio({key: [seconds + writing for seconds in row[key]]}, reference, key)


def format_ratio(row: dict[str, Any], reference: dict[str, Any], key: str) -> str:
    """Return the median of the turns' ratios of two rows, and their quartiles."""
    ratios = [own / other for own, other in zip(row[key], reference[key], strict=True)]
    low, middle, high = statistics.quantiles(ratios, method="inclusive")
    if low == high:
        return f"{middle:.2f}"
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"
