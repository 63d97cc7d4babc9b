"""Other ways to adapt while reading, in the same loop, each at the best rate of its own sweep.

PEFT's LoRA, DoRA, CARTRIDGE, prefix tuning, IA3 and norm tuning, and dynamic evaluation of all
weights in its RMS form (Krause et al., arXiv:1709.07432).

Axes: T tokens, N tokens scored, V vocabulary.
"""

import ctypes
import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measuring import make_table
from peft import (
    CartridgeConfig,
    IA3Config,
    LNTuningConfig,
    LoraConfig,
    PeftConfig,
    PrefixTuningConfig,
    get_peft_model,
)
from peft.tuners.cartridge.utils import initialize_kv_prefix_from_past_key_values
from torch import Tensor, nn

from locas_peft import TestTimeTrainer
from locas_peft.evaluation import Unit
from locas_peft.evaluation.drift import Piece
from locas_peft.evaluation.intervals import mean_interval
from locas_peft.model import CausalLM, divergences
from locas_peft.stages import PeakMemory
from locas_peft.tables import format_mean
from locas_peft.text import digest_ids
from locas_peft.tuner.modules import remember_modules

from .bench import LONG_BOOKS, SWEEP_BOOK, Bench, compare_chunks, describe_chunk
from .rows import GAINS, NARROW_GAINS, Row, locas, lora
from .sweep import LOCAS_RATES, LORA_RATES, find_best

__all__ = [
    "BASELINES",
    "Baseline",
    "choose_rate",
    "fill",
    "list_fitting",
    "list_gain_rows",
    "load_results",
    "make_unit",
    "measure_kl",
    "open_adapter",
    "open_row",
    "tabulate",
    "training_fields",
]

BOOK = LONG_BOOKS[0]
START_BOOK = LONG_BOOKS[1]
"""Whose beginning CARTRIDGE's prefix begins with: neither the sweep nor the reading is of it."""
# As many parameters as a Locas memory of r=16 has on Qwen2.5 0.5B.
VIRTUAL_TOKENS = 160
DECAY = 1e-3
"""Dynamic evaluation's pull to the first weights a step."""

Open = Callable[[Bench, float | None], Any]
"""Attach a method to the bench's base within a context, at a rate; yields its trainer."""


@dataclass(frozen=True)
class Baseline:
    """A method of the table.

    Args:
        name: in the table.
        open: attaches it within a context, and yields the trainer.
        rates: the learning rates of its sweep; none for the base alone.
        needs_gated: whether it fits gated FFNs alone.
    """

    name: str
    open: Open
    rates: Sequence[float] = ()
    needs_gated: bool = False


# ---------------------------------------------------------------------- how each one is attached


def open_row(make_row: Callable[[float | None], Row], bench: Bench, rate: float | None) -> Any:
    return make_row(rate).open(bench.base, bench.common)


def _none(rate: float | None) -> Row:
    return Row("no memory", "none")


@contextmanager
def open_adapter(
    make_config: Callable[[], PeftConfig], bench: Bench, rate: float | None
) -> Iterator[TestTimeTrainer]:
    """Attach an adapter of PEFT in the layers."""
    restore = remember_modules(bench.base)
    torch.manual_seed(0)
    try:
        model = get_peft_model(bench.base, make_config())
        yield TestTimeTrainer(model, **training_fields(bench, rate))
    finally:
        restore()


