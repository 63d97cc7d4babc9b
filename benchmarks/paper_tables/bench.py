"""What the tables share: the host, the data, the folder of results, and the reading of a book."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from measuring import describe_machine

from locas_peft import backbone
from locas_peft.bases import load_base
from locas_peft.evaluation import Unit, run_units
from locas_peft.evaluation.drift import Piece, write_own_answers
from locas_peft.evaluation.intervals import Interval, mean_interval
from locas_peft.files import load_json, write_json
from locas_peft.model import count_positions
from locas_peft.stages import Place, ReadSettings, complete, read
from locas_peft.text import digest_ids, load_text, tokenize, unwrap
from locas_peft.tuner import find_ffns

from .rows import Row
from .scales import Scale

__all__ = [
    "LONG_BOOKS",
    "SHORT_BOOKS",
    "SWEEP_BOOK",
    "UNREAD_BOOK",
    "Bench",
    "choose_window",
    "compare_chunks",
    "describe_chunk",
    "find_nats",
]

SWEEP_BOOK = "2118"
"""The training book on which learning rates are chosen; it reports nothing."""
LONG_BOOKS = ("3649", "36235")
SHORT_BOOKS = (*LONG_BOOKS, "5274", "17769", "28345", "36087")
"""The books over which intervals are taken: the first three were held out by the embedded models,
the others were not used to choose any setting. What a host has read before is not known."""
UNREAD_BOOK = "5274"


class Bench:
    """A host, its data, and the folder of one run's results.

    Args:
        model: a folder, a name on the hub, a GGUF file, or an embedded backbone.
        data: the folder of the data sets (see `benchmarks/README.md`).
        out: the results are in `out / host / scale`.
        scale: how much is read and asked.
        device, dtype: as for `load_base`.
        preset: of all readings whose row names none; the results of "paper" have a folder of their
            own.

    Attributes:
        common: the settings that all rows of the tables share.
        compiled: whether readings that are timed go through `torch.compile`.
    """

    compiled = False

    def __init__(
        self,
        model: str,
        data: Path,
        out: Path,
        scale: Scale,
        device: str = "auto",
        dtype: str = "auto",
        preset: str = "tuned",
    ):
        self.model = model
        self.host = Path(backbone.name_of(model)).name
        self.data = data
        self.scale = scale
        self.preset = preset
        name = scale.name if preset == "tuned" else f"{scale.name}-{preset}"
        self.folder = out / self.host / name
        self.dtype = dtype
        self.device = device
        self.base, self.tokenizer = load_base(model, dtype, device)
        self.base.requires_grad_(False).eval()
        self.common = choose_window(scale, count_positions(self.base))
        if backbone.is_embedded(model):
            # They were trained on windows of this length.
            self.common = {"window": 512, "stride": 256}
        # A book is tokenized once.
        self._ids = cache(self._load_ids)

    @property
    def lora_rate(self) -> float | None:
        """TempLoRA's best learning rate, where an earlier sweep found it; kept with the results."""
        if not self._rate_file.exists():
            return None
        return load_json(self._rate_file)["lora_rate"]

    @lora_rate.setter
    def lora_rate(self, rate: float) -> None:
        known = self.lora_rate
        if known not in (None, rate):
            got = f"{known:g} in {str(self._rate_file)!r}, not {rate:g}"
            raise ValueError(f"the results have --lora-rate {got}: choose another --out")
        if known is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self._rate_file, {"lora_rate": rate})

    @property
    def _rate_file(self) -> Path:
        return self.folder / "lora-rate.json"

    @cached_property
    def is_gated(self) -> bool:
        """Whether the host's FFNs are gated."""
        return all(ffn.gated for ffn in find_ffns(self.base).values())

    def _load_ids(self, document: str) -> torch.Tensor:
        """Return all tokens of a book, LongTensor [T]."""
        paths = [self.data / "pg19" / part / f"{document}.txt" for part in ("eval", "train")]
        for path in paths:
            if path.exists():
                text = load_text(path)
                if backbone.is_embedded(self.model):
                    text = unwrap(text)
                return tokenize(self.tokenizer, text)
        where = f"{str(paths[0])!r} or {str(paths[1])!r}"
        raise FileNotFoundError(f"--data must hold the book {document}, got no {where}: add it")

    def document(self, name: str, tokens: int) -> torch.Tensor:
        """Return the first tokens of a book, LongTensor [T]."""
        return self._ids(name)[:tokens]

    def describe(self) -> dict[str, Any]:
        """Return where a result comes from: host, commit, machine and date."""
        return {
            "host": self.host,
            "dtype": self.dtype_name,
            "date": date.today().isoformat(),
            "machine": describe_machine(self.base.device),
        }

    @property
    def dtype_name(self) -> str:
        """The dtype that the base has, such as "bfloat16"."""
        return str(self.base.dtype).removeprefix("torch.")

    @cached_property
    def own_answers(self) -> list[Piece]:
        """What the base without a memory answers to everyday questions.

        The answers are kept with the results: those that another process writes can differ, since
        sums in floating point do.
        """
        file = self.folder / "own-answers.json"
        if not file.exists():
            written = write_own_answers(self.base, self.tokenizer)
            records = [{"ids": ids.tolist(), "scored": scored} for ids, scored in written]
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, records)
        return [(torch.tensor(record["ids"]), record["scored"]) for record in load_json(file)]

    # ------------------------------------------------------------------ units

    def run(self, units: Sequence[Unit]) -> None:
        """Make the results that do not exist."""
        run_units(units)

    def unit(
        self,
        path: str,
        about: Mapping[str, Any],
        measure: Callable[[Unit], dict[str, Any]],
        needs: Unit | None = None,
        size: int = 1,
    ) -> Unit:
        """Return a unit whose result has one form for all tables.

        The result is `{**about, "figures": ..., **describe()}`. A result that exists and is about
        something else is a `ValueError`.

        Args:
            path: of the result, in the folder of the run.
            about: what names the row: text, settings, seed, as JSON values.
            measure: given the unit, returns the figures.
            needs, size: see `Unit`.
        """
        file = self.folder / path

        def make() -> dict[str, Any]:
            figures = measure(unit)
            print(f"{path}: {_summarize(figures)}", flush=True)
            return {**about, "figures": figures, **self.describe()}

        unit = Unit(file, make, needs=needs, size=size)
        if file.exists():
            recorded = load_json(file)
            for name, value in {**about, "dtype": self.dtype_name}.items():
                if _drop_empty(recorded.get(name)) != _drop_empty(value):
                    got = f"{name} {recorded.get(name)!r} in {str(file)!r}, not {value!r}"
                    raise ValueError(f"the results have {got}: choose another --out")
        return unit

    def reading(self, row: Row, document: str, tokens: int, seed: int = 0) -> Unit:
        """Return the unit of one reading: the first tokens of a book, with a fresh adapter.

        Its memory stays in the unit's folder. An interrupted reading goes on inside the book.
        """
        ids = self.document(document, tokens)
        settings = self.settings(row, seed)
        slug = self.name_file(row)
        about = {
            "row": slug,
            "document": document,
            "text_sha256": digest_ids(ids),
            "settings": {name: value for name, value in vars(settings).items() if name != "model"},
        }

        def measure(unit: Unit) -> dict[str, Any]:
            steps: list[Any] = []
            was_begun = unit.checkpoint.is_dir() and any(unit.checkpoint.iterdir())
            place = Place(out=unit.memory, checkpoint_dir=unit.checkpoint, resume=True)
            began = time.process_time()
            record = read(
                self.base,
                ids,
                settings,
                place,
                tokenizer=self.tokenizer,
                on_step=steps.append,
            )
            seconds = None if was_begun else time.process_time() - began
            return {
                "perplexity": record.perplexity,
                "scored_tokens": record.scored_tokens,
                "parameters": record.extra_parameters,
                "skipped_chunks": record.skipped_chunks,
                "seconds": record.seconds,
                "processor_seconds": seconds,
                "chunks": [describe_chunk(step) for step in steps],
            }

        path = f"readings/{document}-{len(ids)}/{slug}-seed{seed}.json"
        return self.unit(path, about, measure, size=len(ids))

    def settings(self, row: Row, seed: int = 0) -> ReadSettings:
        """Return the complete settings of a row's reading."""
        return complete(row.settings({"preset": self.preset, **self.common}, seed), self.base)

    def name_file(self, row: Row) -> str:
        """Return a row's name as that of a file: the settings that are not the method's own.

        Two rows with the same settings share their results.
        """
        settings = vars(self.settings(row))
        usual = vars(self.settings(Row("", row.method)))
        parts = [row.method]
        for name, value in settings.items():
            if value != usual[name]:
                parts.append(f"{name}={value}")
        return re.sub(r"[^\w.=-]+", "_", "_".join(parts))

    # ------------------------------------------------------------------ comparisons

    def load(self, unit: Unit) -> dict[str, Any] | None:
        """Return a unit's result; None where it has not been made."""
        if not unit.is_finished:
            return None
        return unit.load()


