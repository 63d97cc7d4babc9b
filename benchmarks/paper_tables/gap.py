"""Where LoRA's gain beyond a memory's lies: which projections, which width, which parts train.

Experiments on a training book, which reports nothing: each row at the best of its rates there.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from measuring import make_table
from peft import IA3Config, LoraConfig, PeftConfig, get_peft_model, inject_adapter_in_model
from torch import nn

from locas_peft import LocasConfig, TestTimeTrainer
from locas_peft.evaluation.intervals import mean_interval
from locas_peft.tables import format_mean
from locas_peft.tuner.modules import remember_modules

from .baselines import (
    Baseline,
    choose_rate,
    list_fitting,
    list_gain_rows,
    load_results,
    make_unit,
    open_adapter,
    open_row,
    training_fields,
)
from .bench import SWEEP_BOOK, Bench, compare_chunks
from .rows import Row, locas, lora
from .sweep import LOCAS_RATES, LORA_RATES

__all__ = ["fill", "tabulate"]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FFN = ["gate_proj", "up_proj", "down_proj"]
# Adapters beside a memory, and their learning rates as multiples of the memory's.
OUTPUT_LORA = LoraConfig(r=16, lora_alpha=16, target_modules=["o_proj"])
LORA_SHARE = 3e-4 / 4e-3
# A factor for each neuron of the host.
DOWN_IA3 = IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"])
IA3_SHARE = 3.0


def _lora_on(targets: list[str]) -> PeftConfig:
    return LoraConfig(r=64, lora_alpha=64, target_modules=targets, task_type="CAUSAL_LM")


def _is_value(name: str) -> bool:
    return "locas_down" in name


@contextmanager
def _open_values(bench: Bench, rate: float | None) -> Iterator[TestTimeTrainer]:
    """Attach a memory whose cloned rows stay as they are: its values alone are trained."""
    with locas(64, rate, anchor=0.0).open(bench.base, bench.common) as trainer:
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad and not _is_value(name):
                parameter.requires_grad_(False)
        yield TestTimeTrainer(trainer.model, **training_fields(bench, rate))


@contextmanager
def _open_beside(
    beside: PeftConfig, share: float, r: int, bench: Bench, rate: float | None
) -> Iterator[TestTimeTrainer]:
    """Attach a memory of width `r` beside each FFN, and another adapter in the same model.

    Args:
        beside: of the other adapter.
        share: its learning rate, as a multiple of the memory's.
    """
    restore = remember_modules(bench.base)
    torch.manual_seed(0)
    try:
        inject_adapter_in_model(beside, bench.base, adapter_name="beside")
        with warnings.catch_warnings():
            # PEFT warns of a second adapter in the model.
            warnings.simplefilter("ignore", UserWarning)
            model = get_peft_model(bench.base, LocasConfig(r=r, task_type="CAUSAL_LM"))
        trained = [weight for name, weight in model.named_parameters() if _is_adapter(name)]
        for weight in trained:
            weight.requires_grad_(True)
        fields = training_fields(bench, rate)
        optimizer = partial(_two_rates, model, rate, share)
        yield TestTimeTrainer(model, parameters=trained, optimizer=optimizer, **fields)
    finally:
        restore()


def _is_beside(name: str) -> bool:
    return "lora_" in name or "ia3_" in name


def _is_adapter(name: str) -> bool:
    parts = ("locas_gate", "locas_up", "locas_down")
    return _is_beside(name) or any(part in name for part in parts)


def _two_rates(
    model: nn.Module, rate: float, share: float, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Make AdamW with `rate` for the memory, and a multiple of it for the other adapter."""
    own = []
    others = []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            (others if _is_beside(name) else own).append(weight)
    groups = [{"params": own, "lr": rate}, {"params": others, "lr": rate * share}]
    return torch.optim.AdamW(groups, weight_decay=0.0)


def _without_anchor(rate: float | None) -> Row:
    return locas(64, rate, anchor=0.0)