@contextmanager
def _open_norms(bench: Bench, rate: float | None) -> Iterator[TestTimeTrainer]:
    """Train the weights of all normalisation layers (PEFT's LayerNorm tuning)."""
    targets = set()
    for name, module in bench.base.named_modules():
        if type(module).__name__.endswith("Norm"):
            targets.add(name.rpartition(".")[2])
    config = LNTuningConfig(target_modules=sorted(targets), task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        # PEFT does not know the classes of RMS norms.
        warnings.filterwarnings("ignore", message="Unsupported layer type")
        with open_adapter(lambda: config, bench, rate) as trainer:
            yield trainer


def training_fields(bench: Bench, rate: float | None) -> dict[str, Any]:
    """Return the fields of a reading that the rows of the other tables have by default."""
    return {**bench.common, "learning_rate": rate, "decay_steps": 100, "context": "cache"}


class PrefixModel(nn.Module):
    """A base with a prefix of trained keys and values before each window.

    PEFT's model of a prompt method, with the interface of a transformers model.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.config = model.get_base_model().config

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_base_model().get_input_embeddings()

    def forward(self, input_ids: Tensor, logits_to_keep: int | Tensor = 0) -> Any:
        return self.model(input_ids=input_ids, logits_to_keep=logits_to_keep)


@contextmanager
def _open_prefix(
    make_config: Callable[[], PeftConfig], from_text: bool, bench: Bench, rate: float | None
) -> Iterator[TestTimeTrainer]:
    """Attach a prefix. Each window is read again: the prefix stands before its first token.

    Args:
        make_config: of CARTRIDGE or prefix tuning.
        from_text: whether the first keys and values are those of `START_BOOK`'s beginning.
    """
    torch.manual_seed(0)
    model = get_peft_model(bench.base, make_config())
    if from_text:
        ids = bench.document(START_BOOK, VIRTUAL_TOKENS)[None].to(bench.base.device)
        with torch.no_grad():
            cache = bench.base(ids, use_cache=True).past_key_values
        initialize_kv_prefix_from_past_key_values(model, past_key_values=cache)
    parameters = [weight for weight in model.prompt_encoder.parameters() if weight.requires_grad]
    fields = {**training_fields(bench, rate), "context": "recompute"}
    yield TestTimeTrainer(PrefixModel(model), parameters=parameters, **fields)


class DynamicEvaluation(torch.optim.Optimizer):
    """RMS dynamic evaluation (arXiv:1709.07432, section 4), with weights kept in float32.

    p <- p - lr g / (s + mean of s) + decay (p0 - p) min(s / mean of s, 1 / decay)

    Here s is the root of the mean square of a weight's gradients on another text. While `lr` is 0,
    steps only collect it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, decay: float):
        super().__init__(parameters, {"lr": lr})
        self._decay = decay
        self._steps = 0
        self._roots: list[Tensor] = []
        self._mean = 0.0
        self._held = self.param_groups[0]["params"]
        # In bfloat16 most steps are smaller than half of a weight's last bit.
        self._weights = [parameter.detach().float().clone() for parameter in self._held]
        self._starts = [parameter.detach().clone() for parameter in self._held]
        self._squares = [torch.zeros_like(weight) for weight in self._weights]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        rate = self.param_groups[0]["lr"]
        if rate == 0:
            self._steps += 1
            for square, parameter in zip(self._squares, self._held, strict=True):
                square.addcmul_(parameter.grad.float(), parameter.grad.float())
            return
        if not self._roots:
            self._find_roots()
        for parameter, weight, start, root in zip(
            self._held, self._weights, self._starts, self._roots, strict=True
        ):
            weight.sub_(rate * parameter.grad.float() / (root + self._mean))
            pull = self._decay * (root / self._mean).clamp(max=1 / self._decay)
            weight.add_(pull * (start.float() - weight))
            parameter.copy_(weight)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the first weights back."""
        for parameter, start in zip(self._held, self._starts, strict=True):
            parameter.copy_(start)

    def _find_roots(self) -> None:
        total = 0.0
        count = 0
        for square in self._squares:
            root = square.div_(self._steps).sqrt_()
            total += root.double().sum().item()
            count += root.numel()
            self._roots.append(root)
        self._mean = total / count


@contextmanager
def _open_dynamic(bench: Bench, rate: float | None) -> Iterator[TestTimeTrainer]:
    """Train all weights of the base; the mean squares are those on the training book."""
    parameters = list(bench.base.parameters())
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = DynamicEvaluation(parameters, 0.0, DECAY)
    fields = {**training_fields(bench, None), "decay_steps": 0, "warmup_steps": 0}
    options = {"parameters": parameters, "optimizer": lambda _: optimizer, **fields}
    try:
        statistics = TestTimeTrainer(bench.base, **options)
        ids = bench.document(SWEEP_BOOK, min(bench.scale.sweep_tokens, 4_096))
        for _ in statistics.read(ids):
            pass
        optimizer.param_groups[0]["lr"] = rate
        yield TestTimeTrainer(bench.base, **options)
    finally:
        optimizer.restore()
        bench.base.requires_grad_(False)


def _dora() -> PeftConfig:
    return LoraConfig(
        r=16, lora_alpha=16, use_dora=True, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def _cartridge() -> PeftConfig:
    return CartridgeConfig(num_virtual_tokens=VIRTUAL_TOKENS, task_type="CAUSAL_LM")


def _prefix() -> PeftConfig:
    return PrefixTuningConfig(num_virtual_tokens=VIRTUAL_TOKENS, task_type="CAUSAL_LM")


# Fewer parameters have their best rate higher.
SMALL_LORA_RATES = (1e-3, 3e-4, 3e-3)
HIGH_RATES = (3e-2, 1e-2, 1e-1)


def list_gain_rows(rates: Sequence[float]) -> list[Baseline]:
    """Return memories of two widths with gains, each at some learning rates."""
    rows = []
    for row in (GAINS, NARROW_GAINS):
        open_gains = partial(open_row, partial(locas, row.given["r"], gains=True))
        rows.append(Baseline(row.name, open_gains, rates, True))
    return rows


BASELINES = [
    Baseline("no memory", partial(open_row, _none)),
    Baseline("TempLoRA r=64", partial(open_row, partial(lora, 64)), LORA_RATES[:3]),
    Baseline("LoRA r=16", partial(open_row, partial(lora, 16)), SMALL_LORA_RATES),
    Baseline("LoRA r=4", partial(open_row, partial(lora, 4)), SMALL_LORA_RATES),
    Baseline("DoRA r=16", partial(open_adapter, _dora), SMALL_LORA_RATES),
    Baseline("CARTRIDGE, from text", partial(_open_prefix, _cartridge, True), HIGH_RATES),
    Baseline("CARTRIDGE, random", partial(_open_prefix, _cartridge, False), HIGH_RATES),
    Baseline("prefix tuning", partial(_open_prefix, _prefix, False), HIGH_RATES),
    Baseline(
        "IA3",
        partial(open_adapter, partial(IA3Config, task_type="CAUSAL_LM")),
        HIGH_RATES,
    ),
    Baseline("norm tuning", _open_norms, HIGH_RATES),
    Baseline("dynamic evaluation of all weights", _open_dynamic, (1e-5, 3e-6, 3e-5)),
    Baseline("Locas r=64", partial(open_row, partial(locas, 64)), LOCAS_RATES[:3], True),
    Baseline("Locas r=16", partial(open_row, partial(locas, 16)), LOCAS_RATES[:3], True),
    *list_gain_rows(LOCAS_RATES[:3]),
]


# ---------------------------------------------------------------------- what is measured


@torch.inference_mode()
def list_logits(model: nn.Module, pieces: Sequence[Piece]) -> list[Tensor]:
    """Return the logits [N, V] at the scored tokens of each piece."""
    host = CausalLM(model)
    logits = []
    for ids, scored in pieces:
        read = ids[None, :-1].to(host.device)
        logits.append(host.logits(read, scored, use_cache=False)[0].clone())
    return logits


@torch.inference_mode()
def measure_kl(
    model: nn.Module, pieces: Sequence[Piece], references: Sequence[Tensor]
) -> list[float]:
    """Return the mean KL a token of each piece, from the reference's distributions, in nats."""
    values = []
    for logits, reference in zip(list_logits(model, pieces), references, strict=True):
        values.append(divergences(logits, reference).double().mean().item())
    return values