def choose_window(scale: Scale, positions: int | None) -> dict[str, int]:
    """Return the window and the stride of a scale, within a host's positions, if these end."""
    window = min(scale.window, positions or scale.window)
    return {"window": window, "stride": min(scale.stride, max(window // 2, 1))}


def _drop_empty(value: Any) -> Any:
    """Return settings without those of None: results from before a setting existed lack it."""
    if not isinstance(value, dict):
        return value
    return {name: entry for name, entry in value.items() if entry is not None}


def describe_chunk(step: Any) -> list[float]:
    """Return of a chunk: the tokens read so far, the tokens scored, and their nll in nats."""
    return [step.stop, step.tokens, round(step.nll_nats, 4)]


def _summarize(figures: dict[str, Any]) -> str:
    """Return the plain numbers among figures, and how many answers are right, to be printed."""
    parts = []
    for name, value in figures.items():
        if isinstance(value, (int, float)):
            parts.append(f"{name} {value:.6g}")
        elif name == "right":
            parts.append(f"{sum(value)} of {len(value)} right")
    return ", ".join(parts)


def find_nats(result: dict[str, Any], tokens: int | None = None) -> tuple[list[float], list[int]]:
    """Return of each chunk of a reading its nats and its tokens, up to a number of tokens read."""
    nats = []
    counts = []
    for stop, count, nll in result["figures"]["chunks"]:
        if tokens is None or stop <= tokens:
            nats.append(nll)
            counts.append(count)
    return nats, counts


def compare_chunks(
    result: dict[str, Any], other: dict[str, Any], tokens: int | None = None
) -> Interval:
    """Return the mean difference of two readings in nats a token, paired by chunks."""
    nats, counts = find_nats(result, tokens)
    other_nats, _ = find_nats(other, tokens)
    differences = []
    for mine, theirs, count in zip(nats, other_nats, counts, strict=True):
        differences.append((mine - theirs) / count)
    return mean_interval(differences)
