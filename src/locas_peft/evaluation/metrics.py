"""The measures as metrics of Hugging Face `evaluate`; made directly, not by `evaluate.load`, they need no network.

`evaluate.combine([Recall(), ExactMatch()])` computes several at once. The extra `eval` has `evaluate` and `datasets`.
"""

import math
from collections.abc import Callable
from statistics import fmean
from typing import Any

from ..asking.answers import is_exact, is_right
from ..checks import import_extra
from ..ttt.chunks import perplexity

evaluate, datasets = import_extra("evaluate"), import_extra("datasets")

__all__ = ["ExactMatch", "Perplexity", "Recall"]


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
        columns = datasets.Features({name: datasets.Value(kind) for name, kind in self.columns.items()})
        text, source = type(self).__doc__ or "", "Locas, arXiv:2602.05085"
        return evaluate.MetricInfo(text, source, columns, inputs_description=text, module_name=self.key)


class Perplexity(_Metric):
    """exp(sum of nll / number of scored tokens) over the records of chunks, accumulated in float64.

    Predictions are the chunks' `nll_nats`; references are their numbers of scored `tokens`.
    """

    key, columns = "perplexity", {"predictions": "float64", "references": "int64"}

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, float]:
        tokens = sum(references)
        return {"perplexity": perplexity(math.fsum(predictions), tokens), "scored_tokens": tokens}


class Recall(_Metric):
    """The share of answers (predictions) in which the gold phrase (reference) occurs (see `asking.is_right`)."""

    key, measure = "recall", staticmethod(is_right)


class ExactMatch(_Metric):
    """The share of answers (predictions) that are the gold phrase (reference) alone (see `asking.is_exact`)."""

    key, measure = "exact_match", staticmethod(is_exact)