def _return_freed_memory() -> None:
    """Give freed memory back to the system, so that the next row's peak is its own."""
    gc.collect()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def make_unit(
    bench: Bench, baseline: Baseline, rate: float | None, document: str, tokens: int, folder: str
) -> Unit:
    """Return the unit of one reading: perplexity, cost, and drift on the base's own answers."""
    ids = bench.document(document, tokens)
    about = {
        "row": baseline.name,
        "document": document,
        "text_sha256": digest_ids(ids),
        "settings": {**bench.common, "learning_rate": rate},
    }

    def measure(unit: Unit) -> dict[str, Any]:
        pieces = bench.own_answers
        references = list_logits(bench.base, pieces)
        _return_freed_memory()
        peak = PeakMemory(bench.base.device)
        before = peak.read()
        with baseline.open(bench, rate) as trainer:
            began = time.process_time()
            chunks = list(trainer.read(ids))
            seconds = time.process_time() - began
            after = peak.read()
            kls = measure_kl(trainer.model, pieces, references)
            parameters = sum(weight.numel() for weight in trainer.learner.parameters())
        above = None if before is None or after is None else after - before
        return {
            "perplexity": trainer.perplexity,
            "parameters": parameters,
            "processor_seconds": seconds,
            "peak_bytes": above,
            "own_answers_kl": kls,
            "skipped_chunks": trainer.skipped_chunks,
            "chunks": [describe_chunk(chunk) for chunk in chunks],
        }

    name = baseline.name.replace(" ", "-").replace(",", "")
    path = f"{folder}/{document}-{len(ids)}/{name}-{rate}.json"
    return bench.unit(path, about, measure, size=len(ids))


