"""The measures as `evaluate.Metric`s: `add_batch` and `compute`, at hand without the hub.

Each reports means with their 95% bootstrap intervals, as `intervals.Mean.to_json` has them.
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from .f1 import abstains, answer_f1
from .intervals import mean_interval
from .locomo import ADVERSARIAL, CATEGORIES

_LOCOMO_CITATION = "Maharana et al. (2024): Evaluating Very Long-Term Conversational Memory of LLM Agents. https://arxiv.org/abs/2402.17753"
_BLIMP_CITATION = (
    "Warstadt et al. (2020): BLiMP: The Benchmark of Linguistic Minimal Pairs for English. "
    "https://aclanthology.org/2020.tacl-1.25"
)


class _Metric(evaluate.Metric):
    """Keeps what it is given in memory, not in a file of the hub's cache."""

    _description = ""
    _citation = ""
    _inputs = ""
    _features: dict[str, str] = {}

    def __init__(self, **options: Any):
        super().__init__(**{"keep_in_memory": True, "seed": 0} | options)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self._description,
            citation=self._citation,
            inputs_description=self._inputs,
            features=datasets.Features({name: datasets.Value(kind) for name, kind in self._features.items()}),
        )


class LocomoF1(_Metric):
    """LoCoMo's answer F1 by category.

    `compute` returns a dictionary from category names ("multi-hop", ...) to means of F1; "adversarial" is the negative
    F1 with the trap, and "abstention" the share of those questions that were declined. "answerable" is the mean over
    the questions of categories 1 to 4.

    Example:
        >>> metric = LocomoF1()
        >>> metric.add_batch(predictions=["in May"], references=["7 May 2023"], categories=[2])
        >>> metric.compute()["temporal"]["mean"]
        0.4
    """

    _description = "Token F1 of LoCoMo answers, by category."
    _citation = _LOCOMO_CITATION
    _inputs = "predictions, references: texts; categories: 1 to 5 (references of 5 are the traps)."
    _features = {"predictions": "string", "references": "string", "categories": "int64"}

    def _compute(self, predictions: list[str], references: list[str], categories: list[int]) -> dict[str, Any]:
        rows = [(c, answer_f1(p, r, c), p) for p, r, c in zip(predictions, references, categories, strict=True)]
        result = {
            name: mean_interval([f1 for c, f1, _ in rows if c == category]).to_json()
            for category, name in CATEGORIES.items()
        }
        result["answerable"] = mean_interval([f1 for c, f1, _ in rows if c != ADVERSARIAL]).to_json()
        result["abstention"] = mean_interval([float(abstains(p)) for c, _, p in rows if c == ADVERSARIAL]).to_json()
        return {name: mean for name, mean in result.items() if mean["n"]}


class ClozeGain(_Metric):
    """Nats that a memory saves on spans, a token, over a reference: the base, or another conversation's memory.

    `compute` returns {"gain": mean}: the mean over spans of reference minus prediction.
    """

    _description = "Mean over spans of the reference's nll per token minus the memory's, in nats."
    _inputs = "predictions: nll per token with the memory; references: without it, or with a wrong one."
    _features = {"predictions": "float64", "references": "float64"}

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, Any]:
        gains = [reference - prediction for prediction, reference in zip(predictions, references, strict=True)]
        return {"gain": mean_interval(gains).to_json()}


class ShareFirst(_Metric):
    """The share of spans that come first among the others of their conversation.

    `compute` returns {"first": mean}; `references` are the lowest nll among the others, `predictions` the span's own.
    A draw is no win.
    """

    _description = "Share of spans whose nll per token is below that of every other span in their place."
    _inputs = "predictions: the span's nll per token; references: the lowest nll per token among the others."
    _features = {"predictions": "float64", "references": "float64"}

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, Any]:
        wins = [float(own < other) for own, other in zip(predictions, references, strict=True)]
        return {"first": mean_interval(wins).to_json()}


class MinimalPairs(_Metric):
    """The share of minimal pairs whose grammatical sentence is the likelier one.

    `compute` returns {"accuracy": mean}. A draw is no win.
    """

    _description = "Share of pairs whose grammatical sentence has the lower total nll."
    _citation = _BLIMP_CITATION
    _inputs = "predictions: nll of the grammatical sentences; references: of the ungrammatical ones."
    _features = {"predictions": "float64", "references": "float64"}

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, Any]:
        wins = [float(good < bad) for good, bad in zip(predictions, references, strict=True)]
        return {"accuracy": mean_interval(wins).to_json()}
