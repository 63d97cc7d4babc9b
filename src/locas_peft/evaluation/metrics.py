"""The measures as metrics of Hugging Face `evaluate`, around the package's plain functions.

They need no network: make them directly, not by `evaluate.load`. `evaluate.combine([Recall(), ExactMatch()])` computes
several at once. Importing this module imports `evaluate` and `datasets`, which takes seconds; both come with the
extra `eval`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean
from typing import Any

from ..asking import is_exact, is_right
from ..ttt.chunks import perplexity
from .extras import import_extra
from .f1 import CATEGORIES, answer_f1

evaluate, datasets = import_extra("evaluate"), import_extra("datasets")

__all__ = ["ExactMatch", "LocomoF1", "Perplexity", "Recall"]


class _Metric(evaluate.Metric):
    """A metric over pairs: `key` names it and its result, `columns` its inputs; the result is the mean `measure`."""

    key: str
    measure: Callable[[str, str], float]
    columns: dict[str, str] = {"predictions": "string", "references": "string"}

    def __init__(self, **options: Any):
        # The pairs of one process need no file.
        super().__init__(**{"keep_in_memory": options.get("num_process", 1) == 1, **options})

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        return {self.key: fmean(map(self.measure, predictions, references))}

    def _info(self) -> Any:
        text = type(self).__doc__ or ""
        return evaluate.MetricInfo(
            description=text,
            citation="Locas, arXiv:2602.05085",
            inputs_description=text,
            features=datasets.Features({name: datasets.Value(kind) for name, kind in self.columns.items()}),
            module_name=self.key,
        )


class Perplexity(_Metric):
    """exp(sum of nll / number of scored tokens) over the records of chunks, accumulated in float64.

    Predictions are the chunks' `nll_nats`, floats in nats; references are their numbers of scored `tokens`, ints.

    Example:
        >>> metric = Perplexity()
        >>> for chunk in trainer.read(ids):
        ...     metric.add(predictions=chunk.nll_nats, references=chunk.tokens)
        >>> metric.compute()
        {'perplexity': 46.2, 'scored_tokens': 29999}
    """

    key, columns = "perplexity", {"predictions": "float64", "references": "int64"}

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, float]:
        tokens = sum(references)
        return {"perplexity": perplexity(math.fsum(predictions), tokens), "scored_tokens": tokens}


class Recall(_Metric):
    """The share of answers in which the gold phrase occurs (see `asking.is_right`), 0 to 1.

    Predictions are answers, references are gold phrases; both are strings.
    """

    key, measure = "recall", staticmethod(is_right)


class ExactMatch(_Metric):
    """The share of answers that are the gold phrase and nothing else (see `asking.is_exact`), 0 to 1.

    Predictions are answers, references are gold phrases; both are strings.
    """

    key, measure = "exact_match", staticmethod(is_exact)


class LocomoF1(_Metric):
    """The mean token F1 of answers by the rules of LoCoMo's categories (see `f1.answer_f1`), -1 to 1, and by category.

    Predictions are answers, references are gold answers (in category 5 the traps), both strings; `categories` are
    LoCoMo's numbers, 1 to 5.
    """

    key, columns = "f1", {**_Metric.columns, "categories": "int64"}

    def _compute(self, predictions: list[str], references: list[str], categories: list[int]) -> dict[str, float]:
        scores = list(map(answer_f1, predictions, references, categories))
        named = {
            f"f1_{name}": fmean(score for score, own in zip(scores, categories, strict=True) if own == number)
            for number, name in CATEGORIES.items()
            if number in categories
        }
        return {"f1": fmean(scores), **named}