ROWS = [
    Baseline("no memory", partial(open_row, lambda rate: Row("no memory", "none"))),
    Baseline("LoRA r=64", partial(open_row, partial(lora, 64)), LORA_RATES[:2]),
    Baseline("LoRA r=16", partial(open_row, partial(lora, 16)), LORA_RATES[:2]),
    Baseline(
        "LoRA r=64, attention alone",
        partial(open_adapter, partial(_lora_on, ATTENTION)),
        LORA_RATES[:2],
    ),
    Baseline("LoRA r=64, FFN alone", partial(open_adapter, partial(_lora_on, FFN)), LORA_RATES[:2]),
    Baseline(
        "LoRA r=64, gate and up alone",
        partial(open_adapter, partial(_lora_on, FFN[:2])),
        LORA_RATES[:2],
    ),
    Baseline(
        "LoRA r=64, down alone",
        partial(open_adapter, partial(_lora_on, FFN[2:])),
        LORA_RATES[:2],
    ),
    Baseline("Locas r=64", partial(open_row, partial(locas, 64)), LOCAS_RATES[:3], True),
    Baseline("Locas r=256", partial(open_row, partial(locas, 256)), (4e-3, 2e-3), True),
    Baseline(
        "Locas r=64, without the anchor", partial(open_row, _without_anchor), LOCAS_RATES[:1], True
    ),
    *list_gain_rows(LOCAS_RATES[:1]),
    Baseline("Locas r=64, values alone", _open_values, (4e-3, 8e-3), True),
    Baseline(
        "Locas r=64 and LoRA r=16 on attention's output",
        partial(_open_beside, OUTPUT_LORA, LORA_SHARE, 64),
        LOCAS_RATES[:1],
        True,
    ),
    Baseline(
        "Locas r=64 and IA3 on the down projections",
        partial(_open_beside, DOWN_IA3, IA3_SHARE, 64),
        LOCAS_RATES[:1],
        True,
    ),
    Baseline(
        "Locas r=16 and IA3 on the down projections",
        partial(_open_beside, DOWN_IA3, IA3_SHARE, 16),
        LOCAS_RATES[:1],
        True,
    ),
    Baseline(
        "Locas r=64, upper half of the layers",
        partial(open_row, partial(locas, 64, layers_to_transform="upper")),
        LOCAS_RATES[:1],
        True,
    ),
]


def fill(bench: Bench) -> None:
    """Read the training book with each row at each of its rates."""
    tokens = bench.scale.sweep_tokens
    for row in list_fitting(bench, ROWS):
        if row.rates:
            choose_rate(bench, row, "gap", tokens, make=True)
        else:
            bench.run([make_unit(bench, row, None, SWEEP_BOOK, tokens, "gap")])


def tabulate(bench: Bench) -> str:
    """Return each row's gain at its best rate, its difference from the memory, and its KL."""
    tokens = bench.scale.sweep_tokens
    results = load_results(bench, ROWS, "gap", tokens, SWEEP_BOOK, tokens)
    if "no memory" not in results:
        return ""
    _, none = results["no memory"]
    _, memory = results.get("Locas r=64", (None, None))
    lines = []
    for name, (rate, result) in results.items():
        figures = result["figures"]
        difference = "-"
        if memory is not None and result is not memory:
            difference = format_mean(compare_chunks(result, memory), 4)
        lines.append(
            [
                name,
                "-" if rate is None else f"{rate:g}",
                f"{figures['parameters']:,}",
                f"{figures['perplexity']:.3f}",
                format_mean(compare_chunks(none, result), 4),
                difference,
                f"{figures['processor_seconds']:,.0f}",
                format_mean(mean_interval(figures["own_answers_kl"]), 4),
            ]
        )
    head = ["", "rate", "parameters", "perplexity", "gain, nats a token"]
    head += ["nats a token to Locas r=64", "processor time, s", "KL on own answers"]
    note = (
        f"The first {tokens:,} tokens of training book {SWEEP_BOOK}, on which each rate is chosen."
    )
    return f"{note}\n\n{make_table(head, lines)}"