def choose_rate(
    bench: Bench, baseline: Baseline, folder: str, tokens: int, make: bool
) -> float | None:
    """Return a method's rate with the lowest perplexity; None where a reading is missing.

    Args:
        tokens: of the training book that is read at each rate.
        make: whether the readings that are missing are made.
    """
    units = {}
    for rate in baseline.rates[: bench.scale.rates]:
        units[rate] = make_unit(bench, baseline, rate, SWEEP_BOOK, tokens, folder)
    if make:
        bench.run(list(units.values()))
    return find_best(units)


def list_fitting(bench: Bench, baselines: Sequence[Baseline]) -> list[Baseline]:
    """Return the methods that fit the host."""
    return [row for row in baselines if bench.is_gated or not row.needs_gated]


def fill(bench: Bench) -> None:
    """Sweep each method's rate on the training book, and read a book at the best one."""
    scale = bench.scale
    for baseline in list_fitting(bench, BASELINES):
        rate = None
        if baseline.rates:
            rate = choose_rate(bench, baseline, "baselines", scale.baseline_sweep_tokens, make=True)
        bench.run([make_unit(bench, baseline, rate, BOOK, scale.baseline_tokens, "baselines")])


def load_results(
    bench: Bench,
    baselines: Sequence[Baseline],
    folder: str,
    sweep_tokens: int,
    document: str,
    tokens: int,
) -> dict[str, tuple[float | None, dict[str, Any]]]:
    """Return the best rate, and the result of a document at it, of each method that has both.

    Args:
        baselines: the methods.
        folder: of their results.
        sweep_tokens: of the training book, on which rates are chosen.
        document, tokens: what is read at the best rate.
    """
    results = {}
    for baseline in list_fitting(bench, baselines):
        rate = None
        if baseline.rates:
            rate = choose_rate(bench, baseline, folder, sweep_tokens, make=False)
            if rate is None:
                continue
        result = bench.load(make_unit(bench, baseline, rate, document, tokens, folder))
        if result is not None:
            results[baseline.name] = (rate, result)
    return results


def tabulate(bench: Bench) -> str:
    """Return the table: gain, its share of LoRA's, parameters, cost, drift."""
    scale = bench.scale
    results = load_results(
        bench,
        BASELINES,
        "baselines",
        scale.baseline_sweep_tokens,
        BOOK,
        scale.baseline_tokens,
    )
    if "no memory" not in results:
        return ""
    _, none = results["no memory"]
    whole = None
    if "TempLoRA r=64" in results:
        whole = -compare_chunks(results["TempLoRA r=64"][1], none)["mean"]
    lines = []
    for name, (rate, result) in results.items():
        figures = result["figures"]
        gain = compare_chunks(none, result)
        share = "-" if whole is None else f"{gain['mean'] / whole:.2f}"
        peak = figures["peak_bytes"]
        lines.append(
            [
                name,
                "-" if rate is None else f"{rate:g}",
                f"{figures['parameters']:,}",
                f"{figures['perplexity']:.3f}",
                format_mean(gain, 4),
                share,
                f"{figures['processor_seconds']:,.0f}",
                "-" if peak is None else f"{peak / 2**30:.2f}",
                format_mean(mean_interval(figures["own_answers_kl"]), 4),
            ]
        )
    head = ["", "rate", "parameters", "perplexity", "gain, nats a token", "share of TempLoRA's"]
    head += ["processor time, s", "peak above the model, GiB", "KL on own answers"]
    note = (
        f"The first {bench.scale.baseline_tokens:,} tokens of book {BOOK}, each method at the best "
        f"of its rates on {bench.scale.baseline_sweep_tokens:,} tokens of training book {SWEEP_BOOK}. "
        "A prefix stands before each window, which is read again; the other methods keep the "
        "context's keys and values. Gains are paired with no memory by chunks."
    )
    return f"{note}\n\n{make_table(head, lines)}"
